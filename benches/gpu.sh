#!/usr/bin/env bash
# All benches on a CUDA device, peaks by torch.cuda.max_memory_allocated; results go to benches/results:
#
#     benches/gpu.sh                      # all of it; PYTHON=... and DEVICE=cuda:1 pick another interpreter and device
#     benches/gpu.sh --quick              # smaller networks, fewer rounds; passed on to each bench
#
# which is
#
#     python -m benches.promise --device cuda --check --json benches/results/promise-SLUG.json
#     python -m benches.overhead --device cuda --check --json benches/results/overhead-SLUG.json
#     python -m benches.side_by_side --device cuda --check --json benches/results/side-by-side-SLUG.json
#     python -m benches.multi_gpu --device cuda --check --json benches/results/multi-gpu-SLUG.json
#
# with the device's name for SLUG; the last takes all devices, and no options from here. Ends with 1 if any of them broke
# a promise, with 2 if there is no CUDA device.
set -euo pipefail
cd "$(dirname "$0")/.."

DEVICE=${DEVICE:-cuda}
if [[ -z ${PYTHON:-} ]]; then
    PYTHON=python
    [[ -x .venv/bin/python ]] && PYTHON=.venv/bin/python
fi

if ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "benches/gpu.sh: no CUDA device: torch.cuda.is_available() is False, or $PYTHON has no torch." >&2
    echo "It needs an NVIDIA GPU and a build of torch with CUDA; set PYTHON to an interpreter that has one." >&2
    exit 2
fi
slug=$("$PYTHON" -c '
import sys, torch
from benches.timing import device_slug
print(device_slug(torch.device(sys.argv[1])))' "$DEVICE")

failed=0
for bench in promise overhead side_by_side; do
    out="benches/results/${bench//_/-}-$slug.json"
    echo "== python -m benches.$bench --device $DEVICE --check --json $out $*"
    "$PYTHON" -m "benches.$bench" --device "$DEVICE" --check --json "$out" "$@" || failed=1
done
out="benches/results/multi-gpu-$slug.json"
echo "== python -m benches.multi_gpu --device cuda --check --json $out"
"$PYTHON" -m benches.multi_gpu --device cuda --check --json "$out" || failed=1
exit "$failed"
