# SPDX-License-Identifier: Apache-2.0
"""What of a config cannot run on this machine, and why: the part of ``pdm-rl doctor`` about it."""

import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from packaging.version import InvalidVersion, Version

from megatron.rl.checkpoint.free_space import GIB, room_for
from megatron.rl.config import Config
from megatron.rl.errors import UserError
from megatron.rl.model.architecture import read_architecture
from megatron.rl.model.fp8 import fp8_settings
from megatron.rl.model.fp8_requirements import (
    TRANSFORMER_ENGINE_PACKAGES,
    Platform,
    require_fp8_support,
)
from megatron.rl.planning.parameters import total_parameters
from megatron.rl.rollout.client.engine_config import PARALLEL_ARGUMENTS
from megatron.rl.rollout.errors import EngineConfigError
from megatron.rl.run_checks import RUN_CHECKS
from pdm_rl.doctor.finding import Finding, note_unless
from pdm_rl.doctor.packages import normal

# Of a parameter in a checkpoint: the weight, its FP32 master where it is not FP32 itself, and two
# moments of Adam.
CHECKPOINT_BYTES = {"bfloat16": 2 + 4 + 8, "float32": 4 + 8}


@dataclass(frozen=True)
class Surroundings:
    """What this machine has.

    Attributes:
        gpus: name and compute capability of each.
        cuda: version that torch was built with; None without CUDA.
        versions: of installed packages, by normal name.
    """

    gpus: tuple[tuple[str, tuple[int, int]], ...]
    cuda: str | None
    versions: Mapping[str, str]


def config_findings(config: Config, here: Surroundings, engine: Finding) -> Iterator[Finding]:
    """Check a config against this machine.

    Args:
        engine: whether the engine's environment has vLLM.
    """
    device = config.run.device
    if device == "auto":
        device = "cuda" if here.gpus else "cpu"
        config = replace(config, run=replace(config.run, device=device))
    if device == "cuda":
        yield _gpus(config, here)
        yield _fp8(config, here)
    if config.rollout.engine == "vllm":
        yield engine
    with _ranks_of_a_node(config, here):
        for one in RUN_CHECKS:
            yield _checked(config, one.subject, one.check)
    if config.checkpoint.every:
        yield from _checkpoint_room(config)


def _checked(config: Config, subject: str, check: Callable[[Config], None]) -> Finding:
    try:
        check(config)
    except (UserError, EngineConfigError) as error:
        return Finding("error", f"config: {subject}", str(error))
    return Finding("ok", f"config: {subject}", "can run here")


def _gpus(config: Config, here: Surroundings) -> Finding:
    ranks, gpus = config.parallel.world_size, len(here.gpus)
    subject = "config: GPUs"
    if not gpus:
        return Finding("error", subject, f"run.device is cuda for {ranks} ranks, there is no GPU")
    each = math.prod(int(config.rollout.engine_args.get(name, 1)) for name in PARALLEL_ARGUMENTS)
    if config.rollout.engine == "vllm" and each > gpus:
        text = f"an engine takes {each} GPUs (rollout.engine_args), this node has {gpus}"
        return Finding("error", subject, text)
    if ranks <= gpus:
        return Finding("ok", subject, f"{ranks} ranks on {gpus}")
    if ranks % gpus:
        text = f"{ranks} ranks do not fill nodes of {gpus} GPUs; change parallel.data"
        return Finding("error", subject, text)
    text = f"{ranks} ranks need {ranks // gpus} nodes with {gpus} GPUs like this one"
    return Finding("note", subject, text)


def _fp8(config: Config, here: Surroundings) -> Finding:
    names = (normal(name) for name in TRANSFORMER_ENGINE_PACKAGES)
    platform = Platform(
        transformer_engine=next((here.versions[n] for n in names if n in here.versions), None),
        capability=here.gpus[0][1] if here.gpus else None,
        cuda=_two(here.cuda),
    )
    try:
        require_fp8_support(fp8_settings(config), platform)
    except UserError as error:
        return Finding("error", "config: FP8", str(error))
    return Finding("ok", "config: FP8", f"model.fp8 is {config.model.fp8}")


def _two(version: str | None) -> tuple[int, int] | None:
    try:
        numbers = Version(version or "").release
    except InvalidVersion:
        return None
    return numbers[0], numbers[1] if len(numbers) > 1 else 0


@contextmanager
def _ranks_of_a_node(config: Config, here: Surroundings) -> Iterator[None]:
    """Count as many ranks on this node as it has GPUs, as torchrun will where there are more."""
    ranks, gpus = config.parallel.world_size, len(here.gpus)
    several = config.run.device == "cuda" and 0 < gpus < ranks and ranks % gpus == 0
    if not several or "LOCAL_WORLD_SIZE" in os.environ:
        yield
        return
    os.environ["LOCAL_WORLD_SIZE"] = str(gpus)
    try:
        yield
    finally:
        del os.environ["LOCAL_WORLD_SIZE"]


def _checkpoint_room(config: Config) -> Iterator[Finding]:
    """Compare the size of checkpoints with the free disk, where the model can be read."""
    try:
        model = read_architecture(config.model.path)
    except UserError:
        return
    nbytes = total_parameters(model) * CHECKPOINT_BYTES[config.model.dtype]
    folder = Path(os.path.abspath(config.run.folder))
    room = room_for(folder, nbytes, config.checkpoint.min_free_gib)
    kept = config.checkpoint.keep + config.checkpoint.keep_best + 1
    if not room.enough:
        yield Finding("error", "config: checkpoints", room.shortage(folder))
        return
    text = (
        f"{room.needed / GIB:.2f} GiB each, {kept} at a time, {room.free / GIB:.1f} GiB are free "
        f"in {folder}"
    )
    enough = room.free >= kept * room.needed + room.reserve
    yield note_unless(enough, "config: checkpoints", text)
