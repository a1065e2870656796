"""Checks the arrows between floors and between rooms, and other rules of the house that grep can see.

Prints `file:line: floor may not include X` (or the rule that is broken) for each violation, and exits
with 1 if there is one. It reads text only: what the compiler sees through macros, it does not see.
"""

import graphlib
import pathlib
import re
import sys

# Which folders of ours each floor may include; a longer prefix wins over a shorter one. Floor 2 sees
# the types of floor 1, never its algorithms: it gets tables, callbacks and programs from above.
ALL_FLOORS = ("partitioner/", "runtime/", "smp/")
# What a language sees of the engine: the bindings of Python these, the C++ API also how files are read and written.
SEAM_HEADERS = tuple(f"smp/engine/{name}.h" for name in ("engine", "model_view", "optimizer_view", "opaque_table", "save_series"))
SEAM = (*SEAM_HEADERS, "smp/engine/files/")
MAY_INCLUDE = {
    "partitioner": ("partitioner/",),
    "runtime": (
        "runtime/",
        "partitioner/graph/gradient_flow.h",  # what a backward passes through
        "partitioner/graph/graph.h",
        "partitioner/graph/graph_io.h",  # equality and hash of graphs
        "partitioner/graph/operator_traits.h",  # one table for the planner, capture and tapes
        "partitioner/graph/tensor_bytes.h",  # what a geometry takes, checked
        "partitioner/graph/untaped.h",  # one answer for the planner and the recorder
        "partitioner/plan/home.h",  # where tensors live
        "partitioner/plan/message_rules.h",  # what the planner counts on
        "partitioner/plan/plan.h",
        "partitioner/report/timeline.h",  # the spans that it records
        "partitioner/plan/action.h",
        "partitioner/schedule/schedule.h",
    ),
    "public header": ("smp/",),
    "smp": (
        "smp/",
        "runtime/exchange/wire.h",  # bytes of a Serialiser
        "runtime/device/device.h",  # the bytes of a tensor in a file
        "partitioner/graph/tensor_bytes.h",  # what a geometry in a file takes, checked
    ),
    "engine": ALL_FLOORS,
    "tools": ALL_FLOORS + ("tools/",),
    "python_bindings": ("smp/", "python_bindings/", "runtime/transport/error.h"),  # failures of others keep their type
    "examples": ("smp/", "examples/"),
    "benchmarks": ALL_FLOORS + ("tools/", "tests/support/", "benchmarks/", "examples/"),
    "tests": ALL_FLOORS + ("tools/", "tests/", "examples/"),
}
# Which rooms (folders) of its floor each room may include. The headers directly in smp/engine are the seam.
ROOMS = {
    "partitioner/graph": (),
    "partitioner/cost": ("graph",),
    "partitioner/plan": ("graph", "cost"),
    "partitioner/schedule": ("graph", "plan"),
    "partitioner/memory": ("graph", "cost", "plan", "schedule"),
    "partitioner/partition": ("graph", "cost", "plan", "schedule", "memory"),
    "partitioner/report": ("graph", "plan", "schedule"),
    "runtime/device": (),
    "runtime/device/cuda": ("device",),
    "runtime/libtorch": ("device",),
    "runtime/launch": (),
    "runtime/watch": (),
    "runtime/kernels/cpu": (),
    "runtime/capture": ("device", "libtorch", "capture/meta"),
    "runtime/capture/meta": ("device", "libtorch"),
    "runtime/delayed": ("device", "libtorch", "capture", "capture/meta"),
    "runtime/stage": ("device", "libtorch", "kernels/cpu", "capture"),
    "runtime/transport": ("device", "launch", "watch"),
    "runtime/exchange": ("device", "launch", "watch", "libtorch", "transport"),
    "runtime/placement": ("device", "libtorch", "capture", "transport", "exchange"),
    "runtime/gradients": ("device", "libtorch", "capture", "transport", "exchange", "placement"),
    "runtime/executor": ("device", "libtorch", "stage", "transport", "exchange"),
    "smp/engine/seam": ("context",),
    "smp/engine/files": (),
    "smp/engine/config": ("files",),
    "smp/engine/context": (),
    "smp/engine/groups": ("context",),
    "smp/engine/models": ("seam", "context"),
    "smp/engine/programs": ("seam", "context", "models"),
    "smp/engine/timeline": ("context", "files", "programs"),
    "smp/engine/rank": ("context", "models", "programs", "timeline"),
    "smp/engine/optimizers": ("seam", "context", "models", "rank"),
    "smp/engine/replicas": ("seam", "context", "models", "rank", "optimizers"),
    "smp/engine/arguments": ("context",),
    "smp/engine/planning": ("context", "files", "rank", "arguments"),
    "smp/engine/step": ("seam", "context", "models", "programs", "rank", "optimizers", "replicas", "arguments", "planning"),
    "smp/engine/checkpoint": ("seam", "context", "files", "rank", "optimizers"),
    "smp/engine/calls": ("seam", "config", "context", "groups", "timeline", "rank", "optimizers", "step", "checkpoint"),
}
ONLY_PUBLIC_SMP = ("public header", "examples")
LIBRARY = ("partitioner", "runtime", "public header", "smp", "engine")
OF_NO_LANGUAGE = ("partitioner", "runtime", "engine")
CXX_HEADERS = re.compile(r"smp/(serialiser|fields|comm|step|step_arguments|step_results|distributed_\w+|opaque|smp)\.h")
BEHIND_CXX_HEADER = {"smp/engine/groups/comm.cpp": "smp/comm.h"}  # its functions; they use its Writer and Reader too
OF_A_LANGUAGE = re.compile(r"torch/(csrc/api/include/torch/)?(nn|optim)\b")
DECLARES_A_LANGUAGE = re.compile(r"\bnamespace\s+torch\s*::\s*(nn|optim)\b|\btorch::(nn|optim)::")
PARTITIONER_THIRD_PARTY = ("c10/core/ScalarType.h", "c10/util/Exception.h")
ONE_FILE_EACH = {"<mpi.h>": r"^mpi\.h$", "<nccl.h>": r"^nccl\.h$"}
CUDA = re.compile(r"^(cuda|c10/cuda|ATen/cuda)\b")
OF_CUDA = ("runtime/device/cuda/", "tests/fake_cuda/")
# Tests of real processes, which read MPI's settings from outside; what takes the place of NCCL.
OF_TESTS_ALONE = ("tests/mpi/", "tests/fake_cuda/")
READS_ENVIRONMENT = re.compile(r"\b(?:secure_)?getenv\s*\(|\benviron\b")
ENVIRONMENT_FILES = re.compile(r"^(smp/engine/config|runtime/launch)/")
MAY_READ_ENVIRONMENT = ("tools", "tests", "benchmarks")
MAX_LINES = 400
CODE = (".h", ".cpp")
COUNTED = CODE + (".py", ".cmake", ".txt")
INCLUDE = re.compile(r'^\s*#\s*include\s*(["<])([^">]+)[">]')
COMMENT_OR_STRING = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.DOTALL)


def floor_of(path):
    """The floor that owns `path`; public headers are smp/*.h but for views, which the engine is given."""
    top = path.split("/")[0]
    if path.startswith("smp/engine/"):
        return "engine"
    if top == "smp" and path.endswith(".h") and not path.endswith("_view.h"):
        return "public header"
    return top


def room_of(path):
    """The folder; what a language sees of the engine is a room of its own."""
    return "smp/engine/seam" if path in SEAM_HEADERS else path.rpartition("/")[0]


def house_of(room):
    """What the names of rooms are relative to."""
    return "smp/engine" if room.startswith("smp/engine") else room.partition("/")[0]


def unit_of(path):
    """A header and its source are one unit; a public header is one without the source behind it."""
    return path if floor_of(path) == "public header" else path.rpartition(".")[0]


def may_include_ours(floor, path, included):
    if floor == "tests" and re.fullmatch(r"\w+\.inc", included):
        return True  # the code blocks of a page, which the build writes
    if not included.startswith(MAY_INCLUDE[floor]):
        return False
    if floor == "engine" and CXX_HEADERS.fullmatch(included) and BEHIND_CXX_HEADER.get(path) != included:
        return False  # types and templates of C++, which another language does not have
    if floor == "python_bindings" and included.startswith("smp/engine/"):
        return included in SEAM_HEADERS
    if floor == "smp" and included.startswith("smp/engine/"):
        return included.startswith(SEAM)
    return not (floor in ONLY_PUBLIC_SMP and included.startswith("smp/engine/"))


def may_include_foreign(floor, path, included):
    if included == "torch/torch.h":
        return floor not in LIBRARY
    if floor in OF_NO_LANGUAGE and OF_A_LANGUAGE.match(included):
        return False
    if floor != "partitioner" or "/" not in included and not included.endswith(".h"):
        return True  # every standard header is a bare word
    if included.startswith("boost/json"):
        return pathlib.PurePath(path).stem.endswith("_io")
    return included in PARTITIONER_THIRD_PARTY


def blank(match):
    """Comments and strings become blanks of as many lines; include paths are read before."""
    return re.sub(r"[^\n]", " ", match.group())


class Checker:
    def __init__(self, root):
        self.root = pathlib.Path(root)
        self.violations = []
        self.includers = {what: [] for what in ONE_FILE_EACH}
        self.units = {}  # those that each unit includes

    def report(self, path, line, text):
        self.violations.append(f"{path}:{line}: {text}")

    def check_include(self, path, line, quote, included):
        floor = floor_of(path)
        ours = quote == '"' or included.split("/")[0] in MAY_INCLUDE
        allowed = (may_include_ours(floor, path, included) if ours
                   else may_include_foreign(floor, path, included))
        if not allowed:
            self.report(path, line, f"{floor} may not include {included}")
        if ours:
            self.units.setdefault(unit_of(path), set()).add(unit_of(included))
            self.check_room(path, line, included)
        if CUDA.match(included) and not path.startswith(OF_CUDA):
            self.report(path, line, f"CUDA may be included in {' and '.join(OF_CUDA)} only")
        for what, pattern in ONE_FILE_EACH.items():
            if re.match(pattern, included) and not path.startswith(OF_TESTS_ALONE):
                self.includers[what].append((path, line))

    def check_room(self, path, line, included):
        room, other = room_of(path), room_of(included)
        if room in ROOMS and other != room and house_of(room) == house_of(other):
            if other.removeprefix(house_of(room) + "/") not in ROOMS[room]:
                self.report(path, line, f"{room} may not include {other}")

    def check_cycles(self):
        graphlib.TopologicalSorter({room: {f"{house_of(room)}/{other}" for other in others}
                                    for room, others in ROOMS.items()}).prepare()
        units = {unit: others - {unit} for unit, others in self.units.items()}
        try:
            graphlib.TopologicalSorter(units).prepare()
        except graphlib.CycleError as error:
            units = error.args[1][::-1]
            self.report(units[0], 1, "include cycle: " + " > ".join(units))

    def check_code(self, path, text):
        for number, line in enumerate(text.splitlines(), 1):
            if include := INCLUDE.match(line):
                self.check_include(path, number, *include.groups())
        reads_environment = floor_of(path) in MAY_READ_ENVIRONMENT or ENVIRONMENT_FILES.match(path)
        for number, line in enumerate(COMMENT_OR_STRING.sub(blank, text).splitlines(), 1):
            if floor_of(path) in OF_NO_LANGUAGE and DECLARES_A_LANGUAGE.search(line):
                self.report(path, number, f"{floor_of(path)} knows neither torch::nn nor torch::optim")
            if not reads_environment and READS_ENVIRONMENT.search(line):
                self.report(path, number, "only smp/engine/config and runtime/launch may read the environment")

    def check_file(self, path, text):
        in_house = path.startswith(("partitioner/", "runtime/", "smp/engine/")) and path.endswith(CODE)
        if in_house and room_of(path) not in ROOMS:
            self.report(path, 1, f"{room_of(path)} is not among the rooms of tests/arrows/check_arrows.py")
        num_lines = len(text.splitlines())
        if num_lines > MAX_LINES:
            self.report(path, MAX_LINES + 1, f"a file may not exceed {MAX_LINES} lines, this has {num_lines}")
        if path.endswith(CODE):
            self.check_code(path, text)

    def run(self):
        num_files = 0
        for top in [*MAY_INCLUDE, "cmake"]:
            for file in sorted((self.root / top).rglob("*")):
                if file.suffix in COUNTED and file.is_file():
                    num_files += 1
                    self.check_file(file.relative_to(self.root).as_posix(), file.read_text())
        self.check_cycles()
        for what, places in self.includers.items():
            for path, line in places if len({path for path, _ in places}) > 1 else []:
                self.report(path, line, f"{what} may be included in one file only")
        return num_files


def main():
    checker = Checker(sys.argv[1])
    num_files = checker.run()
    print(*checker.violations, sep="\n")
    print(f"{len(checker.violations)} violations in {num_files} files")
    if num_files == 0:
        sys.exit(f"expected a tree with {', '.join(MAY_INCLUDE)}; found no file under {sys.argv[1]}")
    sys.exit(1 if checker.violations else 0)


if __name__ == "__main__":
    main()
