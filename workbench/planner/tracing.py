"""Ask `workbench.worker.trace.trace`, in its own process, what a training step holds; cache the answers on disk."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from workbench.base import entries
from workbench.base.child import child_environment
from workbench.base.errors import WorkbenchError

__all__ = [
    "Moment",
    "Parameters",
    "Trace",
    "cached_trace",
    "joined",
    "one_at_a_time",
    "places",
    "recall",
    "remember",
    "trace_step",
]

_LIMIT_S = 300.0
# No collections while modules load: torch and transformers take 3.1 s of CPU then rather than 4.0.
# And none at the end, where torch would take its modules down one by one.
_START = f"import gc, os; gc.disable(); from {entries.TRACE} import main; main(); os._exit(0)"
_FORM = 1  # of what is remembered; another number forgets what was


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """What is held at a moment of a step beside weights, gradients and optimizer states: lines over the rows."""

    base: float
    """Bytes, whatever the rows."""
    row: float
    """Bytes a row."""
    logits: float
    """Those of `base` that tensors over the vocabulary take."""
    logits_row: float
    """Those of `row`."""
    gradients: float
    """Elements of gradients that parameters have got by then."""

    def held(self, rows: int) -> float:
        """Return the bytes with that many rows."""
        return max(0.0, self.base + rows * self.row)


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameters:
    """Elements of a group of parameters: a transformer layer's, or those of no layer."""

    frozen: int
    """That are not trained and stay in whole numbers of bytes."""
    trained: int
    """That are trained."""
    packed: int
    """That are not trained and can be held in 4 bits."""
    largest: int
    """Of the largest one."""
    largest_packed: int
    """Of the largest one that can be held in 4 bits."""
    small: Mapping[int, int]
    """How many parameters there are of each number of elements."""

    @property
    def all(self) -> int:
        """Return the elements of all of them."""
        return self.frozen + self.trained + self.packed


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """What a training step of one model holds, by arithmetic, and the sizes of its parameters."""

    moments: Mapping[str, Sequence[Moment]]
    """By arithmetic, the moments that can be the highest."""
    layers: Sequence[Parameters]
    """The transformer layers."""
    rest: Parameters
    """What is in none of them: embeddings, the output layer, last norms."""

    @property
    def parameters(self) -> int:
        """Return the elements of all parameters."""
        return self.rest.all + sum(layer.all for layer in self.layers)

    @property
    def trained(self) -> int:
        """Return those that are trained."""
        return self.rest.trained + sum(layer.trained for layer in self.layers)

    @property
    def packed(self) -> int:
        """Return those that 4 bits can hold."""
        return self.rest.packed + sum(layer.packed for layer in self.layers)

    @property
    def largest(self) -> int:
        """Return the elements of the largest parameter."""
        return max(self.rest.largest, *(layer.largest for layer in self.layers))

    @property
    def largest_packed(self) -> int:
        """Return the elements of the largest parameter that 4 bits can hold."""
        return max(self.rest.largest_packed, *(layer.largest_packed for layer in self.layers))

    def no_larger_than(self, elements: int) -> int:
        """Return the elements of all parameters that have no more than so many each."""
        groups = (self.rest, *self.layers)
        return sum(size * times for group in groups for size, times in group.small.items() if size <= elements)


def cached_trace(request: Mapping[str, object]) -> Trace | None:
    """Return a trace that was made before; None where any of it was not."""
    answers = [_remembered(part) for part in _parts(request)]
    known = [answer for answer in answers if answer is not None]
    return joined(known) if known and len(known) == len(answers) else None


def recall(request: Mapping[str, object]) -> Mapping[str, object] | None:
    """Return what was remembered of a request for one arithmetic, as the tracing process gave it."""
    (part,) = _parts(request)
    return _remembered(part)


def trace_step(request: Mapping[str, object]) -> Trace:
    """Trace a training step in a process of its own, or give what was traced before. Takes some seconds."""
    answers = {arithmetic: _remembered(part) for arithmetic, part in zip(_names(request), _parts(request), strict=True)}
    missing = [arithmetic for arithmetic, answer in answers.items() if answer is None]
    if missing:
        answers |= remember({**request, "arithmetic": missing}, _ask({**request, "arithmetic": missing}))
    return joined([answer for answer in answers.values() if answer is not None])


def joined(answers: Sequence[Mapping[str, object]]) -> Trace:
    """Read what tracing processes gave for one request, each for some of its arithmetic."""
    traces = [_read(answer) for answer in answers]
    return replace(traces[0], moments={name: moments for trace in traces for name, moments in trace.moments.items()})


def places(request: Mapping[str, object]) -> dict[str, Path]:
    """Return the files that remember the answers to a request, by arithmetic."""
    return {_names(part)[0]: _place(part) for part in _parts(request)}


def remember(request: Mapping[str, object], raw: Mapping[str, object]) -> dict[str, Mapping[str, object]]:
    """Keep the answer to a request, as the tracing process gave it."""
    points = raw["points"]
    assert isinstance(points, dict)
    answers: dict[str, Mapping[str, object]] = {name: {**raw, "points": {name: points[name]}} for name in points}
    for part in _parts(request):
        (name,) = _names(part)
        place = _place(part)
        with contextlib.suppress(OSError):  # a cache that cannot be written costs seconds, not the plan
            place.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=place.parent, suffix=".part", delete=False) as file:
                json.dump(answers[name], file)
            Path(file.name).replace(place)
    return answers


def _ask(request: Mapping[str, object]) -> Mapping[str, object]:
    # One thread: fake tensors compute nothing. No GPU: none is touched.
    env = child_environment(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", TRANSFORMERS_VERBOSITY="error")
    try:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", _START],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            env=env,
            timeout=_LIMIT_S,
        )
    except subprocess.TimeoutExpired as error:
        raise WorkbenchError(f"tracing the model took more than {_LIMIT_S:.0f} s and was given up") from error
    try:
        raw = json.loads(done.stdout)
        _read(raw)
    except (ValueError, KeyError, TypeError) as error:
        said = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise WorkbenchError(f"the model cannot be traced: {said[0]}") from error
    assert isinstance(raw, dict)
    return raw


def _names(request: Mapping[str, object]) -> list[str]:
    names = request["arithmetic"]
    assert isinstance(names, list)
    return names


def _parts(request: Mapping[str, object]) -> list[Mapping[str, object]]:
    return [{**request, "arithmetic": [name]} for name in _names(request)]


def _remembered(part: Mapping[str, object]) -> Mapping[str, object] | None:
    try:
        raw = json.loads(_place(part).read_text(encoding="utf-8"))
        _read(raw)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return raw if isinstance(raw, dict) else None


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """Let one process of this machine trace at a time, where several begin unasked; what one finds serves the next."""
    try:
        _cache().mkdir(parents=True, exist_ok=True)
        file = (_cache() / "lock").open("w")
    except OSError:  # no cache, no lock: then each traces for itself
        yield
        return
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "deepspeed-workbench" / "traces"


def _place(request: Mapping[str, object]) -> Path:
    text = json.dumps([_FORM, *map(_version, ("torch", "transformers", "peft")), request], sort_keys=True)
    return _cache() / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _read(raw: Mapping[str, object]) -> Trace:
    points, sizes = raw["points"], raw["sizes"]
    assert isinstance(points, dict) and isinstance(sizes, dict)
    return Trace(
        moments={name: [_moment(values) for values in listed] for name, listed in points.items()},
        layers=[_parameters(layer) for layer in sizes["layers"]],
        rest=_parameters(sizes["rest"]),
    )


def _moment(values: Sequence[float]) -> Moment:
    base, row, logits, logits_row, gradients = values
    return Moment(base=base, row=row, logits=logits, logits_row=logits_row, gradients=gradients)


def _parameters(entries: Sequence[Sequence[int]]) -> Parameters:
    small: dict[int, int] = {}
    for size, _, _ in entries:
        small[size] = small.get(size, 0) + 1
    trained = sum(size for size, is_trained, _ in entries if is_trained)
    packed = sum(size for size, _, can_pack in entries if can_pack)
    total = sum(size for size, _, _ in entries)
    largest = max((size for size, _, _ in entries), default=0)
    return Parameters(
        frozen=total - trained - packed,
        trained=trained,
        packed=packed,
        largest=largest,
        largest_packed=max((size for size, _, can_pack in entries if can_pack), default=0),
        small=small,
    )
