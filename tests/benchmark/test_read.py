from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.scripts import script_job
from tests.support.sentences import says
from tests.support.writtenrun import WrittenRun, write_run
from workbench.base.files import read_json, write_json
from workbench.benchmark.read import key_of, row_of, skipped_row
from workbench.benchmark.row import BenchmarkRow, Outcome
from workbench.client.result import RunResult
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.profile.parse import read_profile
from workbench.rundir.spec import ClusterSpec, RunSpec

CUDA = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has "
    "a total capacity of 79.19 GiB of which 1.25 GiB is free."
)
SAMPLE = Path(__file__).resolve().parent.parent / "samples" / "flops_profile.txt"
KERNEL = (
    "killed by SIGKILL; out of memory: the memory "
    "limit of 512 MiB was reached (oom_kill counter +1)"
)


@pytest.fixture
def run(tmp_path: Path) -> WrittenRun:
    return write_run(tmp_path)


def finished(run: WrittenRun, **facts: object) -> BenchmarkRow:
    for step in (1, 2, 3):
        run.step(step)
    run.end(**{"steps": 3, "peak_memory_gib": {"127.0.0.2": 0.5, "127.0.0.3": 0.75}, **facts})
    return row_of(run.paths.root)


def test_a_finished_run_gives_its_figures(run: WrittenRun) -> None:
    row = finished(
        run, train_samples_per_s=120.0, versions={"torch": "2.13.0"}, command="sh -c true"
    )
    assert (row.outcome, row.reason, row.path) == (Outcome.SUCCEEDED, "", run.paths.root)
    assert (row.model, row.technique, row.launcher, row.pods, row.world_size) == (
        "tiny-t5",
        "zero1",
        "ssh",
        3,
        3,
    )
    assert (row.per_device_batch, row.accumulation, row.global_batch_size, row.steps) == (
        8,
        1,
        24,
        3,
    )
    assert (row.duration_s, row.train_samples_per_s, row.peak_memory_gib, row.host_memory_gib) == (
        25.5,
        120.0,
        0.75,
        0.75,
    )
    assert row.pod_hours == pytest.approx(3 * 25.5 / 3600)
    assert row.sequence == "source open, target open, padded to the longest, grouped by length"
    assert row.dataset == "wikisql-mini"
    assert (row.provenance.seed, row.provenance.command) == (0, "sh -c true")
    assert row.provenance.versions == {"torch": "2.13.0"}
    assert row.key == key_of(read_json(run.paths.spec)) and row.repeat == 0
    assert BenchmarkRow.read(json.loads(json.dumps(row.to_dict()))) == row


def test_what_a_run_never_told_is_none(run: WrittenRun) -> None:
    row = finished(run)
    for name in (
        "mfu",
        "sent_bytes_per_step",
        "useful_tokens_per_s",
        "eval_loss",
        "predicted_memory_gib",
        "cost",
    ):
        assert getattr(row, name) is None, name


def test_the_planned_memory_is_that_of_the_benchmark(run: WrittenRun) -> None:
    write_json(run.paths.info, {**read_json(run.paths.info), "predicted_memory_gib": 3.5})
    assert finished(run).predicted_memory_gib == 3.5


def test_what_went_through_the_steps_and_what_stands_behind_it(run: WrittenRun) -> None:
    run.paths.profile.write_text(SAMPLE.read_text())
    origin = {"commit": "c0ffee+changes", "data": "0123", "script": "4567"}
    write_json(run.paths.origin, origin)
    told = {
        "useful_tokens_per_s": 600.0,
        "padded_tokens_per_s": 1000.0,
        "profiled_tokens": 200,
        "precision": "bf16",
        "device": "NVIDIA A100-SXM4-40GB",
        "devices": 4,
        "sent_bytes_per_step": 2e6,
        "package": "workbench-89ab.zip",
        "memory_kind": "cuda",
        "host_memory_gib": {"127.0.0.2": 1.5, "127.0.0.3": 1.25},
    }
    row = finished(run, **told)
    assert (row.useful_tokens_per_s, row.padded_tokens_per_s, row.sent_bytes_per_step) == (
        600.0,
        1000.0,
        2e6,
    )
    forward = read_profile(run.paths.profile).flops
    assert forward is not None and row.tflops_per_device == pytest.approx(
        3 * forward / 200 * 1000 / 4 / 1e12
    )
    assert row.mfu == pytest.approx(row.tflops_per_device / 312)
    assert (row.memory_kind, row.peak_memory_gib, row.host_memory_gib) == ("cuda", 0.75, 1.5)
    behind = row.provenance
    assert (behind.device, behind.devices) == ("NVIDIA A100-SXM4-40GB", 4)
    assert (behind.commit, behind.data, behind.code) == ("c0ffee+changes", "0123", "89ab 4567")
    result = RunResult.load(run.paths.root)
    assert (result.tflops_per_device, result.mfu) == (row.tflops_per_device, row.mfu)
    text = str(result)
    assert "600, with padding 1000" in text and "2 MB" in text and "(MFU)" in text
    assert (
        "per rank (NVIDIA A100-SXM4-40GB)" in text
        and "127.0.0.2 1.50 GiB, 127.0.0.3 1.25 GiB" in text
    )


def test_a_benchmark_names_its_rows_itself(run: WrittenRun) -> None:
    write_json(
        run.paths.info, {**read_json(run.paths.info), "benchmark": {"key": "abc", "repeat": 2}}
    )
    row = finished(run)
    assert (row.key, row.repeat) == ("abc", 2)


@pytest.mark.parametrize(
    ("kind", "message", "outcome", "wanted", "free"),
    [
        ("OutOfMemoryError", CUDA, Outcome.OUT_OF_MEMORY, 2.5, 1.25),
        ("signal", KERNEL, Outcome.OUT_OF_MEMORY, None, 0.5),
        (
            "MemoryError",
            "Unable to allocate 3.00 GiB for an array",
            Outcome.OUT_OF_MEMORY,
            3.0,
            0.875,
        ),
        ("signal", "killed by SIGKILL", Outcome.FAILED, None, None),
        ("RunError", "loss is nan at step 3", Outcome.FAILED, None, None),
    ],
)
def test_want_of_memory_is_told_from_other_failures(
    run: WrittenRun,
    kind: str,
    message: str,
    outcome: Outcome,
    wanted: float | None,
    free: float | None,
) -> None:
    spec = read_json(run.paths.spec)
    write_json(run.paths.spec, {**spec, "cluster": {"count": 3, "pods": {"memory_gib": 0.875}}})
    error = {"kind": kind, "message": message, "rank": 1, "pod": "pod-1", "host": "127.0.0.3"}
    run.end("failed", "rank 1 failed", error=error)
    row = row_of(run.paths.root)
    assert (row.outcome, row.reason, row.wanted_gib, row.free_gib) == (
        outcome,
        message,
        wanted,
        free,
    )


def test_a_run_that_goes_on_shows_what_it_has(run: WrittenRun) -> None:
    assert row_of(run.paths.root).outcome is Outcome.WAITING
    run.state("running", "training")
    run.step(7)
    row = row_of(run.paths.root)
    assert (row.outcome, row.steps, row.duration_s, row.reason) == (Outcome.RUNNING, 7, None, "")
    run.keeper(alive=False)
    assert row_of(run.paths.root).outcome is Outcome.FAILED
    run.end("cancelled", "stopped when asked")
    assert row_of(run.paths.root).outcome is Outcome.CANCELLED


def test_a_result_that_was_cut_leaves_what_the_events_say(run: WrittenRun) -> None:
    finished(run)
    run.paths.result.write_text('{"sta')
    row = row_of(run.paths.root)
    assert (row.outcome, row.steps) == (Outcome.SUCCEEDED, 3), "the keeper's report has the end"
    run.keeper(alive=False)
    row = row_of(run.paths.root)
    assert (row.outcome, row.steps) == (Outcome.FAILED, 3)
    assert says(row.reason, "the keeper died before the run ended")


def test_what_is_no_number_is_not_a_figure(run: WrittenRun) -> None:
    row = finished(run, eval_loss=float("nan"), train_samples_per_s=float("inf"))
    assert (row.eval_loss, row.train_samples_per_s, row.steps) == (None, None, 3)


def test_equal_keys_mean_equal_work(tmp_path: Path) -> None:
    job = FineTune(technique="zero1")
    spec = RunSpec(cluster=ClusterSpec(count=3), job=job)
    elsewhere = {"kind": "local", "address": "10.0.0.7"}
    others = (
        RunSpec(cluster=ClusterSpec(count=5, lease_s=60.0), job=job, pods=3),
        RunSpec(cluster=ClusterSpec(count=3, backend=elsewhere), job=job),
        spec.to_dict(),
        {"cluster": {"count": 3}, "job": {"technique": "zero1"}},
    )
    assert {key_of(other) for other in others} == {key_of(spec)}
    other_work = (
        RunSpec(cluster=ClusterSpec(count=3), job=job, pods=2),
        RunSpec(cluster=ClusterSpec(count=3), job=FineTune(technique="zero2")),
        RunSpec(cluster=ClusterSpec(count=3), job=FineTune(technique="zero1", seed=1)),
        RunSpec(cluster=ClusterSpec(count=3, backend={"kind": "kubernetes"}), job=job),
        RunSpec(cluster=ClusterSpec(count=3), job=script_job(path=str(tmp_path / "a.py"))),
    )
    assert len({key_of(other) for other in (spec, *other_work)}) == len(other_work) + 1


def test_a_folder_has_one_key_however_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    keys = {
        key_of({"job": {"model": name}}) for name in ("model", "./model", str(tmp_path / "model"))
    }
    assert len(keys) == 1


def test_a_skipped_row_says_why_and_what_it_would_have_needed() -> None:
    spec = RunSpec(
        cluster=ClusterSpec(count=2),
        job=FineTune(technique="ddp", peft="lora", model="tiny-llama", seed=4),
    )
    row = skipped_row(spec, "predicted 41 GiB of a pod's 16", 41.0)
    assert (row.outcome, row.path, row.predicted_memory_gib) == (Outcome.SKIPPED, None, 41.0)
    assert (row.name, row.key, row.technique, row.pods, row.world_size) == (
        key_of(spec),
        key_of(spec),
        "ddp lora",
        2,
        2,
    )
    assert (row.global_batch_size, row.provenance.seed, row.duration_s) == (16, 4, None)


def damaged(folder: Path, chance: random.Random) -> Iterator[str]:
    """Damage every file of a run in turn, a different way each time; give what was done."""
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        whole = path.read_bytes()
        pieces = [
            b"",
            b"null",
            b"[1]",
            b'{"state": 7, "hosts": 3, "error": "x", "job": []}',
            b"\xff\xfe{",
        ]
        pieces += [whole[: chance.randrange(len(whole) + 1)] for _ in range(3)]
        # Each value of another kind than it should be.
        pieces += [whole.replace(b'": "', b'": ["x"], "_": "', 2), whole.replace(b": 3", b": {}")]
        for piece in pieces:
            path.write_bytes(piece)
            yield f"{path.name} = {piece[:60]!r}"
        path.unlink()
        yield f"no {path.name}"
        path.write_bytes(whole)


@pytest.mark.parametrize("state", ["running", "succeeded", "failed"])
def test_no_damage_to_a_directory_raises(run: WrittenRun, state: str) -> None:
    run.event("start", family="causal", global_batch_size=24, versions={"torch": "2.13.0"})
    run.event("eval", step=0, eval_loss=8.0)
    run.event("device", name="AMD EPYC")
    run.event("traffic", sent_bytes=700, steps=7, ranks_on_pod=1)
    run.paths.profile.write_text(SAMPLE.read_text()[:2000])
    write_json(run.paths.origin, {"commit": "c0ffee", "data": "0123", "script": ""})
    run.step(3)
    run.state("running")
    if state != "running":
        run.end(
            state,
            steps=3,
            peak_memory_gib={"127.0.0.2": 3},
            error={"kind": "MemoryError", "rank": 3},
            profiled_tokens=3,
            padded_tokens_per_s=3.0,
            devices=3,
        )
    assert row_of(run.paths.root).steps == 3
    for what in damaged(run.paths.root, random.Random(0)):
        try:
            row = row_of(run.paths.root)
            assert (
                BenchmarkRow.read(json.loads(json.dumps(row.to_dict(), default=str))).outcome
                is row.outcome
            )
        except Exception as error:
            raise AssertionError(f"{what}: {error!r}") from error
    shutil.rmtree(run.paths.root)
    assert row_of(run.paths.root).outcome is Outcome.FAILED
