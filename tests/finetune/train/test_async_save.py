"""Checkpoints that a thread writes: the same files, and the same promises as without the thread."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.fakes.smalldisk import small_disk
from tests.support.forkedruns import Plan, Ran
from tests.support.sentences import sentence
from workbench import FineTune
from workbench.base.errors import ConfigError
from workbench.finetune.deepspeed.check import check
from workbench.finetune.plan.memory import need_of
from workbench.finetune.plan.setting import setting_of
from workbench.finetune.techniques.sizes import BEGIN, Parameters, Trace
from workbench.finetune.train import checkpoints
from workbench.finetune.train.checkpoints import Checkpoints
from workbench.rundir.checkpoints import choose_newest, number_in, read_own

pytestmark = pytest.mark.slow
COMMON = {
    "max_steps": 5,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "predict_rows": 0,
    "profile_step": 0,
    "save_steps": 2,
}
RANKS = {"single": 1, "zero1": 2, "fsdp": 2, "ddp": 2, "zero3": 2, "zero3-offload": 2}
RANKS["local-sgd"] = 2
QUICK = ("single", "zero1", "fsdp")
NAMES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in RANKS]
WAYS = {"waits": False, "beside": True}


@pytest.fixture(scope="module")
def ran(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[dict[str, Ran]]:
    selected = [item for item in request.session.items if item.path == request.path]
    all_of_them = any(item.get_closest_marker("long") for item in selected)
    plan = Plan(tmp_path_factory.mktemp("async"))
    for name, ranks in RANKS.items():
        if name not in QUICK and not all_of_them:
            continue
        own = {"local_sgd": {"sync_steps": 3}} if name == "local-sgd" else {}
        for way, beside in WAYS.items():
            options: dict[str, Any] = {**COMMON, **own, "technique": name, "async_save": beside}
            plan.add(f"{name}-{way}", ranks, **options)
        resumed: dict[str, Any] = {**COMMON, **own, "technique": name, "resume": "a run"}
        plan.add(f"{name}-on", ranks, **{**resumed, "save_steps": 0})
        plan.runs[-1]["checkpoint"] = str(plan.root / f"{name}-beside" / "checkpoints" / "step-4")
    best: dict[str, Any] = {**COMMON, "save_steps": 1, "save_total_limit": 1, "eval_steps": 1}
    best |= {"technique": "single", "load_best_model_at_end": True}
    for way, beside in WAYS.items():
        plan.add(f"best-{way}", 1, async_save=beside, **best)
    with ExitStack() as mounted:
        if os.geteuid() == 0:
            plan.add("full", 1, technique="single", async_save=True, **COMMON)  # type: ignore[arg-type]
            # Room for one checkpoint of the tiny model, and not for two.
            mounted.enter_context(small_disk(plan.root / "full" / "checkpoints", "16m"))
        yield plan.run()


def files(run: Ran) -> dict[str, bytes]:
    folder = run.folder / "checkpoints"
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.mark.parametrize("name", [*NAMES, "best"])
def test_losses_and_files_are_those_of_a_run_that_waits(ran: dict[str, Ran], name: str) -> None:
    waits, beside = ran[f"{name}-waits"], ran[f"{name}-beside"]
    for run in (waits, beside):
        assert set(run.exit_codes.values()) == {0}, run.stderr()
    assert len(set(waits.curve("loss"))) == 5, "a curve of one value would show nothing"
    for figure in ("step", "loss", "grad_norm", "learning_rate"):
        assert beside.curve(figure) == waits.curve(figure)
    counted = [[(e["step"], e["bytes"]) for e in run.data("checkpoint")] for run in (waits, beside)]
    assert counted[0] == counted[1]
    assert len(files(waits)) >= 3
    assert files(beside) == files(waits)
    assert not list((beside.folder / "checkpoints").rglob("*.part"))


@pytest.mark.parametrize("name", NAMES)
def test_a_run_resumes_from_such_a_checkpoint_to_the_last_digit(
    ran: dict[str, Ran], name: str
) -> None:
    rest = ran[f"{name}-on"]
    assert set(rest.exit_codes.values()) == {0}, rest.stderr()
    assert rest.curve("loss") == ran[f"{name}-waits"].curve("loss")[4:]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a small file system")
def test_a_disk_that_fills_in_the_thread_is_reported(ran: dict[str, Ran]) -> None:
    run = ran["full"]
    assert run.exit_codes == {0: 0}, run.stderr()
    assert [event["step"] for event in run.data("checkpoint")] == [2]
    (failed,) = run.data("checkpoint_failed")
    assert failed["step"] == 4
    assert "is full" in str(failed["message"])
    assert [path.parent.name for path in (run.folder / "checkpoints").glob("*/*")] == ["step-2"]


class FakeTrainer:
    """Trainer with one weight, as far as a checkpoint reads a trainer."""

    def __init__(self) -> None:
        self.weight = torch.zeros(4)
        self.technique = SimpleNamespace(snapshot=lambda _trainer, rank: {"weight": self.weight})
        self.lr_scheduler = SimpleNamespace(state_dict=dict)
        self.state = SimpleNamespace(global_step=2, epoch=0.5)
        self.args = SimpleNamespace(device=torch.device("cpu"))
        self.eval_losses: dict[int, float] = {}
        self.best = SimpleNamespace(state=dict, step=None, kept=None, wanted=False)


def newest(folder: Path) -> int | None:
    named = sorted((folder / "checkpoints").glob("step-*/rank-0"))
    steps = {number_in(part.parent.name, "step"): {0: ("pod-0", part)} for part in named}
    found, _ = choose_newest(steps, read_own)
    return None if found is None else found.step


def test_a_step_changes_weights_while_the_thread_writes_the_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write = threading.Event()
    write = checkpoints._write

    def late(*given: Any) -> Any:
        assert may_write.wait(60)
        return write(*given)

    monkeypatch.setattr(checkpoints, "_write", late)
    trainer = FakeTrainer()
    saving = Checkpoints(tmp_path, every=2, resumes=False, beside=True)
    saving.save(trainer)
    assert not saving.is_there()
    trainer.weight += 1
    assert newest(tmp_path) is None
    may_write.set()
    saving.finish(trainer)
    part = tmp_path / "checkpoints" / "step-2" / "rank-0"
    assert checkpoints.read_tree(part)["engine"]["weight"].tolist() == [0, 0, 0, 0]
    assert newest(tmp_path) == 2


def test_an_error_of_the_thread_ends_training_with_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise ZeroDivisionError("of the thread")

    monkeypatch.setattr(checkpoints, "write_packed", broken)
    trainer = FakeTrainer()
    saving = Checkpoints(tmp_path, every=2, resumes=False, beside=True)
    saving.save(trainer)
    trainer.state.global_step = 4
    with pytest.raises(ZeroDivisionError, match="of the thread"):
        saving.save(trainer)


@pytest.mark.parametrize("where", ["write_packed", "write_manifest"])
def test_a_kill_while_the_thread_writes_leaves_the_checkpoint_before(
    tmp_path: Path, where: str
) -> None:
    reached = tmp_path / "reached"
    child = os.fork()
    if child == 0:
        trainer = FakeTrainer()
        saving = Checkpoints(tmp_path, every=2, resumes=False, beside=True)
        saving.save(trainer)
        saving.finish(trainer)

        def stands(*_: Any, **__: Any) -> None:
            reached.touch()
            time.sleep(60)

        setattr(checkpoints, where, stands)
        trainer.state.global_step = 4
        saving.save(trainer)
        time.sleep(60)
        os._exit(1)
    began = time.monotonic()
    while not reached.exists() and time.monotonic() - began < 30:
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert newest(tmp_path) == 2
    assert (tmp_path / "checkpoints" / "step-4" / "rank-0.part").is_dir()


@pytest.mark.parametrize(
    ("technique", "pods", "wanted"),
    [
        ("single", 1, 12 * 100),
        ("ddp", 2, 12 * 100),
        ("zero1", 2, 12 * 50),
        ("fsdp", 2, 12 * 50),
        ("zero3", 2, 12 * 50),
    ],
)
def test_a_plan_counts_the_copy(technique: str, pods: int, wanted: int) -> None:
    of_layer = Parameters(
        frozen=0, trained=100, packed=0, largest=100, largest_packed=0, small={100: 1}
    )
    trace = Trace(moments={"fp32": [BEGIN]}, layers=[], rest=of_layer)
    host = []
    for beside in (False, True):
        job = FineTune(technique=technique, async_save=beside)  # type: ignore[arg-type]
        host.append(need_of(setting_of(job, pods=pods, gpus=0), trace, 1).host.total)
    assert host[1] - host[0] == wanted


def test_useless_or_contradicting_options_are_refused() -> None:
    with pytest.raises(ConfigError, match=sentence("drop save_steps or async_save")):
        FineTune(async_save=True, save_steps=0)
    zero = {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/disk"}}
    job = FineTune(technique="zero3-offload", async_save=True)
    with pytest.raises(ConfigError, match=sentence("drop async_save")):
        check({"zero_optimization": zero}, job, source="the JSON", gpus=1)
