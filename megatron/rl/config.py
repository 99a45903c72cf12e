# SPDX-License-Identifier: Apache-2.0
"""The run's configuration: one YAML file, ``--set`` overrides, everything checked before it starts.

Each section is a frozen dataclass; those that belong to one module are defined there. A file may
name another one as its ``base`` and then holds only what differs.
"""

import dataclasses
import difflib
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import TypeAdapter, ValidationError

from megatron.rl.config_checks import check_ranges
from megatron.rl.errors import UserError
from megatron.rl.parallel import ParallelConfig
from pdm import PolicyLossConfig


@dataclass(frozen=True)
class RunConfig:
    """What is this run, and where does it put its files."""

    name: str = "run"
    folder: str = "runs"
    """A new folder ``<folder>/<name>-<date>-<time>`` is made here."""
    seed: int = 1
    device: Literal["cpu", "cuda", "auto"] = "auto"
    export: bool = True
    """Write the final policy as a Hugging Face checkpoint, ``policy/`` in the run folder."""


@dataclass(frozen=True)
class ModelConfig:
    """The starting policy."""

    path: str = ""
    """A Hugging Face model folder: config.json, weights in safetensors, tokenizer."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"


@dataclass(frozen=True)
class TaskConfig:
    """Prompts with verifiable rewards."""

    name: str = ""
    """``reasoning_gym/<data set>``, or ``package.module:Class`` for a task of one's own."""
    params: dict[str, Any] = field(default_factory=dict)
    """Settings of the data set."""
    exact: bool = False
    """Reward 1 for a full score and 0 otherwise, instead of the task's partial credit."""


@dataclass(frozen=True)
class RolloutConfig:
    """How responses are sampled from the current policy."""

    prompts: int = 64
    """Prompts in a rollout batch."""
    group_size: int = 8
    """Responses to each prompt."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_prompt_tokens: int = 2048
    max_response_tokens: int = 8192
    top_logprobs: int = 20
    """K: behavior log-probs recorded beside the sampled token's."""
    max_num_seqs: int = 256
    """Sequences that the engine runs at once."""
    dtype: Literal["same", "float32", "bfloat16"] = "same"
    """Precision of the engine's weights; ``same`` as model.dtype."""
    engine: Literal["vllm", "vllm_server", "replay"] = "vllm"
    """``vllm``: processes of our own on each node. ``vllm_server``: a server that runs already, at
    ``server_url``. ``replay``: the records in ``replay_from`` instead of an engine."""
    engines_per_node: int = 1
    """Engines on each node; prompts are split evenly over all engines, groups stay whole."""
    replay_from: str | None = None
    """Folder of records, ``<run folder>/rollouts``, for engine replay."""
    server_url: str = "http://127.0.0.1:8000"
    server_token_variable: str | None = None
    """Environment variable that holds the server's token."""
    server_allow_remote: bool = False
    """Allow a server_url beyond the loopback interface: its control routes have no
    authentication of their own."""
    topk_precision: Literal["fp24", "float32"] = "fp24"
    """How the top-K log-probs are stored: fp24 keeps 16 significant bits."""
    sleep: bool = False
    """The engine shares the trainer's GPUs: it sleeps while the policy trains, and the trainer's
    gradients and optimizer are offloaded while it samples."""
    python: str | None = None
    """Interpreter that has vLLM, where it is not the trainer's own."""
    threads: int | None = None
    """CPU threads of the engine; by default one a core."""
    kv_cache_gib: float | None = None
    """KV cache of the engine; by default 1 on CPU, on GPU what gpu_memory_utilization leaves."""
    start_timeout_s: float = 600.0
    stall_timeout_s: float = 300.0
    """An engine that reports no progress for so long is restarted."""
    max_restarts: int = 2
    engine_args: dict[str, Any] = field(default_factory=dict)
    """Further arguments of ``vllm.LLM``, under their own names."""


@dataclass(frozen=True)
class BridgeConfig:
    """How weights reach the engine, and the proof that they did."""

    transport: Literal["auto", "shared_memory", "cuda_ipc", "nccl"] = "auto"
    """``auto``: shared memory. ``cuda_ipc``: engine on the trainer's GPUs. ``nccl``: on others."""
    quantization: Literal["none", "block_fp8"] = "none"
    """``block_fp8``: linear layers in e4m3 with 128 x 128 blocks. On CPU the engine computes with
    the dequantised weights."""
    scales: Literal["power_of_two", "float32"] = "power_of_two"
    """Block scales; Transformer Engine's default is a power of two, rounded up."""
    bucket_mib: int = 256
    """Tensors are sent in buckets of about this size; one is loaded while the next is packed."""
    certificate: Literal["full", "digests", "off"] = "full"
    """After each update: ``digests`` compares every loaded parameter that maps back to a tensor of
    the checkpoint; ``full`` also compares log-probs on fixed prompts with the policy's."""
    probe_sequences: int = 8
    probe_tokens: int = 32
    probe_tolerance: float | None = None
    """Largest mean |log-prob difference| of the probe, in nats; by default by precision."""


@dataclass(frozen=True)
class RecordsConfig:
    """Rollouts written as Parquet, for replay and analysis."""

    write: bool = False
    keep: int = 0
    """Rollout batches to keep, the newest; 0 keeps all."""


@dataclass(frozen=True)
class TrainConfig:
    """From rollouts to optimizer steps."""

    rollouts: int = 100
    """Rollout batches; each is sampled from the policy that the one before left behind."""
    minibatch_prompts: int = 16
    """Prompts an optimizer step; the behavior policy stays the one that sampled them."""
    epochs: int = 1
    """Passes over a rollout batch."""
    micro_batch_tokens: int = 16384
    """Input tokens packed into one forward pass of a rank."""
    learning_rate: float = 1e-6
    min_learning_rate: float = 0.0
    warmup_steps: int = 0
    """Optimizer steps of linear warm-up."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    weight_decay: float = 0.01
    clip_grad: float = 1.0
    advantage_normalize: Literal["std", "none"] = "std"
    advantage_scale: float = 1.0
    """Multiplies every advantage; 0 is the control experiment in which nothing may be learnt."""
    mismatch: Literal["first_minibatch", "every_token"] = "first_minibatch"
    """How the mismatch of a step is split into what the engine adds and what updates add.
    ``first_minibatch`` measures the engine on the first step of a rollout batch, for nothing.
    ``every_token`` scores the whole batch before that step, one more forward pass, and splits
    each token's."""


@dataclass(frozen=True)
class EvalConfig:
    """Mean reward on held-out prompts, before, during and after training."""

    prompts: int = 256
    every: int = 0
    """Evaluate after every so many rollout batches; 0: only at the start and at the end."""
    temperature: float = 1.0
    top_p: float = 1.0


@dataclass(frozen=True)
class PolicyConfig:
    """How the head computes the loss."""

    head: Literal["fused", "reference"] = "fused"
    """``fused`` forms gradients in the forward pass, chunk by chunk; ``reference`` is plain
    autograd over all logits of a micro-batch."""
    logits_dtype: Literal["float32", "bfloat16"] = "float32"


@dataclass(frozen=True)
class MegatronConfig:
    """Any further field of Megatron's own configs, under its own name."""

    transformer: dict[str, Any] = field(default_factory=dict)
    ddp: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Config:
    """Everything that defines a run."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    bridge: BridgeConfig = field(default_factory=BridgeConfig)
    records: RecordsConfig = field(default_factory=RecordsConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    loss: PolicyLossConfig = field(default_factory=PolicyLossConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    megatron: MegatronConfig = field(default_factory=MegatronConfig)


def load_config(path: str | Path, overrides: typing.Sequence[str] = ()) -> Config:
    """Read a config file, apply ``key=value`` overrides, check everything that needs no model.

    Raises:
        UserError: no such file, bad YAML, an unknown key, a value of the wrong type or out of
            range; the message names the key and what would be right.
    """
    tree = _read_tree(Path(path), seen=())
    for override in overrides:
        _apply_override(tree, override)
    return parse_config(tree)


def parse_config(tree: dict[str, Any]) -> Config:
    """Turn nested dicts into a checked :class:`Config`; see :func:`load_config`."""
    _refuse_unknown_keys(tree, Config, "")
    try:
        config: Config = TypeAdapter(Config).validate_python(tree)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"] if not str(part).startswith("function-"))
        message = first["msg"].removeprefix("Value error, ")
        raise UserError(f"{key}: {message}, got {first['input']!r}") from None
    check_ranges(config)
    return config


def dump_config(config: Config) -> str:
    """Return the config as YAML that :func:`load_config` reads back to an equal one."""
    return yaml.safe_dump(dataclasses.asdict(config), sort_keys=False)


def _read_tree(path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    if not path.is_file():
        raise UserError(f"no such config file: {path}")
    if path in seen:
        raise UserError(f"{path}: base files form a circle")
    try:
        tree = yaml.safe_load(path.read_text()) or {}
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict):
        raise UserError(f"{path}: expected sections of settings, found {type(tree).__name__}")
    base = tree.pop("base", None)
    if base is None:
        return tree
    return _merge(_read_tree(path.parent / base, (*seen, path)), tree)


def _merge(base: dict[str, Any], tree: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in tree.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both else value
    return merged


def _apply_override(tree: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise UserError(f"--set {override}: expected key=value, for example loss.direction=exact")
    *sections, name = key.strip().split(".")
    node = tree
    for section in sections:
        child = node.setdefault(section, {})
        if not isinstance(child, dict):
            raise UserError(f"--set {override}: {section} is a value, not a section")
        node = child
    try:
        node[name] = yaml.safe_load(text)
    except yaml.YAMLError:
        node[name] = text


def _refuse_unknown_keys(tree: dict[str, Any], schema: type, prefix: str) -> None:
    known = {f.name for f in dataclasses.fields(schema)}
    hints = typing.get_type_hints(schema)
    for key, value in tree.items():
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = (
                f"did you mean {prefix}{near[0]}?" if near else f"known: {', '.join(sorted(known))}"
            )
            raise UserError(f"unknown setting {prefix}{key}; {hint}")
        section = _without_none(hints[key])
        if dataclasses.is_dataclass(section) and isinstance(section, type):
            if value is None and section is not hints[key]:
                continue
            if not isinstance(value, dict):
                raise UserError(f"{prefix}{key}: expected a section of settings, got {value!r}")
            _refuse_unknown_keys(value, section, f"{prefix}{key}.")


def _without_none(hint: Any) -> Any:
    """Return T of ``T | None``, and anything else as it is."""
    options = [option for option in typing.get_args(hint) if option is not type(None)]
    return options[0] if isinstance(hint, types.UnionType) and len(options) == 1 else hint
