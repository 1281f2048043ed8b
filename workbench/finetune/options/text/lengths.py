"""Lengths of questions and answers in tokens: given limits, and limits that are left open."""

from __future__ import annotations

from dataclasses import dataclass

MOST_TOKENS = 4096
"""Largest number of tokens of a row if the limits are left open."""
SOURCE_TOKENS = 256
"""Tokens of a question in plans, and in texts without a question, if the limit is left open."""
TARGET_TOKENS = 128
"""Tokens of an answer in plans, and least limit of answers, if the limit is left open."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits of a row's tokens. An open limit cuts a question before an answer."""

    source: int | None
    """Largest number of tokens of a question. None: left open."""
    target: int | None
    """Largest number of tokens of an answer. None: left open."""
    most: int = MOST_TOKENS
    """Largest number of tokens of question and answer together, where a limit is open."""

    def of_row(self, question: int, answer: int) -> tuple[int, int]:
        """Return the limits for a row of these lengths.

        Example:
            >>> open = Limits(source=None, target=None, most=100)
            >>> open.of_row(20, 80), open.of_row(90, 40), open.of_row(30, 900)
            ((50, 80), (60, 50), (50, 70))
        """
        read = question if self.source is None else min(question, self.source)
        target = self.target or max(self.most - read, self.most // 2)
        source = self.source or max(self.most - min(answer, target), self.most // 2)
        return source, target


@dataclass(frozen=True, kw_only=True, slots=True)
class TextLengths:
    """Numbers and lengths of the questions and answers of rows, in tokens."""

    questions: int = 0
    cut_questions: int = 0
    longest_question: int = 0
    """Tokens of the longest question after the cut."""
    whole_question: int = 0
    """Tokens of the longest question before the cut."""
    answers: int = 0
    cut_answers: int = 0
    longest_answer: int = 0
    whole_answer: int = 0

    def __add__(self, other: TextLengths) -> TextLengths:
        return TextLengths(
            questions=self.questions + other.questions,
            cut_questions=self.cut_questions + other.cut_questions,
            longest_question=max(self.longest_question, other.longest_question),
            whole_question=max(self.whole_question, other.whole_question),
            answers=self.answers + other.answers,
            cut_answers=self.cut_answers + other.cut_answers,
            longest_answer=max(self.longest_answer, other.longest_answer),
            whole_answer=max(self.whole_answer, other.whole_answer),
        )


def of_question(whole: int, kept: int) -> TextLengths:
    """Return the lengths of a question with `whole` tokens, of which `kept` are read."""
    return TextLengths(
        questions=1,
        cut_questions=int(kept < whole),
        longest_question=kept,
        whole_question=whole,
    )


def of_answer(whole: int, kept: int) -> TextLengths:
    """Return the lengths of an answer with `whole` tokens, of which `kept` are learned."""
    return TextLengths(
        answers=1,
        cut_answers=int(kept < whole),
        longest_answer=kept,
        whole_answer=whole,
    )
