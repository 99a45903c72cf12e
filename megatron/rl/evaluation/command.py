# SPDX-License-Identifier: Apache-2.0
"""``pdm-rl eval``: its options, and what it prints."""

import argparse
import contextlib
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from megatron.rl.data.prompt_template import add_template_arg
from megatron.rl.errors import UserError
from megatron.rl.rewards.scoring_limits import ScoringLimits

if TYPE_CHECKING:
    from megatron.rl.evaluation.run import EvalRun


def add_eval(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the command."""
    parser = commands.add_parser("eval", help="benchmarks of a checkpoint: avg@n, pass@k, majority")
    add = parser.add_argument
    add("model", metavar="MODEL", help="a Hugging Face checkpoint folder, or a run folder")
    add(
        "--bench",
        required=True,
        metavar="NAMES",
        help="with commas: aime24, aime25, math500, gsm8k, NAME=PATH, reasoning_gym/<data set>",
    )
    add("--data", metavar="DIR", help="folder of benchmark files (default: $PDM_RL_DATA)")
    add("--samples", type=int, default=16, metavar="N", help="a problem (default: 16)")
    add("--problems", type=int, metavar="N", help="the first so many of each (default: all)")
    add("--max-tokens", type=int, metavar="N", help="longest response (default: 8192 if they fit)")
    add("--temperature", type=float, default=1.0, metavar="T", help="default: 1; 0 is greedy")
    add("--top-p", type=float, default=1.0, metavar="P", help="default: 1, off")
    add("--top-k", type=int, default=0, metavar="K", help="default: 0, off")
    add("--min-p", type=float, default=0.0, metavar="P", help="default: 0, off")
    add("--seed", type=int, default=0, metavar="N", help="default: 0")
    add(
        "--template",
        default="auto",
        metavar="NAME",
        help="chat, base, a text with {question}, or auto (default): the model's chat template",
    )
    add("--system-prompt", metavar="TEXT", help="of the chat template")
    add_template_arg(parser)
    add("--format", metavar="NAME", help="how answers are asked for: boxed (default), answer_line")
    add(
        "--out",
        metavar="DIR",
        help="default: evals/<model>-<date>-<time>; one that is there is continued",
    )
    _add_engine_options(parser)
    _add_scoring_options(parser)
    parser.set_defaults(command=run_eval)


def _add_engine_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help="of the weights in the engine (default: as they are stored)",
    )
    add("--max-num-seqs", type=int, default=256, metavar="N", help="decoded at once (default: 256)")
    add("--tensor-parallel", type=int, default=1, metavar="N", help="GPUs of the engine")
    add("--kv-cache-gib", type=float, metavar="GIB", help="default: 1 on cpu, what is left on cuda")
    add("--threads", type=int, metavar="N", help="of the engine on cpu (default: all cores)")
    add("--python", metavar="PATH", help="interpreter that has vLLM (default: this one)")


def _add_scoring_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--scoring-workers", type=int, metavar="N", help="processes (default: by the cores)")
    add(
        "--scoring-timeout",
        type=float,
        default=ScoringLimits.timeout_s,
        metavar="S",
        help="seconds that a response may take (default: %(default)g)",
    )
    add(
        "--scoring-memory",
        type=int,
        default=ScoringLimits.memory_mib,
        metavar="MIB",
        help="that it may take beyond the task itself (default: %(default)d)",
    )


def run_eval(options: argparse.Namespace) -> int:
    """Run the command; return its exit code."""
    from megatron.rl.evaluation.report import format_table
    from megatron.rl.evaluation.run import run_evaluation
    from megatron.rl.rollout.errors import EngineConfigError, EngineError

    run = _requested(options)
    try:
        with _ended_by_sigterm():
            metrics = run_evaluation(run)
    except KeyboardInterrupt:
        _say_how_to_continue(run.out)
        raise
    except EngineConfigError:
        raise
    except EngineError as error:
        print(f"error: {error}", file=sys.stderr)
        _say_how_to_continue(run.out)
        return 1
    print(format_table(metrics))
    print(f"{run.out}: results.json, problems.jsonl, responses.jsonl")
    return 0


def _requested(options: argparse.Namespace) -> "EvalRun":
    from megatron.rl.config_checks import check_scoring
    from megatron.rl.evaluation.benches import DEFAULT_ANSWER_FORMAT, find_benches
    from megatron.rl.evaluation.run import EngineOptions, EvalRun
    from megatron.rl.evaluation.settings import EvalSampling

    model = _find_model(Path(options.model))
    if options.problems is not None and options.problems < 1:
        raise UserError(f"--problems: expected at least 1, got {options.problems}")
    data = None if options.data is None else Path(options.data)
    names = [name.strip() for name in options.bench.split(",") if name.strip()]
    if not names:
        raise UserError("--bench: expected the name of a benchmark, for example gsm8k")
    benches = find_benches(names, data, options.format or DEFAULT_ANSWER_FORMAT)
    of_files = [bench for bench in benches if bench.file is not None]
    for option, given in (("--format", options.format), ("--data", options.data)):
        if given is not None and not of_files:
            raise UserError(f"{option} has no effect on {options.bench}; leave it out")
    scoring = ScoringLimits(
        workers=options.scoring_workers,
        timeout_s=options.scoring_timeout,
        memory_mib=options.scoring_memory,
    )
    check_scoring(scoring)
    fit_max_tokens = options.max_tokens is None
    return EvalRun(
        model=model,
        benches=tuple(benches),
        sampling=EvalSampling(
            samples=options.samples,
            temperature=options.temperature,
            top_p=options.top_p,
            top_k=options.top_k,
            min_p=options.min_p,
            max_tokens=EvalSampling.max_tokens if fit_max_tokens else options.max_tokens,
            seed=options.seed,
        ),
        template=options.template,
        system_prompt=options.system_prompt,
        template_args=dict(options.template_arg),
        fit_max_tokens=fit_max_tokens,
        problems=options.problems,
        engine=EngineOptions(
            device=_device(options.device),
            dtype=options.dtype,
            python=options.python,
            max_num_seqs=options.max_num_seqs,
            threads=options.threads,
            kv_cache_gib=options.kv_cache_gib,
            tensor_parallel=options.tensor_parallel,
        ),
        scoring=scoring,
        out=Path(options.out) if options.out else _new_folder(model),
    )


def _find_model(source: Path) -> Path:
    """The folder itself, or the policy of a run folder."""
    for folder in (source / "policy", source):
        if (folder / "config.json").is_file():
            return folder
    if (source / "config.yaml").is_file():
        raise UserError(
            f"MODEL: the run in {source} wrote no policy/: it has not ended, or its config says "
            "run.export: false"
        )
    raise UserError(
        f"MODEL: expected a Hugging Face checkpoint folder with a config.json, or a run folder, "
        f"found neither at {source}"
    )


def _device(name: str) -> str:
    if name != "auto":
        return name
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _new_folder(model: Path) -> Path:
    """A folder of its own for each evaluation, named after the model, or the run it came from."""
    resolved = model.resolve()
    name = resolved.parent.name if resolved.name == "policy" else resolved.name
    return Path("evals") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"


def _say_how_to_continue(out: Path) -> None:
    if out.is_dir():
        print(
            f"stopped; finished problems are saved: the same command with --out {out} continues",
            file=sys.stderr,
        )


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end the engine and close the files, as Ctrl-C does."""

    def end(signum: int, frame: FrameType | None) -> NoReturn:
        sys.exit(128 + signum)

    previous = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
