"""`KubernetesPods`: pods of a Kubernetes cluster.

All that is made are a Secret, a headless Service, a NetworkPolicy and the pods.
"""

from __future__ import annotations

import importlib.util
import logging
import secrets
import threading
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from pydantic import PrivateAttr

from workbench.base.errors import BackendError, ConfigError, WorkbenchError
from workbench.pods.kubernetes.login import LoginWait
from workbench.pods.kubernetes.options import KubernetesOptions
from workbench.pods.notes import note_of, read_note, write_note
from workbench.pods.place import Place
from workbench.pods.pod import LaunchContext, Pod
from workbench.pods.pod_spec import PodSpec
from workbench.pods.ssh.identity import check_key_line

if TYPE_CHECKING:
    from workbench.pods.kubernetes.api import KubeApi
    from workbench.pods.kubernetes.manifests.objects import Manifest
    from workbench.pods.kubernetes.session import Session

_LOG = logging.getLogger(__name__)
RECORD = "kubernetes.json"
"""Name of the note on the cluster's objects."""
# The agent ends its ranks at the end of the lease. The pod stays a little longer, for a keeper
# to see.
_MARGIN_S = 60.0
_GROUP_S = 3600.0  # between the first and the last pod of a group at most
_KUEUE_S = 15.0
_LOOK_S = 0.5


class KubernetesPods(KubernetesOptions, Place):
    """Pods of a Kubernetes cluster.

    Takes the options of `KubernetesOptions`; starts nothing when made.

    Raises:
        ConfigError: An option is invalid, or the kubernetes package is missing; the message names
            the remedy.
    """

    observes_pods: ClassVar[bool] = True

    _session: Session | None = None
    _record: Path | None = None
    _launched: bool = False
    _stopped: bool = False
    _turn: threading.Lock = PrivateAttr(default_factory=threading.Lock)

    def model_post_init(self, context: object) -> None:
        """Check that the client is installed."""
        super().model_post_init(context)
        if importlib.util.find_spec("kubernetes") is None:
            raise ConfigError(
                "KubernetesPods needs the kubernetes package; run: pip install 'kubernetes>=37'"
            )

    @property
    def has_queue(self) -> bool:
        """Kueue keeps the pods of a queue waiting for their quota."""
        return bool(self.queue)

    def launch(self, spec: PodSpec, count: int, context: LaunchContext) -> list[Pod]:
        """Make the pods and wait until each can be reached; see `Place.launch`."""
        if self._launched:
            raise BackendError("the Kubernetes pods are launched already; stop the pods first")
        if count < 1:
            raise ConfigError(f"count is {count!r}; a cluster has at least one pod")
        check_key_line(context.public_key)
        self._stopped = False
        # The record of an earlier cluster in this directory may name objects that could not be
        # removed then.
        self.remove_left(context.directory)
        session = self._prepare(spec, count, context)
        try:
            with self._turn:
                self._session = session
                self._launched = True
                stopped = self._stopped
            if stopped:
                raise BackendError("the Kubernetes pods were stopped before the first was made")
            return session.open()
        except BaseException as error:
            try:
                self.stop()
            except WorkbenchError as left:
                # The class stays, so that callers can tell errors apart.
                error.args = (f"{error}\n{left}",)
            raise

    def adopt(self, pods: Sequence[Pod], spec: PodSpec, context: LaunchContext, /) -> list[Pod]:
        """Take over the pods with the name that their keeper noted."""
        base = read_note(context.directory, RECORD).get("base")
        if not base:
            raise BackendError(
                f"{note_of(context.directory, RECORD)} is gone, so the names of the pods are"
                " unknown; start another cluster"
            )
        session = self._prepare(spec, len(pods), context, str(base))
        self._session = session
        self._launched = True
        self._stopped = False
        return session.adopt(pods)

    def restore(self, lost: Collection[str], spec: PodSpec, context: LaunchContext, /) -> list[Pod]:
        """Make lost pods again; all pods if the first, their owner, is lost.

        See `Place.restore`.
        """
        session = self._session
        pods = self.refresh()
        if session is None or not pods:
            raise BackendError(
                "no Kubernetes pods are running: none were launched, or all were stopped"
            )
        if pods[0].name not in lost:
            return session.restore([index for index, pod in enumerate(pods) if pod.name in lost])
        try:
            session.close()
        except BackendError as error:
            # The next start removes what is left. The run must not wait for it.
            _LOG.warning("replacing the cluster's pods: %s", error)
        again = self._prepare(spec, len(pods), context)
        with self._turn:
            self._session = again
            stopped = self._stopped
        if stopped:
            again.close()
            raise BackendError("the Kubernetes pods were stopped before their replacements existed")
        return again.open()

    def refresh(self) -> list[Pod]:
        """Return the pods as the watch last saw them."""
        return self._session.look() if self._session is not None and self._launched else []

    def logs(self, name: str, tail: int = 50) -> str:
        """Return the last lines of a pod's log; also after `stop`."""
        if self._session is None:
            raise ConfigError(f"no Kubernetes pod {name!r} was launched")
        return self._session.log(name, tail)

    def stop(self) -> None:
        """Delete the pods and await their end. Idempotent; a repeated call retries after a refusal.

        The keeper's note stays until nothing is left. `remove_left` reads the note.
        """
        with self._turn:
            session = self._session
            self._stopped = True
            self._launched = False
        if session is not None:
            session.close()
        if self._record is not None:
            self._record.unlink(missing_ok=True)

    def remove_left(self, directory: Path) -> None:
        """Delete the objects of a cluster directory's keeper, by its note. Idempotent."""
        record = note_of(directory, RECORD)
        noted = read_note(directory, RECORD)
        base = noted.get("base")
        server = noted.get("server")
        if not base:
            return  # it made nothing, or has removed it
        from workbench.pods.kubernetes.api import ApiRefusal, KubeApi
        from workbench.pods.kubernetes.manifests.kueue import is_held
        from workbench.pods.kubernetes.manifests.objects import CLUSTER_LABEL
        from workbench.pods.kubernetes.session import held_by_kueue, left_behind
        from workbench.pods.kubernetes.status import identity

        api = KubeApi(self)
        # The kubeconfig's context may name another namespace or server by now.
        api.namespace = str(noted.get("namespace") or api.namespace)
        try:
            pods = api.pods_of(f"{CLUSTER_LABEL}={base}")
            held = [pod for pod in pods if is_held(pod)]
            left = [api.close_group(identity(pod)[0] for pod in held)]
            left = [*filter(None, left), *api.end_pods(map(identity, pods))]
            if held and not left:
                left = held_by_kueue(_after_kueue(api, f"{CLUSTER_LABEL}={base}"))
        except ApiRefusal as error:
            pods = []
            left = [str(error)]
        if left:
            raise BackendError(left_behind(api.namespace, str(base), left))
        if not pods and server not in (None, api.host):
            raise BackendError(
                f"the Kubernetes objects of {base} were made on {server}, but the options lead to"
                f" {api.host}. Nothing"
                f" was removed. Choose the context of {server} and call close() again, or delete"
                f" {record}"
            )
        record.unlink(missing_ok=True)

    def _prepare(
        self, spec: PodSpec, count: int, context: LaunchContext, base: str = ""
    ) -> Session:
        from workbench.pods.kubernetes.api import KubeApi
        from workbench.pods.kubernetes.manifests.objects import ClusterObjects, base_name
        from workbench.pods.kubernetes.session import Session

        base = base or base_name(context.cluster_id, secrets.token_hex(3))
        # A start that is given up ends a login helper that waits for a person.
        wait = LoginWait(
            limit_s=context.timeout_s,
            report=context.report,
            is_given_up=lambda: self._stopped,
        )
        api = KubeApi(self, wait)
        # A server that refuses this first call has made nothing, so no record may name it.
        self._sweep(api)
        refused = api.refusal_of_policies(base)
        if refused:
            words = f"other pods of the namespace may reach the ports of the pods: {refused}"
            _LOG.warning("%s", words)
            context.report(words)
        objects = ClusterObjects(
            base=base,
            namespace=api.namespace,
            options=self,
            spec=spec,
            count=count,
            lease_s=context.lease_s + _MARGIN_S,
            # Kueue admits all pods of a group at once, so a pod waits for no queue.
            wait_s=self.pull_timeout_s + min(context.timeout_s, _GROUP_S) + _MARGIN_S,
            guarded=not refused,
        )
        record = {"base": base, "namespace": api.namespace, "server": api.host}
        self._record = note_of(context.directory, RECORD)
        write_note(context.directory, RECORD, record)
        forward = self.reach == "port-forward" or (self.reach == "auto" and not api.in_cluster)
        return Session(api, objects, context, forward)

    def _sweep(self, api: KubeApi) -> None:
        """Delete ended pods of dead keepers."""
        from workbench.pods.kubernetes.manifests.kueue import is_held
        from workbench.pods.kubernetes.manifests.objects import MANAGED_BY
        from workbench.pods.kubernetes.status import identity, leftovers

        pods, _ = api.list("pod", label_selector="=".join(MANAGED_BY))
        for pod in leftovers(pods, time.time()):
            name, uid = identity(pod)
            _LOG.info("deleting %s, which an earlier cluster left", name)
            if is_held(pod):
                refused = api.close_group([name])
                if refused:
                    _LOG.warning("%s", refused)
            api.delete("pod", name, uid)


def _after_kueue(api: KubeApi, selector: str) -> list[Manifest]:
    """Return the pods that Kueue still keeps after it had the time to release them."""
    from workbench.pods.kubernetes.manifests.kueue import is_held

    deadline = time.monotonic() + _KUEUE_S
    while True:
        held = [pod for pod in api.pods_of(selector) if is_held(pod)]
        if not held or time.monotonic() > deadline:
            return held
        time.sleep(_LOOK_S)
