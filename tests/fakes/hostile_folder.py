"""A cluster's directory from an attacker: a whole one, in which a file or folder is replaced.

`Reader` is the person who opens the directory. `ATTACKS` are the replacements by name.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.rundir.test_damaged import whole_run
from tests.support.runstores import list_runs
from workbench.base.files import read_json, write_json
from workbench.pods.pod_spec import PodSpec
from workbench.rundir.paths import ClusterPaths, RunPaths
from workbench.rundir.register.store import KnownRun
from workbench.rundir.spec import ClusterSpec

CANARY = "canary-of-the-reader-7c1e"
_MIB = 1 << 20
_RECORDS = {
    "model/config.json": '{"model_type": "t5"}',
    "model/tokenizer.json": "{}",
    "model/generation_config.json": "{}",
    "outputs/figures.txt": "a\n",
    "tensorboard/events.out.tfevents.1": "",
    "inputs/train.jsonl": '{"source": "q", "target": "a"}\n',
    "inputs/script.zip": "PK",
    "inputs/function.json": "{}",
    "label.json": '{"name": "mine", "note": "a note"}',
    "manifest.json": "{}",
    "trace-operators.json": "{}",
    "logs/flight-0.json": "{}",
    "logs/stacks.txt": "rank 0\n",
    "logs/attempt-0/rank-0.order.log": "o 1\n",
    "checkpoints/step-3/pod-0/rank-0/state.json": "{}",
}
"""Files of a run that `whole_run` does not write, with small contents."""


@dataclass(frozen=True)
class Reader:
    """The person who opens the directory, with a home folder and folders to write to."""

    root: Path
    run_name: str

    @property
    def given(self) -> ClusterPaths:
        return ClusterPaths(self.root / "given")

    @property
    def home(self) -> Path:
        """The reader's own files: none is read into an output, and none changes."""
        return self.root / "home"

    @property
    def out(self) -> Path:
        """Folder for outputs that the reader asks for, such as a card."""
        return self.root / "out"

    @property
    def run(self) -> RunPaths:
        return RunPaths(self.given.runs / self.run_name)

    def contents(self) -> dict[str, tuple[int, int, bytes]]:
        """Return kind, time of change and bytes of everything in the reader's home."""
        found = {}
        for path in sorted(self.home.rglob("*")):
            facts = path.lstat()
            data = b""
            if path.is_file() and not path.is_symlink() and facts.st_size < _MIB:
                data = path.read_bytes()
            found[str(path.relative_to(self.home))] = (facts.st_mode, facts.st_mtime_ns, data)
        return found


def write_whole(root: Path) -> Path:
    """Write a cluster's directory with a run that has a file of every kind, and return it."""
    run = whole_run(root)
    for name, content in _RECORDS.items():
        path = run.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    cluster = ClusterPaths(root / "cluster")
    spec = ClusterSpec(backend={"kind": "local"}, pods=PodSpec(), count=3)
    started = {"pid": 1, "user": "mallory", "host": "elsewhere"}
    write_json(cluster.config, {**spec.to_dict(), "started": started})
    state = {**read_json(cluster.state), "host": socket.gethostname(), "start_time": 1}
    write_json(cluster.state, state)
    list_runs(cluster.root / "store.db", KnownRun(id=run.root.name, path=run.root))
    cluster.hostfile.write_text("127.0.0.2 slots=1\n")
    cluster.keeper_log.write_text("the keeper started\n")
    (cluster.root / "identity").mkdir()
    (cluster.root / "identity" / "ssh_config").write_text("Host *\n")
    return cluster.root


def places(whole: Path) -> tuple[list[str], list[str]]:
    """Return all files and all folders of the directory; the run's folder reads as `RUN`."""
    run = next((whole / "runs").iterdir()).name
    files = []
    folders = []
    for path in sorted(whole.rglob("*")):
        name = str(path.relative_to(whole)).replace(run, "RUN")
        if path.is_dir():
            folders.append(name)
        else:
            files.append(name)
    return files, folders


def given_to(root: Path, whole: Path, attacks: Mapping[str, str], state: str) -> Reader:
    """Copy the directory to a new reader, and carry out attacks at places in it.

    `state` is the state of the run: `ended`, `live`, or `left` by a keeper that died.
    """
    reader = Reader(root, next((whole / "runs").iterdir()).name)
    for folder in (reader.home, reader.out, root / "tmp", root / "state"):
        folder.mkdir(parents=True)
    (reader.home / "secret").write_text(f"{CANARY}\n")
    (reader.home / ".bashrc").write_text(f"export TOKEN={CANARY}\n")
    shutil.copytree(whole, reader.given.root)
    run = reader.run
    write_json(run.info, {**read_json(run.info), "cluster": str(reader.given.root)})
    list_runs(reader.given.root / "store.db", KnownRun(id=run.root.name, path=run.root))
    if state != "ended":
        run.result.unlink()
        write_json(run.state, {"state": "running", "message": "training", "hint": ""})
    if state == "left":
        cluster = reader.given
        facts = {**read_json(cluster.state), "phase": "closing", "pid": 2**22 - 1}
        write_json(cluster.state, facts)
    for place, attack in attacks.items():
        path = reader.given.root / place.replace("RUN", run.root.name)
        # The state of the run may have removed the file; then there is nothing to replace.
        if os.path.lexists(path):
            ATTACKS[attack](path, reader)
    return reader


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _write(path: Path, data: bytes) -> None:
    _remove(path)
    path.write_bytes(data)


def _with_canaries(path: Path) -> None:
    """Put the canary where a reader of the file's usual form meets it."""
    data = path.read_bytes()
    with suppress(ValueError):
        record = json.loads(data)
        if isinstance(record, dict):
            words = ("message", "hint", "command", "id", "commit", "model", "name", "note", "x")
            path.write_text(json.dumps({**record, **dict.fromkeys(words, CANARY)}))
            return
    path.write_bytes(data + f"\n{CANARY}\n".encode())


def _link(path: Path, reader: Reader) -> None:
    """Move file or folder into the reader's home, with canaries in it, and leave a link."""
    outside = reader.home / f"own-{len(list(reader.home.iterdir()))}-{path.name}"
    path.rename(outside)
    files = [outside]
    if outside.is_dir():
        files = [each for each in outside.rglob("*") if each.is_file()]
    for file in files:
        _with_canaries(file)
    path.symlink_to(outside)


def _link_to(target: str) -> Callable[[Path, Reader], None]:
    def attack(path: Path, reader: Reader) -> None:
        _remove(path)
        path.symlink_to(target.replace("HOME", str(reader.home)))

    return attack


def _fifo(path: Path, _reader: Reader) -> None:
    _remove(path)
    os.mkfifo(path)


def _socket(path: Path, reader: Reader) -> None:
    """Bind a socket that nothing listens at; the path may be too long to bind directly."""
    _remove(path)
    short = reader.root / "s"
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(short))
    short.rename(path)


def _folder(path: Path, _reader: Reader) -> None:
    _remove(path)
    path.mkdir()


def _empty(path: Path, _reader: Reader) -> None:
    _write(path, b"")


def _sparse(path: Path, _reader: Reader) -> None:
    _write(path, b"{}\n")
    os.truncate(path, 2 << 30)


def _endless(path: Path, _reader: Reader) -> None:
    _write(path, b'{"message": "' + b"x" * (20 * _MIB))


def _text(text: str) -> Callable[[Path, Reader], None]:
    def attack(path: Path, _reader: Reader) -> None:
        _write(path, text.encode())

    return attack


def _values(path: Path) -> list[object]:
    """Return the JSON values of a file, a value a line or one value."""
    if not path.is_file():
        return []
    text = path.read_text(errors="replace")
    try:
        return [json.loads(line) for line in text.splitlines() if line]
    except ValueError:
        pass
    try:
        return [json.loads(text)]
    except ValueError:
        return []


def _all_values(make: Callable[[object], object]) -> Callable[[Path, Reader], None]:
    """Replace every text and number of a JSON file; a file of another kind becomes the text."""

    def changed(value: object) -> object:
        if isinstance(value, dict):
            return {key: changed(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [changed(inner) for inner in value]
        return make(value)

    def attack(path: Path, _reader: Reader) -> None:
        lines = [json.dumps(changed(value)) for value in _values(path)]
        _write(path, ("\n".join(lines) or str(make(1))).encode() + b"\n")

    return attack


def _number(number: float) -> Callable[[object], object]:
    """Replace numbers, and leave texts as they are."""
    return lambda value: value if isinstance(value, str) else number


def _words(words: str) -> Callable[[object], object]:
    return lambda value: words if isinstance(value, str) else value


def _other_version(path: Path, _reader: Reader) -> None:
    """Add fields and states that this version does not know."""
    lines = []
    for value in _values(path):
        record = value if isinstance(value, dict) else {"value": value}
        new = {"state": "hibernating", "phase": "hibernating", "kind": "v9", "version": 99}
        lines.append(json.dumps({**record, **new}))
    _write(path, ("\n".join(lines) or "v9").encode() + b"\n")


def _foreign_ids(path: Path, reader: Reader) -> None:
    """Name a live process of the reader, another host and the reader's own files."""
    lines = []
    for value in _values(path):
        record = value if isinstance(value, dict) else {"value": value}
        new = {
            "pid": os.getppid(),
            "start_time": None,
            "lock": reader.home.stat().st_ino,
            "cluster": str(reader.home),
            "path": str(reader.home / "secret"),
            "id": "../../home",
            "host": socket.gethostname(),
        }
        lines.append(json.dumps({**record, **new}))
    _write(path, ("\n".join(lines) or str(reader.home / "secret")).encode() + b"\n")


def _odd_names(path: Path, _reader: Reader) -> None:
    """Put files with odd names beside the file, or into the folder."""
    folder = path if path.is_dir() else path.parent
    names = ["a\nb", "\x1b[31m", "<img src=x onerror=alert(1)>", "-rf", "..\\x", "n" * 255]
    for name in names:
        (folder / name).write_text("{}\n")
    Path(os.fsdecode(os.fsencode(folder) + b"/\xff\xfe")).write_text("{}\n")


ATTACKS: dict[str, Callable[[Path, Reader], None]] = {
    "link": _link,
    "link to a secret": _link_to("HOME/secret"),
    "link to the home": _link_to("HOME"),
    "link to a device": _link_to("/dev/zero"),
    "link to a terminal": _link_to("/dev/tty"),
    "link to itself": _link_to("."),
    "fifo": _fifo,
    "socket": _socket,
    "folder": _folder,
    "empty": _empty,
    "2 GiB": _sparse,
    "endless line": _endless,
    "nested": _text("[" * 10_000),
    "nested objects": _text('{"a":' * 10_000 + "1" + "}" * 10_000),
    "NaN": _all_values(_number(float("nan"))),
    "Infinity": _all_values(_number(float("-inf"))),
    "huge numbers": _all_values(_number(10**400)),
    "NUL": _all_values(_words("a\0b")),
    "escapes": _all_values(_words("\x1b]52;c;aGVsbG8=\x07\x1b[2J\r\n\u202e")),
    "HTML": _all_values(_words("<script>alert(1)</script><img src=x onerror=alert(1)>")),
    "surrogates": _all_values(_words("\ud800")),
    "another version": _other_version,
    "foreign ids": _foreign_ids,
    "odd names": _odd_names,
}
