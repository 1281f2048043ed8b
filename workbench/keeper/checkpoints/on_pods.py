"""Checkpoints that stay on the pods that wrote them: where they lie, whether they are good, brought back when asked.

The run directory keeps a record of them (`RunPaths.held`). They are there for as long as their cluster, or the volume
that its pods' folders are on; a keeper that closes brings the last one of each run back that did not succeed.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from workbench.base import entries
from workbench.base.errors import ConfigError, RunError, WorkbenchError
from workbench.base.files import read_json, write_json
from workbench.base.wire import ask
from workbench.keeper.checkpoints.collect import Returned, bring_checkpoints_back, look, whole_steps
from workbench.keeper.launch.command import RankPlace
from workbench.keeper.link.agent import AgentLink
from workbench.rundir.checkpoints.choose import Checkpoint, ReadPart
from workbench.rundir.paths import ClusterPaths, PodRunPaths, RunPaths

__all__ = ["bring_held", "held_checkpoint", "hold", "part_reader"]

logger = logging.getLogger(__name__)
_READ_S = 3600.0  # the parts of a large model are read whole, on their pods
# Runs on a pod, with this package on its path: says what is wrong with each part, and what its manifest says it is.
_JUDGE = (
    f"import json, sys; from pathlib import Path; from {entries.MANIFEST} import problem_of, read_manifest\n"
    "print(json.dumps([[problem_of(Path(p)), dict(read_manifest(Path(p)))] for p in sys.argv[1:]]))"
)


def hold(
    links: Sequence[AgentLink], places: Sequence[RankPlace], pods: Mapping[str, PodRunPaths], paths: RunPaths
) -> Returned:
    """Write down which whole checkpoints of a run its pods hold; nothing travels."""
    held = look(links, pods)
    steps = whole_steps(held, {place.rank for place in places})
    notes = []
    silent = sorted(pods.keys() - {link.pod.name for link in held})
    if cut := [step for parts in held.values() for step in parts if silent and step > max(steps, default=0)]:
        notes.append(f"parts of the checkpoint of step {max(cut)} are on {', '.join(silent)}, out of reach")
    if steps:
        parts = {
            step: {
                rank: [link.pod.name, str(folder)] for link, all_ in held.items() for rank, folder in all_[step].items()
            }
            for step in steps
        }
        write_json(paths.held, {"steps": steps, "parts": parts})
    return Returned(steps=steps, notes=notes)


def part_reader(links: Sequence[AgentLink]) -> ReadPart:
    """Return what reads a part as its own pod sees it: what is wrong with it, and its manifest."""
    by_name = {link.pod.name: link for link in links}

    def read(pod: str, folder: Path) -> tuple[str, Mapping[str, object]]:
        link = by_name.get(pod)
        if link is None:
            return "there is no such pod any more", {}
        argv = ["env", f"PYTHONPATH={link.package}", link.pod.python, "-c", _JUDGE, str(folder)]
        try:
            ((problem, manifest),) = json.loads(link.run(argv, _READ_S, again=True))
        except (WorkbenchError, ValueError) as error:
            return f"{folder.name} cannot be read: {error}", {}
        return problem, manifest

    return read


def bring_held(
    links: Sequence[AgentLink], places: Sequence[RankPlace], pods: Mapping[str, PodRunPaths], paths: RunPaths
) -> Returned:
    """Bring the last checkpoint that the pods hold back into the run directory; its record goes when it is here."""
    returned = bring_checkpoints_back(links, places, pods, paths, most=1)
    if returned.steps:
        paths.held.unlink(missing_ok=True)
    return returned


def held_checkpoint(cluster: Path, paths: RunPaths, last_step: int | None) -> Checkpoint | None:
    """Ask a cluster's keeper for the checkpoint that a run's pods hold, before another run goes on from it."""
    if not paths.held.exists():
        return None
    info = read_json(paths.info)
    home = Path(str(info.get("cluster")))
    if home != cluster:
        try:
            ask(ClusterPaths(home).socket, {"op": "bring", "run": str(info.get("id"))}, timeout_s=_READ_S)
            return None
        except RunError as error:
            logger.info("the checkpoints of %s do not come back: %s", paths.root, error)
    try:
        request = {"op": "held", "path": str(paths.root), "last_step": last_step}
        checkpoint = ask(ClusterPaths(cluster).socket, request, timeout_s=_READ_S)["checkpoint"]
    except RunError as error:
        raise ConfigError(
            f"{error}; they were left on the pods of {home}: with checkpoints='bring' they would be here"
        ) from error
    assert isinstance(checkpoint, dict)
    return Checkpoint.from_dict(checkpoint)
