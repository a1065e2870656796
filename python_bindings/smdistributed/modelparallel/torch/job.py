"""Start and end of a job, and who this process is in it."""

import ast
import atexit
import faulthandler
import itertools
import json
import os
import signal
import sys
import traceback

from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from smdistributed.modelparallel import _engine
from smdistributed.modelparallel.torch import groups, ranks_of_accelerate, state_mod, workers


EXIT_PREEMPTED = 75  # of a job that has stopped as asked and is to be resumed


def init(config=None):
    """Joins the job that the launcher started, and fixes the configuration. First call of every script, on every rank.

    `config`: a dict of keys (docs/configuration.md), each overridden by the script's argument --mp_parameters key=value,key=value,
    by SMP_CONFIG and by SM_HP_MP_PARAMETERS. Raises ValueError, on every rank and before anything else happens, for a
    configuration with errors, all of them at once.

    Libraries may have made the first call when they were imported, as transformers does. A later one takes over the keys that it
    names and that have had no effect yet, as most until the first model is made; ValueError names the others that it would change.
    Collective where it changes any.

    A process that a rank has started by multiprocessing, as a DataLoader's workers, is no rank: there it does nothing.
    """
    if workers.is_one() or (_engine.is_initialized() and not _is_in_job()):
        workers.begin()
        return
    named = {**(config or {}), **_parameters_of(sys.argv[1:])}
    if _engine.is_initialized():
        had_groups = json.loads(_engine.config())["ddp"]
        _engine.init_again(json.dumps(named))
        state_mod.state.forget_cfg()
        if not had_groups:
            groups.join()
        return
    global _process
    if _process is None:
        sys.excepthook = _end_with(sys.excepthook)
    _process = os.getpid()
    _engine.init(json.dumps(named))
    # Where a rank hangs, the lines of the script say more than the interpreter's functions.
    _engine.answer_with_stack(lambda file: faulthandler.register(signal.SIGURG, file=file, all_threads=False))
    sys.exit = _noting_its_code(sys.exit)
    atexit.register(_leave)
    _tell_ranks_of_srun()
    ranks_of_accelerate.hide_stages()
    groups.join()
    workers.tell_them()


def _tell_ranks_of_srun():
    """As mpirun says it, for those that look: srun has no variables that accelerate or a script would know."""
    if "PMIX_RANK" in os.environ and "OMPI_COMM_WORLD_SIZE" not in os.environ and _engine.size() > 1:
        own = {"RANK": _engine.rank(), "SIZE": _engine.size(), "LOCAL_RANK": _engine.local_rank(), "LOCAL_SIZE": _engine.local_size()}
        os.environ.update({f"OMPI_COMM_WORLD_{name}": str(value) for name, value in own.items()})


def shutdown():
    """Leaves the job; collective. A script that ends does so by itself."""
    _engine.refuse_in_body("smp.shutdown")
    groups.leave()
    _engine.shutdown()
    workers.forget_them()


def stop_requested():
    """Has somebody asked for a stop, by SIGUSR1 to a rank or to mpirun, or by SIGTERM to `smp run`? Collective, with the same answer
    on all ranks: ask between steps, then save and leave by sys.exit(smp.EXIT_PREEMPTED)."""
    return _engine.stop_requested()


def _parameters_of(arguments):
    """The keys and values of --mp_parameters, which SageMaker gives to every script."""
    name = "--mp_parameters"
    texts = [each.removeprefix(f"{name}=") for each in arguments if each.startswith(f"{name}=")]
    texts += [text for option, text in itertools.pairwise(arguments) if option == name]
    parameters = {}
    for item in ",".join(texts).split(","):
        key, equals, value = item.strip().partition("=")
        if key and not equals:
            raise ValueError(f"{name}: expected key=value,key=value, got {item!r}.")
        if key:
            parameters[key] = _value_of(value)
    return parameters


def _value_of(text):
    try:
        return ast.literal_eval(text)  # 4, 0.5, True
    except (SyntaxError, ValueError):
        return {"true": True, "false": False}.get(text, text)


_exit_code = None  # of sys.exit, if that was called
_process = None  # that has called init: its forks are no ranks, and end without a word to the others


def _is_in_job():
    return _engine.is_initialized() and os.getpid() == _process


def _noting_its_code(leave):
    def noting(code=None):
        global _exit_code
        _exit_code = code
        leave(code)

    return noting


def _leave():
    if not _is_in_job():
        return
    if _exit_code and _exit_code != EXIT_PREEMPTED:  # the others may be in a step, and would wait for this rank
        _engine.report_failure(f"the script called sys.exit({_exit_code!r})", False, None)
        _end(_exit_code if isinstance(_exit_code, int) else 1)
    try:
        shutdown()
    except Exception:  # the end of a script has no caller
        sys.excepthook(*sys.exc_info())


def _end_with(previous):
    """The hook for an exception that nobody handles: its traceback, then the end of the job."""

    def hook(kind, error, trace):
        code = getattr(error, "_smp_exit_code", None)
        if not _is_in_job():
            previous(kind, error, trace)
            if code and os.getpid() == _process:
                raise SystemExit(code)  # the interpreter's own would be 1
            return
        is_of_other = isinstance(error, (_engine.AbortedError, _engine.PeerLostError))
        is_kept = is_of_other or isinstance(error, _engine.HangError)
        if not is_of_other and "TORCHELASTIC_ERROR_FILE" in os.environ:  # torchrun's summary shows the first
            try:
                raise error.with_traceback(trace)  # it records what is being handled
            except BaseException:
                get_error_handler().record_exception(error)
        if not is_of_other and previous is not sys.__excepthook__:
            previous(kind, error, trace)
        elif not is_of_other:  # in one call, so that no other rank's lines come between
            sys.stderr.write("".join(traceback.format_exception(kind, error, trace)))
        message = "".join(traceback.format_exception_only(kind, error)).strip()
        if isinstance(error, MemoryError):
            code = 8
        _end(_engine.report_failure(message, is_kept, code))

    return hook


def _end(code):
    """The others may be gone, so nothing collective may come after."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
