"""Disks without room, on either side of the line. Needs root: small file systems are mounted."""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress
from pathlib import Path

from tests.fakes.smalldisk import small_disk
from tests.support.poll import until
from tools.chaos.kills import judge, outcome_of
from tools.chaos.numbered import Numbered, submit
from tools.chaos.plan import Trial
from tools.chaos.site import Site, left_of_run
from tools.chaos.tally import Outcome
from workbench import Cluster
from workbench.client.result import RunResult

_WORDS = ("disk", "space", "read-only", "cannot be written", "could not be written")


def remount(path: Path, options: str) -> None:
    """Change a mounted file system."""
    subprocess.run(["mount", "-o", f"remount,{options}", str(path)], check=True)


def fill(folder: Path) -> None:
    """Leave no byte."""
    with suppress(OSError), (folder / "ballast").open("wb", buffering=0) as ballast:
        while ballast.write(bytes(4096)):
            pass


def full_disk(site: Site, trial: Trial) -> Outcome:
    """Make one trial; each ends with a run in which there is room again."""
    outcome, cluster = outcome_of(trial), site.cluster()
    match trial.victim:
        case "pod at inputs":
            _inputs(site, cluster, outcome)
        case "pod at logs":
            _logs(site, cluster, outcome, Path(cluster.pods[0].root) / "runs", None)
        case "run folder":
            disk = site.folder / f"disk-{trial.number}"
            _logs(site, cluster, outcome, disk, disk / "run")
        case _:
            _result(site, cluster, outcome, site.folder / f"disk-{trial.number}")
    if outcome.not_outlived or outcome.state == "hung":
        outcome.orphans += site.give_up()
    return outcome


def _inputs(site: Site, cluster: Cluster, outcome: Outcome) -> None:
    """Inputs for which a pod has no room; the same inputs again once it has."""
    store = Path(cluster.pods[0].root).parent / "store"
    with small_disk(store, "2m"):
        first = submit(cluster, site.folder, lines=5, payload_mib=6.0)
        result = first.end()
        judge(outcome, first, result, pod=cluster.pods[0], victim="", outlives=False)
        outcome.cause = _disk_is_named(first, result)
        remount(store, "size=64m")
        again = cluster.submit(first.run.spec.job)
        second = again.wait(60, progress=False)
        if str(second.state) != "succeeded":
            outcome.not_outlived, outcome.message = True, f"with room again: {second.message}"[:500]
        outcome.orphans += left_of_run(again.id)


def _logs(site: Site, cluster: Cluster, outcome: Outcome, disk: Path, into: Path | None) -> None:
    """No room for lines, which are lost as promised; the run is to go on to its end."""
    with small_disk(disk, "1m"):
        numbered = submit(cluster, site.folder, lines=120, path=into)
        until(lambda: numbered.printed(0) > 5 or numbered.run.state.is_terminal, 60)
        fill(disk)
        result = numbered.end()
        judge(outcome, numbered, result, pod=cluster.pods[0], victim="", outlives=True)
        if outcome.not_outlived:
            outcome.cause = _disk_is_named(numbered, result)
        outcome.lost_lines = 0  # there was nowhere to keep them
    outcome.orphans += left_of_run(numbered.run.id)


def _result(site: Site, cluster: Cluster, outcome: Outcome, disk: Path) -> None:
    """A run directory that takes no result: waiting for it ends, and a success stays one."""
    with small_disk(disk, "4m"):
        numbered = submit(cluster, site.folder, lines=60, path=disk / "run")
        until(lambda: numbered.printed(0) > 5 or numbered.run.state.is_terminal, 60)
        remount(disk, "ro")
        result = numbered.end(30)
        judge(outcome, numbered, result, pod=cluster.pods[0], victim="", outlives=True)
        outcome.lost_lines = 0
        remount(disk, "rw")
    outcome.orphans += left_of_run(numbered.run.id)


def _disk_is_named(numbered: Numbered, result: RunResult | None) -> str:
    if result is None or result.error is None:
        return "missing"
    return "named" if any(word in result.message.lower() for word in _WORDS) else "wrong"


def can_mount() -> bool:
    """Whether this user may."""
    return os.geteuid() == 0
