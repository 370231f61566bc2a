#!/usr/bin/env bash
# What only a GPU can show: runs tests/gpu, measures a fetch up to a tensor on the GPU, and prints one summary.
# Takes less than four minutes, once there is a Python with everything in it.
#
#   scripts/gpu_check.sh                            with .venv or python3, whichever has a torch that sees a GPU
#   PYTHON=/path/to/python scripts/gpu_check.sh     with this one, if its torch does
#   DEVICE=cuda:1 scripts/gpu_check.sh              measure another GPU than the first
#
# Exit status: 0 all is well, 1 something is not, 2 there is no GPU here, 3 there is one, and no Python that can use it.
set -u
cd "$(dirname "$0")/.."
DEVICE=${DEVICE:-cuda:0}
TESTS_S=${TESTS_S:-120}
BENCH_S=${BENCH_S:-65}
LANDING_S=${LANDING_S:-40}
BUDGET_S=${BUDGET_S:-220} # for all of it; each part that does not end may take KILL_S more
PROBE_S=${PROBE_S:-30} # for the imports of one Python
KILL_S=5

cannot() {
    echo "gpu_check: $2, nothing was checked: $3" >&2
    exit "$1"
}

# Before anything is installed for it.
if ! compgen -G '/dev/nvidia[0-9]*' >/dev/null && ! compgen -G '/dev/dri/renderD*' >/dev/null && [ ! -e /dev/dxg ] &&
    ! nvidia-smi -L 2>/dev/null | grep -q GPU; then
    cannot 2 "NO GPU HERE" "neither a device file of one nor nvidia-smi says that there is"
fi

# Sets `found` to the GPUs that the torch of a Python sees, or `blind` to why it sees none; to neither, if the Python
# lacks one of the modules.
look() { # PYTHON MODULES
    local said status
    found='' blind=''
    said=$(timeout --kill-after="$KILL_S" "$PROBE_S" "$1" - 2>/dev/null <<END
import $2
if torch.cuda.is_available():
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    print(f"found {len(names)} x {names[0]}, torch {torch.__version__}")
elif torch.version.cuda or torch.version.hip:
    print(f"blind finds none ({torch.__version__}: a driver that is too old?)")
else:
    print(f"blind is a CPU build ({torch.__version__})")
END
    )
    status=$?
    case $said in
    found\ *) found=${said#found } ;;
    blind\ *) blind=${said#blind } ;;
    *) case $status in 124 | 137) blind="was not imported within $PROBE_S s" ;; esac ;;
    esac
}

everything='msgpack, msgspec, pytest, safetensors, torch, xxhash, yaml, zmq'
deadline=$((SECONDS + BUDGET_S))
python=
why=
tried=' '
for candidate in ${PYTHON:+"$PYTHON"} .venv/bin/python build/gpu-venv/bin/python python3; do
    [[ $tried != *" $candidate "* ]] || continue
    tried="$tried$candidate "
    look "$candidate" "$everything"
    if [ -n "$found" ]; then
        python=$(command -v "$candidate")
        break
    fi
    [ -z "$blind" ] || why="${why:+$why; }the torch of $candidate $blind"
done
if [ -z "$python" ]; then
    look "${PYTHON:-python3}" torch
    if [ -n "$found" ] || [ -z "$why$blind" ]; then
        echo "gpu_check: making build/gpu-venv, over what ${PYTHON:-python3} has"
        "${PYTHON:-python3}" -m venv --system-site-packages build/gpu-venv &&
            build/gpu-venv/bin/python -m pip install --quiet '.[dev,cli,nixl]' ||
            cannot 3 "THERE IS A GPU" "no Python with torch and pytest, and none can be made"
        deadline=$((SECONDS + BUDGET_S))
        python=$PWD/build/gpu-venv/bin/python
        look "$python" "$everything"
    fi
    [ -n "$found" ] ||
        cannot 3 "THERE IS A GPU" "${why:-the torch of ${python:-${PYTHON:-python3}} ${blind:-is missing}}; set PYTHON=... to a Python whose torch sees it"
fi
case $python in /*) ;; *) python=$PWD/$python ;; esac

# This tree, whether or not it is installed: control/ and transport/ belong inside the package.
tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT
mkdir "$tree/ec_p2p"
ln -s "$PWD"/ec_p2p/* "$PWD/control" "$PWD/transport" "$tree/ec_p2p/"
ln -s "$PWD/tests" "$PWD/examples" "$PWD/pyproject.toml" "$tree/"
export PYTHONPATH="$tree${PYTHONPATH:+:$PYTHONPATH}"
cd "$tree"

transport=$(timeout --kill-after="$KILL_S" "$PROBE_S" \
    "$python" -c 'from ec_p2p.transport import nixl_available; print("nixl" if nixl_available() else "zmq")')
started=$SECONDS

# Runs one part, shows and keeps what it says, and sets `status`. It may take LIMIT_S, and no more than is left.
part() { # NAME LOG LIMIT_S COMMAND...
    local name=$1 log=$2 limit=$3 began=$SECONDS left=$((deadline - SECONDS))
    shift 3
    [ "$limit" -le "$left" ] || limit=$left
    [ "$limit" -ge 1 ] || limit=1
    timeout --kill-after="$KILL_S" "$limit" "$@" 2>&1 | tee "$log"
    status=${PIPESTATUS[0]}
    if [ "$status" = 124 ]; then
        echo "gpu_check: $name did not end within $limit s"
    elif [ "$status" = 137 ] && [ $((SECONDS - began)) -ge "$limit" ]; then
        echo "gpu_check: $name did not end within $limit s, nor when it was told to: killed"
    elif [ "$status" = 137 ]; then
        echo "gpu_check: $name: killed by somebody else (is memory short?)"
    fi
}

echo "gpu_check: $found ($python)"
part "tests/gpu" "$tree/tests.log" "$TESTS_S" "$python" -m pytest tests/gpu -q -rs -p no:cacheprovider
tests=$status
passed=$(grep -oE '[0-9]+ passed' "$tree/tests.log" | tail -1)

part "the benchmark" "$tree/bench.log" "$BENCH_S" "$python" -m ec_p2p.cli bench fetch --device "$DEVICE" \
    --transport "$transport" --sizes 64KiB,1MiB,4MiB,16MiB,64MiB --repeat 20
bench=$status

landing=0
if [ "$transport" = nixl ]; then
    part "landing on the device" "$tree/landing.log" "$LANDING_S" "$python" -m ec_p2p.cli bench fetch \
        --device "$DEVICE" --landing device --sizes 64KiB,4MiB,64MiB --repeat 20
    landing=$status
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
