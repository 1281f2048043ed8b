"""Outputs that a person works with in JupyterLab: a chat, a plot of a live run, a table of runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.browser.conftest import notebook
from tests.client.test_history import make_run
from tests.support.poll import until

pytestmark = [pytest.mark.slow, pytest.mark.browser, pytest.mark.long]

CHAT = """
import time
from pathlib import Path
from workbench.base.errors import RunError
from workbench.finetune.answers.conversation import Conversation

HALF = {"before training": "The the of, ", "after training": "SELECT name\\nFROM table_1 "}

def ask(name, turns, on_text):
    if turns[-1]["content"] == "fail":
        raise RunError("the process that holds the model ended (killed by signal 9)")
    on_text(HALF[name])
    while not Path(name).exists():  # so that the test sees a half
        time.sleep(0.05)
    on_text("WHERE a < <b>5</b>")
    end = f"WHERE a < <b>5</b> -- {len(turns)} turns, "
    return HALF[name] + end + "a long answer goes on and on, " * 12

chat = Conversation(["before training", "after training"], ask)
chat
"""
FOLLOW = """
import json, time
from pathlib import Path
from tests.support.writtenrun import write_run
from workbench import Run
written = write_run(Path("pods"))
written.state("running", "training")
T = time.time()
for step in range(1, 31):
    written.event("step", T + step, step=step, loss=8.0 / step)
run = Run.load(written.paths.root)
run.plot()
"""
MORE = """
for step in range(31, 41):
    written.event("step", T + step, step=step, loss=8.0 / step)
"""
END = """
written.end()
"""
SIDE = "workbench.compare([run, run], names=['one', 'two'])"


def test_a_message_is_typed_and_answers_are_written_beside_each_other(
    lab: Any, open_book: Callable[[str], Any]
) -> None:
    book = open_book(lab.add(notebook(CHAT), "chat.ipynb"))
    book.run(0)
    field = book.output(0).locator("input[type=text]")
    field.wait_for()
    field.fill("Which names are there where a is below <b>5</b>?")
    field.press("Enter")
    seen = book.see(0, "The the of,")
    assert "SELECT" not in seen and "Which names are there" in seen
    assert field.is_disabled()
    (lab.folder / "before training").touch()
    book.see(0, "FROM table_1")
    (lab.folder / "after training").touch()
    seen = book.see(0, "-- 1 turns")
    assert "WHERE a < <b>5</b>" in seen and book.output(0).locator("b", has_text="5").count() == 0
    field.fill("And then?")
    field.press("Enter")
    book.see(0, "-- 3 turns")
    book.page.keyboard.type("fail")  # the field has the focus again
    book.page.keyboard.press("Enter")
    book.see(0, "killed by signal 9")
    assert not book.is_wider_than_its_place(0)
    # What was said stays in the notebook's file.
    book.page.evaluate("() => window.jupyterapp.commands.execute('docmanager:save')")
    book.page.wait_for_function("() => !window.jupyterapp.shell.currentWidget.context.model.dirty")
    saved = (lab.folder / "chat.ipynb").read_text()
    assert "-- 3 turns" in saved and "Write, and press" not in saved


def test_a_plot_in_a_notebook_follows_its_run_and_stays(
    lab: Any, open_book: Callable[[str], Any]
) -> None:
    tests = Path(__file__).resolve().parents[1]
    cells = (
        f"import sys; sys.path.append({str(tests)!r})\n{FOLLOW}",
        MORE,
        END,
        f"import workbench\n{SIDE}",
    )
    book = open_book(lab.add(notebook(*cells), "plots.ipynb"))
    book.run(0)
    plot = book.output(0).locator("svg.wb-plot")
    plot.wait_for()

    def last_words() -> str:
        return str(plot.locator(".wb-at span").last.get_attribute("data-words"))

    assert last_words() == "step 30\ntraining loss 0.2667"
    assert book.output(0).locator("img").filter(visible=True).count() == 0

    book.run(1)
    until(lambda: last_words() == "step 40\ntraining loss 0.2", 120, why=last_words)

    book.run(2)
    book.run(3)
    side = book.output(3).locator("svg.wb-plot")
    side.first.wait_for()
    book.see(3, "No option differs", 120)
    book.save()
    saved = (lab.folder / "plots.ipynb").read_text()
    assert len(saved) < 300_000
    outputs = [
        output
        for cell in json.loads(saved)["cells"]
        for output in cell["outputs"]
        if "data" in output
    ]
    kinds = {kind for output in outputs for kind in output["data"]}
    assert kinds == {"text/plain", "text/html", "image/png"}, "no widget and no program"
    pictures = [output["data"] for output in outputs if {*output["data"]} - {"image/png"}]
    assert ">loss, run 2026" in "".join(pictures[0]["text/html"])


def test_the_table_of_runs_is_sorted_by_a_click_in_a_notebook(lab: Any, open_book: Any) -> None:
    for n, loss in enumerate((0.5, 0.25, 0.75)):
        run = make_run(lab.folder / "runs" / f"run-{n}", float(n), eval_loss=loss)
        steps = [
            {"time_s": 9.0 + n, "rank": 0, "kind": "step", "step": n, "loss": loss + 1 / n}
            for n in (1, 2, 3)
        ]
        run.paths.events.write_text("".join(json.dumps(step) + "\n" for step in steps))
    show_runs = "from workbench import history\nhistory('runs')"
    book = open_book(lab.add(notebook(show_runs), "history.ipynb"))
    book.run(0)
    book.see(0, "run-0", 120)
    # The second table is that of the fold.
    table = book.output(0).locator("table.wb-sort").first
    rows = table.locator("tbody tr")
    assert [text.split()[1] for text in rows.all_inner_texts()] == ["run-2", "run-1", "run-0"]
    table.locator("th", has_text="eval").click()
    until(
        lambda: [text.split()[1] for text in rows.all_inner_texts()] == ["run-1", "run-0", "run-2"],
        120,
    )

    compare = book.output(0).get_by_role("button", name="Compare the ticked runs")
    compare.click()
    book.see(0, "Tick two runs or more.", 30)
    for run in ("run-1", "run-2"):
        table.locator("tr", has_text=run).get_by_role("checkbox").check()
    compare.click()
    assert "run-0" not in book.see(0, "Results", 60).partition("Loss over optimizer steps")[2]
    book.output(0).locator("svg.wb-plot").wait_for()
    saved = json.dumps(book.saved()["cells"][0]["outputs"])
    assert "Results" in saved and "checkbox" not in saved
