"""What buttons do: ask once before they act, and act in a thread of their own, so that the notebook goes on."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from workbench.base.errors import WorkbenchError

__all__ = ["AskOnce", "act_in_thread"]

logger = logging.getLogger(__name__)
_SURE_S = 6.0


def act_in_thread(act: Callable[[], object], fail: Callable[[str], None], name: str) -> None:
    """Do what a click asks for; `fail` takes the words of what goes wrong."""

    def carry_out() -> None:
        try:
            act()
        except (WorkbenchError, OSError) as error:
            fail(str(error))
        except Exception as error:  # thread boundary: what is raised here would be seen by nobody
            logger.exception("what a click asked for: %s", name)
            fail(f"{type(error).__name__}: {error}")

    threading.Thread(target=carry_out, name=name, daemon=True).start()


class AskOnce:
    """A button that asks once before it acts: the second click within some seconds is the one that counts."""

    def __init__(self, text: str, sure: str, act: Callable[[], None], **options: Any):
        import ipywidgets as w

        self.widget = w.Button(description=text, **options)
        self.sure = sure
        """What stands on it after the first click."""
        self._text, self._act = text, act
        self._style = str(options.get("button_style", ""))
        self._asked_at: float | None = None
        self.widget.on_click(lambda _: self.click())

    def click(self) -> None:
        """Do what a click does."""
        if self._asked_at is None:
            self._asked_at = time.monotonic()
            self.widget.description, self.widget.button_style = self.sure, "danger"
        else:
            self.calm(now=True)
            self._act()

    def calm(self, *, now: bool = False) -> None:
        """Take the question back when it has stood for long, or now."""
        if self._asked_at is not None and (now or time.monotonic() - self._asked_at > _SURE_S):
            self._asked_at = None
            self.widget.description, self.widget.button_style = self._text, self._style
