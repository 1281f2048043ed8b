"""Read the costliest operators of the steps traced by torch's profiler, as a table."""

from __future__ import annotations

from workbench.base.files import read_json
from workbench.base.json_values import as_float, as_int, as_list, as_objects, as_str
from workbench.base.table import Grid
from workbench.base.words import count, duration
from workbench.rundir.paths import RunPaths

_SHOWN = 20


def read_trace(paths: RunPaths) -> Grid | None:
    """Return the table of a run, or None if no step was traced."""
    raw = read_json(paths.trace_operators)
    operators = as_objects(raw.get("operators"))
    if not operators:
        return None
    # Without a GPU there is no column for it.
    on_device = any(as_float(each.get("device_s")) for each in operators)
    columns = ["operator", "calls", "CPU, its own"]
    if on_device:
        columns.append("GPU, its own")
    rows = []
    for each in operators[:_SHOWN]:
        calls = as_int(each.get("calls"))
        row = [as_str(each.get("name")), count(calls), duration(as_float(each.get("cpu_s")))]
        if on_device:
            row.append(duration(as_float(each.get("device_s"))))
        rows.append(row)
    steps = "–".join(str(step) for step in as_list(raw.get("steps")))
    caption = (
        f"Steps {steps} of rank 0; {paths.trace.name} opens in https://ui.perfetto.dev and "
        "chrome://tracing"
    )
    return Grid(
        columns=columns,
        rows=rows,
        right=columns[1:],
        cut={"operator"},
        caption=caption,
    )
