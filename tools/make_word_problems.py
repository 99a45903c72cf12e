#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Make a file of arithmetic word problems in GSM8K's layout, easy enough for a very small model.

A row is `{"question": ..., "answer": ...}`; the answer is a worked line a step, with the
calculation between `<<` and `>>`, and `#### n`. Problems take one or two steps with small whole
numbers. The same arguments give the same bytes, and no question comes twice.
"""

import argparse
import json
import operator
import os
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

MIN_RESULT = 2  # so that "apples" is always right
# Draws of a kind in a row that give no new problem, after which it is taken to have no more.
MAX_IDLE_DRAWS = 1_000

# fmt: off
NAMES = (
    "Ada", "Ben", "Carla", "David", "Elena", "Farid", "Grace", "Hugo", "Ines", "Jonas", "Kira",
    "Liam", "Mona", "Nils", "Olga", "Pedro", "Rosa", "Sam", "Tara", "Vera",
)
WORDS = {
    "thing": (
        "apples", "marbles", "stickers", "shells", "cards", "buttons",
        "stamps", "coins", "beads", "pencils",
    ),
    "box": ("bag", "box", "jar", "basket", "crate", "tray"),
    "fruit": ("apples", "pears", "plums", "cherries", "lemons", "oranges"),
    "animal": ("sheep", "cows", "ducks", "horses", "hens"),
}
# fmt: on
PLURALS = {"box": "boxes"}
OPERATORS = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.floordiv,
}


@dataclass(frozen=True)
class Step:
    """One calculation, and the sentence of the worked answer that it stands in.

    left, right  names of numbers of the question, whole numbers, or `r`, the step's before
    sentence     with `{work}` for the calculation, or `${work}` for one in dollars
    """

    left: str
    sign: str
    right: str
    sentence: str


@dataclass(frozen=True)
class Template:
    """A kind of problem.

    question  with numbers `{a}`, `{b}`, `{c}`, two names `{name}` and `{other}`, and words
    numbers   of each, the values it may take
    """

    question: str
    numbers: Mapping[str, Sequence[int]]
    steps: tuple[Step, ...]


def _numbers(**ranges: tuple[int, int]) -> dict[str, range]:
    return {name: range(low, high + 1) for name, (low, high) in ranges.items()}


TEMPLATES = (
    # One step.
    Template(
        "{name} has {a} {thing}. {other} gives {name} {b} more. How many {thing} does {name} have "
        "now?",
        _numbers(a=(2, 20), b=(2, 20)),
        (Step("a", "+", "b", "{name} now has {work} {thing}."),),
    ),
    Template(
        "There are {a} {thing} on a shelf of a shop, and {b} of them are sold. How many {thing} "
        "are left on the shelf?",
        _numbers(a=(5, 30), b=(2, 20)),
        (Step("a", "-", "b", "{work} {thing} are left on the shelf."),),
    ),
    Template(
        "One {box} holds {a} {thing}. How many {thing} are there in {b} {boxes}?",
        _numbers(a=(2, 12), b=(2, 9)),
        (Step("b", "*", "a", "There are {work} {thing} in all the {boxes}."),),
    ),
    Template(
        "{name} shares {a} {thing} equally among {b} friends. How many {thing} does each friend "
        "get?",
        _numbers(a=(4, 60), b=(2, 9)),
        (Step("a", "/", "b", "Each friend gets {work} {thing}."),),
    ),
    Template(
        "{name} is {a} years old, and {other} is {b} years older. How old is {other}?",
        _numbers(a=(3, 40), b=(2, 15)),
        (Step("a", "+", "b", "{other} is {work} years old."),),
    ),
    Template(
        "A ticket for the boat costs ${a}. How many dollars do {b} tickets cost?",
        _numbers(a=(2, 15), b=(2, 9)),
        (Step("b", "*", "a", "The tickets cost ${work}."),),
    ),
    Template(
        "{name} reads a book of {a} pages and has read {b} pages so far. How many pages are left?",
        _numbers(a=(20, 90), b=(5, 60)),
        (Step("a", "-", "b", "{work} pages are left."),),
    ),
    Template(
        "A farmer plants {a} rows of trees with {b} trees in each row. How many trees are planted?",
        _numbers(a=(2, 10), b=(2, 12)),
        (Step("a", "*", "b", "The farmer plants {work} trees."),),
    ),
    Template(
        "{name} has ${a} and spends ${b} on lunch. How many dollars does {name} have left?",
        _numbers(a=(10, 50), b=(3, 25)),
        (Step("a", "-", "b", "{name} has ${work} left."),),
    ),
    Template(
        "A class of {a} children makes teams of {b} children each. How many teams are there?",
        _numbers(a=(8, 40), b=(2, 8)),
        (Step("a", "/", "b", "There are {work} teams."),),
    ),
    Template(
        "A cyclist rides {a} miles before noon and {b} miles after it. How many miles is that "
        "altogether?",
        _numbers(a=(3, 30), b=(3, 30)),
        (Step("a", "+", "b", "The cyclist rides {work} miles."),),
    ),
    Template(
        "{name} drinks {a} glasses of water every day. How many glasses is that in {b} days?",
        _numbers(a=(2, 9), b=(2, 12)),
        (Step("b", "*", "a", "{name} drinks {work} glasses."),),
    ),
    # Two steps.
    Template(
        "{name} buys {a} {boxes} with {b} {thing} in each and gives {c} {thing} to {other}. How "
        "many {thing} does {name} keep?",
        _numbers(a=(2, 6), b=(2, 10), c=(2, 15)),
        (
            Step("a", "*", "b", "{name} buys {work} {thing}."),
            Step("r", "-", "c", "{name} keeps {work} {thing}."),
        ),
    ),
    Template(
        "{name} works {a} hours for ${b} an hour and then buys a lamp for ${c}. How many dollars "
        "of that pay are left?",
        _numbers(a=(2, 8), b=(5, 15), c=(4, 30)),
        (
            Step("a", "*", "b", "{name} earns ${work}."),
            Step("r", "-", "c", "${work} are left."),
        ),
    ),
    Template(
        "A baker makes {a} rolls in the morning and {b} rolls in the evening, and puts them into "
        "bags of {c}. How many bags does the baker fill?",
        _numbers(a=(4, 30), b=(4, 30), c=(2, 8)),
        (
            Step("a", "+", "b", "The baker makes {work} rolls."),
            Step("r", "/", "c", "They fill {work} bags."),
        ),
    ),
    Template(
        "{name} has {a} {thing}, and {other} has {b} times as many. How many {thing} do they have "
        "together?",
        _numbers(a=(2, 12), b=(2, 5)),
        (
            Step("b", "*", "a", "{other} has {work} {thing}."),
            Step("a", "+", "r", "Together they have {work} {thing}."),
        ),
    ),
    Template(
        "A bus carries {a} people. At the next stop {b} get off and {c} get on. How many people "
        "are on the bus then?",
        _numbers(a=(8, 40), b=(2, 15), c=(2, 15)),
        (
            Step("a", "-", "b", "{work} people stay on the bus."),
            Step("r", "+", "c", "Then there are {work} people on it."),
        ),
    ),
    Template(
        "A farm has {a} goats and {b} more {animal} than goats. How many animals is that in all?",
        _numbers(a=(2, 20), b=(2, 20)),
        (
            Step("a", "+", "b", "There are {work} {animal}."),
            Step("a", "+", "r", "In all there are {work} animals."),
        ),
    ),
    Template(
        "{name} picks {a} {fruit}. Half of them go into a cake, and {other} eats {b} of the rest. "
        "How many {fruit} are left?",
        _numbers(a=(8, 40), b=(2, 10)),
        (
            Step("a", "/", "2", "{work} {fruit} do not go into the cake."),
            Step("r", "-", "b", "{work} {fruit} are left."),
        ),
    ),
    Template(
        "A pen costs ${a} and a notebook costs ${b}. How many dollars do one pen and {c} notebooks "
        "cost?",
        _numbers(a=(2, 9), b=(2, 9), c=(2, 6)),
        (
            Step("c", "*", "b", "The notebooks cost ${work}."),
            Step("r", "+", "a", "With the pen that is ${work}."),
        ),
    ),
    Template(
        "{name} runs {a} miles on each of {b} days and {c} miles on Sunday. How many miles does "
        "{name} run?",
        _numbers(a=(2, 8), b=(2, 6), c=(2, 12)),
        (
            Step("b", "*", "a", "On those days {name} runs {work} miles."),
            Step("r", "+", "c", "With Sunday that is {work} miles."),
        ),
    ),
    Template(
        "{name} buys {a} sandwiches for ${b} each and pays with ${c}. How many dollars does {name} "
        "get back?",
        {"a": range(2, 7), "b": range(3, 9), "c": (20, 50)},
        (
            Step("a", "*", "b", "The sandwiches cost ${work}."),
            Step("c", "-", "r", "{name} gets back ${work}."),
        ),
    ),
    Template(
        "A car park has {a} rows of {b} places, and {c} places are taken. How many places are "
        "free?",
        _numbers(a=(2, 10), b=(4, 12), c=(3, 60)),
        (
            Step("a", "*", "b", "The car park has {work} places."),
            Step("r", "-", "c", "{work} places are free."),
        ),
    ),
    Template(
        "{name} saves ${a} a week for {b} weeks and gets ${c} as a present. How many dollars does "
        "{name} have then?",
        _numbers(a=(2, 12), b=(2, 8), c=(5, 30)),
        (
            Step("b", "*", "a", "{name} saves ${work}."),
            Step("r", "+", "c", "With the present that is ${work}."),
        ),
    ),
    Template(
        "{a} children share {b} {fruit} equally, and {name}, who is one of them, eats {c} at once. "
        "How many {fruit} does {name} have left?",
        _numbers(a=(2, 6), b=(8, 60), c=(2, 8)),
        (
            Step("b", "/", "a", "Each child gets {work} {fruit}."),
            Step("r", "-", "c", "{name} has {work} {fruit} left."),
        ),
    ),
)


@dataclass(frozen=True)
class Difficulty:
    """Which problems are made.

    steps    of the worked answer, at most
    largest  number of the question or of the worked answer
    """

    steps: int = 2
    largest: int = 100

    def __post_init__(self) -> None:
        if self.steps < 1 or self.largest < MIN_RESULT:
            raise ValueError(
                f"expected steps of at least 1 and a largest number of at least {MIN_RESULT}, got "
                f"{self.steps} and {self.largest}"
            )


def word_problems(seed: int, difficulty: Difficulty) -> Iterator[dict[str, str]]:
    """Yield problems, each another one, until no further one is found.

    Kinds come in turn, so that every part of the file has all of them. Draws that are too
    difficult, or whose results are no whole numbers from 2 on, are thrown away.
    """
    generator = random.Random(seed)
    templates = [one for one in TEMPLATES if len(one.steps) <= difficulty.steps]
    seen: set[str] = set()
    turn = idle = 0
    while templates:
        turn %= len(templates)
        problem = _draw(templates[turn], generator, difficulty.largest)
        if problem is not None and problem["question"] not in seen:
            seen.add(problem["question"])
            turn, idle = turn + 1, 0
            yield problem
        elif (idle := idle + 1) == MAX_IDLE_DRAWS:
            del templates[turn]
            idle = 0


def _draw(template: Template, generator: random.Random, largest: int) -> dict[str, str] | None:
    numbers = {name: generator.choice(values) for name, values in template.numbers.items()}
    if max(numbers.values()) > largest:
        return None
    name, other = generator.sample(NAMES, 2)
    words = {kind: generator.choice(choices) for kind, choices in WORDS.items()}
    words |= {"name": name, "other": other}
    words["boxes"] = PLURALS.get(words["box"], words["box"] + "s")
    lines = []
    for step in template.steps:
        left, right = (
            int(term) if term.isdigit() else numbers[term] for term in (step.left, step.right)
        )
        if step.sign == "/" and left % right:
            return None
        result = OPERATORS[step.sign](left, right)
        if not MIN_RESULT <= result <= largest:
            return None
        lines.append(_worked(step, f"{left}{step.sign}{right}", result, words))
        numbers["r"] = result
    question = template.question.format(**words, **numbers)
    return {"question": question, "answer": "\n".join([*lines, f"#### {numbers['r']}"])}


def _worked(step: Step, work: str, result: int, words: Mapping[str, str]) -> str:
    """Return the sentence, with `4*3=<<4*3=12>>12`, or `4*3=$<<4*3=12>>12` for dollars."""
    unit = "$" if "${work}" in step.sentence else ""
    calculation = f"{work}={unit}<<{work}={result}>>{result}"
    sentence = step.sentence.replace("${work}", "{work}").format(**words, work=calculation)
    return sentence[0].upper() + sentence[1:]


def write_word_problems(out: Path, count: int, seed: int, difficulty: Difficulty) -> None:
    """Write `count` problems as JSON Lines; the file takes its name when it is complete.

    Raises:
        ValueError: there are not that many.
    """
    rows = [
        problem for problem, _ in zip(word_problems(seed, difficulty), range(count), strict=False)
    ]
    if len(rows) < count:
        raise ValueError(f"found {len(rows)} different problems only; ask for a smaller --count")
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.name}.partial-{os.getpid()}")
    try:
        partial.write_text("".join(json.dumps(row) + "\n" for row in rows))
        partial.replace(out)
    finally:
        partial.unlink(missing_ok=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; 0: written, 2: bad arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON Lines file to write")
    parser.add_argument("--count", type=int, default=400, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--steps", type=int, choices=(1, 2), default=2, help="at most; default: 2")
    parser.add_argument(
        "--largest", type=int, default=100, help="number that occurs; default: %(default)s"
    )
    values = parser.parse_args(arguments)
    if values.count < 1:
        parser.error(f"--count: expected at least 1, got {values.count}")
    try:
        difficulty = Difficulty(values.steps, values.largest)
        write_word_problems(values.out, values.count, values.seed, difficulty)
    except (OSError, ValueError) as error:
        print(f"make_word_problems: {error}", file=sys.stderr)
        return 2
    print(f"{values.out}: {values.count} problems")
    return 0


if __name__ == "__main__":
    sys.exit(main())
