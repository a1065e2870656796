"""In the place of torch.utils.checkpoint, for SageMaker's scripts."""

from smdistributed.modelparallel.torch.recomputation import checkpoint as checkpoint
from smdistributed.modelparallel.torch.recomputation import checkpoint_sequential as checkpoint_sequential
