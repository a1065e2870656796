"""Imported by scripts that never call it."""

from smdistributed.modelparallel.torch.missing import dump_model, verify

__all__ = ["dump_model", "verify"]
