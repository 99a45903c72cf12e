# SPDX-License-Identifier: Apache-2.0
"""``pdm-rl doctor``: one line a finding; exit code 1 where training, or a config, cannot run here.

All that takes time is asked at once, in processes of their own.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdm_rl.active_packages import OWN_ROOT, ActivePackages, find_active, import_problem
from pdm_rl.doctor import communication, machine, packages, probe
from pdm_rl.doctor.finding import Finding, note_unless

if TYPE_CHECKING:
    from megatron.rl.config import Config

GLOO_RANKS, MOST_NCCL_RANKS = 2, 8
NVIDIA_SMI_TIMEOUT_S = 10.0


def add_doctor(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command to those of ``pdm-rl``."""
    parser = commands.add_parser(
        "doctor", help="what is installed, what this machine has, and whether a config can run here"
    )
    _add_arguments(parser)
    parser.set_defaults(command=run)


def main(arguments: Sequence[str]) -> int:
    """Run it alone, where the other commands cannot be imported."""
    parser = argparse.ArgumentParser(prog="pdm-rl doctor")
    _add_arguments(parser)
    return run(parser.parse_args(arguments))


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", nargs="?", help="YAML file of settings: can it run here?")
    for option, target, metavar in (
        ("--with", "presets", "FILE"), ("--set", "overrides", "KEY=VALUE")
    ):  # fmt: skip
        parser.add_argument(
            option, action="append", default=[], dest=target, metavar=metavar, help="as of train"
        )
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--json", action="store_true", help="print a JSON list of the findings")
    shown.add_argument(
        "--errors-only", action="store_true", help="print what is wrong, if anything"
    )


def run(options: argparse.Namespace) -> int:
    """Look, print, and return the exit code.

    Raises:
        UserError: the config is not valid.
    """
    active = find_active()
    problem = import_problem(active)
    config = None
    if options.config is not None and problem is None:
        from megatron.rl.config import load_config

        config = load_config(options.config, options.overrides, options.presets)
    findings = []
    for finding in _findings(active, problem, config, asked_for_config=options.config is not None):
        findings.append(finding)
        if not options.json and (finding.level == "error" or not options.errors_only):
            print(finding.line(), flush=True)
    if options.json:
        print(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=1))
    return int(any(finding.level == "error" for finding in findings))


def _findings(
    active: ActivePackages, problem: str | None, config: "Config | None", *, asked_for_config: bool
) -> Iterator[Finding]:
    engine_python = os.environ.get("PDM_RL_ROLLOUT_PYTHON") or None
    if config is not None and config.rollout.python is not None:
        engine_python = config.rollout.python
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    with ThreadPoolExecutor(8) as pool:
        versions = pool.submit(probe.ask, probe.VERSIONS)
        torch = pool.submit(probe.ask, probe.TORCH)
        driver = pool.submit(_driver)
        megatron = pool.submit(probe.ask, probe.MEGATRON) if problem is None else None
        engine: tuple[Future[Any], Future[Any]] | None = None
        if engine_python is not None:
            engine = (
                pool.submit(probe.ask, probe.VERSIONS, python=engine_python),
                pool.submit(probe.ask, probe.TORCH, python=engine_python),
            )
        gloo = pool.submit(
            communication.reach_finding, "gloo", GLOO_RANKS, interface, probe.TIMEOUT_S
        )
        yield from _imports(active, problem)
        if megatron is not None:
            yield _megatron_training(megatron)
        found, graphics = _answer(versions), _answer(torch)
        yield from _torch(graphics, driver.result())
        gpus = graphics.get("gpus", [])
        yield from _packages(found, has_gpu=bool(gpus))
        their_versions = found
        if engine is not None:
            their_versions, their_torch = (_answer(one) for one in engine)
            yield from _engine_environment(
                str(engine_python), their_versions, their_torch, graphics
            )
        yield gloo.result()
        if gpus:
            yield communication.reach_finding(
                "nccl", min(len(gpus), MOST_NCCL_RANKS), "the GPUs' links", probe.TIMEOUT_S
            )
    folder = Path("runs" if config is None else config.run.folder)
    yield from machine.machine_findings(folder, has_gpu=bool(gpus))
    if problem is None:
        yield _sandbox()
    if config is not None:
        from megatron.rl.config_findings import Surroundings, config_findings

        surroundings = Surroundings(
            gpus=tuple((gpu["name"], tuple(gpu["capability"])) for gpu in gpus),
            cuda=graphics.get("cuda"),
            versions=packages.installed(found) if found.get("versions") else {},
        )
        on_gpu = bool(gpus) if config.run.device == "auto" else config.run.device == "cuda"
        engine_finding = _engine(their_versions, engine_python, on_gpu=on_gpu)
        yield from config_findings(config, surroundings, engine_finding)
    elif asked_for_config:
        yield Finding("error", "config", "cannot be looked at before the above is mended")


def _answer(asked: "Future[dict[str, Any]]") -> dict[str, Any]:
    """Return what an interpreter said, or why it did not, under ``failed``."""
    try:
        return asked.result()
    except probe.ProbeFailed as error:
        return {"failed": str(error)}


def _imports(active: ActivePackages, problem: str | None) -> Iterator[Finding]:
    yield Finding("ok", "python", f"{sys.version.split()[0]}, {sys.executable}")
    if problem is not None:
        yield Finding("error", "imports", problem)
    else:
        yield Finding("ok", "imports", f"megatron.rl and pdm of {OWN_ROOT}")
    if active.megatron_core is None and active.megatron_file is None:
        text = "not installed: pdm runs without it, megatron.rl does not"
        yield Finding("error", "megatron-core", text)


def _megatron_training(asked: "Future[dict[str, Any]]") -> Finding:
    subject = "megatron.training"
    try:
        if asked.result()["has_rl_utils"]:
            return Finding("ok", subject, "imports this megatron.rl")
    except probe.ProbeFailed as error:
        return Finding("error", subject, f"cannot be imported: {error}")
    return Finding(
        "error", subject, "could not import megatron.rl.rl_utils, and does not say why: try "
        "python -c 'import megatron.rl.rl_utils, megatron.rl.rl_profiling'",
    )  # fmt: skip


def _torch(answer: Mapping[str, Any], driver: str | None) -> Iterator[Finding]:
    if "failed" in answer:
        yield Finding("error", "torch", f"cannot be imported: {answer['failed']}")
        return
    cuda = f"CUDA {answer['cuda']}" if answer["cuda"] else "no CUDA"
    nccl = f", NCCL {answer['nccl']}" if answer["nccl"] else ""
    yield Finding("ok", "torch", f"{answer['version']}, built with {cuda}{nccl}")
    if not answer["gpus"]:
        why = f"a driver ({driver}), but torch sees none" if driver else "no driver"
        yield Finding("note", "GPUs", f"none: {why}; run.device is cpu here")
    else:
        yield Finding("ok", "driver", driver or "unknown version: nvidia-smi does not answer")
    for number, gpu in enumerate(answer["gpus"]):
        major, minor = gpu["capability"]
        memory = gpu["memory"] / machine.GIB
        text = f"{gpu['name']}, {memory:.0f} GiB, compute capability {major}.{minor}"
        yield Finding("ok", f"GPU {number}", text)


def _driver() -> str | None:
    """Return the version of NVIDIA's driver; None where there is none that answers."""
    try:
        result = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=NVIDIA_SMI_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = result.stdout.split()
    return lines[0] if result.returncode == 0 and lines else None


def _packages(answer: Mapping[str, Any], *, has_gpu: bool) -> Iterator[Finding]:
    if "failed" in answer:
        yield Finding("error", "packages", str(answer["failed"]))
        return
    versions = packages.installed(answer)
    yield from packages.pin_findings(versions, _wanted(answer, "gpu" if has_gpu else "cpu"))
    yield from packages.optional_findings(versions)


def _wanted(answer: Mapping[str, Any], extra: str) -> dict[str, str]:
    return packages.pins(answer.get("pins", ()), extra) or packages.file_pins(extra)


def _engine_environment(
    python: str, versions: Mapping[str, Any], torch: Mapping[str, Any], own: Mapping[str, Any]
) -> Iterator[Finding]:
    """Say what rollout.python has, and whether its NCCL and the trainer's are the same."""
    failed = versions.get("failed") or torch.get("failed")
    if failed:
        yield Finding("error", "rollout.python", f"{python}: {failed}")
        return
    text = f"{python}: Python {versions['python']}, torch {torch['version']}"
    yield Finding("ok", "rollout.python", text)
    if own.get("nccl") or torch["nccl"]:
        same = own.get("nccl") == torch["nccl"]
        text = f"{own.get('nccl')} here, {torch['nccl']} in rollout.python"
        text += "" if same else ": bridge.transport nccl wants one version"
        yield note_unless(same, "NCCL", text)


def _engine(answer: Mapping[str, Any], python: str | None, *, on_gpu: bool) -> Finding:
    where = "this environment" if python is None else f"rollout.python ({python})"
    if "failed" in answer:
        return Finding("error", packages.ENGINE, f"{where}: {answer['failed']}")
    wanted = _wanted(answer, "gpu") | _wanted(answer, "cpu")
    return packages.engine_finding(packages.installed(answer), wanted, where, on_gpu=on_gpu)


def _sandbox() -> Finding:
    from megatron.rl.rewards.sandbox import available

    try:
        report = available()
    except OSError as error:
        return Finding("note", "scoring", str(error))
    text = f"files are protected by {report.files}"
    text += ", network and processes by seccomp" if report.system_calls else ""
    if report.missing:
        text += f"; missing: {'; '.join(report.missing)}"
    return note_unless(report.complete, "scoring", text)
