# SPDX-License-Identifier: Apache-2.0
"""The folder that holds prepared problems: a table, a card for programs, a card for people."""

import hashlib
import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from megatron.rl.data.problem_files import Problem
from megatron.rl.data.problem_filter import DROP_REASONS
from megatron.rl.errors import UserError

TABLE_NAME = "train.parquet"
CARD_NAME = "card.json"
README_NAME = "README.md"
_OUR_FILES = {TABLE_NAME, CARD_NAME, README_NAME}
_COLUMNS = pa.schema([(name, pa.string()) for name in ("text", "answer", "source", "id")])
_HASH_CHUNK_BYTES = 1 << 20


def check_target(folder: Path, *, force: bool) -> None:
    """Refuse a folder whose content would be lost.

    Raises:
        UserError: it is there and `force` is not set, or it holds files of somebody else.
    """
    if not folder.exists():
        return
    if not folder.is_dir():
        raise UserError(f"--out {folder}: expected a folder, found a file")
    names = {path.name for path in folder.iterdir()}
    if names - _OUR_FILES:
        raise UserError(
            f"--out {folder}: expected a new folder, found one with other files "
            f"({', '.join(sorted(names - _OUR_FILES)[:3])}); choose another"
        )
    if names and not force:
        raise UserError(f"--out {folder}: is there already; add --force to replace it")


def write_prepared(
    folder: Path, problems: Mapping[str, Problem], card: Mapping[str, Any]
) -> dict[str, Any]:
    """Write problems, by their ids, and the card; return the card with the table's hash.

    The folder appears at once: it is written beside its place and renamed. The same problems and
    card give the same bytes.
    """
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        table = pa.table(
            [
                [problem.text for problem in problems.values()],
                [problem.answer for problem in problems.values()],
                [problem.source for problem in problems.values()],
                list(problems),
            ],
            schema=_COLUMNS,
        )
        pq.write_table(table, partial / TABLE_NAME, compression="zstd")
        output = {"file": TABLE_NAME, "sha256": sha256_of([partial / TABLE_NAME])}
        done = {**card, "output": output}
        (partial / CARD_NAME).write_text(json.dumps(done, indent=2, ensure_ascii=False) + "\n")
        (partial / README_NAME).write_text(_readme(done))
        _replace(folder, partial)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return done


def sha256_of(paths: Iterable[Path]) -> str:
    """Return the hash of files, one behind the other."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while chunk := file.read(_HASH_CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()


def _replace(folder: Path, partial: Path) -> None:
    old = folder.with_name(folder.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    partial.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def _readme(card: Mapping[str, Any]) -> str:
    counts = card["counts"]
    dropped = "\n".join(
        f"| {DROP_REASONS[reason]} | {count:,} |" for reason, count in counts["dropped"].items()
    )
    inputs = "\n".join(
        f"| {entry['file']} | {entry['layout']} | {entry['rows']:,} | `{entry['sha256']}` |"
        for entry in card["inputs"]
    )
    settings = "\n".join(
        f"- {name}: {json.dumps(value, ensure_ascii=False)}"
        for name, value in card["settings"].items()
    )
    return f"""# {card["name"]}

{counts["kept"]:,} problems with reference answers, made by `pdm-rl data prepare` \
{card["tool"]["version"]} from {counts["rows"]:,} rows.

Licence: {card["licence"]}

## Table
`{TABLE_NAME}`: `text` (the bare question), `answer`, `source`, `id` (hash of the question's text).
SHA-256 `{card["output"]["sha256"]}`.

## Inputs
| file | layout | rows | SHA-256 |
|---|---|---|---|
{inputs}

## Rows dropped
A row is counted once, under the first reason that applies.

| reason | rows |
|---|---|
{dropped}

## Settings
{settings}
"""
