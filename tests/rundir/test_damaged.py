"""A run directory that was cut, damaged or made to harm is one line of words: no traceback, no hang, nothing of ours.

Each example takes a whole run, does something to some of its files, and looks at it in every way there is.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from writtenrun import T0, write_run
from wrong import WRONG, places, replaced

from workbench.base.errors import WorkbenchError
from workbench.base.shown import as_text
from workbench.benchmark.report import gather, rows_below
from workbench.client.history import history
from workbench.client.run import Run
from workbench.display.run.page import run_text
from workbench.results.profile.compare import compare
from workbench.rundir.catalog.index import RunIndex
from workbench.rundir.paths import RunPaths
from workbench.rundir.status import cluster_status, run_at
from workbench.rundir.view import RunView

CANARY = "canary-of-the-reader"
PROFILE = Path(__file__).parents[1] / "samples" / "flops_profile.txt"
FILES = (
    *("run.json", "spec.json", "state.json", "result.json", "events.jsonl", "hostfile", "prediction.json"),
    *("origin.json", "profile.txt", "predictions.jsonl", "held.json", "command.sh", "inputs/job.json"),
    *("inputs/eval.jsonl", "inputs/tables.jsonl", "inputs/deepspeed.json", "logs/rank-0.stderr.log"),
    *("logs/rank-1.stdout.log", "logs/launcher.log", "../../state.json"),
)


def whole_run(folder: Path) -> RunPaths:
    run = write_run(folder)
    run.event("phase", name="training")
    run.event("start", model="tiny-t5", family="encoder-decoder", world_size=3, global_batch_size=24, parameters=10**6)
    run.event("device", name="cpu")
    run.event("sample", rank=None, host="127.0.0.2", rss_gib=1.0, gpus=[{"index": 0, "percent": 5, "used_gib": 1.0}])
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
    paths.job.write_text(json.dumps({"job": job, "train": "train.jsonl", "eval": "eval.jsonl", "deepspeed": {}}))
    paths.deepspeed.write_text(json.dumps({"zero_optimization": {"stage": 1}}))
    row = {"source": "How many?", "expected": "SELECT a FROM table", "predicted": "SELECT a", "table_id": "1-2"}
    paths.predictions.write_text(json.dumps({**row, "exact_match": False}) + "\n")
    (paths.inputs / "eval.jsonl").write_text(
        json.dumps({"source": "How many?", "target": "SELECT a FROM table"}) + "\n"
    )
    table = {"id": "1-2", "header": ["a"], "types": ["text"], "rows": [["x"]]}
    paths.tables.write_text(json.dumps(table) + "\n")
    paths.prediction.write_text(json.dumps({"host_gib": 1.5, "warning": "tight"}))
    paths.origin.write_text(json.dumps({"commit": "abc", "data": "d", "script": ""}))
    paths.held.write_text(json.dumps({"parts": {"3": {"0": ["pod-0", "/x/step-3/rank-0"]}}}))
    paths.command.write_text("deepspeed --hostfile hostfile train.py\n")
    head, _, detail = PROFILE.read_text().partition("T5ForConditionalGeneration(\n")
    paths.profile.write_text(f"{head}T5ForConditionalGeneration(\n" + "".join(detail.splitlines(True)[:2]) + ")\n")
    error = {"host": "127.0.0.2", "pod": "pod-0", "rank": 0, "kind": "ValueError", "message": "no", "traceback": "T\n"}
    run.end(
        "failed", "rank 0 failed", error=error, started_s=T0, ended_s=T0 + 25, peak_memory_gib={"127.0.0.2": 1.0},
        steps=3, eval_loss=2.5, train_samples_per_s=100.0, versions={"torch": "2.13.0", "python": "3.11.2"},
    )  # fmt: skip
    return paths


def put(path: Path, make: Callable[[], object]) -> None:
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
    make()


def retype(path: Path, where: int, wrong: object) -> None:
    """Put a wrong value into one of the places of a file's JSON objects, or for the whole of one."""
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


def damage(root: Path, secret: Path, what: tuple[str, str, int, object]) -> None:
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
            put(path, lambda: path.write_bytes(bytes((where * 31 + i * i) % 256 for i in range(3000))))
        case "deep":
            put(path, lambda: path.write_text(("[" if where % 2 else '{"a":') * (50 + where * 97 % 100_000)))
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
                shutil.copytree(path.parent, outside, symlinks=True)
                for inner in outside.iterdir():
                    put(inner, lambda inner=inner: inner.write_text(CANARY))  # type: ignore[misc]
            put(path.parent, lambda: path.parent.symlink_to(outside))


HOW = (
    *("retype",) * 10,
    *("cut", "cut", "missing", "noise", "deep", "deep but whole", "huge", "long", "link", "device", "loop", "fifo"),
    *("folder", "folder is a link"),
)
DAMAGES = st.lists(
    st.tuples(st.sampled_from(FILES), st.sampled_from(HOW), st.integers(0, 10**6), st.sampled_from(WRONG)),
    min_size=1,
    max_size=3,
)


def looks(paths: RunPaths, folder: Path) -> Iterator[Callable[[], object]]:
    """All that may end in our one error, and in no other."""
    run = Run(paths.root)
    yield lambda: repr(run_at(paths.root))  # Run.load would have another keeper take over
    for name in ("id", "spec", "state", "message", "progress"):
        yield lambda name=name: repr(getattr(run, name))  # type: ignore[misc]
    yield lambda: list(run.events())
    for rank, stream in ((0, "stderr"), (1, "stdout")):
        yield lambda rank=rank, stream=stream: run.logs(rank, stream)  # type: ignore[misc]
    for part in ("profile", "predictions", "predicted_memory_gib", "tflops_per_device"):
        yield lambda part=part: str(getattr(run.result, part))  # type: ignore[misc]
    yield lambda: str(run.result) + repr(run.result) + run.result._repr_html_()
    yield lambda: repr(run.result.raise_for_status())
    yield lambda: str(compare(run.result.profile, run.result.profile))  # type: ignore[arg-type]


def never_raises(paths: RunPaths, folder: Path) -> Iterator[Callable[[], object]]:
    """What shows many runs, or stands in a notebook's cell."""
    run = Run(paths.root)
    yield lambda: repr(cluster_status(folder).pods) + repr(cluster_status(folder).alive)
    yield lambda: repr(run) + run_text(RunView(paths.root)) if paths.info.is_file() else repr(run)
    yield lambda: as_text(history(folder)) + history(folder)._repr_html_()
    yield lambda: indexed(folder)


def indexed(folder: Path) -> str:
    with RunIndex(folder, folder.parent / "index.sqlite") as index:
        index.refresh()
        return repr(index.query())


def look_at(root: Path, what: list[tuple[str, str, int, object]], *, ended: bool, drawn: bool) -> None:
    with whole_copy(root) as (paths, folder, secret):
        if not ended:
            paths.result.unlink()
            paths.state.write_text('{"state": "running", "message": "training", "hint": ""}')
        for each in what:
            damage(paths.root, secret, each)
        seen = []
        for look in looks(paths, folder):
            try:
                seen.append(str(look()))
            except WorkbenchError as error:
                assert str(error)
                seen.append(str(error))
        seen += [str(look()) for look in never_raises(paths, folder)]
        if drawn:
            seen += [str(Run(paths.root)) + Run(paths.root)._repr_html_(), *report_of(folder)]
            with suppress(WorkbenchError):
                seen.append(Run(paths.root).result.to_html(folder / "card.html").read_text())
        assert not [text for text in seen if CANARY in text]


def report_of(folder: Path) -> list[str]:
    rows, problems = rows_below([folder])
    return [repr(gather(rows, problems=problems, with_cards=True))]


@contextmanager
def whole_copy(root: Path) -> Iterator[tuple[RunPaths, Path, Path]]:
    with tempfile.TemporaryDirectory(dir=root.parent) as place:
        folder, secret = Path(place, "cluster"), Path(place, "secret")
        secret.write_text(CANARY + "\n")
        shutil.copytree(root, folder)
        (run,) = (folder / "runs").iterdir()
        info = json.loads((run / "run.json").read_text())
        (run / "run.json").write_text(json.dumps({**info, "cluster": str(folder)}))
        yield RunPaths(run), folder, secret


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return whole_run(tmp_path_factory.mktemp("damaged")).root.parents[1]


def tried(whole: Path, examples: int) -> int:
    counted = []

    @settings(
        max_examples=examples, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(DAMAGES, st.booleans(), st.sampled_from((*(False,) * 39, True)))  # a card and a page take a second
    def each(what: list[tuple[str, str, int, object]], ended: bool, drawn: bool) -> None:
        counted.append(what)
        look_at(whole, what, ended=ended, drawn=drawn)

    each()
    return len(counted)


def test_a_damaged_run_is_a_line_of_words(whole: Path) -> None:
    assert tried(whole, 120) >= 120


@pytest.mark.long
def test_thousands_of_damaged_runs_are(whole: Path) -> None:
    assert tried(whole, 5000) >= 5000
