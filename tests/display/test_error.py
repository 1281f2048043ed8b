"""What a person sees below a cell that an error of ours ended."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
from IPython.core.interactiveshell import InteractiveShell

from tests.support.writtenrun import WrittenRun

SEEN = re.compile(r"\x1b\[[\d;]*m")
Cell = Callable[[str], str]


@pytest.fixture
def cell(capsys: pytest.CaptureFixture[str]) -> Iterator[Cell]:
    """Run a cell and return what stands below it."""
    shell = InteractiveShell.instance()

    def run(text: str) -> str:
        capsys.readouterr()
        shell.run_cell(text, store_history=True)
        return SEEN.sub("", capsys.readouterr().out).strip()

    run("from workbench import *; from workbench.data import *; from workbench.forms import *")
    yield run
    InteractiveShell.clear_instance()


def test_an_error_is_one_block_with_the_cells_own_lines(cell: Cell) -> None:
    cell("def make(steps):\n    return FineTune(max_step=steps)")
    first, *rest = cell("rate = 3\nmake(10)").splitlines()
    assert first.startswith(
        "ConfigError: job option 'max_step' is not known: "
        "did you mean 'max_steps'? Allowed: max_steps, "
    )
    assert re.search(r"Allowed: (\w+, ){5}\w+ and \d\d more$", first), "the nearest alone"
    assert rest == [
        "  Cell In[3], line 2:  make(10)",
        "  Cell In[2], line 2:  return FineTune(max_step=steps)",
        "(%tb shows the whole traceback)",
    ]
    whole = cell("%tb")
    assert "Traceback (most recent call last)" in whole
    assert "workbench/base/record/record.py" in whole
    assert (
        "Allowed: model, model_revision, dataset, method, method_options, rewards, technique"
        in whole
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "FineTune(technique='zero-1')",
            "job technique 'zero-1' is not known: did you mean 'zero1'?",
        ),
        ("Script('t.py', arg=[])", "job option 'arg' is not known: did you mean 'args'?"),
        ("Function(print, arg=[])", "Function option 'arg' is not known: did you mean 'args'?"),
        ("PodSpec(memory=3)", "pods option 'memory' is not known: did you mean 'memory_gib'?"),
        ("LocalPods(prot=3)", "LocalPods option 'prot' is not known: did you mean 'port'?"),
        ("SSHPods(host=[])", "SSHPods option 'host' is not known: did you mean 'hosts'?"),
        (
            "KubernetesPods(namespaces=3)",
            "option 'namespaces' is not known: did you mean 'namespace'?",
        ),
        (
            "Cluster(LocalPods(), cout=3)",
            "Cluster option 'cout' is not known: did you mean 'count'?",
        ),
        (
            "Benchmark([FineTune()], repeat=3)",
            "Benchmark option 'repeat' is not known: did you mean 'repeats'?",
        ),
        ("plan(FineTune(), pod=3)", "plan option 'pod' is not known: did you mean 'pods'?"),
        ("preview(FineTune(), row=3)", "preview option 'row' is not known: did you mean 'rows'?"),
        (
            "dataset_from({'kind': 'files', 'trian': 'x'})",
            "dataset option 'trian' is not known: did you mean 'train'?",
        ),
        ("compose(tecnique='ddp')", "is not known: did you mean 'technique'?"),
    ],
)
def test_an_unknown_option_says_which_one_was_meant(cell: Cell, text: str, words: str) -> None:
    shown = cell(text)
    assert words in shown
    assert len(shown.splitlines()) == 3
    assert "Traceback (most" not in shown


def test_a_failed_run_that_is_raised_shows_its_card(cell: Cell, written: WrittenRun) -> None:
    fault = {
        "host": "127.0.0.3",
        "pod": "pod-1",
        "rank": 1,
        "kind": "KeyError",
        "message": "'question'",
    }
    written.end("failed", "it failed", error=fault)
    shown = cell(f"Run.load({str(written.paths.root)!r}).wait(progress=False).raise_for_status()")
    first = "The program raised KeyError: rank 1 on pod-1 (127.0.0.3) failed first"
    for words in ("RunFailed: ", first, "Likely fixes:", f"Its logs are in {written.paths.logs}"):
        assert words in shown


@pytest.mark.parametrize(("lines", "is_there"), [(3, True), (25, False)])
def test_the_trace_of_a_rank_is_left_to_its_card_where_it_is_long(
    cell: Cell, written: WrittenRun, lines: int, is_there: bool
) -> None:
    trace = "\n".join(
        ["Traceback (most recent call last):", *(f"  frame {n}" for n in range(lines))]
    )
    written.end(
        "failed",
        "it failed",
        error={"kind": "KeyError", "message": "'question'", "traceback": trace},
    )
    shown = cell(f"Run.load({str(written.paths.root)!r}).wait(progress=False).raise_for_status()")
    assert ("frame 2" in shown) is is_there


def test_outside_of_a_notebook_nothing_changes() -> None:
    code = "from workbench import FineTune\nFineTune(max_step=10)"
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300
    )
    first, *_, last = ended.stderr.splitlines()
    assert first == "Traceback (most recent call last):"
    assert last.startswith("workbench.base.errors.ConfigError: job option 'max_step' is not known")
