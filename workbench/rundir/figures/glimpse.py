"""Read some losses of a run without reading all of its events."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from workbench.base.files import open_record
from workbench.rundir.events import EventKind, event_of, records_in
from workbench.rundir.paths import RunPaths

_PLACES = 16  # of the file
_BYTES = 1 << 12  # at each place; an event of a step has a tenth


def some_losses(paths: RunPaths) -> Sequence[float]:
    """Return training losses at equal distances in the run's events, at most 16."""
    losses: dict[int, float] = {}
    with suppress(OSError), open_record(paths.events) as file:
        size = file.seek(0, 2)
        last = max(0, size - _BYTES)
        for place in range(_PLACES):
            file.seek(last * place // (_PLACES - 1))
            # The lines at both ends may be cut.
            lines = file.read(_BYTES).split(b"\n")
            found = [event for raw in records_in(lines) if (event := event_of(raw))]
            for event in found:
                step, loss = event.whole("step"), event.number("loss")
                if event.kind == EventKind.STEP and step is not None and loss is not None:
                    losses[step] = loss
    ordered = [loss for _, loss in sorted(losses.items()) if abs(loss) < float("inf")]
    every = max(1, -(-len(ordered) // _PLACES))
    return ordered[::every]
