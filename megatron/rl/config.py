# SPDX-License-Identifier: Apache-2.0
"""The run's configuration: one YAML file, ``--set`` overrides, everything checked before it starts.

Each section is a frozen dataclass; those that belong to one module are defined there. A file may
name another one as its ``base``, or several of which a later one wins, and then holds only what
differs. Files given by ``--with`` (a mask, a cluster) are merged over it in the same way.
"""

import dataclasses
import difflib
import os
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import TypeAdapter, ValidationError

from megatron.rl.checkpoint.settings import CheckpointConfig
from megatron.rl.config_checks import check_ranges
from megatron.rl.errors import UserError
from megatron.rl.model.fp8 import FP8Format, FP8Recipe
from megatron.rl.parallel import ParallelConfig
from megatron.rl.plain_files import parse_yaml, read_yaml
from megatron.rl.rewards.reward_terms import RewardConfig
from megatron.rl.rewards.scoring_limits import ScoringLimits
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
    fp8: FP8Recipe = "none"
    """Linear layers multiply in FP8 while training: ``blockwise`` (Hopper; emulated on CPU),
    ``mxfp8`` (Blackwell), ``tensorwise`` or ``delayed``. Block scales are bridge.scales."""
    fp8_format: FP8Format = "e4m3"
    """``hybrid`` has e5m2 for gradients, whose range tensor-wide scales need."""
    fp8_params: bool = False
    """Keep and gather the parameters themselves in FP8; GPU only."""
    fp8_skip_first: int = 0
    """Layers at the start of the model that multiply in ``dtype``..."""
    fp8_skip_last: int = 0
    """...and at its end."""


@dataclass(frozen=True)
class TaskConfig:
    """Prompts with verifiable rewards."""

    name: str = ""
    """``reasoning_gym/<data set>``, or ``package.module:Class`` for a task of one's own."""
    params: dict[str, Any] = field(default_factory=dict)
    """Settings of the data set."""
    exact: bool = False
    """Reward 1 for a full score and 0 otherwise, instead of the task's partial credit."""
    reward: str | None = None
    """``package.module:function`` that scores instead of the task's own rule: it takes the text of
    the response and the prompt, and returns a number in [0, 1]."""
    template: str = "auto"
    """How a question is put: ``chat``, the model's chat template; ``base``, the question and a line
    end; ``auto``, the first where the model has one; or a text of one's own with ``{question}``."""
    system_prompt: str | None = None
    """Of the chat template."""
    template_args: dict[str, Any] = field(default_factory=dict)
    """Further variables of the chat template, for example ``enable_thinking: false``."""


@dataclass(frozen=True)
class RolloutConfig:
    """How responses are sampled from the current policy."""

    prompts: int = 64
    """Prompts in a rollout batch."""
    group_size: int = 8
    """Responses to each prompt."""
    refill_rounds: int = 0
    """Dynamic sampling: groups that teach nothing, since all their scores are equal, are replaced
    by further prompts, in up to so many rounds a batch; 0 trains on every group."""
    refill_policy: Literal["smaller", "keep"] = "smaller"
    """Where groups are missing after the last round: ``smaller`` trains on those that are there,
    ``keep`` fills the batch up with groups that teach nothing."""
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
    """Interpreter that has vLLM, where it is not the trainer's own; by default the one that the
    variable PDM_RL_ROLLOUT_PYTHON names."""
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

    @property
    def refills(self) -> int:
        """Rounds of refilling that may follow the first; a replay takes batches as recorded."""
        return 0 if self.engine == "replay" else self.refill_rounds


@dataclass(frozen=True)
class BridgeConfig:
    """How weights reach the engine, and the proof that they did."""

    transport: Literal["auto", "shared_memory", "cuda_ipc", "nccl"] = "auto"
    """``auto``: shared memory. ``cuda_ipc``: engine on the trainer's GPUs. ``nccl``: on others."""
    quantization: Literal["none", "block_fp8"] = "none"
    """``block_fp8``: linear layers in e4m3 with 128 x 128 blocks. On CPU the engine computes with
    the dequantised weights."""
    scales: Literal["power_of_two", "float32"] = "power_of_two"
    """Block scales, of weights that are sent and of training with model.fp8 blockwise;
    Transformer Engine's default is a power of two, rounded up."""
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
    overlong_filter: bool = False
    """Leave responses that were cut at rollout.max_response_tokens out of the loss and of its
    means; their rewards stay in the baseline of their group."""
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
    """Held-out prompts and benchmarks, before, during and after training."""

    prompts: int = 256
    """Held-out prompts of the task, one response each."""
    every: int = 0
    """Evaluate after every so many rollout batches; 0: only at the start and at the end."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_response_tokens: int | None = None
    """Longest response; by default rollout.max_response_tokens."""
    benches: list[str] | dict[str, str] = field(default_factory=list)
    """Benchmarks beside the held-out prompts: names, as of ``pdm-rl eval``, whose files are in
    ``data``, or a file for each name."""
    data: str | None = None
    """Folder of benchmark files; by default the one that the variable PDM_RL_DATA names."""
    samples: int = 16
    """Responses to each problem of a benchmark."""
    problems: int | None = None
    """The first so many problems of each benchmark; by default all."""

    def response_limit(self, rollout: RolloutConfig) -> int:
        """Longest response of an evaluation, the default settled."""
        limit = self.max_response_tokens
        return rollout.max_response_tokens if limit is None else limit


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
    reward: RewardConfig = field(default_factory=RewardConfig)
    scoring: ScoringLimits = field(default_factory=ScoringLimits)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    bridge: BridgeConfig = field(default_factory=BridgeConfig)
    records: RecordsConfig = field(default_factory=RecordsConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    loss: PolicyLossConfig = field(default_factory=PolicyLossConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    megatron: MegatronConfig = field(default_factory=MegatronConfig)


def load_config(
    path: str | Path,
    overrides: typing.Sequence[str] = (),
    presets: typing.Sequence[str | Path] = (),
) -> Config:
    """Read a config file, merge presets and overrides over it, check what needs no model.

    Args:
        overrides: ``key=value``, which win over everything; of two the later one.
        presets: further files, merged over the first in the order given.

    Raises:
        UserError: no such file, bad YAML, an unknown key, a value of the wrong type or out of
            range; the message names the key and what would be right.
    """
    tree: dict[str, Any] = {}
    for file in (path, *presets):
        tree = _merge(tree, _read_tree(Path(file), seen=()))
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
    if not os.path.isfile(path):  # Path.is_file raises for a name that is too long
        raise UserError(f"no such config file: {path}")
    real = path.resolve()
    if real in seen:
        raise UserError(f"{path}: base files form a circle")
    tree = read_yaml(path) or {}
    if not isinstance(tree, dict):
        raise UserError(f"{path}: expected sections of settings, found {type(tree).__name__}")
    merged: dict[str, Any] = {}
    for base in _base_names(path, tree.pop("base", None)):
        merged = _merge(merged, _read_tree(path.parent / base, (*seen, real)))
    return _merge(merged, tree)


def _base_names(path: Path, base: object) -> list[str]:
    names = base if isinstance(base, list) else [] if base is None else [base]
    for name in names:
        if not isinstance(name, str):
            raise UserError(f"{path}: base: expected a file or a list of files, got {base!r}")
    return [str(name) for name in names]


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
        node[name] = parse_yaml(text, key)
    except UserError:
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
