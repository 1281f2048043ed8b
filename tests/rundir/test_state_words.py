"""What a run's directory says of its state is words for a terminal, whoever wrote it."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

from tests.support.writtenrun import write_run
from workbench import Run, history
from workbench.base.files import write_json
from workbench.rundir.state import RunState, StateName


def test_a_message_holds_no_escape_sequences(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    run.state("running", "one\x1b]0;owned\x07 two\x1b[31m", hint="\x1b[2J")
    words = Run(run.paths.root).message
    assert "\x1b" not in words
    assert "\x07" not in words
    assert words.startswith("one�]0;owned� two")


def test_a_cluster_whose_name_holds_a_nul_is_none(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    write_json(run.paths.info, {"id": "r1", "cluster": "a\0b"})
    assert Run(run.paths.root).state is RunState.LOST
    assert Run.load(run.paths.root).message
    assert len(history(tmp_path).records) == 1


def test_editors_know_the_name_of_every_state() -> None:
    assert get_args(StateName) == tuple(RunState)
