# SPDX-License-Identifier: Apache-2.0
"""Which benchmark a name stands for, where its file is, and its problems."""

import dataclasses
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.rl.data.prompt_source import HELDOUT_SEED, num_prompts
from megatron.rl.errors import UserError
from megatron.rl.rewards.registry import TaskSpec, make_task
from megatron.rl.rewards.task import Prompt, Task

DATA_VARIABLE = "PDM_RL_DATA"
DEFAULT_ANSWER_FORMAT = "boxed"

# File names under which benchmarks are published, without case, suffix and punctuation.
KNOWN_FILES: Mapping[str, tuple[str, ...]] = {
    "aime24": ("aime24", "aime2024"),
    "aime25": ("aime25", "aime2025"),
    "math500": ("math500",),
    "gsm8k": ("gsm8k", "gsm8ktest"),
}
FILE_SUFFIXES = (".parquet", ".jsonl", ".json")

_GENERATED = "reasoning_gym/"
# Draws a problem wanted before a task that makes its problems counts as having no further one.
_MAX_DRAWS_PER_PROBLEM = 100


@dataclass(frozen=True)
class Bench:
    """A benchmark: its name in results, the task that makes and scores it, and what it reads."""

    name: str
    task: TaskSpec
    file: Path | None

    @property
    def source(self) -> str:
        """The file, or the task's name where there is none."""
        return self.task.name if self.file is None else str(self.file)


@dataclass(frozen=True)
class BenchProblem:
    """A problem, in the form in which the policy is asked.

    number: from 0, in the order of the file. tokens: of the whole prompt. gold: the right answer,
    where the task states one.
    """

    number: int
    prompt: Prompt
    tokens: list[int]
    gold: str | None


@dataclass(frozen=True)
class BenchProblems:
    """A benchmark with problems of it; has_answers: its task extracts the answer of a response."""

    bench: Bench
    problems: tuple[BenchProblem, ...]
    has_answers: bool

    def only(self, wanted: Callable[[BenchProblem], bool]) -> "BenchProblems":
        """Return the problems that are wanted; they keep their numbers."""
        return dataclasses.replace(self, problems=tuple(filter(wanted, self.problems)))


def find_bench(text: str, data: Path | None, answer_format: str = DEFAULT_ANSWER_FORMAT) -> Bench:
    """Return the benchmark that `text` names.

    ``NAME=PATH`` is a file of problems; ``reasoning_gym/<data set>`` and ``package.module:Class``
    are tasks, whose held-out prompts are asked; any other name is that of a file in `data`, under
    one of the names in `KNOWN_FILES` or its own.

    A data set of reasoning_gym counts what is fully right: a benchmark is no place for partial
    credit.

    Args:
        data: folder of files; None: the one that the environment variable PDM_RL_DATA names.
        answer_format: how problems of files want their answer.

    Raises:
        UserError: there is no such file, or more than one.
    """
    name, equals, path = text.partition("=")
    if equals:
        if not name or not path:
            raise UserError(f"bench {text!r}: expected NAME=PATH")
        return _of_file(name, Path(path), answer_format)
    if name.startswith(_GENERATED):
        return Bench(name, TaskSpec(name, {}, exact=True), None)
    if ":" in name:
        return Bench(name, TaskSpec(name, {}, exact=False), None)
    return _of_file(name, _find_file(name, data), answer_format)


def find_benches(
    texts: Sequence[str], data: Path | None, answer_format: str = DEFAULT_ANSWER_FORMAT
) -> list[Bench]:
    """Return the benchmarks, see :func:`find_bench`; a name may occur once only."""
    benches = [find_bench(text, data, answer_format) for text in texts]
    names = [bench.name for bench in benches]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"bench {name} is named twice; give each its own name with NAME=PATH")
    return benches


def read_bench(
    bench: Bench, encode: Callable[[str], list[int]], limit: int | None
) -> BenchProblems:
    """Return the problems of a benchmark, or the first `limit`, in order and each once.

    A file may repeat its problems, as the AIME file published with DAPO does 32 times: what is
    sampled n times would be sampled 32 n times.

    Args:
        encode: from a question to the token ids of its prompt.

    Raises:
        UserError: no problems, fewer than `limit`, or no end to them and no limit.
    """
    task = make_task(bench.task)
    available = num_prompts(task, "heldout")
    if available is None and limit is None:
        raise UserError(
            f"bench {bench.name} makes its problems and never runs out: say how many with "
            "--problems (eval.problems in a config)"
        )
    problems: list[BenchProblem] = []
    seen: set[str] = set()
    index = 0
    while (limit is None or len(problems) < limit) and (available is None or index < available):
        prompt = task.prompt("heldout", HELDOUT_SEED, index)
        index += 1
        if prompt.text in seen:
            if available is None and index > _MAX_DRAWS_PER_PROBLEM * (len(problems) + 1):
                break
            continue
        seen.add(prompt.text)
        problems.append(
            BenchProblem(len(problems), prompt, encode(prompt.text), _gold(task, prompt))
        )
    if not problems or (limit is not None and len(problems) < limit):
        wanted = "problems" if limit is None else f"{limit} different problems"
        raise UserError(
            f"bench {bench.name}: expected {wanted} in {bench.source}, found {len(problems)}; "
            "lower --problems (eval.problems in a config)"
        )
    return BenchProblems(bench, tuple(problems), callable(getattr(task, "answer", None)))


def _gold(task: Task, prompt: Prompt) -> str | None:
    reference = getattr(task, "reference_answer", None)
    if reference is None:
        return None
    try:
        return str(reference(prompt))
    except UserError:  # a task that judges answers by a rule has none
        return None


def _of_file(name: str, path: Path, answer_format: str) -> Bench:
    if not path.exists():
        raise UserError(f"bench {name}: no such file: {path}")
    params = {"heldout": str(path.resolve()), "format": answer_format}
    return Bench(name, TaskSpec("math", params, exact=False), path)


def _find_file(name: str, data: Path | None) -> Path:
    if data is None:
        named = os.environ.get(DATA_VARIABLE)
        if not named:
            raise UserError(
                f"bench {name}: where its file is has to be said: --data DIR (eval.data in a "
                f"config), the environment variable {DATA_VARIABLE}, or {name}=PATH"
            )
        data = Path(named)
    if not data.is_dir():
        raise UserError(f"bench {name}: no such folder of data: {data}")
    known = KNOWN_FILES.get(name, (_plain(name),))
    found = [
        path
        for path in sorted(data.iterdir())
        if path.suffix in FILE_SUFFIXES and _plain(path.stem) in known
    ]
    if len(found) == 1:
        return found[0]
    if found:
        raise UserError(
            f"bench {name}: {', '.join(path.name for path in found)} in {data} could be meant; "
            f"choose with {name}=PATH"
        )
    raise UserError(
        f"bench {name}: {data} has no file of that name ({' or '.join(known)}, with "
        f"{', '.join(FILE_SUFFIXES)}); for a file of any other name write {name}=PATH"
    )


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
