# SPDX-License-Identifier: Apache-2.0
"""The columns that published problem files have, and how a problem is read from them."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from megatron.rl.errors import UserError
from megatron.rl.rewards.answer_extraction import final_box

# Sentences that published files put around the question, as they stand there. They ask for an
# answer in a form of their own; the run's answer format asks in its own words instead.
INSTRUCTION_PREFIXES = (
    # BytedTsinghua-SIA/DAPO-Math-17k, and copies of it that ask for a box.
    "Solve the following math problem step by step. The last line of your response should be of "
    "the form Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n",
    "Solve the following math problem step by step. The last line of your response should be of "
    "the form Answer: \\boxed{$Answer} where $Answer is the answer to the problem.\n\n",
)
INSTRUCTION_SUFFIXES = (
    '\n\nRemember to put your answer on its own line after "Answer:".',
    # verl's preprocessing of GSM8K and of MATH.
    ' Let\'s think step by step and output the final answer after "####".',
    " Let's think step by step and output the final answer within \\boxed{}.",
    "\nPlease reason step by step, and put your final answer within \\boxed{}.",
    " Please reason step by step, and put your final answer within \\boxed{}.",
)
GSM8K_MARK = "####"
_GSM8K_COMMA = re.compile(r"(?<=\d),(?=\d{3}\b)")


def strip_instructions(text: str) -> str:
    """Return the bare question of a prompt that holds one of the published instructions."""
    for prefix in INSTRUCTION_PREFIXES:
        text = text.removeprefix(prefix)
    for suffix in INSTRUCTION_SUFFIXES:
        text = text.removesuffix(suffix)
    return text.strip()


def plain_answer(raw: str) -> str | None:
    """Return an answer as it stands, or what follows the ``####`` of a GSM8K solution."""
    _, mark, answer = raw.rpartition(GSM8K_MARK)
    if mark:
        return _GSM8K_COMMA.sub("", answer.strip()).removeprefix("$").strip() or None
    return raw.strip() or None


@dataclass(frozen=True)
class Layout:
    """Where a file keeps its problems.

    text, answer, source  columns; a dot leads into a struct. `text` may be a chat: a list of
                          messages with role and content, of which the one user message counts.
                          `source` is optional in the file.
    clean_text            from the column's text to the bare question
    clean_answer          from the column's text to the answer; None where there is none
    """

    name: str
    text: str
    answer: str
    source: str | None = None
    clean_text: Callable[[str], str] = str.strip
    clean_answer: Callable[[str], str | None] = plain_answer

    def fits(self, columns: Iterable[str]) -> bool:
        """Whether a table with these columns (case ignored, dotted ones included) has it."""
        present = {column.casefold() for column in columns}
        return {self.text.casefold(), self.answer.casefold()} <= present


# The first that fits is taken.
LAYOUTS: tuple[Layout, ...] = (
    # DAPO-Math-17k as published, its deduplicated copies, and all that verl's scripts write.
    Layout("verl", "prompt", "reward_model.ground_truth", "data_source", strip_instructions),
    # The JSON Lines copy of DAPO-Math-17k.
    Layout("prompt_label", "prompt", "label", "data_source", strip_instructions),
    # What ``pdm-rl data prepare`` writes.
    Layout("prepared", "text", "answer", "source"),
    # DeepScaleR, AIME (also with capitals), MATH-500, GSM8K with its answers taken out.
    Layout("problem_answer", "problem", "answer", "data_source"),
    # MATH and NuminaMath: the answer is in the last box of the solution.
    Layout("problem_solution", "problem", "solution", "source", clean_answer=final_box),
    # GSM8K as published: the answer follows the ``####`` of the solution.
    Layout("question_answer", "question", "answer", "data_source"),
)


def detect_layout(columns: Sequence[str], where: str) -> Layout:
    """Return the first known layout that a table with these columns has.

    Raises:
        UserError: none has these columns.
    """
    for layout in LAYOUTS:
        if layout.fits(columns):
            return layout
    known = "; ".join(f"{layout.name} ({layout.text}, {layout.answer})" for layout in LAYOUTS)
    raise UserError(
        f"{where}: expected the columns of a known layout, found {', '.join(columns) or 'none'}; "
        f"known are {known}; name the columns with --columns text=COLUMN,answer=COLUMN"
    )


def find_layout(name: str) -> Layout:
    """Return the layout of that name, or the one that ``text=COLUMN,answer=COLUMN`` describes.

    Raises:
        UserError: neither a known name nor such a description.
    """
    for layout in LAYOUTS:
        if layout.name == name:
            return layout
    named = dict(part.split("=", 1) for part in name.split(",") if "=" in part)
    fields = {key.strip(): column.strip() for key, column in named.items()}
    if not {"text", "answer"} <= fields.keys() <= {"text", "answer", "source"}:
        raise UserError(
            "columns: expected text=COLUMN,answer=COLUMN (and source=COLUMN), or one of "
            f"{', '.join(layout.name for layout in LAYOUTS)}; got {name!r}"
        )
    return Layout(
        "columns", fields["text"], fields["answer"], fields.get("source"), strip_instructions
    )
