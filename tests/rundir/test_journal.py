"""The journal of a run: its state file, its own events, and its result where the disk is full."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.support.eventlines import format_event
from tests.support.writtenrun import write_run
from workbench.base.clock import now_s
from workbench.base.files import read_json
from workbench.base.redact import Redactor
from workbench.pods.pod import Pod
from workbench.rundir import journal as journal_module
from workbench.rundir.events import Event, read_events
from workbench.rundir.journal import Journal
from workbench.rundir.make.unstarted import fail_unstarted, keep_reason
from workbench.rundir.paths import RunPaths
from workbench.rundir.result import RunFault
from workbench.rundir.spec import RunSpec
from workbench.rundir.state import RunState

PODS = [
    Pod(name="pod-0", address="10.0.0.2", slots=2, versions={"torch": "2.13"}),
    Pod(name="pod-1", address="10.0.0.3", slots=1, versions={"torch": "2.12"}),
]


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return write_run(tmp_path).paths


def finish(journal: Journal, paths: RunPaths, **changed: Any) -> None:
    words: dict[str, Any] = {
        "state": RunState.FAILED,
        "message": "rank 1 failed",
        "fault": RunFault(kind="exit", message="1"),
        "facts": {"started_s": now_s() - 5.0},
        "spec": RunSpec.load(paths.spec),
        "pods": PODS,
        "world_size": 3,
    }
    words |= changed
    journal.finish(words.pop("state"), **words)


def block(path: Path) -> None:
    """Put a folder into the place of a file, so that the file cannot be written."""
    path.unlink(missing_ok=True)
    path.mkdir()


def own(kind: str = "note", **data: Any) -> Event:
    return Event(time_s=1.0, rank=None, kind=kind, data=data)


def attempts(paths: RunPaths) -> list[int | None]:
    return [event.attempt for event in read_events(paths.events)]


def test_own_events_have_an_attempt_and_a_restart_begins_the_next(paths: RunPaths) -> None:
    journal = Journal(paths)
    for kind in ("note", "restarted", "note"):
        journal.event(own(kind))
    assert attempts(paths) == [0, 1, 1]
    # The next keeper continues with the number.
    again = Journal(paths)
    record, events = again.recover()
    assert record.state is RunState.QUEUED and len(events) == 3
    again.event(own())
    again.event(own("restarted"))
    assert attempts(paths)[3:] == [1, 2]


def test_an_event_that_is_there_is_not_recorded_again(paths: RunPaths) -> None:
    journal = Journal(paths)
    event = Event(time_s=1.0, rank=0, kind="step", data={"step": 1}, attempt=0, offset=0)
    assert journal.event(event) == event
    assert journal.event(event) is None
    assert Journal(paths).recover()[1] == [event]
    assert len(paths.events.read_text().splitlines()) == 1


def test_a_secret_is_written_to_no_file(paths: RunPaths) -> None:
    journal = Journal(paths, Redactor({"HF_TOKEN": "canary-4711"}))
    journal.event(own("note", message="the token is canary-4711"))
    journal.state(RunState.RUNNING, "with canary-4711")
    finish(journal, paths, message="canary-4711 was refused")
    for file in (paths.events, paths.state, paths.result):
        assert "canary" not in file.read_text(), file


def test_the_state_file_has_the_state_the_hint_and_the_wish(paths: RunPaths) -> None:
    journal = Journal(paths)
    journal.begin(12.5)
    journal.state(RunState.RUNNING, "training")
    assert journal.current_state == (RunState.RUNNING, "training")
    journal.hint("pod-1 is silent")
    assert journal.current_state == (RunState.RUNNING, "training (pod-1 is silent)")
    journal.wish("stop")
    written = read_json(paths.state)
    assert {name: written[name] for name in ("state", "message", "hint", "wish", "started_s")} == {
        "state": "running",
        "message": "training",
        "hint": "pod-1 is silent",
        "wish": "stop",
        "started_s": 12.5,
    }
    # Another keeper has the same state. The remark was of the dead keeper.
    record, _ = Journal(paths).recover()
    assert (record.state, record.wish, record.started_s) == (RunState.RUNNING, "stop", 12.5)
    assert read_json(paths.state)["hint"] == ""


def test_a_hint_that_is_set_already_is_not_written_again(paths: RunPaths) -> None:
    journal = Journal(paths)
    journal.hint("pod-1 is silent")
    paths.state.write_text("{}")
    journal.hint("pod-1 is silent")
    assert paths.state.read_text() == "{}"
    journal.hint("")
    assert read_json(paths.state)["hint"] == ""


def test_a_state_that_no_file_could_take_is_late_until_there_is_room(paths: RunPaths) -> None:
    journal = Journal(paths)
    assert not journal.is_late
    block(paths.state)
    journal.state(RunState.RUNNING, "training")
    assert journal.is_late
    journal.keep()
    assert journal.is_late
    paths.state.rmdir()
    journal.keep()
    assert not journal.is_late and read_json(paths.state)["state"] == "running"
    block(paths.state)
    journal.state(RunState.RUNNING, "slowly")
    paths.state.rmdir()
    journal.state(RunState.RUNNING, "quickly")
    assert not journal.is_late


def test_events_that_no_file_could_take_are_written_later_and_warned_of_once(
    paths: RunPaths, caplog: pytest.LogCaptureFixture
) -> None:
    journal = Journal(paths)
    block(paths.events)
    for number in range(3):
        journal.event(own("note", message=f"{number}"))
    assert caplog.text.count("cannot write events") == 1
    paths.events.rmdir()
    journal.keep()
    assert [event.text("message") for event in read_events(paths.events)] == ["0", "1", "2"]


class Curves:
    """Curves that keep their events, or fail."""

    made: ClassVar[list[Curves]] = []
    fails = False

    def __init__(self, folder: Path) -> None:
        self.added: list[int | None] = []
        self.made.append(self)

    def add(self, event: Event) -> None:
        if self.fails:
            raise OSError("no room for curves")
        self.added.append(event.offset)

    def close(self) -> None:
        pass


@pytest.fixture
def curves(monkeypatch: pytest.MonkeyPatch) -> type[Curves]:
    monkeypatch.setattr(journal_module, "ScalarWriter", Curves)
    monkeypatch.setattr(Curves, "made", [])
    return Curves


def step(offset: int) -> Event:
    return Event(time_s=1.0, rank=0, kind="step", data={}, attempt=0, offset=offset)


def test_a_run_goes_on_without_curves_and_gets_them_at_the_end(
    paths: RunPaths, curves: type[Curves], monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(paths)
    with monkeypatch.context() as patched:
        patched.setattr(Curves, "fails", True)
        assert journal.event(step(0)) is not None
    journal.event(step(1))
    assert curves.made[0].added == [], "curves with a gap would be wrong"
    finish(journal, paths)
    assert curves.made[-1].added == [0, 1]


def test_the_next_keeper_finds_events_that_were_printed_and_not_written(
    paths: RunPaths, curves: type[Curves]
) -> None:
    line = format_event("step", rank=0, step=7)
    log = paths.rank_log(0, 0, "stdout")
    log.parent.mkdir(exist_ok=True)
    log.write_text(f"{line}\n")
    _, events = Journal(paths).recover()
    assert [event.whole("step") for event in events] == [7]
    assert [event.whole("step") for event in read_events(paths.events)] == [7]
    assert curves.made[-1].added == [0]


def test_a_reserve_of_the_disk_is_kept_until_the_result_is_written(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(paths)
    journal.reserve()
    size = paths.reserve.stat().st_size
    assert size >= 1 << 17

    def no_writes(*_: object) -> None:
        raise AssertionError("the reserve is there")

    with monkeypatch.context() as patched:
        patched.setattr(journal_module, "write_bytes", no_writes)
        journal.reserve()
    paths.reserve.write_bytes(b"half")
    journal.reserve()
    assert paths.reserve.stat().st_size == size
    finish(journal, paths)
    assert not paths.reserve.exists()


def test_a_result_has_the_hosts_the_time_and_the_fault(paths: RunPaths) -> None:
    journal = Journal(paths)
    journal.state(RunState.RUNNING, "training")
    journal.wish("stop")
    journal.hint("slow")
    finish(journal, paths)
    result = read_json(paths.result)
    assert result == json.loads(json.dumps(journal.result))
    assert (result["state"], result["message"], result["world_size"]) == (
        "failed",
        "rank 1 failed",
        3,
    )
    assert result["hosts"] == [
        {"address": "10.0.0.2", "slots": 2, "pod": "pod-0"},
        {"address": "10.0.0.3", "slots": 1, "pod": "pod-1"},
    ]
    assert result["versions"] == {"torch": "2.13"}
    assert result["duration_s"] == pytest.approx(5.0, abs=2.0)
    assert result["error"]["kind"] == "exit"  # type: ignore[index]
    state = read_json(paths.state)
    assert (state["state"], state["hint"], state["wish"]) == ("failed", "", "")


def test_a_clock_that_was_set_back_makes_no_negative_duration(paths: RunPaths) -> None:
    finish(Journal(paths), paths, facts={"started_s": now_s() + 3600}, pods=())
    result = read_json(paths.result)
    assert (result["duration_s"], result["versions"], result["hosts"]) == (0.0, {}, [])


def test_a_result_that_the_directory_cannot_take_is_in_the_spare_file(
    paths: RunPaths, tmp_path: Path
) -> None:
    spare = tmp_path / "spare" / "run.json"
    journal = Journal(paths, spare=spare)
    block(paths.result)
    finish(journal, paths)
    written = read_json(spare)
    assert written["state"] == "failed" and written["of"] == str(paths.root)
    assert "could not take the result" in str(written["message"])
    assert not journal.is_late, "a file has the result"


@pytest.mark.parametrize("has_spare", [True, False])
def test_a_result_that_no_file_can_take_is_written_when_there_is_room(
    paths: RunPaths, tmp_path: Path, has_spare: bool
) -> None:
    spare = tmp_path / "spare" / "run.json"
    journal = Journal(paths, spare=spare if has_spare else None)
    block(paths.result)
    spare.parent.touch()
    finish(journal, paths)
    assert journal.is_late and journal.result["state"] == "failed"
    journal.keep()
    assert journal.is_late
    paths.result.rmdir()
    journal.keep()
    assert not journal.is_late
    result = read_json(paths.result)
    assert (result["state"], result["message"]) == ("failed", "rank 1 failed")
    assert "of" not in result


@pytest.mark.parametrize("has_folder", [True, False])
def test_the_keeper_answers_with_a_result_once_a_file_has_it(
    paths: RunPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_folder: bool
) -> None:
    journal = Journal(paths, spare=tmp_path / "spare" / "run.json")
    if not has_folder:
        block(paths.result)
    told: list[str] = []
    write = journal_module.write_json

    def late(path: Path, content: Any) -> None:
        told.append(path.name)
        assert journal.result == {}, "a notebook that waits reads the file next"
        write(path, content)

    monkeypatch.setattr(journal_module, "write_json", late)
    finish(journal, paths)
    assert told == ["result.json", "run.json"][: 1 if has_folder else 2]
    assert journal.result["state"] == "failed"


def test_the_keeper_answers_with_a_result_that_is_in_memory_only(paths: RunPaths) -> None:
    journal = Journal(paths)
    journal.finish_in_memory(RunState.FAILED, "the keeper failed")
    assert journal.is_late and journal.result["of"] == str(paths.root)
    assert not paths.result.exists()
    assert read_json(paths.state)["message"] == "the keeper failed"
    journal.keep()
    assert read_json(paths.result) == {"state": "failed", "message": "the keeper failed"}


def test_a_remark_and_figures_are_added_to_a_result_that_is_there(paths: RunPaths) -> None:
    journal = Journal(paths)
    journal.amend("too early")
    assert not paths.result.exists()
    finish(journal, paths)
    journal.amend("", {"steps": 1})
    assert read_json(paths.result).get("steps") is None, "without a remark nothing is added"
    journal.amend("the model is gone", {"steps": 3})
    result = read_json(paths.result)
    assert (result["message"], result["steps"]) == ("rank 1 failed; the model is gone", 3)
    state = read_json(paths.state)
    assert (state["state"], state["message"]) == ("failed", "rank 1 failed; the model is gone")


def test_a_run_whose_results_alone_were_missing_succeeds_when_they_are_there(
    paths: RunPaths,
) -> None:
    journal = Journal(paths)
    finish(journal, paths)
    journal.mend("succeeded after all", {"output_files": 2})
    result = read_json(paths.result)
    assert (result["state"], result["message"], result["error"], result["output_files"]) == (
        "succeeded",
        "succeeded after all",
        None,
        2,
    )
    assert read_json(paths.state)["state"] == "succeeded"


def test_a_run_that_never_started_has_the_reason_in_its_result(paths: RunPaths) -> None:
    before = {*paths.root.rglob("*")}
    fail_unstarted(paths, RunSpec.load(paths.spec), OSError("no hosts"))
    result = read_json(paths.result)
    assert (result["state"], result["message"]) == (
        "failed",
        "the run did not start: no hosts",
    )
    assert result["error"]["kind"] == "OSError"  # type: ignore[index]
    assert (result["world_size"], result["hosts"]) == (0, [])
    # One error is written, and no curves.
    assert {*paths.root.rglob("*")} - before == {paths.result}


def test_a_reason_that_the_disk_does_not_take_is_a_warning(paths: RunPaths) -> None:
    spec = RunSpec.load(paths.spec)
    paths.result.mkdir()
    with pytest.warns(RuntimeWarning, match="does not hold the reason why the run did not start"):
        keep_reason(paths, spec, OSError("no hosts"))


def test_events_that_cannot_be_summed_up_leave_a_result_with_a_remark(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of(_: object) -> None:
        raise ValueError("no sum")

    monkeypatch.setattr(journal_module.RunTotals, "of", of)
    finish(Journal(paths), paths)
    message = json.loads(paths.result.read_text())["message"]
    assert message.startswith("rank 1 failed; the figures of the run are missing")
    assert "ValueError" in message
