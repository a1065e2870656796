"""Groups of ranks as torch.distributed's process groups, for its collectives beside smp's."""

import datetime
import json
import socket

import torch.distributed as dist

from smdistributed.modelparallel import _engine
from smdistributed.modelparallel.torch import logs
from smdistributed.modelparallel.torch.comm import CommGroup, gathered

_KINDS = {
    CommGroup.WORLD: _engine.get_world_group,
    CommGroup.MP_GROUP: _engine.get_mp_group,
    CommGroup.DP_GROUP: _engine.get_dp_group,
    CommGroup.PP_GROUP: _engine.get_pp_group,
    CommGroup.TP_GROUP: _engine.get_tp_group,
    CommGroup.RDP_GROUP: _engine.get_rdp_group,
}
_made = {}  # of this rank, by kind
_store = None  # where ranks met, if smp initialised torch.distributed


def get_world_process_group():
    """My group of that kind. With the key ddp, smp.init has made all of them; else the first of these calls does: collective
    over all ranks. With gloo, where the script has not initialised torch.distributed."""
    return _group(CommGroup.WORLD)


def get_mp_process_group():
    return _group(CommGroup.MP_GROUP)


def get_dp_process_group():
    return _group(CommGroup.DP_GROUP)


def get_pp_process_group():
    return _group(CommGroup.PP_GROUP)


def get_tp_process_group():
    return _group(CommGroup.TP_GROUP)


def get_rdp_process_group():
    return _group(CommGroup.RDP_GROUP)


def join():
    """At the end of smp.init: with the key ddp, what uses torch.distributed finds it initialised. Collective over all ranks."""
    config = json.loads(_engine.config())
    if config["ddp"] and config["parallelism"] == "auto":  # the first step says who is in which group
        _join_torch()
    elif config["ddp"] and not _made:
        _make()


def leave():
    """Ends what smp has initialised. A script's own initialisation stays."""
    global _store
    if _store is not None and dist.is_initialized():
        dist.destroy_process_group()
    _store = None
    _made.clear()


def _group(kind):
    if not _made:
        _make()
    return _made[kind]


def _make():
    _join_torch()
    lists = {kind: tuple(ranks()) for kind, ranks in _KINDS.items()}
    everyones = set().union(*gathered("process groups", list(lists.values())))
    groups = {members: dist.new_group(list(members)) for members in sorted(everyones)}
    _made.update({kind: groups[members] for kind, members in lists.items()})
    logs.info(
        f"[{_engine.rank()}] Finished initializing torch distributed process groups. pp_rank: {_engine.pp_rank()}, "
        f"tp_rank: {_engine.tp_rank()}, dp_rank: {_engine.dp_rank()}, rdp_rank: {_engine.rdp_rank()}"
    )


def _join_torch():
    own = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else None
    found = gathered("process groups", own)
    if found == [None] * len(found):
        _initialise()
    elif found != [(rank, len(found)) for rank in range(len(found))]:
        raise RuntimeError(
            "process groups: expected torch.distributed to be initialised on no rank, or on all with smp's ranks, got "
            f"{found} as (rank, size) by smp.rank(). Leave it to smp, or call init_process_group(rank=smp.rank(), "
            "world_size=smp.size())."
        )


def _initialise():
    """Through a store on rank 0, at the key ddp_port. Sockets may be refused there: all ranks are told."""
    global _store
    config = json.loads(_engine.config())
    timeout = datetime.timedelta(seconds=config["timeout_s"])
    host = "127.0.0.1" if _engine.local_size() == _engine.size() else socket.gethostname()
    port, error = config["ddp_port"], ""  # 0: the system chooses one
    if _engine.rank() == 0:
        try:
            _store = dist.TCPStore(host, port, _engine.size(), is_master=True, timeout=timeout, wait_for_workers=False)
            port = _store.port
        except Exception as failure:
            error = str(failure)
    host, port, error = gathered("process groups", (host, port, error))[0]
    if error:
        raise RuntimeError(
            f"process groups: expected rank 0 to open a socket at {host}:{port}, got: {error}. Where the key ddp_port names "
            "a port that is taken, name another, or none."
        )
    if _engine.rank() != 0:
        _store = dist.TCPStore(host, port, _engine.size(), is_master=False, timeout=timeout)
    dist.init_process_group("gloo", store=_store, rank=_engine.rank(), world_size=_engine.size(), timeout=timeout)
