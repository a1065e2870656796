"""What the interfaces of Kubernetes that deploy/kubernetes uses have: the keys that we set, with their types, and those that must be
there. Facts of kubeflow.org/v2beta1 (mpi-operator), trainer.kubeflow.org/v1alpha1, batch.volcano.sh/v1alpha1 and core/v1; a key that
is not here is a misspelt one, or is added."""

TEXT, NUMBER, FLAG = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}
TEXTS = {"type": "array", "items": TEXT}


def one_of(*values):
    return {"enum": list(values)}


def a_list(items):
    return {"type": "array", "items": items, "minItems": 1}


def an_object(needed=(), **keys):
    return {"type": "object", "properties": keys, "required": list(needed), "additionalProperties": False}


QUANTITIES = an_object(cpu=NUMBER, memory={"type": "string", "pattern": r"^\d+(Mi|Gi)$"})
USER = an_object(runAsUser=NUMBER, runAsGroup=NUMBER, fsGroup=NUMBER)
CONTAINER = an_object(
    ("name", "image"),
    name=TEXT,
    image=TEXT,
    command=TEXTS,
    args=TEXTS,
    securityContext=USER,
    readinessProbe=an_object(tcpSocket=an_object(("port",), port=NUMBER)),
    resources=an_object(limits=QUANTITIES, requests=QUANTITIES),
    volumeMounts=a_list(an_object(("name", "mountPath"), name=TEXT, mountPath={"type": "string", "pattern": "^/"})),
)
VOLUME = an_object(
    ("name",),
    name=TEXT,
    emptyDir=an_object(medium=one_of("Memory")),
    persistentVolumeClaim=an_object(("claimName",), claimName=TEXT),
)
POD = an_object(
    ("spec",),
    spec=an_object(
        ("containers",),
        containers=a_list(CONTAINER),
        volumes=a_list(VOLUME),
        restartPolicy=one_of("Never", "OnFailure", "Always"),
        securityContext=USER,
    ),
)
REPLICAS = an_object(("replicas", "template"), replicas=NUMBER, template=POD)


def document(version, kind, spec):
    return an_object(("apiVersion", "kind", "metadata", "spec"), apiVersion=one_of(version), kind=one_of(kind),
                     metadata=an_object(("name",), name=TEXT), spec=spec)  # fmt: skip


TRAINER = "trainer.kubeflow.org/v1alpha1"
REPLICATED_JOB = an_object(
    ("name", "template"),
    name=TEXT,
    dependsOn=a_list(an_object(("name", "status"), name=TEXT, status=one_of("Ready", "Complete"))),
    template=an_object(
        ("spec",),
        metadata=an_object(labels={"type": "object", "additionalProperties": TEXT}),
        spec=an_object(("template",), template=POD),
    ),
)
SCHEMAS = {
    "PersistentVolumeClaim": document(
        "v1",
        "PersistentVolumeClaim",
        an_object(
            ("accessModes", "resources"),
            accessModes=a_list(one_of("ReadWriteOnce", "ReadWriteMany")),
            resources=an_object(("requests",), requests=an_object(("storage",), storage=TEXT)),
        ),
    ),
    "MPIJob": document(
        "kubeflow.org/v2beta1",
        "MPIJob",
        an_object(
            ("mpiReplicaSpecs",),
            slotsPerWorker=NUMBER,
            runPolicy=an_object(cleanPodPolicy=one_of("None", "Running", "All"), backoffLimit=NUMBER),
            sshAuthMountPath=TEXT,
            launcherCreationPolicy=one_of("AtStartup", "WaitForWorkersReady"),
            mpiReplicaSpecs=an_object(("Launcher", "Worker"), Launcher=REPLICAS, Worker=REPLICAS),
        ),
    ),
    "TrainJob": document(
        TRAINER,
        "TrainJob",
        an_object(
            ("runtimeRef",),
            runtimeRef=an_object(("name",), name=TEXT, apiGroup=TEXT, kind=one_of("TrainingRuntime", "ClusterTrainingRuntime")),
            trainer=an_object(
                image=TEXT, numNodes=NUMBER, numProcPerNode=NUMBER, command=TEXTS, args=TEXTS, resourcesPerNode=an_object(limits=QUANTITIES)
            ),
        ),
    ),
    "TrainingRuntime": document(
        TRAINER,
        "TrainingRuntime",
        an_object(
            ("mlPolicy", "template"),
            mlPolicy=an_object(
                numNodes=NUMBER,
                mpi=an_object(
                    numProcPerNode=NUMBER, mpiImplementation=one_of("OpenMPI"), sshAuthMountPath=TEXT, runLauncherAsNode=FLAG
                ),
            ),
            template=an_object(
                ("spec",),
                spec=an_object(
                    ("replicatedJobs",),
                    network=an_object(publishNotReadyAddresses=FLAG),
                    successPolicy=an_object(operator=one_of("All", "Any"), targetReplicatedJobs=TEXTS),
                    replicatedJobs=a_list(REPLICATED_JOB),
                ),
            ),
        ),
    ),
    "Job": document(
        "batch.volcano.sh/v1alpha1",
        "Job",
        an_object(
            ("tasks",),
            minAvailable=NUMBER,
            schedulerName=one_of("volcano"),
            maxRetry=NUMBER,
            plugins=an_object(mpi=TEXTS),
            tasks=a_list(
                an_object(
                    ("name", "replicas", "template"),
                    name=TEXT,
                    replicas=NUMBER,
                    policies=a_list(an_object(event=one_of("TaskCompleted"), action=one_of("CompleteJob"))),
                    template=POD,
                )
            ),
        ),
    ),
}
