"""Answers for the eye: shares by model, rows with the differing words marked.

And a chat, with a field to ask in.
"""

from __future__ import annotations

import difflib
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from workbench.base.table import Cell, Grid, Marked
from workbench.base.words import UNKNOWN, count, duration, percent, pluralize
from workbench.display.kit.doc import Block, Doc, Note, Table, to_bundle
from workbench.display.kit.live import has_widgets, put
from workbench.display.kit.widgets import act_in_thread, heard_at_once, widget_bundle
from workbench.finetune.answers.conversation import Conversation
from workbench.finetune.answers.predictions import AnsweredRow, Answers, Predictions
from workbench.finetune.data.scoring import Answer
from workbench.finetune.data.tasks import TASK

_ROWS = 50
_EMPTY = "(nothing)"
_WRONG = "✗"
_ALIKE = 1 / 3  # least share of equal words for marking words
_REFRESH_S = 0.25
_INVITES = "Write, and press Enter"
_WAITS = "Wait for the answer"
# Title in the rows' table, title in the shares' table, attribute of an answer and of all answers.
_MATCHES = (
    ("exact", "exactly right", "exact_match"),
    ("logic", "same logic", "logical_match"),
    ("result", "same result", "execution_match"),
)


def answers_doc(answers: Answers) -> Doc:
    """State answers; marked words stand in brackets in text."""
    width = 40 if len(answers.names) > 1 else 60
    return Doc(blocks=[Table(grid, width) for grid in answers_grids(answers)], full=True)


def predictions_doc(predictions: Predictions) -> Doc:
    return Doc(blocks=[Table(predictions_grid(predictions))], full=True)


def answers_grids(answers: Answers, limit: int = _ROWS) -> list[Grid]:
    """Return the tables of answers: shares by model where there are several, then the rows."""
    if len(answers.names) == 1 or not _judged(answers):
        return [_rows(answers, limit)]
    return [_shares(answers), _rows(answers, limit)]


def predictions_grid(predictions: Predictions, limit: int = 20) -> Grid:
    """Return the first answers of a run beside the expected ones."""
    answers = Answers(names=["answered"], models=[predictions])
    shown = _shown(answers, limit)
    caption = f"{predictions.summary} ({shown})" if shown else predictions.summary
    return replace(_rows(answers, limit), caption=caption)


def marked_words(expected: str, answered: str) -> tuple[Marked, Marked]:
    """Mark the words in which two texts differ, in both.

    Example:
        >>> marked_words("SELECT a FROM table", "SELECT b FROM table")[1].parts
        (('SELECT', False), ('b', True), ('FROM table', False))
    """
    left = expected.split()
    right = answered.split()
    one: list[tuple[str, bool]] = []
    other: list[tuple[str, bool]] = []
    matcher = difflib.SequenceMatcher(None, left, right, autojunk=False)
    for kind, left_from, left_to, right_from, right_to in matcher.get_opcodes():
        is_marked = kind != "equal"
        left_words = left[left_from:left_to]
        if left_words:
            one.append((" ".join(left_words), is_marked))
        right_words = right[right_from:right_to]
        if right_words:
            other.append((" ".join(right_words), is_marked))
    return Marked(tuple(one)), Marked(tuple(other))


def _shares(answers: Answers) -> Grid:
    judged = _judged(answers)
    titles = [title for _, title, name in _MATCHES if name in judged]
    rows = []
    for model, given in zip(answers.names, answers.models, strict=True):
        rows.append((model, *(percent(getattr(given, name)) for name in judged)))
    return Grid(
        columns=("model", *titles),
        rows=rows,
        right=titles,
        caption=f"{pluralize(len(answers), 'row')} answered",
    )


def _judged(answers: Answers) -> Sequence[str]:
    """Return the attributes of the matches that could be judged. Empty: nothing was expected."""
    judged = []
    for *_, name in _MATCHES:
        if any(getattr(each, name) is not None for each in answers.models):
            judged.append(name)
    return judged


def _rows(answers: Answers, limit: int) -> Grid:
    judged = _judged(answers)
    alone = len(answers.names) == 1
    verdicts = judged if alone else []
    columns = [title for title, _, name in _MATCHES if name in verdicts]
    columns.append("question")
    if judged:
        columns.append("expected")
    for name in answers.names:
        columns.append(name)
        if judged and not alone:
            columns.append("right")
    return Grid(
        columns=columns,
        rows=[_row(row, verdicts, is_judged=bool(judged)) for row in _wrong_first(answers, limit)],
        whole=("exact", "logic", "result", "right"),
        caption=_caption(answers, limit),
        stay=columns[: len(verdicts)] or ["question"],
    )


def _wrong_first(answers: Answers, limit: int) -> Sequence[AnsweredRow]:
    """Return the rows to show, those first that the last model answered wrong.

    If not all rows are shown, right answers are half of the rows.
    """
    wrong: list[AnsweredRow] = []
    other: list[AnsweredRow] = []
    for row in answers.rows:
        (wrong if _is_wrong(row) else other).append(row)
    most = max(limit // 2, limit - len(other))
    return [*wrong[:most], *other][:limit]


def _shown(answers: Answers, limit: int) -> str:
    """State which rows are shown. Empty: all."""
    if len(answers) <= limit:
        return ""
    if any(_is_wrong(row) for row in answers.rows):
        return f"{count(limit)} shown, wrong answers first"
    return f"the first {count(limit)} shown"


def _is_wrong(row: AnsweredRow) -> bool:
    return _best(row.answers[-1]) == _WRONG


def _caption(answers: Answers, limit: int) -> str:
    loaded = f" after {duration(answers.load_s)} of loading" if answers.load_s >= 0.05 else ""
    took = f"answered in {duration(answers.answer_s)}{loaded}"
    alone = len(answers.names) == 1
    said = f"{answers.summary}; {took}" if alone else f"Answers, {took}"
    return "; ".join(filter(None, [said, _shown(answers, limit)]))


def _row(row: AnsweredRow, verdicts: Sequence[str], *, is_judged: bool) -> Sequence[Cell]:
    """Return the cells of a row; `verdicts` is empty where several models answered.

    `is_judged`: whether an answer was expected in any row.
    """
    alone = len(row.answers) == 1
    first = row.answers[0]
    cells: list[Cell] = [_mark(getattr(first, name)) for name in verdicts]
    cells.append(row.source.removeprefix(TASK.prefix))
    if not is_judged:
        pass
    elif alone and row.expected:
        marked, _ = _compared(row.expected, first.predicted)
        cells.append(marked)
    else:
        cells.append(row.expected or UNKNOWN)
    # Without a known answer, models are compared with the first answer.
    right = row.expected
    if right is None:
        given = [answer.predicted for answer in row.answers if answer.predicted.strip()]
        right = given[0] if given else ""
    for answer in row.answers:
        if answer.predicted.strip():
            _, marked = _compared(right, answer.predicted)
            cells.append(marked)
        else:
            cells.append(_EMPTY)
        if is_judged and not alone:
            cells.append(_best(answer))
    return cells


def _mark(verdict: bool | None) -> str:
    if verdict is None:
        return UNKNOWN
    return "✓" if verdict else _WRONG


def _compared(expected: str, answered: str) -> tuple[Cell, Cell]:
    """Mark the different words of two texts; none if most differ, as the verdict then suffices."""
    one, other = marked_words(expected, answered)
    same = sum(len(text.split()) for text, marked in other.parts if not marked)
    longest = max(len(expected.split()), len(answered.split()))
    if same >= _ALIKE * longest:
        return one, other
    return expected, answered


def _best(answer: Answer) -> str:
    if answer.exact_match is None:
        return UNKNOWN
    named = (
        ("text", answer.exact_match),
        ("logic", answer.logical_match),
        ("result", answer.execution_match),
    )
    return next((f"✓ {word}" for word, holds in named if holds), _WRONG)


def conversation_doc(
    conversation: Conversation,
    asked: str = "",
    pieces: Mapping[str, str] | None = None,
    problem: str = "",
) -> Doc:
    """State the conversation, with answers in progress."""
    rows: list[Sequence[Cell]] = []
    for exchange in conversation.exchanges:
        answers = [exchange.answers[name] or UNKNOWN for name in conversation.names]
        rows.append((exchange.asked, *answers))
    if pieces is not None:
        written = [pieces.get(name, "").rstrip() for name in conversation.names]
        rows.append((asked, *(f"{text} …".lstrip() for text in written)))
    names = ", ".join(conversation.names)
    blocks: list[Block] = []
    if rows:
        turns = Grid(
            columns=("you", *conversation.names),
            rows=rows,
            caption=f"{pluralize(len(rows), 'turn')} with {names}",
        )
        blocks.append(Table(turns, 60))
    else:
        blocks.append(Note(f"A chat with {names}: nothing has been said yet."))
    if problem:
        blocks.append(Note(problem, "bad"))
    return Doc(blocks=blocks, full=True)


def show_conversation(conversation: Conversation) -> None:
    """Display a chat, which a saved notebook keeps, with a text field if widgets are available."""
    name = uuid.uuid4().hex

    def redraw(doc: Doc) -> None:
        put(to_bundle(doc), name)

    put(to_bundle(conversation_doc(conversation)), name, update=False)
    if has_widgets():
        field = conversation_field(conversation, redraw)
        heard_at_once(field)
        bundle = widget_bundle(field, "(the field to write in: it needs the kernel)")
        put(bundle, f"{name}-field", update=False)


def conversation_field(conversation: Conversation, draw: Callable[[Doc], None]) -> Any:
    """Make the input field; every question is drawn with its growing answers."""
    import ipywidgets as w

    field = w.Text(
        placeholder=_INVITES,
        continuous_update=False,
        layout={"width": "auto", "max_width": "60em"},
    )

    # The field is closed while the model answers, so that answers keep their order.
    def entered(change: Mapping[str, str]) -> None:
        asked = change["new"].strip()
        if asked and not field.disabled:
            field.disabled = True
            field.value = ""
            field.placeholder = _WAITS
            act_in_thread(lambda: say(asked), fail, "chat")

    def say(asked: str) -> None:
        _say(conversation, asked, draw)
        ready()

    def fail(problem: str) -> None:
        draw(conversation_doc(conversation, problem=problem))
        ready()

    def ready() -> None:
        field.disabled = False
        field.placeholder = _INVITES
        field.focus()

    field.observe(entered, names="value")
    return field


def _say(conversation: Conversation, asked: str, draw: Callable[[Doc], None]) -> None:
    pieces: dict[str, str] = {}
    done = threading.Event()

    def follow() -> None:
        drawn: Mapping[str, str] | None = None
        while drawn is None or not done.wait(_REFRESH_S):
            now = dict(pieces)
            if now != drawn:
                drawn = now
                draw(conversation_doc(conversation, asked, now))

    def add(name: str, piece: str) -> None:
        pieces[name] = pieces.get(name, "") + piece

    follower = threading.Thread(target=follow, name="chat being written", daemon=True)
    follower.start()
    try:
        conversation.send(asked, add)
    finally:
        done.set()
        follower.join()
    draw(conversation_doc(conversation))
