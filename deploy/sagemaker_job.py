"""Starts a training job of SageMaker with smp in its image: the `distribution` that the estimator had for the library of SageMaker
stays as it is. The image is that of deploy/Dockerfile, with SageMaker's own toolkit, which starts mpirun:

    FROM smp
    USER root
    RUN pip install --no-cache-dir sagemaker-training mpi4py \\
     && ssh-keygen -A && rm /etc/ssh/ssh_config.d/smp.conf && mkdir -p /root/.ssh && ssh-keygen -q -t rsa -N '' -f /root/.ssh/id_rsa \\
     && cp /root/.ssh/id_rsa.pub /root/.ssh/authorized_keys && echo 'StrictHostKeyChecking no' > /root/.ssh/config

The toolkit starts sshd on each host as root; who has the image has these keys: keep it to yourself.

Usage: sagemaker_job.py IMAGE ROLE [--instances N] [--processes N] [--dry-run]
"""

import argparse
import json


def distribution(processes):
    """What the estimator hands to the job as SM_HP_MP_PARAMETERS, which smp.init() reads."""
    return {
        "smdistributed": {
            "modelparallel": {
                "enabled": True,
                "parameters": {"partitions": 2, "microbatches": 4, "ddp": True, "placement_strategy": "cluster"},
            }
        },
        "mpi": {"enabled": True, "processes_per_host": processes},
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("image")
    parser.add_argument("role")
    parser.add_argument("--instances", type=int, default=2)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args()
    arguments = {
        "image_uri": options.image,
        "role": options.role,
        "entry_point": "train.py",
        "instance_count": options.instances,
        "instance_type": "ml.c5.4xlarge",
        "distribution": distribution(options.processes),
    }
    if options.dry_run:
        print(json.dumps(arguments, indent=2))
        return
    from sagemaker.pytorch import PyTorch  # pip install "sagemaker<3"; Estimator itself passes over `distribution`

    PyTorch(**arguments).fit()


if __name__ == "__main__":
    main()
