"""Have the agents make the environment of a job, and report their progress and their failure.

A package that the job needs and a pod lacks fails the run before ranks start.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from functools import partial

from workbench.base.errors import ConfigError, RunError, WorkbenchError
from workbench.base.files.folders import remove_file
from workbench.base.json_values import as_str, get_object, parse_json
from workbench.base.words import short_list, truncate
from workbench.jobs.requirements.requirements import Requirements
from workbench.keeper.link.agent import AgentLink
from workbench.keeper.link.context import RunContext
from workbench.keeper.link.environments import make_environment
from workbench.keeper.resource_limits import in_threads
from workbench.rundir.journal import Journal
from workbench.rundir.output.collect import mask_file
from workbench.rundir.result import RunFault
from workbench.rundir.state import RunState

logger = logging.getLogger(__name__)
# The largest packages take minutes. pip itself ends after some minutes without its index.
_MOST_S = 3600.0
_LOG = "packages.log"
# Prints the versions of packages as ranks would find them. A package may have no metadata.
_LOOK = """
import importlib.util, json, sys
from importlib import metadata
sys.path[0:1] = []
sys.path.append(sys.argv[1])
found = {}
for name in sys.argv[2:]:
    try:
        found[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        found[name] = "unknown" if importlib.util.find_spec(name) else ""
print(json.dumps(found))
"""
_TAIL_LETTERS = 8000


class PackagesError(RunError):
    """Report packages that cannot be installed on a pod; `fault` names the pod."""

    def __init__(self, fault: RunFault):
        super().__init__(str(fault))
        self.fault = fault


class Packages:
    """Installs the packages of a run on its pods."""

    def __init__(
        self,
        context: RunContext,
        journal: Journal,
        *,
        unwanted: Callable[[], bool],
    ):
        """`unwanted`: whether a user has asked the run to end."""
        self._context = context
        self._journal = journal
        self._unwanted = unwanted
        self._failed = threading.Event()
        self._lines: dict[str, str] = {}
        spec = context.spec
        self._env: Mapping[str, str] = {**spec.cluster.pods.env, **spec.job.env}

    def install(self) -> bool:
        """Make the environments. Blocks. Return False for a run that is not wanted any more.

        Raises:
            PackagesError: The packages cannot be installed. No half environment is left.
            RemoteError: A pod does not answer.
        """
        context = self._context
        if context.spec.job.needed and not self._env.get("PYTHONPATH"):
            in_threads(self._check_needed, context.links)
        needs = context.spec.job.packages_in(context.paths.root)
        if needs is None:
            return True
        for link in context.links:
            try:
                needs.check_python(link.pod.versions.get("python", ""), link.pod.name)
            except ConfigError as error:
                raise self._error(link, str(error)) from error
        if not needs.installs:
            return True
        words = "; ".join([f"installing packages: {needs.words}", *needs.notes])
        self._journal.state(RunState.STARTING, words)
        try:
            in_threads(lambda link: self._install_on(link, needs), context.links)
        finally:
            self._journal.hint("")
        return not self._unwanted()

    def _check_needed(self, link: AgentLink) -> None:
        needed = self._context.spec.job.needed
        folder = link.packages_folder(self._context.spec.cluster.pods.pip)
        argv = [link.pod.python, "-c", _LOOK, folder, *(each.name for each in needed)]
        try:
            found = get_object({"found": parse_json(link.run(argv, again=True))}, "found")
        except ValueError:
            # The pod prints other text too. The ranks check their packages themselves.
            logger.warning("%s did not answer which packages it has", link.pod.name)
            return
        for each in needed:
            has = as_str(found.get(each.name))
            if has and not _is_older(has, each.least):
                continue
            asked = f"{each.name}>={each.least}"
            raise self._error(
                link,
                f"{each.reason} needs the package {each.name} {each.least} or later, and "
                f"{link.pod.name} has {truncate(has) or 'none'}. Ask for the package by "
                f"PodSpec(pip=[\"{asked}\"]), or use an image with pip install '{asked}'",
            )

    def _install_on(self, link: AgentLink, needs: Requirements) -> None:
        try:
            self._make(link, needs)
        except BaseException:
            self._failed.set()  # the other pods end too
            raise

    def _make(self, link: AgentLink, needs: Requirements) -> None:
        answer = make_environment(
            link,
            folder=link.environment_folder(needs, self._env),
            request={
                "lines": list(needs.lines),
                "constraints": list(needs.constraints),
                "isolated": needs.isolated,
                "env": dict(self._env),
            },
            limit_s=_MOST_S,
            run=self._context.run_id,
            unwanted=lambda: self._unwanted() or self._failed.is_set(),
            show=partial(self._show, link),
        )
        state = answer.get("state")
        if state == "made" and not as_str(answer.get("line")):
            return  # the environment was there before
        self._fetch_log(link)
        if state == "late":
            raise self._error(link, f"the packages were not installed in {_MOST_S:.0f} s")
        if state not in ("made", "ended"):
            raise self._failure(link, needs, answer)

    def _show(self, link: AgentLink, line: str) -> None:
        self._lines[link.pod.name] = self._context.redact(truncate(line)) if line else ""
        parts = [f"{pod}: {line}" for pod, line in sorted(self._lines.items()) if line]
        self._journal.hint("; ".join(parts))

    def _failure(
        self, link: AgentLink, needs: Requirements, answer: Mapping[str, object]
    ) -> PackagesError:
        asked = short_list(needs.packages)
        why = truncate(as_str(answer.get("why"))) or "the agent of the pod named no reason"
        message = f"{asked} ({needs.source}) could not be installed: {why}{needs.way_out}"
        return self._error(link, message, as_str(answer.get("tail")))

    def _error(self, link: AgentLink, message: str, tail: str = "") -> PackagesError:
        redact = self._context.redact
        log = self._context.paths.packages_log(link.pod.name)
        if log.exists():
            message += f"; all lines are in {log}"
        fault = RunFault(
            host=link.pod.address,
            pod=link.pod.name,
            kind="packages",
            message=redact(message),
            traceback=redact(truncate(tail, _TAIL_LETTERS)) if tail else "",
        )
        return PackagesError(fault)

    def _fetch_log(self, link: AgentLink) -> None:
        """Copy the installer's output into the run's logs, with secrets masked. Raises nothing."""
        local = self._context.paths.packages_log(link.pod.name)
        try:
            link.get(str(self._context.on_pod(link).root / _LOG), local)
            mask_file(local, self._context.redact, self._context.paths.root)
        except (WorkbenchError, OSError) as error:
            logger.warning("the log of pip on %s: %s", link.pod.name, error)
            # The masking may have failed.
            if not remove_file(local):
                logger.warning("%s may hold secrets, and cannot be removed", local)


def _is_older(version: str, least: str) -> bool:
    """Return whether a version is older than another; an unknown version is not."""
    from packaging.version import InvalidVersion, Version

    try:
        return Version(version) < Version(least)
    except InvalidVersion:
        return False
