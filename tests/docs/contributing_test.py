"""CONTRIBUTING.md leads to the right files: some changes, and what whoever makes each has to touch.

  contributing_test.py SOURCE_DIR

For each task the row of the table names the file, and the file holds what is to be changed. All other paths of the page are there
as well.
"""

import pathlib
import re
import sys

# The task as the table names it, and (file, what is changed there), written down by reading the code.
TASKS = {
    "a meta kernel where LibTorch's gives a wrong shape": [
        ("runtime/capture/meta/meta_kernels_call.cpp", "void call_on_meta("),
        ("runtime/capture/meta/meta_kernels.cpp", "OverPythonsKernels::OverPythonsKernels()")],
    "a meta kernel": [("runtime/capture/meta/meta_kernels_index.cpp", 'table.add("index_select"'),
                      ("tests/unit/runtime/capture/meta/meta_kernels_indexing_test.cpp", "index_select")],
    "a schedule": [("partitioner/plan/schedule_options.h", "enum class ScheduleKind"),
                   ("partitioner/plan/schedule_options.h", "kLastScheduleKind"),
                   ("partitioner/schedule/generate.cpp", "looped_columns(")],
    "a schedule for users to choose": [("smp/config.h", "enum class Pipeline"),
                                       ("smp/engine/config/config_table.cpp", '{"interleaved", "simple"}'),
                                       ("smp/engine/programs/programs.cpp", "ScheduleKind schedule_kind(")],
    "a new kind of action": [("partitioner/plan/action.h", "action_rows() {"),
                             ("runtime/executor/executor.cpp", "case ActionKind::kWeightGradient")],
    "a new kind of action that computes": [("runtime/stage/stage.h", "class Stage"),
                                           ("partitioner/memory/rank_memory.cpp", "ActionKind::"),
                                           ("partitioner/partition/predict_step.cpp", "weight_us")],
    "a configuration key": [("smp/config.h", "struct Config {"),
                            ("smp/engine/config/config_table.cpp", "std::vector<Key> make_keys()"),
                            ("smp/engine/config/config_table.h", "using Field ="),
                            ("docs/configuration.md", "### Keys that steer smp")],
    "a transport": [("runtime/transport/transport.h", "class Transport "),
                    ("runtime/launch/launch.h", "enum class Kind"),
                    ("tests/unit/runtime/transport/transport_contract.cpp", "std::vector<int> contract_worlds()"),
                    ("tests/unit/runtime/transport/transport_contract.cpp", "void TransportContract::run("),
                    ("runtime/transport/world.cpp", "join_world(const Launch")],
    "a kind of device": [("runtime/device/device.h", "class Device"), ("runtime/device/cpu.cpp", "this_ranks_device"),
                         ("tests/unit/runtime/device/device_test.cpp", "TEST(")],
    "an operator's cost": [("partitioner/cost/operator_table.cpp", "const OperatorRow kRows[]"),
                           ("partitioner/cost/operator_formulas.cpp", "double product_flops("),
                           ("tests/unit/partitioner/cost/costs_test.cpp", "TEST(")],
    "what an operator does that its schema does not say": [
        ("partitioner/graph/operator_traits.cpp", "Traits> kTraits = {"),
        ("partitioner/graph/operator_traits.h", "enum class Trait"),
        ("tests/unit/partitioner/graph/operator_traits_test.cpp", "TEST(")],
    "a refusal": [("runtime/capture/places.cpp", "the shape of its result depends on data"),
                  ("docs/refusals.md", "the shape of its result depends on data"),
                  ("tests/promises.md", "## Refused")],
    "a field of saved state": [("smp/state_dict.h", "struct StateDict {"),
                               ("smp/engine/checkpoint/model_state.cpp", "StateDict without_tensors("),
                               ("smp/engine/checkpoint/model_state.cpp", "offered(const StateDict& state"),
                               ("smp/engine/checkpoint/model_state.cpp", "void ModelLoad::apply()"),
                               ("smp/engine/checkpoint/state_format.cpp", "Safetensors states_to_file(")],
    "a message or a file of a new form": [("tests/support/runtime_decoders.cpp", "runtime_decoders()"),
                                          ("tests/support/library_decoders.cpp", "library_decoders()")],
    "a report": [("partitioner/report/partition_table.cpp", "std::string partition_table("),
                 ("smp/engine/models/models.cpp", "partition_table("),
                 ("smp/engine/calls/engine.cpp", "plan_text("),
                 ("smp/engine/timeline/step_timeline.cpp", "timeline_svg(")],
    "what replicas do with gradients": [("smp/hooks.h", "CommHook"),
                                        ("smp/engine/calls/engine.cpp", "register_comm_hook("),
                                        ("runtime/gradients/sum_by_hook.cpp", "hook_("),
                                        ("tests/unit/smp/data_parallel_test.cpp", "TEST")],
    "a way to sum gradients over replicas": [("runtime/gradients/bucket_sum.h", "class BucketSum"),
                                             ("runtime/gradients/sum_by_messages.cpp", ": public BucketSum"),
                                             ("runtime/gradients/gradient_reducer.cpp", "::new_sum("),
                                             ("tests/unit/runtime/gradients/gradient_reducer_test.cpp", "TEST")],
    "a hook around steps": [("smp/engine/context/hooks.h", "enum class Moment"),
               ("smp/distributed_model.h", "HookHandle register_step_pre_hook("),
               ("smp/engine/step/step_call.cpp", "Moment::kBeforeStep"),
               ("smp/engine/context/hooks.cpp", "void Hooks::step_ends("),
               ("smp/engine/calls/engine.cpp", "HookHandle add_hook("),
               ("smp/engine/step/step_rounds.cpp", "Moment::kBeforePartition"),
               ("tests/unit/smp/hooks_test.cpp", "TEST")],
    "something that Python can call": [("python_bindings/extension/module.cpp", "module.def("),
                                       ("python_bindings/smdistributed/modelparallel/torch/__init__.py", "import"),
                                       ("tests/python/step_test.py", "def test_")],
    "a benchmark": [("benchmarks/CMakeLists.txt", "smp_add_benchmark("), ("benchmarks/CMakeLists.txt", "MEASURES"),
                    ("benchmarks/measure.h", "void report("), ("benchmarks/measure.h", "void require(")],
    "a test": [("tests/support/smp_ranks.h", "run_smp_ranks"), ("tests/support/loopback_world.h", "run_ranks")],
    "a test of real processes": [("tests/mpi/CMakeLists.txt", "RANKS"), ("tests/mpi/worlds.py", "class WorldTestCase")],
}
PATH = re.compile(r"`([\w.*-]+(?:/[\w.*-]+)+/?)`")


def rows_of(page):
    """By task, the text of its row."""
    table = page.split("## Where does my change go")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ", 1) for line in table.splitlines() if line.startswith("| ") and " | " in line]
    return {task.split(" (")[0]: files for task, files in rows if task != "task"}


def is_named(row, file):
    """By its path, or by a pattern or a folder that holds it, or by its name beside another one of its folder."""
    paths = PATH.findall(row)
    folders = [path.rsplit("/", 1)[0] for path in paths]
    return (any(path == file or pathlib.PurePath(file).match(path) for path in paths)
            or (file.rsplit("/", 1)[0] in folders and f"`{pathlib.PurePath(file).name}`" in row))


def faults_in(root):
    page = (root / "CONTRIBUTING.md").read_text()
    rows = rows_of(page)
    for task in rows.keys() ^ TASKS.keys():
        yield f"{task!r} stands in one of CONTRIBUTING.md and contributing_test.py only"
    for task in rows.keys() & TASKS.keys():
        for file, text in TASKS[task]:
            if not is_named(rows[task], file):
                yield f"{task}: CONTRIBUTING.md does not name {file}"
            if text not in (root / file).read_text():
                yield f"{task}: {file} does not hold {text!r} any more"
    for path in PATH.findall(page):
        is_built = path.startswith(("build/", "*")) or "NAME" in path
        if not is_built and not list(root.glob(path.rstrip("/"))):
            yield f"CONTRIBUTING.md names {path}, which does not exist"


def main():
    root = pathlib.Path(sys.argv[1])
    faults = list(faults_in(root))
    print(*faults, f"{len(faults)} faults in {len(TASKS)} tasks", sep="\n")
    sys.exit(1 if faults else 0)


main()
