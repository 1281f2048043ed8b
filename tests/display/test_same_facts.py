"""Text and HTML of every view state the same facts."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.support.views import EXAMPLES
from tests.support.writtenrun import T0, WrittenRun
from workbench.base import table
from workbench.base.display_protocol import Displayable, as_html, as_text
from workbench.base.files import write_json
from workbench.benchmark.result import BenchmarkResult
from workbench.client.result import RunResult
from workbench.client.run import Run
from workbench.client.tables.comparison import RunComparison
from workbench.client.tables.history import History
from workbench.client.tensorboard.board import Board
from workbench.display.cluster import ClusterView, cluster_doc
from workbench.display.failure import FaultCard, fault_card
from workbench.display.kit.doc import to_html, to_text
from workbench.display.run.facts import RunFacts
from workbench.display.run.page import run_text, run_view_doc
from workbench.finetune.answers.predictions import Answers
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.plan.table import PlanTable
from workbench.finetune.profile.parse import Profile
from workbench.handover.kubeflow.manifest import Manifest
from workbench.keeper.launch import LaunchCommand
from workbench.pods.pod import Phase, Pod
from workbench.rundir.result import RunFault
from workbench.rundir.view import RunView

# Where the HTML of a view is written apart from the view's text, and the test that compares both.
# Every other block of a document is drawn both ways from one content (`test_doc.py`).
APART = {
    "benchmark/report.py": ("tests/display/test_benchmark.py", "test_text_and_html_state_the_same"),
    "benchmark/table.py": ("tests/display/test_benchmark.py", "test_text_and_html_state_the_same"),
    "compose/form.py": (
        "tests/display/test_compose.py",
        "test_text_and_html_state_the_same_and_escape",
    ),
    "failure.py": ("tests/display/test_same_facts.py", "test_a_fault_card"),
    "records/history.py": (
        "tests/client/test_history.py",
        "test_a_long_history_shows_the_newest_runs_and_names_the_way_to_the_others",
    ),
    "records/result.py": (
        "tests/finetune/results/test_profile.py",
        "test_text_and_html_show_the_same_figures",
    ),
    "run/page.py": ("tests/display/test_same_facts.py", "test_a_run"),
}
REPOSITORY = Path(__file__).resolve().parents[2]
EVIL = "<img src=x onerror=alert(1)>&\"'"


def test_a_view_that_writes_its_html_apart_has_a_test_that_compares() -> None:
    display = REPOSITORY / "workbench" / "display"
    writers = set()
    for path in display.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(func=ast.Name(id="Raw")):
                    writers.add(path.relative_to(display).as_posix())
    assert writers == set(APART)
    for file, name in APART.values():
        assert f"def {name}(" in (REPOSITORY / file).read_text()


class Tables(HTMLParser):
    """Texts in the cells of a page's tables. Folds that the text names by a call are left out."""

    def __init__(self, page: str, text: str) -> None:
        super().__init__()
        self._text = text
        self._open: list[str] = []
        self._summary = ""
        self._left_out = 0
        self.cells: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        # Words in place of a drawing, where the style sheet is stripped.
        if ("class", "wb-sep") in attrs:
            tag = "script"
        if tag in ("style", "script", "td", "th", "caption", "details", "summary"):
            self._open.append(tag)
        if tag in ("td", "th", "caption"):
            self.cells.append("")
        if tag == "summary":
            self._summary = ""

    def handle_endtag(self, tag: str) -> None:
        if tag == "span" and self._open[-1:] == ["script"]:
            tag = "script"
        if tag in self._open:
            del self._open[len(self._open) - 1 - self._open[::-1].index(tag) :]
        if tag == "summary" and f"{folded(self._summary)}:" in folded(self._text):
            self._left_out = len(self._open)
        if tag == "details" and len(self._open) < self._left_out:
            self._left_out = 0

    def handle_data(self, data: str) -> None:
        inside = {*self._open}
        if "summary" in inside:
            self._summary += data
        elif not inside & {"style", "script"} and inside & {"td", "th", "caption"}:
            self.cells[-1] += "" if self._left_out else f" {data}"


WITHOUT_TEXT = {Board, Manifest}
"""Views whose text is another program's: the address of a page, and a file for `kubectl`."""
TABLES = [kind for kind in EXAMPLES if kind not in WITHOUT_TEXT]
WITHOUT_TITLES = {Profile}
"""Views whose HTML is a tree with the figures of the text's table (`APART`)."""
_LONGEST = 24  # letters; text breaks longer words


@pytest.mark.parametrize("columns", [80, 150])
@pytest.mark.parametrize("kind", TABLES, ids=lambda kind: kind.__name__)
def test_tables_of_every_view_state_the_same_in_text_and_html(
    kind: type, columns: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "room_of_text", lambda: columns)
    record = EXAMPLES[kind](tmp_path)
    text, page = as_text(record), as_html(record)
    # Tables break lines within a cell, so words are compared, without marks.
    said = {*re.sub(r"[\[\]]", " ", text).split()}
    for cell in Tables(page, text).cells:
        words = {word for word in re.sub(r"[\[\]]", " ", cell).split() if len(word) <= _LONGEST}
        assert not words - said
    rule = re.compile(r"-+(  -+)*")
    lines = text.splitlines()
    for place, line in enumerate(lines):
        if rule.fullmatch(line) and place:
            assert len(line) <= columns, lines[place - 1]
            titles = {*lines[place - 1].split()}
            assert kind in WITHOUT_TITLES or not titles - {*Seen(page).text.split()}


IN_FOLDS = {Profile, Run, RunComparison}
"""Views whose HTML unfolds what the text names by a call, or shows on its own lines (`APART`)."""
ALONE = {
    Answers: {"more", "columns"},
    BenchmarkResult: {"more", "columns"},
    History: {"more", "columns"},
    PlanTable: {"more", "columns"},
    FaultCard: {"traceback", "3"},
    LaunchCommand: {"launch", "command"},
}
"""Titles of folds in HTML, and the number of a traceback's lines in text."""
WORDS = [kind for kind in TABLES if kind not in IN_FOLDS]
BAR = re.compile("[amp]+")
"""A bar in text: a letter for each part."""


@pytest.mark.parametrize("kind", WORDS, ids=lambda kind: kind.__name__)
def test_every_view_has_the_same_words_in_text_and_html(
    kind: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "room_of_text", lambda: 150)
    record = EXAMPLES[kind](tmp_path)
    text, page = as_text(record), Seen(as_html(record)).text
    missing = set()
    for words, other in ((text, page), (page, text)):
        # Text breaks long paths.
        whole = "".join(other.split())
        missing |= {word for word in re.findall(r"[\w.]*\w", words) if word not in whole}
    assert {word for word in missing - ALONE.get(kind, set()) if not BAR.fullmatch(word)} == set()
    assert text


def test_every_shown_class_has_an_example() -> None:
    # Only the rooms with views: others have modules for processes of their own.
    for room in ("benchmark", "client", "display"):
        package = importlib.import_module(f"workbench.{room}")
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)
    shown = [Displayable]
    for kind in shown:
        shown += kind.__subclasses__()
    # A dataclass with slots is made twice, so names are compared. A kind of job has the views of
    # the class above.
    examples = {kind.__name__ for kind in EXAMPLES}
    missing = set()
    for kind in shown:
        above = {each.__name__ for each in kind.__mro__}
        if kind.__module__.startswith("workbench.") and not above & examples:
            missing.add(kind.__name__)
    assert missing == {"Displayable", "LiveDisplayable"}


class Seen(HTMLParser):
    """What a reader sees of a page: its text, blanks folded; and its tags."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self._hidden = 0
        self._parts: list[str] = []
        self.tags: set[str] = set()
        self.feed(page)
        self.text = folded(" ".join(self._parts))

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.add(tag)
        self._hidden += tag in ("style", "script")

    def handle_endtag(self, tag: str) -> None:
        self._hidden -= tag in ("style", "script")

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self._parts.append(data)


def folded(text: str) -> str:
    return " ".join(text.split())


def stated(facts: RunFacts) -> list[str]:
    pairs = [*facts.head, *facts.figures, *facts.memory]
    card = facts.card
    said = [card.advice.title, card.where, card.error, *card.advice.fixes] if card else []
    return [text for _, text in pairs] + [
        facts.run_id,
        str(facts.state),
        facts.bar,
        *facts.receipt,
        *said,
    ]


def filled(written: WrittenRun) -> None:
    written.state("running", "training", hint="no step for 31 s")
    rows = {"not_read": ["label", EVIL], "empty_answers": 7, "overlap": 20}
    written.event(
        "start", model="tiny-t5", world_size=3, global_batch_size=24, parameters=1_033_984, **rows
    )
    written.event("eval", step=0, eval_loss=9.5)
    for step in range(1, 31):
        written.step(step)
    written.event("eval", step=30, eval_loss=3.25)
    for rank in range(3):
        written.event(
            "memory", T0 + rank, rank=rank, step=1, rss_gib=0.5 + rank, peak_rss_gib=0.75 + rank
        )
        written.log(rank, f"[Rank {rank}] ready {EVIL}\n")


def succeeded(written: WrittenRun) -> None:
    filled(written)
    peaks = {f"127.0.0.{n}": 0.51 for n in (2, 3, 4)}
    written.end(
        steps=30,
        exact_match=0.453,
        train_samples_per_s=131.2,
        peak_memory_gib=peaks,
        time_to_first_step_s=3.2,
    )


def failed(written: WrittenRun) -> None:
    filled(written)
    message = f"CUDA out of memory. Tried to allocate 2.50 GiB {EVIL}"
    fault = {
        "host": "127.0.0.3",
        "pod": "pod-1",
        "rank": 1,
        "kind": "OutOfMemoryError",
        "message": message,
    }
    written.end(
        "failed",
        message,
        error={**fault, "traceback": f"Traceback\n  {EVIL}\n", "others": "2 ranks lost"},
    )


def lost(written: WrittenRun) -> None:
    filled(written)
    written.keeper(alive=False)


def queued(written: WrittenRun) -> None:
    written.state("queued", f"waits for {EVIL}")


@pytest.mark.parametrize("fill", [queued, filled, succeeded, failed, lost])
def test_a_run(written: WrittenRun, fill: object, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    monkeypatch.setattr("workbench.rundir.view.time.time", lambda: now)
    fill(written)  # type: ignore[operator]
    view = RunView(written.paths.root)
    text, page = run_text(view), Seen(to_html(run_view_doc(view)))
    text = folded(text)
    facts = RunFacts(view)
    assert len(stated(facts)) >= 5
    for fact in stated(facts):
        assert folded(fact) in page.text
        assert folded(fact) in text
    for name in [name for name, _ in (*facts.head, *facts.figures)]:
        assert name in page.text
        assert name in text
    if view.ranks and fill is not queued:
        assert folded(f"[Rank 0] ready {EVIL}") in page.text
        assert folded(f"all | [Rank 0] ready {EVIL}") in text
    assert "img" not in page.tags
    if view.hint:
        assert view.hint in text
        assert view.hint in page.text


def test_panel_and_result_count_cut_texts_and_name_the_longest(written: WrittenRun) -> None:
    lengths = {
        "questions": 24,
        "cut_questions": 0,
        "longest_question": 37,
        "answers": 24,
        "cut_answers": 8,
        "longest_answer": 128,
        "whole_answer": 170,
    }
    written.state("running", "training")
    written.event("start", model="tiny-t5", text_lengths=lengths)
    panel = dict(RunFacts(RunView(written.paths.root)).head)
    succeeded(written)
    written.end(text_lengths=lengths)
    result = RunResult.load(written.paths.root)
    assert result.text_lengths == lengths
    text = folded(str(result))
    for name, fact in (
        ("cut answers", "8 of 24, at 128 tokens"),
        ("tokens of the longest texts", "question 37, answer 128"),
    ):
        assert panel[name] == fact
        assert name in text and fact in text
    assert "cut questions" not in panel


@pytest.mark.parametrize("fill", [filled, succeeded, failed, lost])
def test_the_panel_names_columns_that_are_not_read_and_counts_empty_answers(
    written: WrittenRun, fill: object
) -> None:
    fill(written)  # type: ignore[operator]
    head = dict(RunFacts(RunView(written.paths.root)).head)
    assert head["not read"] == f"label, {EVIL}"
    assert head["rows with an empty answer"] == "7"
    assert head["evaluation rows that are training rows too"] == "20"


def test_before_the_ranks_report_the_panel_states_what_was_found_at_submit(
    written: WrittenRun,
) -> None:
    queued(written)
    assert "not read" not in dict(RunFacts(RunView(written.paths.root)).head)
    written.paths.inputs.mkdir(exist_ok=True)
    write_json(written.paths.job, {"not_read": ["images"], "empty_answers": 2, "overlap": 4})
    head = dict(RunFacts(RunView(written.paths.root)).head)
    assert head["evaluation rows that are training rows too"] == "4"
    assert (head["not read"], head["rows with an empty answer"]) == ("images", "2")


def test_a_result_states_the_same_of_its_rows_in_text_and_html(written: WrittenRun) -> None:
    succeeded(written)
    written.end(not_read=["label", EVIL], empty_answers=7, overlap=20)
    result = RunResult.load(written.paths.root)
    text, page = folded(str(result)), Seen(result._repr_html_())
    overlap = "evaluation rows that are training rows too"
    for fact in (
        "not read",
        folded(f"label, {EVIL}"),
        "rows with an empty answer",
        overlap,
    ):
        assert fact in text
        assert fact in page.text
    assert (result.not_read, result.empty_answers) == (("label", EVIL), 7)
    assert "img" not in page.tags


def test_a_fault_card() -> None:
    fault = RunFault(
        host="127.0.0.3",
        pod="pod-1",
        rank=1,
        kind="OutOfMemoryError",
        others="2 ranks lost their peer (ranks 0, 2)",
        message=f"CUDA out of memory. Tried to allocate 2.50 GiB. 1.23 GiB free {EVIL}",
        traceback="\n".join(f"line {n} {EVIL}" for n in range(50)),
    )
    card = fault_card(fault, FineTune())
    text, page = folded(str(card)), Seen(card._repr_html_())
    facts = [
        card.advice.title,
        card.where,
        card.error,
        fault.others,
        *card.advice.fixes,
        folded(card.traceback),
    ]
    for fact in [*facts, *(f"{size} {name}" for name, size in card.memory)]:
        assert fact in text
        assert fact in page.text
    assert card.memory == [("asked for", "2.50 GiB"), ("free", "1.23 GiB")]
    assert "… 20 lines before" in text
    assert "img" not in page.tags


@pytest.mark.parametrize("phase", ["starting", "ready", "failed"])
def test_a_cluster(phase: str) -> None:
    pods = [
        Pod(
            name="pod-0",
            phase=Phase.RUNNING,
            address="127.0.0.2",
            ssh_port=2222,
            slots=2,
            versions={"torch": "2.13.0"},
        ),
        Pod(name="pod-1", phase=Phase.PENDING, message=f"waits for an image {EVIL}"),
    ]
    view = ClusterView(
        phase=phase,
        message=f"1 of 2 pods is up {EVIL}",
        path="/runs/c1",
        count=2,
        pods=pods,
        memory={"127.0.0.2": 0.512},
        runs={"127.0.0.2": "20261121-zero1"},
    )
    text, page = folded(to_text(cluster_doc(view))), Seen(to_html(cluster_doc(view)))
    for fact in (
        phase,
        f"1 of 2 pods is up {EVIL}",
        "pod-0",
        "127.0.0.2:2222",
        "Running",
        "Pending",
        "2.13.0",
        f"waits for an image {EVIL}",
        "0.51 GiB",
        "20261121-zero1",
        "/runs/c1",
    ):
        assert fact in text
        assert fact in page.text
    assert "img" not in page.tags
    assert re.search(r"pod-0 Running 127\.0\.0\.2:2222 2", text)
