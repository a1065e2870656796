"""Trains any PyTorch model across many processes.

    import smdistributed.modelparallel.torch as smp

    smp.init({"partitions": 2, "microbatches": 4})
    model = smp.DistributedModel(Net())
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters()))

    @smp.step
    def train_step(model, data, target):
        loss = F.nll_loss(model(data), target)
        model.backward(loss)
        return loss

    loss = train_step(model, data, target).reduce_mean()
    optimizer.step()
"""

import torch  # its libraries, before the extension that links them  # noqa: F401, I001
from smdistributed.modelparallel import _check_torch  # that they are those which it links  # noqa: F401
from smdistributed.modelparallel._engine import (
    dp_rank,
    dp_size,
    get_dp_group,
    get_mp_group,
    get_pp_group,
    get_rdp_group,
    get_tp_group,
    get_world_group,
    is_initialized,
    local_rank,
    local_size,
    mp_rank,
    mp_size,
    pp_rank,
    pp_size,
    rank,
    rdp_rank,
    rdp_size,
    size,
    tp_rank,
    tp_size,
)
from smdistributed.modelparallel.torch import amp, clipping, ghosts, missing, model, optimizer, patches
from smdistributed.modelparallel.torch.checkpoint import load, resume_from_checkpoint, save, save_checkpoint
from smdistributed.modelparallel.torch.comm import (
    CommGroup,
    RankType,
    allgather,
    barrier,
    broadcast,
    dp_barrier,
    mp_barrier,
    pp_barrier,
    rdp_barrier,
    recv_from,
    send,
    tp_barrier,
)
from smdistributed.modelparallel.torch.delayed import delay_param_initialization, initialize_parameters
from smdistributed.modelparallel.torch.doctor import doctor  # the function; the module stays importable, as below
from smdistributed.modelparallel.torch.groups import (
    get_dp_process_group,
    get_mp_process_group,
    get_pp_process_group,
    get_rdp_process_group,
    get_tp_process_group,
    get_world_process_group,
)
from smdistributed.modelparallel.torch.job import EXIT_PREEMPTED, init, shutdown, stop_requested
from smdistributed.modelparallel.torch.missing import (
    model_creation,
    set_tensor_parallelism,
    tensor_parallelism,
    tp_register,
    tp_register_with_module,
)
from smdistributed.modelparallel.torch.model import DistributedModel
from smdistributed.modelparallel.torch.opaque import opaque
from smdistributed.modelparallel.torch.optimizer import DistributedOptimizer
from smdistributed.modelparallel.torch.partition import partition, set_partition
from smdistributed.modelparallel.torch.recomputation import set_activation_checkpointing
from smdistributed.modelparallel.torch.save_series import SaveSeries
from smdistributed.modelparallel.torch.state_files import load_state, save_state
from smdistributed.modelparallel.torch.state_mod import is_tracing, state
from smdistributed.modelparallel.torch.step import StepOutput, step
from smdistributed.modelparallel.torch.timeline import timeline

WORLD = CommGroup.WORLD
MP_GROUP = CommGroup.MP_GROUP
DP_GROUP = CommGroup.DP_GROUP
PP_GROUP = CommGroup.PP_GROUP
TP_GROUP = CommGroup.TP_GROUP
RDP_GROUP = CommGroup.RDP_GROUP
WORLD_RANK = RankType.WORLD_RANK
MP_RANK = RankType.MP_RANK
DP_RANK = RankType.DP_RANK
PP_RANK = RankType.PP_RANK
TP_RANK = RankType.TP_RANK
RDP_RANK = RankType.RDP_RANK

missing.make_modules()
clipping.replace_torchs()
