"""The command in a terminal: scripts on local pods, questions before a deletion, colour, help."""

from __future__ import annotations

import argparse
import io
import re
import shlex
from pathlib import Path

import pytest

from tests.support.writtenrun import write_run
from workbench.cli import EXAMPLES, _parser, main
from workbench.client.run import Run
from workbench.rundir.state import RunState

SCRIPT = """
import os, sys
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], sys.argv[1:])
sys.exit(int(sys.argv[2]))
"""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.slow
@pytest.mark.parametrize("code", [0, 7])
def test_a_script_runs_on_local_pods_and_its_exit_code_is_the_commands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], code: int
) -> None:
    script = tmp_path / "script" / "train.py"
    script.parent.mkdir()
    script.write_text(SCRIPT)
    out = tmp_path / "out"
    words = ["run", str(script), "--pods", "2", "--out", str(out), "--", "--code", str(code)]
    assert main(words) == code
    shown = capsys.readouterr().out
    assert f"rank 0 of 2 ['--code', '{code}']" in shown, "the output of rank 0 is shown"
    assert Run.load(out).state is (RunState.FAILED if code else RunState.SUCCEEDED)


def test_pods_and_words_of_a_script_are_refused_beside_a_spec(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = tmp_path / "asked.json"
    asked.write_text("{}")
    for words in (["--pods", "2"], ["--", "--lr", "3"]):
        assert main(["run", str(asked), *words]) == 2
        assert "workbench run train.py --pods 2" in capsys.readouterr().out
    assert main(["run", str(tmp_path / "nosuch.py")]) == 2
    assert "nosuch.py" in capsys.readouterr().out


def ended(folder: Path, name: str) -> Path:
    written = write_run(folder / name)
    written.end("succeeded", steps=2, eval_loss=0.5)
    written.keeper("closed", alive=False)
    return written.paths.root


@pytest.mark.parametrize(
    ("answer", "options", "is_gone"),
    [("n\n", [], False), ("\n", [], False), ("y\n", [], True), ("", ["--yes"], True)],
)
def test_a_deletion_on_a_terminal_shows_sizes_and_asks(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    answer: str,
    options: list[str],
    is_gone: bool,
) -> None:
    run = ended(tmp_path, "first")
    monkeypatch.setattr("sys.stdin", Terminal(answer))
    assert main(["rm", str(run), *options]) == (0 if is_gone else 1)
    shown = capsys.readouterr().out
    assert re.search(rf"{re.escape(str(run))}  [\d.]+ .?B", shown)
    assert ("Type y to delete" in shown) == (not options)
    assert run.exists() == (not is_gone)


def test_without_a_terminal_a_deletion_needs_yes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = ended(tmp_path, "first"), ended(tmp_path, "second")
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    for words in (["rm", str(first)], ["rm", "--keep-best", "1", str(tmp_path)]):
        assert main(words) == 2
        assert "add --yes" in capsys.readouterr().out
        assert first.exists() and second.exists()
        assert main([*words, "--yes"]) == 0
        assert [first.exists(), second.exists()].count(False) == 1
        first = ended(tmp_path, "first") if not first.exists() else first


@pytest.mark.parametrize("stream", [Terminal, io.StringIO], ids=["terminal", "file"])
def test_a_watched_table_is_drawn_in_place_until_all_runs_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: type[io.StringIO]
) -> None:
    ended(tmp_path, "first")
    going = write_run(tmp_path / "second")
    going.keeper()
    going.state("running")
    going.step(1, 4)
    screen = stream()
    looks = 0

    def sleep(_: float) -> None:
        nonlocal looks
        looks += 1
        if looks == 3:
            going.end("succeeded", steps=4, eval_loss=0.25)

    monkeypatch.setattr("workbench.cli.time.sleep", sleep)
    monkeypatch.setattr("sys.stdout", screen)
    assert main(["ls", str(tmp_path), "--watch"]) == 0
    assert looks == 3
    shown = screen.getvalue()
    assert ("\x1b[J" in shown) == (stream is Terminal)
    last = shown.rpartition("\x1b[J")[2]
    assert last.count("succeeded") >= (2 if stream is Terminal else 1)
    if stream is not Terminal:
        lines = shown.splitlines()
        assert len(lines) == len(set(lines)), "a file gets the lines that changed"


def test_an_interrupt_ends_a_watched_table_and_json_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    going = write_run(tmp_path / "first")
    going.keeper()
    going.state("running")
    assert main(["ls", str(tmp_path), "--watch", "--json", "-"]) == 2

    def sleep(seconds: float) -> None:
        if seconds:
            raise KeyboardInterrupt

    monkeypatch.setattr("workbench.cli.time.sleep", sleep)
    assert main(["ls", str(tmp_path), "--watch"]) == 0
    assert "Traceback" not in capsys.readouterr().out


def test_the_nearest_runs_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run.load(ended(tmp_path, "first"))
    monkeypatch.chdir(tmp_path)
    for verb in ("logs", "stop", "attach", "rm"):
        assert main([verb, "nosuch"]) == 1
        said = capsys.readouterr().out
        assert "'nosuch'" in said
        assert (run.name or run.id) in said


def test_colour_goes_to_a_terminal_alone_and_no_color_is_respected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ended(tmp_path, "first")
    shown = {}
    for name, stream, value in (
        ("terminal", Terminal(), ""),
        ("file", io.StringIO(), ""),
        ("no colour", Terminal(), "1"),
    ):
        monkeypatch.setattr("sys.stdout", stream)
        monkeypatch.setenv("NO_COLOR", value)
        assert main(["stop", str(run)]) == 0
        shown[name] = stream.getvalue()
    assert "\x1b[32msucceeded\x1b[0m" in shown["terminal"]
    assert "\x1b" not in shown["file"] + shown["no colour"]
    assert re.sub(r"\x1b\[\d+m", "", shown["terminal"]) == shown["file"]


def test_every_command_has_examples_that_can_be_typed() -> None:
    parser = _parser()
    (commands,) = (
        action for action in parser._actions if isinstance(action, argparse._SubParsersAction)
    )
    assert commands.choices.keys() == EXAMPLES.keys()
    for name, lines in EXAMPLES.items():
        for line in lines:
            words = shlex.split(line)
            parser.parse_args(words[: words.index("--")] if "--" in words else words)
            assert f"  workbench {line}" in commands.choices[name].format_help()
