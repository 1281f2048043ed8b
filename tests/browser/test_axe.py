"""Every view before axe-core, light and dark, unfolded: contrast, names of controls, roles."""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from tests.browser.conftest import notebook
from tests.support.benchrows import write_row
from tests.support.poll import until
from workbench.benchmark.result import rows_below, write_report
from workbench.client.result import RunResult

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.browser]

TESTS = Path(__file__).resolve().parents[1]
WRITE = f"""
import sys
from contextlib import closing
from pathlib import Path
sys.path[:0] = [{str(TESTS)!r}, {str(TESTS.parent)!r}]
from tests.support.benchrows import make_row, mixed_rows, write_row
from tests.support.writtenrun import T0, write_run
from tests.display.test_plan import LARGE, table
from tests.browser.test_tables import answers
from workbench import Cluster, LocalPods, Run, compare, history
from workbench.forms import compose
from workbench.benchmark.result import BenchmarkResult
from workbench.benchmark.row import Outcome
from workbench.finetune.answers.conversation import Conversation
from workbench.display.benchmark.live import BenchmarkLive
from workbench.rundir.totals import Progress
from workbench.rundir.state import RunState

def filled(name):
    run = write_run(Path(name))
    run.state("running", "training")
    run.event("start", model="tiny-t5", world_size=3, global_batch_size=24, parameters=1_033_984)
    run.event("eval", step=0, eval_loss=9.5)
    for step in range(1, 31):
        run.step(step)
    run.event("eval", T0 + 30, step=30, eval_loss=3.25)
    for rank in range(3):
        for n in (0, 20):
            run.event("memory", T0 + n, rank=rank, step=n,
                      rss_gib=0.5 + rank, peak_rss_gib=0.75 + rank)
        run.log(rank, f"[Rank {{rank}}] ready\\n")
    return run

import tempfile
from tests.support.views import EXAMPLES

def example(name):
    make = next(make for cls, make in EXAMPLES.items() if cls.__name__ == name)
    return make(Path(tempfile.mkdtemp()))

runs = {{name: filled(name) for name in ("running", "finished", "failed")}}
runs["running"].state("running", "training", hint="no step for 31 s")
runs["finished"].end(steps=30, exact_match=0.4, left_processes=0)
fault = {{"host": "127.0.0.3", "pod": "pod-1", "rank": 1, "kind": "OutOfMemoryError",
         "traceback": "Traceback\\n  x\\n",
         "message": "CUDA out of memory. Tried to allocate 2.50 GiB",
         "others": "2 ranks lost their peer"}}
runs["failed"].end("failed", "out of memory", error=fault)
rows = [*mixed_rows(), make_row("zero2", 3, 95.0, exact_match=0.5)]
written = [write_row(Path("rows") / name, technique=name) for name in ("ddp", "zero1")]
one, other = (Run.load(path) for path in written)
going = [*mixed_rows(), make_row("fsdp", 3, None, name="now", outcome=Outcome.RUNNING)]
now = Progress(state=RunState.RUNNING, step=5, max_steps=20, loss=4.25, samples_per_s=88.5,
               eta_s=9.0)
"""
EXAMPLED = (
    "BenchmarkForecast",
    "Diagnosis",
    "Export",
    "GpuTable",
    "Manifest",
    "NodeTable",
    "Pushed",
    "RowPreview",
    "Scores",
    "Stacks",
)
"""Views without a run of their own, from the examples of all views."""
SHOWN = {
    "running": "Run.load(runs['running'].paths.root)",
    "finished": "Run.load(runs['finished'].paths.root)",
    "failed": "Run.load(runs['failed'].paths.root)",
    "failed result": "Run.load(runs['failed'].paths.root).result",
    "plot": "Run.load(runs['finished'].paths.root).plot()",
    "cluster": "Cluster(LocalPods(), count=3, path=runs['running'].cluster.root)",
    "plan": "table(*LARGE)",
    "history": "history('.')",
    "compare": "compare([one, other])",
    "benchmark": "BenchmarkResult(name='sweep', folder=Path('rows'), rows=tuple(rows))",
    "benchmark plots": "BenchmarkResult(name='sweep', "
    "folder=Path('rows'), rows=tuple(rows)).plots()",
    "live benchmark": "with closing(BenchmarkLive()) as live:\n"
    "    live.update(going, {'now': now})",
    "answers": "answers()",
    "predictions": "one.result.predictions",
    "profile": "one.result.profile",
    "profiles": "compare(one.result.profile, other.result.profile)",
    **{name: f"example({name!r})" for name in EXAMPLED},
    "chat": "Conversation(['before', 'after'], lambda name, turns, on_text: 'an answer')",
    "compose": "compose(count=1, max_steps=10)",
}
UNFOLD = "() => document.querySelectorAll('.wb details').forEach(each => { each.open = true; })"
PARTS = [[each] for each in (".wb", ".wb-form", ".widget-text", ".dw-side", ".dw-tab")]
AUDIT = """async parts => (
    await axe.run({include: parts})
).violations.map(
    it => `${it.id} (${it.impact}): ` + it.nodes.slice(0, 4).map(
        node => `${node.html.slice(0, 160)} ${(node.any[0] || {}).message || ''}`).join(' | '))"""


def audit(page: Any) -> list[str]:
    """Return what axe-core finds in all that is ours."""
    page.evaluate(UNFOLD)
    if not page.evaluate("() => !!window.axe"):
        page.evaluate(
            files("axe_playwright_python").joinpath("axe.min.js").read_text(encoding="utf-8")
        )
    violations: list[str] = page.evaluate(AUDIT, PARTS)
    return violations


def test_no_view_in_a_notebook_violates_a_rule(lab: Any, open_book: Callable[..., Any]) -> None:
    from tests.browser.test_picture import EXAMINED, ILL

    cells = (WRITE, *SHOWN.values(), EXAMINED, ILL)
    book = open_book(lab.add(notebook(*cells), "axe.ipynb"), own_page=True)
    book.run_all()
    book.wait_idle(120)
    for place, name in enumerate(SHOWN, 1):
        until(lambda place=place: bool(book.said(place)), 60, why=lambda name=name: name)
    book.output(len(SHOWN)).get_by_label("Technique").wait_for()
    assert book.page.locator(".wb").count() > len(SHOWN)
    chat = book.output(1 + [*SHOWN].index("chat"))
    chat.locator("input").fill("How many?")
    chat.locator("input").press("Enter")
    chat.get_by_text("an answer").first.wait_for()
    book.page.evaluate("() => window.jupyterapp.shell.activateById('deepspeed-workbench-runs')")
    book.page.locator(".dw-run").first.wait_for()
    found = {}
    for theme in ("light", "dark"):
        book._theme(theme)
        found[theme] = audit(book.page)
    for state in ("succeeded", "failed"):
        book.page.locator(f".dw-run[data-state='{state}'] .dw-open").first.click()
        tab = book.page.locator(".dw-tab:visible")
        tab.frame_locator("iframe").get_by_text("Run ").first.wait_for()
        drawn = book.page.context.new_page()
        drawn.set_content(tab.locator("iframe").get_attribute("srcdoc"))
        for scheme in ("light", "dark"):
            book._theme(scheme)
            drawn.emulate_media(color_scheme=scheme)
            found[f"tab of {state}, {scheme}"] = [*audit(book.page), *audit(drawn)]
        drawn.close()
    assert {name: each for name, each in found.items() if each} == {}


def test_no_page_violates_a_rule(browser: Any, tmp_path: Path) -> None:
    runs = [write_row(tmp_path / name, technique=name) for name in ("ddp", "zero1")]
    report = write_report(rows_below([tmp_path])[0], tmp_path / "out")
    card = RunResult.load(runs[0]).to_html(tmp_path / "card.html")
    page = browser.new_page()
    found = {}
    for path in (report, card):
        page.goto(path.as_uri())
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            found[path.name, scheme] = audit(page)
    page.close()
    assert [each for each in found.items() if each[1]] == []
