from __future__ import annotations

import html
from html.parser import HTMLParser

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.base import table
from workbench.base.table import Bar, Grid, Marked, Toned, cell_text, text_table
from workbench.base.words import strip_controls
from workbench.display.kit.templates import html_table

EVIL = "<img src=x onerror=alert(1)>\"'&\x1b[31m\n"
GRID = Grid(
    columns=("pod", "GiB"),
    rows=[("pod-0", "1.5"), ("漢字", "12"), (EVIL, "–")],
    right={"GiB"},
    caption="Pods & more",
)


class Cells(HTMLParser):
    """What a browser makes of a table: its tags, and the text of each cell."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.cells: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.add(tag)
        if tag in ("td", "th", "caption"):
            self.cells.append("")

    def handle_data(self, data: str) -> None:
        self.cells[-1] += data


def test_text_is_aligned_numbers_at_the_right_and_wide_letters_counted() -> None:
    assert text_table(
        Grid(columns=GRID.columns, rows=GRID.rows[:2], right={"GiB"})
    ).splitlines() == [
        "pod    GiB",
        "-----  ---",
        "pod-0  1.5",
        "漢字    12",
    ]


def test_html_is_escaped() -> None:
    seen = Cells(html_table(GRID))
    assert seen.tags == {"table", "caption", "span", "thead", "tbody", "tr", "th", "td"}
    assert seen.cells == [
        "Pods & more",
        "pod",
        "GiB",
        "pod-0",
        "1.5",
        "漢字",
        "12",
        f"{strip_controls(EVIL)}\n",
        "–",
    ]


def test_a_terminal_gets_no_control_characters() -> None:
    assert "\x1b" not in str(GRID)
    assert "<img src=x onerror=alert(1)>" in str(GRID)


@settings(deadline=None)
@given(st.lists(st.tuples(st.text(), st.text()), min_size=1, max_size=4))
def test_both_faces_state_the_same(rows: list[tuple[str, str]]) -> None:
    grid = Grid(columns=("a", "b"), rows=rows)
    seen = Cells(html_table(grid)).cells[2:]
    # In HTML a text of several lines keeps them; else both say the same words.
    assert [cell.split() for cell in seen] == [
        strip_controls(cell).split() for row in rows for cell in row
    ]
    drawn = "".join(text_table(grid).split("\n", 2)[2].split())
    assert sorted(drawn) == sorted("".join("".join(seen).split()))


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 12), st.integers(20, 160), st.integers(0, 3))
def test_a_wide_table_goes_on_below_and_no_cell_is_lost(
    columns: int, room: int, staying: int
) -> None:
    titles = [f"title{n}" for n in range(columns)]
    rows = [
        [Toned(f"cell{n}-{line}", "good", f"small{n}") for n in range(columns)] for line in "ab"
    ]
    stay = titles[:staying]
    whys = [Toned("why a", "bad"), ""]
    grid = Grid(columns=titles, rows=rows, whole=titles, stay=stay, under=whys, caption="runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table, "room_of_text", lambda: room)
        text = text_table(grid)
    shown = " ".join(Cells(html_table(grid)).cells)
    for word in ("why a", *titles, *(f"cell{n}-{line}" for n in range(columns) for line in "ab")):
        assert word in text and word in shown
    # The columns that stay are repeated, and each line has room if one more column has.
    least = 10 * (max(1, staying) + 1)
    assert all(len(line) <= max(room, least) for line in text.splitlines())
    tables = text.count("\n\n") + 1
    assert all(text.count(f"{title}") >= tables for title in stay)


def test_a_table_without_columns_is_its_caption() -> None:
    assert text_table(Grid(columns=(), rows=(), caption="0 runs")) == "0 runs"


def test_a_long_cell_goes_on_in_the_next_line() -> None:
    lines = text_table(
        Grid(columns=("a", "b"), rows=[("one two three", "x")]), width=8
    ).splitlines()
    assert lines[2:] == ["one two  x", "three"]


def test_marked_words() -> None:
    grid = Grid(columns=("",), rows=[(Marked((("a b", False), ("<c>", True))),)])
    assert text_table(grid) == "a b [<c>]"
    page = html_table(grid)
    assert "a b <mark" in page
    assert html.escape("<c>") + "</mark>" in page


def test_a_bar_is_a_letter_for_each_part() -> None:
    assert (
        cell_text(Bar((("parameters", 0.25), ("logits", 0.125)), limit=0.75))
        == "pppppplll.........|......"
    )


def test_colours_are_the_themes_own() -> None:
    assert "var(--jp-ui-font-color1" in html_table(GRID)
