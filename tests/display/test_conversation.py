"""A chat with several models: what each is asked, what is shown, and the field of a notebook."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.support.poll import until
from tests.support.sentences import says, sentence
from workbench.base.errors import ConfigError, RunError
from workbench.display.kit.doc import to_html
from workbench.display.records.answers import conversation_doc, conversation_field
from workbench.finetune.answers.conversation import Conversation


class Models:
    """Two models that answer with the number of turns that they read; one of them may fail."""

    def __init__(self) -> None:
        self.read: list[tuple[str, list[str]]] = []
        self.failing = ""
        self.goes_on = threading.Event()
        self.goes_on.set()

    def ask(self, name: str, turns: Sequence[Any], on_text: Callable[[str], None] | None) -> str:
        self.read.append((name, [turn["content"] for turn in turns]))
        if name == self.failing:
            raise RunError(f"{name} has no <chat template>")
        answer = f"{name} read {len(turns)}"
        if on_text is not None:
            for word in answer.split():
                on_text(word + " ")
            self.goes_on.wait(300)
        return answer


def test_each_model_goes_on_from_its_own_answers() -> None:
    models = Models()
    talk = Conversation(["one", "other"], models.ask, system="Be brief.")
    assert talk.send(" Hi ") == {"one": "one read 2", "other": "other read 2"}
    models.failing = "other"
    with pytest.raises(RunError, match="no <chat"):
        talk.send("Lost")
    models.failing = ""
    talk.send("And?")
    assert models.read[-1] == ("other", ["Be brief.", "Hi", "other read 2", "And?"])
    for shown in (str(talk), talk._repr_html_()):
        assert all(
            word in shown
            for word in ("Hi", "And?", "one read 4", "other read 4", "2 turns with one, other")
        )
        assert "Lost" not in shown
    with pytest.raises(ConfigError, match=sentence("text is empty; say something")):
        talk.send("  ")


def test_what_is_entered_is_answered_below_the_field_and_a_failure_is_shown_there() -> None:
    models = Models()
    talk = Conversation(["one"], models.ask)
    models.goes_on.clear()
    drawn = [conversation_doc(talk)]
    field = conversation_field(talk, drawn.append)

    def page() -> str:
        return to_html(drawn[-1])

    assert says(page(), "A chat with {}: nothing has been said yet.", "one")
    field.value = "<b>Hi</b>"
    # The last piece is drawn, though none comes after it.
    until(lambda: "one read 1 …" in page(), 120)
    assert field.disabled and field.value == "" and talk.exchanges == []
    models.goes_on.set()
    until(lambda: not field.disabled, 120)
    assert "one read 1" in page() and "…" not in page() and "<b>Hi" not in page()
    models.failing = "one"
    field.value = "More"
    until(lambda: "no &lt;chat template&gt;" in page(), 120)
    until(lambda: not field.disabled, 120)
    assert len(talk.exchanges) == 1


def test_lines_of_an_answer_stay_lines_in_a_page_and_are_one_in_text() -> None:
    talk = Conversation(["one"], lambda *_: "def f():\n    return \x1b[31m<1>")
    talk.send("Hi")
    assert "def f():\n    return \ufffd[31m&lt;1&gt;" in talk._repr_html_()
    assert "pre-wrap" in talk._repr_html_()
    assert "def f(): return" in str(talk)
