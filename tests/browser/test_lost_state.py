"""Buttons whose first state a slow page never got: the page asks for it, and they are there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.browser.conftest import notebook

pytestmark = [pytest.mark.slow, pytest.mark.browser]

# The kernel holds the button and has sent none: as where its message came before the page listened.
LOST = """
from dataclasses import asdict
from IPython.display import display
from workbench.display.kit.widgets import Button, ButtonBar

bar = ButtonBar("buttons of the test", {"stop": lambda: bar.say("stopped")}, [])
display(bar.bundle("none"), raw=True)
stop = Button(name="stop", text="Stop the test", tip="Ends it")
bar.widget._trait_values["buttons"] = [asdict(stop)]
"""


@pytest.mark.long
def test_buttons_come_though_their_first_state_was_lost(
    lab: Any, open_book: Callable[[str], Any]
) -> None:
    book = open_book(lab.add(notebook(LOST), "lost.ipynb"))
    book.run(0)
    button = book.output(0).get_by_role("button", name="Stop the test")
    button.wait_for()
    button.click()
    book.see(0, "stopped", 60)
