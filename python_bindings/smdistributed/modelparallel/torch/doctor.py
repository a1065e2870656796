"""smp.doctor: what a job runs on, for people who wonder whether it is as they think, and for reports of errors."""

import ctypes
import importlib.metadata
import json
import os
import platform
import socket
import statistics
import time

import torch

from smdistributed.modelparallel import __version__, _built_with, _engine
from smdistributed.modelparallel.torch.comm import RankType, barrier, gathered

_SMALL, _LARGE = 8, 4 << 20  # bytes
_ROUNDS = {_SMALL: 50, _LARGE: 5}


class Report:
    """What doctor() found. Prints as text. `ranks`: a dict for each rank of the world; `config`: keys that differ from their
    defaults, with both; `links`: a dict for each pair of neighbouring ranks; `warnings`: sentences."""

    def __init__(self, ranks, config, links):
        self.ranks = ranks
        self.config = config
        self.links = links
        self.warnings = _warnings_of(ranks)

    def __str__(self):
        first = self.ranks[0]
        lines = [f"{name}: {version}" for name, version in first["versions"].items()]
        lines += [f"messages: {first['messages']}"]
        by_host = {}
        for rank in self.ranks:
            by_host.setdefault(rank["host"], []).append(rank)
        for host, ranks in by_host.items():
            numbers = ", ".join(str(rank["rank"]) for rank in ranks)
            lines.append(f"host {host}: rank {numbers}; {_cores(ranks)} cores, {ranks[0]['threads']} threads in each rank")
        lines += [f"{key}: {value} (default {default})" for key, (value, default) in self.config.items()]
        for link in self.links:
            first, second = link["ranks"]
            lines.append(
                f"between ranks {first} and {second}: {link['latency_us']:.0f} us for an object of {_SMALL} bytes, "
                f"{link['bytes_per_s'] / 2**30:.2f} GiB/s for one of {_LARGE >> 20} MiB"
            )
        lines += [f"warning: {each}" for each in self.warnings] or ["no warnings"]
        return "\n".join(lines)

    __repr__ = __str__


def doctor():
    """Prints on rank 0, and returns on every rank, what the job runs on: versions, hosts, cores, the configuration that differs
    from the defaults, how fast objects travel between neighbouring ranks, and what is likely to be wrong. Collective over all
    ranks, outside of steps."""
    _engine.refuse_in_body("smp.doctor")
    ranks = gathered("doctor", _this_rank())
    config, defaults = json.loads(_engine.config()), json.loads(_engine.default_config())
    differing = {key: (value, defaults[key]) for key, value in config.items() if value != defaults[key]}
    report = Report(ranks, differing, _measure_links())
    if _engine.rank() == 0:
        print(report, flush=True)
    return report


def _this_rank():
    return {
        "rank": _engine.rank(),
        "host": socket.gethostname(),
        "cores": sorted(os.sched_getaffinity(0)),  # that this process may use: one of them where MPI binds ranks
        "threads": torch.get_num_threads(),
        "messages": "none" if _engine.size() == 1 else "MPI" if "OMPI_COMM_WORLD_SIZE" in os.environ else "sockets",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"),
        "OMPI_MCA_btl": os.environ.get("OMPI_MCA_btl"),
        "versions": {
            "smp": __version__,
            "torch": torch.__version__,
            "torch it was built with": _built_with.TORCH,
            "Python": platform.python_version(),
            "MPI": _mpi_version(),
            "transformers": _version_of("transformers"),
        },
    }


def _version_of(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _mpi_version():
    """Of the library that the extension is linked with, which knows its symbol."""
    extension = ctypes.CDLL(_engine.__file__)
    if not hasattr(extension, "MPI_Get_library_version"):
        return "none"
    text, length = ctypes.create_string_buffer(8192), ctypes.c_int()
    extension.MPI_Get_library_version(text, ctypes.byref(length))
    return text.value.decode().split(",")[0]


def _measure_links():
    """One pair after the other, so that they do not share what they run on."""
    own = []
    for first in range(_engine.size() - 1):
        barrier()
        if _engine.rank() in (first, first + 1):
            seconds = {size: _one_way_s(bytes(size), first) for size in (_SMALL, _LARGE)}
            if _engine.rank() == first:
                speed = _LARGE / seconds[_LARGE]
                own.append({"ranks": (first, first + 1), "latency_us": seconds[_SMALL] * 1e6, "bytes_per_s": speed})
    return sum(gathered("doctor", own), [])


def _one_way_s(content, first):
    """Half of the median round trip between `first` and the next rank, as smp.send and smp.recv_from move objects."""
    seconds = []
    for _ in range(_ROUNDS[len(content)]):
        start = time.perf_counter()
        if _engine.rank() == first:
            _engine.send(content, first + 1, RankType.WORLD_RANK)
            _engine.recv_from(first + 1, RankType.WORLD_RANK)
        else:
            _engine.recv_from(first, RankType.WORLD_RANK)
            _engine.send(content, first, RankType.WORLD_RANK)
        seconds.append((time.perf_counter() - start) / 2)
    return statistics.median(seconds)


def _cores(ranks):
    """How many these have together."""
    return len(set().union(*(rank["cores"] for rank in ranks)))


def _warnings_of(ranks):
    warnings = []
    versions = ranks[0]["versions"]
    for rank in ranks[1:]:
        for name, version in rank["versions"].items():
            if version != versions[name]:
                warnings.append(
                    f"rank {rank['rank']} on {rank['host']} has {name} {version}, rank 0 has {versions[name]}. Install the "
                    "same on all hosts."
                )
    if versions["torch"].split("+")[0] != versions["torch it was built with"].split("+")[0]:
        warnings.append(
            f"smp was built with torch {versions['torch it was built with']} and runs with {versions['torch']}. Build it again "
            "for the torch that is installed (docs/python.md)."
        )
    if ranks[0]["messages"] == "sockets":
        warnings.append("messages go through sockets, on one host too. Start by smp run or mpirun for shared memory.")
    hosts = {rank["host"]: [each for each in ranks if each["host"] == rank["host"]] for rank in ranks}
    for host, there in hosts.items():
        threads, cores = sum(rank["threads"] for rank in there), _cores(there)
        if threads > cores:
            warnings.append(
                f"{len(there)} ranks on {host} run {threads} threads on {cores} cores, so they wait for each other. Start "
                "fewer ranks, or lower the key threads."
            )
        if len(there) > 1 and any(rank["OMP_NUM_THREADS"] is None for rank in there):
            warnings.append(
                f"OMP_NUM_THREADS is not set for the {len(there)} ranks on {host}. The key threads is smp's own; numpy and "
                "others start a thread per core in each rank. Set it to 1, or start by smp run."
            )
        btl = there[0]["OMPI_MCA_btl"]
        if len(there) > 1 and btl is not None and not {"vader", "sm"} & set(btl.split(",")) and not btl.startswith("^"):
            warnings.append(f"OMPI_MCA_btl={btl} on {host}: ranks of one host talk by TCP. Add vader, their shared memory.")
    if len(hosts) > 1 and ranks[0]["messages"] == "MPI" and ranks[0]["OMPI_MCA_btl"] in (None, "self,vader,tcp"):
        warnings.append(
            f"messages between the {len(hosts)} hosts go by TCP. Where there is a faster network, name its component in "
            "OMPI_MCA_btl."
        )
    return warnings
