from __future__ import annotations

import io
import os
import pty
import re
from contextlib import closing
from dataclasses import replace

import pytest

from workbench.display.kit.line import ProgressLine, follow_run, progress_text, show_bundle
from workbench.rundir.state import RunState
from workbench.rundir.totals import Progress

RUNNING = Progress(
    state=RunState.RUNNING, step=0, max_steps=200, loss=3.14159, samples_per_s=135.2, eta_s=65
)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def plain(text: str) -> str:
    """Return a text without its colours and orders."""
    return re.sub(r"\x1b\[(\d+m|K)", "", text)


class Terminal(io.StringIO):
    """A stream that says it is a terminal, and what stands on its screen."""

    def isatty(self) -> bool:
        return True

    @property
    def screen(self) -> list[str]:
        lines = []
        for line in self.getvalue().split("\n"):
            shown = ""
            for part in line.split("\r"):
                shown = part if "\x1b[K" in part else part + shown[len(part) :]
            lines.append(plain(shown).rstrip())
        return lines


def train(line: ProgressLine, clock: Clock, seconds_a_step: float) -> None:
    for step in range(1, 201):
        clock.now += seconds_a_step
        line.update(replace(RUNNING, step=step))


def test_a_terminals_line_changes_four_times_a_second_and_ends_with_the_last_state() -> None:
    screen, clock = Terminal(), Clock()
    with closing(ProgressLine(screen, clock)) as line:
        train(line, clock, 0.01)
        assert screen.getvalue().count("\r") <= 2 / 0.25 + 1
        line.update(replace(RUNNING, state=RunState.SUCCEEDED, step=200, eta_s=None))
    assert screen.getvalue().count("\n") == 1
    assert "\x1b[32msucceeded\x1b[0m" in screen.getvalue()
    shown, empty = screen.screen
    assert (
        shown.startswith("succeeded [####################] 200/200, loss 3.142, 135.2 samples/s")
        or len(shown) < 80
    )
    assert shown.startswith("succeeded [####################] 200/200, loss 3.142")
    assert empty == ""


def test_a_file_gets_a_line_per_tenth() -> None:
    file, clock = io.StringIO(), Clock()
    with closing(ProgressLine(file, clock)) as line:
        train(line, clock, 1.0)
        line.update(replace(RUNNING, state=RunState.SUCCEEDED, step=200))
    lines = file.getvalue().splitlines()
    assert "\r" not in file.getvalue()
    assert 10 <= len(lines) <= 13
    assert lines[-1].startswith("succeeded [####################] 200/200")


def test_a_file_gets_each_new_state_and_what_happens_before_the_first_step_once() -> None:
    file, clock = io.StringIO(), Clock()
    line = ProgressLine(file, clock)
    for message in ("sending inputs", "sending inputs", "ranks start", "ranks start"):
        clock.now += 1
        line.update(Progress(state=RunState.STARTING, message=message))
    line.close()
    assert file.getvalue() == "starting: sending inputs\nstarting: ranks start\n"


def test_leaving_draws_what_was_still_waiting() -> None:
    file, clock = io.StringIO(), Clock()
    with pytest.raises(KeyboardInterrupt), closing(ProgressLine(file, clock)) as line:
        line.update(replace(RUNNING, step=1))
        line.update(replace(RUNNING, step=7))
        raise KeyboardInterrupt
    assert [text.split(",")[0].split("] ")[1] for text in file.getvalue().splitlines()] == [
        "1/200",
        "7/200",
    ]
    line.update(replace(RUNNING, step=9))
    line.close()
    assert "9/200" not in file.getvalue()


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_a_failed_run_says_so_and_stays(stream: type[io.StringIO]) -> None:
    out = stream()
    with closing(ProgressLine(out, Clock())) as line:
        line.update(replace(RUNNING, step=25))
        line.update(
            replace(
                RUNNING,
                step=25,
                state=RunState.FAILED,
                message="rank 1 on pod-1 was killed by SIGKILL\x1b[2K\n",
            )
        )
    shown = plain(out.getvalue())
    last = shown.rstrip("\n").split("\n")[-1].split("\r")[-1]
    assert last.startswith("failed [##------------------] 25/200: rank 1")
    assert "\x1b" not in shown
    assert out.getvalue().endswith("\n")


def test_a_real_terminal_of_40_columns_is_never_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    main, other = pty.openpty()
    with os.fdopen(other, "w") as stream, closing(ProgressLine(stream, Clock())) as line:
        line.update(replace(RUNNING, step=25, message="a long story " * 20))
    drawn = plain(os.read(main, 10_000).decode())
    os.close(main)
    assert drawn.startswith("\r")
    assert all(len(part) < 40 for part in drawn.replace("\r", "\n").split("\n"))


def test_a_stream_without_utf8_does_not_end_the_waiting() -> None:
    raw = io.BytesIO()
    with closing(ProgressLine(io.TextIOWrapper(raw, encoding="ascii"), Clock())) as line:
        line.update(Progress(state=RunState.STARTING, message="größer"))
        assert raw.getvalue() == b"starting: gr??er\n"


@pytest.mark.parametrize(
    ("progress", "text"),
    [
        (Progress(state=RunState.QUEUED), "queued"),
        (Progress(state=RunState.RUNNING, step=3), "running step 3"),
        (
            Progress(state=RunState.RUNNING, step=400, max_steps=200),
            "running [####################] 400/200",
        ),
        (Progress(state=RunState.RUNNING, step=1, max_steps=0), "running step 1"),
        (Progress(state=RunState.RUNNING, message="step 4"), "running: step 4"),
    ],
)
def test_what_is_not_known_is_left_out(progress: Progress, text: str) -> None:
    assert progress_text(progress) == text


class Ending:
    """A run that has ended after a few looks, with its events in memory."""

    def __init__(self, looks: int) -> None:
        self.looks = looks

    @property
    def progress(self) -> Progress:
        self.looks -= 1
        state = RunState.SUCCEEDED if self.looks <= 0 else RunState.RUNNING
        return replace(RUNNING, state=state, step=10)


def test_following_a_run_draws_its_end(capsys: pytest.CaptureFixture[str]) -> None:
    run = Ending(looks=2)
    with follow_run(run) as draw:
        draw()
        draw()
        assert run.looks == 1  # the second look came too soon after the first
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("running [#")
    assert lines[-1].startswith("succeeded [#")


def test_a_program_without_ipython_gets_the_text_of_what_is_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    show_bundle({"text/plain": "Run r failed", "text/html": "<b>Run r</b> failed"})
    assert capsys.readouterr().out == "Run r failed\n"
