"""ROUGE-1, ROUGE-2 and ROUGE-L as F1: Lin, "ROUGE: A Package for Automatic Evaluation of Summaries", 2004. Pure.

As `rouge_score` counts without its stemmer, except that letters of every script are letters.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Mapping, Sequence


def rouge(predictions: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """Return the mean of each over all pairs; nothing where there are none."""
    scores = [rouge_of(*pair) for pair in zip(predictions, references, strict=True)]
    return {name: sum(score[name] for score in scores) / len(scores) for name in scores[0]} if scores else {}


def rouge_of(prediction: str, reference: str) -> Mapping[str, float]:
    """Return the F1 of single words, of pairs of words, and of the longest common subsequence.

    Example:
        >>> score = rouge_of("The cat sat on a mat.", "the cat is on the mat")  # 4, 1 and 4 are common
        >>> {name: round(value, 3) for name, value in score.items()}
        {'rouge1': 0.667, 'rouge2': 0.2, 'rougeL': 0.667}
    """
    one, other = _words(prediction), _words(reference)
    pairs = [list(itertools.pairwise(words)) for words in (one, other)]
    return {
        "rouge1": _f1((Counter(one) & Counter(other)).total(), len(one), len(other)),
        "rouge2": _f1((Counter(pairs[0]) & Counter(pairs[1])).total(), len(pairs[0]), len(pairs[1])),
        "rougeL": _f1(_longest_common(one, other), len(one), len(other)),
    }


def _words(text: str) -> list[str]:
    return re.findall(r"[^\W_]+", text.lower())


def _f1(common: int, predicted: int, expected: int) -> float:
    return 2 * common / (predicted + expected) if common else 0.0


def _longest_common(one: Sequence[str], other: Sequence[str]) -> int:
    lengths = [0] * (len(other) + 1)
    for word in one:
        before = 0  # what `lengths` held one place to the left, before this word
        for place, another in enumerate(other, 1):
            before, lengths[place] = (
                lengths[place],
                before + 1 if word == another else max(lengths[place], lengths[place - 1]),
            )
    return lengths[-1]
