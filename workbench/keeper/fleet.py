"""Launch the pods of a cluster, keep pods and agents alive, and shut everything down."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

from workbench.base.errors import ConfigError, PodError, RunError, WorkbenchError
from workbench.base.files import write_text
from workbench.base.package import package_zip
from workbench.keeper.boundary import isolate_pod_errors
from workbench.keeper.link.agent import AgentLink, stop_ranks
from workbench.keeper.link.files import ContentStore
from workbench.keeper.link.peers import Peers
from workbench.keeper.link.shared import folders_to_probe, shared_words
from workbench.keeper.resource_limits import in_threads, start_thread
from workbench.pods.backends import backend_from_dict
from workbench.pods.hostfile import Hostfile
from workbench.pods.place import Place
from workbench.pods.pod import LaunchContext, Phase, Pod, Report
from workbench.pods.pod_spec import PodSpec
from workbench.pods.ssh.identity import Identity
from workbench.rundir.paths import ClusterPaths
from workbench.rundir.spec import ClusterSpec

logger = logging.getLogger(__name__)
_LOOK_S = 3.0
_AT_ONCE = 32
_SPEAKERS = 4
# Every request renews the lease. The watch of a run asks often, so nothing else has to.
_RECENT = 0.8
_CLOSING_S = 10.0  # as long as ssh takes to see that a line is dead
_REMOVAL_S = 900.0
_REMOVAL_SHOWN_S = 5


class Fleet:
    def __init__(
        self,
        paths: ClusterPaths,
        spec: ClusterSpec,
        report: Report,
        changed: Callable[[], None] = lambda: None,
        *,
        closing: threading.Event,
    ):
        """Own the pods of a spec. `changed` is called when a pod's phase or message changes.

        `closing` is set when the cluster is being closed; nothing then waits for a lost pod.
        """
        self.pods: Sequence[Pod] = ()
        """Pods as last seen."""
        self.arrived: Sequence[Pod] = ()
        """Pods that are already running, while the launch waits for others."""
        self.owned = False
        """Whether pods exist or are starting that this keeper must take down."""
        self.paths = paths
        self.spec = spec
        self._report = report
        self._changed = changed
        self._closing = closing
        self._left: set[str] = set()
        """Pods that did not answer while the cluster closed. Nothing waits for them again."""
        self._backend: Place = backend_from_dict(spec.backend)
        self._identity: Identity | None = None
        self._links: list[AgentLink] = []
        self._looking = threading.Lock()
        self._restoring = threading.Lock()
        self._replacing = False
        self._given_up = False

    @property
    def identity(self) -> Identity:
        """SSH key of the cluster. The key exists once the launch has started."""
        return self._identity or Identity(self.paths.identity)

    @property
    def package(self) -> str:
        """Path of this package on the pods. Empty before the pods exist."""
        return self._links[0].package if self._links else ""

    @property
    def shared(self) -> str:
        """Description of the folders shared with the pods. Empty if no folder is shared."""
        return shared_words([(link.pod.name, link.shared) for link in self._links])

    def launch(self) -> None:
        self.owned = True
        self._identity = Identity.create(self.paths.identity)
        self._check_wanted()
        self.pods = self._backend.launch(
            self.spec.pods, self.spec.count, self._context(self.spec.start_limit_s)
        )
        self._check_wanted()
        self.arrived = ()
        _check_versions(self.pods)
        self._connect()
        self._report("starting agents")
        self._everywhere(AgentLink.open)
        _check_interfaces(self._links, self.spec.pods)
        pip = self.spec.pods.pip
        if pip:
            self._report(f"installing packages: {', '.join(pip)}")
            self._everywhere(self._install)

    def _install(self, link: AgentLink) -> None:
        link.install(self.spec.pods, self.spec.step_limit_s)

    def restore(self, lost: Collection[str]) -> Mapping[str, str]:
        """Reconnect to or replace lost pods. Return the reason for pods still lost, by name."""
        with self._restoring:
            self.refresh()
            gone = set()
            for link in self._links:
                name = link.pod.name
                if name not in lost:
                    continue
                if self._reason_gone(name) or not _try_open(link):
                    gone.add(name)
            if not gone:
                return {}
            keys_before = {pod.name: pod.host_key for pod in self.pods}
            try:
                now = {pod.name: pod for pod in self._replace(gone)}
            except (WorkbenchError, OSError) as error:
                logger.warning("replacing %s: %s", sorted(gone), error)
                return dict.fromkeys(gone, str(error))
            left = {}
            for name in gone:
                if now[name].phase.is_terminal:
                    left[name] = now[name].message or "the pod has ended"
            for link in self._links:
                pod = now[link.pod.name]
                if pod.name in left:
                    continue
                if pod.name in gone or pod.host_key != keys_before[pod.name]:
                    words = self._renew(link, pod)
                    if words:
                        left[pod.name] = words
            return left

    def _replace(self, gone: Collection[str]) -> Sequence[Pod]:
        with self._looking:
            self._replacing = True
        try:
            self._report(f"{', '.join(sorted(gone))} lost; looking for replacements")
            context = self._context(self.spec.step_limit_s)
            pods = self._backend.restore(gone, self.spec.pods, context)
            self._set_pods(pods)
            alive = [pod for pod in self.pods if not pod.phase.is_terminal]
            _check_versions(alive)
            return self.pods
        finally:
            self._replacing = False
            self.arrived = ()

    def _renew(self, link: AgentLink, pod: Pod) -> str:
        try:
            self.identity.pin(self.pods)
            write_text(self.paths.hostfile, str(Hostfile.from_pods(self.pods)))
            link.renew(pod)
            _check_interfaces([link], self.spec.pods)
            self._install(link)
        except (WorkbenchError, OSError) as error:
            return f"{pod.name} was started again and cannot be used: {error}"
        self._report(f"{pod.name} is there again")
        return ""

    def _set_pods(self, pods: Sequence[Pod]) -> None:
        seen = {pod.name: pod for pod in pods}
        gone = "the pod does not exist any more"
        now = []
        for pod in self.pods:
            failed = replace(pod, phase=Phase.FAILED, message=gone)
            now.append(seen.get(pod.name, failed))
        self.pods = now

    def adopt(self) -> None:
        """Take over the pods of a dead keeper. Pods without an answer are tried again later."""
        identity = Identity(self.paths.identity)
        if not identity.key.exists():
            raise PodError(
                f"the key to the pods, {identity.key}, is gone, so the pods cannot be reached any "
                "more. Remove the rest with Cluster(…, path=…).close(), and start another cluster"
            )
        self._identity = identity
        self.pods = self._backend.adopt(
            self.pods, self.spec.pods, self._context(self.spec.step_limit_s)
        )
        self.owned = True
        self._connect()
        self._report("looking for the agents")
        self._everywhere(_try_open)

    def _context(self, timeout_s: float) -> LaunchContext:
        return LaunchContext(
            cluster_id=self.paths.root.name,
            directory=self.paths.root,
            public_key=self.identity.public_key,
            lease_s=self.spec.lease_s,
            timeout_s=timeout_s,
            report=self._report,
            arrived=self._arrive,
            warm=self.spec.warm,
        )

    def _arrive(self, pods: Sequence[Pod]) -> None:
        self.arrived = tuple(pods)

    def _connect(self) -> None:
        self.identity.pin(self.pods)
        write_text(self.paths.hostfile, str(Hostfile.from_pods(self.pods)))
        spec = self.spec
        package = package_zip()
        folders = folders_to_probe(spec, self.paths.root)
        shared = ContentStore() if spec.is_local else None
        self._links = [
            AgentLink(
                pod,
                self.identity,
                lease_s=spec.lease_s,
                package=package,
                warm=spec.warm,
                folders=folders,
                stock=shared,
            )
            for pod in self.pods
        ]
        peers = Peers()
        for link in self._links:
            link.reason_gone = partial(self._reason_gone, link.pod.name)
            link.peers = peers

    def give_up(self) -> None:
        """Make a pending launch fail soon, even from another thread or before the launch starts."""
        self._given_up = True
        try:
            self._backend.stop()
        except Exception:  # `take_down` follows in any case.
            logger.exception("stopping the pods")

    def _check_wanted(self) -> None:
        if self._given_up:
            raise PodError("the cluster was closed during its start")

    def first_live(self, count: int) -> list[AgentLink]:
        if not 1 <= count <= len(self._links):
            raise RunError(f"the job asks for {count} pods; the cluster has {len(self._links)}")
        ended = [
            f"{pod.name} is {pod.phase}: {pod.message}"
            for pod in self.pods
            if pod.phase.is_terminal
        ]
        alive = self._alive()
        if len(alive) < count:
            raise RunError("\n".join([*ended, "start another cluster"]))
        return alive[:count]

    def free(self, count: int, busy: Collection[AgentLink]) -> list[AgentLink] | None:
        """Return the links to the first free live pods. Return None while too few are free."""
        alive = self._alive()
        if len(alive) < count and not busy:
            # Pods died while the run waited. The run itself reports the loss.
            return self._links[:count]
        free = [link for link in alive if link not in busy]
        if len(free) < count:
            return None
        return free[:count]

    def at(self, addresses: Collection[str]) -> list[AgentLink]:
        """Return the links to the pods with the given addresses, in any phase."""
        return [link for link in self._links if link.pod.address in addresses]

    def named(self, names: Collection[str]) -> list[AgentLink]:
        """Return the links to the pods with the given names, in any phase."""
        return [link for link in self._links if link.pod.name in names]

    def stop_ranks(self, run_id: str) -> None:
        """Stop the processes of a run on all pods."""
        stop_ranks(self._links, run_id)

    def _alive(self) -> list[AgentLink]:
        ended = {pod.name for pod in self.pods if pod.phase.is_terminal}
        return [link for link in self._links if link.pod.name not in ended]

    def refresh(self) -> Sequence[Pod]:
        """Ask the platform for the current state of the pods, and report newly ended pods.

        While the platform does not answer, the pods stay as they were.
        """
        with self._looking:
            if self._replacing:
                return self.pods
            before = {pod.name for pod in self.pods if pod.phase.is_terminal}
            shown = [(pod.phase, pod.message) for pod in self.pods]
            try:
                self._set_pods(self._backend.refresh())
            except (WorkbenchError, OSError) as error:
                logger.warning("looking after the pods: %s", error)
                return self.pods
            if shown != [(pod.phase, pod.message) for pod in self.pods]:
                self._changed()
            ended = [pod for pod in self.pods if pod.phase.is_terminal and pod.name not in before]
            if ended:
                self._report(
                    "; ".join(f"{pod.name} is {pod.phase}: {pod.message}" for pod in ended)
                )
            return self.pods

    def _reason_gone(self, name: str, silent_s: float = 0.0) -> str:
        """Return why a pod, silent for some seconds, will not answer again; empty while it may."""
        pod = next(pod for pod in self.refresh() if pod.name == name)
        is_closing = self._closing.is_set()
        if pod.phase.is_terminal or (pod.phase is Phase.UNKNOWN and is_closing):
            return f"{name} is {pod.phase}: {pod.message or 'no more is known'}"
        # The place says that the pod runs: a closing cluster waits a short time.
        if is_closing and silent_s >= _CLOSING_S:
            self._left.add(name)
        if is_closing and name in self._left:
            return (
                f"{name} is {pod.phase} and does not answer; the cluster closes without its files"
            )
        return ""

    def renew_leases(
        self, closing: threading.Event, busy: Callable[[], Collection[AgentLink]]
    ) -> None:
        """Ping every agent often enough to renew its lease, and watch the pods, until closing."""
        pause_s = min(_LOOK_S, self.spec.lease_s / 3)
        links = deque(self._links)
        spoken_to: set[AgentLink] = set()

        def speak(link: AgentLink) -> None:
            try:
                _keep_alive(link, busy())
            except Exception:  # Thread boundary.
                logger.exception("speaking to %s", link.pod.name)
            finally:
                spoken_to.discard(link)

        # Pods that have just answered a watch need no call. A silent pod holds up its own thread.
        def speak_to_all() -> None:
            while links and not closing.wait(pause_s / len(links)):
                links.rotate(-1)
                link = links[-1]
                if link in spoken_to or len(spoken_to) == _SPEAKERS:
                    continue
                if link.silent_s < _RECENT * pause_s:
                    continue
                spoken_to.add(link)
                try:
                    threading.Thread(target=speak, args=(link,), daemon=True).start()
                except RuntimeError:  # No thread can start now.
                    speak(link)

        threading.Thread(target=speak_to_all, name="keep", daemon=True).start()
        while not closing.wait(pause_s):
            try:
                self.refresh()
            except Exception:  # Thread boundary.
                logger.exception("looking after the pods")

    def remove_environments(self, say: Report) -> None:
        """Remove the environments of jobs on all pods, and report the time. Raises nothing.

        The many files of an environment take longer than a place waits for the end of a pod.
        """
        ended = threading.Event()

        def report() -> None:
            seconds = 0
            while not ended.wait(_REMOVAL_SHOWN_S):
                seconds += _REMOVAL_SHOWN_S
                say(f"removing the environments of scripts, {seconds} s so far")

        thread = threading.Thread(target=report, name="removal", daemon=True)
        start_thread(thread)
        try:
            self._everywhere(_remove_environments)
        finally:
            ended.set()
            thread.join()

    def take_down(self) -> None:
        """Stop the agents and the pods, and delete the key. Takes about 20 s at most."""
        try:
            self._everywhere(_shut_down)
        finally:
            self.give_up()
            if self._identity is not None:
                self._identity.destroy()

    def _everywhere(self, action: Callable[[AgentLink], object]) -> None:
        for begin in range(0, len(self._links), _AT_ONCE):
            in_threads(action, self._links[begin : begin + _AT_ONCE])


def _keep_alive(link: AgentLink, busy: Collection[AgentLink]) -> None:
    with isolate_pod_errors(link.pod.name, "keeping the agent alive"):
        if link in busy:
            link.call("ping")
        else:
            link.ensure()


def _try_open(link: AgentLink) -> bool:
    try:
        link.open()
    except (WorkbenchError, OSError) as error:
        logger.warning("%s does not answer: %s", link.pod.name, error)
        return False
    return True


def _remove_environments(link: AgentLink) -> None:
    with isolate_pod_errors(link.pod.name, "removing the environments"):
        # A pod that does not answer costs no more time than its end does.
        if link.call("has_environments").get("environments") is True:
            link.work("remove_environments", _REMOVAL_S)


def _shut_down(link: AgentLink) -> None:
    with isolate_pod_errors(link.pod.name, "ending the agent"):
        link.call("shutdown")
    link.close()


def _check_interfaces(links: Sequence[AgentLink], spec: PodSpec) -> None:
    """Raise ConfigError if a pod has not every network interface of the spec."""
    lacks = []
    for link in links:
        missing = [name for name in spec.interfaces if name not in link.interfaces]
        # An agent that names no interface has not looked.
        if missing and link.interfaces:
            there = ", ".join(link.interfaces)
            lacks.append(
                f"{link.pod.name} has no interface {', '.join(missing)}; there are {there}"
            )
    if lacks:
        lines = "\n".join(lacks)
        raise ConfigError(f"PodSpec.interfaces names missing interfaces:\n{lines}")


def _check_versions(pods: Sequence[Pod]) -> None:
    """Raise PodError if library versions differ: collectives then hang or return wrong sums."""
    names: set[str] = set()
    for pod in pods:
        names.update(pod.versions)
    different = []
    for name in sorted(names):
        versions = [pod.versions.get(name, "none") for pod in pods]
        if len(set(versions)) > 1:
            pairs = zip(pods, versions, strict=True)
            on_pods = ", ".join(f"{pod.name} {version}" for pod, version in pairs)
            different.append(f"{name}: {on_pods}")
    if different:
        raise PodError(
            "the pods have different versions; make them equal first:\n" + "\n".join(different)
        )
