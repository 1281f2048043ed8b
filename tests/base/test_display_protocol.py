from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys
from dataclasses import dataclass

from workbench.base import display_protocol
from workbench.base.display_protocol import (
    Displayable,
    as_html,
    as_page,
    as_text,
    follow,
    load_views,
)
from workbench.base.table import facts

ROOMS = (
    "base",
    "jobs",
    "pods",
    "rundir",
    "keeper",
    "finetune.plan",
    "finetune.answers",
    "finetune.export",
    "finetune.profile",
    "finetune.advice",
    "finetune.notebook",
    "handover.kubeflow",
    "client",
    "benchmark",
    "display",
)
GRID = facts("Facts", [("a", "<b>")])


def classes(above: type) -> set[type]:
    return {cls for each in above.__subclasses__() for cls in (each, *classes(each))}


def shown_classes() -> list[type]:
    for room in ROOMS:
        package = importlib.import_module(f"workbench.{room}")
        for module in pkgutil.walk_packages(package.__path__, f"workbench.{room}."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
    # A dataclass with slots is a copy: the class that it was made of may still be there. So may a
    # class of another test whose module is gone.
    return [
        cls
        for cls in classes(Displayable)
        if getattr(sys.modules.get(cls.__module__), cls.__name__, None) is cls
    ]


def test_every_record_has_its_text_and_its_html() -> None:
    assert load_views()
    records = [cls for cls in shown_classes() if cls is not display_protocol.LiveDisplayable]
    assert len(records) > 12
    lacking = [
        cls
        for view in (as_text, as_html)
        for cls in records
        if view.dispatch(cls) is view.dispatch(object)
    ]
    assert lacking == []


def test_every_live_record_has_its_live_view() -> None:
    load_views()
    live = [
        cls
        for cls in shown_classes()
        if issubclass(cls, display_protocol.LiveDisplayable)
        and cls is not display_protocol.LiveDisplayable
    ]
    assert live
    assert [
        cls
        for cls in live
        if display_protocol.as_live.dispatch(cls) is display_protocol.as_live.dispatch(object)
    ] == []


def test_views_are_loaded_at_the_first_look_without_widgets_or_plots() -> None:
    code = (
        "import sys; from workbench.base.table import facts; grid = facts('Facts', [('a', 'b')]);"
        "assert 'workbench.display' not in sys.modules; print(grid);"
        "print(*{'ipywidgets', 'matplotlib', 'IPython'} & {*sys.modules})"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines() == ["Facts", "a  b", ""]


def test_a_record_prints_plainly_where_display_cannot_be_imported() -> None:
    code = (
        "import sys; sys.modules['workbench.display'] = None\n"
        "from workbench.base.display_protocol import as_page, follow\n"
        "from workbench.base.table import facts\n"
        "grid = facts('<b>', [('a', 'b')])\n"
        "print(str(grid) == repr(grid), grid._repr_html_(), sorted(grid._repr_mimebundle_()))\n"
        "with follow(grid) as draw: draw()\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.startswith("True <pre>Grid(1 row: ")
    assert "&lt;b&gt;" in run.stdout and run.stdout.endswith("['text/html', 'text/plain']\n")


def test_what_has_no_view_of_a_kind_falls_back_on_its_other_views() -> None:
    assert as_page(GRID) == f"<!doctype html>{GRID._repr_html_()}"
    with follow(GRID) as draw:
        draw()


def test_a_record_keeps_one_line_as_its_repr_and_its_slots() -> None:
    @dataclass(frozen=True, slots=True)
    class Point(Displayable):
        x: int

    assert repr(Point(1)).endswith("Point(x=1)")
    assert str(Point(1)) == repr(Point(1))
    assert not hasattr(Point(1), "__dict__")
