"""A chat below a cell: what is typed, answers as they grow, and what a dead kernel leaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.browser.conftest import notebook

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


def test_a_message_is_typed_and_answers_are_written_beside_each_other(
    lab: Any, open_book: Callable[[str], Any]
) -> None:
    book = open_book(lab.add(notebook(CHAT), "chat.ipynb"))
    book.run(0)
    field = book.output(0).locator("input[type=text]")
    field.wait_for()
    book.shoot(0, "chat-empty")
    field.fill("Which names are there where a is below <b>5</b>?")
    field.press("Enter")
    seen = book.see(0, "The the of,")
    assert "SELECT" not in seen and "Which names are there" in seen
    assert field.is_disabled()
    book.shoot(0, "chat-streaming")
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
    book.shoot(0, "chat")
    assert not book.is_wider_than_its_place(0)
    # What was said stays in the notebook's file.
    book.page.evaluate("() => window.jupyterapp.commands.execute('docmanager:save')")
    book.page.wait_for_function("() => !window.jupyterapp.shell.currentWidget.context.model.dirty")
    saved = (lab.folder / "chat.ipynb").read_text()
    assert "-- 3 turns" in saved and "Write, and press" not in saved
