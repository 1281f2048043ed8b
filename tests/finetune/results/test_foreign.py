"""A stranger's run directory is data: nothing outside it that it links to is shown or handed on."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.runstores import list_runs
from tests.support.writtenrun import WrittenRun
from workbench import FineTune, PodSpec, Run, Script, compare, history
from workbench.base.display_protocol import as_html
from workbench.base.errors import WorkbenchError
from workbench.base.files import write_json
from workbench.base.files.private import make_cluster_folder
from workbench.benchmark.result import rows_below, write_report
from workbench.client.kinds import recipe_for
from workbench.finetune.export.recipe import recipe_of
from workbench.rundir.make.prepare import prepare_run
from workbench.rundir.paths import ClusterPaths
from workbench.rundir.register.store import KnownRun
from workbench.rundir.spec import ClusterSpec, RunSpec
from workbench.rundir.view import RunView

pytestmark = pytest.mark.slow  # a minute in all
CANARY = "canary-5f1e"
FILES = (
    *(
        "spec.json",
        "run.json",
        "state.json",
        "result.json",
        "events.jsonl",
        "thinned.jsonl",
        "hostfile",
        "command.sh",
        "origin.json",
    ),
    *(
        "prediction.json",
        "profile.txt",
        "predictions.jsonl",
        "inputs/job.json",
        "inputs/deepspeed.json",
    ),
    *(
        "inputs/train.jsonl",
        "inputs/eval.jsonl",
        "inputs/tables.jsonl",
        "inputs/script.zip",
        "logs/attempt-0/rank-0.stdout.log",
    ),
    *(
        "logs/attempt-0/rank-0.stderr.log",
        "logs/launcher.log",
        "model/config.json",
        "model/tokenizer.json",
    ),
    *("inputs", "logs", "model", "tensorboard"),
)


OPENED: list[str] = []
"""What was opened in this process."""
sys.addaudithook(lambda event, args: OPENED.append(str(args[0])) if event == "open" else None)


def run_of(folder: Path, job: FineTune | Script) -> Run:
    """A run that has failed, with a file of every kind in its directory."""
    prepared = prepare_run(
        RunSpec(cluster=ClusterSpec(pods=PodSpec(), count=3), job=job), root=folder / "run"
    )
    paths = prepared.paths
    run = WrittenRun(paths, ClusterPaths(folder / "cluster"))
    for place in (paths.logs, paths.model, paths.tensorboard):
        place.mkdir()
    write_json(
        paths.info, {"id": prepared.run_id, "cluster": str(folder / "cluster"), "submitted_s": 1.0}
    )
    paths.hostfile.write_text("127.0.0.2 slots=1\n")
    run.step(1)
    for rank in range(3):
        run.log(rank, "a line\n")
        run.log(rank, "another\n", "stderr")
    for name in ("config.json", "tokenizer.json"):
        (paths.model / name).write_text("{}")
    paths.predictions.write_text(
        '{"source": "q", "expected": "a", "predicted": "b", "exact_match": false}\n'
    )
    run.end("failed", error={"kind": "ValueError", "message": "no", "rank": 0}, command="pdsh -w")
    for name in FILES:
        if not (paths.root / name).exists():
            (paths.root / name).write_text("{}\n")
    return Run.load(paths.root)


def recipe_text(run: Run) -> str:
    """The recipe by the kind in the spec; where the spec cannot be read, that of a FineTune."""
    recipe = (recipe_for(run.path) or recipe_of)(run.result)
    return b"".join(recipe.files.values()).decode() + recipe.commands


def shown(run: Run, folder: Path) -> Iterator[str]:
    """All that is made of a run for people, or for a cluster."""
    looks: list[Callable[[], object]] = [
        lambda: f"{run}{run!r}{run._repr_html_()}{run.message}{run.progress}",
        lambda: f"{run.result}{run.result!r}{run.result._repr_html_()}",
        lambda: "".join(
            run.logs(rank, stream) for rank in range(3) for stream in ("stdout", "stderr")
        ),
        lambda: f"{[RunView(run.path).log(rank) for rank in range(3)]}{list(run.events())}",
        lambda: f"{run.spec!r}{run.spec.job.env}",
        lambda: run.result.to_html(folder / "card.html").read_text(),
        lambda: write_report(rows_below([run.path])[0], folder / "report").read_text(),
        lambda: recipe_text(run),
        lambda: f"{history(run.path.parent)}{run.result.predictions}{run.result.profile}",
        lambda: "".join(f(compare([run, run.path], names="ab")) for f in (str, as_html)),
        *(
            lambda kind=kind: str(run.manifest(kind, image="x", secrets={"A": "s/k"}).objects)
            for kind in KINDS
        ),
    ]
    for look in looks:
        try:
            yield str(look())
        except WorkbenchError as error:
            yield str(error)


KINDS = ("trainjob", "pytorchjob")


def with_canary(path: Path) -> None:
    """Put it where whoever reads the file as what it claims to be comes across it."""
    try:
        data = json.loads(path.read_text())
        words = dict.fromkeys(
            ("message", "hint", "command", "id", "commit", "model", "host_gib", "x"), CANARY
        )
        path.write_text(json.dumps({**data, **words}))
    except (ValueError, TypeError):
        path.write_bytes(path.read_bytes() + f"\n{CANARY}\n".encode())


@pytest.fixture(scope="module")
def job_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("foreign")
    (folder / "own").mkdir()
    (folder / "own" / "train.py").write_text("print('mine')\n")
    data = {"kind": "wikisql-mini", "train_rows": 20, "eval_rows": 5}
    jobs = {
        "finetune": FineTune(technique="zero1", dataset=data, per_device_train_batch_size=2),
        "script": Script(path=str(folder / "own" / "train.py")),
    }
    return {kind: run_of(folder / kind, job).path for kind, job in jobs.items()}


@pytest.mark.parametrize("kind", ["finetune", "script"])
@pytest.mark.parametrize("name", FILES)
def test_a_link_in_place_of_any_file_or_folder_is_not_followed(
    job_runs: dict[str, Path], tmp_path: Path, kind: str, name: str
) -> None:
    root, outside = tmp_path / "run", tmp_path / "home" / Path(name).name
    shutil.copytree(job_runs[kind], root)
    outside.parent.mkdir()
    (root / name).rename(outside)
    for path in [outside, *outside.rglob("*")]:
        if path.is_file():
            with_canary(path)
    (root / name).symlink_to(outside)
    texts = list(shown(Run(root), tmp_path))
    assert [text[max(0, text.find(CANARY) - 200) :][:300] for text in texts if CANARY in text] == []


@pytest.mark.parametrize(
    ("kind", "job"),
    [
        ("script", {"path": "HOME/secret"}),
        ("script", {"path": "HOME/secret", "args": ["--x"]}),
        ("finetune", {"deepspeed": "HOME/secret"}),
        ("finetune", {"model": "HOME"}),
        ("finetune", {"dataset": {"kind": "files", "train": "HOME/secret", "eval": "HOME/secret"}}),
        ("finetune", {"resume": "HOME"}),
        ("finetune", {"env": {"A": "${WORKBENCH_TEST_CANARY}", "B": "x ${WORKBENCH_TEST_CANARY}"}}),
        ("script", {"env": {"A": "${WORKBENCH_TEST_CANARY}"}}),
    ],
)
def test_what_its_spec_names_is_neither_read_nor_resolved(
    job_runs: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    job: dict[str, object],
) -> None:
    monkeypatch.setenv("WORKBENCH_TEST_CANARY", CANARY)
    home = tmp_path / "home"
    home.mkdir()
    (home / "secret").write_text(f"{CANARY}\n")
    (home / "config.json").write_text(json.dumps({"is_encoder_decoder": CANARY}))
    root = tmp_path / "run"
    shutil.copytree(job_runs[kind], root)
    named = json.loads(json.dumps(job).replace("HOME", str(home)))
    for file, inside in (("spec.json", "job"), ("inputs/job.json", "job")):
        raw = json.loads((root / file).read_text() or "{}")
        (root / file).write_text(json.dumps({**raw, inside: {**raw.get(inside, {}), **named}}))
    OPENED.clear()
    texts = list(shown(Run(root), tmp_path))
    opened = [path for path in OPENED if path.startswith(str(home))]
    assert [text[max(0, text.find(CANARY) - 200) :][:300] for text in texts if CANARY in text] == []
    assert opened == []


@pytest.mark.parametrize("ended", [True, False])
def test_the_cluster_that_its_run_json_names_is_not_looked_into_unless_that_names_the_run(
    job_runs: dict[str, Path], tmp_path: Path, ended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    root, outside = tmp_path / "run", tmp_path / "home" / "cluster"
    shutil.copytree(job_runs["script"], root)
    info = json.loads((root / "run.json").read_text())
    (root / "run.json").write_text(json.dumps({**info, "cluster": str(outside)}))
    outside.mkdir(parents=True)
    paths = ClusterPaths(outside)
    pod = {"name": CANARY, "phase": "Running", "address": "127.0.0.2", "ssh_port": 22, "slots": 1}
    state = {"phase": "lost", "message": CANARY, "pid": 1, "start_time": 1, "pods": [pod]}
    for file, data in (
        (paths.state, state),
        (paths.config, {}),
        (paths.hostfile, CANARY),
    ):
        file.write_text(json.dumps(data))
    if not ended:
        (root / "result.json").unlink()
    OPENED.clear()
    assert CANARY not in "".join(shown(Run(root), tmp_path))
    opened = {path for path in OPENED if path.startswith(str(outside))}
    assert opened <= {str(outside), str(paths.store), str(paths.results)}, (
        "whether it names the run, and no more"
    )
    make_cluster_folder(paths.root)
    list_runs(paths.store, KnownRun(id=str(info["id"]), path=root))
    paths.own_state.write_text(json.dumps(state))
    run = Run(root)
    assert (CANARY in run.message) is not ended, "its own cluster, which names it too, is believed"
