"""The message when memory runs out or numbers leave their range: the cause, and fixes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.disks import folder_on_disk
from tests.support.sentences import says
from workbench import FineTune, Script
from workbench.rundir.spec import RunSpec
from workbench.rundir.state import RunState

if TYPE_CHECKING:
    from .conftest import World

pytestmark = pytest.mark.slow

# What torch says when a GPU is full, raised in the second step of a training that has none.
OUT_OF_MEMORY = """
import os
if os.environ.get("RANK") == "0":
    import torch
    backward, calls = torch.Tensor.backward, []
    def full(self, *args, **options):
        calls.append(1)
        if len(calls) == 2:
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity "
                "of 79.19 GiB of which 1.23 GiB is free. Of the allocated memory 70 GiB "
                "is allocated by PyTorch.")
        return backward(self, *args, **options)
    torch.Tensor.backward = full
"""
# In the fifth step the loss is no number, as with a row that the arithmetic cannot bear.
NOT_A_NUMBER = """
import os
if os.environ.get("RANK") == "0":
    import torch
    log_softmax, calls = torch.nn.functional.log_softmax, []
    def poisoned(*args, **options):
        # The loss of a training step computes its logarithms once.
        calls.append(1)
        logs = log_softmax(*args, **options)
        return logs * float("nan") if len(calls) == 5 else logs
    torch.nn.functional.log_softmax = poisoned
"""
# DeepSpeed's own scaler, at the end of what it can do, told of one more step that overflowed.
OVERFLOW = """
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
scaler = DynamicLossScaler(
    init_scale=1, scale_window=1000, min_scale=1, delayed_shift=1, consecutive_hysteresis=False
)
scaler.update_scale(True)
"""
SHARED_MEMORY = """
import mmap, os
with open("/dev/shm/batch", "wb+") as file:
    file.truncate(16 << 20)
    batch = mmap.mmap(file.fileno(), 16 << 20)
    for at in range(0, len(batch), 4096):
        batch[at] = 1
"""
IN_A_SMALL_PLACE = """
import sys
from workbench import Cluster, LocalPods, Script
with Cluster(LocalPods(), count=1, path=sys.argv[1], warm=False) as cluster:
    run = cluster.submit(Script(path=sys.argv[2]))
    print(run.wait(300, progress=False).error)
    print(run)
"""


@pytest.mark.long
def test_a_full_gpu_is_told_with_figures_and_fixes(world: World, tmp_path: Path) -> None:
    """Row 8. The words are torch's; everything after them is real."""
    (tmp_path / "sitecustomize.py").write_text(OUT_OF_MEMORY)
    run = world.cluster.submit(training(env={"PYTHONPATH": str(tmp_path)}), pods=1)
    result = world.ended(run, 180)
    assert result.state is RunState.FAILED
    assert result.error is not None
    assert (result.error.kind, result.error.rank, result.error.pod) == (
        "OutOfMemoryError",
        0,
        "pod-0",
    )
    shown = str(run)
    assert "Out of GPU memory: rank 0 on pod-0 (127.0.0.2)" in shown
    assert "memory: 2.50 GiB asked for, 1.23 GiB free, 79.19 GiB in all" in shown
    assert (
        "per_device_train_batch_size=2, gradient_accumulation_steps=2: the same global batch"
        in shown
    )
    assert RunSpec.load(run.paths.spec).job.per_device_train_batch_size == 4  # type: ignore[union-attr]


@pytest.mark.long
def test_a_loss_that_is_no_number_names_rank_and_step_and_spoils_no_checkpoint(
    world: World, tmp_path: Path
) -> None:
    """Row 10."""
    (tmp_path / "sitecustomize.py").write_text(NOT_A_NUMBER)
    env = {"PYTHONPATH": str(tmp_path)}
    run = world.cluster.submit(training(env=env, save_steps=2), pods=1)
    result = world.ended(run, 180)
    assert result.state is RunState.FAILED
    assert result.error is not None
    assert result.error.rank == 0
    assert "loss is nan on rank 0 at step 5" in result.error.message
    assert says(result.message, "resume=run.path continues from the checkpoint of step", 4)
    assert says(run, "The loss is no longer a number")


def training(**options: object) -> FineTune:
    small = {"kind": "wikisql-mini", "train_rows": 60, "eval_rows": 2}
    short: dict[str, object] = {
        "max_steps": 6,
        "per_device_train_batch_size": 4,
        "predict_rows": 0,
        "profile_step": 0,
    }
    return FineTune(**{"dataset": small, "technique": "single", **short, **options})  # type: ignore[arg-type]


@pytest.fixture
def disk() -> Iterator[Path]:
    with folder_on_disk() as folder:
        yield Path(folder)


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None,
    reason="needs root and unshare, for a /dev/shm of its own",
)
def test_shared_memory_that_is_too_small_is_told(disk: Path) -> None:
    """Row 9. Pods, keeper and all see a /dev/shm of 1 MiB; a rank writes 16 into it."""
    script = disk / "script" / "shared.py"
    script.parent.mkdir()
    script.write_text(SHARED_MEMORY)
    words = ["mount -t tmpfs -o size=1m,mode=1777 faults /dev/shm", 'exec "$@"']
    inside = [sys.executable, "-c", IN_A_SMALL_PLACE, str(disk / "c"), str(script)]
    argv = ["unshare", "--mount", "sh", "-c", " && ".join(words), "sh", *inside]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "killed by SIGBUS; often shared memory that is too small: /dev/shm has " in done.stdout
    assert int(done.stdout.partition("/dev/shm has ")[2].split()[0]) <= 1
    assert "Shared memory is too small: rank 0 on pod-0" in done.stdout
    assert "--shm-size" in done.stdout


@pytest.mark.long
def test_numbers_beyond_fp16_are_told_in_a_plain_sentence(world: World, tmp_path: Path) -> None:
    """Row 11. DeepSpeed's own exception."""
    (tmp_path / "overflow.py").write_text(OVERFLOW)
    run = world.cluster.submit(Script(path=str(tmp_path / "overflow.py")), pods=1)
    result = world.ended(run, 120)
    assert result.state is RunState.FAILED
    assert result.error is not None
    assert "loss scale already at minimum" in result.error.message
    shown = str(run)
    assert "Numbers left the range of fp16: rank 0 on pod-0" in shown
    assert says(shown, "bf16, which has the range of fp32")
