"""The page of models to start with has the lines of `python -m tools.models`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import models

PAGE = Path(__file__).parents[2] / "docs" / "choose-model.md"


def test_the_page_has_a_line_for_every_model() -> None:
    table = PAGE.read_text(encoding="utf-8").partition("<!-- models -->\n")[2]
    lines = table.partition("<!-- end of models -->")[0].splitlines()[2:]
    assert [line.split("`")[1] for line in lines] == list(models.MODELS)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("name", list(models.MODELS)[-1:])
def test_the_page_has_the_memory_that_is_planned(name: str) -> None:
    assert models.row_of(name) in PAGE.read_text(encoding="utf-8").splitlines()
