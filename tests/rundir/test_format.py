"""Records of another format are refused in one place, whoever reads them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.sentences import sentence
from tests.support.writtenrun import write_run
from workbench.base.errors import RunError
from workbench.base.files import read_json, write_json
from workbench.client.run import Run
from workbench.rundir.catalog.store import record_of
from workbench.rundir.format import FORMAT, check_format
from workbench.rundir.state import RunState
from workbench.rundir.stores.checkpoints import _RUN, _parsed
from workbench.rundir.view import RunView

OTHER = sentence("and this version of deepspeed-workbench reads format")


@pytest.mark.parametrize("number", [FORMAT + 1, "2", None, [FORMAT]])
def test_a_run_of_another_format_is_refused_by_every_reader(number: object, tmp_path: Path) -> None:
    paths = write_run(tmp_path).paths
    RunView(paths.root)
    write_json(paths.info, {**read_json(paths.info), "format": number})
    for read in (RunView, Run.load):
        with pytest.raises(RunError, match=OTHER):
            read(paths.root)
    record = record_of(paths)
    assert record.state is RunState.LOST and f"reads format {FORMAT}" in record.message


def test_a_stored_run_of_another_format_is_refused_before_its_fields_are_read() -> None:
    with pytest.raises(RunError, match=OTHER):
        _parsed(_RUN, f'{{"format": {FORMAT + 1}}}', "s3://bucket/run/run.json")


def test_what_this_version_writes_is_read() -> None:
    check_format({"format": FORMAT}, "run")
