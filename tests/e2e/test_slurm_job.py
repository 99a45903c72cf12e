# SPDX-License-Identifier: Apache-2.0
"""A Slurm job's life, with programs in place of Slurm's that do what Slurm's were seen to do.

Slurm runs a copy of the script; srun starts one task a node and answers SIGTERM by killing them;
scontrol names hosts, the submitted command, and takes requeues.
"""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from megatron.rl.config import load_config
from tests.e2e.launching import ROOT, SHOW_CPU, Launcher, make_checkout

JOB = "4711"
RECIPE_SCRIPTS = sorted(
    path for path in (ROOT / "examples/rl").glob("*.sh") if "#SBATCH" in path.read_text()
)
SRUN = """#!/usr/bin/env bash
trap 'kill -KILL "${tasks[@]}"; exit 137' TERM
printf '%s\\n' "$*" >>"$FAKE_LOG"
while [[ $1 != bash ]]; do shift; done
for ((node = 0; node < FAKE_NODES; node++)); do
    SLURM_STEP_ID=0 SLURM_NODEID=$node "$@" &
    tasks+=($!)
done
code=0
for task in "${tasks[@]}"; do wait "$task" || code=$?; done
exit $code
"""
SCONTROL = """#!/usr/bin/env bash
case $1 in
    show)
        if [[ $2 == hostnames ]]; then printf 'host-a\\nhost-b\\n'; else
            printf 'JobId=%s JobName=x\\n   Command=%s\\n   WorkDir=/\\n' "$3" "$FAKE_COMMAND"
        fi ;;
    *) printf '%s\\n' "$*" >>"$FAKE_LOG" ;;
esac
"""


class Job:
    """One job on two nodes of four GPUs, whose script Slurm has copied away."""

    def __init__(self, folder: Path) -> None:
        self.checkout = make_checkout(folder / "check out")
        here = folder / "submitted from"
        programs = folder / "bin"
        here.mkdir()
        programs.mkdir()
        for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
        self.launcher = Launcher(self.checkout, here, show="cuda\n8\nm", path=[programs])
        self.original = self.launcher.script("qwen3_8b.sh")
        self.copy = folder / "spool" / "job04711" / "slurm_script"
        self.copy.parent.mkdir(parents=True)
        shutil.copy(self.original, self.copy)
        self.fake_log = folder / "slurm.log"
        self.fake_log.touch()

    def variables(self, **further: str) -> dict[str, str]:
        return {
            "SLURM_JOB_ID": JOB,
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_JOB_NODELIST": "host-[a-b]",
            "SLURM_GPUS_ON_NODE": "4",
            "SLURM_SUBMIT_DIR": str(self.launcher.folder),
            "FAKE_LOG": str(self.fake_log),
            "FAKE_NODES": "2",
            "FAKE_COMMAND": f"{self.original} --set a=b c",
            **further,
        }

    def start(self, *arguments: str, **further: str) -> subprocess.Popen[str]:
        return self.launcher.start(str(self.copy), *arguments, **self.variables(**further))

    def run(self, *arguments: str, **further: str) -> subprocess.CompletedProcess[str]:
        return self.launcher.run(str(self.copy), *arguments, **self.variables(**further))

    def requeued(self) -> bool:
        return f"requeue {JOB}" in self.fake_log.read_text().splitlines()


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def test_every_node_is_given_its_place(job: Job) -> None:
    (job.launcher.folder / "own.yaml").write_text("{}")
    result = job.run("--with", "own.yaml", "--set", "run.name=a  b")
    assert result.returncode == 0, result.stdout + result.stderr
    calls = job.launcher.calls("torch.distributed.run")
    assert sorted(call["environment"]["NODE_RANK"] for call in calls) == ["0", "1"]
    run = str(job.checkout / "runs" / f"qwen3_8b-slurm-{JOB}")
    for call in calls:
        words, environment = call["what"], call["environment"]
        assert words[words.index("--nnodes") + 1] == "2"
        assert words[words.index("--nproc-per-node") + 1] == "4"
        assert words[words.index("--node-rank") + 1] == environment["NODE_RANK"]
        assert words[words.index("--master-addr") + 1] == "host-a"
        assert words[words.index("--master-port") + 1] == str(20000 + int(JOB) % 20000)
        assert words[words.index("--with") + 1] == str(job.launcher.folder / "own.yaml")
        assert words[-4:] == ["--set", "run.name=a  b", "--run-folder", run]
    assert len(job.launcher.calls("doctor")) == 1, "one node checks"
    assert "--kill-on-bad-exit=1" in job.fake_log.read_text()
    assert not job.requeued()


def test_the_tiny_twin_is_a_job_of_one_node(job: Job) -> None:
    job.original = job.launcher.script("qwen3_30b_fp8_e2e.sh")
    shutil.copy(job.original, job.copy)
    variables = {"SCALE": "tiny", "STUB_SHOW": SHOW_CPU, "FAKE_COMMAND": job.original}
    result = job.run(**variables, SLURM_JOB_NUM_NODES="1", FAKE_NODES="1")
    assert result.returncode == 0, result.stdout + result.stderr
    (call,) = job.launcher.calls("train")
    run = f"{job.checkout}/runs/qwen3_30b_fp8_e2e_tiny-slurm-{JOB}"
    assert call["what"][-2:] == ["--run-folder", run]
    result = job.run(**variables)
    assert result.returncode == 2
    assert "NNODES is 2, but a run on cpu has one node" in result.stderr


@pytest.mark.parametrize(
    ("command", "submitted_in", "found"),
    [
        ("ORIGINAL --a /b/examples/rl/c", "/", True),
        ("(null)", "CHECKOUT", True),  # sbatch --wrap or a script from standard input
        ("(null)", "/", False),
    ],
)
def test_the_repository_is_found_from_the_copy(
    job: Job, command: str, submitted_in: str, found: bool
) -> None:
    result = job.run(
        FAKE_COMMAND=command.replace("ORIGINAL", job.original),
        SLURM_SUBMIT_DIR=submitted_in.replace("CHECKOUT", str(job.checkout)),
    )
    assert (result.returncode == 0) == found, result.stderr
    if not found:
        assert result.returncode == 2
        assert "no tools/launch.sh found: call sbatch in the repository" in result.stderr


def stopped(job: Job, **further: str) -> tuple[int, str]:
    """Start, wait until both nodes train, wake the job's shell as Slurm does; code and output."""
    process = job.start(STUB_RUN="wait", **further)
    job.launcher.wait_for("waits", 2)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    return process.returncode, output


def test_a_preempted_job_saves_and_goes_back_into_the_queue(job: Job) -> None:
    code, output = stopped(job)
    assert code == 0, output
    assert sum("saved" in note for note in job.launcher.notes()) == 2
    assert job.requeued()
    # The same job again: the same folder, and nothing left of the wish to stop.
    result = job.run(SLURM_RESTART_COUNT="1")
    assert result.returncode == 0, result.stderr
    folders = {call["what"][-1] for call in job.launcher.calls("torch.distributed.run")}
    assert folders == {str(job.checkout / "runs" / f"qwen3_8b-slurm-{JOB}")}
    assert not list((job.checkout / "runs").glob("*.stop"))


def test_a_run_that_could_not_save_is_not_requeued(job: Job) -> None:
    code, output = stopped(job, STUB_SAVE_CODE="5")
    assert code == 5, output
    assert not job.requeued()


def test_a_run_that_finished_meanwhile_is_not_requeued(job: Job) -> None:
    run = job.checkout / "runs" / f"qwen3_8b-slurm-{JOB}"
    run.mkdir(parents=True)
    (run / "result.json").write_text("{}")  # as a finished run leaves it
    code, output = stopped(job)
    assert code == 0 and "finished meanwhile" in output
    assert not job.requeued()


def test_requeues_come_to_an_end(job: Job) -> None:
    code, output = stopped(job, SLURM_RESTART_COUNT="3", MAX_REQUEUES="3")
    assert code == 1 and "not requeued" in output
    assert not job.requeued()


@pytest.mark.parametrize("code", [0, 3])
def test_an_end_of_its_own_is_the_end(job: Job, code: int) -> None:
    assert job.run(STUB_RUN_CODE=str(code)).returncode == code
    assert not job.requeued()


def test_a_dry_run_inside_a_job_needs_nothing_of_slurm(job: Job) -> None:
    result = job.run("--dry-run")
    assert result.returncode == 0, result.stderr
    assert "--nnodes 1 --nproc-per-node 8" in result.stdout
    assert job.fake_log.read_text() == ""


@pytest.mark.parametrize("script", RECIPE_SCRIPTS, ids=lambda path: path.name)
def test_what_is_asked_of_slurm_fits_the_recipe(script: Path) -> None:
    lines = script.read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    asked = dict(re.findall(r"^#SBATCH --([a-z-]+)=?(.*)$", line)[0]
                 for line in lines[:first] if line.startswith("#SBATCH"))  # fmt: skip
    config = load_config(script.with_suffix(".yaml"))
    assert int(asked["nodes"]) * int(asked["gpus-per-node"]) == config.parallel.world_size
    assert asked["ntasks-per-node"] == "1" and asked["open-mode"] == "append"
    assert re.fullmatch(r"B:TERM@\d+", asked["signal"])
    assert {"requeue", "exclusive"} <= asked.keys()
    assert asked["job-name"] == script.stem
