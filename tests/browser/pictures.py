"""`make pictures`: the pictures of README and docs, taken anew of real runs in a real JupyterLab.

No test: its name keeps it out of the tests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.browser.readings import PICTURES, write_records
from tests.browser.shots import LONG, take_pictures


def test_take_the_pictures(lab: Any, open_book: Callable[..., Any]) -> None:
    texts = take_pictures(lab, open_book, PICTURES, LONG, None)
    write_records(texts)
