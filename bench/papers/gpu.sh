#!/usr/bin/env bash
# Makes the papers' runs that take hours on a CPU, for a limited time on a GPU that several processes share. Finished runs
# and checkpoints are kept: the next call continues.
#
# usage: bench/papers/gpu.sh DATA_FOLDER [SECONDS] [TABLE ...]
#   SECONDS  default 1680, 28 minutes
#   TABLE    of `python -m bench.papers list`; default: those with the longest runs first
#   DEVICE=cpu, JOBS=2 and OUT=FOLDER in the environment replace cuda, 8 and docs/results
set -u
data=${1:?usage: $0 DATA_FOLDER [SECONDS] [TABLE ...]}
end=$((SECONDS + ${2:-1680})) status=0
[ $# -gt 2 ] && tables=("${@:3}") || tables=(fadas-figure1b-f ca2fl-figure5 ca2fl-figure4 ca2fl-figure6)
if command -v nvidia-cuda-mps-control > /dev/null && nvidia-cuda-mps-control -d; then
    trap 'echo quit | nvidia-cuda-mps-control' EXIT # the multi-process service, without which processes take turns
fi
for table in "${tables[@]}"; do
    left=$((end - SECONDS))
    [ "$left" -gt 0 ] || break
    # SIGTERM makes a checkpoint, which takes some seconds.
    timeout --kill-after=60 "$left" python -m bench.papers run "$table" --data-dir "$data" --device "${DEVICE:-cuda}" \
        --jobs "${JOBS:-8}" --out "${OUT:-docs/results}"
    code=$?
    if [ "$code" -ne 0 ] && [ "$code" -ne 124 ]; then # 124: the time is over
        echo "$table ended with $code" >&2
        status=1
    fi
done
exit "$status"
