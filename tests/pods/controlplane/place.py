"""The real control plane as a place for tests, with one node of the tests' own."""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Self

from tests.fakes.kubelet import NODE, left_below
from tests.fakes.kubeplace import PlaceOnLoop
from tests.fakes.sshhosts import apart
from tests.pods.controlplane.server import ControlPlane, control_plane
from tests.support.poll import until
from workbench.pods.pod import LaunchContext

if TYPE_CHECKING:
    from tests.pods.controlplane.node import RealKubelet

_COLLECTED_S = 90.0
"""The collector is back some time after a server that was killed; else it takes a second."""
MANAGED = "app.kubernetes.io%2Fmanaged-by%3Ddeepspeed-workbench"


class RealKubernetesPlace(PlaceOnLoop):
    """The session's server, a node for this test, and a user with the shipped service account."""

    plane: ControlPlane
    kubelet: RealKubelet

    def __enter__(self) -> Self:
        self.plane = control_plane()
        self._thread.start()
        token = self.plane.account_token()
        self.kubeconfig.write_text(json.dumps(self.plane.kubeconfig(token)))
        self.do(self._start())
        until(self._node_takes_pods, 60, every_s=0.1)
        return self

    def __exit__(self, *_exc: object) -> None:
        self.kubelet.silent = False
        for kind in ("pods", "secrets", "services", "persistentvolumeclaims"):
            for item in self.plane.items(kind, labelSelector=MANAGED):
                self.plane.delete(kind, item["metadata"]["name"])
        until(lambda: not self.plane.items("pods"), 60, every_s=0.1)
        self.do(self._stop())
        self.plane.ask("DELETE", f"/api/v1/nodes/{NODE}")
        self._end_loop()
        until(lambda: not left_below(str(self.kubelet.folder)), 60)

    def left(self, context: LaunchContext) -> list[str]:
        """List our objects, once the garbage collector has had its time."""
        deadline = time.monotonic() + _COLLECTED_S
        while (left := self.seen()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return left

    def seen(self) -> list[str]:
        """List our objects as they are now."""
        kinds = {
            "pods": "Pod",
            "secrets": "Secret",
            "services": "Service",
            "persistentvolumeclaims": "PersistentVolumeClaim",
        }
        return [
            f"{word} {item['metadata']['name']}"
            for kind, word in kinds.items()
            for item in self.plane.items(kind, labelSelector=MANAGED)
        ]

    def _node_takes_pods(self) -> bool:
        for node in self.plane.ask("GET", "/api/v1/nodes")["items"]:
            conditions = node["status"].get("conditions", ())
            ready = any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)
            if node["metadata"]["name"] == NODE and ready:
                return not node["spec"].get("taints")
        return False

    async def _start(self) -> None:
        from tests.pods.controlplane.node import RealKubelet

        session = {
            name: value for name, value in os.environ.items() if name == "WORKBENCH_TEST_SESSION"
        }
        self.kubelet = RealKubelet(self.plane, session)
        self.kubelet.apart, python = apart(self.kubelet.folder / "image", self._hidden)
        self.kubelet.environment["PATH"] = (
            f"{Path(python).parent}:{self.kubelet.environment['PATH']}"
        )
        self._node = asyncio.create_task(self.kubelet.run())

    async def _stop(self) -> None:
        self._node.cancel()
        await asyncio.gather(self._node, return_exceptions=True)
