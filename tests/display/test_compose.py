from __future__ import annotations

import html
import re
import subprocess
import sys
from pathlib import Path

import pytest
from poll import until

from workbench.base.errors import ConfigError
from workbench.display.compose.choices import Composition
from workbench.display.compose.form import Form, compose
from workbench.planner.setting import request_of
from workbench.planner.shapes import model_config
from workbench.planner.tracing import remember


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
        "b = compose()._repr_mimebundle_(); print(sorted(b)); print(b['text/plain'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("['text/html', 'text/plain']")
    assert "48 rows per optimizer step" in done.stdout
    assert "run = cluster.start().submit(job)" in done.stdout


def test_what_was_never_counted_is_counted_beside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked: list[Composition] = []

    def count(composition: Composition) -> None:
        asked.append(composition)
        sizes = {"layers": [[[1000, 1, 0]]], "rest": [[2000, 1, 0]]}
        request = request_of(composition.make_job(), model_config(composition.model), ["fp32"], gpu=False, lengths=None)
        remember(request, {"points": {"fp32": [[0.0, float(2**20), 0.0, 0.0, 0.0]]}, "sizes": sizes})

    monkeypatch.setattr("workbench.display.compose.form.count_memory", count)
    form = compose(count=2)
    form._repr_mimebundle_()
    view = form._view
    assert view is not None
    until(lambda: "Predicted at the longest rows" in view._memory.value)
    assert asked == [form.composition]
    assert form.outlook.counted


def test_the_widgets_show_what_follows_from_a_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workbench.display.compose.form.count_memory", lambda _composition: None)
    form = compose(count=2)
    bundle = form._repr_mimebundle_()
    assert set(bundle) == {"text/plain", "text/html", "application/vnd.jupyter.widget-view+json"}
    view = form._view
    assert view is not None
    view._inputs["gradient_accumulation_steps"].value = 3
    assert form.composition == Composition(count=2, gradient_accumulation_steps=3)
    assert "96 rows per optimizer step" in view._batch.value
    assert "gradient_accumulation_steps=3" in view._pages["Python cell"].value
    assert not view._button.disabled

    view._inputs["technique"].value = "single"
    view._inputs["launcher"].value = "pdsh"
    assert view._button.disabled
    assert "one rank" in view._said["launcher"].value
    assert view._said["launcher"].layout.display == "block"
    assert view._said["model"].layout.display == "none"

    view._inputs["launcher"].value = "ssh"
    assert not view._button.disabled
    assert view._said["launcher"].layout.display == "none"
    assert bundle["application/vnd.jupyter.widget-view+json"]["model_id"] == view.root.model_id


def test_a_start_that_is_refused_starts_nothing() -> None:
    form = Form(Composition(precision="fp16"))
    with pytest.raises(ConfigError, match="bf16"):
        form.start()
    assert form.cluster is None
    assert repr(form).endswith("refused: precision)")
