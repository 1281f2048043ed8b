"""Copy the outputs of a run from its pods: results of rank 0, and new files of a script's folder.

Pods choose the names and may lie. Files are written only to the run's own folders, and no link is
followed.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path

from workbench.base.errors import RemoteError
from workbench.base.files import read_bytes, read_json, records, write_json
from workbench.base.json_values import as_int, as_list, as_str
from workbench.base.words import middle_cut, pluralize, short_list, size, strip_controls
from workbench.jobs.ignore_patterns import IgnorePatterns
from workbench.jobs.job import FolderOutputs
from workbench.keeper.link.agent import AgentLink
from workbench.keeper.link.context import RunContext
from workbench.keeper.link.in_place import model_digests
from workbench.keeper.run.batches import OutputFile, fetch_files
from workbench.pods.pod import Report, no_report
from workbench.pods.ssh.bulk.transfer import LARGE
from workbench.rundir.paths import PodRunPaths, RunPaths, is_output, is_output_name

logger = logging.getLogger(__name__)
# The pod hashes its small files before returning the list.
_LISTED_S = 600.0
_LATER = "run.fetch() copies all files back while the pod exists"
_LONGEST_SHOWN = 80  # letters of a name in a note


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputList:
    out: Sequence[OutputFile] = ()
    """Files of rank 0 in `out/`."""
    script: Sequence[OutputFile] = ()
    """New and changed files of a script's folder."""
    links: Sequence[str] = ()
    """Links, pipes and sockets in the script's folder. They are not followed."""
    unread: Sequence[str] = ()
    """Unreadable files in the script's folder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PulledOutputs:
    """Files copied back from the pods, and notes about files left there."""

    digests: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 of every file, by its name in the run directory."""
    notes: Sequence[str] = ()
    """Notes about files left on pods: pod, folder and reason."""
    keeps: Collection[str] = ()
    """Names of the pods whose folder of the run must stay."""
    strange: Sequence[str] = ()
    """Invalid names in `out/`, fit for a note. Such files are not copied."""


def list_outputs(context: RunContext, link: AgentLink, *, lost: bool = False) -> OutputList:
    """Return the list of output files on a pod. A script's unchanged input files are excluded.

    A pod that counts as lost is asked once, and any other pod until its lease ends.
    """
    return link.retry_until_lease(lambda _: _listed(context, link), unwanted=lambda: lost)


def _listed(context: RunContext, link: AgentLink) -> OutputList:
    paths = context.paths
    sent = "-"
    archive = context.spec.job.archive_in(paths.root)
    if archive is not None and archive.exists():
        sent = link.put(read_bytes(archive, records.LARGEST_ARCHIVE), ".zip")
    fields = {
        "run": context.run_id,
        "archive": sent,
        "named": context.spec.job.folder_name,
        "below": LARGE,
    }
    raw = link.work("list_outputs", _LISTED_S, **fields)
    lists = {name: as_list(value) for name, value in raw.items()}
    out = lists.get("out", [])
    script = lists.get("script", [])
    links = lists.get("links", [])
    unread = lists.get("unread", [])
    return OutputList(
        out=_files(out),
        script=_files(script),
        links=_names(links),
        unread=_names(unread),
    )


class FolderCollector:
    """Copy new files of a script's folder back from the pods.

    From the first pod all files are copied. From other pods only the files selected by
    `outputs` are copied, or all with `rest`.
    """

    def __init__(
        self,
        context: RunContext,
        wanted: FolderOutputs,
        report: Report,
        *,
        rest: bool,
    ) -> None:
        self._context = context
        self._report = report
        self._rest = rest
        self._wanted = IgnorePatterns(wanted.patterns)
        self._limit = wanted.limit_gib * 2**30
        if rest:
            self._limit = float("inf")
        self._over = f"beyond outputs_limit_gib={wanted.limit_gib:g}; {_LATER}"
        self._option = f"{type(context.spec.job).__name__}(outputs=[…])"
        self._lock = threading.Lock()
        self._files_to_come = 0
        self._bytes_to_come = 0

    def bring(
        self, first: OutputList, before: Mapping[str, str], lost: Collection[str]
    ) -> PulledOutputs:
        """Copy files from all pods at once. `before`: SHA-256 of files copied by earlier calls."""
        links = self._context.links
        same = {file for file in first.script if file.digest}
        places = {f"outputs/{file.name}" for file in first.script}
        places -= {f"outputs/{link.pod.name}" for link in links}

        def one(link: AgentLink) -> PulledOutputs:
            if link is links[0]:
                return self._of_pod(link, first, first.script, before, frozenset())
            if link.pod.name in lost:
                return PulledOutputs()
            try:
                listed = list_outputs(self._context, link)
                changed = [file for file in listed.script if file not in same]
                return self._of_pod(link, listed, changed, before, places)
            except RemoteError as error:
                logger.warning("%s", error)
                name = link.pod.name
                why = f"the script's files on {name} were not copied back: {error}"
                return PulledOutputs(notes=[f"{why}; run.fetch() tries again"], keeps=[name])

        digests: dict[str, str] = {}
        notes: list[str] = []
        keeps: list[str] = []
        for part in self._context.everywhere(one):
            digests.update(part.digests)
            notes.extend(part.notes)
            keeps.extend(part.keeps)
        return PulledOutputs(digests=digests, notes=notes, keeps=keeps)

    def _of_pod(
        self,
        link: AgentLink,
        listed: OutputList,
        files: Sequence[OutputFile],
        before: Mapping[str, str],
        places: Set[str],
    ) -> PulledOutputs:
        pod = link.pod.name
        first = link is self._context.links[0]
        below = "outputs"
        if not first:
            below = f"outputs/{pod}"
        come: list[OutputFile] = []
        stay: dict[str, list[OutputFile]] = {}
        room = self._limit

        # Small files first, unfinished downloads last, so that the limit keeps as many as it can.
        def order(file: OutputFile) -> tuple[bool, int]:
            return file.name.endswith(".part"), file.size

        root = self._context.paths.root
        # A file must not take the place of a folder, nor of another pod's folder.
        folders = _folders_of([f"{below}/{file.name}" for file in files])
        folders |= _folders_of(places)
        folders |= {f"outputs/{link.pod.name}" for link in self._context.links}
        for file in sorted(files, key=order):
            name = file.name
            place = f"{below}/{name}"
            is_allowed = is_output(place)
            is_taken = place in folders or not places.isdisjoint({place, *_folders_of([place])})
            if is_allowed and not is_taken:
                is_taken = _is_blocked(root / place, root)
            is_wanted = first or self._rest or self._wanted.decide(name)
            if not is_allowed or is_taken:
                why = "the name is not allowed here, or is taken"
            elif not is_wanted:
                why = f"{self._option} does not name the files; {_LATER}"
            elif file.size > room:
                why = self._over
            else:
                come.append(file)
                room -= file.size
                continue
            stay.setdefault(why, []).append(file)
        digests = self._carry(link, below, come, before)
        folder = self._context.folder_on(link)
        where = f"on {pod} in {folder}"
        notes = []
        for why, kept in stay.items():
            many = pluralize(len(kept), "file")
            total = sum(file.size for file in kept)
            bytes_ = size(total)
            notes.append(f"not copied back: {many} ({bytes_}) {where}; {why}")
        if listed.unread:
            unread = short_list(listed.unread)
            notes.append(f"not copied back, as unreadable {where}: {unread}")
        # A link alone is no reason to keep the folder on the pod.
        keeps = [pod] if notes else []
        if listed.links:
            links = short_list(listed.links)
            notes.append(f"links on {pod} are not followed: {links}")
        return PulledOutputs(digests=digests, notes=notes, keeps=keeps)

    def _carry(
        self,
        link: AgentLink,
        below: str,
        files: Sequence[OutputFile],
        before: Mapping[str, str],
    ) -> dict[str, str]:
        root = self._context.paths.root
        digests = {}
        total = sum(file.size for file in files)
        self._tell(len(files), total)
        come: list[tuple[OutputFile, Path]] = []
        for file in files:
            name = f"{below}/{file.name}"
            target = root / name
            digest = _here(target, file, before.get(name, ""))
            if digest:
                digests[name] = digest
                self._tell(-1, -file.size)
            else:
                come.append((file, target))
        folder = self._context.folder_on(link)
        pile = root / f".{link.pod.name}.files"
        for file, digest in fetch_files(link, folder, come, pile):
            name = f"{below}/{file.name}"
            digests[name] = digest
            self._tell(-1, -file.size)
        return digests

    def _tell(self, count: int, size_: int) -> None:
        with self._lock:
            self._files_to_come += count
            self._bytes_to_come += size_
            files = self._files_to_come
            bytes_ = size(self._bytes_to_come)
        if files:
            many = pluralize(files, "file")
            self._report(f"copying the script's files back: {many} ({bytes_}) to come")
        else:
            self._report("copying results back")


def _folders_of(places: Iterable[str]) -> set[str]:
    """Return all folders above some paths."""
    folders = set()
    for place in places:
        folder, slash, _ = place.rpartition("/")
        while slash and folder not in folders:
            folders.add(folder)
            folder, slash, _ = folder.rpartition("/")
    return folders


def _is_blocked(target: Path, root: Path) -> bool:
    """Whether a file cannot be written here, as an earlier file or folder has its place."""
    if target.is_dir():
        return True
    folder = target.parent
    while folder != root and not folder.is_dir():
        if folder.is_file():
            return True
        folder = folder.parent
    return False


def _here(target: Path, file: OutputFile, before: str) -> str:
    """Return the SHA-256 of a file that is already here, or an empty string."""
    if target.is_symlink() or not target.is_file():
        return ""
    if target.stat().st_size != file.size:
        return ""
    digest = before or records.sha256_of(target)
    # A large file has no digest from the pod: an equal size is enough.
    if file.digest and file.digest != digest:
        return ""
    return digest


def _shown(name: str) -> str:
    """Make a name that a pod chose fit for a note."""
    return middle_cut(strip_controls(name), _LONGEST_SHOWN)


def _files(raw: Iterable[object]) -> list[OutputFile]:
    """Read a list of files. Entries of another form, and repeated names, are left out."""
    files: dict[str, OutputFile] = {}
    for entry in raw:
        match entry:
            case [str() as name, size_, str() as digest] if name not in files:
                bytes_ = as_int(size_)
                if bytes_ is not None and bytes_ >= 0:
                    files[name] = OutputFile(name, bytes_, digest)
    return list(files.values())


def _names(raw: Iterable[object]) -> list[str]:
    """Return the names in a list as a note shows them."""
    return [_shown(name) for name in raw if name and isinstance(name, str)]


def bring_back(
    context: RunContext,
    lost: Collection[str] = (),
    report: Report = no_report,
    *,
    rest: bool = False,
) -> PulledOutputs:
    """Copy all outputs back. `rest` includes files beyond the script's output options. Blocks."""
    link = context.links[0]
    paths = context.paths
    listed = OutputList()
    manifest: dict[str, str] = {}
    strange: list[str] = []
    failed: RemoteError | None = None
    try:
        listed = list_outputs(context, link, lost=link.pod.name in lost)
        manifest, strange = fetch(link, context.on_pod(link), paths, listed.out)
    except RemoteError as error:
        # The files of the other pods are copied all the same.
        failed = error
    before = {}
    old = {}
    for name, value in read_json(paths.manifest).items():
        digest = as_str(value)
        before[name] = digest
        if is_output(name):
            old[name] = digest
    brought = PulledOutputs()
    wanted = context.spec.job.rules.outputs
    archive = context.spec.job.archive_in(paths.root)
    # Without the archive (a user may have deleted it), new files cannot be told from old ones.
    if wanted is not None and archive is not None and archive.exists():
        collector = FolderCollector(context, wanted, report, rest=rest)
        brought = collector.bring(listed, old, lost)
    # Without a manifest, the next call or the next keeper copies all files.
    if failed is not None:
        raise failed
    kept = before if rest else old
    manifest = {**kept, **brought.digests, **manifest, **_stayed(context, lost)}
    # If nothing was copied, a failed write does not matter.
    with suppress(OSError) if not manifest else nullcontext():
        # A manifest says to the next keeper that the files are here, also after a power cut.
        records.sync_below(paths.root)
        write_json(paths.manifest, manifest)
    return PulledOutputs(
        digests=manifest, notes=brought.notes, keeps=brought.keeps, strange=strange
    )


def _stayed(context: RunContext, lost: Collection[str]) -> dict[str, str]:
    """Return the digests of a model that stays in the shared folder, and make a link to it."""
    shared = context.shared
    if shared is None:
        return {}
    links = [link for link in context.links if link.pod.name not in lost]
    digests = model_digests(links or context.links, shared)
    model = context.paths.model
    if digests and not model.is_symlink():
        try:
            model.symlink_to(shared.model)
        except OSError as error:  # for people and their own programs
            logger.warning("no link to %s at %s: %s", shared.model, model, error)
    return digests


def fetch(
    link: AgentLink, pod: PodRunPaths, paths: RunPaths, out: Collection[OutputFile]
) -> tuple[dict[str, str], list[str]]:
    """Copy the files of rank 0. Return the SHA-256 of every file, and the invalid names."""
    manifest: dict[str, str] = {}
    strange: list[str] = []
    come: list[tuple[OutputFile, Path]] = []
    folders = _folders_of(file.name for file in out)
    for file in out:
        relative = Path(file.name)
        target = paths.root / relative
        if ".." in relative.parts or relative.is_absolute():
            name = _shown(file.name)
            raise RemoteError(
                f"{link.pod.name} names a file outside the run: {name}", host=link.pod.address
            )
        is_plain = is_output_name(relative) and file.name == str(relative)
        if not is_plain or file.name in folders or _is_blocked(target, paths.root):
            strange.append(_shown(file.name))
            continue
        come.append((file, target))
    pile = paths.root / f".{link.pod.name}.files"
    for file, digest in fetch_files(link, pod.out, come, pile):
        manifest[file.name] = digest
    return manifest, strange


def clear(link: AgentLink, pod: PodRunPaths, *, all_but_checkpoints: bool) -> None:
    """Remove a run's folder from a pod. Call only after all files were copied back."""
    if all_but_checkpoints:
        others = ["-mindepth", "1", "-maxdepth", "1", "-not", "-name", pod.checkpoints.name]
        link.run(["find", str(pod.root), *others, "-exec", "rm", "-rf", "--", "{}", "+"])
    else:
        link.run(["rm", "-rf", "--", str(pod.root)])


def output_facts(paths: RunPaths) -> dict[str, object]:
    """Return the number and bytes of files in `outputs/`, by the result's field names."""
    sizes = []
    for name in read_json(paths.manifest):
        path = paths.root / name
        if is_output(name) and path.is_file():
            sizes.append(path.stat().st_size)
    if not sizes:
        return {}
    return {"output_files": len(sizes), "output_bytes": sum(sizes)}
