#!/usr/bin/env bash
# Runs the benches on a CUDA device, and writes their results to benches/results:
#
#     benches/gpu.sh                      # all of them; PYTHON=... and DEVICE=cuda:1 pick another interpreter and device
#     benches/gpu.sh --quick              # smaller networks, fewer rounds; passed on to each bench
#
# which is
#
#     python -m benches budgets --device cuda --check --json benches/results/budgets-SLUG.json
#     python -m benches overhead --device cuda --check --json benches/results/overhead-SLUG.json
#     python -m benches kernels --device cuda --networks pointwise Llama unet --check --json benches/results/kernels-SLUG.json
#     python -m benches multi_gpu --device cuda --check --json benches/results/multi-gpu-SLUG.json
#
# with the device's name for SLUG, and expandable segments, with which torch's allocator counts exactly what was asked
# for (PYTORCH_ALLOC_CONF= for its default). The last two take no options from here, and the last uses all devices. The
# exit code is 1 if a check failed, and 2 if there is no CUDA device.
set -euo pipefail
cd "$(dirname "$0")/.."

DEVICE=${DEVICE:-cuda}
export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF-expandable_segments:True}
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
from benches.common.results import device_slug
print(device_slug(torch.device(sys.argv[1])))' "$DEVICE")

failed=0
for bench in budgets overhead; do
    out="benches/results/$bench-$slug.json"
    echo "== python -m benches $bench --device $DEVICE --check --json $out $*"
    "$PYTHON" -m benches "$bench" --device "$DEVICE" --check --json "$out" "$@" || failed=1
done
out="benches/results/kernels-$slug.json"
networks="pointwise Llama unet"
echo "== python -m benches kernels --device $DEVICE --check --networks $networks --json $out"
"$PYTHON" -m benches kernels --device "$DEVICE" --check --networks $networks --json "$out" || failed=1
out="benches/results/multi-gpu-$slug.json"
echo "== python -m benches multi_gpu --device cuda --check --json $out"
"$PYTHON" -m benches multi_gpu --device cuda --check --json "$out" || failed=1
exit "$failed"
