# SPDX-License-Identifier: Apache-2.0
"""Finds training problems that are, or nearly are, problems of a held-out set."""

from collections import Counter
from collections.abc import Iterable
from typing import Literal

from megatron.rl.data.problem_text import words

# The n-gram length that contamination studies settled on (Brown et al. 2020, appendix C).
NGRAM_WORDS = 13
# Contest problems share whole phrases ("relatively prime positive integers. Find m + n"), so that
# one common n-gram says nothing; half of a problem's n-grams does.
OVERLAP_SHARE = 0.5


class HeldoutIndex:
    """Words and n-grams of held-out problems."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._whole: set[tuple[str, ...]] = set()
        self._owners: dict[tuple[str, ...], list[int]] = {}
        self._sizes: list[int] = []
        for text in texts:
            heldout = words(text)
            self._whole.add(heldout)
            grams = _ngrams(heldout)
            for gram in grams:
                self._owners.setdefault(gram, []).append(len(self._sizes))
            self._sizes.append(len(grams))

    def match(self, text: str) -> Literal["same", "overlap"] | None:
        """Return how a problem resembles a held-out one.

        ``same``: all words, numbers and operators agree. ``overlap``: it has at least half of the
        n-grams of one held-out problem.
        """
        asked = words(text)
        if asked in self._whole:
            return "same"
        shared = Counter(owner for gram in _ngrams(asked) for owner in self._owners.get(gram, ()))
        near = any(count >= OVERLAP_SHARE * self._sizes[owner] for owner, count in shared.items())
        return "overlap" if near else None


def _ngrams(sequence: tuple[str, ...]) -> set[tuple[str, ...]]:
    last = len(sequence) - NGRAM_WORDS
    return {sequence[start : start + NGRAM_WORDS] for start in range(last + 1)}
