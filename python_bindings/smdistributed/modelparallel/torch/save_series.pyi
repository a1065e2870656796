import os
from collections.abc import Iterable, Mapping

from torch.optim import Optimizer

from smdistributed.modelparallel.torch.model import DistributedModel

class SaveSeries:
    def __init__(self, folder: str | os.PathLike[str], num_kept: int = 2, *, on_each_host: bool = False) -> None: ...
    def save(
        self,
        step: int,
        model: DistributedModel | Mapping[str, DistributedModel],
        user_content: Mapping[str, str] | None = None,
        *,
        optimizer: Optimizer | Mapping[str, Optimizer] | None = None,
        in_background: bool = False,
    ) -> None: ...
    def finish(self) -> None: ...
    def resume(
        self, model: DistributedModel | Mapping[str, DistributedModel], *, optimizer: Optimizer | Mapping[str, Optimizer] | None = None
    ) -> tuple[int, dict[str, str]] | None: ...
    @staticmethod
    def resume_newest(
        series: Iterable[SaveSeries],
        model: DistributedModel | Mapping[str, DistributedModel],
        *,
        optimizer: Optimizer | Mapping[str, Optimizer] | None = None,
    ) -> tuple[int, dict[str, str]] | None: ...
