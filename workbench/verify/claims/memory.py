"""Claims about memory: offload, a prediction beside a measurement, the panel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workbench.verify.claims.jobs import tiny
from workbench.verify.claims.techniques import follows, on_device
from workbench.verify.figures import Broken, Cannot, engine
from workbench.verify.pods import Pods
from workbench.verify.ranks.collectives import held_memory
from workbench.verify.ranks.kernels import growing_blocks
from workbench.verify.ranks.models import write_llama
from workbench.verify.row import Row

if TYPE_CHECKING:
    from workbench import FineTune
    from workbench.results import FineTuneRun

_SIZES = {True: (768, 12), False: (256, 4)}
"""Hidden size and layers of the measured model, on GPUs and on CPUs."""
_HOLD_GIB = 1.0
_HOLD_S = 14.0
"""The driver is asked every 5 s."""
_BETWEEN = (0.5, 1.15)
"""Measured memory relative to the prediction. More than the prediction may not fit."""


def _offload_zero2(pods: Pods) -> str:
    pods.need_compiler()
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": pods.has_gpus}}
    run = pods.train(tiny(pods, "zero2", deepspeed={"zero_optimization": zero}))
    on_device(pods, run)
    words = follows(run, pods.train(tiny(pods, "single")))
    return f"{words}; {_on_host(run)}"


def _offload_fsdp(pods: Pods) -> str:
    pods.need_gpus("offload of fsdp has no effect on CPUs")
    run = pods.train(tiny(pods, "fsdp", fsdp={"offload": True}))
    words = follows(run, pods.train(tiny(pods, "single")))
    return f"{words}; {_on_host(run)}"


def _on_host(run: FineTuneRun) -> str:
    devices = engine(run)["updated"]["devices"]
    if list(devices) != ["cpu"]:
        raise Broken(f"the optimizer updates on {', '.join(devices)}, not on the host")
    return "the host updates"


def _predicted_memory(pods: Pods) -> str:
    from workbench import plan

    job = _measured_job(pods)
    result = pods.train(job).result
    spec = pods.main.spec
    # Any size of a GPU asks for the plan on GPUs: only the need of the job is read.
    (need,) = plan(
        job,
        pods=spec.count,
        gpus=spec.pods.slots,
        gpu_memory_gib=1.0 if pods.has_gpus else None,
        techniques=[job.technique],
    ).rows
    predicted = need.pod_gpu_gib if result.memory_kind == "cuda" else need.host_gib
    if predicted is None or not result.peak_memory_gib:
        raise Broken("the result has no prediction or no measured peak")
    measured = max(result.peak_memory_gib.values())
    driver = [gpu.peak_gib for gpu in result.gpus if gpu.peak_gib is not None]
    words = f"predicted {predicted:.2f} GiB, measured {measured:.2f} ({result.memory_kind})"
    if driver:
        words += f", by the driver {max(driver):.2f}"
    least, most = _BETWEEN
    if not least * predicted <= measured <= most * predicted:
        raise Broken(f"{words}; allowed {least:g} to {most:g} times the prediction")
    return words


def _measured_job(pods: Pods) -> FineTune:
    from workbench import Function
    from workbench.wikisql import mini_rows

    hidden, layers = _SIZES[pods.has_gpus]
    texts = [f"{row.source} {row.target}" for row in mini_rows(0, 400)]
    made = pods.submit(Function(write_llama, (hidden, layers, texts)), pods=1)
    pods.wait(made)
    folder = made.paths.outputs / "model"
    if not folder.is_dir():
        raise Broken(f"the model was not copied back to {folder}")
    # A prediction is about rows of the job's full length, so the rows are packed to that length.
    return tiny(
        pods,
        "ddp",
        model=str(folder),
        packing=True,
        max_source_length=96,
        max_steps=4,
        per_device_train_batch_size=8,
    )


def _panel(pods: Pods) -> str:
    from workbench import Function

    run = pods.submit(Function(held_memory, (_HOLD_GIB, _HOLD_S)), pods=1)
    result = pods.wait(run)
    pods.note(result.world_size)
    text = str(run)
    if not pods.has_gpus:
        peak = max(result.host_memory_gib.values(), default=0.0)
        if peak < _HOLD_GIB:
            raise Broken(f"{_HOLD_GIB:g} GiB were in use, and the result has {peak:.2f}")
        if "memory" not in text:
            raise Broken("the panel has no memory")
        raise Cannot(f"no CUDA device on the pods; host memory in the panel: {peak:.2f} GiB")
    peaks = [gpu.peak_gib or 0.0 for gpu in result.gpus]
    if len(peaks) < result.world_size or min(peaks) < _HOLD_GIB:
        raise Broken(f"every GPU had {_HOLD_GIB:g} GiB in use, and the result has {peaks}")
    if "GPUs, by their driver" not in text:
        raise Broken("the panel has no table of GPUs")
    return f"{len(peaks)} GPUs in the panel, peak {max(peaks):.2f} GiB"


def _growing_blocks(pods: Pods) -> str:
    pods.need_gpus()
    returned = pods.call(growing_blocks)
    if not all(returned):
        raise Broken("the allocator's blocks do not grow; is PYTORCH_CUDA_ALLOC_CONF set?")
    return f"on {len(returned)} ranks"


ROWS = (
    Row("memory", "growing-blocks", "blocks of torch's allocator grow", _growing_blocks),
    Row(
        "memory",
        "offload-zero2",
        "zero2 with offload_optimizer updates on the host",
        _offload_zero2,
        300.0,
    ),
    Row("memory", "offload-fsdp", "fsdp with offload updates on the host", _offload_fsdp),
    Row(
        "memory",
        "predicted-memory",
        "the measured peak is near the prediction",
        _predicted_memory,
        240.0,
    ),
    Row("memory", "memory-in-panel", "the panel shows the memory of every GPU", _panel),
)
