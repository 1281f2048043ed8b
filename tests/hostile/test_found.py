"""Defects that the hostile folder, rank and fuzz found, each by its smallest example."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path, PurePath
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.writtenrun import WrittenRun
from workbench import Cluster
from workbench.base.display_protocol import as_text
from workbench.base.errors import ConfigError, RemoteError, RunError, WorkbenchError
from workbench.base.files import read_json, write_json
from workbench.keeper.checkpoints import part_reader
from workbench.keeper.watch.ledger import RunLedger
from workbench.lab.listing import Listing
from workbench.pods.pod import Pod
from workbench.pods.ssh.bulk import transfer
from workbench.pods.ssh.bulk.transfer import SshRoute, far_end_answer, fetch_file
from workbench.results import judge_answers
from workbench.rundir.checkpoints import number_in, problem_of
from workbench.rundir.events import Event, EventKind
from workbench.rundir.outcome import rank_statuses
from workbench.rundir.output.collect import Collector
from workbench.rundir.paths import is_output, is_output_name
from workbench.rundir.spec import ClusterSpec, RunSpec
from workbench.rundir.totals import RunTotals

SHA = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
"""SHA-256 of no bytes."""
POD = Pod(name="pod-0", address="127.0.0.2", ssh_port=22, slots=1)


def test_a_pipe_in_place_of_tables_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "tables.jsonl")
    rows = [{"source": "q", "target": "a"}]
    with pytest.raises(ConfigError, match="not a regular file"):
        judge_answers(rows, ["a"], tmp_path / "tables.jsonl")


def test_an_option_s_name_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "SPEC.json"
    path.write_text('{"cluster": {}, "job": {"kind": "finetune"}, "a\\ud800": 1}')
    with pytest.raises(ConfigError, match="no valid text"):
        RunSpec.load(path)


@pytest.mark.parametrize("count", [float("nan"), float("-inf"), "3.5", None, 10**400])
def test_a_cluster_with_an_odd_count_is_drawn(tmp_path: Path, count: object) -> None:
    cluster = Cluster.from_spec(ClusterSpec(backend={"kind": "local"}), path=tmp_path / "c")
    cluster.path.mkdir(exist_ok=True)
    (cluster.path / "cluster.json").write_text(f'{{"count": {_json(count)}}}')
    assert "pods" in as_text(cluster)


def test_a_cluster_with_an_odd_time_of_its_end_is_drawn(written: WrittenRun) -> None:
    state = written.cluster.state
    write_json(state, {**read_json(state), "idle_end_s": 1e17})
    spec = ClusterSpec(backend={"kind": "local"})
    assert as_text(Cluster.from_spec(spec, path=written.cluster.root))


@pytest.mark.parametrize(
    "line", ["x", "[]", "[" * 5000, '{"full": {"folder": 1, "needed": "x", "free": []}}']
)
def test_an_odd_answer_about_a_file_is_an_error_of_the_pod(line: str) -> None:
    with pytest.raises(WorkbenchError, match="pod-0"):
        far_end_answer(line, "pod-0", "127.0.0.2")


@pytest.mark.parametrize(
    "line", [{}, {"prefix": SHA, "offset": 0}, {"prefix": SHA, "offset": 0, "size": -1}]
)
def test_an_odd_start_of_a_transfer_is_an_error_of_the_pod(
    line: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "far_end_argv", lambda *_words: ["echo", _json(line)])
    route = SshRoute(
        name="pod-0", host="127.0.0.2", login="127.0.0.2", python=sys.executable, command=list
    )
    with pytest.raises(RemoteError, match=r"pod-0 .*another|form of this package"):
        fetch_file(route, "/there", tmp_path / "here")
    assert not (tmp_path / "here").exists()


@pytest.mark.parametrize("text", ["x", "5", "[]", "[[5, {}]]", '[["", []]]', "[" * 5000])
def test_an_odd_answer_about_a_checkpoint_leaves_the_checkpoint_out(text: str) -> None:
    link: Any = SimpleNamespace(pod=POD, package="w.zip", run=lambda *_args, **_options: text)
    problem, manifest = part_reader([link])("pod-0", Path("rank-0"))
    assert problem.startswith("rank-0 cannot be read")
    assert manifest == {}


@pytest.mark.parametrize("name", ["step-²", "step-" + "9" * 5000, "step-\u0663", "step-+1"])
def test_an_odd_number_in_a_name_is_no_number(name: str) -> None:
    assert number_in(name, "step") == -1


def test_long_notes_of_ranks_leave_the_result_readable() -> None:
    kinds = [EventKind.NOTE, EventKind.CHECKPOINT_FAILED] * 100
    data = {"message": "x" * 100_000}
    events = [Event(time_s=1.0, rank=1, kind=kind, data=data) for kind in kinds]
    seen = RunLedger(pods=["pod-0"], world_size=1, totals=RunTotals.of(events))
    assert len("; ".join(seen.warnings)) < 1 << 20


def _json(value: object) -> str:
    import json

    return json.dumps(value)


def test_a_model_s_file_that_no_zip_can_hold_is_named(written: WrittenRun) -> None:
    model = written.paths.model
    model.mkdir()
    (model / "config.json").write_text("{}")
    Path(os.fsdecode(os.fsencode(model) + b"/\xff.bin")).write_text("x")
    listing = Listing(written.cluster.root)
    with pytest.raises(RunError, match="rename the file"):
        listing.model(str(written.paths.root.relative_to(written.cluster.root)))


@pytest.mark.parametrize("rank", [None, "0", 0.5, True, 2**70])
def test_a_rank_without_a_number_is_named(rank: object) -> None:
    with pytest.raises(ValueError, match="pod-0 reports a rank without a number"):
        rank_statuses(POD, {"ranks": [{"rank": rank, "phase": "running"}]}, 0.0)


def test_a_manifest_with_a_name_that_no_disk_takes_says_what_is_missing(tmp_path: Path) -> None:
    entry = {"bytes": 2, "sha256": "0" * 64}
    write_json(tmp_path / "manifest.json", {"files": {"n" * 3000: entry}})
    assert problem_of(tmp_path).endswith(" is missing")


def test_a_pod_cannot_report_the_rank_of_another_pod() -> None:
    answer = {"ranks": [{"rank": 0, "phase": "running"}, {"rank": 1, "phase": "exited"}]}
    with pytest.raises(ValueError, match="pod-0 reports rank 1, and the rank runs on another pod"):
        rank_statuses(POD, answer, 0.0, own=[0])
    assert [rank.rank for rank in rank_statuses(POD, answer, 0.0, own=[0, 1])] == [0, 1]


@pytest.mark.parametrize(
    "chunk",
    [
        None,
        "text",
        {},
        {"offset": 0},
        {"offset": "0", "data": "x"},
        {"offset": 0, "data": 5},
        {"offset": 0, "data": "\u20ac"},
    ],
)
def test_a_piece_in_another_form_is_named(written: WrittenRun, chunk: Any) -> None:
    collector = Collector(written.paths, [0])
    pieces: Mapping[str, Any] = {"../../x": chunk, "attempt-0/rank-0.stdout.log": chunk}
    with pytest.raises(
        ValueError, match=r"a piece of attempt-0/rank-0\.stdout\.log is not in the form"
    ):
        collector.take(pieces)
    assert written.paths.rank_log(0, 0, "stdout").read_bytes() == b""
    with pytest.raises(ValueError, match="not an object"):
        collector.take(chunk if isinstance(chunk, str) else [])


@pytest.mark.parametrize(
    "name", ["x\udcff", "x\n", "x\x1b[2J", "a" * 255, "d/" * 100 + "x", f"{'a' * 100}/" * 30 + "x"]
)
def test_a_name_that_no_file_here_can_have_is_no_output(name: str) -> None:
    assert not is_output_name(PurePath("files", name))
    assert not is_output(f"outputs/{name}")
    assert is_output_name(PurePath("files/a b/ü.bin"))
    assert is_output("outputs/a b/ü.bin")
