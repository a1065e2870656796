"""python -m smdistributed.modelparallel.cpu script.py args...: runs a CUDA script on a machine without GPUs.

What asks for a CUDA device gets the CPU, what steers one does nothing, and what measures one says 0 (docs/python_cpu.md). With a
GPU at hand the script runs as it is.
"""

import copyreg
import inspect
import os
import runpy
import sys
import time

import torch
from torch.overrides import TorchFunctionMode

from smdistributed.modelparallel import _engine

_Device = torch.device
_Generator = torch.Generator


def _on_cpu(value):
    """`value` with "cuda:1" and torch.device("cuda", 1) as the CPU; other values are themselves."""
    if isinstance(value, str) and (value == "cuda" or value.startswith("cuda:")):
        return "cpu"
    if isinstance(value, _Device) and value.type == "cuda":
        return _Device("cpu")
    return value


def _location_on_cpu(where):
    """Of tensors in a file: by default that which they were saved from, by a dict that of another GPU."""
    return "cpu" if where is None or isinstance(where, dict) else _on_cpu(where)


def _device_on_cpu(value):
    """The same where a device is expected, so that an index is one of CUDA."""
    return "cpu" if type(value) is int else _on_cpu(value)


def _keywords_on_cpu(kwargs):
    return {name: (_device_on_cpu if name == "device" else _on_cpu)(value) for name, value in kwargs.items()}


class _Devices(type):
    def __instancecheck__(cls, value):
        return isinstance(value, _Device)


class _MappedDevice(metaclass=_Devices):
    """In place of torch.device, of which there are no subclasses."""

    def __new__(cls, type=None, index=None, *, device=None):  # noqa: A002
        kind = device if type is None else type
        mapped = _device_on_cpu(kind)
        return _Device(mapped) if mapped is not kind or index is None else _Device(kind, index)


# Devices are pickled by the name torch.device, which is that of the class above.
_MappedDevice.__module__, _MappedDevice.__qualname__ = "torch", "device"
copyreg.pickle(_Device, lambda device: (_MappedDevice, (str(device),)))


class _Generators(type):
    def __instancecheck__(cls, value):
        return isinstance(value, _Generator)


class _MappedGenerator(metaclass=_Generators):
    """In place of torch.Generator."""

    def __new__(cls, device="cpu"):
        return _Generator(_device_on_cpu(device))


class _Mapping(TorchFunctionMode):
    """Every call of torch: its devices, and the few functions whose meaning is CUDA."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = _keywords_on_cpu(kwargs or {})
        if function in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        if function is torch.Tensor.to and len(args) > 1:
            args = (args[0], _device_on_cpu(args[1]), *args[2:])
        if function is torch.Tensor.type:
            if len(args) == 1 and not kwargs:
                return function(*args).replace("torch.", "torch.cuda.", 1)
            args = (args[0], _tensor_type_on_cpu(args[1]), *args[2:])
        kwargs.pop("pin_memory", None)  # only a transfer to a GPU would use it
        return function(*(_on_cpu(value) for value in args), **kwargs)


def _tensor_type_on_cpu(kind):
    if isinstance(kind, str):
        return kind.replace("torch.cuda.", "torch.")
    return getattr(kind, "dtype", kind)


def _default_type_on_cpu(kind):
    if isinstance(kind, _TensorTypes):
        return torch.zeros((), dtype=kind.dtype).type().replace("torch.cuda.", "torch.")
    return _tensor_type_on_cpu(kind) if isinstance(kind, str) else kind


class _TensorTypes(type):
    def __instancecheck__(cls, value):
        return isinstance(value, torch.Tensor) and value.dtype == cls.dtype


def _tensor_type(dtype):
    """torch.cuda.HalfTensor and its like: constructors, and classes of tensors of that dtype."""

    def make(cls, *args):
        if len(args) == 1 and not isinstance(args[0], (int, torch.Size)):
            return torch.tensor(args[0], dtype=dtype)
        return torch.empty(*args or (0,), dtype=dtype)

    return _TensorTypes("Tensor", (), {"dtype": dtype, "__new__": make})


class _Event:
    """Everything before it has been done when it is recorded."""

    def __init__(self, *args, **kwargs):
        self._seconds = None

    def record(self, stream=None):
        self._seconds = time.perf_counter()

    def elapsed_time(self, other):
        return (other._seconds - self._seconds) * 1e3

    def query(self):
        return True

    def synchronize(self):
        pass

    def wait(self, stream=None):
        pass


def _memory_bytes(pages):
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf(pages)


class _Properties:
    """Of the one device that there is."""

    name = "CPU"
    major = minor = 0
    multi_processor_count = os.cpu_count()

    @property
    def total_memory(self):
        return _memory_bytes("SC_PHYS_PAGES")


class _Stream:
    """The one order in which everything runs."""

    device = _Device("cpu")

    def __init__(self, *args, **kwargs):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return False

    def record_event(self, event=None):
        event = event or _Event()
        event.record()
        return event

    def query(self):
        return True

    def wait_stream(self, stream):
        pass

    wait_event = wait_stream

    def synchronize(self):
        pass


def _is_available():
    """Scripts that refuse to start without CUDA start; torch itself is told the truth, or it would use it."""
    return not _is_torch(sys._getframe(1))


def _device_count():
    return 0 if _is_torch(sys._getframe(1)) else int(_processes_here())


def _processes_here():
    return str(_engine.launched_local_size())


def _is_torch(frame):
    return frame.f_globals.get("__name__", "").split(".")[0] == "torch"


def map_cuda():
    """From now on, in this thread; once."""
    cuda = torch.cuda
    cuda.is_available = _is_available
    cuda.is_initialized = lambda: False
    cuda.current_device = lambda: 0
    cuda.device_count = _device_count
    cuda.get_device_name = lambda device=None: "CPU"
    cuda.get_device_capability = lambda device=None: (0, 0)
    cuda.get_device_properties = lambda device=None: _Properties()
    cuda.mem_get_info = lambda device=None: (_memory_bytes("SC_AVPHYS_PAGES"), _memory_bytes("SC_PHYS_PAGES"))
    cuda.is_current_stream_capturing = lambda: False
    for name in (
        "set_device", "synchronize", "empty_cache", "ipc_collect", "init", "manual_seed", "manual_seed_all",
        "set_per_process_memory_fraction",
    ):  # fmt: skip
        setattr(cuda, name, lambda *args, **kwargs: None)
    for name in dir(cuda):
        if name.startswith("reset_") and ("memory" in name):
            setattr(cuda, name, lambda *args, **kwargs: None)
        elif name in ("memory_allocated", "memory_reserved", "memory_cached") or name.startswith("max_memory_"):
            setattr(cuda, name, lambda *args, **kwargs: 0)
    cuda.memory_stats = lambda *args, **kwargs: {}
    cuda.memory_summary = lambda *args, **kwargs: ""
    cuda.Event, cuda.Stream = _Event, _Stream
    cuda.stream = lambda stream: stream if stream is not None else _Stream()
    cuda.device = lambda device: _Stream()
    cuda.current_stream = cuda.default_stream = lambda device=None: _Stream()
    types = {"Half": torch.half, "BFloat16": torch.bfloat16, "Float": torch.float, "Double": torch.double, "Byte": torch.uint8}
    types |= {"Char": torch.int8, "Short": torch.int16, "Int": torch.int32, "Long": torch.int64, "Bool": torch.bool}
    for name, dtype in types.items():
        setattr(cuda, f"{name}Tensor", _tensor_type(dtype))

    # The one generator that there is.
    cuda.get_rng_state = cuda.random.get_rng_state = lambda device=None: torch.get_rng_state()
    cuda.set_rng_state = cuda.random.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    cuda.get_rng_state_all = cuda.random.get_rng_state_all = lambda: [torch.get_rng_state()]
    cuda.set_rng_state_all = cuda.random.set_rng_state_all = lambda states: torch.set_rng_state(states[0])
    cuda.initial_seed = torch.initial_seed
    fork = torch.random.fork_rng
    torch.random.fork_rng = lambda devices=None, *args, **kwargs: fork((), *args, **kwargs)

    torch.device, torch.Generator = _MappedDevice, _MappedGenerator
    torch.nn.Module.cuda = lambda self, device=None: self
    torch.Tensor.record_stream = lambda self, stream: None
    to = torch.nn.Module.to
    torch.nn.Module.to = lambda self, *args, **kwargs: to(self, *map(_device_on_cpu, args), **_keywords_on_cpu(kwargs))
    _map_argument(torch.autocast, "__init__", "device_type")
    for name in ("custom_fwd", "custom_bwd"):
        _map_argument(torch.amp, name, "device_type")
    torch.is_autocast_enabled = _of_autocast(torch.is_autocast_enabled)  # without an argument of CUDA
    torch.get_autocast_dtype = _of_autocast(torch.get_autocast_dtype)
    torch.get_autocast_gpu_dtype = torch.get_autocast_dtype
    _map_argument(torch.amp.GradScaler, "__init__", "device")
    _map_argument(torch, "load", "map_location", _location_on_cpu)
    _map_argument(torch, "set_default_tensor_type", "t", _default_type_on_cpu)
    _map_argument(torch.distributed, "init_process_group", "backend", lambda name: "gloo" if name in (None, "nccl") else name)
    for module in (torch.autograd, torch.autograd.graph):  # each has the function under its own name
        module._engine_run_backward = _mapping_within(module._engine_run_backward)
    _Mapping().__enter__()


def _of_autocast(ask):
    return lambda device_type="cuda": ask(_on_cpu(device_type))


def _mapping_within(run_backward):
    """A mode is off while torch runs the function that it was asked about, here with backwards and hooks of the script."""

    def run(*args, **kwargs):
        with _Mapping():
            return run_backward(*args, **kwargs)

    return run


def _map_argument(owner, name, argument, mapped=_on_cpu):
    """The first argument beside self, or the keyword of that name, or its default."""
    plain = getattr(owner, name)
    default = inspect.signature(plain).parameters[argument].default
    first = 1 if isinstance(owner, type) or name == "load" else 0

    def mapping(*args, **kwargs):
        if argument in kwargs:
            kwargs[argument] = mapped(kwargs[argument])
        elif len(args) > first:
            args = (*args[:first], mapped(args[first]), *args[first + 1 :])
        elif default is not inspect.Parameter.empty:
            kwargs[argument] = mapped(default)
        return plain(*args, **kwargs)

    setattr(owner, name, mapping)


def _sagemaker_folders():
    """Scripts read these as os.environ[...] before anything else."""
    here = os.getcwd()
    for name, value in {
        "SM_NUM_GPUS": _processes_here(),
        "SM_CURRENT_HOST": "algo-1",
        "SM_MODULE_DIR": here,
        "SM_OUTPUT_DATA_DIR": os.path.join(here, "output"),
        "SM_MODEL_DIR": os.path.join(here, "model"),
        "SM_CHANNEL_TRAIN": os.path.join(here, "train"),
        "SM_CHANNEL_TEST": os.path.join(here, "test"),
    }.items():
        os.environ.setdefault(name, value)


def _run():
    if len(sys.argv) < 2:
        sys.exit("python -m smdistributed.modelparallel.cpu: expected a script, got nothing. Give its path, then its arguments.")
    if not torch.cuda.is_available():
        map_cuda()
    _sagemaker_folders()
    del sys.argv[0]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    from smdistributed.modelparallel import cpu  # __main__ will be the script, and torch.compile looks here for what is mapped

    cpu._run()
