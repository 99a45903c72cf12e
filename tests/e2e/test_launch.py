# SPDX-License-Identifier: Apache-2.0
"""The launch scripts: what they start, where, with which words, and what they refuse."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megatron.rl.config import load_config
from tests.e2e.launching import ROOT, SCRIPTS, SHOW_CPU, Launcher, make_checkout

NAMES = [script.name for script in SCRIPTS]
# Scripts of recipes go through tools/launch.sh; the others are Megatron's own loop.
RECIPES = [script.name for script in SCRIPTS if "tools/launch.sh" in script.read_text()]
SHELL_FILES = [*SCRIPTS, *sorted((ROOT / "tools").glob("*.sh"))]
E2E = "qwen3_30b_fp8_e2e.sh"


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkout(tmp_path_factory.mktemp("launch") / "a check out's $HOME")


@pytest.fixture
def launcher(checkout: Path, tmp_path: Path) -> Launcher:
    folder = tmp_path / "some where"
    folder.mkdir()
    return Launcher(checkout, folder)


# ---- dry runs ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("how", ["absolute", "relative"])
def test_a_dry_run_from_another_folder(launcher: Launcher, name: str, how: str) -> None:
    script = launcher.script(name)
    if how == "relative":
        (launcher.folder / "link to it").symlink_to(launcher.checkout)
        script = f"link to it/examples/rl/{name}"
    result = launcher.run(script, "--dry-run")
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    command = shlex.split(result.stdout.splitlines()[-2 if name in RECIPES else 0])
    assert str(launcher.stub) in command or str(launcher.stub) in result.stdout.replace("\\", "")
    if name in RECIPES:
        (dry,) = launcher.calls("train")
        assert "--dry-run" in dry["what"]
        recipe = launcher.checkout / "examples" / "rl" / name.replace(".sh", ".yaml")
        assert dry["what"][3] == str(recipe) and dry["folder"] == str(launcher.checkout)
        assert dry["environment"]["PYTHONPATH"].split(":")[0] == str(launcher.checkout)
        assert not launcher.calls("doctor")
    assert not (launcher.checkout / ".venv").exists()
    assert not (launcher.checkout / "runs").exists()


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("how", ["absolute", "relative"])
def test_a_config_of_ones_own(launcher: Launcher, name: str, how: str) -> None:
    own = launcher.folder / "my configs" / "own.yaml"
    own.parent.mkdir()
    own.write_text("{}")
    given = str(own) if how == "absolute" else "my configs/own.yaml"
    result = launcher.run(launcher.script(name), "--dry-run", "--with", given, CONFIG=given)
    assert result.returncode == 0, result.stderr
    (dry,) = launcher.calls("train")
    words = dry["what"]  # a script may add settings of its own
    assert words[3] == str(own) and words[words.index("--with") + 1] == str(own)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_real_dry_run_of_every_script(launcher: Launcher, name: str) -> None:
    result = launcher.run(launcher.script(name), "--dry-run", PYTHON=sys.executable)
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stdout + result.stderr
    if name in RECIPES:
        check_real(result.stdout, load_config(ROOT / "examples/rl" / f"{name[:-3]}.yaml"))


def check_real(output: str, config: object) -> None:
    from megatron.rl.config import Config

    assert isinstance(config, Config)
    printed = yaml.safe_load(output[: output.index("\n# ")])
    assert printed["rollout"]["group_size"] == config.rollout.group_size
    assert printed["parallel"]["tensor"] == config.parallel.tensor
    ranks = re.findall(r"(?m)^# rank (\d+): node (\d+), local rank (\d+)", output)
    per_node = 8 if config.run.device == "cuda" else config.parallel.world_size
    assert [tuple(map(int, place)) for place in ranks] == [
        (rank, rank // per_node, rank % per_node) for rank in range(config.parallel.world_size)
    ]
    engines = re.findall(r"(?m)^# engine \d+: node (\d+)", output)
    nodes = config.parallel.world_size // per_node
    assert len(engines) == nodes * config.rollout.engines_per_node
    assert set(engines) == {str(node) for node in range(nodes)}
    assert output.count(" -m megatron.rl.cli train ") == nodes


def test_a_real_dry_run_of_the_flagship(launcher: Launcher) -> None:
    variables = {"PYTHON": sys.executable, "MASK": "dppo_topk_kl", "CLUSTER": "h100_80gb"}
    result = launcher.run(launcher.script(E2E), "--dry-run", **variables, MASTER_ADDR="fd00::1")
    assert result.returncode == 0, result.stderr
    check_real(result.stdout, load_config(ROOT / "examples/rl/qwen3_30b_fp8_e2e.yaml"))
    assert "direction: ratio" in result.stdout and "gpu_memory_utilization: 0.55" in result.stdout
    assert "# no plan: Qwen3-30B-A3B-Base has no config.json here" in result.stdout
    lines = [shlex.split(line) for line in result.stdout.splitlines() if "distributed.run" in line]
    assert [line[line.index("--node-rank") + 1] for line in lines] == ["0", "1", "2", "3"]
    for line in lines:
        assert line[0] == "CUDA_DEVICE_MAX_CONNECTIONS=1"
        assert line[line.index("--master-addr") + 1] == "[fd00::1]"


def test_without_an_environment_the_dry_run_says_so(launcher: Launcher) -> None:
    result = launcher.run(launcher.script(E2E), "--dry-run", PYTHON="")
    assert result.returncode == 0, result.stderr
    assert "no environment yet (bash tools/bootstrap.sh makes one)" in result.stdout
    assert not launcher.log.exists() and not (launcher.checkout / ".venv").exists()


# ---- words ------------------------------------------------------------------------------------


def test_hostile_folders_stay_one_word_and_one_value(launcher: Launcher) -> None:
    hostile = 'it\'s # a: [x] "$(touch pwned)" `touch pwned`; {y}'
    model, data = launcher.folder / hostile, launcher.folder / f"data {hostile}"
    result = launcher.run(
        launcher.script("qwen3_8b.sh"),
        "--dry-run",
        *("--set", "run.name=$(touch pwned) *", "--allow-changed"),
        MODEL=hostile,
        DATA=str(data),
        RUN=f"runs/{hostile}",
        STUB_SHOW="cuda\n8\nm",
    )
    assert result.returncode == 0, result.stderr
    (dry,) = launcher.calls("train")
    words = dry["what"]
    settings = [words[i + 1].partition("=") for i, word in enumerate(words) if word == "--set"]
    values = {key: value if key == "run.name" else yaml.safe_load(value)
              for key, _, value in settings}  # fmt: skip
    assert values == {
        "model.path": str(model),
        "task.params.train": f"{data}/dapo-math-17k",
        "task.params.heldout": f"{data}/aime25.jsonl",
        "eval.data": str(data),
        "run.name": "$(touch pwned) *",
    }
    assert words[words.index("--run-folder") + 1] == str(launcher.folder / "runs" / hostile)
    # Of `train` alone.
    assert "--allow-changed" in words and "--allow-changed" not in launcher.calls("show")[0]["what"]
    assert not list(launcher.folder.rglob("pwned")) and not list(launcher.checkout.rglob("pwned"))
    # What is printed is what would be run, word by word.
    (printed,) = [line for line in result.stdout.splitlines() if "distributed.run" in line]
    assert shlex.split(printed)[-len(words) + 4 :] == words[3:-1]


# ---- refusals ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"MASK": "nope"}, "no masks nope; there are: delta_0.05 delta_0.15 dppo_topk_kl"),
        ({"CLUSTER": "a100"}, "no cluster a100; there are: h100_80gb h200_141gb h20_96gb"),
        ({"CONFIG": "no where.yaml"}, "no such config: "),
        ({"SCALE": "huge"}, "SCALE is huge; it may be full or tiny"),
        ({"SCALE": "tiny", "DATA": "x"}, "DATA has no effect with SCALE=tiny"),
        ({"PYTHON": "/no/where"}, "PYTHON is /no/where: no such program"),
        ({"NNODES": "2"}, "the config has 32 ranks, 2 nodes of 8 GPUs have 16"),
        ({"NODE_RANK": "1"}, "expected MASTER_ADDR"),
        ({"MASTER_ADDR": "a"}, "expected NODE_RANK, 0 to 3"),
        ({"MASTER_ADDR": "a", "NODE_RANK": "4"}, "NODE_RANK is 4; expected 0 to 3"),
        (
            {"MASTER_ADDR": "a", "NODE_RANK": "0", "STUB_CODES": '{"plan": 1}'},
            "the plan does not fit; PLAN=off starts all the same",
        ),
    ],
)
def test_mistakes_are_one_line(launcher: Launcher, variables: dict[str, str], words: str) -> None:
    result = launcher.run(launcher.script(E2E), **variables)
    assert result.returncode == 2, result.stdout + result.stderr
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert words in result.stderr
    assert not launcher.log.exists() or not launcher.calls("torch.distributed.run")


def test_a_recipe_without_a_twin(launcher: Launcher) -> None:
    result = launcher.run(launcher.script("qwen3_8b.sh"), SCALE="tiny")
    assert result.returncode == 2
    assert "qwen3_8b.yaml has no tiny twin; there are: qwen3_30b_fp8_e2e_tiny" in result.stderr


def test_a_failing_doctor_stops_the_launch(launcher: Launcher) -> None:
    result = launcher.run(launcher.script("qwen3_8b.sh"), STUB_CODES='{"doctor": 1}',
                          STUB_SHOW="cuda\n8\nm")  # fmt: skip
    assert result.returncode == 1
    assert not launcher.calls("torch.distributed.run")


# ---- what is started --------------------------------------------------------------------------


@pytest.mark.parametrize(("given", "used"), [("::1", "[::1]"), ("[::1]", "[::1]"), ("n0", "n0")])
def test_one_node_of_several(launcher: Launcher, given: str, used: str) -> None:
    variables = {"NNODES": "4", "NODE_RANK": "2", "MASTER_ADDR": given, "MASTER_PORT": "1234"}
    result = launcher.run(launcher.script(E2E), **variables)
    assert result.returncode == 0, result.stderr
    (call,) = launcher.calls("torch.distributed.run")
    assert call["what"][2:12] == [
        *("--nnodes", "4", "--nproc-per-node", "8", "--node-rank", "2"),
        *("--master-addr", used, "--master-port", "1234"),
    ]
    assert call["environment"]["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    # Node 0 checks for all.
    assert not launcher.calls("doctor") and not launcher.calls("plan")


def test_the_first_node_checks_before_it_starts(launcher: Launcher) -> None:
    variables = {"NODE_RANK": "0", "MASTER_ADDR": "n0", "STUB_CODES": '{"plan": 1}'}
    result = launcher.run(launcher.script(E2E), PLAN="off", **variables)
    assert result.returncode == 0, result.stderr
    assert len(launcher.calls("doctor")) == 1 and not launcher.calls("plan")
    assert len(launcher.calls("torch.distributed.run")) == 1


def test_the_exit_code_is_the_runs(launcher: Launcher) -> None:
    assert launcher.run(launcher.script("qwen3_8b.sh"), STUB_SHOW="cuda\n8\nm",
                        STUB_RUN_CODE="3").returncode == 3  # fmt: skip
    assert launcher.run(launcher.script("quickstart.sh"), STUB_SHOW=SHOW_CPU,
                        STUB_RUN_CODE="4").returncode == 4  # fmt: skip


def test_sigterm_goes_to_the_ranks_and_the_run_ends_well(launcher: Launcher) -> None:
    process = launcher.start(
        launcher.script("qwen3_8b.sh"), STUB_SHOW="cuda\n8\nm", STUB_RUN="wait"
    )
    launcher.wait_for("waits")
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=30)
    # torchrun, which has no handler here, would have died of the signal: code 143.
    assert process.returncode == 0, output
    assert sum("saved" in note for note in launcher.notes()) == 1


def test_ctrl_c_ends_everything(launcher: Launcher) -> None:
    process = launcher.start(
        launcher.script("qwen3_8b.sh"), STUB_SHOW="cuda\n8\nm", STUB_RUN="wait"
    )
    launcher.wait_for("waits")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode != 0
    assert not any("saved" in note for note in launcher.notes())
    for note in launcher.notes():
        with pytest.raises(ProcessLookupError):
            os.kill(note["pid"], 0)


# ---- the files --------------------------------------------------------------------------------


@pytest.mark.parametrize("path", SHELL_FILES, ids=lambda path: path.name)
def test_shell_files_are_clean(path: Path) -> None:
    subprocess.run(["bash", "-n", str(path)], check=True, timeout=30)
    text = path.read_text()
    assert "set -euo pipefail" in text
    assert not re.search(r"(?m)(^|[;&|({]|\bthen|\bdo|\belse)\s*eval\s", text), "eval"


def test_shellcheck_has_nothing_to_say() -> None:
    places = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    shellcheck = shutil.which("shellcheck", path=places)
    if shellcheck is None:
        pytest.skip("shellcheck is not installed")
    result = subprocess.run(
        [shellcheck, *map(str, SHELL_FILES)], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stdout
