#!/usr/bin/env bash
# Runs all that one GPU can show: tests, then "name value unit" of each measurement. From a build of the preset gpu, on this
# machine or on another one with the same torch.
#
#   tests/gpu/run.sh build/gpu [PYTHON]     PYTHON: whose torch, python3 without it
#
# Without a GPU, or where a test fails, it ends with 1 and says what has not been shown.
set -uo pipefail
build=${1:?"tests/gpu/run.sh: expected the folder of a build of the preset gpu"}
python=${2:-python3}
torch=$("$python" -c 'import torch, os; print(os.path.dirname(torch.__file__))') || exit 1
libraries=("$build/lib" "$torch/lib" "$torch"/../nvidia/cu*/lib "$torch"/../nvidia/nccl/lib)
export LD_LIBRARY_PATH="$(IFS=:; echo "${libraries[*]}")${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" OMP_NUM_THREADS=1

if ! "$build/bin/gpu_loopback_test" --gtest_list_tests > /dev/null; then
  echo "test-gpu: nothing was run but the build: this machine shows no GPU. Not shown: bits of the unsplit model on a GPU, order" \
    "of streams, memory over many steps, saves of a GPU, speed. Run tests/gpu/run.sh $build on a machine that has one." >&2
  exit 1
fi
failed=()
for test in gpu_loopback_test gpu_training_test gpu_oracle_test gpu_bodies_test gpu_layouts_test; do
  # cuBLAS gives the same bits in every run only with a workspace of a fixed size.
  CUBLAS_WORKSPACE_CONFIG=:4096:8 "$build/bin/$test" --gtest_brief=1 || failed+=("$test")
done
"$build/bin/bench_gpu" || failed+=(bench_gpu)
"$python" "$(dirname "$0")/../../benchmarks/gpu/compiled.py" || echo "test-gpu: not measured: torch.compile, which does not run here" >&2
if [ ${#failed[@]} -gt 0 ]; then
  echo "test-gpu: failed: ${failed[*]}" >&2
  exit 1
fi
