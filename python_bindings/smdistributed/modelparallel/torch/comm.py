"""Objects between ranks, outside of steps. They travel pickled, between processes of one job."""

import pickle

import torch  # noqa: F401

from smdistributed.modelparallel import _engine
from smdistributed.modelparallel._engine import CommGroup, RankType


def send(obj, dest_rank, rank_type):
    """Gives `obj` to another rank, and returns when that has called recv_from."""
    _engine.send(pickle.dumps(obj), dest_rank, rank_type)


def recv_from(src_rank, rank_type):
    """The next object that `src_rank` sends or broadcasts to this rank."""
    return pickle.loads(_engine.recv_from(src_rank, rank_type))


def broadcast(obj, group):
    """Gives `obj` to all other members of the group, which call recv_from, and returns when they have."""
    _engine.broadcast(pickle.dumps(obj), group)


def allgather(obj, group):
    """The objects of all members, by rank of the group. Collective over the group."""
    return gathered("", obj, group)


def gathered(call, obj, group=CommGroup.WORLD):
    """The same, as a part of `call`, which errors name."""
    try:
        return [pickle.loads(each) for each in _engine.allgather(pickle.dumps(obj), group, call)]
    except ValueError as error:
        raise ValueError(str(error).replace("smp.allgather", call or "smp.allgather")) from None


def barrier(group=CommGroup.WORLD):
    """Returns when every rank of the group has called it."""
    _engine.barrier(group)


def mp_barrier():
    barrier(CommGroup.MP_GROUP)


def dp_barrier():
    barrier(CommGroup.DP_GROUP)


def pp_barrier():
    barrier(CommGroup.PP_GROUP)


def tp_barrier():
    barrier(CommGroup.TP_GROUP)


def rdp_barrier():
    barrier(CommGroup.RDP_GROUP)


__all__ = ["CommGroup", "RankType", "allgather", "barrier", "broadcast", "recv_from", "send"]
