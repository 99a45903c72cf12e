# SPDX-License-Identifier: Apache-2.0
"""One packed batch through Megatron's schedule in a given layout, and through a float64 oracle."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from pdm import PolicyLossConfig

TEMPERATURE = 0.8
TOP_K = 5
# Megatron's own names: every layer's activations are computed again in backward.
RECOMPUTE = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
LOSS = PolicyLossConfig(mask="divergence", direction="uniform", threshold=0.3)


@dataclass(frozen=True)
class Case:
    """A layout, and how the batch is cut into micro-batches."""

    model_path: str
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    data: int = 1
    expert: int = 1
    sequence: bool | None = None
    virtual: int | None = None
    last_stage_layers: int | None = None
    micro_batch_tokens: int = 40
    loss: PolicyLossConfig = LOSS
    head: str = "fused"
    recompute: bool = False
    shuffle: int | None = None
    """Seed of another order of the sequences in the rollout batch."""

    @property
    def world_size(self) -> int:
        return self.tensor * self.pipeline * self.context * self.data


@dataclass(frozen=True)
class Outcome:
    """What rank 0 learnt: gradients under Hugging Face names, and per-token results by sequence."""

    gradients: dict[str, torch.Tensor]
    log_probs: torch.Tensor
    keep: torch.Tensor
    num_micro_batches: int
    weights: dict[str, torch.Tensor]


def packed(  # type: ignore[no-untyped-def]
    sequences, layout, *, members=None, max_tokens: int = 40, loss: PolicyLossConfig = LOSS
):
    """Return this rank's micro-batches of a minibatch: all sequences, or those of `members`."""
    from megatron.core import parallel_state

    from megatron.rl.batch import MinibatchSize, pack, plan_micro_batches
    from megatron.rl.parallel import context_shard

    members = np.arange(len(sequences)) if members is None else members
    plan = plan_micro_batches(
        sequences.input_lengths,
        members,
        data_parallel=layout.data,
        max_tokens=max_tokens,
        count_multiple=layout.micro_batch_multiple,
    )
    return [
        pack(
            sequences,
            mine,
            minibatch=MinibatchSize.of(sequences.response_lengths[members]),
            loss=loss,
            pad_multiple=layout.tensor if layout.sequence_parallel else 1,
            device=torch.device("cpu"),
            context=context_shard(),
        )
        for mine in plan[parallel_state.get_data_parallel_rank()]
    ]


def build_policy(  # type: ignore[no-untyped-def]
    path: str,
    layout: dict[str, int],
    *,
    dtype: torch.dtype = torch.float32,
    loss: PolicyLossConfig = LOSS,
    temperature: float = TEMPERATURE,
    transformer: dict | None = None,
    **settings,
):
    """Build the groups of a layout and a policy with the fused head on this rank.

    Settings are those of the optimizer: a constant rate, one step and no weight decay by default.
    """
    from megatron.rl.model.architecture import read_architecture
    from megatron.rl.model.build import BuildOptions
    from megatron.rl.parallel import ParallelConfig, build_groups
    from megatron.rl.policy.head import FusedHead
    from megatron.rl.policy.model import OptimizerSettings, Policy

    parallel = ParallelConfig(**layout)
    build_groups(parallel, seed=1)
    architecture = read_architecture(path)
    defaults = dict(
        learning_rate=1e-3,
        min_learning_rate=0.0,
        warmup_steps=0,
        total_steps=1,
        schedule="constant",
        weight_decay=0.0,
        clip_grad=1.0,
        ddp={},
        optimizer={},
    )
    return Policy(
        architecture,
        parallel,
        BuildOptions(dtype, transformer or {}),
        OptimizerSettings(**(defaults | settings)),
        FusedHead(loss, architecture.vocab_size, temperature),
        path,
    )


def make_sequences(vocab_size: int, seed: int = 0):  # type: ignore[no-untyped-def]
    """Ragged prompts and responses, with behavior log-probs of a random distribution."""
    from megatron.rl.batch import Sequences
    from megatron.rl.rollout.topk_columns import TopKColumns

    rng = np.random.default_rng(seed)
    prompts, responses = [3, 1, 5, 2, 4, 3, 2, 6], [4, 9, 1, 6, 12, 3, 5, 2]
    count, total = len(prompts), sum(responses)
    response_tokens = rng.integers(0, vocab_size, total).astype(np.int32)
    logits = rng.normal(size=(total, vocab_size)) * 2
    log_mu = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    top = np.argsort(-log_mu, axis=-1)[:, :TOP_K]
    # Half of the sampled tokens are among the top K, half anywhere.
    inside = rng.random(total) < 0.5
    response_tokens[inside] = top[inside, 1]
    return Sequences(
        number=np.arange(count),
        prompt_tokens=rng.integers(0, vocab_size, sum(prompts)).astype(np.int32),
        prompt_offsets=np.cumsum([0, *prompts]),
        response_tokens=response_tokens,
        response_offsets=np.cumsum([0, *responses]),
        group=np.arange(count) // 2,
        advantages=rng.normal(size=count).astype(np.float32),
        log_probs=log_mu[np.arange(total), response_tokens].astype(np.float32),
        topk=TopKColumns.encode(top, np.take_along_axis(log_mu, top, -1), vocab_size, "float32"),
        policy_versions=np.zeros(total, dtype=np.int32),
    )


def run_cases(rank: int, world_size: int, cases: list[Case]) -> list[Outcome] | None:
    """Run each case on these ranks, one after the other; rank 0 returns the outcomes."""
    from megatron.rl import cpu_backend

    cpu_backend.install()
    from megatron.core import parallel_state

    torch.set_num_threads(1)
    outcomes = []
    for case in cases:
        outcomes.append(_run_case(rank, case))
        parallel_state.destroy_model_parallel()
    return outcomes if rank == 0 else None


def _run_case(rank: int, case: Case) -> Outcome | None:
    """Run forward, backward and finalize on this rank."""
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )

    from megatron.rl.model.architecture import read_architecture
    from megatron.rl.model.build import BuildOptions, build_model, parameter_naming
    from megatron.rl.parallel import ParallelConfig, build_groups
    from megatron.rl.policy.head import FusedHead, ReferenceHead
    from megatron.rl.policy.step import forward_backward
    from megatron.rl.weights.gather import gather_hf_tensors
    from megatron.rl.weights.load import load_hf_checkpoint
    from megatron.rl.weights.plan import plan_weights

    layout = ParallelConfig(
        tensor=case.tensor,
        pipeline=case.pipeline,
        context=case.context,
        data=case.data,
        expert=case.expert,
        sequence=case.sequence,
        virtual=case.virtual,
        last_stage_layers=case.last_stage_layers,
    )
    architecture = read_architecture(case.model_path)
    layout.check(architecture)
    build_groups(layout, seed=1)
    chunks = build_model(
        architecture, layout, BuildOptions(transformer=RECOMPUTE if case.recompute else {})
    )
    weight_plan = plan_weights(architecture, layout, parameter_naming())
    load_hf_checkpoint(chunks, weight_plan, case.model_path, rank=rank)
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, average_in_collective=False)
    wrapped = [DistributedDataParallel(chunk.config, ddp, chunk) for chunk in chunks]
    chunks[0].config.finalize_model_grads_func = finalize_model_grads

    sequences = make_sequences(architecture.vocab_size)
    everyone = np.arange(len(sequences))
    token_order = np.arange(len(sequences.response_tokens))
    if case.shuffle is not None:
        order = np.random.default_rng(case.shuffle).permutation(everyone)
        sequences, token_order = _reordered(sequences, order)
    batches = packed(sequences, layout, max_tokens=case.micro_batch_tokens, loss=case.loss)
    kind = {"fused": FusedHead, "reference": ReferenceHead}[case.head]
    head = kind(case.loss, architecture.vocab_size, TEMPERATURE)
    for chunk in wrapped:
        chunk.zero_grad_buffer()
    records = forward_backward(wrapped, head, batches)
    gradients = {
        name: tensor.clone()
        for name, tensor in gather_hf_tensors(
            chunks, weight_plan, value=lambda parameter: parameter.main_grad
        )
    }
    weights = {name: tensor.clone() for name, tensor in gather_hf_tensors(chunks, weight_plan)}
    tokens = _collect_tokens(batches, records, sequences)
    if rank != 0:
        return None
    in_first_order = np.argsort(token_order)
    return Outcome(gradients, *(t[in_first_order] for t in tokens), len(batches), weights)


def _reordered(sequences, order):  # type: ignore[no-untyped-def]
    """The same sequences in another order, and which of the old tokens each new one is."""
    prompts, responses = (
        np.concatenate([np.arange(*offsets[b : b + 2]) for b in order])
        for offsets in (sequences.prompt_offsets, sequences.response_offsets)
    )
    per_token = ("response_tokens", "log_probs", "policy_versions")
    return dataclasses.replace(
        sequences,
        prompt_tokens=sequences.prompt_tokens[prompts],
        prompt_offsets=np.cumsum([0, *np.diff(sequences.prompt_offsets)[order]]),
        response_offsets=np.cumsum([0, *sequences.response_lengths[order]]),
        group=sequences.group[order],
        advantages=sequences.advantages[order],
        topk=sequences.topk.take(responses),
        **{name: getattr(sequences, name)[responses] for name in per_token},
    ), responses


def _collect_tokens(batches, records, sequences):  # type: ignore[no-untyped-def]
    """Put each rank's token results into the batch's order, and sum over ranks that hold them.

    A token is one context-parallel rank's, and every tensor-parallel rank's.
    """
    from megatron.core import parallel_state

    table = torch.zeros(3, len(sequences.response_tokens))
    if records and parallel_state.get_tensor_model_parallel_rank() == 0:
        for batch, record in zip(batches, records, strict=True):
            where = _token_positions(batch, sequences)
            table[0, where] = record.policy_log_prob
            table[1, where] = record.keep.float()
            table[2, where] += 1
    torch.distributed.all_reduce(table)
    assert (table[2] == 1).all(), "every token is trained on once"
    return table[0], table[1].bool()


def _token_positions(batch, sequences):  # type: ignore[no-untyped-def]
    """The number of each row's token within the rollout batch, by the position that predicts it."""
    sequence = batch.sequence.numpy()
    prompt_lengths = np.diff(sequences.prompt_offsets)[sequence]
    within = batch.position_ids[0, batch.rows].numpy() - (prompt_lengths - 1)
    return torch.from_numpy(sequences.response_offsets[sequence] + within)


def float64_oracle(model_path: str | Path, loss: PolicyLossConfig) -> Outcome:
    """The same batch, one sequence at a time, through transformers in float64 and autograd.

    The mask is written out again from the paper's formulas (Eq. 5, 11, 13).
    """
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        model_path, dtype=torch.float64, experts_implementation="eager"
    )
    model.config._attn_implementation = "eager"
    sequences = make_sequences(model.config.vocab_size)
    total_loss = torch.zeros((), dtype=torch.float64)
    log_probs, keeps = [], []
    for b in range(len(sequences)):
        prompt = sequences.prompt_tokens[slice(*sequences.prompt_offsets[b : b + 2])]
        first, last = sequences.response_offsets[b : b + 2]
        response = torch.from_numpy(sequences.response_tokens[first:last]).long()
        ids = torch.cat([torch.from_numpy(prompt).long(), response])
        logits = model(ids[None]).logits[0, len(prompt) - 1 : -1] / TEMPERATURE
        log_pi = logits.log_softmax(-1)
        for t, token in enumerate(response.tolist()):
            keep, ratio = _oracle_mask(sequences, first + t, token, log_pi[t].detach(), b, loss)
            total_loss = total_loss - keep * float(sequences.advantages[b]) * ratio * (
                log_pi[t, token] - log_pi[t, token].detach()
            )
            log_probs.append(log_pi[t, token].detach())
            keeps.append(keep)
    (total_loss / len(log_probs)).backward()
    gradients = _per_expert_gradients(model)
    weights = load_file(Path(model_path) / "model.safetensors")
    return Outcome(gradients, torch.stack(log_probs), torch.tensor(keeps), 0, weights)


def _oracle_mask(sequences, token_index, token, log_pi, b, loss):  # type: ignore[no-untyped-def]
    ids, log_probs = sequences.topk.decode([token_index])
    mu = {
        int(i): float(np.exp(np.float64(value)))
        for i, value in zip(ids[0], log_probs[0], strict=True)
    }
    mu[token] = float(np.exp(np.float64(sequences.log_probs[token_index])))
    pi = {i: float(log_pi[i].exp()) for i in mu}
    mu_tail, pi_tail = 1 - sum(mu.values()), 1 - sum(pi.values())
    divergence = sum(mu[i] * np.log(mu[i] / pi[i]) for i in mu)
    divergence += mu_tail * np.log(mu_tail / pi_tail)
    direction = pi[token] - mu[token] + sum(pi[i] * (mu[i] - pi[i]) for i in mu)
    direction += pi_tail * (mu_tail - pi_tail) / (len(log_pi) - len(mu))
    outward = np.sign(sequences.advantages[b]) * np.sign(direction) > 0
    keep = not (divergence > loss.threshold and outward)
    return keep, pi[token] / mu[token]


def _per_expert_gradients(model):  # type: ignore[no-untyped-def]
    """Gradients under the names of a checkpoint: transformers fuses experts into two tensors."""
    gradients = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if name.endswith("experts.gate_up_proj"):
            for expert, both in enumerate(gradient):
                prefix = name.removesuffix("gate_up_proj") + str(expert)
                gate, up = both.chunk(2)
                gradients[f"{prefix}.gate_proj.weight"] = gate
                gradients[f"{prefix}.up_proj.weight"] = up
        elif name.endswith("experts.down_proj"):
            for expert, down in enumerate(gradient):
                prefix = name.removesuffix("down_proj") + str(expert)
                gradients[f"{prefix}.down_proj.weight"] = down
        else:
            gradients[name] = gradient
    return gradients
