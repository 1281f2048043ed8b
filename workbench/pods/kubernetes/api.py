"""Calls to a Kubernetes API server, with retries where useful. Errors carry the server's own words.

`access.py` finds the server.
"""

from __future__ import annotations

import json
import random
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from workbench.base.errors import BackendError, ConfigError
from workbench.base.json_values import as_str, get_object
from workbench.base.words import strip_controls
from workbench.pods.kubernetes.login import LoginFailed, LoginWait
from workbench.pods.kubernetes.manifests import kueue
from workbench.pods.kubernetes.manifests.objects import Manifest, Owner
from workbench.pods.kubernetes.options import KubernetesOptions

Kind = Literal["pod", "event", "secret", "service", "persistent_volume_claim", "network_policy"]

_USUAL_CONNECT_S = 5.0
_ANSWER = 4  # times the limit of a connection
_GRACE_S = 2
_AT_ONCE = 16
_PATIENCE_S = 15.0
_AGAIN = (429, 500, 502, 503, 504)
_WATCH_S = 240
_WRONG_PLACE = (400, 404, 405, 426)  # statuses that another server may answer in plain words
_FOREIGN = 200  # the status of an answer that is not Kubernetes's: no wait and no Role helps
_PAGE = re.compile(r"\s*<(!doctype|html|head|body|\?xml)\b", re.IGNORECASE)
_TITLE = re.compile(r"<title[^<>]*>([^<>]+)<", re.IGNORECASE)
_TAG = re.compile(r"<[^<>]*>")
_ANONYMOUS = "system:anonymous"
"""The user of a request without credentials."""
_ROLE = "docker/kubernetes/rbac.yaml has the Role that is needed"


@dataclass(frozen=True, slots=True)
class _Verb:
    """A verb on a kind of object, in the words of a Role, and the client's function for it."""

    name: str
    kind: str
    call: Callable[..., Any]


class ApiRefusal(BackendError):
    def __init__(self, message: str, status: int, retry_after_s: float | None = None):
        """Keep the HTTP status, 0 without an answer, and the wait that the server asks for."""
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s


class KubeApi:
    """An API server and a namespace. Several threads may share an instance."""

    def __init__(self, options: KubernetesOptions, wait: LoginWait | None = None):
        """Find the server; a login helper of the kubeconfig may take the time of `wait`."""
        from kubernetes import client

        from workbench.pods.kubernetes.access import find_access

        access = find_access(options, wait or LoginWait())
        self._configuration, self.namespace, self.in_cluster = access
        self.giving_up = threading.Event()
        """Once set, nothing more is tried again for the sake of making something."""
        self._did: set[tuple[str, str]] = set()
        """Verb and kind of every call that the server has allowed."""
        self._client = client
        connect_s = float(options.connect_timeout_s)
        self._timeout_s = (connect_s, _ANSWER * connect_s)
        self._core = client.CoreV1Api(client.ApiClient(self._configuration))
        self._networking = client.NetworkingV1Api(self._core.api_client)

    @property
    def host(self) -> str:
        return str(self._configuration.host)

    def create(self, kind: Kind, manifest: Manifest) -> Manifest:
        try:
            made = self._call(self._verb("create", kind), self.namespace, manifest)
            if "uid" not in get_object(made, "metadata"):
                raise self._foreign(json.dumps(made))
            return made
        except _MadeBefore:  # by an earlier try whose answer was lost: the names are ours alone
            if kind != "pod":
                return manifest
            metadata = get_object(manifest, "metadata")
            return self.read_pod(as_str(metadata.get("name")))

    def delete(self, kind: Kind, name: str, uid: str = "", *, grace_s: int | None = None) -> None:
        """Delete an object if it exists and still has the given uid."""
        body: Manifest = {}
        if uid:
            body["preconditions"] = {"uid": uid}
        if grace_s is not None:
            body["gracePeriodSeconds"] = grace_s
        try:
            self._call(self._verb("delete", kind), name, self.namespace, body=body)
        except ApiRefusal as error:
            if error.status not in (404, 409):  # gone, or another of the same name
                raise

    def pods_of(self, selector: str) -> list[Manifest]:
        """Return the pods of a cluster."""
        listed, _ = self.list("pod", label_selector=selector)
        return listed

    def refusal_of_policies(self, name: str) -> str:
        """Return why the account may not make a NetworkPolicy; empty if it may. Makes nothing."""
        spec = {"podSelector": {}, "policyTypes": ["Ingress"]}
        policy = {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": {"name": name, "namespace": self.namespace},
            "spec": spec,
        }
        create = self._verb("create", "network_policy")
        try:
            self._call(create, self.namespace, policy, dry_run="All")
        except ApiRefusal as error:
            if error.status != 403:
                raise
            return str(error)
        return ""

    def close_group(self, names: Iterable[str]) -> str:
        """Tell Kueue that the group of these pods gets no replacement, on the first pod found.

        Without the mark, the quota of a group with a failed pod stays taken. Return the reason if
        no pod could be marked although some exist.
        """
        patch = self._verb("patch", "pod")
        for name in names:
            try:
                self._call(patch, name, self.namespace, kueue.FINAL)
            except ApiRefusal as error:
                if error.status == 404:
                    continue
                return str(error)
            return ""
        return ""

    def end_pods(self, pods: Iterable[tuple[str, str]]) -> list[str]:
        """Delete our pods.

        The first owns all other objects. Return the reasons of failed deletions.
        """
        with ThreadPoolExecutor(max_workers=_AT_ONCE) as pool:
            return [words for words in pool.map(self._end_pod, pods) if words]

    def _end_pod(self, pod: tuple[str, str]) -> str:
        try:
            self.delete("pod", *pod, grace_s=_GRACE_S)
        except ApiRefusal as error:
            return str(error)
        return ""

    def list_everywhere(
        self, kind: Literal["node", "pod"], **selector: str
    ) -> list[Manifest] | None:
        """Return the objects of all namespaces; None if the account may not list them."""
        function = (
            self._core.list_node if kind == "node" else self._core.list_pod_for_all_namespaces
        )
        try:
            listed = self._listed(_Verb("list", kind, function), **selector)
        except ApiRefusal as error:
            if error.status != 403:
                raise
            return None
        return list(listed["items"] or ())

    def list(self, kind: Kind, **selector: str) -> tuple[list[Manifest], str]:
        """Return the objects and the version of the list, from which a watch continues."""
        listed = self._listed(self._verb("list", kind), self.namespace, **selector)
        metadata = listed.get("metadata", {})
        version = str(metadata.get("resourceVersion", ""))
        return list(listed["items"] or ()), version

    def _listed(self, verb: _Verb, *args: Any, **selector: str) -> Any:
        listed: Any = self._call(verb, *args, **selector)
        if "items" not in listed:
            raise self._foreign(json.dumps(listed))
        return listed

    def watch(self, kind: Kind, version: str, **selector: str) -> Any:
        """Return the response to a watch, whose lines are events."""
        connect_s, _ = self._timeout_s
        return self._once(
            replace(self._verb("list", kind), name="watch"),
            self.namespace,
            watch=True,
            resource_version=version,
            allow_watch_bookmarks=True,
            timeout_seconds=_WATCH_S,
            _request_timeout=(connect_s, _WATCH_S + 30.0),
            **selector,
        )

    def read_pod(self, name: str) -> Manifest:
        read = _Verb("get", "pod", self._core.read_namespaced_pod)
        return self._call(read, name, self.namespace)

    def namespace_end(self) -> str:
        """Return words on the end of the namespace; empty while it exists, or if unknown."""
        name = self.namespace
        limits_s = self._timeout_s
        try:
            read = _Verb("get", "namespace", self._core.read_namespace)
            response = self._once(read, name, _request_timeout=limits_s)
            metadata = get_object(self.read(response.data), "metadata")
            return (
                f"the namespace {name} is being deleted" if "deletionTimestamp" in metadata else ""
            )
        except ApiRefusal as error:
            if error.status == 404:
                return f"the namespace {name} was deleted"
            if error.status == 401:  # the account may be one of the namespace
                return str(error)
        # Few accounts may read the namespace. Its RoleBindings go with the namespace.
        try:
            self._once(self._verb("list", "pod"), name, limit=1, _request_timeout=limits_s)
        except ApiRefusal as error:
            if error.status in (401, 403):
                return str(error)
        return ""

    def own_pod(self) -> Owner | None:
        """Return the pod of this process; None outside a cluster or in another namespace."""
        from workbench.pods.kubernetes.access import account_namespace

        if not self.in_cluster or account_namespace() != self.namespace:
            return None
        name = socket.gethostname()
        try:
            metadata: Any = self.read_pod(name)["metadata"]
        except ApiRefusal as error:
            if error.status == 404:  # a pod on its node's network has the node's name
                return None
            raise
        labels = {str(key): str(value) for key, value in (metadata.get("labels") or {}).items()}
        return Owner(name=name, uid=str(metadata["uid"]), labels=labels)

    def log(self, name: str, tail: int) -> str:
        read = _Verb("get", "pod/log", self._core.read_namespaced_pod_log)
        if self.giving_up.is_set():
            response = self._once(
                read,
                name,
                self.namespace,
                tail_lines=tail,
                _request_timeout=self._timeout_s,
            )
        else:
            response = self._again(read, name, self.namespace, tail_lines=tail)
        return bytes(response.data).decode(errors="backslashreplace")

    def forward(self, name: str, port: int) -> Any:
        """Open a WebSocket to a port of a pod; `portforward.py` speaks its protocol."""
        from kubernetes.stream import stream

        # `stream` changes the client that it is given while it opens the socket. So this call
        # has a client of its own.
        own = self._client.CoreV1Api(self._client.ApiClient(self._configuration))
        connect = partial(stream, own.connect_get_namespaced_pod_portforward)
        opened = self._once(
            _Verb("forward a port of", "pod", connect),
            name,
            self.namespace,
            ports=str(port),
            binary=True,
        )
        return opened.sock

    def _verb(self, name: str, kind: Kind) -> _Verb:
        api = self._networking if kind == "network_policy" else self._core
        return _Verb(name, kind, getattr(api, f"{name}_namespaced_{kind}"))

    def _call(self, verb: _Verb, *args: Any, **kwargs: Any) -> Manifest:
        response = self._again(verb, *args, **kwargs)
        return self.read(response.data)

    def read(self, data: bytes) -> Manifest:
        """Read an object in an answer. Another server, or a gateway, may have sent the answer."""
        try:
            answer = json.loads(data)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise self._foreign(data.decode(errors="replace"))
        return answer

    def _foreign(self, body: str) -> ApiRefusal:
        return ApiRefusal(
            f"{self.host} does not answer as a Kubernetes API server: {_excerpt(body)}. Check"
            " server: in the kubeconfig; if this is a login page, log in to the cluster first",
            _FOREIGN,
        )

    def _again(self, verb: _Verb, *args: Any, **kwargs: Any) -> Any:
        """Repeat a call while the server is overloaded or failing, within a time limit."""
        # A slow line leaves time for as many tries as a quick one.
        slowness = max(1.0, self._timeout_s[0] / _USUAL_CONNECT_S)
        deadline = time.monotonic() + _PATIENCE_S * slowness
        creates = verb.name == "create"
        tries = 0
        while True:
            try:
                limits_s = self._timeout_s
                return self._once(verb, *args, _request_timeout=limits_s, **kwargs)
            except ApiRefusal as error:
                if error.status == 409 and creates and tries:
                    raise _MadeBefore from error
                pause_s = _pause_s(error, tries)
                may_pass = error.status in (0, *_AGAIN)
                if not may_pass or time.monotonic() + pause_s > deadline:
                    raise
                if creates and self.giving_up.is_set():
                    raise
            tries += 1
            if creates:
                self.giving_up.wait(pause_s)
            else:
                time.sleep(pause_s)

    def _once(self, verb: _Verb, *args: Any, **kwargs: Any) -> Any:
        from urllib3.exceptions import HTTPError, MaxRetryError, NewConnectionError
        from urllib3.exceptions import TimeoutError as TooSlow

        try:
            response = verb.call(*args, _preload_content=False, **kwargs)
            headers = getattr(response, "headers", {})  # a WebSocket has none
            if str(headers.get("Content-Type")).startswith("text/html"):
                raise self._foreign(bytes(response.data).decode(errors="replace"))
            self._did.add((verb.name, verb.kind))
            return response
        except self._client.ApiException as error:
            raise self._refusal(verb.name, verb.kind, error) from error
        except LoginFailed as error:  # the token has expired, and the client asked for another
            raise ApiRefusal(
                f"the login to the Kubernetes API server {self.host} has expired: {error}", 401
            ) from error
        except (HTTPError, OSError) as error:
            cause = error.reason if isinstance(error, MaxRetryError) else error
            advice = ""
            # urllib3 counts a refused connection as a time-out, but no wait helps there.
            slow = isinstance(cause, TooSlow | TimeoutError)
            if slow and not isinstance(cause, NewConnectionError):
                longer_s = _ANSWER * self._timeout_s[0]
                advice = f"; KubernetesPods(…, connect_timeout_s={longer_s:g}) waits longer"
            raise ApiRefusal(
                f"the Kubernetes API server {self.host} does not answer: {error}{advice}", 0
            ) from error
        except ValueError as error:  # the client holds manifests against its models
            raise ConfigError(
                f"the {verb.kind}'s manifest is not valid: {_mistakes(error)}"
            ) from error

    def _refusal(self, verb: str, kind: str, error: Any) -> ApiRefusal:
        refused = error.__context__
        if not error.status and hasattr(refused, "status_code"):  # of a WebSocket
            error.status = refused.status_code
            error.body = refused.resp_body
        status = int(error.status or 0)
        body = error.body or ""
        page = body.decode(errors="replace") if isinstance(body, bytes) else str(body)
        # Without a status there was no answer by the API server at all.
        if not status:
            return ApiRefusal(
                f"there is no TLS connection to the Kubernetes API server {self.host}:"
                f" {strip_controls(str(error.reason))}. Check server:, the certificate authority"
                " and the client's certificate in the kubeconfig. A proxy on the way may have"
                " answered",
                _FOREIGN,
            )
        # A page of HTML, or a redirect, comes from a proxy or a login page.
        is_foreign = _PAGE.match(page) or (status in _WRONG_PLACE and not _is_status(page))
        if 200 <= status < 400 or (status < 500 and is_foreign):
            return self._foreign(page or f"{status} {error.reason}")
        words = _message(error)
        advice = _namespace_advice(status, words, self.namespace)
        # The advice depends on what worked before: a lost right differs from a right never given.
        if status == 401:
            advice = "; the credentials are not valid (any more): log in to the cluster again"
            if self._did:
                advice = (
                    "; the credentials were valid before: log in again if they have expired. An"
                    f" account of the namespace {self.namespace} is deleted with the namespace"
                )
        elif _ANONYMOUS in words:
            advice = (
                "; the server knows no account for this request: log in to the cluster, or check"
                " the user in the kubeconfig"
            )
            status = 401
        elif status == 403 and "exceeded quota" in words:
            advice = "; ask for fewer or smaller pods, or for a larger quota"
        elif status == 403 and "must specify" in words and ".memory" in words:
            advice = "; the namespace's quota asks for a limit: say memory_gib= in the PodSpec"
        elif status == 403 and "must specify" in words and "ephemeral-storage" in words:
            advice = (
                "; the namespace's quota asks for a limit: "
                "say ephemeral_storage_gib= in KubernetesPods"
            )
        elif status == 403 and " cannot " in words:
            advice = f"; {_ROLE}"
            if (verb, kind) in self._did:
                advice = (
                    f"; this was allowed before: the namespace {self.namespace}, the Role or its"
                    " RoleBinding was removed since"
                )
        # A busy server says how long to wait.
        headers = error.headers or {}
        seconds = str(headers.get("Retry-After", ""))
        retry_after_s = float(seconds) if seconds.isdigit() else None
        what = f"{verb} the {kind.replace('_', ' ')} in namespace {self.namespace}"
        return ApiRefusal(
            f"Kubernetes did not {what} ({error.status or 0}): {words}{advice}",
            status,
            retry_after_s,
        )


def _namespace_advice(status: int, words: str, namespace: str) -> str:
    if status == 403 and "is being terminated" in words:
        return f"; the namespace {namespace} is being deleted: use another namespace"
    if status == 404 and words.startswith("namespaces "):
        return f"; the namespace {namespace} was deleted or never made: make it, or use another"
    return ""


class _MadeBefore(Exception):
    """An object that we asked for is there already."""


def _pause_s(error: ApiRefusal, tries: int) -> float:
    """Return the seconds until the next try, with jitter.

    The server names the seconds, or the time doubles from 0.2 s on.
    """
    asked_s = error.retry_after_s
    if asked_s is None:
        asked_s = min(5.0, 0.2 * 2**tries)
    return asked_s * random.uniform(1.0, 1.2)


def _is_status(body: str) -> bool:
    """Whether an answer is an object of Kubernetes, as all its refusals of a right address are."""
    try:
        return isinstance(json.loads(body), dict)
    except ValueError:
        return False


def _message(error: Any) -> str:
    try:
        answer = json.loads(error.body)
        return str(answer["message"])
    except (TypeError, ValueError, KeyError):
        body = error.body.decode(errors="replace") if isinstance(error.body, bytes) else error.body
        words = str(body or error.reason or "no answer")
        return _excerpt(words) if _PAGE.match(words) else words[:500]


def _excerpt(body: str) -> str:
    """Return the first words of an answer that is not Kubernetes's."""
    if not body.strip():
        return "an empty answer"
    kind = "an answer"
    if _PAGE.match(body):
        kind = "an HTML page"
        titled = _TITLE.search(body)
        body = titled[1] if titled else _TAG.sub(" ", body[:20_000])
    return f'{kind} "{strip_controls(body)[:200]}"'


def _mistakes(error: ValueError) -> str:
    """Return where a manifest is wrong, without its values."""
    mistakes: list[Any] = getattr(error, "errors", list)()
    parts = []
    for mistake in mistakes[:5]:
        place = ".".join(map(str, mistake["loc"][1:]))
        parts.append(f"{place}: {mistake['msg']}")
    if not parts:
        return str(error)[:500]
    return "; ".join(parts)
