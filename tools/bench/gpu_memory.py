"""Planned beside measured memory of a GPU, technique by technique.

`python -m tools.bench.gpu_memory FOLDER [HIDDEN]`.

A Llama of random weights, by default with the sizes of Llama-3.2-1B, trains 6 steps of 4 packed
rows of 1,024 tokens in bf16 on a pod with a GPU. FOLDER takes the model, the cluster and its runs.
A small HIDDEN tries the command on a CPU. Nothing here is a test, and no test is timed.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from workbench import Cluster, FineTune, Function, LocalPods, PodSpec
from workbench.base.json_values import as_float
from workbench.base.machine.seats import gpus_here
from workbench.finetune.plan.plan import predict
from workbench.finetune.techniques.sizes import CONTEXT_BYTES
from workbench.results import FineTuneRun
from workbench.verify.ranks.models import write_llama
from workbench.wikisql import mini_rows

JOBS: dict[str, dict[str, Any]] = {
    "single": {"technique": "single"},
    "single, LoRA": {"technique": "single", "peft": "lora"},
    "zero2": {"technique": "zero2"},
    "zero3": {"technique": "zero3"},
    "fsdp": {"technique": "fsdp"},
    "zero3-offload": {"technique": "zero3-offload"},
}
KINDS = ("allocated", "reserved")
_GIB = 2**30


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    folder = Path(sys.argv[1]).absolute()
    hidden = int(sys.argv[2]) if len(sys.argv) > 2 else 2048
    gpus = min(1, len(gpus_here(None)))
    model = folder / "model"
    spec = PodSpec(cpus=1 if not gpus else 8, gpus=gpus)
    with Cluster(LocalPods(), spec, path=folder / "cluster") as cluster:
        _made(cluster, hidden).rename(model)
        print("GiB of the GPU       planned  allocated  reserved  s a step")
        for name, options in JOBS.items():
            measured = job(model, options)
            need = predict(measured, pods=1, gpus=gpus)
            planned_gib = (need.pod_gpu_gib or need.host_gib) if need else 0.0
            run = cluster.submit(measured)
            result = run.wait(progress=False).raise_for_status()
            planned = planned_gib - CONTEXT_BYTES * gpus / _GIB
            allocated, reserved = (_peak(run, f"cuda_{kind}_gib") for kind in KINDS)
            print(
                f"{name:20} {planned:7.2f} {allocated:10.2f} {reserved:9.2f} "
                f"{result.step_s or 0.0:9.2f}",
                flush=True,
            )


def job(model: Path, options: dict[str, Any]) -> FineTune:
    return FineTune(
        model=str(model),
        dataset={"kind": "wikisql-mini", "train_rows": 4000, "eval_rows": 8},
        precision="bf16",
        max_steps=6,
        learning_rate=1e-5,
        per_device_train_batch_size=4,
        max_source_length=768,
        max_target_length=256,
        packing=True,
        loss_on="all",
        eval_strategy="no",
        predict_rows=0,
        profile_step=0,
        **options,
    )


def _made(cluster: Cluster, hidden: int) -> Path:
    is_small = hidden < 2048
    shape = {
        "vocab_size": 4096 if is_small else 128_256,
        "intermediate_size": 4 * hidden,
        "num_key_value_heads": max(1, hidden // 256),
        "tie_word_embeddings": True,
        "max_position_embeddings": 4096,
    }
    texts = [f"{row.source} {row.target}" for row in mini_rows(0, 400)]
    layers = 2 if is_small else 16
    run = cluster.submit(Function(write_llama, (hidden, layers, texts, shape, "bfloat16")))
    run.wait(progress=False).raise_for_status()
    return run.paths.outputs / "model"


def _peak(run: FineTuneRun, figure: str) -> float:
    """Return the highest value of a figure in the run's events of memory."""
    values = [as_float(event.data.get(figure)) for event in run.events() if event.kind == "memory"]
    return max((value for value in values if value is not None), default=0.0)


if __name__ == "__main__":
    main()
