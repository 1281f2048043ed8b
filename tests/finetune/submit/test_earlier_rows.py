"""Rows that an earlier run of the user checked are linked, if nothing behind them changed."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest

from workbench import FineTune
from workbench.base.errors import ConfigError
from workbench.finetune.data.sources.dataset import Prepared
from workbench.finetune.submit import earlier_rows
from workbench.finetune.submit.stage import files_for


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
    # The folder keeps the rows private: a linked file has the mode of the first.
    assert second.train is not None and second.train.parent.stat().st_mode & 0o777 == 0o700


def test_the_rows_of_many_runs_take_the_disk_of_one_run(
    job: FineTune, tmp_path: Path, checks: list[Path]
) -> None:
    made = [earlier_rows.checked(job, tmp_path / f"run-{n}" / "inputs") for n in range(5)]
    assert len(checks) == 1
    seen = [file.stat() for file in tmp_path.glob("run-*/inputs/*.jsonl")]
    assert len(seen) == 10
    assert len({status.st_ino for status in seen}) == 2
    one_run = sum(len(content) for content in contents(made[0]))
    assert sum({status.st_ino: status.st_size for status in seen}.values()) == one_run
    shutil.rmtree(tmp_path / "run-3")
    after = earlier_rows.checked(job, tmp_path / "run-5" / "inputs")
    assert len(checks) == 1 and contents(after) == contents(made[1])


@pytest.mark.parametrize("why", [errno.EXDEV, errno.EMLINK, errno.EPERM, errno.EOPNOTSUPP])
def test_rows_are_copied_where_the_disk_has_no_links(
    why: int,
    job: FineTune,
    tmp_path: Path,
    checks: list[Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(why, os.strerror(why))

    monkeypatch.setattr(os, "link", refuse)
    made = [earlier_rows.checked(job, tmp_path / f"run-{n}" / "inputs") for n in range(3)]
    assert len(checks) == 1
    assert contents(made[0]) == contents(made[1]) == contents(made[2])
    assert made[2].train is not None and made[2].train.stat().st_nlink == 1
    assert made[2].train.stat().st_mode & 0o777 == 0o600


class Shelf:
    """A pod that counts the bytes it is sent by content, as a link does."""

    name = "pod-0"
    store = PurePosixPath("/pod/store")

    def __init__(self) -> None:
        self.sent: dict[str, int] = {}

    def sees(self, _path: Path) -> bool:
        return False

    def put_once(self, local: Path, digest: str) -> str:
        self.sent[digest] = local.stat().st_size
        return str(self.store / digest[:32])


def test_the_rows_of_many_runs_are_sent_to_a_pod_once(
    job: FineTune, tmp_path: Path, checks: list[Path]
) -> None:
    pod = Shelf()
    for n in range(4):
        made = earlier_rows.checked(job, tmp_path / f"run-{n}" / "inputs")
        asked = {"job": job.to_dict(), "train": "train.jsonl", "eval": "eval.jsonl"}
        (tmp_path / f"run-{n}" / "inputs" / "job.json").write_text(json.dumps(asked))
        files_for(job, pod, tmp_path / f"run-{n}", 0)  # type: ignore[arg-type]
    assert sum(pod.sent.values()) == sum(len(content) for content in contents(made))


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
