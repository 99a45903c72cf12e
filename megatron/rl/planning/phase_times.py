# SPDX-License-Identifier: Apache-2.0
"""How long the phases of a rollout batch would take at the stated rates, and what limits each.

A roofline for each phase: the time of its matrix products, of its reads of memory and of its links
are worked out apart; what adds up and what overlaps is said at each place. Nothing here was
measured on the hardware; see :mod:`megatron.rl.planning.rates` for what it rests on.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from megatron.rl.config import Config
from megatron.rl.model.architecture import Architecture
from megatron.rl.planning.activations import Recompute
from megatron.rl.planning.engine_memory import EngineShape
from megatron.rl.planning.memory import MemoryPlan, ranks_per_node
from megatron.rl.planning.parameters import layer_matmul_parameters, rank_parameters
from megatron.rl.planning.precision import training_precision
from megatron.rl.planning.rates import Cluster
from megatron.rl.planning.traffic import Traffic
from megatron.rl.planning.training_memory import Workload, optimizer_bytes

# A multiplication and an addition for each parameter; backward has two such products.
_FORWARD, _FORWARD_AND_BACKWARD = 1, 3
# An optimizer step reads its tensors and the gradient, and writes most of them back.
_OPTIMIZER_PASSES = 2.5
# Into the bucket, out of it, and into the engine's own tensors.
_IPC_PASSES = 3
# To the host, and from there to the engine.
_HOST_PASSES = 2


@dataclass(frozen=True)
class PhaseTime:
    """One phase of a rollout batch; ``shares`` says where its seconds go."""

    phase: str
    shares: Mapping[str, float]

    @property
    def seconds(self) -> float:
        return sum(self.shares.values())

    @property
    def limit(self) -> str:
        """What takes most of it."""
        return max(self.shares, key=lambda share: self.shares[share])


def plan_times(
    config: Config,
    model: Architecture,
    cluster: Cluster,
    traffic: Traffic,
    memory: MemoryPlan,
) -> tuple[PhaseTime, ...]:
    """Predict the phases of one rollout batch, in their order."""
    phases = []
    if memory.engine is not None:
        phases.append(_sampling(config, model, cluster, traffic, memory))
    phases.append(_training(config, model, cluster, traffic))
    if memory.engine is not None:
        phases.append(_weight_sync(config, cluster, traffic, memory))
    if memory.placement == "shared, in turn":
        state = max(stage.optimizer for stage in memory.training)
        links = _HOST_PASSES * state / cluster.gpu.pcie_bytes
        phases.append(PhaseTime("hand over", {"PCIe: optimizer to the host and back": links}))
    return tuple(phases)


def token_flops(model: Architecture, tokens: int, sequences: int) -> tuple[float, float]:
    """FLOPs of a token in a forward pass: of the layers' linear products, and of attention.

    A causal query meets half of its sequence on average: ``2 x 2 x A x length / 2`` a layer.
    """
    linear = 2.0 * model.num_layers * layer_matmul_parameters(model)
    length = tokens / max(sequences, 1)
    attention = 2.0 * model.num_layers * model.num_heads * model.head_dim * length
    return linear, attention


@dataclass(frozen=True)
class _Repeated:
    """Share of the forward products that recomputation does a second time."""

    linear: float
    attention: float


def _repeated(config: Config, model: Architecture) -> _Repeated:
    recompute = Recompute.of(config.megatron.transformer)
    if recompute.granularity == "full":
        return _Repeated(1.0, 1.0)
    linear = 0.0
    if ("moe" if model.is_moe else "mlp") in recompute.modules:
        linear = layer_matmul_parameters(model, ".mlp.") / layer_matmul_parameters(model)
    return _Repeated(linear, float("core_attn" in recompute.modules))


def _training(config: Config, model: Architecture, cluster: Cluster, traffic: Traffic) -> PhaseTime:
    layout, gpu, assumed = config.parallel, cluster.gpu, cluster.assumptions
    repeated = _repeated(config, model)
    tokens = traffic.tokens * config.train.epochs
    linear, attention = token_flops(model, traffic.tokens, traffic.sequences)
    if training_precision(config).fp8:
        rate = gpu.fp8_flops * assumed.fp8_efficiency
    else:
        rate = gpu.bf16_flops * assumed.training_efficiency
    wide = gpu.bf16_flops * assumed.training_efficiency
    # The head sees response tokens only, in BF16, and computes its gradient in the same pass.
    head = 2.0 * model.vocab_size * model.hidden_size * traffic.response_tokens
    head *= config.train.epochs * _FORWARD_AND_BACKWARD
    ranks = layout.world_size
    linear_passes = _FORWARD_AND_BACKWARD + repeated.linear
    attention_passes = _FORWARD_AND_BACKWARD + repeated.attention
    products = linear_passes * tokens * linear / rate / ranks
    products += (attention_passes * tokens * attention + head) / wide / ranks
    if config.train.mismatch == "every_token":
        products += _FORWARD * traffic.tokens * (linear / rate + attention / wide) / ranks
    workload = Workload.of(config)
    bubble = (layout.pipeline - 1) / (workload.micro_batches * (layout.virtual or 1))
    visible = 1.0 - assumed.overlap
    shares = {
        "matrix products": products,
        "pipeline idle": products * bubble,
        "optimizer: memory": traffic.steps * _optimizer_seconds(config, model, cluster),
    }
    for name, size, spread in (
        ("tensor parallelism", traffic.tensor_bytes, layout.tensor),
        ("expert all-to-all", traffic.expert_bytes, layout.expert),
        ("gradients and weights", traffic.gradient_bytes, layout.stage_size),
    ):
        where, link = _link(spread, config, cluster)
        shares[f"{name}: {where}"] = visible * size / (link * assumed.link_efficiency)
    return PhaseTime("train", shares)


def _optimizer_seconds(config: Config, model: Architecture, cluster: Cluster) -> float:
    """Read and write the optimizer's tensors, and the gradients that it uses."""
    parameters = rank_parameters(model, config.parallel, 0)
    width = training_precision(config).weight_bytes
    size = _OPTIMIZER_PASSES * optimizer_bytes(parameters, config.parallel, width, config)
    return size / cluster.gpu.memory_bytes


def _link(spread: int, config: Config, cluster: Cluster) -> tuple[str, float]:
    """The slowest link among so many consecutive ranks."""
    if spread <= ranks_per_node(config, cluster):
        return "NVLink", cluster.gpu.nvlink_bytes
    return "network", cluster.gpu.network_bytes


def _sampling(
    config: Config,
    model: Architecture,
    cluster: Cluster,
    traffic: Traffic,
    memory: MemoryPlan,
) -> PhaseTime:
    """Prompts in one go, then decoding; the longest response is decoded to its end.

    A decoding step reads the engine's weights and the KV cache of its sequences, or computes for
    as long; a sparse model reads the experts that at least one token goes to.
    """
    engine = memory.engine
    assert engine is not None
    gpu, assumed, shape = cluster.gpu, cluster.assumptions, EngineShape.of(config)
    engines = num_engines(config, cluster)
    sequences = -(-traffic.sequences // engines)
    prompt = (traffic.tokens - traffic.response_tokens) / traffic.sequences
    response = traffic.response_tokens / traffic.sequences
    context = prompt + response / 2
    room = max(1.0, memory.kv_cache / engine.kv_a_token / (prompt + response))
    running = min(config.rollout.max_num_seqs, sequences, room)
    linear, attention = token_flops(model, traffic.tokens, traffic.sequences)
    head = 2.0 * model.vocab_size * model.hidden_size
    fp8 = config.bridge.quantization == "block_fp8"
    flops = (gpu.fp8_flops if fp8 else gpu.bf16_flops) * shape.gpus

    def step(batch: float) -> tuple[float, float]:
        read = engine.weights * _touched(model, batch)
        read += batch * context * engine.kv_a_token
        reading = read / (gpu.memory_bytes * assumed.decode_efficiency)
        computing = batch * (linear + head) / (flops * assumed.prefill_efficiency)
        return reading, computing

    reading, computing = step(running)
    steps = sequences * response / running
    prefill = sequences * prompt * (linear + attention) / (flops * assumed.prefill_efficiency)
    shares = {
        "prompts: matrix products": prefill,
        "decoding: memory": steps * reading if reading >= computing else 0.0,
        "decoding: matrix products": steps * computing if computing > reading else 0.0,
        "decoding: latency of steps": steps * assumed.decode_step_s,
    }
    # However many sequences run at once, the longest one takes all of its steps.
    rest = config.rollout.max_response_tokens - steps
    if rest > 0:
        shares["longest response"] = rest * (step(1.0)[0] + assumed.decode_step_s)
    return PhaseTime("sample", {name: value for name, value in shares.items() if value > 0})


def _touched(model: Architecture, batch: float) -> float:
    """Share of the weights that a decoding step reads: of the experts, those with a token."""
    if not model.is_moe:
        return 1.0
    return 1.0 - (1.0 - model.experts_per_token / model.num_experts) ** batch


def num_engines(config: Config, cluster: Cluster) -> int:
    """Return how many engines the run has, over all nodes."""
    ranks = ranks_per_node(config, cluster)
    return config.rollout.engines_per_node * -(-config.parallel.world_size // ranks)


def _weight_sync(
    config: Config, cluster: Cluster, traffic: Traffic, memory: MemoryPlan
) -> PhaseTime:
    """Gather whole tensors on each node, then bring them to its engines.

    Every node needs all of the weights; what no rank of it holds comes over the network.
    """
    gpu, assumed = cluster.gpu, cluster.assumptions
    ranks = ranks_per_node(config, cluster)
    held = min(1.0, ranks / (config.parallel.pipeline * _shard_ranks(config)))
    link = gpu.network_bytes if held < 1.0 else gpu.nvlink_bytes
    moved = traffic.weight_bytes * (1.0 - held if held < 1.0 else 1.0)
    shares = {
        f"gather: {'network' if held < 1.0 else 'NVLink'}": moved / (link * assumed.link_efficiency)
    }
    transport = config.bridge.transport
    if transport == "cuda_ipc":
        shares["hand over: memory"] = _IPC_PASSES * traffic.weight_bytes / gpu.memory_bytes
    elif transport == "nccl":
        shares["hand over: NVLink"] = traffic.weight_bytes / (
            gpu.nvlink_bytes * assumed.link_efficiency
        )
    else:
        # One rank writes to the host's memory, and every GPU of the engine reads all of it.
        shares["hand over: PCIe"] = (
            _HOST_PASSES * traffic.weight_bytes / (gpu.pcie_bytes * assumed.link_efficiency)
        )
    return PhaseTime("sync", shares)


def _shard_ranks(config: Config) -> int:
    """Consecutive ranks of a stage that hold all of its weights between them."""
    return max(config.parallel.tensor, config.parallel.expert)
