# SPDX-License-Identifier: Apache-2.0
r"""The form that an answer is asked in, and the reader of that form: one object, so that the two
cannot drift apart.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron.rl.errors import UserError
from megatron.rl.rewards.answer_extraction import after_thinking, final_answer_line, final_box

AS_IS = "as_is"


@dataclass(frozen=True)
class AnswerFormat:
    """How a problem asks for its answer, and how a response is read.

    name         the value of the setting
    instruction  what is put behind the problem; empty where the problem already asks
    example      a response that follows the instruction, with the answer 42
    read         from a response without its thinking to its answer
    """

    name: str
    instruction: str
    example: str
    read: Callable[[str], str | None]

    def ask(self, problem: str) -> str:
        """Return the problem with the instruction behind it."""
        return f"{problem}\n\n{self.instruction}" if self.instruction else problem

    def parse(self, response: str) -> str | None:
        """Return the answer that a response states, as it is written there; None without one."""
        text = after_thinking(response)
        return None if text is None else self.read(text)


def _line_or_box(text: str) -> str | None:
    return final_answer_line(text) or final_box(text)


BOXED = AnswerFormat(
    "boxed",
    r"Think it through step by step, and put the final answer inside \boxed{}.",
    r"Six times seven is forty-two, so the answer is \boxed{42}.",
    final_box,
)
ANSWER_LINE = AnswerFormat(
    "answer_line",
    "Think it through step by step. End with a line that holds the final answer and nothing else, "
    'in the form "Answer: VALUE".',
    "Six times seven is forty-two.\n\nAnswer: 42",
    final_answer_line,
)
FORMATS = {form.name: form for form in (BOXED, ANSWER_LINE)}

# What problems with an instruction of their own ask for. Copies of DAPO-Math ask for a box behind
# "Answer:" at the top and for the line at the end: there either will do.
_ASKED_LINE = AnswerFormat("asked_line", "", ANSWER_LINE.example, final_answer_line)
_ASKED_BOX = AnswerFormat("asked_box", "", BOXED.example, final_box)
_ASKED_LINE_OR_BOX = AnswerFormat("asked_line_or_box", "", r"Answer: \boxed{42}", _line_or_box)
# Problems of a file that may happen to hold what looks like an instruction.
MAX_STRAY_SHARE = 0.01


def asked_format(problem: str) -> AnswerFormat | None:
    r"""Return the format that a problem's own text asks for; None where it asks for none.

    A text that names ``\boxed`` or ``\fbox`` asks for a box, one with ``Answer:`` for the line.
    """
    box = r"\boxed" in problem or r"\fbox" in problem
    line = "answer:" in problem.lower()
    if box and line:
        return _ASKED_LINE_OR_BOX
    if box:
        return _ASKED_BOX
    return _ASKED_LINE if line else None


def format_for_problems(name: str, problems: Sequence[str]) -> AnswerFormat:
    """Return the one format in which these problems are asked, and their responses read.

    Raises:
        UserError: an unknown name; ``as_is`` for problems that do not all ask for their answer in
            one form; another format for problems that do, which would be asked in two forms.
    """
    if name not in FORMATS and name != AS_IS:
        raise UserError(
            f"task.params.format: expected {', '.join(FORMATS)} or {AS_IS} (the problems already "
            f"say how to answer), got {name!r}"
        )
    asked = [asked_format(problem) for problem in problems]
    forms = {form.name if form else "none": form for form in asked}
    if name == AS_IS:
        if len(forms) != 1 or "none" in forms:
            raise UserError(
                f"task.params.format: {AS_IS} expects problems that all ask for a box or all for "
                f"an Answer: line, found {', '.join(sorted(forms))}; use {BOXED.name} or "
                f"{ANSWER_LINE.name} for problems without an instruction"
            )
        return next(form for form in asked if form)
    asking = len(asked) - asked.count(None)
    if asking > MAX_STRAY_SHARE * len(asked):
        example = next(text for text, form in zip(problems, asked, strict=True) if form)
        raise UserError(
            f"task.params.format: {name} would ask in one form what {asking} of {len(asked)} "
            f"problems already ask in their own ({example[:60]!r}); use {AS_IS}, or remove the "
            "instruction from the file"
        )
    return FORMATS[name]
