"""A run directory that was cut, damaged or made to harm is one line: no traceback, no hang.

Each example takes a whole run, does something to some of its files, looks at it
in every way there is, and puts back what it damaged. Its cluster is nobody's:
it has been copied from another place, and no keeper may be started for it.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.support.examples import tries
from tests.support.writtenrun import T0, write_run
from tests.support.wrong import WRONG, places, replaced
from workbench.base.display_protocol import as_text
from workbench.base.errors import WorkbenchError
from workbench.base.files import read_json, write_json
from workbench.benchmark.result import Report, rows_below
from workbench.client.run import Run
from workbench.display.run.page import run_text
from workbench.finetune.notebook.history import history
from workbench.finetune.profile.compare import compare
from workbench.pods.pod_spec import PodSpec
from workbench.rundir.paths import ClusterPaths, RunPaths
from workbench.rundir.spec import ClusterSpec
from workbench.rundir.status import cluster_status
from workbench.rundir.view import RunView

Damage = tuple[str, str, int, object]
CANARY = "canary-of-the-reader"
PROFILE = Path(__file__).parents[1] / "samples" / "flops_profile.txt"
FILES = (
    *(
        "run.json",
        "spec.json",
        "state.json",
        "result.json",
        "events.jsonl",
        "thinned.jsonl",
        "samples.jsonl",
        "hostfile",
    ),
    *(
        "origin.json",
        "profile.txt",
        "predictions.jsonl",
        "held.json",
        "command.sh",
        "inputs/job.json",
    ),
    *(
        "inputs/eval.jsonl",
        "inputs/tables.jsonl",
        "inputs/deepspeed.json",
        "logs/attempt-0/rank-0.stderr.log",
    ),
    *(
        "logs/attempt-0/rank-1.stdout.log",
        "logs/launcher.log",
        "../../state.json",
        "../../cluster.json",
    ),
)


def whole_run(folder: Path) -> RunPaths:
    run = write_run(folder)
    run.event("phase", name="training")
    run.event(
        "start",
        model="tiny-t5",
        family="encoder-decoder",
        world_size=3,
        global_batch_size=24,
        parameters=10**6,
    )
    run.event("device", name="cpu")
    for time_s in (T0, T0 + 5):
        run.sample(time_s, rss_gib=1.0, gpus=[{"index": 0, "percent": 5, "used_gib": 1.0}])
    for step in range(1, 4):
        run.step(step)
    run.event("eval", step=3, eval_loss=2.5)
    run.event("memory", step=3, rss_gib=1.5, peak_rss_gib=2.0)
    run.event("checkpoint", step=3, bytes=10, took_s=0.1)
    run.log(0, "a warning\n", "stderr")
    run.log(1, "10%|#\r20%|##\nhello\n")
    paths = run.paths
    (paths.logs / "launcher.log").write_text("pdsh: pod-0: hello\n")
    paths.inputs.mkdir()
    job = json.loads(paths.spec.read_text())["job"]
    paths.job.write_text(
        json.dumps({"job": job, "train": "train.jsonl", "eval": "eval.jsonl", "deepspeed": {}})
    )
    paths.deepspeed.write_text(json.dumps({"zero_optimization": {"stage": 1}}))
    row = {
        "source": "How many?",
        "expected": "SELECT a FROM table",
        "predicted": "SELECT a",
        "table_id": "1-2",
    }
    paths.predictions.write_text(json.dumps({**row, "exact_match": False}) + "\n")
    (paths.inputs / "eval.jsonl").write_text(
        json.dumps({"source": "How many?", "target": "SELECT a FROM table"}) + "\n"
    )
    table = {"id": "1-2", "header": ["a"], "types": ["text"], "rows": [["x"]]}
    paths.tables.write_text(json.dumps(table) + "\n")
    paths.origin.write_text(json.dumps({"commit": "abc", "data": "d", "script": ""}))
    paths.held.write_text(json.dumps({"parts": {"3": {"0": ["pod-0", "/x/step-3/rank-0"]}}}))
    paths.command.write_text("deepspeed --hostfile hostfile train.py\n")
    head, _, detail = PROFILE.read_text().partition("T5ForConditionalGeneration(\n")
    paths.profile.write_text(
        f"{head}T5ForConditionalGeneration(\n" + "".join(detail.splitlines(True)[:2]) + ")\n"
    )
    error = {
        "host": "127.0.0.2",
        "pod": "pod-0",
        "rank": 0,
        "kind": "ValueError",
        "message": "no",
        "traceback": "T\n",
    }
    run.end(
        "failed",
        "rank 0 failed",
        error=error,
        started_s=T0,
        ended_s=T0 + 25,
        peak_memory_gib={"127.0.0.2": 1.0},
        steps=3,
        eval_loss=2.5,
        train_samples_per_s=100.0,
        versions={"torch": "2.13.0", "python": "3.11.2"},
    )
    return paths


def put(path: Path, make: Callable[[], object]) -> None:
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
    make()


def retype(path: Path, where: int, wrong: object) -> None:
    """Put a wrong value into a place of a file's JSON objects, or in place of a whole one."""
    if path.is_symlink() or not path.is_file() or path.stat().st_size > 1 << 20:
        return
    try:
        lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
        values = [json.loads(line) for line in lines]
    except (OSError, ValueError, RecursionError):
        return
    all_places = [(n, at) for n, value in enumerate(values) for at in places(value)]
    if not all_places:
        return
    n, at = all_places[where % len(all_places)]
    values[n] = replaced(values[n], at, wrong)
    path.write_text("\n".join(map(json.dumps, values)) + "\n")


def pipes_in(folder: str, names: list[str]) -> list[str]:
    """What cannot be copied of a folder that is damaged already."""
    return [name for name in names if stat.S_ISFIFO(Path(folder, name).lstat().st_mode)]


def damage(root: Path, secret: Path, what: Damage) -> None:  # noqa: C901, PLR0912
    name, how, where, wrong = what
    path = root / name
    if not path.parent.is_dir() or path.parent.is_symlink():
        return
    match how:
        case "retype":
            retype(path, where, wrong)
        case "cut" if path.is_file() and not path.is_symlink():
            os.truncate(path, where % (path.stat().st_size + 1))
        case "missing":
            put(path, lambda: None)
        case "noise":
            put(
                path,
                lambda: path.write_bytes(bytes((where * 31 + i * i) % 256 for i in range(3000))),
            )
        case "deep":
            put(
                path,
                lambda: path.write_text(
                    ("[" if where % 2 else '{"a":') * (50 + where * 97 % 100_000)
                ),
            )
        case "deep but whole":
            depth = 50 + where % 5000
            put(path, lambda: path.write_text("[" * depth + "]" * depth + "\n"))
        case "huge":
            put(path, lambda: path.write_bytes(b"{}\n"))
            os.truncate(path, 1 << (24 + where % 16))
        case "long":
            put(path, lambda: path.write_text('{"a": "' + "x" * (1 << 20) + '"}\n'))
        case "link":
            put(path, lambda: path.symlink_to(secret))
        case "device":
            put(path, lambda: path.symlink_to("/dev/zero"))
        case "loop":
            put(path, lambda: path.symlink_to(path.name))
        case "fifo":
            put(path, lambda: os.mkfifo(path))
        case "folder":
            put(path, path.mkdir)
        case "folder is a link" if path.parent != root and ".." not in name:
            outside = secret.parent / f"outside-{path.parent.name}"
            if not outside.exists():
                shutil.copytree(path.parent, outside, symlinks=True, ignore=pipes_in)
                for inner in outside.iterdir():
                    put(inner, lambda inner=inner: inner.write_text(CANARY))  # type: ignore[misc]
            put(path.parent, lambda: path.parent.symlink_to(outside))


HOW = (
    *("retype",) * 10,
    *(
        "cut",
        "cut",
        "missing",
        "noise",
        "deep",
        "deep but whole",
        "huge",
        "long",
        "link",
        "device",
        "loop",
        "fifo",
    ),
    *("folder", "folder is a link"),
)
DAMAGES = st.lists(
    st.tuples(
        st.sampled_from(FILES), st.sampled_from(HOW), st.integers(0, 10**6), st.sampled_from(WRONG)
    ),
    min_size=1,
    max_size=3,
)


def looks(paths: RunPaths, folder: Path) -> Iterator[Callable[[], object]]:
    """All that may end in our one error, and in no other."""
    run = Run(paths.root)
    yield lambda: repr(Run.load(paths.root))
    for name in ("id", "spec", "state", "message", "progress"):
        yield lambda name=name: repr(getattr(run, name))  # type: ignore[misc]
    yield lambda: list(run.events())
    for rank, stream in ((0, "stderr"), (1, "stdout")):
        yield lambda rank=rank, stream=stream: run.logs(rank, stream)  # type: ignore[misc]
    for part in ("profile", "predictions", "tflops_per_device"):
        yield lambda part=part: str(getattr(run.result, part))  # type: ignore[misc]
    yield lambda: str(run.result) + repr(run.result) + run.result._repr_html_()
    yield lambda: repr(run.result.raise_for_status())
    yield lambda: str(compare(run.result.profile, run.result.profile))  # type: ignore[arg-type]


def never_raises(paths: RunPaths, folder: Path) -> Iterator[Callable[[], object]]:
    """What shows many runs, or stands in a notebook's cell."""
    run = Run(paths.root)
    yield lambda: repr(cluster_status(folder).pods) + repr(cluster_status(folder).alive)
    yield lambda: repr(run) + run_text(RunView(paths.root)) if paths.info.is_file() else repr(run)
    runs = history(folder)
    yield lambda: as_text(runs) + runs._repr_html_()


def look_at(place: Place, what: list[Damage], *, how: str, drawn: bool) -> None:
    paths = place.run
    with damaged(place, what, how):
        seen = []
        for look in looks(paths, place.folder):
            try:
                seen.append(str(look()))
            except WorkbenchError as error:
                assert str(error)
                seen.append(str(error))
        seen += [str(look()) for look in never_raises(paths, place.folder)]
        if drawn:
            seen += [str(Run(paths.root)) + Run(paths.root)._repr_html_(), *report_of(place.folder)]
            with suppress(WorkbenchError):
                seen.append(Run(paths.root).result.to_html(place.folder / "card.html").read_text())
        assert not [text for text in seen if CANARY in text]
        assert not ClusterPaths(place.folder).keeper_log.exists(), "a keeper was started for it"


def report_of(folder: Path) -> list[str]:
    rows, problems = rows_below([folder])
    return [repr(Report(rows, problems=problems, with_cards=True))]


@dataclass(frozen=True)
class Place:
    """A cluster's directory with one run, and the same again, which is damaged again and again."""

    whole: Path
    folder: Path
    secret: Path

    @property
    def run(self) -> RunPaths:
        (info,) = (self.whole / "runs").glob("*/run.json")
        return RunPaths(self.folder / "runs" / info.parent.name)

    def put_back(self, name: str) -> None:
        """Have a file of the run, and the folder that it is in, as they were."""
        path = self.run.root / name
        there = self.whole / "runs" / self.run.root.name / name
        # A folder above may have been damaged after the file.
        for folder, whole in ((path.parents[1], there.parents[1]), (path.parent, there.parent)):
            if folder.is_symlink() or not folder.is_dir():
                put(folder, partial(shutil.copytree, whole, folder))
        put(path, lambda: there.exists() and shutil.copy2(there, path))


@contextmanager
def damaged(place: Place, what: list[Damage], how: str) -> Iterator[None]:
    run, cluster = place.run, ClusterPaths(place.folder)
    try:
        if how != "ended":
            run.result.unlink()
            run.state.write_text('{"state": "running", "message": "training", "hint": ""}')
        if how == "left":  # by a keeper that died
            cluster.state.write_text(
                json.dumps({**json.loads(cluster.state.read_text()), "start_time": 1})
            )
        for each in what:
            damage(run.root, place.secret, each)
        yield
    finally:
        for name in ("result.json", "state.json", "../../state.json", *(name for name, *_ in what)):
            place.put_back(name)
        for path in place.secret.parent.glob("outside-*"):
            put(path, lambda: None)
        (place.folder / "card.html").unlink(missing_ok=True)


def content(folder: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()
    }


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    root = tmp_path_factory.mktemp("damaged")
    made = Place(root / "cluster", root / "tried" / "cluster", root / "tried" / "secret")
    run, cluster = whole_run(root), ClusterPaths(made.whole)
    write_json(run.info, {**read_json(run.info), "cluster": str(made.folder)})
    write_json(cluster.state, {**read_json(cluster.state), "host": socket.gethostname(), "lock": 1})
    write_json(
        cluster.config, ClusterSpec(backend={"kind": "local"}, pods=PodSpec(), count=3).to_dict()
    )
    shutil.copytree(made.whole, made.folder)
    made.secret.write_text(CANARY + "\n")
    return made


def tried(place: Place, examples: int) -> int:
    counted = []

    @tries(examples)
    @example(
        [
            ("logs/attempt-0/rank-0.stderr.log", "fifo", 0, None),
            ("logs/launcher.log", "folder is a link", 0, None),
        ],
        "left",
        False,
    )
    @given(
        DAMAGES,
        st.sampled_from(("ended", "ended", "live", "left")),
        st.sampled_from((*(False,) * 99, True)),
    )
    def each(what: list[Damage], how: str, drawn: bool) -> None:  # a card and a page take a second
        counted.append(what)
        look_at(place, what, how=how, drawn=drawn)

    each()
    assert content(place.folder) == content(place.whole)
    return len(counted)


def test_a_damaged_run_is_a_line_of_words(place: Place) -> None:
    assert tried(place, 60) >= 60
