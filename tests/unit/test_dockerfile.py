# SPDX-License-Identifier: Apache-2.0
"""What the image is made of, read from the Dockerfile: there is no container builder here."""

import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
Instruction = tuple[str, str]


def instructions() -> list[Instruction]:
    text = re.sub(r"(?m)^\s*#.*\n", "", (ROOT / "Dockerfile").read_text())
    lines = re.sub(r"\\\n\s*", " ", text).splitlines()
    return [(line.split()[0], line.partition(" ")[2].strip()) for line in lines if line.strip()]


def of(kind: str) -> list[str]:
    return [argument for name, argument in instructions() if name == kind]


def test_the_base_is_one_tag_of_nvidias_image() -> None:
    assert instructions()[0][0] == "ARG"
    assert re.fullmatch(r"BASE=nvcr\.io/nvidia/pytorch:\d\d\.\d\d-py3", of("ARG")[0])
    assert of("FROM") == ["${BASE}"]
    assert of("ARG")[0].partition("=")[2] in (ROOT / "docs" / "cluster.md").read_text()


def test_versions_are_pinned_in_requirements_and_nowhere_else() -> None:
    for command in of("RUN"):
        assert not re.search(r"==\d|>=|<=|~=", command), command
        assert not re.search(r"curl|wget|git clone|apt-get|https?:", command), command
    assert not of("ADD")
    # pip installs uv, by its line in requirements; all else is bootstrap's.
    (pip,) = [command for command in of("RUN") if "pip install" in command]
    assert "grep -m 1 '^uv==' requirements/dev.txt" in pip and "--no-deps -r" in pip
    assert re.search(r"(?m)^uv==\d", (ROOT / "requirements" / "dev.txt").read_text())
    assert any("bash tools/bootstrap.sh" in command for command in of("RUN"))


def test_the_images_own_packages_are_compared_before_and_after() -> None:
    (command,) = [command for command in of("RUN") if "bootstrap.sh" in command]
    before, after = command.split("bash tools/bootstrap.sh")
    assert before.startswith("python docker/image_packages.py >/tmp/before.txt")
    assert ".venv/bin/python docker/image_packages.py | diff /tmp/before.txt -" in after
    assert "pipefail" in of("SHELL")[0]
    everything = (ROOT / "Dockerfile").read_text()
    assert not re.search(r"(?m)^(ENV|RUN|ARG).*PIP_CONSTRAINT", everything)


def test_overrides_leave_out_what_the_trainer_would_bring_a_second_time() -> None:
    lines = (ROOT / "requirements" / "overrides-ngc.txt").read_text().splitlines()
    never = {line.split(" ;")[0] for line in lines if line.endswith("sys_platform == 'never'")}
    assert {"torch", "torchvision", "torchaudio", "triton", "transformer-engine"} <= never


def test_the_image_has_the_torch_release_that_is_pinned() -> None:
    """docs/cluster.md states what the tag holds, with its source."""
    pins = (ROOT / "requirements" / "train.txt").read_text()
    (pinned,) = re.findall(r"(?m)^torch==(\d+\.\d+)", pins)
    assert f"torch {pinned}.0a0" in (ROOT / "docs" / "cluster.md").read_text()


def test_it_runs_as_a_user_and_says_whether_it_is_well() -> None:
    (user,) = of("USER")
    uid, gid = map(int, user.split(":"))
    assert uid >= 1000 and gid >= 1000
    names = [name for name, _ in instructions()]
    assert "RUN" not in names[names.index("USER") :] and "COPY" not in names[names.index("USER") :]
    (check,) = of("HEALTHCHECK")
    assert check.endswith('CMD ["pdm-rl", "doctor"]')


def test_only_whats_needed_is_copied() -> None:
    copied = {source.rstrip("/") for line in of("COPY") for source in line.split()[:-1]}
    for source in copied:
        assert (ROOT / source).exists(), source
    assert {"pdm", "pdm_rl", "megatron", "requirements", "tools"} <= copied
    assert not copied & {".", ".git", "runs", "shared", ".venv", "tests"}
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    patterns = [line for line in lines if line and not line.startswith("#")]
    assert patterns[0] == "*"
    assert {line[1:] for line in patterns if line.startswith("!")} == copied
    assert "**/__pycache__" in patterns


def test_no_secret_and_no_network_when_it_runs() -> None:
    for line in (*of("ENV"), *of("ARG")):
        assert not re.search(r"(?i)secret|token|password|api_?key", line), line
    environment = " ".join(of("ENV"))
    for variable in ("HF_HUB_OFFLINE=1", "VLLM_NO_USAGE_STATS=1", "DO_NOT_TRACK=1"):
        assert variable in environment


def test_the_engines_environment_is_the_one_that_bootstrap_makes() -> None:
    (workdir,) = of("WORKDIR")
    environment = " ".join(of("ENV"))
    bootstrap = (ROOT / "tools" / "bootstrap.sh").read_text()
    assert 'venv="$root/.venv"' in bootstrap and 'make_venv "$venv-rollout"' in bootstrap
    assert f"PDM_RL_ROLLOUT_PYTHON={workdir}/.venv-rollout/bin/python" in environment
    assert f"PYTHON={workdir}/.venv/bin/python" in environment
    assert f"PATH={workdir}/.venv/bin:" in environment


def test_image_packages_are_found_without_importing_them(tmp_path: Path) -> None:
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").write_text("raise RuntimeError('was imported')\n")
    result = subprocess.run(
        [sys.executable, str(ROOT / "docker" / "image_packages.py")],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    lines = dict(line.split(" ", 1) for line in result.stdout.splitlines())
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    version = re.escape(importlib.metadata.version("torch"))
    assert re.fullmatch(rf"{version} {re.escape(str(spec.origin))}", lines["torch"])
    assert lines["apex"] == f"of unknown version {tmp_path / 'apex' / '__init__.py'}"
    assert lines["transformer_engine"] == "not there" or "/" in lines["transformer_engine"]
