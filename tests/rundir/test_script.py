"""What of a script's folder travels to the pods, and what is refused before anything starts."""

from __future__ import annotations

import io
import os
import zipfile
from pathlib import Path

import pytest

from workbench import PodSpec, Script
from workbench.base.errors import ConfigError
from workbench.rundir.make.prepare import prepare_run
from workbench.rundir.make.script import IGNORE_FILE, check_script, files_of, script_files, zip_script
from workbench.rundir.spec import ClusterSpec, RunSpec

EVERYTHING = (
    *("train.py", "lib/model.py", "data/rows.bin", "data/keep.txt", "notes/data/deep.bin", "report.log", "kept.log"),
    *(".git/config", "lib/__pycache__/model.cpython-311.pyc", "old.pyc", ".venv/bin/python", "node_modules/a/b.js"),
    *("runs/one/result.json", ".ipynb_checkpoints/x.ipynb", "a.ipynb_checkpoints/x", "lib/runs/two.txt"),
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in EVERYTHING:
        path = tmp_path / "work" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return tmp_path / "work"


def travels(folder: Path, *lines: str) -> set[str]:
    if lines:
        (folder / IGNORE_FILE).write_text("\n".join(lines) + "\n")
    return {path.relative_to(folder).as_posix() for path in script_files(folder)} - {IGNORE_FILE}


PLAIN = set(EVERYTHING[:7])


@pytest.mark.parametrize(
    ("lines", "stays", "comes"),
    [
        ((), set(), set()),
        (("# a comment", "", "*.log"), {"report.log", "kept.log"}, set()),
        (("*.log", "!kept.log"), {"report.log"}, set()),
        (("/data/",), {"data/rows.bin", "data/keep.txt"}, set()),
        (("data/",), {"data/rows.bin", "data/keep.txt", "notes/data/deep.bin"}, set()),
        (("data/*", "!data/keep.txt"), {"data/rows.bin"}, set()),
        (("**/*.bin",), {"data/rows.bin", "notes/data/deep.bin"}, set()),
        (("data/", "!data/keep.txt"), {"data/rows.bin", "data/keep.txt", "notes/data/deep.bin"}, set()),
        (("!runs/",), set(), {"runs/one/result.json", "lib/runs/two.txt"}),
        (("!/runs/",), set(), {"runs/one/result.json"}),
    ],
)
def test_the_ignore_file_means_what_a_gitignore_means(
    folder: Path, lines: tuple[str, ...], stays: set[str], comes: set[str]
) -> None:
    assert travels(folder, *lines) == PLAIN - stays | comes


def test_only_the_file_beside_the_script_counts_and_a_model_s_folder_has_none(folder: Path) -> None:
    (folder / "lib" / IGNORE_FILE).write_text("*\n")
    assert travels(folder) == PLAIN | {f"lib/{IGNORE_FILE}"}
    (folder / IGNORE_FILE).write_text("*\n")
    assert {path.relative_to(folder).as_posix() for path in files_of(folder)} >= PLAIN


def test_a_folder_that_is_left_out_is_not_even_looked_into(folder: Path) -> None:
    (folder / "data" / "loop").symlink_to(folder)
    (folder / "gone").symlink_to(folder / "nowhere")
    assert travels(folder) == PLAIN, "links to folders and to nothing do not travel"


def test_the_same_files_give_the_same_zip(folder: Path) -> None:
    first = zip_script(folder / "train.py")
    for path in folder.rglob("*"):
        os.utime(path, (1, 1))
    assert zip_script(folder / "train.py") == first
    with zipfile.ZipFile(io.BytesIO(first)) as archive:
        assert set(archive.namelist()) == PLAIN
        assert archive.read("lib/model.py") == b"lib/model.py"


def test_too_large_a_folder_names_its_largest_files_and_the_ignore_file(folder: Path) -> None:
    for name, mib in (("big.bin", 150), ("data/second.bin", 60), (".venv/huge.so", 900), ("third.bin", 3)):
        with (folder / name).open("wb") as file:
            file.truncate(mib << 20)  # a hole, which takes no room
    with pytest.raises(ConfigError) as refused:
        check_script(folder / "train.py")
    said = str(refused.value)
    assert "holds 213 MiB" in said
    assert "The largest: big.bin (150.0 MiB), data/second.bin (60.0 MiB), third.bin (3.0 MiB), " in said
    assert str(folder / IGNORE_FILE) in said
    assert "huge.so" not in said
    (folder / IGNORE_FILE).write_text("big.bin\n")
    check_script(folder / "train.py")


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (b"*.log\n!\n", r"\.workbenchignore, line 2: '!' is not a pattern of a \.gitignore"),
        (b"*.py\n", r"\.workbenchignore leaves out train\.py, the script itself; add a line !train\.py"),
        (b"\xff\xfe\n", r"cannot read .*\.workbenchignore: "),
    ],
)
def test_an_ignore_file_that_cannot_be_meant_is_refused_before_anything_starts(
    folder: Path, tmp_path: Path, lines: bytes, said: str
) -> None:
    (folder / IGNORE_FILE).write_bytes(lines)
    spec = RunSpec(cluster=ClusterSpec(pods=PodSpec()), job=Script(path=str(folder / "train.py")))
    with pytest.raises(ConfigError, match=said):
        prepare_run(spec, root=tmp_path / "run")
    assert not (tmp_path / "run").exists()
