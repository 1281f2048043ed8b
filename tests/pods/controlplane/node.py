"""The node of a real control plane: the tests' small kubelet, as one more account of the server.

The scheduler gives it pods, and it runs them as processes of this machine. It reports as a kubelet
does: a Node, a Lease, the status of its own pods. The server reaches it for logs and port-forwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import ssl
from datetime import UTC, datetime
from typing import Any

import aiohttp
from aiohttp import web

from tests.fakes.kubelet import NODE, Kubelet, Running, kill
from tests.fakes.kubeserver import forward
from tests.pods.controlplane.server import ControlPlane

_ROOM = {"cpu": "64", "memory": "256Gi", "pods": "110", "ephemeral-storage": "500Gi"}
_READY = {"type": "Ready", "status": "True"}
_BEAT_S = 1.0
_AGAIN_S = 0.3


class RealKubelet(Kubelet):
    """One node. All runs on the event loop of its place."""

    def __init__(self, plane: ControlPlane, environment: dict[str, str]) -> None:
        super().__init__(plane.url, environment)
        self.silent = False
        """Whether the node has no network: neither does it report nor can it be reached."""
        self._plane = plane
        self._trust = ssl.create_default_context(cafile=str(plane.certificate))
        self._ready: set[str] = set()
        """Uids of pods that are ready, whatever the controller of nodes wrote meanwhile."""
        self._open: dict[int, web.BaseRequest] = {}  # a request cannot be hashed

    async def run(self) -> None:
        """Be a node until cancelled, whatever becomes of the API server meanwhile."""
        headers = {"Authorization": f"Bearer {self._plane.tokens['node']}"}
        async with aiohttp.ClientSession(
            self._plane.url,
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=5),
            connector=aiohttp.TCPConnector(ssl=self._trust),
        ) as self._session:
            runner = web.ServerRunner(web.Server(self._serve), shutdown_timeout=0.1)
            await runner.setup()
            own = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            own.load_cert_chain(self._plane.certificate, self._plane.key)
            site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=own)
            await site.start()
            assert site._server is not None
            port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
            heart = asyncio.create_task(self._beat(port))
            try:
                await self._follow()
            finally:
                heart.cancel()
                for task in self._tasks:
                    task.cancel()
                for pod in self.pods.values():
                    kill(pod)
                self.cut()
                await runner.cleanup()
                shutil.rmtree(self.folder, ignore_errors=True)

    def cut(self) -> None:
        """Break all port-forwards that are open."""
        for request in list(self._open.values()):
            if request.transport is not None:
                request.transport.abort()

    async def _follow(self) -> None:
        """List this node's pods and watch them, again after each break."""
        path = f"/api/v1/pods?fieldSelector=spec.nodeName%3D{NODE}"
        while True:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError, json.JSONDecodeError):
                async with self._session.get(path) as response:
                    listed = await response.json()
                if response.status == 200:
                    there = {item["metadata"]["uid"] for item in listed["items"]}
                    for pod in list(self.pods.values()):
                        if pod.manifest["metadata"]["uid"] not in there:
                            self._hear({"type": "DELETED", "object": pod.manifest})
                    for item in listed["items"]:
                        self._hear({"type": "ADDED", "object": item})
                    version = listed["metadata"]["resourceVersion"]
                    async with self._session.get(
                        f"{path}&watch=true&resourceVersion={version}"
                    ) as response:
                        async for line in response.content:
                            event = json.loads(line)
                            if event["type"] == "ERROR":
                                break
                            self._hear(event)
            await asyncio.sleep(_AGAIN_S)

    def _hear(self, event: dict[str, Any]) -> None:
        pod = self.pods.get(event["object"]["metadata"]["name"])
        super()._hear(event)
        if pod is None:
            return
        if event["type"] == "DELETED":  # at once, without a grace period
            pod.deleting.set()
        conditions = event["object"].get("status", {}).get("conditions") or ()
        unready = any(each["type"] == "Ready" and each["status"] == "False" for each in conditions)
        if unready and event["object"]["metadata"]["uid"] in self._ready:
            # As a kubelet's own look at what the server has, some seconds after it came again.
            task = asyncio.create_task(self._patch(pod, {"status": {"conditions": [_READY]}}))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _beat(self, port: int) -> None:
        """Register the node, and renew its lease."""
        address = {"type": "InternalIP", "address": "127.0.0.1"}
        status = {
            "capacity": _ROOM,
            "allocatable": _ROOM,
            "addresses": [address],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": port}},
        }
        node = {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": NODE, "labels": {"kubernetes.io/hostname": NODE}},
            "status": status,
        }
        leases = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
        while True:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
                lease = {
                    "apiVersion": "coordination.k8s.io/v1",
                    "kind": "Lease",
                    "metadata": {"name": NODE},
                    "spec": {
                        "holderIdentity": NODE,
                        "leaseDurationSeconds": 40,
                        "renewTime": now,
                    },
                }
                if not self.silent:
                    for path, body in (("/api/v1/nodes", node), (leases, lease)):
                        async with self._session.post(path, json=body):
                            pass
                    spec = {"spec": lease["spec"]}
                    await self._merge(f"{leases}/{NODE}", spec)
                    ready = {
                        "type": "Ready",
                        "status": "True",
                        "reason": "KubeletReady",
                        "message": "kubelet is posting ready status",
                        "lastHeartbeatTime": now[:19] + "Z",
                    }
                    state = {"status": {**status, "conditions": [ready]}}
                    await self._merge(f"/api/v1/nodes/{NODE}/status", state)
            await asyncio.sleep(_BEAT_S)

    async def _merge(self, path: str, patch: dict[str, Any]) -> int:
        """Patch an object; lists of conditions are merged by their type."""
        kind = "merge-patch" if "leases" in path else "strategic-merge-patch"
        headers = {"Content-Type": f"application/{kind}+json"}
        async with self._session.patch(path, json=patch, headers=headers) as response:
            await response.read()
            return response.status

    async def _patch(self, pod: Running, patch: dict[str, Any]) -> None:
        metadata = pod.manifest["metadata"]
        path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}/status"
        status = dict(patch["status"])
        if "conditions" in status:  # a merge would keep the reason of an earlier state
            if _READY in status["conditions"]:
                self._ready.add(metadata["uid"])
            blank = {"reason": None, "message": None}
            status["conditions"] = [{**blank, **each} for each in status["conditions"]]
        body = {"metadata": {"uid": metadata["uid"]}, "status": status}
        await self._insist(lambda: self._merge(path, body))

    async def _let_go(self, pod: Running) -> None:
        metadata = pod.manifest["metadata"]
        path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}"
        body = {"gracePeriodSeconds": 0, "preconditions": {"uid": metadata["uid"]}}

        async def delete() -> int:
            async with self._session.delete(path, json=body) as response:
                await response.read()
                return response.status

        await self._insist(delete)

    async def _collect(self, uid: str) -> None:
        """Leave this to the control plane's collector."""

    async def _bind(self, pod: Running) -> None:
        assert pod.manifest["spec"]["nodeName"] == NODE, "the scheduler did"

    async def _insist(self, call: Any) -> None:
        """Repeat a call while no server answers, or this node has no network."""
        while True:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                if not self.silent and await call() < 500:
                    return
            await asyncio.sleep(_AGAIN_S)

    async def _event(self, pod: Running, reason: str, message: str, kind: str = "Warning") -> None:
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            await super()._event(pod, reason, message, kind)

    async def _secret(self, pod: Running, name: str) -> dict[str, str] | None:
        try:
            return await super()._secret(pod, name)
        except (aiohttp.ClientError, TimeoutError):
            return None

    async def _serve(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer what the API server asks a kubelet for."""
        _, what, _, name, *_ = request.path.split("/")
        pod = self.pods.get(name)
        if self.silent or pod is None:
            if request.transport is not None:
                request.transport.abort()
            return web.Response(status=404, text=f'pod "{name}" not found')
        if what == "containerLogs":
            text = self.read_log(name)
            if text is None:
                waits = f'container "worker" in pod "{name}" is waiting to start: ContainerCreating'
                return web.Response(status=400, text=waits)
            tail = int(request.query.get("tailLines", "0"))
            return web.Response(text="".join(text.splitlines(keepends=True)[-tail:]))
        assert what == "portForward", request.path
        self._open[id(request)] = request
        try:
            return await forward(request, name, pod.address, int(request.query["port"]))
        finally:
            del self._open[id(request)]
