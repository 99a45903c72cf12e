# SPDX-License-Identifier: Apache-2.0
"""One evaluation of a checkpoint on some benchmarks, from wherever an earlier one stopped."""

import dataclasses
import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.rl.data.prompt_tokenizer import PromptTokenizer
from megatron.rl.errors import UserError
from megatron.rl.evaluation.benches import Bench, BenchProblem, BenchProblems, read_bench
from megatron.rl.evaluation.measure import BenchMetrics, measure
from megatron.rl.evaluation.progress import EvalProgress
from megatron.rl.evaluation.responses import ResponseFile
from megatron.rl.evaluation.results import (
    ENGINE_LOG,
    PROBLEMS_FILE,
    RESPONSES_FILE,
    RESULTS_FILE,
    metrics_json,
    open_folder,
    problem_row,
    samples_of,
    write_json,
    write_lines,
)
from megatron.rl.evaluation.sample import BenchSampler, ScoredProblem
from megatron.rl.evaluation.settings import EvalSampling
from megatron.rl.plain_files import read_json_object
from megatron.rl.rewards.scoring_limits import ScoringLimits
from megatron.rl.rewards.scoring_pool import ScoringPool
from megatron.rl.rollout.client.vllm_engine import VLLMEngine, VLLMEngineConfig
from megatron.rl.run_folder import environment

# A request holds so many times the sequences that the engine decodes at once: few enough to be
# repeated when the engine dies, enough that it seldom runs half empty.
REQUEST_ROUNDS = 8


@dataclass(frozen=True)
class EngineOptions:
    """How the engine runs; none of it decides what is asked or scored. As `VLLMEngineConfig`."""

    device: str
    dtype: str = "auto"
    python: str | None = None
    max_num_seqs: int = 256
    threads: int | None = None
    kv_cache_gib: float | None = None
    tensor_parallel: int = 1


@dataclass(frozen=True)
class EvalRun:
    """What is evaluated.

    problems: the first so many of each benchmark; None: all of them. template, system_prompt,
    template_args: as of `PromptTokenizer`. fit_max_tokens: nobody asked for sampling.max_tokens, so
    that it may be lowered to what the model has positions for. scoring: what a response may cost.
    """

    model: Path
    benches: tuple[Bench, ...]
    sampling: EvalSampling
    fit_max_tokens: bool
    problems: int | None
    template: str
    system_prompt: str | None
    template_args: Mapping[str, Any]
    engine: EngineOptions
    scoring: ScoringLimits
    out: Path


def model_positions(model: Path) -> int | None:
    """Return the positions that the model's config.json states; None where it states none."""
    config = read_json_object(model / "config.json")
    positions = (config.get("text_config") or config).get("max_position_embeddings")
    return positions if isinstance(positions, int) else None


def run_evaluation(run: EvalRun) -> dict[str, BenchMetrics]:
    """Sample and score what is missing, write the results; return metrics by benchmark.

    Raises:
        UserError: a benchmark, the model or the folder is not what it should be.
        EngineError: the engine failed for good. What was finished is saved.
    """
    tokenizer = PromptTokenizer(
        run.model,
        template=run.template,
        system_prompt=run.system_prompt,
        template_args=run.template_args,
    )
    works = [read_bench(bench, tokenizer.encode_prompt, run.problems) for bench in run.benches]
    run = _fit_lengths(run, longest_prompt(works))
    settings = run_settings(run, works)
    open_folder(run.out, settings)
    with ResponseFile(run.out / RESPONSES_FILE, run.sampling.samples) as file:
        started = time.monotonic()
        total = sum(len(work.problems) for work in works)
        left = [_missing(work, file) for work in works]
        to_do = sum(len(work.problems) for work in left)
        with EvalProgress(total, total - to_do) as progress:
            progress.note(
                f"{run.out}: {to_do} of {total} problems to do, {_in_words(run.sampling)}"
            )
            if to_do:
                _sample_all(run, left, tokenizer, file, progress)
        seconds = time.monotonic() - started
        return _write_results(run, works, file, settings, {"seconds": seconds, "problems": to_do})


def run_settings(run: EvalRun, works: Sequence[BenchProblems]) -> dict[str, Any]:
    """Return what decides responses and scores: an evaluation with other values is another one."""
    return {
        "model": str(run.model.resolve()),
        "model_files": _file_stamps(run.model),
        "dtype": run.engine.dtype,
        "device": run.engine.device,
        "template": run.template,
        "system_prompt": run.system_prompt,
        "template_args": dict(run.template_args),
        "scoring": {"timeout_s": run.scoring.timeout_s, "memory_mib": run.scoring.memory_mib},
        "sampling": dataclasses.asdict(run.sampling),
        "benches": {
            work.bench.name: {
                "task": dataclasses.asdict(work.bench.task),
                "problems": len(work.problems),
                "digest": _digest(work.problems),
            }
            for work in works
        },
    }


def _digest(problems: Sequence[BenchProblem]) -> str:
    """Differs when a problem, its right answer or its prompt does."""
    state = hashlib.blake2b(digest_size=16)
    for problem in problems:
        state.update(json.dumps([problem.prompt.text, problem.gold, problem.tokens]).encode())
    return state.hexdigest()


def _file_stamps(model: Path) -> dict[str, list[int]]:
    """Size and time of change of every file of the model."""
    files = sorted(path for path in model.iterdir() if path.is_file())
    return {path.name: [path.stat().st_size, path.stat().st_mtime_ns] for path in files}


def _fit_lengths(run: EvalRun, longest: int) -> EvalRun:
    """Check that prompts and responses fit the model; lower a limit that nobody asked for."""
    positions = model_positions(run.model)
    if positions is None or longest + run.sampling.max_tokens <= positions:
        return run
    if not run.fit_max_tokens or longest >= positions:
        raise UserError(
            f"--max-tokens is {run.sampling.max_tokens} and the longest prompt has {longest} "
            f"tokens, but the model has only {positions} positions"
            + (
                f": set --max-tokens to at most {positions - longest}"
                if longest < positions
                else ""
            )
        )
    sampling = dataclasses.replace(run.sampling, max_tokens=positions - longest)
    return dataclasses.replace(run, sampling=sampling)


def _in_words(sampling: EvalSampling) -> str:
    cuts = [
        f"{name} {getattr(sampling, name)}"
        for name in ("top_p", "top_k", "min_p")
        if getattr(sampling, name) != getattr(EvalSampling, name)
    ]
    return ", ".join(
        [
            f"{sampling.samples} samples each of at most {sampling.max_tokens} tokens",
            f"temperature {sampling.temperature}",
            *cuts,
        ]
    )


def longest_prompt(works: Sequence[BenchProblems]) -> int:
    """Tokens of the longest prompt."""
    return max(len(problem.tokens) for work in works for problem in work.problems)


def _missing(work: BenchProblems, file: ResponseFile) -> BenchProblems:
    name = work.bench.name
    return work.only(lambda problem: (name, problem.number) not in file.done)


def _sample_all(
    run: EvalRun,
    works: Sequence[BenchProblems],
    tokenizer: PromptTokenizer,
    file: ResponseFile,
    progress: EvalProgress,
) -> None:
    config = _engine_config(run, longest_prompt(works) + run.sampling.max_tokens)
    with VLLMEngine(config, progress.note, progress.engine) as engine:
        engine.wait_ready()
        for work in works:
            if not work.problems:
                continue
            progress.bench(work.bench.name)
            pool = ScoringPool(work.bench.task, run.scoring)
            try:

                def save(problem: ScoredProblem) -> None:
                    file.append(problem.responses)
                    if problem.first_error is not None:
                        progress.note(problem.first_error)
                    progress.problem_done()

                sampler = BenchSampler(work.bench, engine, tokenizer, pool, run.sampling, save)
                at_once = max(1, REQUEST_ROUNDS * run.engine.max_num_seqs // run.sampling.samples)
                for first in range(0, len(work.problems), at_once):
                    sampler.sample(work.problems[first : first + at_once])
            finally:
                pool.close()


def _engine_config(run: EvalRun, max_model_len: int) -> VLLMEngineConfig:
    engine = run.engine
    parallel = engine.tensor_parallel
    return VLLMEngineConfig(
        model_path=str(run.model),
        dtype=engine.dtype,
        max_model_len=max_model_len,
        max_num_seqs=engine.max_num_seqs,
        top_logprobs=0,
        seed=run.sampling.seed,
        device=engine.device,
        python=engine.python,
        kv_cache_gib=engine.kv_cache_gib,
        threads=engine.threads,
        log_path=str(run.out / ENGINE_LOG),
        engine_args={"tensor_parallel_size": parallel} if parallel > 1 else {},
    )


def _write_results(
    run: EvalRun,
    works: Sequence[BenchProblems],
    file: ResponseFile,
    settings: Mapping[str, Any],
    this_process: Mapping[str, Any],
) -> dict[str, BenchMetrics]:
    rows: list[dict[str, Any]] = []
    metrics: dict[str, BenchMetrics] = {}
    for work in works:
        name = work.bench.name
        found = [file.done[name, problem.number] for problem in work.problems]
        metrics[name] = measure(
            [samples_of(responses) for responses in found],
            has_answers=work.has_answers,
        )
        for problem, responses in zip(work.problems, found, strict=True):
            rows.append(problem_row(responses, problem.prompt.text, work.has_answers))
    write_lines(run.out / PROBLEMS_FILE, rows)
    write_json(
        run.out / RESULTS_FILE,
        {
            "benches": {name: metrics_json(value) for name, value in metrics.items()},
            "files": {"responses": RESPONSES_FILE, "problems": PROBLEMS_FILE},
            "settings": settings,
            "environment": environment(),
            "this_process": this_process,
        },
    )
    return metrics
