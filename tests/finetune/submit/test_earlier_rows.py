"""Rows that an earlier run of the user checked are copied, if nothing behind them changed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from workbench import FineTune
from workbench.base.errors import ConfigError
from workbench.finetune.data.sources.dataset import Prepared
from workbench.finetune.submit import earlier_rows


@pytest.fixture(autouse=True)
def checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Path]]:
    """Folders into which rows were checked and written, not copied."""
    folders: list[Path] = []
    real = earlier_rows.prepare_rows

    def prepare(dataset: object, folder: Path, **options: object) -> Prepared:
        folders.append(folder)
        return real(dataset, folder, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(earlier_rows, "prepare_rows", prepare)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    yield folders


@pytest.fixture
def job(tmp_path: Path) -> FineTune:
    for name, rows in (("train", 30), ("eval", 5)):
        text = "".join(
            json.dumps({"source": f"{name} {row}", "target": f"answer {row}"}) + "\n"
            for row in range(rows)
        )
        (tmp_path / f"{name}.jsonl").write_text(text)
    paths = {name: str(tmp_path / f"{name}.jsonl") for name in ("train", "eval")}
    return FineTune(dataset={"kind": "files", **paths})


def contents(made: Prepared) -> list[bytes]:
    return [path.read_bytes() for path in (made.train, made.eval) if path is not None]


def test_a_second_run_takes_the_rows_of_the_first(
    job: FineTune, tmp_path: Path, checks: list[Path]
) -> None:
    first = earlier_rows.checked(job, tmp_path / "a" / "inputs")
    second = earlier_rows.checked(
        job.replace(technique="zero1", learning_rate=1.0, max_steps=3), tmp_path / "b" / "inputs"
    )
    assert checks == [tmp_path / "a" / "inputs"]
    assert second.train == tmp_path / "b" / "inputs" / "train.jsonl"
    assert contents(first) == contents(second) and second.train_rows == first.train_rows == 30
    assert second.train is not None and second.train.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("what", ["source", "copy", "removed", "option", "code", "note"])
def test_what_changed_is_checked_again(
    what: str,
    job: FineTune,
    tmp_path: Path,
    checks: list[Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = earlier_rows.checked(job, tmp_path / "a" / "inputs")
    assert first.train is not None
    if what == "source":
        source = tmp_path / "train.jsonl"
        seen = source.stat()
        source.write_text(source.read_text().replace("answer 7", "answer 8"))
        os.utime(source, ns=(seen.st_atime_ns, seen.st_mtime_ns))
        assert source.stat().st_size == seen.st_size
    elif what == "copy":
        first.train.write_bytes(first.train.read_bytes()[:-30])
    elif what == "removed":
        first.train.unlink()
    elif what == "code":
        monkeypatch.setattr(earlier_rows, "_code", lambda: [("data/rows.py", 1, 2)])
    elif what == "note":
        (note,) = (tmp_path / "state" / "deepspeed-workbench" / "rows").iterdir()
        note.write_text(note.read_text().replace("train.jsonl", "eval.jsonl"))
    else:
        job = job.replace(seed=3)
    second = earlier_rows.checked(job, tmp_path / "b" / "inputs")
    assert checks == [tmp_path / "a" / "inputs", tmp_path / "b" / "inputs"]
    assert second.train is not None and second.train.read_bytes().count(b"\n") == 30
    assert (b"answer 7" in second.train.read_bytes()) == (what != "source")


def test_rows_that_were_refused_are_not_taken(
    job: FineTune, tmp_path: Path, checks: list[Path]
) -> None:
    with (tmp_path / "train.jsonl").open("a") as file:
        file.write("not json\n")
    for folder in ("a", "b"):
        with pytest.raises(ConfigError, match="line 31"):
            earlier_rows.checked(job, tmp_path / folder / "inputs")
    assert len(checks) == 2


def test_another_process_takes_them_too(job: FineTune, tmp_path: Path, checks: list[Path]) -> None:
    earlier_rows.checked(job, tmp_path / "a" / "inputs")
    code = (
        "import json, sys; from pathlib import Path; from workbench import FineTune\n"
        "from workbench.finetune.submit import earlier_rows\n"
        "earlier_rows.prepare_rows = None\n"
        "job = FineTune.from_dict(json.loads(sys.argv[1]))\n"
        "print(earlier_rows.checked(job, Path(sys.argv[2])).train_rows)\n"
    )
    words = [sys.executable, "-c", code, json.dumps(job.to_dict()), str(tmp_path / "b" / "inputs")]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout == "30\n"


def test_the_oldest_notes_are_removed(
    job: FineTune, tmp_path: Path, checks: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(earlier_rows, "_MOST", 2)
    for seed in (1, 2, 3, 1):
        earlier_rows.checked(job.replace(seed=seed), tmp_path / str(len(checks)) / "inputs")
    assert len(checks) == 4
    assert len(list((tmp_path / "state" / "deepspeed-workbench" / "rows").iterdir())) == 2


def test_a_state_folder_that_cannot_be_written_costs_the_note_alone(
    job: FineTune, tmp_path: Path, checks: list[Path]
) -> None:
    (tmp_path / "state").write_text("a file")
    assert earlier_rows.checked(job, tmp_path / "a" / "inputs").train_rows == 30
