"""What SageMaker's launcher looks for in a traceback."""

import torch  # its libraries, before the extension that links them  # noqa: F401

from smdistributed.modelparallel._engine import AbortedError, CommError, HangError, PeerLostError

__all__ = ["AbortedError", "CommError", "HangError", "PeerLostError"]
