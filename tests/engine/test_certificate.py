# SPDX-License-Identifier: Apache-2.0
"""Bridges that are wrong in ways that arrive intact: only the policy's own word tells.

What is sent is loaded exactly, so that all digests agree; the log-prob probe has to notice.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from megatron.rl.weights.certificate import DEFAULT_TOLERANCE
from tests.engine.conftest import TinyCheckpoint, cpu_config
from tests.parallel.spawn import run_ranks

Tensors = dict[str, torch.Tensor]
ATTENTION = "model.layers.1.self_attn."
EXPERTS = "model.layers.0.mlp.experts."


def nothing(tensors: Tensors, previous: Tensors) -> None:
    pass


def naive_qkv(tensors: Tensors, previous: Tensors) -> None:
    """Read Megatron's rows, interleaved by group, as all q, then all k, then all v."""
    names = [f"{ATTENTION}{x}_proj.weight" for x in "qkv"]
    q, k, v = (tensors[name].unflatten(0, (2, -1)) for name in names)  # 2 key-value groups
    rows = torch.cat([q, k, v], dim=1).flatten(0, 1)
    parts = rows.split([tensors[name].size(0) for name in names])
    tensors |= {name: part.clone() for name, part in zip(names, parts, strict=True)}


def swapped_experts(tensors: Tensors, previous: Tensors) -> None:
    for part in ("gate_proj", "up_proj", "down_proj"):
        first, second = (f"{EXPERTS}{expert}.{part}.weight" for expert in (1, 2))
        tensors[first], tensors[second] = tensors[second], tensors[first]


def swapped_gate_and_up(tensors: Tensors, previous: Tensors) -> None:
    gate, up = (f"{EXPERTS}3.{part}_proj.weight" for part in ("gate", "up"))
    tensors[gate], tensors[up] = tensors[up], tensors[gate]


def transposed_block(tensors: Tensors, previous: Tensors) -> None:
    block = tensors[ATTENTION + "o_proj.weight"][:64, :64]
    block.copy_(block.T.clone())


def one_tensor_left_behind(tensors: Tensors, previous: Tensors) -> None:
    name = f"{EXPERTS}2.down_proj.weight"
    tensors[name] = previous[name]


WRONG = (
    naive_qkv,
    swapped_experts,
    swapped_gate_and_up,
    transposed_block,
    one_tensor_left_behind,
)
Damage = Callable[[Tensors, Tensors], None]


class DamagedPolicy:
    """A policy whose tensors are damaged on their way to the engine."""

    def __init__(self, policy: object) -> None:
        self._policy = policy
        self.damage: Damage = nothing
        self.previous: Tensors = {}

    def __getattr__(self, name: str) -> object:
        return getattr(self._policy, name)

    def hf_tensors(self, **arguments: object) -> Iterator[tuple[str, torch.Tensor]]:
        arguments["allocate"] = None
        tensors = {name: t.clone() for name, t in self._policy.hf_tensors(**arguments)}
        right = dict(tensors)
        self.damage(tensors, self.previous)
        self.previous = right
        yield from tensors.items()


def bridge_outcomes(
    rank: int, world_size: int, folder: str, dtype: str, quantization: str
) -> dict[str, float | str]:
    """Send right weights and each kind of wrong ones through one engine; what came of it."""
    from megatron.rl import cpu_backend

    cpu_backend.install()
    from megatron.rl.config import parse_config
    from megatron.rl.model.architecture import read_architecture
    from megatron.rl.model.build import BuildOptions
    from megatron.rl.parallel import build_groups
    from megatron.rl.policy.from_config import DTYPES, optimizer_settings
    from megatron.rl.policy.head import FusedHead
    from megatron.rl.policy.model import Policy
    from megatron.rl.rollout.client.vllm_engine import VLLMEngine
    from megatron.rl.rollout.errors import WeightsMismatch
    from megatron.rl.rollout.from_config import run_topology
    from megatron.rl.weights.bridge import WeightBridge

    config = parse_config(
        {
            "run": {"device": "cpu"},
            "model": {"path": folder, "dtype": dtype},
            "task": {"name": "unused"},
            "bridge": {"quantization": quantization},
        }
    )
    build_groups(config.parallel, seed=1)
    architecture = read_architecture(folder)
    policy = Policy(
        architecture,
        config.parallel,
        BuildOptions(DTYPES[dtype]),
        optimizer_settings(config),
        FusedHead(config.loss, architecture.vocab_size, 1.0),
        folder,
    )
    damaged = DamagedPolicy(policy)
    outcomes: dict[str, float | str] = {}
    engine = VLLMEngine(cpu_config(Path(folder), dtype=dtype, quantization=quantization))
    with engine:
        engine.wait_ready()
        bridge = WeightBridge(config, damaged, run_topology(config), engine)
        if quantization == "none":
            outcomes["start"] = bridge.check_start().mean
        for version, damage in enumerate((nothing, *WRONG, nothing), start=1):
            _move_weights(policy, seed=version)
            damaged.damage = damage
            kind = damage.__name__ if version > 1 else "at first"
            try:
                report = bridge.update(version)
            except WeightsMismatch as error:
                outcomes[kind] = str(error)
            else:
                outcomes[kind] = report.probe.mean
                outcomes[f"compared by digest, {kind}"] = report.digests_compared
    return outcomes


@torch.no_grad()
def _move_weights(policy: object, seed: int) -> None:
    """As an optimizer would, but further."""
    torch.manual_seed(seed)
    for chunk in policy.chunks:
        for parameter in chunk.parameters():
            parameter.add_(
                0.1 * parameter.float().std().nan_to_num(0.1) * torch.randn_like(parameter)
            )


@pytest.mark.parametrize(
    ("dtype", "quantization"),
    [
        ("float32", "none"),
        pytest.param("bfloat16", "none", marks=pytest.mark.slow),
        pytest.param("float32", "block_fp8", marks=pytest.mark.slow),
    ],
)
def test_a_wrong_bridge_is_caught_and_a_right_one_is_not(
    checkpoint: TinyCheckpoint, dtype: str, quantization: str
) -> None:
    arguments = (str(checkpoint.folder), dtype, quantization)
    (outcomes,) = run_ranks(bridge_outcomes, 1, *arguments, timeout_s=300)
    for kind, outcome in outcomes.items():
        print(f"{dtype} {quantization} {kind}: {outcome}")
    tolerance = DEFAULT_TOLERANCE[dtype if quantization == "none" else quantization]
    for right in ("at first", "nothing"):
        assert outcomes[right] <= tolerance
        assert outcomes[f"compared by digest, {right}"] == len(checkpoint.tensors)
    if quantization == "none":
        assert outcomes["start"] <= tolerance
    # In low precision a tensor of the last version is within rounding; digests have to notice it.
    caught = WRONG if dtype == "float32" and quantization == "none" else WRONG[:-1]
    for damage in caught:
        assert "disagree" in str(outcomes[damage.__name__]), damage.__name__
    if caught == WRONG:
        assert outcomes["nothing"] < 1e-5
