"""Bring back what a run left on its pods: rank 0's results, and what a script wrote into its own folder.

Names come from pods, which may lie: files land in a run's own places whatever a pod says, and no link is followed.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection
from contextlib import nullcontext, suppress
from pathlib import Path

from workbench.base.errors import RunError
from workbench.base.files import read_json, write_json
from workbench.base.json_values import text
from workbench.base.package import file_digest
from workbench.jobs.script import Script
from workbench.keeper.link.agent import AgentLink
from workbench.keeper.link.context import RunContext
from workbench.keeper.run.batches import FileLeft, fetch_files
from workbench.keeper.run.outputs import Brought, ScriptOutputs, files_left
from workbench.rundir.paths import PodRunPaths, RunPaths, is_left, is_output


def bring_back(
    context: RunContext,
    lost: Collection[str] = (),
    report: Callable[[str], None] = lambda _: None,
    *,
    rest: bool = False,
) -> Brought:
    """Bring it all back; `rest` also what a script's options leave on its pods. Blocks."""
    link, paths = context.links[0], context.paths
    left = files_left(context, link)
    manifest, strange = fetch(link, context.on_pod(link), paths, left.out)
    before = {name: text(digest) for name, digest in read_json(paths.manifest).items()}
    old = {name: digest for name, digest in before.items() if is_output(name)}
    brought = Brought()
    match context.spec.job:
        case Script() as job if paths.script.exists():  # else somebody deleted the run's directory
            brought = ScriptOutputs(context, job, report, rest=rest).bring(left, old, lost)
    manifest = {**(before if rest else old), **brought.digests, **manifest}
    with suppress(OSError) if not manifest else nullcontext():  # that nothing came is only noted
        write_json(paths.manifest, manifest)
    return Brought(digests=manifest, notes=brought.notes, keeps=brought.keeps, strange=strange)


def fetch(
    link: AgentLink, pod: PodRunPaths, paths: RunPaths, out: Collection[FileLeft]
) -> tuple[dict[str, str], list[str]]:
    """Bring back what rank 0 left; return the SHA-256 of each file, and names that no run may leave: not taken."""
    shared = link.sees(paths.arrivals)
    manifest: dict[str, str] = {}
    strange: list[str] = []
    come: list[tuple[FileLeft, Path]] = []
    for file in out:
        relative = Path(file.name)
        if ".." in relative.parts or relative.is_absolute():
            raise RunError(f"{link.pod.name} names a file outside its run: {file.name}")
        if not is_left(relative):
            strange.append(file.name)
            continue
        target = paths.root / relative
        if shared and _taken(paths.arrivals / relative, target, file.digest):
            manifest[file.name] = file.digest
        else:
            come.append((file, target))
    for file, digest in fetch_files(link, pod.out, come, paths.root / f".{link.pod.name}.files"):
        manifest[file.name] = digest
    shutil.rmtree(paths.arrivals, ignore_errors=True)
    return manifest, strange


def clear(link: AgentLink, pod: PodRunPaths, *, all_but_checkpoints: bool) -> None:
    """Remove a run's folder from a pod; only for a run whose files are all back."""
    if all_but_checkpoints:
        others = ["-mindepth", "1", "-maxdepth", "1", "-not", "-name", pod.checkpoints.name]
        link.run(["find", str(pod.root), *others, "-exec", "rm", "-rf", "--", "{}", "+"])
    else:
        link.run(["rm", "-rf", "--", str(pod.root)])


def output_facts(paths: RunPaths) -> dict[str, object]:
    """Return how many files in `outputs/` came back and their bytes, by the name of the result's field."""
    names = [name for name in read_json(paths.manifest) if is_output(name)]
    sizes = [path.stat().st_size for name in names if (path := paths.root / name).is_file()]
    return {"output_files": len(sizes), "output_bytes": sum(sizes)} if sizes else {}


def _taken(here: Path, target: Path, digest: str) -> bool:
    """Move what a pod wrote into a shared folder to its place; False where this machine sees something else there."""
    if not here.is_file() or here.is_symlink() or file_digest(here) != digest:
        return False
    target.parent.mkdir(parents=True, exist_ok=True)
    here.replace(target)
    return True
