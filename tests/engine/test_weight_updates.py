# SPDX-License-Identifier: Apache-2.0
"""A live update equals a fresh engine bit for bit, and what breaks on the way is always noticed."""

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from megatron.rl.rollout.client.vllm_engine import VLLMEngine
from megatron.rl.rollout.errors import WeightsLost, WeightsMismatch
from megatron.rl.rollout.protocol import GenerationRequest, SamplingSettings
from megatron.rl.rollout.rollouts import Rollouts
from megatron.rl.rollout.transfer.weight_transport import SharedMemoryTransport
from megatron.rl.weights.block_fp8 import (
    BlockFP8,
    dequantize_weight,
    is_quantized,
    quantize_weight,
)
from tests.engine.conftest import cpu_config, run_engine
from tests.engine.tiny_model import (
    Tensors,
    build_dense_model,
    build_model,
    checkpoint_tensors,
    perturbed,
    save_checkpoint,
)

REQUEST = GenerationRequest.from_lists(
    [[5, 6, 7], list(range(100, 20, -1)) * 2],
    4,
    SamplingSettings(max_tokens=12, top_logprobs=20, topk_precision="float32", seed=11),
)
SCORED = [np.arange(5, 25, dtype=np.int32), np.array([90, 3], dtype=np.int32)]
Scores = list[NDArray[np.float32]]


def assert_identical(got: Rollouts, expected: Rollouts) -> None:
    left, right = got.arrays(), expected.arrays()
    for name in left.keys() - {"policy_versions"}:
        assert left[name].tobytes() == right[name].tobytes(), f"{name} differs"


@torch.no_grad()
def reference_scores(model: torch.nn.Module) -> Scores:
    """Log-probs of the scored tokens by transformers, in float64 from the logits on."""
    result = []
    for tokens in SCORED:
        ids = torch.from_numpy(tokens.astype(np.int64))[None]
        log_probs = model(ids).logits[0, :-1].double().log_softmax(-1)
        result.append(log_probs.gather(1, ids[0, 1:, None])[:, 0].float().numpy())
    return result


def deviation(got: Scores, expected: Scores) -> float:
    assert [len(scores) for scores in got] == [len(tokens) - 1 for tokens in SCORED]
    return max(float(abs(g - e).max()) for g, e in zip(got, expected, strict=True))


def through_fp8(tensors: Tensors) -> Tensors:
    """What block FP8 makes of the weights of linear layers, in bfloat16."""
    result = {}
    for name, tensor in tensors.items():
        result[name] = tensor.bfloat16()
        if is_quantized(name):
            quantized = quantize_weight(tensor, BlockFP8())
            values = dequantize_weight(quantized.data, quantized.scale_inv, torch.bfloat16)
            result[name] = values
            assert not torch.equal(values, tensor.bfloat16())
    return result


@dataclass
class Bridge:
    """An engine with its model, and a hook that runs when a bucket has been packed."""

    engine: VLLMEngine
    model: torch.nn.Module
    tensors: Tensors
    on_bucket: Callable[[SharedMemoryTransport, tuple[str, ...]], None] | None = None


@pytest.fixture
def hooked(monkeypatch: pytest.MonkeyPatch) -> Callable[[Bridge], Bridge]:
    """Between the sender and the engine: after packing, before the engine is told."""

    def hook(bridge: Bridge) -> Bridge:
        describe = SharedMemoryTransport.describe

        def described(self: SharedMemoryTransport, bucket: tuple[str, ...]) -> dict:
            if bridge.on_bucket is not None:
                bridge.on_bucket(self, bucket)
            return describe(self, bucket)

        monkeypatch.setattr(SharedMemoryTransport, "describe", described)
        bridge.engine.update_weights(bridge.tensors, 0)
        # The tiny model would fit into one bucket: a few tensors each, across layers.
        packer = bridge.engine._weights._packer
        monkeypatch.setattr(packer, "_bucket_bytes", 30_000)
        return bridge

    return hook


@pytest.fixture
def moe(moe_engine, checkpoint, hooked) -> Bridge:
    return hooked(Bridge(moe_engine.engine, checkpoint.model, checkpoint.tensors))


@pytest.fixture(scope="module")
def fp8_engine(tmp_path_factory) -> Iterator[tuple[VLLMEngine, torch.nn.Module]]:
    """A dense bfloat16 engine with a tied head that gets its weights in block FP8."""
    model = build_dense_model(seed=1)
    folder = save_checkpoint(model, tmp_path_factory.mktemp("dense") / "model")
    log = tmp_path_factory.mktemp("log") / "engine.log"
    config = cpu_config(
        folder, dtype="bfloat16", quantization="block_fp8", log_path=str(log), max_restarts=1
    )
    for held in run_engine(config):
        yield held.engine, model


@pytest.fixture
def fp8(fp8_engine, hooked) -> Bridge:
    engine, model = fp8_engine
    return hooked(Bridge(engine, model, checkpoint_tensors(model)))


def shapes_of(tensors: Tensors) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}


def test_scores_are_those_of_transformers(moe: Bridge) -> None:
    expected = reference_scores(moe.model)
    assert deviation(moe.engine.score(SCORED), expected) < 1e-5
    # Neither a cached prefix nor other requests change what is scored.
    moe.engine.generate(REQUEST)
    first = moe.engine.score(SCORED)
    again = moe.engine.score(SCORED)
    assert deviation(again, first) == 0 and deviation(first, expected) < 1e-5


def test_an_update_in_buckets_is_the_same_update(moe: Bridge) -> None:
    """Layers span buckets, and the iterator runs while the engine loads."""
    buckets = []
    moe.on_bucket = lambda transport, bucket: buckets.append(bucket)
    start = moe.engine.generate(REQUEST)
    new = perturbed(moe.tensors, seed=7)
    report = moe.engine.update_weights(new, 1)
    assert len(buckets) > 8
    layers = [{name.split(".")[2] for name in bucket if "layers" in name} for bucket in buckets]
    assert sum("0" in layer for layer in layers) > 2, "a layer must span buckets"
    assert (report.version, report.tensors) == (1, len(new))
    assert report.nbytes == sum(tensor.nbytes for tensor in new.values())
    assert report.digests_compared == len(new) and report.digests_unmapped == ()
    once = moe.engine.generate(REQUEST)
    assert once.log_probs.tobytes() != start.log_probs.tobytes()
    shuffled = dict(sorted(new.items(), key=lambda item: hash(item[0])))
    moe.engine.update_weights(iter(shuffled.items()), 2, shapes_of(shuffled))
    assert_identical(moe.engine.generate(REQUEST), once)
    moe.engine.update_weights(moe.tensors, 3)
    assert_identical(moe.engine.generate(REQUEST), start)


def test_a_tensor_may_be_assembled_where_the_engine_reads(moe: Bridge) -> None:
    new = perturbed(moe.tensors, seed=7)
    moe.engine.update_weights(new, 1)
    expected = moe.engine.generate(REQUEST)
    moe.engine.update_weights(moe.tensors, 2)

    def assembled() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in new.items():
            slot = moe.engine.weight_slot(name, tensor.shape)
            assert slot is not None
            yield name, slot.copy_(tensor)

    moe.engine.update_weights(assembled(), 3, shapes_of(new))
    assert_identical(moe.engine.generate(REQUEST), expected)


EXPERTS = "model.layers.1.mlp.experts."


def transpose_block(transport: SharedMemoryTransport, name: str) -> None:
    block = transport.slot(name)[:128, :128]
    block.copy_(block.t().clone())


def flip_a_bit(transport: SharedMemoryTransport, name: str) -> None:
    transport.slot(name).view(torch.uint8).flatten()[333] ^= 1


def check_that_it_is_noticed(
    bridge: Bridge, new: Tensors, spoil: Callable[[SharedMemoryTransport], None], name: str
) -> None:
    """Spoil one update on its way; the engine refuses to work, until a right update comes."""
    start = bridge.engine.generate(REQUEST)
    bucket_of = name.removesuffix("_scale_inv")

    def on_bucket(transport: SharedMemoryTransport, bucket: tuple[str, ...]) -> None:
        if bucket_of in bucket:
            spoil(transport)

    bridge.on_bucket = on_bucket
    with pytest.raises(WeightsMismatch, match=rf"{bucket_of} \(sent [0-9a-f]{{16}}, held"):
        bridge.engine.update_weights(new, 8)
    bridge.on_bucket = None
    pid = bridge.engine.pid
    with pytest.raises(WeightsLost, match="update the weights"):
        bridge.engine.generate(REQUEST)
    with pytest.raises(WeightsLost):
        bridge.engine.score(SCORED)
    bridge.engine.update_weights(bridge.tensors, 9)
    assert_identical(bridge.engine.generate(REQUEST), start)
    assert bridge.engine.pid == pid


@pytest.mark.parametrize("kind", ["another expert", "kept old", "flipped bit", "kept old norm"])
def test_broken_moe_bridges_are_noticed(moe: Bridge, kind: str) -> None:
    new = perturbed(moe.tensors, seed=7)
    name = f"{EXPERTS}2.down_proj.weight"
    if kind == "kept old norm":
        name = "model.layers.0.self_attn.k_norm.weight"

    def spoil(transport: SharedMemoryTransport) -> None:
        if kind == "another expert":
            transport.slot(name).copy_(new[f"{EXPERTS}3.down_proj.weight"])
        elif kind == "flipped bit":
            flip_a_bit(transport, name)
        else:
            transport.slot(name).copy_(moe.tensors[name])

    check_that_it_is_noticed(moe, new, spoil, name)


@pytest.mark.parametrize("kind", ["stale scale", "transposed block", "flipped bit", "stale head"])
def test_broken_fp8_bridges_are_noticed(fp8: Bridge, kind: str) -> None:
    new = {name: 1.5 * tensor for name, tensor in perturbed(fp8.tensors, seed=7).items()}
    name = "model.layers.1.mlp.gate_proj.weight"
    if kind == "stale head":
        name = "model.embed_tokens.weight"

    def spoil(transport: SharedMemoryTransport) -> None:
        if kind == "stale scale":
            old = quantize_weight(fp8.tensors[name], BlockFP8()).scale_inv
            assert not torch.equal(transport.slot(f"{name}_scale_inv"), old)
            transport.slot(f"{name}_scale_inv").copy_(old)
        elif kind == "transposed block":
            transpose_block(transport, name)
        elif kind == "flipped bit":
            flip_a_bit(transport, name)
        else:
            transport.slot(name).copy_(fp8.tensors[name])

    check_that_it_is_noticed(fp8, new, spoil, name)


def test_what_is_wrong_before_it_is_sent_shows_in_the_scores(moe: Bridge) -> None:
    """Digests cannot know; the log-probs of fixed tokens do."""
    expected = reference_scores(moe.model)
    q, k = (f"model.layers.0.self_attn.{x}_proj.weight" for x in "qk")
    down = (f"{EXPERTS}0.down_proj.weight", f"{EXPERTS}1.down_proj.weight")
    rows = moe.tensors[q].shape[0] // 2
    for change in (
        {down[0]: moe.tensors[down[1]], down[1]: moe.tensors[down[0]]},
        # q, k, v of one key-value group after the other, cut as if all of q came first.
        {q: torch.cat([moe.tensors[q][:rows], moe.tensors[k]])[: 2 * rows]},
        {k: moe.tensors[k].flip(0)},
    ):
        moe.engine.update_weights({**moe.tensors, **change}, 1)
        assert deviation(moe.engine.score(SCORED), expected) > 100 * 1e-5, list(change)
    moe.engine.update_weights(moe.tensors, 2)
    assert deviation(moe.engine.score(SCORED), expected) < 1e-5


def test_fp8_weights_equal_a_fresh_engine_with_the_dequantised_ones(
    fp8: Bridge, tmp_path: Path
) -> None:
    new = perturbed(fp8.tensors, seed=7)
    fp8.engine.update_weights(new, 1)
    once = fp8.engine.generate(REQUEST)
    fp8.engine.update_weights(fp8.tensors, 2)
    report = fp8.engine.update_weights(new, 3)
    assert report.digests_compared == len(new) and report.digests_unmapped == ()
    assert report.nbytes < 0.75 * sum(2 * tensor.numel() for tensor in new.values())
    folder = save_checkpoint(fp8.model, tmp_path / "model", through_fp8(new))
    for held in run_engine(cpu_config(folder, dtype="bfloat16", max_restarts=0)):
        fresh = held.engine.generate(REQUEST)
        fresh_scores = held.engine.score(SCORED)
    assert_identical(fp8.engine.generate(REQUEST), fresh)
    assert_identical(once, fresh)
    assert deviation(fp8.engine.score(SCORED), fresh_scores) == 0


def test_a_source_that_fails_half_way_leaves_no_mixture(fp8: Bridge) -> None:
    start, pid = fp8.engine.generate(REQUEST), fp8.engine.pid
    new = perturbed(fp8.tensors, seed=7)

    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(new.items())[:15]
        raise KeyError("rank 3 is gone")

    # Nothing is known of the names: nothing was sent, and the old weights go on.
    with pytest.raises(KeyError):
        fp8.engine.update_weights(gathered(), 5)
    assert_identical(fp8.engine.generate(REQUEST), start)
    # The engine was loading already: its process is ended.
    with pytest.raises(KeyError):
        fp8.engine.update_weights(gathered(), 5, shapes_of(new))
    with pytest.raises(WeightsLost):
        fp8.engine.generate(REQUEST)
    fp8.engine.update_weights(fp8.tensors, 6)
    assert_identical(fp8.engine.generate(REQUEST), start)
    assert fp8.engine.pid != pid and fp8.engine.restarts == 0


def test_a_death_in_the_middle_of_an_update_ends_with_the_new_weights(fp8: Bridge) -> None:
    new = perturbed(fp8.tensors, seed=7)
    fp8.engine.update_weights(new, 1)
    expected = fp8.engine.generate(REQUEST)
    fp8.engine.update_weights(fp8.tensors, 2)
    buckets = []

    def kill(transport: SharedMemoryTransport, bucket: tuple[str, ...]) -> None:
        buckets.append(bucket)
        if len(buckets) == 3:
            os.kill(fp8.engine.pid, signal.SIGKILL)

    fp8.on_bucket = kill
    report = fp8.engine.update_weights(new, 3)
    assert fp8.engine.restarts == 1 and report.digests_compared == len(new)
    got = fp8.engine.generate(REQUEST)
    assert (got.policy_versions == 3).all()
    assert_identical(got, expected)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("build", [build_model, build_dense_model])
@pytest.mark.parametrize("quantization", ["none", "block_fp8"])
def test_updates_equal_a_fresh_engine(
    build: Callable[[int], torch.nn.Module], dtype: str, quantization: str, tmp_path: Path
) -> None:
    model = build(0)
    tensors = checkpoint_tensors(model)
    new = perturbed(tensors, seed=3)
    held_by_fresh = new
    if quantization == "block_fp8":
        held_by_fresh = {
            name: value if is_quantized(name) else new[name]
            for name, value in through_fp8(new).items()
        }
    folder = save_checkpoint(model, tmp_path / "new", held_by_fresh)
    for held in run_engine(cpu_config(folder, dtype=dtype, max_restarts=0)):
        fresh = held.engine.generate(REQUEST)
    folder = save_checkpoint(model, tmp_path / "old")
    config = cpu_config(folder, dtype=dtype, quantization=quantization, max_restarts=0)
    for held in run_engine(config):
        engine = held.engine
        for version, weights in enumerate((tensors, new, new, tensors, new)):
            report = engine.update_weights(weights, version)
            assert report.digests_compared == len(tensors)
        assert_identical(engine.generate(REQUEST), fresh)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "arguments"),
    [
        (build_dense_model, {"tensor_parallel_size": 2}),
        # One key-value head, which both workers hold.
        (lambda seed: build_dense_model(seed, 1), {"tensor_parallel_size": 2}),
        (build_model, {"tensor_parallel_size": 2}),
        (build_model, {"tensor_parallel_size": 2, "enable_expert_parallel": True}),
    ],
)
def test_digests_of_a_sharded_engine_add_up(
    build: Callable[[int], torch.nn.Module], arguments: dict, tmp_path: Path
) -> None:
    model = build(0)
    tensors = checkpoint_tensors(model)
    folder = save_checkpoint(model, tmp_path / "model")
    config = cpu_config(folder, max_restarts=0, engine_args=arguments)
    for held in run_engine(config):
        for version, weights in enumerate((tensors, perturbed(tensors, seed=3))):
            report = held.engine.update_weights(weights, version)
            assert report.digests_compared == len(tensors) and report.digests_unmapped == ()
        if "enable_expert_parallel" not in arguments:  # vLLM's CPU kernel ends its process then
            held.engine.update_weights(tensors, 3)
            assert deviation(held.engine.score(SCORED), reference_scores(model)) < 1e-5
