"""As SageMaker's library has it: smp.patches.checkpoint."""

from smdistributed.modelparallel.torch.patches import checkpoint as checkpoint
