from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import comm
import pytest
from IPython.core.displaypub import CapturingDisplayPublisher
from IPython.core.interactiveshell import InteractiveShell

from tests.support.poll import until
from workbench.display.kit import live
from workbench.display.kit.doc import Doc, Note
from workbench.display.kit.live import Picture, show_live
from workbench.display.kit.widgets import VIEW, Button, ButtonBar

RUN = Path("/runs/r1")


class Watched:
    """What goes on as the test says."""

    name, tick_s, keeps_buttons = "run r1", 0.02, False

    def __init__(self) -> None:
        self.words, self.png = "queued", b""
        self.over, self.clickable = False, True
        self.unfolded: list[tuple[str, bool]] = []
        self._bar = ButtonBar("buttons", {"stop": lambda: None}, [])

    def prepare(self) -> None:
        pass

    def look(self, *, at_once: bool) -> Doc:
        return Doc(blocks=[Note(self.words)])

    def still(self) -> bytes | None:
        return self.png

    def bar(self) -> ButtonBar:
        return self._bar

    def unfold(self, title: str, is_open: bool) -> None:
        self.unfolded.append((title, is_open))

    def end(self) -> None:
        self.words, self.png = "succeeded", b"\x89PNG"
        self.over, self.clickable = True, False


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """What a front end is sent by a kernel in whose cells somebody clicks."""
    shell = InteractiveShell.instance()
    before, shell.display_pub = shell.display_pub, CapturingDisplayPublisher()
    monkeypatch.setattr(live, "is_notebook", lambda _stream: True)
    monkeypatch.setattr(live, "has_widgets", lambda: True)
    monkeypatch.setattr(live, "_PICTURES", {})
    yield shell.display_pub.outputs
    shell.display_pub = before
    InteractiveShell.clear_instance()


def names(outputs: list[dict[str, Any]]) -> list[str]:
    return [out["transient"]["display_id"].partition("-")[2] for out in outputs]


def page(out: dict[str, Any]) -> str:
    return str(out["data"]["text/html"])


def end_of_cell() -> None:
    InteractiveShell.instance().events.trigger("post_run_cell", None)


def test_a_picture_is_drawn_again_in_place_and_holds_no_widget(sent: list[dict[str, Any]]) -> None:
    watched = Watched()
    show_live(RUN, lambda: watched)
    assert names(sent) == ["buttons", "main", "image"]
    assert VIEW in sent[0]["data"]
    assert ">queued<" in page(sent[1]) and "as of" in page(sent[1])
    assert page(sent[2]) == ""
    watched.words = "running"
    until(lambda: len(sent) > 3)
    assert (sent[3]["update"], names(sent[3:4])) == (True, ["main"])
    assert ">running<" in page(sent[3]) and VIEW not in sent[3]["data"]
    watched.end()
    until(lambda: len(sent) >= 7)
    assert sorted(names(sent[4:])) == ["buttons", "image", "main"]
    assert all(VIEW not in out["data"] for out in sent[3:])
    last = next(out for out in sent[4:] if "main" in out["transient"]["display_id"])
    assert ">succeeded<" in page(last) and "as of" not in page(last)


def test_what_came_between_two_cells_is_sent_again_at_the_end_of_the_next(
    sent: list[dict[str, Any]],
) -> None:
    watched = Watched()
    show_live(RUN, lambda: watched)
    watched.end()
    until(lambda: len(sent) >= 6)
    end_of_cell()
    assert sorted(names(sent[6:])) == ["buttons", "image", "main"]
    assert live._PICTURES == {}
    end_of_cell()
    assert len(sent) == 9


def test_the_end_of_a_cell_draws_what_no_tick_has_seen(sent: list[dict[str, Any]]) -> None:
    watched = Watched()
    watched.tick_s = 3600.0
    show_live(RUN, lambda: watched)
    until(lambda: live._PICTURES[RUN]._thread is not None)
    watched.words = "running"
    end_of_cell()
    end_of_cell()
    assert ">running<" in page(sent[-1])
    assert len(sent) <= 5  # once, or by the thread's first look and once more
    live._PICTURES[RUN].close()


def test_a_record_has_one_picture_in_all_cells(sent: list[dict[str, Any]]) -> None:
    watched = Watched()
    show_live(RUN, lambda: watched)
    show_live(RUN, Watched)
    assert [out["transient"]["display_id"] for out in sent[:3]] == [
        out["transient"]["display_id"] for out in sent[3:6]
    ]
    live._PICTURES[RUN].close()


def test_buttons_stay_where_they_are_wanted_or_show_something(sent: list[dict[str, Any]]) -> None:
    kept, used = Picture(Watched()), Picture(Watched())
    kept.show(clicks=True, keep_bar=True)
    used.show(clicks=True)
    used.watched.bar().bring_up("<pre>stacks</pre>")
    for picture in (kept, used):
        picture.watched.end()  # type: ignore[attr-defined]
        picture.refresh(keep=True)
        assert picture._buttons.sent == "bar"
    used.watched.bar().hear({"close": True})
    used.refresh(keep=True)
    assert used._buttons.sent == ""


def test_a_page_that_was_loaded_anew_gets_the_picture_from_the_kernel(
    sent: list[dict[str, Any]],
) -> None:
    watched = Watched()
    picture = Picture(watched)
    picture.show(clicks=True)
    answers: list[Any] = []
    watched.bar().widget.send = answers.append
    watched.words = "running"
    watched.bar().hear({"redraw": True})
    assert ">running<" in answers[0]["html"] and f'data-wb="{picture.id}"' in answers[0]["html"]
    watched.bar().hear({"fold": "log of rank 1", "open": True})
    assert watched.unfolded == [("log of rank 1", True)]
    watched.bar().hear({"click": "no such button"})
    picture.close()


def test_a_page_that_missed_the_buttons_gets_them_when_it_says_hello(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bar = ButtonBar("buttons", {"stop": lambda: None}, [])
    bar.draw([Button(name="stop", text="Stop", tip="Ends it")])
    states: list[dict[str, Any]] = []
    monkeypatch.setattr(
        bar.widget, "send_state", lambda key=None: states.append(bar.widget.get_state(key))
    )
    bar.hear({"hello": True})
    assert [button["name"] for state in states for button in state["buttons"]] == ["stop"]


def test_the_first_buttons_travel_with_the_message_that_makes_the_widget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened: list[dict[str, Any]] = []
    make = comm.create_comm

    def create(**options: Any) -> Any:
        opened.append(options["data"]["state"])
        return make(**options)

    monkeypatch.setattr(comm, "create_comm", create)
    ButtonBar("buttons", {}, [Button(name="stop", text="Stop", tip="Ends it")])
    (state,) = [state for state in opened if "buttons" in state]
    assert [button["name"] for button in state["buttons"]] == ["stop"]


def test_a_click_that_fails_says_so() -> None:
    def refuse() -> None:
        raise OSError("it will not end <b>")

    stop = Button(name="stop", text="Stop", tip="Ends it", sure="Really?")
    bar = ButtonBar("buttons", {"stop": refuse}, [stop])
    assert bar.widget.buttons[0]["sure"] == "Really?"
    bar.hear({"click": "stop"})
    until(lambda: bar.widget.note == {"text": "it will not end <b>", "kind": "wb-hint"})
    assert bar.in_use


def test_where_there_is_no_notebook_there_is_one_display(
    sent: list[dict[str, Any]], monkeypatch: Any
) -> None:
    monkeypatch.setattr(live, "is_notebook", lambda _stream: False)
    show_live(RUN, Watched)
    assert [sorted(out["data"]) for out in sent] == [["text/html", "text/plain"]]


def test_a_cell_that_no_front_end_names_gets_no_buttons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "is_notebook", lambda _stream: True)
    parent: dict[str, Any] = {"metadata": {}}
    shell = SimpleNamespace(kernel=SimpleNamespace(get_parent=lambda: parent))
    monkeypatch.setattr("IPython.core.getipython.get_ipython", lambda: shell)
    assert not live.has_widgets()
    parent["metadata"]["cellId"] = "c1"
    assert live.has_widgets()
