"""Write the code that submits a run's job again, to be changed in a notebook. Nothing is started.

The job is read from the run's `spec.json`, which has no value of an environment variable.
"""

from __future__ import annotations

from workbench.base import entries
from workbench.base.record import Record
from workbench.base.words import strip_controls
from workbench.display.kit.code import call_lines, literal, start_code, submit_code
from workbench.pods.backends import backend_from_dict
from workbench.rundir.paths import RunPaths
from workbench.rundir.register.registered import (
    cluster_of,
    registration,
)
from workbench.rundir.spec import RunSpec, hide_values
from workbench.rundir.status import (
    cluster_status,
    id_of,
)


def again_code(paths: RunPaths) -> str:
    """Return a cell that submits the job of a run: to the run's cluster, or else to a new one.

    Raise ConfigError if the specification of the run cannot be read.
    """
    spec = RunSpec.load(paths.spec, of_run=True)
    job = spec.job
    home = cluster_of(paths)
    own = {*entries.JOBS.values(), *entries.PLACES.values()}
    # A live cluster is used again; otherwise the cell starts one like it.
    if cluster_status(home).phase == "ready" and registration(home) is not None:
        used: list[type] = [type(job)]
        names = ["Cluster"]
        end = submit_code(f"Cluster.attach({literal(str(home))})")
    else:
        backend = backend_from_dict(spec.cluster.backend)
        used = [type(job), type(backend)]
        names = ["Cluster", "PodSpec"]
        cluster = _options(spec.cluster)
        cluster.pop("backend", None)
        cluster.pop("pods", None)
        end = start_code(
            type(backend).__name__, _options(backend), _options(spec.cluster.pods), cluster
        )
    # Classes of other packages are imported from their modules.
    lines = []
    for cls in used:
        if f"{cls.__module__}:{cls.__name__}" in own:
            names.append(cls.__name__)
        else:
            lines.append(f"from {cls.__module__} import {cls.__name__}")
    lines.insert(0, f"from workbench import {', '.join(sorted(names))}")
    imports = "\n".join(lines)
    return (
        f"# The job of run {strip_controls(id_of(paths))}. Change an option, then run the cell.\n"
        f"{imports}\n\n"
        f"job = {call_lines(type(job).__name__, _options(job))}\n"
        f"{end}"
    )


def _options(record: Record) -> dict[str, object]:
    """Return the options without defaults; variables of `env` as references."""
    options = {str(name): value for name, value in record.__repr_args__()}
    env = getattr(record, "env", None)
    if env:
        options["env"] = hide_values(env)
    return options
