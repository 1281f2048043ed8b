"""What a script wrote into its folder is there after any end of the run; and pods may lie."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.poll import until
from tests.support.sentences import says, sentence
from workbench import Cluster, LocalPods, PodSpec, Run, Script, history, log
from workbench.errors import ConfigError, RunError
from workbench.keeper.run.outputs import _folders_of
from workbench.rundir.paths import is_output

pytestmark = pytest.mark.slow
SCRIPTS = Path(__file__).parent.parent / "scripts"
MODEL = bytes(range(256)) * ((9 << 20) // 256)
OF_RANK_0 = {"config.txt", "final/model.bin", "note-0.txt", "out/common.txt", "out/shard-0.pt"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    path = tmp_path_factory.mktemp("outputs") / "c"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORKBENCH_TEST_PODS", "of all runs")
        spec = PodSpec(cpus=1, env={"PODS": "${WORKBENCH_TEST_PODS}"})
        cluster = Cluster(
            LocalPods(), spec, count=2, path=path, warm=False, idle_timeout_s=3600
        ).start()
    with cluster:
        yield cluster


@pytest.fixture
def script(tmp_path: Path) -> Path:
    folder = tmp_path / "mine"
    folder.mkdir()
    shutil.copy(SCRIPTS / "write.py", folder)
    (folder / "config.txt").write_text("as sent")
    (folder / "rows.txt").write_text("read only")
    return folder / "write.py"


def wrote(run: Run, rank: int) -> bool:
    log = run.paths.rank_log(0, rank, "stdout")
    return log.exists() and "written" in log.read_text()


def outputs(run: Run) -> set[str]:
    folder = run.paths.outputs
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}


def test_new_and_changed_files_come_back_and_what_stays_is_named_and_fetched(
    cluster: Cluster, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Script(script, env={"JOBS": "${WORKBENCH_TEST_JOBS}"})
    with pytest.raises(
        ConfigError,
        match=sentence("env takes the values of", "WORKBENCH_TEST_JOBS"),
    ):
        cluster.submit(job)
    monkeypatch.setenv("WORKBENCH_TEST_JOBS", "of this run")
    run = cluster.submit(job)
    result = run.wait(300, progress=False).raise_for_status()
    assert outputs(run) == OF_RANK_0
    assert (run.paths.outputs / "final" / "model.bin").read_bytes() == MODEL
    assert (run.paths.outputs / "config.txt").read_text() == "changed"
    assert (run.paths.outputs / "note-0.txt").read_text() == "note 0 of this run of all runs"
    assert {
        path.stat().st_mode & 0o777 for path in run.paths.outputs.rglob("*") if path.is_dir()
    } == {0o700}
    assert {
        path.stat().st_mode & 0o777 for path in run.paths.outputs.rglob("*") if path.is_file()
    } == {0o600}
    assert (result.output_files, result.output_bytes) == (5, len(MODEL) + 7 + 30 + 21 + 7)
    assert "outputs/ has 5 files (9.0 MiB)" in result.message
    name_is_no_utf8 = ("1 file", "24 bytes", "pod-0")
    assert says(result.message, "not copied back: {} ({})", *name_is_no_utf8)
    assert says(result.message, "links on {} are not followed", "pod-0", "passwd, pipe")
    assert "not copied back: 2 files (37 bytes) on pod-1 in " in result.message
    assert says(
        result.message,
        "run.fetch() copies all files back while the pod exists",
        "Script(outputs=[…]",
    ) and says(result.message, "does not name the files")
    assert "outputs/ has 5 files" in str(run)
    assert "5 files, 9.0 MiB" in str(result)
    reported(run)
    (run.paths.outputs / "note-0.txt").unlink()
    kept = run.fetch()
    assert outputs(run) == OF_RANK_0 | {"pod-1/note-1.txt", "pod-1/out/shard-1.pt"}
    assert len(kept) == 2, kept  # the name that no file here can have, and the links
    assert run.result.output_files == 7
    manifest = json.loads(run.paths.manifest.read_text())
    assert {name for name in manifest if name.startswith("outputs/")} == {
        f"outputs/{name}" for name in outputs(run)
    }


def reported(run: Run) -> None:
    """Its `workbench.log` figures, once and not by each rank, stand with a run's figures."""
    events = [event for event in run.events() if event.kind in ("step", "eval")]
    assert [(event.kind, event.rank, event.data["step"]) for event in events] == [
        ("step", 0, 1),
        ("step", 0, 2),
        ("eval", 0, 2),
    ]
    progress = run.progress
    assert (progress.step, progress.max_steps, progress.loss, progress.eval_loss) == (
        2,
        2,
        1.0,
        0.75,
    )
    assert (run.result.steps, run.result.eval_loss, run.result.metrics) == (2, 0.75, {"rouge": 0.5})
    record = history(run.path).records[0]
    assert (record.steps, record.eval_loss, record.train_samples_per_s) == (2, 0.75, 8)
    assert {tag: values[-1] for tag, values in scalars_in(run.paths.tensorboard).items()} == {
        "train/loss": 1.0,
        "train/samples_per_s": 8.0,
        "train/accuracy": 0.5,
        "eval/loss": 0.75,
        "eval/rouge": 0.5,
    }
    assert "2 of 2 steps" in str(run)
    assert "step" not in run.logs(0, "stdout")
    for rank in range(2):
        every = run.logs(rank).splitlines()
        lines = [line for line in every if line.startswith("line ") or line == "written"]
        assert lines == ["line 0", "line 1", "line 2", "line 3", "written"]
        # Rank 0 logs a note, which is no number.
        others = [line for line in every if line not in lines]
        assert len(others) == (rank == 0) and all("'note'" in line for line in others)
        assert run.logs(rank, "stderr").splitlines() == ["line 1", "line 3", *others]
        assert run.logs(rank, tail=3).splitlines() == every[-3:]


def scalars_in(folder: Path) -> dict[str, list[float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(folder)).Reload()
    return {tag: [scalar.value for scalar in board.Scalars(tag)] for tag in board.Tags()["scalars"]}


def test_the_folders_of_paths_are_all_above_them() -> None:
    assert _folders_of(["outputs/a/b", "c"]) == {"outputs", "outputs/a"}


def test_a_script_outside_of_a_run_reports_to_nobody(capfd: pytest.CaptureFixture[str]) -> None:
    log(1, loss=2.0)
    assert capfd.readouterr().out == ""


def test_a_failed_and_a_cancelled_script_have_their_files_and_patterns_take_those_of_all_pods(
    cluster: Cluster, script: Path
) -> None:
    run = cluster.submit(
        Script(script, args=["--end", "fail", "--bytes", "4096"], outputs=["*.pt"])
    )
    result = run.wait(300, progress=False)
    assert "failed after it wrote" in result.message
    assert outputs(run) == OF_RANK_0 | {"pod-1/out/shard-1.pt"}
    run = cluster.submit(Script(script, args=["--end", "wait"], outputs_limit_gib=0.001))
    until(lambda: wrote(run, 0) and wrote(run, 1), 120)
    run.cancel()
    result = run.wait(300, progress=False)
    assert result.state == "cancelled"
    assert outputs(run) == OF_RANK_0 - {"final/model.bin"}
    assert "not copied back: 1 file (9.0 MiB) on pod-0" in result.message
    assert "beyond outputs_limit_gib=0.001; run.fetch() copies all files" in result.message
    part = run.paths.outputs / "final" / ".model.bin.part"
    part.parent.mkdir()
    part.write_bytes(MODEL[: 8 << 20])  # of a try that broke off
    run.fetch()
    assert (run.paths.outputs / "final" / "model.bin").read_bytes() == MODEL
    assert not part.exists()


def test_five_hundred_small_files_come_back_from_either_pod(
    cluster: Cluster, tmp_path: Path
) -> None:
    script = tmp_path / "many" / "many.py"
    script.parent.mkdir()
    script.write_text(
        "from pathlib import Path\n"
        "import os\n"
        "for n in range(500):\n"
        "    file = Path(f'logs-{n % 5}', f'step {n}.txt')\n"
        "    file.parent.mkdir(exist_ok=True)\n"
        "    file.write_text(f'{n} of ' + os.environ['RANK'])\n"
    )
    run = cluster.submit(Script(script, outputs=["*.txt"]))
    result = run.wait(300, progress=False).raise_for_status()
    texts = {name: (run.paths.outputs / name).read_text() for name in outputs(run)}
    wanted = {
        f"{pod}logs-{n % 5}/step {n}.txt": f"{n} of {r}"
        for r, pod in enumerate(("", "pod-1/"))
        for n in range(500)
    }
    assert texts == wanted
    assert result.output_files == 1000
    assert {path.stat().st_mode & 0o777 for path in run.paths.outputs.rglob("*.txt")} == {0o600}
    assert not list(run.path.glob(".*files*"))


def test_a_pod_that_lies_writes_below_outputs_alone(
    cluster: Cluster, script: Path, tmp_path: Path
) -> None:
    run = cluster.submit(Script(script, args=["--end", "wait", "--bytes", "256"]))
    until(lambda: wrote(run, 0), 120)
    shutil.rmtree(run.paths.outputs, ignore_errors=True)
    (tmp_path / "elsewhere").mkdir()
    run.paths.outputs.mkdir()
    (run.paths.outputs / "out").symlink_to(tmp_path / "elsewhere")
    run.cancel()
    run.wait(300, progress=False)
    assert list((tmp_path / "elsewhere").iterdir()) == []
    with pytest.raises(
        RunError, match=sentence("and nothing that a pod left is written through one", "out")
    ):
        run.fetch()
    for name in (
        "outputs/../spec.json",
        "outputs//etc/passwd",
        "outputs",
        "/etc/passwd",
        "outputs/a\0b",
        "model/x",
        "outputs/./x",
        "outputs/" + "a" * 255,
        "outputs/x\udcff",
        "outputs/x\ud800",
    ):
        assert not is_output(name), name
    assert is_output("outputs/a b/ü.bin")
