#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Make a tiny Qwen3-MoE that has half learnt a task: a starting policy for RL on a laptop.

It builds a tokenizer for the task's prompts, initialises a model of about half a million
parameters, and shows it training prompts with their answers until it answers a given share of
them right when sampled at temperature 1. The folder it leaves is an ordinary Hugging Face
checkpoint. The same settings give the same files, so a finished folder is kept as it is.
"""

import argparse
import contextlib
import copy
import dataclasses
import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from megatron.rl.rewards.reasoning_gym_task import ReasoningGymTask
    from megatron.rl.rewards.registry import TaskSpec
    from megatron.rl.rewards.scoring_pool import ScoringPool

# Raise it whenever the same settings would give another model: kept folders are then made anew.
SCRIPT_VERSION = 2
# Written last; a folder without it is not a finished model of ours.
MARKER = "tiny_model.json"

PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"
# A word becomes one token when so many of the task's prompts contain it; others are spelt.
WORD_SHARE = 0.2
PROMPTS_FOR_WORDS = 256

# Seeds of prompt sequences, away from the small numbers that people give to runs.
WARMUP_SEED_OFFSET = 1_000_000
VALIDATION_SEED_OFFSET = 2_000_000
VALIDATION_PROMPTS = 1024

# Both make the copying of letters come early and at once: larger initial weights than the usual
# 0.02, and rotary frequencies for texts of tens of tokens. What is copied rarely is then copied a
# little, and RL finds something to reward; with the usual values a longer warm-up ends no better.
INITIALIZER_RANGE = 0.04
ROPE_THETA = 100.0

BATCH_PROMPTS = 64
LEARNING_RATE = 1e-3
LEARNING_RATE_STEPS = 20
ADAM_BETAS = (0.9, 0.98)
CLIP_GRAD = 1.0
# Accuracy rises within few steps once it rises: then look more often.
LOOK_EVERY = 20
LOOK_EVERY_NEAR = 5
NEAR = 0.05

# What vLLM 0.32 serves on a CPU.
SIZE_UNIT = 32


class WarmupMissed(RuntimeError):
    """The accuracy did not come to rest in the window within the allowed steps."""


@dataclass(frozen=True)
class TinyModelSettings:
    """Everything that decides which model comes out."""

    seed: int = 0
    task: str = "reasoning_gym/spell_backward"
    params: dict[str, Any] = field(default_factory=lambda: {"min_word_len": 3, "max_word_len": 5})
    exact: bool = True
    max_response_tokens: int = 8
    """Longest answer sampled to measure the accuracy, end token included."""
    steps: int = 400
    """Most warm-up steps; 0 leaves the model at random."""
    window: tuple[float, float] = (0.34, 0.42)
    """Mean reward at temperature 1 at which the warm-up stops."""
    threads: int = 1
    """Other numbers of threads add in another order and give another model."""
    hidden_size: int = 128
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    experts: int = 8
    experts_per_token: int = 2
    expert_size: int = 64
    max_positions: int = 512

    def __post_init__(self) -> None:
        low, high = self.window
        for name, right, expected in (
            ("steps", self.steps >= 0, "0 or more"),
            ("window", 0 < low < high <= 1, "0 < LOW < HIGH <= 1"),
            ("threads", self.threads >= 1, "1 or more"),
            ("max_response_tokens", self.max_response_tokens >= 2, "2 or more"),
            ("layers", self.layers >= 1, "1 or more"),
            ("kv_heads", self.kv_heads >= 1, "1 or more"),
            ("heads", self.kv_heads >= 1 and self.heads % self.kv_heads == 0,
             f"a multiple of kv_heads ({self.kv_heads})"),
            ("experts", self.experts >= 2, "2 or more"),
            ("experts_per_token", 1 <= self.experts_per_token <= self.experts,
             f"1 to experts ({self.experts})"),
            *((name, getattr(self, name) > 0 and getattr(self, name) % SIZE_UNIT == 0,
               f"a multiple of {SIZE_UNIT}, or vLLM cannot serve it on a CPU")
              for name in ("hidden_size", "head_dim", "expert_size")),
        ):  # fmt: skip
            if not right:
                raise ValueError(f"{name}: expected {expected}, got {getattr(self, name)}")

    def digest(self) -> str:
        """Return a fingerprint of these settings and of this script's version."""
        text = json.dumps([SCRIPT_VERSION, dataclasses.asdict(self)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def make_tiny_model(
    out: str | Path, settings: TinyModelSettings, say: Callable[[str], None] = print
) -> bool:
    """Make the model in the folder `out`, unless a finished one of the same settings is there.

    The files are written into a folder beside `out` that takes its name at the very end: an
    interrupted call leaves nothing behind that looks finished.

    Returns:
        Whether a model was made.

    Raises:
        UserError: unknown task, bad task settings, or `out` holds something else.
        WarmupMissed: no accuracy inside the window was met; nothing is left behind.
    """
    from megatron.rl.errors import UserError
    from megatron.rl.rewards.registry import make_task

    target = Path(out)
    if _finished_digest(target) == settings.digest():
        say(f"{target} holds this model already, nothing to do")
        return False
    if target.exists() and _finished_digest(target) is None and not _is_empty_folder(target):
        raise UserError(f"{target} holds something else than a tiny model; choose another folder")

    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.partial-", dir=target.parent))
    try:
        with _quiet_and_seeded(settings):
            report = _write_model(partial, make_task(_task_spec(settings)), settings, say)
        marker = {
            "digest": settings.digest(),
            "script_version": SCRIPT_VERSION,
            "settings": dataclasses.asdict(settings),
            **report,
        }
        (partial / MARKER).write_text(json.dumps(marker, indent=2) + "\n")
        partial.chmod(0o777 & ~_umask())  # mkdtemp makes it for this user alone
        _put_in_place(partial, target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    say(f"{target} is ready")
    return True


def build_tokenizer(task: "ReasoningGymTask", settings: TinyModelSettings) -> Any:
    """Return a tokenizer with a token for each byte and for each common word of the prompts.

    Digits always stand alone and there are no merges: a word is one token or is spelt, so that the
    words that a task asks about are seen letter by letter. Every text survives a round trip.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    split = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    texts = [
        _as_shown(task.prompt("train", settings.seed + WARMUP_SEED_OFFSET, index).text)
        for index in range(PROMPTS_FOR_WORDS)
    ]
    prompts_with = Counter(
        word for text in texts for word in {word for word, _ in split.pre_tokenize_str(text)}
    )
    common = {word for word, n in prompts_with.items() if n >= WORD_SHARE * PROMPTS_FOR_WORDS}
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [PAD, BOS, EOS, *alphabet, *sorted(common - set(alphabet))]
    model = models.BPE(
        vocab={token: place for place, token in enumerate(tokens)}, merges=[], ignore_merges=True
    )
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([PAD, BOS, EOS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        clean_up_tokenization_spaces=False,
        model_max_length=settings.max_positions,
    )


def _task_spec(settings: TinyModelSettings) -> "TaskSpec":
    from megatron.rl.rewards.registry import TaskSpec

    return TaskSpec(settings.task, settings.params, settings.exact)


def _write_model(
    folder: Path, task: "ReasoningGymTask", settings: TinyModelSettings, say: Callable[[str], None]
) -> dict[str, Any]:
    """Make tokenizer and model, write them into `folder`, return what the marker reports."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from megatron.rl.rewards.scoring_pool import ScoringPool

    tokenizer = build_tokenizer(task, settings)
    model = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=len(tokenizer),
            hidden_size=settings.hidden_size,
            intermediate_size=settings.experts_per_token * settings.expert_size,
            num_hidden_layers=settings.layers,
            num_attention_heads=settings.heads,
            num_key_value_heads=settings.kv_heads,
            head_dim=settings.head_dim,
            num_experts=settings.experts,
            num_experts_per_tok=settings.experts_per_token,
            moe_intermediate_size=settings.expert_size,
            norm_topk_prob=True,
            decoder_sparse_step=1,
            tie_word_embeddings=False,
            max_position_embeddings=settings.max_positions,
            rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
            initializer_range=INITIALIZER_RANGE,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )
    say(
        f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer)} tokens, "
        f"seed {settings.seed}, {settings.threads} thread(s)"
    )
    report: dict[str, Any] = {"steps": 0, "accuracy": None}
    if settings.steps:
        with ScoringPool(_task_spec(settings)) as pool:
            report = _Warmup(model, tokenizer, task, settings, pool).run(say)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    return report


class _Warmup:
    """Supervised steps on training prompts, until sampled answers are right often enough."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        task: "ReasoningGymTask",
        settings: TinyModelSettings,
        pool: "ScoringPool",
    ) -> None:
        import torch

        self.model, self.tokenizer, self.task, self.settings = model, tokenizer, task, settings
        self.pool = pool
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=LEARNING_RATE, betas=ADAM_BETAS, weight_decay=0.0
        )
        self.learning_rate = LEARNING_RATE
        seed = settings.seed + VALIDATION_SEED_OFFSET
        self.validation = [task.prompt("train", seed, i) for i in range(VALIDATION_PROMPTS)]
        self.generator = torch.Generator()

    def run(self, say: Callable[[str], None]) -> dict[str, Any]:
        """Train until the accuracy is inside the window; raise WarmupMissed at the last step."""
        low, high = self.settings.window
        started, accuracy, before = time.perf_counter(), 0.0, self._copy()
        for step in range(1, self.settings.steps + 1):
            loss = self._step(step)
            if step % (LOOK_EVERY_NEAR if accuracy > NEAR else LOOK_EVERY):
                continue
            accuracy = self.accuracy()
            say(
                f"warm-up step {step} of at most {self.settings.steps}: loss {loss:.2f}, "
                f"accuracy {accuracy:.3f} (stops at {low:g} to {high:g}), "
                f"{time.perf_counter() - started:.0f} s"
            )
            if low <= accuracy <= high:
                return {"steps": step, "accuracy": accuracy}
            if accuracy > high:
                # Too far: back to the last look, and on in smaller steps.
                self.model.load_state_dict(before)
                self.learning_rate /= 2
            else:
                before = self._copy()
        raise WarmupMissed(
            f"after {self.settings.steps} warm-up steps the accuracy is {accuracy:.3f}, expected "
            f"{low:g} to {high:g}; allow more --steps, widen --window, or choose an easier task"
        )

    def accuracy(self) -> float:
        """Return the mean reward of one answer each to the validation prompts."""
        self.generator.manual_seed(self.settings.seed)
        answers = self._sample([prompt.text for prompt in self.validation])
        return float(self.pool.score(answers, self.validation).scores.mean())

    def _copy(self) -> dict[str, Any]:
        return copy.deepcopy(self.model.state_dict())

    def _step(self, step: int) -> float:
        import torch

        first = (step - 1) * BATCH_PROMPTS
        seed = self.settings.seed + WARMUP_SEED_OFFSET
        prompts = [self.task.prompt("train", seed, first + i) for i in range(BATCH_PROMPTS)]
        ids, seen, _, width = self._pad([prompt.text for prompt in prompts])
        answers = self.tokenizer(
            [self.task.reference_answer(prompt) + EOS for prompt in prompts],
            padding=True, padding_side="right", return_tensors="pt",
        )  # fmt: skip
        ids = torch.cat([ids, answers["input_ids"]], dim=1)
        answered = answers["attention_mask"].bool()
        seen = torch.cat([seen, answers["attention_mask"]], dim=1)
        hidden = self.model.model(
            input_ids=ids, attention_mask=seen, position_ids=_positions(seen)
        ).last_hidden_state[:, width - 1 : -1]
        loss = torch.nn.functional.cross_entropy(
            self.model.lm_head(hidden[answered]), ids[:, width:][answered]
        )
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate * min(1.0, step / LEARNING_RATE_STEPS)
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_GRAD)
        self.optimizer.step()
        return loss.item()

    def _sample(self, questions: Sequence[str]) -> list[str]:
        """Return one answer to each question, sampled at temperature 1."""
        import torch

        pad, eos = self.tokenizer.pad_token_id, self.tokenizer.eos_token_id
        ids, seen, positions, _ = self._pad(questions)
        ended = torch.zeros(len(questions), dtype=torch.bool)
        columns, cache = [], None
        with torch.no_grad():
            for _ in range(self.settings.max_response_tokens):
                output = self.model(
                    input_ids=ids, attention_mask=seen, position_ids=positions,
                    past_key_values=cache, use_cache=True, logits_to_keep=1,
                )  # fmt: skip
                cache = output.past_key_values
                probs = output.logits[:, -1].softmax(-1)
                drawn = torch.multinomial(probs, 1, generator=self.generator)
                ids = drawn.masked_fill(ended[:, None], pad)
                columns.append(ids)
                ended |= drawn[:, 0] == eos
                positions = positions[:, -1:] + 1
                seen = torch.cat([seen, torch.ones_like(ids)], dim=1)
        rows = torch.cat(columns, dim=1).tolist()
        ends = [row.index(eos) if eos in row else len(row) for row in rows]
        return [self.tokenizer.decode(row[:end]) for row, end in zip(rows, ends, strict=True)]

    def _pad(
        self, questions: Sequence[str]
    ) -> "tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]":
        """Pad prompts on the left: ids, attention mask and positions [P, width], and the width."""
        encoded = self.tokenizer(
            [_as_shown(question) for question in questions],
            padding=True, padding_side="left", return_tensors="pt",
        )  # fmt: skip
        seen = encoded["attention_mask"]
        return encoded["input_ids"], seen, _positions(seen), seen.shape[1]


def _positions(seen: "torch.Tensor") -> "torch.Tensor":
    return (seen.cumsum(1) - 1).clamp(min=0)


def _as_shown(question: str) -> str:
    """Return a question as the trainer will show it to a model without a chat template."""
    from megatron.rl.data.prompt_template import BASE_TEMPLATE

    return BASE_TEMPLATE.replace("{question}", question)


@contextlib.contextmanager
def _quiet_and_seeded(settings: TinyModelSettings) -> Iterator[None]:
    """Seed torch, set its threads, and keep third-party notices away; undo all of it after."""
    import torch
    from transformers.utils import logging

    threads, verbosity = torch.get_num_threads(), logging.get_verbosity()
    torch.set_num_threads(settings.threads)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore")
            torch.manual_seed(settings.seed)
            yield
    finally:
        torch.set_num_threads(threads)
        logging.set_verbosity(verbosity)
        logging.enable_progress_bar()


def _finished_digest(folder: Path) -> str | None:
    try:
        return str(json.loads((folder / MARKER).read_text())["digest"])
    except (OSError, ValueError, KeyError):
        return None


def _is_empty_folder(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def _put_in_place(partial: Path, target: Path) -> None:
    """Give `partial` the name `target`, replacing an older tiny model or an empty folder."""
    if target.exists():
        older = Path(tempfile.mkdtemp(prefix=f".{target.name}.older-", dir=target.parent))
        os.replace(target, older / target.name)
        os.replace(partial, target)
        shutil.rmtree(older)
    else:
        os.replace(partial, target)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _parse(arguments: Sequence[str] | None) -> tuple[Path, TinyModelSettings]:
    defaults = TinyModelSettings()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to make the model in")
    parser.add_argument("--task", default=defaults.task, help="default: %(default)s")
    parser.add_argument(
        "--params", type=json.loads, default=defaults.params, metavar="JSON",
        help="settings of the task, default: %(default)s",
    )  # fmt: skip
    parser.add_argument(
        "--exact", action=argparse.BooleanOptionalAction, default=defaults.exact,
        help="no partial credit, default: %(default)s",
    )  # fmt: skip
    parser.add_argument(
        "--window", type=float, nargs=2, default=defaults.window, metavar=("LOW", "HIGH"),
        help="accuracy at which the warm-up stops, default: %(default)s",
    )  # fmt: skip
    for name, meaning in (
        ("seed", "of the weights and of the prompts"),
        ("steps", "most warm-up steps; 0: leave the model at random"),
        ("threads", "CPU threads; another number gives another model"),
        ("max-response-tokens", "longest answer that is sampled"),
        *((n, "shape of the model") for n in ("hidden-size", "layers", "heads", "kv-heads",
          "head-dim", "experts", "experts-per-token", "expert-size", "max-positions")),
    ):  # fmt: skip
        default = getattr(defaults, name.replace("-", "_"))
        parser.add_argument(
            f"--{name}", type=int, default=default, help=f"{meaning}, default: {default}"
        )
    values = vars(parser.parse_args(arguments))
    out = values.pop("out")
    if not isinstance(values["params"], dict):
        parser.error("argument --params: expected a JSON object, such as '{\"max_word_len\": 5}'")
    try:
        return out, TinyModelSettings(**values | {"window": tuple(values["window"])})
    except ValueError as error:
        parser.error(str(error))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; 0: done or there already, 1: warm-up missed, 2: bad arguments."""
    out, settings = _parse(arguments)
    # Works from a checkout that is not installed, too.
    root = str(Path(__file__).resolve().parents[1])
    if root not in sys.path:
        sys.path.insert(0, root)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from megatron.rl.errors import UserError

    try:
        make_tiny_model(out, settings)
    except UserError as error:
        print(f"make_tiny_model: {error}", file=sys.stderr)
        return 2
    except WarmupMissed as error:
        print(f"make_tiny_model: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
