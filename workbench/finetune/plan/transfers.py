"""Bytes that a job moves through this machine and through each pod, by formulas. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, log2
from pathlib import Path

from workbench.base.json_values import as_str
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.options.model.models import model_kind
from workbench.finetune.techniques.registry import technique_of
from workbench.finetune.techniques.sizes import FP32, Setting, Trace, states_of
from workbench.rundir.stores.address import protocol_of

LINK_SHARE = 0.94
"""Share of a link that carries payload: TCP over Ethernet frames of 1,500 bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Transfer:
    """Bytes of one event of a run."""

    what: str
    size: float
    """Bytes of the moved files, counted once."""
    here: float
    """Bytes through this machine."""
    pod: float
    """Bytes through the pod with the most."""

    def seconds(self, gbit_per_s: float) -> float:
        """Return the seconds at a speed of the links of this machine and of each pod.

        Example:
            >>> sent = Transfer(what="model", size=141e9, here=141e9, pod=141e9)
            >>> round(sent.seconds(10)), round(sent.seconds(1) / 60)
            (120, 20)
        """
        return 8 * max(self.here, self.pod) / (LINK_SHARE * gbit_per_s * 1e9)


def checkpoint_bytes(setting: Setting, trace: Trace) -> tuple[float, float]:
    """Return the bytes of a checkpoint, of all ranks together and of the pod with the most."""
    technique = technique_of(setting.technique)
    state = FP32 * trace.trained + states_of(setting, trace) + setting.outer_bytes * trace.trained
    pods = max(1, setting.ranks // setting.on_pod)
    # Rank 0 alone writes a state that all ranks share.
    if technique.replicates and not technique.apart and setting.sharers == 1:
        return state, state
    total = state * setting.ranks / (setting.shards * setting.sharers)
    return total, total / pods


def transfers_of(job: FineTune, setting: Setting, trace: Trace) -> Sequence[Transfer]:
    """Return what a job moves between this machine and its pods, in the order of a run."""
    pods = max(1, setting.ranks // setting.on_pod)
    found = []
    # This machine sends a file once. Without a shared folder, the pods send copies to each other,
    # and the first pod sends one in each turn.
    through = 1 if job.checkpoint_folder else 1 + ceil(log2(pods))
    kind = model_kind(job.model)
    adapters = trace.trained if trace.trained < trace.parameters else 0
    files = setting.file_bytes * (trace.parameters - adapters)
    if kind == "folder":
        pod = through * files
        found.append(Transfer(what="model to all pods", size=files, here=files, pod=pod))
    elif kind == "hub":
        # A single pod fetches the files, and passes the files on as above.
        pod = through * files
        found.append(Transfer(what="model from the hub", size=files, here=0, pod=pod))
    rows = _bytes_of_rows(job)
    if rows:
        found.append(Transfer(what="rows to all pods", size=rows, here=rows, pod=through * rows))
    found += _of_checkpoints(job, pods, *checkpoint_bytes(setting, trace))
    saved = FP32 * adapters or setting.saved_bytes * trace.parameters
    if job.checkpoint_folder:
        what = "trained model to the shared folder"
        found.append(Transfer(what=what, size=saved, here=0, pod=saved))
    else:
        found.append(Transfer(what="trained model", size=saved, here=saved, pod=saved))
    return found


def _of_checkpoints(job: FineTune, pods: int, whole: float, most: float) -> Sequence[Transfer]:
    """Return the transfers of a checkpoint of `whole` bytes, `most` of them on a single pod."""
    if job.checkpoint_folder:
        what = "checkpoint to the shared folder, and back"
        return [Transfer(what=what, size=whole, here=0, pod=most)]
    found = [Transfer(what="checkpoint to this machine", size=whole, here=whole, pod=most)]
    if job.checkpoint_store:
        what = "checkpoint to the object store"
        here = 0 if protocol_of(job.checkpoint_store) == "s3" else whole
        found.append(Transfer(what=what, size=whole, here=here, pod=most))
    found.append(Transfer(what="restart, a pod replaced", size=whole, here=most, pod=most))
    if pods > 1:
        # The remaining pods have their own parts.
        missing = whole - most if most < whole else whole
        here = (pods - 1) * missing
        found.append(Transfer(what="restart, a pod left out", size=whole, here=here, pod=missing))
    return found


def _bytes_of_rows(job: FineTune) -> int:
    """Return the bytes of the local files of a job's rows. 0: no local files."""
    others = [Path(name).expanduser() for name in (job.model, as_str(job.deepspeed)) if name]
    size = 0
    for _, path in job.views.local_files():
        if path.is_file() and not any(map(path.is_relative_to, others)):
            size += path.stat().st_size
    return size
