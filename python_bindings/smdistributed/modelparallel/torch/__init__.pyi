from smdistributed.modelparallel.torch import amp as amp
from smdistributed.modelparallel.torch import model as model
from smdistributed.modelparallel.torch import optimizer as optimizer
from smdistributed.modelparallel.torch.comm import CommGroup as CommGroup
from smdistributed.modelparallel.torch.comm import RankType as RankType
from smdistributed.modelparallel.torch.comm import allgather as allgather
from smdistributed.modelparallel.torch.comm import barrier as barrier
from smdistributed.modelparallel.torch.comm import broadcast as broadcast
from smdistributed.modelparallel.torch.comm import dp_barrier as dp_barrier
from smdistributed.modelparallel.torch.comm import mp_barrier as mp_barrier
from smdistributed.modelparallel.torch.comm import pp_barrier as pp_barrier
from smdistributed.modelparallel.torch.comm import rdp_barrier as rdp_barrier
from smdistributed.modelparallel.torch.comm import recv_from as recv_from
from smdistributed.modelparallel.torch.comm import send as send
from smdistributed.modelparallel.torch.comm import tp_barrier as tp_barrier
from smdistributed.modelparallel.torch.delayed import delay_param_initialization as delay_param_initialization
from smdistributed.modelparallel.torch.delayed import initialize_parameters as initialize_parameters
from smdistributed.modelparallel.torch.doctor import doctor as doctor
from smdistributed.modelparallel.torch.job import init as init
from smdistributed.modelparallel.torch.job import EXIT_PREEMPTED as EXIT_PREEMPTED
from smdistributed.modelparallel.torch.job import shutdown as shutdown
from smdistributed.modelparallel.torch.job import stop_requested as stop_requested
from smdistributed.modelparallel.torch.model import DistributedModel as DistributedModel
from smdistributed.modelparallel.torch.optimizer import DistributedOptimizer as DistributedOptimizer
from smdistributed.modelparallel.torch.partition import partition as partition
from smdistributed.modelparallel.torch.partition import set_partition as set_partition
from smdistributed.modelparallel.torch.checkpoint import load as load
from smdistributed.modelparallel.torch.state_files import load_state as load_state
from smdistributed.modelparallel.torch.checkpoint import resume_from_checkpoint as resume_from_checkpoint
from smdistributed.modelparallel.torch.checkpoint import save as save
from smdistributed.modelparallel.torch.checkpoint import save_checkpoint as save_checkpoint
from smdistributed.modelparallel.torch.state_files import save_state as save_state
from smdistributed.modelparallel.torch.groups import get_dp_process_group as get_dp_process_group
from smdistributed.modelparallel.torch.groups import get_mp_process_group as get_mp_process_group
from smdistributed.modelparallel.torch.groups import get_pp_process_group as get_pp_process_group
from smdistributed.modelparallel.torch.groups import get_rdp_process_group as get_rdp_process_group
from smdistributed.modelparallel.torch.groups import get_tp_process_group as get_tp_process_group
from smdistributed.modelparallel.torch.groups import get_world_process_group as get_world_process_group
from smdistributed.modelparallel.torch.missing import model_creation as model_creation
from smdistributed.modelparallel.torch.recomputation import set_activation_checkpointing as set_activation_checkpointing
from smdistributed.modelparallel.torch.missing import set_tensor_parallelism as set_tensor_parallelism
from smdistributed.modelparallel.torch.missing import tensor_parallelism as tensor_parallelism
from smdistributed.modelparallel.torch.missing import tp_register as tp_register
from smdistributed.modelparallel.torch.missing import tp_register_with_module as tp_register_with_module
from smdistributed.modelparallel.torch.opaque import opaque as opaque
from smdistributed.modelparallel.torch.save_series import SaveSeries as SaveSeries
from smdistributed.modelparallel.torch.state_mod import is_tracing as is_tracing
from smdistributed.modelparallel.torch.state_mod import state as state
from smdistributed.modelparallel.torch.step import StepOutput as StepOutput
from smdistributed.modelparallel.torch.step import step as step
from smdistributed.modelparallel.torch.timeline import timeline as timeline

WORLD: CommGroup
MP_GROUP: CommGroup
DP_GROUP: CommGroup
PP_GROUP: CommGroup
TP_GROUP: CommGroup
RDP_GROUP: CommGroup
WORLD_RANK: RankType
MP_RANK: RankType
DP_RANK: RankType
PP_RANK: RankType
TP_RANK: RankType
RDP_RANK: RankType

def is_initialized() -> bool: ...
def rank() -> int: ...
def size() -> int: ...
def local_rank() -> int: ...
def local_size() -> int: ...
def pp_rank() -> int: ...
def pp_size() -> int: ...
def dp_rank() -> int: ...
def dp_size() -> int: ...
def mp_rank() -> int: ...
def mp_size() -> int: ...
def tp_rank() -> int: ...
def tp_size() -> int: ...
def rdp_rank() -> int: ...
def rdp_size() -> int: ...
def get_world_group() -> list[int]: ...
def get_pp_group() -> list[int]: ...
def get_dp_group() -> list[int]: ...
def get_mp_group() -> list[int]: ...
def get_tp_group() -> list[int]: ...
def get_rdp_group() -> list[int]: ...
