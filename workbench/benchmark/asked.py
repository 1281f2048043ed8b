"""What a spec asks for: the columns of a row that are known before anything runs, and the fingerprint of the work.

It reads no run; of the model's folder only whether it is there and of what family.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from workbench.base.errors import WorkbenchError
from workbench.base.loose import Json, part, text, whole
from workbench.jobs.choices import LossOn, Peft, Technique
from workbench.jobs.finetune import Script, job_from_dict
from workbench.jobs.model import Family, model_family
from workbench.pods.pod import PodSpec
from workbench.rundir.spec import RunSpec

__all__ = ["columns_asked", "key_of", "places", "raw_spec", "whole_job"]


def key_of(spec: RunSpec | Json) -> str:
    """Return the fingerprint of what a spec asks for: equal texts mean the same work on the same number of pods.

    Example:
        >>> short = {"cluster": {"count": 3}, "job": {"technique": "zero1"}}
        >>> key_of(short) == key_of({"cluster": {"count": 5}, "job": {"technique": "zero1", "seed": 0}, "pods": 3})
        True
        >>> key_of(short) == key_of({"cluster": {"count": 3}, "job": {"technique": "zero1", "seed": 1}})
        False
    """
    raw = raw_spec(spec)
    job, cluster = whole_job(raw), part(raw, "cluster")
    pods, _ = places(raw)
    backend = text(part(cluster, "backend").get("kind")) or "local"
    pod = dict(part(cluster, "pods"))
    with suppress(WorkbenchError, TypeError):
        pod = PodSpec.from_dict(pod).to_dict()
    what = {"job": _absolute(job), "pods": pods, "pod": pod, "backend": backend}
    return hashlib.sha256(json.dumps(what, sort_keys=True, default=str).encode()).hexdigest()[:16]


def raw_spec(spec: RunSpec | Json) -> Json:
    """Return the JSON form of a specification."""
    return spec.to_dict() if isinstance(spec, RunSpec) else spec


def whole_job(spec: Json) -> Json:
    """Return the job of a spec with every default spelled out."""
    job = part(spec, "job")
    with suppress(WorkbenchError, TypeError):
        return job_from_dict(job).to_dict()
    return job


def _absolute(job: Json) -> dict[str, object]:
    # A folder is kept as an absolute path once it is submitted.
    def place(value: object) -> object:
        with suppress(OSError, ValueError):
            path = Path(value).expanduser() if isinstance(value, str) and value else None
            if path is not None and path.exists():
                return str(path.absolute())
        return value

    return {name: place(value) if name in _PATHS else value for name, value in job.items()}


_PATHS = ("model", "dataset", "deepspeed", "resume", "path")


def places(spec: Json) -> tuple[int, int]:
    """Return the pods that a spec takes, and the ranks on all of them."""
    job, cluster = part(spec, "job"), part(spec, "cluster")
    if job.get("technique") == Technique.SINGLE:
        return 1, 1
    pods = whole(spec.get("pods")) or whole(cluster.get("count")) or 1
    return pods, pods * max(1, whole(part(cluster, "pods").get("gpus")) or 0)


def columns_asked(spec: Json) -> dict[str, object]:
    """Return the columns that are known before anything runs."""
    if not part(spec, "job"):
        return {}
    job = whole_job(spec)
    pods, slots = places(spec)
    launcher = text(job.get("launcher")) or "ssh"
    if job.get("kind") == Script.kind:
        name = Path(text(job.get("path"))).name
        return {"model": name, "technique": "script", "launcher": launcher, "pods": pods, "slots": slots}
    micro = whole(job.get("per_device_train_batch_size"))
    accumulation = whole(job.get("gradient_accumulation_steps"))
    return {
        "model": text(job.get("model")),
        "technique": _technique(job),
        "precision": text(job.get("precision")),
        "launcher": launcher,
        "pods": pods,
        "slots": slots,
        "per_device_batch": micro,
        "accumulation": accumulation,
        "global_batch": micro * accumulation * slots if micro and accumulation else None,
        "sequence": _sequence(job),
        "dataset": _dataset(job.get("dataset")),
    }


def _technique(job: Json) -> str:
    peft = text(job.get("peft"))
    return f"{text(job.get('technique'))} {'' if peft == Peft.NONE else peft}".strip()


def _sequence(job: Json) -> str:
    source, target = whole(job.get("max_source_length")), whole(job.get("max_target_length"))
    if source is None or target is None:
        return ""
    said = f"source {source}, target {target}, padded to the longest"
    with suppress(OSError, ValueError):
        if model_family(text(job.get("model"))) is Family.ENCODER_DECODER:
            return said
    prompt, learns = text(job.get("prompt")), text(job.get("loss_on"))
    said += f", prompt {prompt}" if prompt not in ("", "plain") else ""
    return said + (f", loss on {learns}" if learns not in ("", LossOn.ANSWER) else "")


def _dataset(value: object) -> str:
    if not isinstance(value, Mapping):
        return text(value)
    kind, rest = value.get("kind"), [f"{name}={each}" for name, each in value.items() if name != "kind"]
    return " ".join([text(kind), *rest])
