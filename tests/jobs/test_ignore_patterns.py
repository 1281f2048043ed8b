"""Ignore patterns are matched as git matches the patterns, and no pattern keeps a process busy."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pathspec import GitIgnoreSpec

from workbench.base.errors import ConfigError
from workbench.jobs.ignore_patterns import IgnorePatterns
from workbench.jobs.script_folder import script_files

LETTERS = "ab/*?[]!\\.é- #"


@settings(max_examples=300, deadline=None)
@given(
    lines=st.lists(st.text(LETTERS, min_size=1, max_size=7), min_size=1, max_size=3),
    path=st.text("ab./é-! ", min_size=1, max_size=8),
)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_engine_decides_as_pathspecs_own_does(lines: list[str], path: str) -> None:
    try:
        other = GitIgnoreSpec.from_lines(lines, backend="simple")
    except ValueError:
        with pytest.raises(ValueError, match=r"\S"):
            IgnorePatterns(lines)
        return
    assert IgnorePatterns(lines).decide(path) == other.check_file(path).include


def test_a_pattern_of_many_stars_takes_no_longer() -> None:
    # Python's regular expressions would need years.
    assert IgnorePatterns([f"{'*a' * 30}*b"]).decide("a" * 200) is None


@pytest.mark.parametrize("name", [".gitignore", ".workbenchignore"])
def test_an_ignore_file_of_too_many_patterns_is_refused(tmp_path: Path, name: str) -> None:
    script = tmp_path / "train.py"
    script.write_text("print(1)\n")
    (tmp_path / name).write_text("".join(f"x{number}d*\n" for number in range(20_000)))
    with pytest.raises(ConfigError, match="KiB of patterns"):
        script_files(tmp_path)


def test_names_and_patterns_that_are_no_text_are_matched() -> None:
    assert IgnorePatterns(["*.bin"]).decide("a\udcff.bin")
    assert IgnorePatterns(["\udcff*"]).decide("\udcffb")
    assert IgnorePatterns(["*.bin"]).decide("\ud800.bin")


def test_a_pattern_beyond_the_engine_is_named() -> None:
    with pytest.raises(ValueError, match="too long"):
        IgnorePatterns(["a" * 1_000_000])


def test_a_folder_is_read_as_git_reads_the_folder(tmp_path: Path) -> None:
    (tmp_path / ".gitignore").write_text("*.bin\n!keep.bin\n/data/*\n!/data/small/\n[[a]x\n")
    for name in ("a.bin", "keep.bin", "data/x", "data/small/y", "[x", "train.py", "b/keep.bin"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1")
    git = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull}
    subprocess.run(["git", "init", "-q", tmp_path], check=True, env=git)
    listed = subprocess.run(
        ["git", "-C", tmp_path, "ls-files", "-o", "--exclude-standard", "-z"],
        check=True,
        capture_output=True,
        text=True,
        env=git,
    ).stdout.split("\0")
    found = {path.relative_to(tmp_path).as_posix() for path in script_files(tmp_path)}
    assert found == {name for name in listed if name}
