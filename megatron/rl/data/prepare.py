# SPDX-License-Identifier: Apache-2.0
"""From published files to training problems: read, tell apart, filter, write."""

import importlib.metadata
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from megatron.rl.data.distinct_rows import DistinctRows
from megatron.rl.data.heldout_index import HeldoutIndex
from megatron.rl.data.prepared_folder import check_target, sha256_of, write_prepared
from megatron.rl.data.problem_columns import read_columns
from megatron.rl.data.problem_files import as_problem, read_problems, table_layout
from megatron.rl.data.problem_filter import DROP_REASONS, FilterRules, ProblemFilter
from megatron.rl.data.prompt_tokenizer import PromptTokenizer
from megatron.rl.data.table_files import TableFile, table_files
from megatron.rl.errors import UserError

# progress(what, done, total), total None where nobody knows it yet
Progress = Callable[[str, int, int | None], None]


@dataclass(frozen=True)
class PrepareSettings:
    """What ``pdm-rl data prepare`` is asked for.

    sources            files, folders or ``hf:ORG/NAME``
    out                the folder to make
    name, licence      for the card
    columns            layout of all sources; None: detected
    answers, no_cjk    see :class:`~megatron.rl.data.problem_filter.FilterRules`
    exclude            files of held-out problems
    model              folder of the tokenizer that counts prompts; None: any length
    max_prompt_tokens  longest prompt, instruction and template included
    answer_format      the run's ``task.params.format``; None: questions are asked as they are
    template, system_prompt, template_args  of the prompt, see ``task.template``
    seed               shuffles the problems; None: in the order of the sources
    force              replace a prepared folder
    """

    sources: tuple[str, ...]
    out: Path
    name: str | None = None
    licence: str = "see source"
    columns: str | None = None
    answers: Literal["integer", "any"] = "any"
    no_cjk: bool = False
    exclude: tuple[str, ...] = ()
    model: str | None = None
    max_prompt_tokens: int | None = None
    answer_format: str | None = None
    template: str = "auto"
    system_prompt: str | None = None
    template_args: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None
    force: bool = False

    def __post_init__(self) -> None:
        if (self.model is None) != (self.max_prompt_tokens is None):
            raise UserError(
                "--model and --max-prompt-tokens belong together: tokens are counted with the "
                "model's tokenizer; give both or neither"
            )
        if self.max_prompt_tokens is not None and self.max_prompt_tokens < 1:
            raise UserError(f"--max-prompt-tokens: expected at least 1: {self.max_prompt_tokens}")
        if self.model is None:
            for option, value, default in (
                ("--format", self.answer_format, None),
                ("--template", self.template, "auto"),
                ("--system-prompt", self.system_prompt, None),
                ("--template-arg", self.template_args, {}),
            ):
                if value != default:
                    raise UserError(f"{option} has no effect without --model; leave it out")

    def as_card(self) -> dict[str, Any]:
        """Return the settings that decide what is kept; files by name, wherever they lie."""
        return {
            "columns": self.columns,
            "answers": self.answers,
            "no_cjk": self.no_cjk,
            "exclude": [_short(name) for name in self.exclude],
            "model": None if self.model is None else _short(self.model),
            "max_prompt_tokens": self.max_prompt_tokens,
            "format": self.answer_format,
            "template": self.template,
            "system_prompt": self.system_prompt,
            "template_args": dict(self.template_args),
            "seed": self.seed,
        }


def prepare(settings: PrepareSettings, progress: Progress) -> dict[str, Any]:
    """Make the folder; return its card.

    Repeated rows never become Python objects, so that memory follows the number of different
    problems and time the number of rows.

    Raises:
        UserError: nothing to read, an unknown layout, a folder in the way, or nothing left.
    """
    check_target(settings.out, force=settings.force)
    sources = [table_files(source) for source in settings.sources]
    tables = [table for files in sources for table in files]
    rows_known = [table.rows for table in tables]
    total = None if None in rows_known else sum(rows or 0 for rows in rows_known)
    rules = filter_rules(settings)
    distinct, problems = DistinctRows(), ProblemFilter(rules)
    inputs: list[dict[str, Any]] = []
    for table in tables:
        before = distinct.rows
        layout = table_layout(table, settings.columns)
        for columns in read_columns(table, layout):
            for row in distinct.new_rows(columns):
                problems.add(as_problem(row, layout, table))
            progress("reading", distinct.rows, total)
        inputs.append(_input_card(table, layout.name, distinct.rows - before))
    kept = problems.kept(lambda done, of: progress("checking", done, of))
    if not kept:
        raise UserError(f"no problem is left of {distinct.rows} rows: {_reasons(problems)}")
    names = list(kept)
    if settings.seed is not None:
        random.Random(settings.seed).shuffle(names)
    problems.dropped["repeat"] += distinct.repeats
    dropped = problems.dropped
    card = {
        "name": settings.name or settings.out.name,
        "licence": settings.licence,
        "tool": {"name": "pdm-rl data prepare", "version": _version()},
        "counts": {
            "rows": distinct.rows,
            "kept": len(kept),
            "dropped": {reason: dropped[reason] for reason in DROP_REASONS if dropped[reason]},
        },
        "settings": settings.as_card(),
        "inputs": inputs,
        "exclude": [
            {"file": table.path.name, "sha256": sha256_of([table.path])}
            for table in _excluded(settings)
        ],
    }
    return write_prepared(settings.out, {name: kept[name] for name in names}, card)


def filter_rules(settings: PrepareSettings) -> FilterRules:
    """Return the rules that the settings stand for; reads held-out files and the tokenizer."""
    heldout = None
    if settings.exclude:
        heldout = HeldoutIndex(
            problem.text for name in settings.exclude for problem in read_problems(name)
        )
    rules = FilterRules(answers=settings.answers, no_cjk=settings.no_cjk, heldout=heldout)
    if settings.model is None or settings.max_prompt_tokens is None:
        return rules
    tokenizer = PromptTokenizer(
        settings.model,
        template=settings.template,
        system_prompt=settings.system_prompt,
        template_args=settings.template_args,
    )
    return replace(
        rules,
        answer_format=settings.answer_format,
        count_tokens=lambda question: len(tokenizer.encode_prompt(question)),
        max_tokens=settings.max_prompt_tokens,
    )


def _excluded(settings: PrepareSettings) -> Iterator[TableFile]:
    for name in settings.exclude:
        yield from table_files(name)


def _input_card(table: TableFile, layout: str, rows: int) -> dict[str, Any]:
    return {
        "file": table.path.name,
        "layout": layout,
        "rows": rows,
        "bytes": table.path.stat().st_size,
        "sha256": sha256_of([table.path]),
    }


def _reasons(problems: ProblemFilter) -> str:
    return "; ".join(
        f"{count} {DROP_REASONS[reason]}" for reason, count in problems.dropped.most_common()
    )


def _short(name: str) -> str:
    return name if name.startswith("hf:") else Path(name).name


def _version() -> str:
    try:
        return importlib.metadata.version("megatron-pdm")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
