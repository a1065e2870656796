#!/usr/bin/env bash
# Each decoder for some seconds. What has been found interesting stays in CORPUS/NAME, and a message that has broken one as crash-*,
# oom-* or timeout-* of it.
# Usage: run.sh FUZZ CORPUS SECONDS [JOBS]
set -euo pipefail

fuzz=$1 corpus=$2 seconds=$3 jobs=${4:-1}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export TMPDIR=$scratch ASAN_OPTIONS=detect_leaks=0:detect_container_overflow=0 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1

run_one() {
  local name=$1 folder=$2/${1// /_}
  mkdir -p "$folder"
  if "$fuzz" "$name" "$folder" -max_total_time="$seconds" -max_len=4096 -malloc_limit_mb=64 -rss_limit_mb=4096 \
      -artifact_prefix="$folder/" -print_final_stats=1 >"$folder.log" 2>&1; then
    awk -v name="$name" '/stat::number_of_executed_units/ { runs = $2 } / cov: / { coverage = $4 }
      END { printf "fuzz %s: %d messages, %d places of the code\n", name, runs, coverage }' "$folder.log"
  else
    echo "fuzz $name: FAILED; the message is in $folder, the end of $folder.log is" >&2
    tail -40 "$folder.log" >&2
    return 1
  fi
}
export -f run_one
export fuzz seconds
"$fuzz" | xargs -d '\n' -P "$jobs" -I{} bash -c 'run_one "$1" "$2"' _ {} "$corpus"
