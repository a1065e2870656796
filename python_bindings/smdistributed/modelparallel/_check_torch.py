"""Before the extension is loaded: what it takes from torch is of one minor version, and an undefined symbol in others."""

import torch

from smdistributed.modelparallel._built_with import TORCH


def _minor(version):
    return ".".join(version.split(".")[:2])


if _minor(torch.__version__) != _minor(TORCH):
    raise ImportError(
        f"smdistributed.modelparallel: expected torch {_minor(TORCH)}, for which it was built, got {torch.__version__}. Build it "
        f"for this one (pip install --force-reinstall --no-deps . in its source tree), or pip install torch=={_minor(TORCH)}.*"
    )
