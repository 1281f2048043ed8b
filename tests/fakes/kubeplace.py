"""Kubernetes as a place for tests: kmock's emulator and a kubelet, on a thread's event loop."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import yaml

from tests.fakes.sshhosts import apart
from workbench.pods.kubernetes.pods import KubernetesPods
from workbench.pods.pod import LaunchContext

if TYPE_CHECKING:
    from tests.fakes.kubelet import Kubelet
    from tests.fakes.kubeserver import ApiServer


MANIFESTS = Path(__file__).resolve().parents[2] / "docker" / "kubernetes"


class PlaceOnLoop:
    """A Kubernetes whose node runs on an event loop, in a thread of its own."""

    owns_daemons = True
    launchers = ("ssh",)

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.kubeconfig = folder / "kubeconfig"
        # Where the tests' notebooks have their clusters, beside this place.
        self._hidden = [folder.parent / name for name in ("cluster", "runs")]
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run something on the loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(300)

    def backend(self, **options: Any) -> KubernetesPods:
        given = {"image": "example.org/worker:1", "kubeconfig": str(self.kubeconfig), **options}
        return KubernetesPods(**given)

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(300)
        self._loop.close()


class KubernetesPlace(PlaceOnLoop):
    """One API server with one node."""

    server: ApiServer
    kubelet: Kubelet

    def __enter__(self) -> Self:
        self._thread.start()
        self.do(self._start())
        return self

    def __exit__(self, *_exc: object) -> None:
        self.do(self._stop())
        self._end_loop()

    def left(self, context: LaunchContext) -> list[str]:
        deadline = time.monotonic() + 300
        while self._waits_for_collection() and time.monotonic() < deadline:
            time.sleep(0.01)
        return [f"{item['kind']} {item['metadata']['name']}" for item in self.server.live()]

    def lose_node(self) -> None:
        """Silence the node while containers run: no kubelet answers, as its controller notes."""
        self.server.kubelet_away = True
        self.server.cut(self.server.forwards)
        self.do(self.kubelet.be_lost())

    def find_node(self) -> None:
        """Have the node report again."""
        self.server.kubelet_away = False
        self.do(self.kubelet.be_found())

    def _waits_for_collection(self) -> bool:
        """Whether something is left whose owner is gone; the collector works in the background."""
        items = list(self.server.live())
        alive = {item["metadata"]["uid"] for item in items}
        owners = {
            owner["uid"] for item in items for owner in item["metadata"].get("ownerReferences", ())
        }
        return not owners <= alive

    async def _start(self) -> None:
        import kmock

        from tests.fakes.kubelet import Kubelet
        from tests.fakes.kubeserver import ApiServer

        self.server = ApiServer()
        self.server.allowed = role()
        await self.server.__aenter__()
        self._http = kmock.Server(self.server)
        await self._http.__aenter__()
        url = str(self._http.url).rstrip("/")
        session = {
            name: value for name, value in os.environ.items() if name == "WORKBENCH_TEST_SESSION"
        }
        self.kubelet = Kubelet(url, session)
        self.kubelet.apart, python = apart(self.kubelet.folder / "image", self._hidden)
        self.kubelet.environment["PATH"] = (
            f"{Path(python).parent}:{self.kubelet.environment['PATH']}"
        )
        self.server.read_log = self.kubelet.read_log
        self._node = asyncio.create_task(self.kubelet.run())
        self.kubeconfig.write_text(json.dumps(kubeconfig(url)))
        await asyncio.sleep(0.05)  # the kubelet's watch stands before the first pod is made

    async def _stop(self) -> None:
        from tests.fakes.kubelet import left_below

        self._node.cancel()
        await asyncio.gather(self._node, return_exceptions=True)
        self.server.cut(self.server.watches)
        await self._http.__aexit__(None, None, None)
        await self.server.__aexit__(None, None, None)
        deadline = time.monotonic() + 300
        while left := left_below(str(self.kubelet.folder)):
            assert time.monotonic() < deadline, f"still running on the node: {left}"
            await asyncio.sleep(0.05)


def role() -> set[tuple[str, str]]:
    """Give verb and resource of all that the Role that we ship allows."""
    documents = yaml.safe_load_all((MANIFESTS / "rbac.yaml").read_text())
    rules = next(document for document in documents if document["kind"] == "Role")["rules"]
    assert {group for rule in rules for group in rule["apiGroups"]} == {"", "networking.k8s.io"}
    return {
        (verb, resource)
        for rule in rules
        for verb in rule["verbs"]
        for resource in rule["resources"]
    }


def kubeconfig(url: str) -> dict[str, Any]:
    """Give the kubeconfig of the test's user."""
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "tests",
        "contexts": [
            {"name": "tests", "context": {"cluster": "tests", "user": "me", "namespace": "lab"}}
        ],
        "clusters": [{"name": "tests", "cluster": {"server": url}}],
        "users": [{"name": "me", "user": {"token": "t"}}],
    }
