"""Run `workbench.finetune.plan.trace.trace` in a child process and cache its answers on disk."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from workbench.base import entries
from workbench.base.child import replies
from workbench.base.errors import ConfigError, WorkbenchError, require_package
from workbench.base.files import read_json, write_json
from workbench.finetune.techniques.sizes import Moment, Parameters, Trace

logger = logging.getLogger(__name__)
Request = Mapping[str, Any]
Answer = Mapping[str, Any]
"""Answer of the tracing process as JSON.

`points` maps an arithmetic to its moments, `sizes` lists the parameters, and `failed` holds
the error of every arithmetic without points. `piece_rows` is the number of rows that are scored at
once, None for all, and `row_tokens` the number of scored tokens of a row. `part` is the same for
layers spread over GPUs.
"""

# A configuration or template of another person may ask for any amount of memory.
_MEMORY_BYTES = 16 << 30
_LIMIT_S = 300.0
# Format of the cached files. A new number makes the older files be ignored.
_FORM = 7


def cached_trace(request: Request) -> Trace | None:
    """Return the cached trace of a single arithmetic, or None if none is cached."""
    answer = cached_answer(request)
    return None if answer is None else trace_of([answer])


def cached_answer(request: Request) -> Answer | None:
    answer = read_json(_place(request))
    try:
        trace_of([answer])
    except (ValueError, KeyError, TypeError, AttributeError):  # a damaged file, or none
        return None
    return answer


def trace_step(request: Request) -> Trace:
    """Trace a training step in a child process, or return the cached trace. Takes some seconds."""
    answers = {part["arithmetic"][0]: cached_answer(part) for part in _parts(request)}
    missing = [arithmetic for arithmetic, answer in answers.items() if answer is None]
    failed: Mapping[str, str] = {}
    if missing:
        rest = {**request, "arithmetic": missing}
        answer = _ask(rest)
        answers |= remember(rest, answer)
        failed = answer.get("failed", {})
    return replace(
        trace_of([answer for answer in answers.values() if answer is not None]), failed=failed
    )


def trace_of(answers: Sequence[Answer]) -> Trace:
    """Merge the answers of tracing processes to the same request into a trace."""
    first = answers[0]
    sizes = first["sizes"]
    moments = {}
    for answer in answers:
        for name, points in answer["points"].items():
            moments[name] = [Moment(*values) for values in points]
    part = None
    if "part" in first:
        part = trace_of([answer["part"] for answer in answers])
    return Trace(
        moments=moments,
        layers=[_parameters(layer) for layer in sizes["layers"]],
        rest=_parameters(sizes["rest"]),
        piece_rows=first.get("piece_rows"),
        row_tokens=first.get("row_tokens", 0),
        part=part,
        gpus=first.get("gpus", 1),
        unplaced=first.get("unplaced", ""),
    )


def remember(request: Request, answer: Answer) -> dict[str, Answer]:
    """Cache the answer to a request, a file per arithmetic."""
    answers: dict[str, Answer] = {}
    for part in _parts(request):
        (name,), place = part["arithmetic"], _place(part)
        if name not in answer["points"]:  # the trace failed
            continue
        answers[name] = {**answer, "points": {name: answer["points"][name]}}
        # A cache that cannot be written costs some seconds, but the plan is still made.
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            write_json(place, answers[name])
        except OSError as error:
            logger.info("the next plan traces the model again: %s", error)
    return answers


def _ask(request: Request) -> Answer:
    require_package("torch", "a plan for a model that was not traced before", extra="worker")
    try:
        (answer,) = replies(
            entries.TRACE,
            request=request,
            limit_s=_LIMIT_S,
            memory_bytes=_MEMORY_BYTES,
        )
    except ValueError as error:
        raise WorkbenchError(f"the model cannot be traced: {error}") from error
    if "refused" in answer:
        raise ConfigError(str(answer["refused"]))
    return dict(answer)


def _parts(request: Request) -> list[Request]:
    return [{**request, "arithmetic": [name]} for name in request["arithmetic"]]


def _cache() -> Path:
    return (
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        / "deepspeed-workbench"
        / "traces"
    )


def _place(request: Request) -> Path:
    text = json.dumps(
        [_FORM, *map(_version, ("torch", "transformers", "peft")), request], sort_keys=True
    )
    return _cache() / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _parameters(entries: Sequence[Sequence[int]]) -> Parameters:
    sizes = [size for size, _, _, _ in entries]
    trained = sum(size for size, is_trained, _, _ in entries if is_trained)
    packed = [size for size, _, can_pack, _ in entries if can_pack]
    return Parameters(
        frozen=sum(sizes) - trained - sum(packed),
        trained=trained,
        packed=sum(packed),
        largest=max(sizes, default=0),
        largest_packed=max(packed, default=0),
        small=Counter(sizes),
        matrices=sum(size for size, _, _, is_matrix in entries if is_matrix),
    )
