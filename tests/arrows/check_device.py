"""Checks that the library reaches a device through runtime/device only, but for the exceptions below.

Prints `file:line: X only in runtime/device: ...` for each place that does not, and each exception that no
place needs any more, and exits with 1 if there is one. Like check_arrows it reads text.
"""

import pathlib
import re
import sys

from check_arrows import CODE, COMMENT_OR_STRING, blank

LIBRARY = ("partitioner", "runtime", "smp")
# The seam, and kernels that are of one kind of device by their nature.
OF_A_DEVICE = ("runtime/device/", "runtime/kernels/cpu/")
FACTORY = "(?:empty|empty_strided|zeros|ones|full|arange|tensor|scalar_tensor|rand|randn)"
# What is said in place of each.
FORBIDDEN = {
    r"kCPU|is_cpu|(?:DispatchKey|DeviceType)::CPU": "host() or this_ranks_device() says which device is meant",
    r"kCUDA|is_cuda|(?:DispatchKey|DeviceType)::CUDA": "host() or this_ranks_device() says which device is meant",
    # Without a device: no options at all, or nothing but a dtype.
    r"(?:TensorOptions(?=\(\))|(?:at|torch|c10)::dtype)": "TensorOptions(host().type) or Device::empty",
    rf"at::{FACTORY}(?=\((?:\{{[^{{}}]*\}}|.*, at::k[A-Z]\w+)\))": "options of host() or this_ranks_device()",
    r"Auto(?:cast|grad)(?:CPU|CUDA)": "Device::autocast and Device::autograd",
    r"\w*(?:CPU|CUDA)Generator\w*": "Device::default_generator and Device::new_generator",
    r"GetCPUAllocator|empty_cpu": "Device::allocate and Device::empty",
    r"memcpy|memcmp|memmove": "Device::copy, set_bytes and bytes_of",
    r"_?(?:const_|mutable_)?data_ptr(?:_no_checks)?": "data_of, memory_of and bytes_of",
    r"\w*[sS]torage\w*(?:\([^()]*\))?(?:\.|->)(?:mutable_)?data": "data_of and bytes_of of a storage",
    r"(?:packed_)?accessor(?:32|64)?": "data_of",
    r"from_blob": "tensor_on",
    r"steady_clock|high_resolution_clock": "Device::now_ns",
}
FORBIDDEN = {re.compile(rf"\b({pattern})\b"): instead for pattern, instead in FORBIDDEN.items()}
HOST_MEMORY = "memory of the host, which is all that it moves: it refuses that of others"
HOW_FREED = "who frees the memory, not where it is"
TIME_LIMIT = "how long a rank waits for others, not what its device does"
# file -> token -> why it may.
EXCEPTIONS = {
    "runtime/capture/constants.cpp": {"_mutable_data_ptr_no_checks": HOW_FREED},
    "runtime/exchange/wire.h": {"memcpy": "numbers in the bytes of a message"},
    "runtime/libtorch/unmade.cpp": {"_mutable_data_ptr_no_checks": HOW_FREED},
    "runtime/transport/backoff.h": {"steady_clock": TIME_LIMIT},
    "runtime/transport/loopback_hub.cpp": {"steady_clock": TIME_LIMIT},
    "runtime/transport/socket_engine.cpp": {"memcpy": HOST_MEMORY, "steady_clock": TIME_LIMIT},
    "runtime/transport/socket_link.cpp": {"memcpy": HOST_MEMORY},
    "runtime/transport/socket_rendezvous.cpp": {"memcpy": "an address", "steady_clock": TIME_LIMIT},
    "runtime/transport/world_watch.cpp": {"memcpy": "the text of a notice"},
    "runtime/transport/world_watch.h": {"steady_clock": TIME_LIMIT},
    "runtime/watch/alarm.cpp": {"steady_clock": TIME_LIMIT},
    "runtime/watch/wait_limit.h": {"steady_clock": TIME_LIMIT},
}


def tokens_in(text):
    """(line, token, what is said in its place)"""
    for number, line in enumerate(COMMENT_OR_STRING.sub(blank, text).splitlines(), 1):
        for pattern, instead in FORBIDDEN.items():
            for match in pattern.finditer(line):
                yield number, match.group(1), instead


def violations_in(root, exceptions):
    root = pathlib.Path(root)
    violations, unused = [], {(path, token) for path, tokens in exceptions.items() for token in tokens}
    num_files = 0
    for file in sorted(file for top in LIBRARY for file in (root / top).rglob("*")):
        path = file.relative_to(root).as_posix()
        if file.suffix not in CODE or path.startswith(OF_A_DEVICE):
            continue
        num_files += 1
        for number, token, instead in tokens_in(file.read_text()):
            unused.discard((path, token))
            if token not in exceptions.get(path, ()):
                violations.append(f"{path}:{number}: {token} only in runtime/device: {instead}")
    violations += [f"{path}:1: {token} is an exception of tests/arrows/check_device.py that nothing needs" for path, token in sorted(unused)]
    return violations, num_files


def main():
    violations, num_files = violations_in(sys.argv[1], EXCEPTIONS)
    print(*violations, sep="\n")
    print(f"{len(violations)} violations in {num_files} files")
    if num_files == 0:
        sys.exit(f"expected a tree with {', '.join(LIBRARY)}; found no file under {sys.argv[1]}")
    sys.exit(1 if violations else 0)


if __name__ == "__main__":
    main()
