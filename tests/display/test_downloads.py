"""Links to what a run left, where the Jupyter server that started the kernel has it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.sentences import says
from tests.support.writtenrun import WrittenRun
from workbench.client.result import RunResult
from workbench.display.kit.downloads import report_links, run_links
from workbench.display.run.facts import RunFacts
from workbench.rundir.view import RunView


@pytest.fixture
def served(written: WrittenRun, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The root of a Jupyter server, which has the run below it."""
    root = written.cluster.root.parent
    monkeypatch.setenv("JPY_PARENT_PID", "7")
    monkeypatch.setenv("WORKBENCH_JUPYTER", f"7 /user/me/ {root}")
    return root


def test_a_run_that_has_ended_has_links_to_its_card_and_its_model(
    written: WrittenRun, served: Path
) -> None:
    written.paths.model.mkdir()
    (written.paths.model / "model #1.bin").write_bytes(b"1234")
    assert run_links(written.paths) == []
    written.end()
    below = f"cluster/runs/{written.paths.root.name}"
    assert run_links(written.paths) == [
        ("run card", f"/user/me/workbench/api/card?of={below.replace('/', '%2F')}"),
        ("model #1.bin (4 bytes)", f"/user/me/files/{below}/model/model%20%231.bin"),
    ]
    (written.paths.model / "config.json").write_bytes(b"{}")
    zipped = ("model.zip (6 bytes)", f"/user/me/workbench/api/model?of={below.replace('/', '%2F')}")
    assert run_links(written.paths)[1:] == [zipped]
    assert report_links(served / "cluster") == [
        ("report", "/user/me/workbench/api/report?of=cluster")
    ]


@pytest.mark.parametrize("root", ["/nowhere", "", None])
def test_what_the_server_does_not_have_has_no_link(
    written: WrittenRun, served: Path, root: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    written.end()
    assert run_links(written.paths)
    monkeypatch.setenv("WORKBENCH_JUPYTER", "7 /" if root is None else f"7 / {root}")
    assert run_links(written.paths) == []


def test_what_is_below_a_hidden_folder_has_no_link(served: Path) -> None:
    assert report_links(served / ".cache" / "runs") == []
    assert report_links(Path(os.path.sep)) == []


def test_a_page_of_its_own_states_neither_links_nor_what_needs_the_notebook(
    written: WrittenRun, served: Path, tmp_path: Path
) -> None:
    written.paths.tensorboard.mkdir()
    (written.paths.tensorboard / "events.out.tfevents.1").touch()
    written.end()
    facts = RunFacts(RunView(written.paths.root))
    assert (
        facts.links
        and says(facts.receipt[-1], "TensorBoard: run.tensorboard() opens it below a cell")
        and says(facts.receipt[1], "Pods: {} kept; the cluster is {} for the next run", "3 pods")
    )
    page = RunResult.load(written.paths.root).to_html(tmp_path / "card.html").read_text()
    assert says(page, "Processes: all exited{}; nothing is still running on the pods")
    assert not any(words in page for words in ("run.tensorboard()", "Pods: ", "workbench/api"))
