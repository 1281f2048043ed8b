"""Print the bytes and times of a full fine-tuning at scale, by `plan`: `python -m tools.scale`.

The models are shapes alone, so nothing is downloaded and nothing runs. `docs/costs.md` has the
table, with the largest sizes that were tried.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from workbench import FineTune, plan
from workbench.base.words import duration, scaled
from workbench.finetune.plan.transfers import Transfer

__all__ = ["Case", "rows_of", "table_of"]

# https://arxiv.org/abs/2407.21783, table 3
_SHAPES = {
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "layers": 32, "heads": 32},
    "70B": {"hidden_size": 8192, "intermediate_size": 28672, "layers": 80, "heads": 64},
}
_CASES = (("8B", 1, 4), ("8B", 4, 8), ("8B", 32, 8), ("70B", 4, 8), ("70B", 32, 8))
_LINKS_GBIT = (1, 10)
# A node's NVMe, and a file server for all nodes.
_LOCAL_BYTES_PER_S = 2e9
_SHARED_BYTES_PER_S = 1.2e9
# Two checkpoints are kept while the next is written.
_KEPT = 3
_NOTICE_S = 25.0
# The largest size of a real run, by row.
_TRIED = {
    "pods": "64 local pods, without training",
    "checkpoint": "12 MiB, 3 local pods",
    "part of a rank": "4 MiB",
    "checkpoint to this machine": "12 MiB, 3 local pods",
    "model to all pods": "37 MB, 3 hosts",
    "trained model": "0.9 GB, T5 on 2 local pods",
    "checkpoint, restart and trained model, shared folder": "12 MiB, 2 local pods",
    "read by a rank at a restart, shared folder": "38 MB, parts of 4 ranks cut for 3",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A model on a number of pods."""

    name: str
    pods: int
    gpus: int
    """GPUs of a pod."""
    transfers: Sequence[Transfer]

    def of(self, what: str) -> Transfer | None:
        """Return a transfer by its name. None: the case has none."""
        return next((each for each in self.transfers if each.what == what), None)


def main() -> None:
    print(table_of([_case(*case) for case in _CASES]))


def _case(name: str, pods: int, gpus: int) -> Case:
    shape = dict(_SHAPES[name])
    config = {
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": 128256,
        "num_hidden_layers": shape.pop("layers"),
        "num_attention_heads": shape.pop("heads"),
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
        **shape,
    }
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        job = FineTune(
            model=folder,
            technique="zero3",
            precision="bf16",
            gradient_checkpointing=True,
            checkpoints="bring",
            restarts=1,
            max_source_length=512,
            max_target_length=512,
        )
        table = plan(job, pods=pods, gpus=gpus, gpu_memory_gib=79.0, techniques=["zero3"])
    return Case(name=name, pods=pods, gpus=gpus, transfers=table.row("zero3").transfers)


def rows_of(case: Case) -> dict[str, str]:
    """Return the cells of a case by the names of the rows."""
    checkpoint = case.of("checkpoint to this machine")
    assert checkpoint is not None
    whole = checkpoint.size
    local_s = checkpoint.pod / _LOCAL_BYTES_PER_S
    shared_s = whole / _SHARED_BYTES_PER_S
    gbit = 8 * whole / _NOTICE_S / 1e9
    rows = {
        "pods": str(case.pods),
        "checkpoint": scaled(whole, "B"),
        "part of a rank": scaled(whole / (case.pods * case.gpus), "B"),
        f"disk of a pod for {_KEPT} checkpoints": scaled(_KEPT * checkpoint.pod, "B"),
        f"disk of this machine for {_KEPT} checkpoints": scaled(_KEPT * whole, "B"),
        "writing a checkpoint at 2 GB/s a pod": duration(local_s),
        "writing a checkpoint at 1.2 GB/s in all": duration(shared_s),
    }
    for what in (
        "checkpoint to this machine",
        "restart, a pod replaced",
        "restart, a pod left out",
        "model to all pods",
        "trained model",
    ):
        rows[what] = _moved(case.of(what))
    model = case.of("model to all pods")
    rows["model to all pods, shared folder"] = _moved(model and replace(model, pod=model.size))
    rows["checkpoint, restart and trained model, shared folder"] = "0 B"
    ranks = case.pods * case.gpus
    rows["read by a rank at a restart, shared folder"] = scaled(whole / ranks, "B")
    rows[f"link for a copy in a notice of {_NOTICE_S:.0f} s"] = f"{gbit:.0f} Gbit/s"
    return rows


def table_of(cases: Sequence[Case]) -> str:
    """Return the table of some cases as Markdown."""
    columns = [rows_of(case) for case in cases]
    heads = [f"{case.name}, {case.pods * case.gpus} GPUs" for case in cases]
    lines = [f"| | {' | '.join(heads)} | tried up to |", "|---" * (len(cases) + 2) + "|"]
    for name in columns[0]:
        cells = [*(column[name] for column in columns), _TRIED.get(name, "not tried")]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _moved(transfer: Transfer | None) -> str:
    """Write the bytes through this machine, and their time over the slower and the faster link."""
    if transfer is None:
        return "–"
    times = [duration(transfer.seconds(gbit)) for gbit in _LINKS_GBIT]
    return f"{scaled(transfer.here, 'B')}: {' / '.join(times)}"


if __name__ == "__main__":
    main()
