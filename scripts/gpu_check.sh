#!/usr/bin/env bash
# What only a GPU can show: runs tests/gpu, measures a fetch up to a tensor on the GPU, and prints one summary.
# Takes less than four minutes, once there is a Python with everything in it.
#
#   scripts/gpu_check.sh                  with $PYTHON, .venv or python3, whichever has torch and pytest
#   DEVICE=cuda:1 scripts/gpu_check.sh    measure another GPU than the first
#
# Exit status: 0 all is well, 1 something is not, 2 there is no GPU here, or no Python that can use it.
set -u
cd "$(dirname "$0")/.."
DEVICE=${DEVICE:-cuda:0}
TESTS_S=120
BENCH_S=65
LANDING_S=40

no_gpu() {
    echo "gpu_check: NO GPU HERE, nothing was checked: $*" >&2
    exit 2
}

# Before anything is installed for it.
if ! compgen -G '/dev/nvidia[0-9]*' >/dev/null && ! compgen -G '/dev/dri/renderD*' >/dev/null && [ ! -e /dev/dxg ] &&
    ! nvidia-smi -L 2>/dev/null | grep -q GPU; then
    no_gpu "neither a device file of one nor nvidia-smi says that there is"
fi

has_all='import msgpack, msgspec, pytest, safetensors, torch, xxhash, yaml, zmq'
python=
for candidate in ${PYTHON:+"$PYTHON"} .venv/bin/python build/gpu-venv/bin/python python3; do
    if "$candidate" -c "$has_all" 2>/dev/null; then
        python=$(command -v "$candidate")
        break
    fi
done
if [ -z "$python" ]; then
    echo "gpu_check: making build/gpu-venv, over what ${PYTHON:-python3} has"
    "${PYTHON:-python3}" -m venv --system-site-packages build/gpu-venv &&
        build/gpu-venv/bin/python -m pip install --quiet '.[dev,cli,nixl]' || no_gpu "no Python with torch and pytest, and none can be made"
    python=$PWD/build/gpu-venv/bin/python
fi
case $python in /*) ;; *) python=$PWD/$python ;; esac

found=$("$python" - <<'END'
import torch
if torch.cuda.is_available():
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    print(f"{len(names)} x {names[0]}, torch {torch.__version__}")
END
) || true
[ -n "$found" ] || no_gpu "the torch of $python finds none ($("$python" -c 'import torch; print(torch.__version__)'))"

# This tree, whether or not it is installed: control/ and transport/ belong inside the package.
tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT
mkdir "$tree/ec_p2p"
ln -s "$PWD"/ec_p2p/* "$PWD/control" "$PWD/transport" "$tree/ec_p2p/"
ln -s "$PWD/tests" "$PWD/examples" "$PWD/pyproject.toml" "$tree/"
export PYTHONPATH="$tree${PYTHONPATH:+:$PYTHONPATH}"
cd "$tree"

transport=$("$python" -c 'from ec_p2p.transport import nixl_available; print("nixl" if nixl_available() else "zmq")')
started=$SECONDS

echo "gpu_check: $found"
timeout --kill-after=5 "$TESTS_S" "$python" -m pytest tests/gpu -q -rs -p no:cacheprovider 2>&1 | tee "$tree/tests.log"
tests=${PIPESTATUS[0]}
[ "$tests" = 124 ] && echo "gpu_check: the tests did not end within $TESTS_S s"
passed=$(grep -oE '[0-9]+ passed' "$tree/tests.log" | tail -1)

timeout --kill-after=5 "$BENCH_S" "$python" -m ec_p2p.cli bench fetch --device "$DEVICE" --transport "$transport" \
    --sizes 64KiB,1MiB,4MiB,16MiB,64MiB --repeat 20 2>&1 | tee "$tree/bench.log"
bench=${PIPESTATUS[0]}
[ "$bench" = 124 ] && echo "gpu_check: the benchmark did not end within $BENCH_S s"

landing=0
if [ "$transport" = nixl ]; then
    timeout --kill-after=5 "$LANDING_S" "$python" -m ec_p2p.cli bench fetch --device "$DEVICE" --landing device \
        --sizes 64KiB,4MiB,64MiB --repeat 20 2>&1 | tee "$tree/landing.log"
    landing=${PIPESTATUS[0]}
    [ "$landing" = 124 ] && echo "gpu_check: landing on the device did not end within $LANDING_S s"
fi

echo
echo "==== gpu_check: $found"
echo "tests/gpu: $(tail -1 "$tree/tests.log") (status $tests)"
echo "bench fetch --device $DEVICE --transport $transport (status $bench):"
sed 's/^/    /' "$tree/bench.log"
if [ "$transport" = nixl ]; then
    echo "the same with --landing device (status $landing):"
    sed 's/^/    /' "$tree/landing.log"
else
    echo "NIXL is not installed: landing on the device was not measured"
fi
if [ "$tests" = 0 ] && [ "$bench" = 0 ] && [ "$landing" = 0 ] && [ -n "$passed" ]; then
    echo "==== ALL IS WELL, after $((SECONDS - started)) s"
else
    echo "==== SOMETHING IS WRONG, after $((SECONDS - started)) s: see above"
    exit 1
fi
