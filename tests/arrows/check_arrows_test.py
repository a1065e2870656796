"""Plants one violation of each rule in a small tree and sees check_arrows find exactly that one. The picture of the rooms in
docs/architecture.md has the arrows that check_arrows allows."""

import pathlib
import re
import tempfile
import unittest

from check_arrows import ROOMS, Checker, house_of

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs/architecture.md"
MAX_LINES = 400  # said again here: a changed limit must be meant

# A tree that keeps every rule, with the cases that come closest to breaking one.
CLEAN = {
    "partitioner/graph/graph.h": "#include <c10/core/ScalarType.h>\n#include <vector>\n",
    "partitioner/graph/graph_io.cpp": '#include <boost/json.hpp>\n#include "partitioner/graph/graph.h"\n',
    "partitioner/plan/plan.h": '#include "partitioner/graph/graph.h"\n',
    "partitioner/partition/partition.h": '#include "partitioner/plan/plan.h"\n',
    "runtime/stage/stage.h": '#include <ATen/core/Tensor.h>\n#include "partitioner/plan/plan.h"\n',
    "runtime/transport/mpi.cpp": "#include <mpi.h>\n",
    "runtime/launch/launch.cpp": 'auto rank = std::getenv("RANK");\n',
    "smp/engine/config/config.cpp": 'auto text = std::getenv("SMP_CONFIG");\n',
    "smp/step.h": '#include <ATen/core/Tensor.h>\n#include "smp/config.h"\n// getenv("X") is text here\n',
    "smp/engine/step/step_on_rank.h": '#include "partitioner/partition/partition.h"\n#include "runtime/stage/stage.h"\n',
    "smp/engine/models/models.h": '#include "smp/engine/model_view.h"\n',
    "smp/engine/groups/comm.cpp": '#include "smp/comm.h"\n',
    "smp/step.cpp": '#include "smp/engine/engine.h"\n',
    "smp/safetensors.cpp": '#include "smp/engine/files/input_file.h"\n',
    "smp/module_view.h": '#include "smp/engine/model_view.h"\nnamespace torch::nn {}\n',
    "smp/module_view.cpp": '#include "smp/module_view.h"\n#include <torch/nn/module.h>\n',
    "examples/lm.cpp": '#include <torch/torch.h>\n#include "smp/smp.h"\n',
    "tests/support/parts.h": '#include "tests/support/zoo.h"\n',
    "tests/unit/x_test.cpp": '#include "runtime/stage/stage.h"\nauto x = getenv("X");\n',
    "tests/docs/page.cpp": '#include "page_blocks.inc"\n',
    "tools/long.cpp": "\n" * MAX_LINES,
}

# (file, text to append, line that must be reported)
PLANTED = [
    ("partitioner/partition/partition.h", '#include "runtime/stage/stage.h"\n',
     "partitioner/partition/partition.h:2: partitioner may not include runtime/stage/stage.h"),
    ("partitioner/partition/partition.h", '#include "smp/config.h"\n',
     "partitioner/partition/partition.h:2: partitioner may not include smp/config.h"),
    ("partitioner/partition/partition.h", "#include <ATen/core/Tensor.h>\n",
     "partitioner/partition/partition.h:2: partitioner may not include ATen/core/Tensor.h"),
    ("partitioner/partition/partition.h", "#include <boost/json.hpp>\n",
     "partitioner/partition/partition.h:2: partitioner may not include boost/json.hpp"),
    ("partitioner/partition/partition.h", "#include <unistd.h>\n",
     "partitioner/partition/partition.h:2: partitioner may not include unistd.h"),
    ("partitioner/partition/partition.h", '#include "plan.h"\n',
     "partitioner/partition/partition.h:2: partitioner may not include plan.h"),
    ("runtime/stage/stage.h", '#include "partitioner/partition/partition.h"\n',
     "runtime/stage/stage.h:3: runtime may not include partitioner/partition/partition.h"),
    ("partitioner/plan/plan.h", '#include "partitioner/partition/pins.h"\n',
     "partitioner/plan/plan.h:2: partitioner/plan may not include partitioner/partition"),
    ("smp/engine/models/models.h", '#include "smp/engine/step/leader.h"\n',
     "smp/engine/models/models.h:2: smp/engine/models may not include smp/engine/step"),
    ("smp/engine/job.cpp", "", "smp/engine/job.cpp:1: smp/engine is not among the rooms of tests/arrows/check_arrows.py"),
    ("partitioner/graph/graph.h", '#include "partitioner/graph/graph_io.h"\n',
     "partitioner/graph/graph:1: include cycle: partitioner/graph/graph > partitioner/graph/graph_io > partitioner/graph/graph"),
    ("tests/support/zoo.h", '#include "tests/support/zoo.h"\n#include "tests/support/parts.h"\n',
     "tests/support/parts:1: include cycle: tests/support/parts > tests/support/zoo > tests/support/parts"),
    ("runtime/loose.h", "#include <vector>\n", "runtime/loose.h:1: runtime is not among the rooms of tests/arrows/check_arrows.py"),
    ("runtime/stage/stage.h", '#include "smp/config.h"\n',
     "runtime/stage/stage.h:3: runtime may not include smp/config.h"),
    ("runtime/stage/stage.h", "#include <torch/torch.h>\n",
     "runtime/stage/stage.h:3: runtime may not include torch/torch.h"),
    ("smp/step.h", '#include "smp/engine/step/step_on_rank.h"\n',
     "smp/step.h:4: public header may not include smp/engine/step/step_on_rank.h"),
    ("smp/step.h", '#include "runtime/stage/stage.h"\n',
     "smp/step.h:4: public header may not include runtime/stage/stage.h"),
    ("smp/step.h", "#include <partitioner/plan/plan.h>\n",
     "smp/step.h:4: public header may not include partitioner/plan/plan.h"),
    ("smp/step.cpp", '#include "smp/engine/step/step_on_rank.h"\n',
     "smp/step.cpp:2: smp may not include smp/engine/step/step_on_rank.h"),
    ("smp/step.cpp", '#include "smp/engine/context/log.h"\n',
     "smp/step.cpp:2: smp may not include smp/engine/context/log.h"),
    ("smp/step.cpp", '#include "runtime/stage/stage.h"\n',
     "smp/step.cpp:2: smp may not include runtime/stage/stage.h"),
    ("smp/engine/step/step_on_rank.h", "#include <torch/nn/module.h>\n",
     "smp/engine/step/step_on_rank.h:3: engine may not include torch/nn/module.h"),
    ("smp/engine/step/step_on_rank.h", "#include <torch/optim/sgd.h>\n",
     "smp/engine/step/step_on_rank.h:3: engine may not include torch/optim/sgd.h"),
    ("smp/engine/step/step_on_rank.h", "namespace torch::optim {\nclass Optimizer;\n}\n",
     "smp/engine/step/step_on_rank.h:3: engine knows neither torch::nn nor torch::optim"),
    ("smp/engine/step/step_on_rank.h", '#include "smp/step_arguments.h"\n',
     "smp/engine/step/step_on_rank.h:3: engine may not include smp/step_arguments.h"),
    ("smp/engine/step/step_on_rank.h", '#include "smp/comm.h"\n',
     "smp/engine/step/step_on_rank.h:3: engine may not include smp/comm.h"),
    ("runtime/stage/stage.h", "#include <torch/nn/module.h>\n",
     "runtime/stage/stage.h:3: runtime may not include torch/nn/module.h"),
    ("runtime/stage/stage.h", "auto x = torch::optim::SGDOptions(1);\n",
     "runtime/stage/stage.h:3: runtime knows neither torch::nn nor torch::optim"),
    ("smp/step.cpp", '#include "tests/support/oracle.h"\n',
     "smp/step.cpp:2: smp may not include tests/support/oracle.h"),
    ("smp/step.cpp", '#include "table.inc"\n', "smp/step.cpp:2: smp may not include table.inc"),
    ("smp/step.cpp", "#include <torch/torch.h>\n", "smp/step.cpp:2: smp may not include torch/torch.h"),
    ("examples/lm.cpp", '#include "smp/engine/step/step_on_rank.h"\n',
     "examples/lm.cpp:3: examples may not include smp/engine/step/step_on_rank.h"),
    ("examples/lm.cpp", '#include "runtime/stage/stage.h"\n',
     "examples/lm.cpp:3: examples may not include runtime/stage/stage.h"),
    ("tests/unit/x_test.cpp", "#include <mpi.h>\n",
     "tests/unit/x_test.cpp:3: <mpi.h> may be included in one file only"),
    ("runtime/stage/stage.cpp", "#include <c10/cuda/CUDAStream.h>\n",
     "runtime/stage/stage.cpp:1: CUDA may be included in runtime/device/cuda/ and tests/fake_cuda/ only"),
    ("smp/step.cpp", '/* two\nlines */ auto x = std::getenv("X");\n',
     "smp/step.cpp:3: only smp/engine/config and runtime/launch may read the environment"),
    ("tools/long.cpp", "\n",
     f"tools/long.cpp:{MAX_LINES + 1}: a file may not exceed {MAX_LINES} lines, this has {MAX_LINES + 1}"),
]


def drawn_arrows(picture):
    """What stands right of ">" for each room left of it. A room goes by one word of its path, its house by the line above."""
    arrows, house = {room: set() for room in ROOMS}, None
    for line in picture.splitlines():
        if title := re.search(r"(?:^| )(smp/engine|runtime|partitioner)/ ", line):
            house = title[1]
        of_house = [room for room in ROOMS if house_of(room) == house]
        for chain in re.split(r"\s{2,}", line.strip(" |\\/")) if ">" in line else ():
            groups = [[min((room for room in of_house if name in room.split("/")), key=len) for name in names.split(", ")]
                      for names in chain.split(" > ")]
            for above, below in zip(groups, groups[1:]):
                for room in above:
                    arrows[room].update(below)
    return arrows


def all_arrows(arrows):
    """One for each room and each that it stands on, directly or not."""
    found = {room: set(others) for room, others in arrows.items()}
    for middle in found:
        for others in found.values():
            if middle in others:
                others |= found[middle]
    return {f"{room} > {other}" for room, others in found.items() for other in others}


class CheckArrows(unittest.TestCase):
    def violations_in(self, files):
        with tempfile.TemporaryDirectory() as root:
            for name, text in files.items():
                path = pathlib.Path(root, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
            checker = Checker(root)
            checker.run()
            return checker.violations

    def test_clean_tree_has_no_violation(self):
        self.assertEqual(self.violations_in(CLEAN), [])

    def test_picture_has_the_arrows_of_the_rooms(self):
        picture = re.search(r"^```text\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)[1]
        allowed = {room: {f"{house_of(room)}/{other}" for other in others} for room, others in ROOMS.items()}
        self.assertEqual(all_arrows(drawn_arrows(picture)), all_arrows(allowed))

    def test_each_planted_violation_is_found(self):
        for file, text, expected in PLANTED:
            with self.subTest(expected):
                found = self.violations_in({**CLEAN, file: CLEAN.get(file, "") + text})
                self.assertIn(expected, found)
                if "one file only" not in expected:  # that rule reports every includer
                    self.assertEqual(found, [expected])


if __name__ == "__main__":
    unittest.main()
