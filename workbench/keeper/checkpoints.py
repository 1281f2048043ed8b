"""Copy checkpoints from the pods to the run directory, and send them to pods to resume a run."""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

from workbench.base import entries
from workbench.base.errors import ConfigError, RunError, WorkbenchError
from workbench.base.files import read_json, records, write_json
from workbench.base.files.disk import disk_full, free_bytes
from workbench.base.files.folders import remove_folder
from workbench.base.files.gate import pinned_folder
from workbench.base.json_values import as_list, get_object, parse_json
from workbench.base.messages.wire import ask
from workbench.base.words import truncate
from workbench.keeper.link.agent import AgentLink
from workbench.keeper.link.context import RunContext
from workbench.keeper.link.in_place import link_parts, package_python, shared_steps
from workbench.keeper.resource_limits import TRANSFERS, in_threads, start_thread
from workbench.rundir.checkpoints import (
    CHECKPOINT,
    NAME,
    Checkpoint,
    ReadPart,
    choose_newest,
    keep_newest,
    number_in,
    problem_of,
    read_manifest,
    shared_run,
)
from workbench.rundir.paths import ClusterPaths, RunPaths
from workbench.rundir.register.registered import (
    cluster_of,
    is_listed,
    why_not_registered,
)
from workbench.rundir.totals import RunTotals

logger = logging.getLogger(__name__)
_PING_S = 2.0
# Pods read the parts of a large model completely.
_READ_S = 3600.0
# Runs on a pod with this package on its path. Prints the problem and manifest of every part.
_JUDGE = (
    "import json, sys; from pathlib import Path; "
    f"from {entries.MANIFEST} import problem_of, read_manifest\n"
    "parts = [Path(part) for part in sys.argv[1:]]\n"
    "print(json.dumps([[problem_of(part), dict(read_manifest(part))] for part in parts]))"
)


PodPart = tuple[AgentLink, int, PurePosixPath]
"""Pod, rank, and folder of the rank's part on the pod."""
_LOOK_S = 0.5
# Bytes left free on the local disk for the logs and the result of the run.
_SPARED = 256 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class PodCheckpoints:
    steps: Mapping[int, Sequence[PodPart]]
    """Parts found on the pods, by step."""
    world_size: int
    silent: Sequence[str]
    """Names of the pods without an answer."""

    @property
    def whole(self) -> list[int]:
        """Steps with a part of every rank, newest first."""
        whole = []
        for step, parts in self.steps.items():
            ranks = {rank for _, rank, _ in parts}
            if len(ranks) == self.world_size:
                whole.append(step)
        return sorted(whole, reverse=True)


def list_parts(context: RunContext, lost: Collection[str] = ()) -> PodCheckpoints:
    """List the checkpoint parts on the pods of a run.

    Pods in `lost` are asked too if a new agent answers there.
    """

    def one(link: AgentLink) -> list[tuple[int, int, PurePosixPath]] | None:
        if link.pod.name in lost and not _answers(link):
            return None
        parts = _parts_on(link, context.on_pod(link).checkpoints)
        own = context.ranks_on(link)
        return parts and [part for part in parts if part[1] in own]

    answers = context.everywhere(one)
    steps: dict[int, list[PodPart]] = {}
    silent = []
    for link, parts in zip(context.links, answers, strict=True):
        if parts is None:
            silent.append(link.pod.name)
            continue
        for step, rank, folder in parts:
            steps.setdefault(step, []).append((link, rank, folder))
    return PodCheckpoints(
        steps=steps,
        world_size=len(context.places),
        silent=sorted(silent),
    )


def part_reader(links: Sequence[AgentLink]) -> ReadPart:
    """Return a function that checks a part on its own pod and returns its problem and manifest."""
    by_name = {link.pod.name: link for link in links}

    def read(pod: str, folder: Path) -> tuple[str, Mapping[str, object]]:
        link = by_name.get(pod)
        if link is None:
            return "the pod is gone", {}
        try:
            return _judged(link, [folder])[0]
        except WorkbenchError as error:
            return f"{folder.name} cannot be read: {error}", {}

    return read


_Judged = tuple[str, Mapping[str, object]]
"""Problem and manifest of a part; an empty problem for a whole part."""


def _judged(link: AgentLink, folders: Sequence[Path]) -> list[_Judged]:
    """Have a pod read every byte of some parts. Raise WorkbenchError if the pod cannot answer."""
    argv = [*package_python(link), "-c", _JUDGE, *[str(folder) for folder in folders]]
    text = link.run(argv, _READ_S, again=True)
    judged: list[_Judged] = []
    with suppress(ValueError):  # no JSON: the answer is too short
        for part in as_list(parse_json(text)):
            match part:
                case [str() as problem, dict() as manifest]:
                    judged.append((truncate(problem), manifest))
    if len(judged) != len(folders):
        raise RunError(f"{link.pod.name} does not answer in the form of an agent")
    return judged


def newest_in_place(
    links: Sequence[AgentLink], shared: RunPaths, last_step: int | None
) -> Checkpoint:
    """Return the newest valid checkpoint of a run in a shared folder. Raise ConfigError for none.

    The pods read every byte, each pod a share of the parts. An error of a pod is raised: a part
    that was not read is not a bad part.
    """
    found = shared_steps(links, shared)
    judged: dict[Path, _Judged] = {}
    notes: list[str] = []
    for step, parts in sorted(found.parts.items(), reverse=True):
        shares = []
        places = {}
        for number, link in enumerate(links):
            ranks = sorted(parts)[number :: len(links)]
            shares.append((link, [parts[rank] for rank in ranks]))
            places.update({rank: (link.pod.name, parts[rank]) for rank in ranks})
        if last_step is None or step < last_step:
            for of_pod in in_threads(_judged_share, shares):
                judged.update(of_pod)
        good, faults = choose_newest({step: places}, lambda _, part: judged[part], last_step)
        if good is not None:
            return replace(good, pods={}, notes=notes, shared=True)
        notes += faults
    why = "; ".join(notes) or f"{links[0].pod.name} sees none"
    raise ConfigError(f"there is no checkpoint to resume from in {shared.checkpoints}: {why}")


def _judged_share(share: tuple[AgentLink, Sequence[Path]]) -> Mapping[Path, _Judged]:
    link, folders = share
    return dict(zip(folders, _judged(link, folders), strict=True)) if folders else {}


def held_checkpoint(
    cluster: Path, paths: RunPaths, last_step: int | None, ranks: int
) -> Checkpoint | None:
    """Ask a cluster's keeper for the checkpoint on a run's pods.

    If the cluster or the number of ranks differs, the checkpoint is copied back from the pods.
    """
    shared = shared_run(paths)
    if shared is None and not paths.held.exists():
        return None
    info = read_json(paths.info)
    home = Path(str(info.get("cluster")))
    stay = f"stayed on the pods of {home}; checkpoints='bring' copies checkpoints back"
    parts = get_object(read_json(paths.held), "parts")
    if shared is not None:
        stay = f"are in {shared.root}"
    elif home != cluster or any(len(get_object(parts, step)) != ranks for step in parts):
        try:
            _refuse_unknown(paths)
            ask(
                ClusterPaths(cluster_of(paths)).socket,
                {"op": "bring", "run": str(info.get("id"))},
                timeout_s=_READ_S,
            )
            return None
        except RunError as error:
            logger.info("the checkpoints of %s are not copied back: %s", paths.root, error)
    try:
        request = {"op": "held", "path": str(paths.root), "last_step": last_step}
        answer = ask(ClusterPaths(cluster).socket, request, timeout_s=_READ_S)
        checkpoint: Any = answer["checkpoint"]
    except RunError as error:
        raise ConfigError(f"{error}; the checkpoints {stay}") from error
    return CHECKPOINT.validate_python(checkpoint)


def _refuse_unknown(paths: RunPaths) -> None:
    """Raise RunError unless the named cluster is this user's own and has the run there.

    The author of a given directory chose the cluster and the id in the directory.
    """
    home = cluster_of(paths)
    why = why_not_registered(home)
    if why:
        raise RunError(why)
    if not is_listed(paths, home):
        raise RunError(f"the cluster {home} has no run in {paths.root}")


def _answers(link: AgentLink) -> bool:
    try:
        link.call("ping", timeout_s=_PING_S)
    except WorkbenchError:
        return False
    return True


def _parts_on(
    link: AgentLink, checkpoints: PurePosixPath
) -> list[tuple[int, int, PurePosixPath]] | None:
    find = [
        "find",
        str(checkpoints.parent),
        "-mindepth",
        "4",
        "-maxdepth",
        "4",
        "-name",
        NAME,
        "-print0",
    ]
    try:
        link.ensure()
        folders = [PurePosixPath(name).parent for name in link.run(find).split("\0")]
    except WorkbenchError as error:
        logger.warning("%s", error)
        return None
    parts = [(number_in(f.parent.name, "step"), number_in(f.name, "rank"), f) for f in folders]
    return [(s, r, f) for s, r, f in parts if s >= 0 and r >= 0 and f.parent.parent == checkpoints]


@dataclass(frozen=True, kw_only=True, slots=True)
class PulledCheckpoints:
    """Checkpoints copied back or left on the pods."""

    steps: Sequence[int] = ()
    """Steps of the checkpoints, newest first."""
    notes: Sequence[str] = ()
    """Reasons for checkpoints not copied back."""
    stored: Sequence[str] = ()
    """Notes on checkpoints in an object store."""


class Uploads(Protocol):
    """Uploads of the copied checkpoints."""

    busy: Collection[int]
    """Steps in transfer, whose copies here must stay."""

    def offer(self) -> None:
        """Upload the copied checkpoints soon."""


class CheckpointCollector:
    """Fetch the newest checkpoint while the run continues, as a dead pod takes its disk along."""

    def __init__(self, context: RunContext, totals: RunTotals, uploads: Uploads):
        self._context = context
        self._totals = totals
        self._uploads = uploads
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="checkpoints", daemon=True)

    def start(self) -> None:
        if self._context.spec.job.rules.checkpoints.meanwhile:
            start_thread(self._thread)

    @property
    def _brings(self) -> bool:
        return self._context.spec.job.rules.checkpoints.brings

    def finish(self, lost: Collection[str]) -> PulledCheckpoints:
        """Fetch missing checkpoints, or record those on the pods, after all ranks ended. Blocks."""
        self._end.set()
        if self._thread.is_alive():
            self._thread.join()
        if not self._totals.saved_step:
            return PulledCheckpoints()
        return self._carry(lost)

    def _loop(self) -> None:
        done = 0
        while not self._end.wait(_LOOK_S):
            step = self._totals.saved_step
            if step > done:
                self._carry(())
                done = step

    def _carry(self, lost: Collection[str]) -> PulledCheckpoints:
        try:
            if self._brings:
                returned = bring_checkpoints_back(self._context, lost, uploads=self._uploads)
                self._uploads.offer()
                return returned
            return record_on_pods(self._context, lost)
        except Exception as error:  # Thread boundary: the outcome must be written in any case.
            logger.exception("bringing back the checkpoints of %s", self._context.run_id)
            return PulledCheckpoints(notes=[f"the checkpoints could not be copied back: {error}"])


def bring_checkpoints_back(
    context: RunContext,
    lost: Collection[str] = (),
    most: int | None = None,
    uploads: Uploads | None = None,
) -> PulledCheckpoints:
    """Copy the last complete checkpoints of a run from its pods, and verify every file.

    Checkpoints in a shared folder stay there.
    """
    if context.shared is not None:
        return _in_place(context, lost)
    checkpoints = list_parts(context, lost)
    limit = context.spec.job.rules.checkpoints.most
    problems = {
        step: _fetch(checkpoints.steps[step], context.paths, step)
        for step in checkpoints.whole[: most or limit]
    }
    # The upload may have taken another checkpoint meanwhile.
    busy = () if uploads is None else uploads.busy
    here = keep_newest(context.paths.checkpoints, limit, busy)
    notes = [
        f"the checkpoint of step {step} was not copied back: {why}"
        for step, why in problems.items()
        if why
    ]
    return PulledCheckpoints(steps=here, notes=notes + _out_of_reach(checkpoints, here))


def record_on_pods(context: RunContext, lost: Collection[str] = ()) -> PulledCheckpoints:
    """Record the complete checkpoints left on the pods of a run. Nothing is copied."""
    if context.shared is not None:
        return _in_place(context, lost)
    checkpoints = list_parts(context, lost)
    steps = checkpoints.whole
    if steps:
        parts: dict[int, dict[int, list[str]]] = {}
        for step in steps:
            of_step = {}
            for link, rank, folder in checkpoints.steps[step]:
                of_step[rank] = [link.pod.name, str(folder)]
            parts[step] = of_step
        write_json(context.paths.held, {"steps": steps, "parts": parts})
    return PulledCheckpoints(steps=steps, notes=_out_of_reach(checkpoints, steps))


def _in_place(context: RunContext, lost: Collection[str]) -> PulledCheckpoints:
    """Look for the newest complete checkpoint in the run's shared folder."""
    assert context.shared is not None
    links = [link for link in context.links if link.pod.name not in lost]
    try:
        whole = shared_steps(links or context.links, context.shared).whole
    except WorkbenchError as error:
        why = f"the checkpoints in {context.shared.root} could not be listed: {error}"
        return PulledCheckpoints(notes=[why])
    return PulledCheckpoints(steps=[whole] if whole else [])


def send_checkpoint(
    link: AgentLink, chosen: Checkpoint, ranks: Collection[int], target: PurePosixPath
) -> None:
    """Send the parts of a pod's ranks into a folder on the pod. Parts already there are linked."""
    if chosen.shared:
        link_parts(link, [chosen.parts[rank] for rank in sorted(ranks)], target)
        return
    for rank in sorted(ranks):
        part = chosen.parts[rank]
        if chosen.pods:
            if chosen.pods[rank] != link.pod.name:
                raise RunError(
                    f"the checkpoint's part of rank {rank} lies "
                    f"on {chosen.pods[rank]}, not {link.pod.name}"
                )
            link.run(["mkdir", "-p", "-m", "700", "--", str(target)])
            link.run(["ln", "-sfn", "--", str(part), str(target / f"rank-{rank}")])
            continue
        # No link in the run's directory is followed, also none that was made after the checks.
        with pinned_folder(part, part.parents[3]) as folder:
            for path in records.files_in(part):
                link.put_file(folder / path.name, str(target / f"rank-{rank}" / path.name))


def missing_parts(
    link: AgentLink, chosen: Checkpoint, ranks: Collection[int], target: PurePosixPath
) -> list[int]:
    """Return the ranks whose parts an earlier attempt did not leave whole in a folder on the pod.

    The pod reads every byte of its parts.
    """
    if chosen.pods or chosen.shared:
        return [*ranks]
    read = part_reader([link])
    return [
        rank
        for rank in ranks
        if read(link.pod.name, Path(target / f"rank-{rank}"))
        != ("", read_manifest(chosen.parts[rank]))
    ]


def _out_of_reach(checkpoints: PodCheckpoints, steps: Sequence[int]) -> list[str]:
    cut = max(checkpoints.steps, default=0)
    if not checkpoints.silent or cut <= max(steps, default=0):
        return []
    return [
        f"parts of the checkpoint of step {cut} are on "
        f"{', '.join(checkpoints.silent)}, out of reach"
    ]


def _fetch(parts: Sequence[PodPart], paths: RunPaths, step: int) -> str:
    final = paths.checkpoints / f"step-{step}"
    if final.exists():
        return ""
    part = final.with_name(f".{final.name}.part")
    remove_folder(part)

    def place(each: PodPart) -> Path:
        link, rank, _ = each
        return part / link.pod.name / f"rank-{rank}"

    def manifest(each: PodPart) -> int:
        link, _, source = each
        return _fetch_manifest(link, source, place(each), paths.root)

    def files(each: PodPart) -> str:
        link, _, source = each
        return _fetch_files(link, source, place(each), paths.root)

    try:
        # The sizes of all parts are known before the first part takes room.
        needed = sum(in_threads(manifest, parts, TRANSFERS))
        free = free_bytes(part)
        if free < needed + _SPARED:
            full = disk_full(paths.checkpoints, needed, free, kept=_SPARED)
            return f"{full}; run.fetch() copies the rest back while the cluster exists"
        problems = in_threads(files, parts, TRANSFERS)
        for problem in problems:
            if problem:
                return problem
        # After a power cut, a folder of this name holds a whole checkpoint.
        records.sync_below(part)
        with pinned_folder(paths.checkpoints, paths.root) as folder:
            (folder / part.name).replace(folder / final.name)
        records.sync_below(paths.checkpoints)
    except (OSError, WorkbenchError) as error:
        return str(error)
    finally:
        remove_folder(part)
    return ""


def _fetch_manifest(link: AgentLink, source: PurePosixPath, target: Path, root: Path) -> int:
    """Fetch the manifest of a part, and return the bytes of the part's files."""
    with pinned_folder(target, root, make=True) as folder:
        link.get(str(source / NAME), folder / NAME)
        return sum(entry["bytes"] for entry in read_manifest(folder).get("files", {}).values())


def _fetch_files(link: AgentLink, source: PurePosixPath, target: Path, root: Path) -> str:
    """Fetch the files of a part with a manifest, and return the part's problem."""
    with pinned_folder(target, root, make=True) as folder:
        for name in read_manifest(folder).get("files", {}):
            link.get(str(source / name), folder / name)
    return problem_of(target)
