from __future__ import annotations

import html
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from poll import until

from workbench.base.errors import ConfigError
from workbench.client.compose.composition import Composition
from workbench.display.compose.form import Form, compose
from workbench.planner.setting import request_of
from workbench.planner.shapes import model_config
from workbench.planner.tracing import remember


def inside(widget: Any) -> Iterator[Any]:
    yield widget
    for child in getattr(widget, "children", ()):
        yield from inside(child)


def part(form: Form, description: str) -> Any:
    """The widget with that description."""
    return next(each for each in inside(form.widget) if getattr(each, "description", "") == description)


def pick(form: Form, label: str, value: object) -> None:
    part(form, label).value = value


def start(form: Form) -> dict[str, Any]:
    """How its start button looks."""
    bar = next(each for each in inside(form.widget) if hasattr(each, "buttons"))
    return next(each for each in bar.buttons if each["name"] == "start")


def shown(widget: Any) -> str:
    """The HTML that a reader sees."""
    drawn = (w.value for w in inside(widget) if type(w).__name__ == "HTML" and w.layout.display != "none")
    return html.unescape("".join(drawn))


def test_text_and_html_state_the_same_and_escape() -> None:
    form = compose(model="<img src=x onerror=alert(1)>", dataset="</pre><script>")
    page = form._repr_html_()
    assert "<img" not in page
    assert "<script" not in page
    said = html.unescape(re.sub(r"<[^>]*>", "\n", page))
    assert [line for line in str(form).splitlines() if line.strip() and line not in said] == []


def test_a_choice_that_is_not_known_is_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean 'technique'"):
        compose(techniqe="zero1")


def test_without_widgets_there_is_text_and_html() -> None:
    code = (
        "import sys; sys.modules['ipywidgets'] = None; from workbench.display.compose.form import compose; "
        "b = compose()._bundle(); print(sorted(b)); print(b['text/plain'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("['text/html', 'text/plain']")
    assert "24 rows per optimizer step" in done.stdout
    assert "run = cluster.start().submit(job)" in done.stdout


def test_what_was_never_counted_is_counted_beside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked: list[Composition] = []

    def count(composition: Composition) -> None:
        asked.append(composition)
        sizes = {"layers": [[[1000, 1, 0]]], "rest": [[2000, 1, 0]]}
        config = model_config(composition["model"])
        request = request_of(composition.make_job(), config, ["fp32"], gpu=False, lengths=None)
        remember(request, {"points": {"fp32": [[0.0, float(2**20), 0.0, 0.0, 0.0]]}, "sizes": sizes})

    monkeypatch.setattr("workbench.display.compose.form.count_memory", count)
    form = compose(count=2)
    until(lambda: "Predicted at the longest rows" in shown(form.widget))
    assert asked == [form.composition]
    assert form.preview.is_counted


def test_the_widgets_show_what_follows_from_a_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workbench.display.compose.form.count_memory", lambda _composition: None)
    form = compose(count=2)
    pick(form, "Accumulate", 3)
    assert form.composition == Composition(count=2, gradient_accumulation_steps=3)
    assert "48 rows per optimizer step" in shown(form.widget)
    assert "gradient_accumulation_steps=3" in shown(form.widget)
    assert not start(form)["disabled"]

    pick(form, "Technique", "single")
    pick(form, "Launcher", "pdsh")
    assert start(form)["disabled"]
    assert set(form.preview.problems) == {"technique", "launcher"}
    assert shown(form.widget).count(form.preview.problems["launcher"]) == 2

    pick(form, "Launcher", "ssh")
    assert not start(form)["disabled"]
    assert "one rank;" not in shown(form.widget)


def test_a_start_that_is_refused_starts_nothing() -> None:
    form = Form(Composition(precision="fp16"))
    with pytest.raises(ConfigError, match="bf16"):
        form.start()
    assert form.cluster is None
    assert repr(form).endswith("refused: precision)")
