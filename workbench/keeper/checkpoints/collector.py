"""Checkpoints between the pods and the run directory: brought back while a run goes on, sent to resume one."""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from workbench.base.errors import RunError, WorkbenchError
from workbench.base.files import write_json
from workbench.base.files.disk import disk_full, free_bytes
from workbench.keeper.checkpoints.on_pods import PodCheckpoints, PodPart, look
from workbench.keeper.link.agent import AgentLink
from workbench.keeper.link.context import RunContext
from workbench.rundir.checkpoints import NAME, Checkpoint, keep_newest, problem_of, read_manifest
from workbench.rundir.paths import RunPaths

logger = logging.getLogger(__name__)
_KEPT = 2
_LOOK_S = 0.5
_SPARED = 256 << 20  # bytes left free on this machine's disk, for the logs and the result of the run


@dataclass(frozen=True, kw_only=True, slots=True)
class Returned:
    """What came back from the pods, or stays on them."""

    steps: Sequence[int] = ()
    """The steps of the checkpoints, the newest first."""
    notes: Sequence[str] = ()
    """What did not come back, and why."""


class CheckpointCollector:
    """Fetch the newest checkpoint of a run into its directory meanwhile: a pod that dies takes its disk along."""

    def __init__(self, context: RunContext, saved: Callable[[], int]):
        self._context = context
        self._saved = saved
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="checkpoints", daemon=True)

    def start(self) -> None:
        if self._brings and getattr(self._context.spec.job, "save_steps", None) is not None:
            self._thread.start()

    @property
    def _brings(self) -> bool:
        return getattr(self._context.spec.job, "brings_checkpoints", False)

    def finish(self, lost: Collection[str]) -> Returned:
        """Fetch what is still missing, or write down what stays on the pods, once no rank is left; blocks."""
        self._end.set()
        if self._thread.is_alive():
            self._thread.join()
        return self._carry(lost) if self._saved() else Returned()

    def _loop(self) -> None:
        done = 0
        while not self._end.wait(_LOOK_S):
            if (step := self._saved()) > done:
                self._carry(())
                done = step

    def _carry(self, lost: Collection[str]) -> Returned:
        try:
            return (bring_checkpoints_back if self._brings else record_on_pods)(self._context, lost)
        except Exception as error:  # thread boundary; and the run's outcome must be written whatever happens here
            logger.exception("bringing back the checkpoints of %s", self._context.run_id)
            return Returned(notes=[f"its checkpoints could not be brought back: {error}"])


def bring_checkpoints_back(context: RunContext, lost: Collection[str] = (), most: int | None = None) -> Returned:
    """Bring the last checkpoints of a run back from its pods, those of which every part answers; each is checked."""
    checkpoints = look(context, lost)
    limit = getattr(context.spec.job, "save_total_limit", None) or _KEPT
    with ThreadPoolExecutor(max_workers=max(1, len(context.links))) as pool:
        problems = {
            step: _fetch(pool, checkpoints.steps[step], context.paths, step)
            for step in checkpoints.whole[: most or limit]
        }
    here = keep_newest(context.paths.checkpoints, limit)
    notes = [f"the checkpoint of step {step} did not come back: {why}" for step, why in problems.items() if why]
    return Returned(steps=here, notes=notes + _out_of_reach(checkpoints, here))


def record_on_pods(context: RunContext, lost: Collection[str] = ()) -> Returned:
    """Write down which whole checkpoints of a run stay on its pods; nothing travels."""
    checkpoints = look(context, lost)
    steps = checkpoints.whole
    if steps:
        parts = {
            step: {rank: [link.pod.name, str(folder)] for link, rank, folder in checkpoints.steps[step]}
            for step in steps
        }
        write_json(context.paths.held, {"steps": steps, "parts": parts})
    return Returned(steps=steps, notes=_out_of_reach(checkpoints, steps))


def send_checkpoint(link: AgentLink, chosen: Checkpoint, ranks: Collection[int], target: PurePosixPath) -> None:
    """Send the parts of the ranks of one pod into a folder on it; what lies on that pod is used where it is."""
    for rank in sorted(ranks):
        part = chosen.parts[rank]
        if chosen.pods:
            if chosen.pods[rank] != link.pod.name:
                raise RunError(f"the checkpoint's part of rank {rank} lies on {chosen.pods[rank]}, not {link.pod.name}")
            link.run(["mkdir", "-p", "-m", "700", "--", str(target)])
            link.run(["ln", "-sfn", "--", str(part), str(target / f"rank-{rank}")])
            continue
        for path in sorted(part.iterdir()):
            link.put_file(path, str(target / f"rank-{rank}" / path.name))


def _out_of_reach(checkpoints: PodCheckpoints, steps: Sequence[int]) -> list[str]:
    cut = max(checkpoints.steps, default=0)
    if not checkpoints.silent or cut <= max(steps, default=0):
        return []
    return [f"parts of the checkpoint of step {cut} are on {', '.join(checkpoints.silent)}, out of reach"]


def _fetch(pool: ThreadPoolExecutor, parts: Sequence[PodPart], paths: RunPaths, step: int) -> str:
    final = paths.checkpoints / f"step-{step}"
    if final.exists():
        return ""
    part = final.with_name(f".{final.name}.part")
    shutil.rmtree(part, ignore_errors=True)

    def one(each: PodPart) -> str:
        link, rank, folder = each
        return _fetch_part(link, folder, part / link.pod.name / f"rank-{rank}")

    try:
        if problem := next(filter(None, list(pool.map(one, parts))), ""):
            return problem
        part.rename(final)
    except (OSError, WorkbenchError) as error:
        return str(error)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return ""


def _fetch_part(link: AgentLink, source: PurePosixPath, target: Path) -> str:
    link.get(str(source / NAME), target / NAME)
    files = read_manifest(target).get("files", {})
    needed, free = sum(entry["bytes"] for entry in files.values()), free_bytes(target)
    if free < needed + _SPARED:
        full = disk_full(target.parent.parent.parent, needed, free, kept=_SPARED)
        return f"{full}; run.fetch() brings it while the cluster is there"
    for name in files:
        link.get(str(source / name), target / name)
    return problem_of(target)
