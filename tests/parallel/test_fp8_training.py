# SPDX-License-Identifier: Apache-2.0
"""Emulated FP8 in the Megatron model: which layers, over ranks, and the weights of the engine."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.rl.model.fp8 import FP8Settings
from tests.checkpoints import QWEN3, QWEN3_MOE, write_checkpoint
from tests.parallel.spawn import run_ranks

BLOCKWISE = FP8Settings("blockwise")
# Every projection has whole blocks on each of two ranks: heads of 128, one group a rank.
WHOLE: dict[str, Any] = {
    "hidden_size": 256,
    "head_dim": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 3,
}
Layout = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A model, a layout, and how it multiplies."""

    model: str
    layout: Layout
    fp8: FP8Settings = BLOCKWISE

    @property
    def world_size(self) -> int:
        return math.prod(self.layout.get(name, 1) for name in ("tensor", "pipeline"))


@dataclass(frozen=True)
class Outcome:
    """What rank 0 has, but ``modules``, those that multiply in FP8, which is by rank.

    ``products_see``: every weight as products see it; ``gradients``: of every weight. Both under
    Hugging Face names.
    """

    modules: list[list[str]]
    products_see: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor]


FLOAT32_SCALES = FP8Settings("blockwise", scales="float32")
TWO = {"tensor": 2}
TWO_EXPERT = {"tensor": 2, "expert": 2}
CASES = {
    "dense": Case("dense", {}),
    "dense TP2": Case("dense", TWO),
    "dense TP2 unsplit": Case("dense", {"tensor": 2, "sequence": False}),
    "dense plain": Case("dense", {}, FP8Settings()),
    "moe": Case("moe", {}),
    "moe TP2": Case("moe", TWO_EXPERT),
    "moe plain": Case("moe", {}, FP8Settings()),
    "moe float32": Case("moe", {}, FLOAT32_SCALES),
    "moe TP2 float32": Case("moe", TWO_EXPERT, FLOAT32_SCALES),
    "moe skipping": Case("moe", {}, FP8Settings("blockwise", skip_first=1, skip_last=1)),
    "PP2 skipping": Case(
        "dense",
        {"pipeline": 2, "first_stage_layers": 1},
        FP8Settings("blockwise", skip_last=1),
    ),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    configs = {"dense": QWEN3 | WHOLE, "moe": QWEN3_MOE | WHOLE}
    return {name: str(write_checkpoint(folder / name, c)) for name, c in configs.items()}


@pytest.fixture(scope="module")
def alone(models: dict[str, str]) -> dict[str, Outcome]:
    return run_all(models, 1)


@pytest.fixture(scope="module")
def two(models: dict[str, str]) -> dict[str, Outcome]:
    return run_all(models, 2)


def run_all(models: dict[str, str], world_size: int) -> dict[str, Outcome]:
    """All cases of a number of ranks, in one set of processes."""
    cases = {name: case for name, case in CASES.items() if case.world_size == world_size}
    by_rank = run_ranks(run_cases, world_size, models, cases, timeout_s=300)
    return {
        name: Outcome([rank[name][0] for rank in by_rank], *by_rank[0][name][1:]) for name in cases
    }


def run_cases(
    rank: int, world_size: int, models: dict[str, str], cases: dict[str, Case]
) -> dict[str, tuple[Any, ...]]:
    from megatron.rl import cpu_backend

    cpu_backend.install()
    from megatron.core import parallel_state

    results = {}
    for name, case in cases.items():
        results[name] = run_model(rank, models[case.model], case.layout, case.fp8)
        parallel_state.destroy_model_parallel()
    return results


def run_model(rank: int, path: str, layout: Layout, settings: FP8Settings) -> tuple[Any, ...]:
    """One forward and backward pass through this rank's part; what an :class:`Outcome` holds."""
    from megatron.rl.model.architecture import read_architecture
    from megatron.rl.model.build import BuildOptions, build_model, parameter_naming
    from megatron.rl.model.fp8_linear import (
        BlockwiseColumnParallelLinear,
        BlockwiseRowParallelLinear,
    )
    from megatron.rl.parallel import ParallelConfig, build_groups
    from megatron.rl.weights.load import load_hf_checkpoint
    from megatron.rl.weights.plan import plan_weights

    parallel, architecture = ParallelConfig(**layout), read_architecture(path)
    build_groups(parallel, seed=1)
    chunks = build_model(architecture, parallel, BuildOptions(fp8=settings))
    plan = plan_weights(architecture, parallel, parameter_naming())
    load_hf_checkpoint(chunks, plan, path, rank=rank)
    kinds = (BlockwiseColumnParallelLinear, BlockwiseRowParallelLinear)
    blockwise = {
        name: module
        for chunk in chunks
        for name, module in chunk.named_modules()
        if isinstance(module, kinds)
    }
    return (
        sorted(blockwise),
        _what_products_see(chunks, plan, blockwise),
        _gradients(chunks, plan, architecture.vocab_size),
    )


def _what_products_see(chunks, plan, blockwise):  # type: ignore[no-untyped-def]
    """Replace each weight by what FP8 products see of it, and gather under Hugging Face names."""
    from megatron.rl.model.fp8_emulation import round_weight
    from megatron.rl.weights.gather import gather_hf_tensors

    seen = {id(m.weight): round_weight(m.weight, m._recipe) for m in blockwise.values()}
    gathered = gather_hf_tensors(
        chunks, plan, value=lambda parameter: seen.get(id(parameter), parameter)
    )
    return {name: tensor.clone() for name, tensor in gathered}


def _gradients(chunks, plan, vocab_size):  # type: ignore[no-untyped-def]
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )

    from megatron.rl.batch import MinibatchSize, pack, plan_micro_batches
    from megatron.rl.parallel import context_shard
    from megatron.rl.policy.head import FusedHead
    from megatron.rl.policy.step import forward_backward
    from megatron.rl.weights.gather import gather_hf_tensors
    from tests.parallel.policy_case import LOSS, TEMPERATURE, make_sequences

    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, average_in_collective=False)
    wrapped = [DistributedDataParallel(chunk.config, ddp, chunk) for chunk in chunks]
    chunks[0].config.finalize_model_grads_func = finalize_model_grads
    sequences = make_sequences(vocab_size)
    (members,) = plan_micro_batches(
        sequences.input_lengths,
        torch.arange(len(sequences)).numpy(),
        data_parallel=1,
        max_tokens=1024,
        count_multiple=1,
    )[0]
    batch = pack(
        sequences,
        members,
        minibatch=MinibatchSize.of(sequences.response_lengths),
        loss=LOSS,
        pad_multiple=2,
        device=torch.device("cpu"),
        context=context_shard(),
    )
    for chunk in wrapped:
        chunk.zero_grad_buffer()
    forward_backward(wrapped, FusedHead(LOSS, vocab_size, TEMPERATURE), [batch])
    gathered = gather_hf_tensors(chunks, plan, value=lambda parameter: parameter.main_grad)
    return {name: tensor.clone() for name, tensor in gathered}


def relative(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> dict[str, float]:
    return {name: float((a[name] - b[name]).norm() / b[name].norm()) for name in b}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "ranks"), [("dense", " TP2"), ("dense", " TP2 unsplit"), ("moe", " TP2")]
)
def test_two_tensor_parallel_ranks_compute_what_one_does(
    alone: dict[str, Outcome], two: dict[str, Outcome], model: str, ranks: str
) -> None:
    """Blocks are whole on both, so that the operands are the same; only sums are split.

    What is left is rounding, and where that moves an operand over the middle of two FP8 numbers,
    their distance.
    """
    whole, split, plain = alone[model], two[model + ranks], alone[f"{model} plain"]
    assert whole.gradients.keys() == split.gradients.keys() == plain.gradients.keys()
    for name, weight in whole.products_see.items():
        assert torch.equal(weight, split.products_see[name]), name
    by_split, by_fp8 = (
        relative(gradients, whole.gradients) for gradients in (split.gradients, plain.gradients)
    )
    for name in by_split:
        assert by_split[name] < 0.02, name
        if "proj" in name:
            assert by_fp8[name] > 2 * by_split[name], "FP8 itself moves gradients further"


@pytest.mark.parametrize(
    "ranks", [pytest.param("alone", marks=pytest.mark.slow), pytest.param("two")]
)
@pytest.mark.parametrize("scales", ["power_of_two", "float32"])
def test_the_engine_is_sent_the_weights_that_training_multiplies_with(
    models: dict[str, str], request: pytest.FixtureRequest, ranks: str, scales: str
) -> None:
    from safetensors.torch import load_file

    from megatron.rl.rollout.transfer.weight_format import WeightFormat
    from megatron.rl.weights.block_fp8 import allocate_quantized, dequantize_weight

    outcomes: dict[str, Outcome] = request.getfixturevalue(ranks)
    name = "moe TP2" if ranks == "two" else "moe"
    seen = outcomes[name + (" float32" if scales == "float32" else "")].products_see
    bridge = WeightFormat("float32", "block_fp8", scales)  # type: ignore[arg-type]
    checkpoint = load_file(Path(models["moe"]) / "model.safetensors")
    assert seen.keys() == checkpoint.keys()
    quantized = 0
    for name, weight in checkpoint.items():
        if not bridge.quantizes(name):
            assert torch.equal(seen[name], weight), name
            continue
        slots, parts = allocate_quantized(weight.shape), bridge.parts(name)
        places = (slots.data, slots.scale_inv)
        sent = bridge.pack(name, weight, dict(zip(parts, places, strict=True)))
        of_engine = dequantize_weight(*(sent[part] for part in parts))
        assert torch.equal(seen[name], of_engine), name
        assert not torch.equal(of_engine, weight)
        quantized += 1
    assert quantized == 3 * (4 + 4 * 3)  # q k v o, and three of each of four experts


ATTENTION = ("self_attention.linear_proj", "self_attention.linear_qkv")
MLP = ("mlp.linear_fc1", "mlp.linear_fc2")


def experts(number: int) -> tuple[str, ...]:
    """The linear layers of so many experts on a rank."""
    return tuple(
        f"mlp.experts.local_experts.{e}.linear_fc{n}" for e in range(number) for n in (1, 2)
    )


def in_layers(mlp: tuple[str, ...], layers: range) -> list[str]:
    return sorted(f"decoder.layers.{n}.{m}" for n in layers for m in (*ATTENTION, *mlp))


def test_projections_and_experts_multiply_in_fp8_and_nothing_else(two: dict[str, Outcome]) -> None:
    assert two["dense TP2"].modules == [in_layers(MLP, range(3))] * 2
    assert two["moe TP2"].modules == [in_layers(experts(2), range(3))] * 2
    # The second stage has two layers, of which the last one is the model's.
    assert two["PP2 skipping"].modules == [in_layers(MLP, range(1))] * 2


@pytest.mark.slow
def test_the_same_on_one_rank_and_without_the_ends(alone: dict[str, Outcome]) -> None:
    assert alone["dense"].modules == [in_layers(MLP, range(3))]
    assert alone["moe"].modules == [in_layers(experts(4), range(3))]
    assert alone["moe skipping"].modules == [in_layers(experts(4), range(1, 2))]
    assert alone["moe plain"].modules == [[]]


def load_into_fp8_parameters(rank: int, world_size: int, path: str) -> None:
    """Give parameters what Transformer Engine gives those that it keeps in FP8, and load."""
    from megatron.rl import cpu_backend

    cpu_backend.install()
    from megatron.rl.model.architecture import read_architecture
    from megatron.rl.model.build import BuildOptions, build_model, parameter_naming
    from megatron.rl.parallel import ParallelConfig, build_groups
    from megatron.rl.weights.load import load_hf_checkpoint
    from megatron.rl.weights.plan import plan_weights

    layout, architecture = ParallelConfig(), read_architecture(path)
    build_groups(layout, seed=1)
    kept, plain = (build_model(architecture, layout, BuildOptions()) for _ in range(2))
    masters = {}
    for name, parameter in kept[0].named_parameters():
        masters[name] = torch.full_like(parameter.detach(), torch.nan)
        parameter.get_high_precision_init_val = lambda value=masters[name]: value
    plan = plan_weights(architecture, layout, parameter_naming())
    for chunks in (kept, plain):
        load_hf_checkpoint(chunks, plan, path, rank=rank)
    loaded = dict(kept[0].named_parameters())
    for name, parameter in plain[0].named_parameters():
        assert torch.equal(masters[name], parameter), name
        assert torch.equal(loaded[name], parameter), name


@pytest.mark.slow
def test_masters_of_fp8_parameters_come_from_the_checkpoint(models: dict[str, str]) -> None:
    run_ranks(load_into_fp8_parameters, 1, models["moe"])
