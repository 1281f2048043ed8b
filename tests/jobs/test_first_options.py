"""The options that most people set stand first: in help, on the page and in the form."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from workbench import FineTune
from workbench.display.compose.fields import FIELDS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "options.md"


def test_fifteen_options_stand_first_everywhere() -> None:
    assert len(FineTune.first) == 15
    assert {*FineTune.first} <= {*FineTune.model_fields}
    helped = re.findall(r"^    (\w+): ", inspect.getdoc(FineTune) or "", re.MULTILINE)
    assert {*helped[:15]} == {*FineTune.first}
    assert {*list(inspect.signature(FineTune).parameters)[:15]} == {*FineTune.first}
    table = PAGE.read_text().partition("<!-- options: FineTune -->")[2].partition("<!-- end -->")[0]
    listed = re.findall(r"^\| <a id=.*?>\[`(\w+)`\]", table, re.MULTILINE)
    assert {*listed[:15]} == {*FineTune.first}
    assert {*listed} == {*FineTune.model_fields}
    shown = {name for name, field in FIELDS.items() if field.is_main and field.record is FineTune}
    assert shown == {*FineTune.first} - {"lora"}, "`lora` is a field for each of its options"


def test_all_other_options_stand_by_group() -> None:
    table = PAGE.read_text().partition("<!-- options: FineTune -->")[2].partition("<!-- end -->")[0]
    titles = re.findall(r"^\*\*(.+)\*\*$", table, re.MULTILINE)
    assert titles[0] == "Most used"
    assert titles[1:] == [*dict.fromkeys(FineTune.sections.values())]
