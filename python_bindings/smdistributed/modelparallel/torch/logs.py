"""The log: what smp says while a job runs, through Python's logging, in the form of SageMaker's library."""

import json
import logging
import sys

from smdistributed.modelparallel import _engine

_FORM = "[%(asctime)s.%(msecs)03d: %(levelname).1s %(pathname)s:%(lineno)d] %(message)s"


class _Stderr(logging.StreamHandler):
    """What sys.stderr is at that moment, which notebooks and tests change; broken or None, it ends no job. A message is written
    by one call, so that those of several processes do not mix."""

    def __init__(self):
        logging.Handler.__init__(self)  # StreamHandler's would set the stream

    @property
    def stream(self):
        return sys.stderr


def _make_logger():
    logger = logging.getLogger("smdistributed.modelparallel")
    logger.setLevel(logging.INFO)  # the key log_level is the engine's to follow
    logger.propagate = False  # a script's basicConfig would print every line twice
    if not logger.handlers:
        handler = _Stderr()
        handler.setFormatter(logging.Formatter(_FORM, "%Y-%m-%d %H:%M:%S"))
        logger.addHandler(handler)
    return logger


_logger = _make_logger()


def _write(is_warning, message, file, line):
    level = logging.WARNING if is_warning else logging.INFO
    if _logger.isEnabledFor(level):
        _logger.handle(_logger.makeRecord(_logger.name, level, file, line, message, (), None))


_engine.set_log_sink(_write)


def info(message):
    """For those who read the lines of SageMaker's library; the engine says the rest. With log_level info only."""
    _say(message, False, ("info",))


def warning(message):
    _say(message, True, ("info", "warning"))


def say(message):
    """Where no configuration says who listens."""
    _write_from(sys._getframe(1), False, message)


def _say(message, is_warning, levels):
    if json.loads(_engine.config())["log_level"] in levels:
        _write_from(sys._getframe(2), is_warning, message)


def _write_from(caller, is_warning, message):
    folder, package, file = caller.f_code.co_filename.rpartition("smdistributed/")
    _write(is_warning, message, package + file, caller.f_lineno)


def partitioned(model):
    """At the first step of a model, when each rank has its share; rank 0 speaks."""
    if _engine.rank() != 0:
        return
    parameters = list(model.local_parameters())
    trained = sum(parameter.requires_grad for parameter in parameters)
    stage = _engine.pp_rank()
    info(f"Number of parameters on partition {stage} are {len(parameters)}. {trained} require grads")
    info("Finished partitioning the model")
    if _engine.dp_size() > 1:
        info(f"Broadcasted parameters and buffers for partition {stage}")
