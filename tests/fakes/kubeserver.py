"""A Kubernetes API server for tests: kmock's emulator, and what else our pods depend on.

Added are uids, label selectors, delayed deletion, preconditions, the
log, the port-forward over a WebSocket, refusals by a Role, and faults on
demand. What it serves comes over real HTTP; `kubelet.py` runs the pods.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import kmock
from aiohttp import WSMsgType, web

KUEUE = "kueue.x-k8s.io/"
KUBELET = "X-Kubelet"
"""Header of the kubelet's own requests: neither recorded nor refused."""
ACCOUNT = "system:serviceaccount:lab:workbench"

_PATH = re.compile(
    r"/(?:api|apis/networking\.k8s\.io)/v1/"
    r"(?:namespaces/([^/]+)/)?([a-z]+)(?:/([^/]+)(?:/([a-z]+))?)?"
)
_VERBS = {"POST": "create", "DELETE": "delete", "PATCH": "patch", "PUT": "update"}


@dataclass
class Fault:
    """Some answers that a call gets instead of the real one."""

    verb: str
    resource: str
    status: int
    message: str = "the server is out of sorts"
    headers: dict[str, str] = field(default_factory=dict)
    times: int = 1
    skip: int = 0
    """Calls that go well before it."""
    after: bool = False
    """Whether the server does what it was asked for, and loses the answer."""


class ApiServer(kmock.KubernetesEmulator):  # type: ignore[misc]
    """The API server."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, str]] = []
        """Verb and resource of every call but the kubelet's, as RBAC sees them."""
        self.allowed: set[tuple[str, str]] | None = None
        """What the caller's Role allows; None: everything."""
        self.allowed_everywhere: set[tuple[str, str]] = set()
        """What a ClusterRole allows in addition, where no namespace is named."""
        self.faults: list[Fault] = []
        self.deleted_namespace = False
        """Whether the namespace lab has gone; its objects go one by one, by the tests."""
        self.away = False
        """Whether it has gone: it breaks open and new calls, not the kubelet's; objects stay."""
        self.kubelet_away = False
        """Whether the node's kubelet, which has logs and port-forwards, does not answer."""
        self.kueue = True
        """Whether Kueue's controller runs; its webhook marks pods of a queue in any case."""
        self.read_log: Callable[[str], str | None] = lambda _name: None
        self.watches: dict[int, web.BaseRequest] = {}  # a request cannot be hashed
        self.forwards: dict[int, web.BaseRequest] = {}
        for resource in (
            "pods",
            "secrets",
            "services",
            "events",
            "persistentvolumeclaims",
            "configmaps",
        ):
            self.resources[f"v1/{resource}"] = {"namespaced": True}
        self.resources["networking.k8s.io/v1/networkpolicies"] = {"namespaced": True}
        self.resources["v1/nodes"] = {"namespaced": False}

    async def __call__(  # noqa: C901, PLR0912
        self, raw_request: web.BaseRequest
    ) -> web.StreamResponse:
        match = _PATH.fullmatch(raw_request.path)
        if match is None or KUBELET in raw_request.headers:
            return await super().__call__(raw_request)
        if self.away:
            return self._abort(raw_request)
        in_namespace, kind, name, sub = match.groups()
        resource = f"{kind}/{sub}" if sub else kind
        watching = raw_request.query.get("watch") in ("true", "True", "1")
        read = "get" if name else "watch" if watching else "list"
        verb = _VERBS.get(raw_request.method, read)
        needed = [verb, "create"] if sub == "portforward" else [verb]  # as from Kubernetes 1.35 on
        self.calls += [(each, resource) for each in needed]
        forbidden = self._forbidden(needed, resource, in_namespace, name)
        if forbidden is not None:
            return forbidden
        if (kind, name) == ("namespaces", "lab"):
            return self._namespace()
        fault = next(
            (f for f in self.faults if (f.verb, f.resource) == (verb, resource) and f.times), None
        )
        if fault is not None and fault.skip:
            fault.skip -= 1
        elif fault is not None:
            fault.times -= 1
            if fault.after:
                await super().__call__(raw_request)
            return refused(fault.status, fault.message, fault.headers)
        if sub in ("log", "portforward") and self.kubelet_away:
            return refused(
                500, "error dialing backend: dial tcp 10.0.0.9:10250: connect: connection refused"
            )
        if raw_request.query.get("dryRun"):
            return web.json_response(await raw_request.json(), status=201)
        if sub == "log":
            return self._log(name, int(raw_request.query.get("tailLines", "0")))
        if sub == "portforward":
            self.forwards[id(raw_request)] = raw_request
            try:
                return await self._forward(raw_request, name)
            finally:
                del self.forwards[id(raw_request)]
        if watching:
            self.watches[id(raw_request)] = raw_request
        try:
            return await super().__call__(raw_request)
        finally:
            self.watches.pop(id(raw_request), None)

    def _forbidden(
        self, needed: list[str], resource: str, in_namespace: str | None, name: str | None
    ) -> web.Response | None:
        allowed = self.allowed if in_namespace else self.allowed_everywhere
        for each in needed:
            if self.allowed is not None and allowed is not None and (each, resource) not in allowed:
                kind = resource.partition("/")[0]
                named = f'{kind} "{name}"' if name else kind
                where = 'in the namespace "lab"' if in_namespace else "at the cluster scope"
                who = (
                    f'User "{ACCOUNT}" cannot {each} resource "{resource}" in API group "" {where}'
                )
                return refused(403, f"{named} is forbidden: {who}")
        return None

    def _namespace(self) -> web.Response:
        if self.deleted_namespace:
            return refused(404, 'namespaces "lab" not found')
        return web.json_response({"kind": "Namespace", "metadata": {"name": "lab"}})

    def go_away(self) -> None:
        """Be killed in the middle, as an API server may be; `away = False` brings it up again."""
        self.away = True
        self.cut(self.watches)
        self.cut(self.forwards)

    def _abort(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.transport is not None:
            request.transport.abort()
        return web.Response(status=500)

    def cut(self, requests: dict[int, web.BaseRequest]) -> None:
        """Break connections in the middle, as a load balancer does."""
        for request in list(requests.values()):
            if request.transport is not None:
                request.transport.abort()

    def live(self) -> list[dict[str, Any]]:
        """Give all objects that are there but events."""
        found = [
            (key, item)
            for key, item in self.objects.items()
            if not item.deleted and key[0].plural != "events"
        ]
        return [item.raw for _, item in found]

    async def _handle(self, request: kmock.Request) -> web.StreamResponse:
        if request.action == kmock.action.CREATE:
            metadata = request.data["metadata"]
            metadata.setdefault("namespace", request.namespace)
            metadata |= {
                "uid": str(uuid.uuid4()),
                "creationTimestamp": datetime.now(UTC).isoformat(),
            }
            if request.resource.plural == "pods":
                metadata["finalizers"] = [
                    "tests/kubelet"
                ]  # what the kubelet lifts once the pod's processes are gone
                if f"{KUEUE}queue-name" in (metadata.get("labels") or {}):
                    metadata["finalizers"].append(f"{KUEUE}managed")
        elif request.action == kmock.action.UPDATE and request.resource.plural == "pods":
            self._keep_kueues_finalizer(request)
        elif request.action == kmock.action.DELETE and request.name is not None:
            wanted = ((request.data or {}).get("preconditions") or {}).get("uid")
            key = (request.resource, request.namespace, request.name)
            item = next((found for name, found in self.objects.items() if name == key), None)
            if (
                item is not None
                and not item.deleted
                and wanted not in (None, item.raw["metadata"]["uid"])
            ):
                return refused(
                    409, f"the UID in the precondition ({wanted}) does not match the UID in record"
                )
        answer = await super()._handle(request)
        if request.action and request.resource and request.resource.plural == "pods" and self.kueue:
            await self.reconcile()
        return answer

    def _keep_kueues_finalizer(self, request: kmock.Request) -> None:
        """The kubelet lifts its own finalizer only."""
        metadata = (request.data or {}).get("metadata") or {}
        if metadata.get("finalizers") != []:
            return
        for (kind, _, name), item in self.objects.items():
            if kind == request.resource and name == request.name and not item.deleted:
                held = item.raw["metadata"].get("finalizers") or []
                metadata["finalizers"] = [each for each in held if each.startswith(KUEUE)]

    async def reconcile(self) -> None:
        """Be Kueue's controller for plain pods, by the rule of its `pod_controller.go`."""
        groups: dict[str, list[Any]] = {}
        async with self._lock:
            for (kind, _, _), item in self.objects.items():
                labels = {} if item.deleted else item.raw["metadata"].get("labels") or {}
                if kind.plural == "pods" and f"{KUEUE}pod-group-name" in labels:
                    groups.setdefault(labels[f"{KUEUE}pod-group-name"], []).append(item)
            for members in groups.values():
                members.sort(key=lambda item: item.raw["metadata"]["creationTimestamp"])
                for item, is_excess in _released(members):
                    await self._release(item, delete=is_excess)

    async def _release(self, item: Any, *, delete: bool) -> None:
        """Lift Kueue's finalizer, and delete a pod that is one too many."""
        metadata = item.raw["metadata"]
        held = metadata.get("finalizers") or []
        if f"{KUEUE}managed" not in held:
            return
        others = [each for each in held if not each.startswith(KUEUE)]
        change: dict[str, Any] = {"finalizers": others}
        if delete and "deletionTimestamp" not in metadata:
            change["deletionTimestamp"] = datetime.now(UTC).isoformat()
        item.patch({"metadata": change})
        raw = item.raw
        kind = next(key[0] for key, each in self.objects.items() if each is item)
        await self._buses[kind].put({"type": "MODIFIED", "object": raw})
        if not others and "deletionTimestamp" in raw["metadata"]:
            item.delete()
            await self._buses[kind].put({"type": "DELETED", "object": raw})

    async def _serve_list(self, request: kmock.Request) -> Any:
        found = await super()._serve_list(request)
        return {**found, "items": [item for item in found["items"] if _selected(request, item)]}

    async def _serve_watch(self, request: kmock.Request) -> AsyncIterator[Any]:
        async for event in super()._serve_watch(request):
            if not isinstance(event, dict) or _selected(request, event["object"]):
                yield event

    def _log(self, name: str, tail: int) -> web.Response:
        text = self.read_log(name)
        if text is None:
            return refused(
                400, f'container "worker" in pod "{name}" is waiting to start: ContainerCreating'
            )
        return web.Response(text="".join(text.splitlines(keepends=True)[-tail:]))

    async def _forward(self, raw_request: web.BaseRequest, name: str) -> web.StreamResponse:
        pod = next((item for item in self.live() if item["metadata"]["name"] == name), None)
        if pod is None:
            return refused(404, f'pods "{name}" not found')
        address = pod.get("status", {}).get("podIP", "")
        return await forward(raw_request, name, address, int(raw_request.query["ports"]))


async def forward(
    raw_request: web.BaseRequest, name: str, address: str, port: int
) -> web.StreamResponse:
    """Carry a port of a pod over a WebSocket, as a kubelet does."""
    channel = web.WebSocketResponse(protocols=("v4.channel.k8s.io",))
    await channel.prepare(raw_request)
    for number in (0, 1):
        await channel.send_bytes(bytes([number]) + port.to_bytes(2, "little"))
    try:
        if not address:
            raise OSError("the pod has no address")
        reader, writer = await asyncio.open_connection(address, port)
    except OSError as error:
        await channel.send_bytes(
            b"\x01" + f"error forwarding port {port} to pod {name}: {error}".encode()
        )
        await channel.close()
        return channel
    writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    back = asyncio.create_task(_copy_back(reader, channel))
    async for message in channel:
        if message.type == WSMsgType.BINARY and message.data[0] == 0:
            writer.write(message.data[1:])
            await writer.drain()
    writer.close()
    back.cancel()
    return channel


async def _copy_back(reader: asyncio.StreamReader, channel: web.WebSocketResponse) -> None:
    with contextlib.suppress(ConnectionError):  # the client, or the way to it, has gone
        while data := await reader.read(65536):
            await channel.send_bytes(b"\0" + data)
        await channel.close()


def refused(status: int, message: str, headers: dict[str, str] | None = None) -> web.Response:
    """Answer as an API server refuses."""
    body = {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "message": message,
        "code": status,
    }
    return web.Response(
        text=json.dumps(body), status=status, content_type="application/json", headers=headers
    )


def _released(members: list[Any]) -> list[tuple[Any, bool]]:
    """Return the pods of a group that Kueue releases; True: as one pod too many.

    A pod that ended with exit code 0 counts as done: no other pod may take its place.
    """
    total = int(members[0].raw["metadata"]["annotations"][f"{KUEUE}pod-group-total-count"])
    phases = [(item.raw.get("status") or {}).get("phase") for item in members]
    is_final = any(
        (item.raw["metadata"].get("annotations") or {}).get(f"{KUEUE}retriable-in-group") == "false"
        for item in members
    )
    has_ended = all(phase in ("Succeeded", "Failed") for phase in phases)
    if phases.count("Succeeded") == total or (has_ended and is_final):
        return [(item, False) for item in members]
    active, inactive = [], []
    for item, phase in zip(members, phases, strict=True):
        on_no_node = "nodeName" not in (item.raw.get("spec") or {})
        never_runs = "deletionTimestamp" in item.raw["metadata"] and on_no_node
        (inactive if phase == "Failed" or never_runs else active).append(item)
    replaced = max(0, len(inactive) + len(active) - total)
    return [
        *((item, True) for item in active[total:]),
        *((item, False) for item in inactive[:replaced]),
    ]


def _selected(request: kmock.Request, item: dict[str, Any]) -> bool:
    wanted = dict(
        part.split("=") for part in (request.params.get("labelSelector") or "").split(",") if part
    )
    return wanted.items() <= (item["metadata"].get("labels") or {}).items()
