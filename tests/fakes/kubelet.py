"""A small kubelet for tests: it runs each pod as processes of this machine, on its own address.

Containers see neither the notebook's folders nor its Python, where this process may mount. It
mounts Secrets and volumes as folders (paths in commands and variables follow them), starts the
container's very command, probes it, writes status and events back, honours deletion, and can be
told to misbehave.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import errno
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp

from tests.fakes.kubeserver import KUBELET
from workbench.base.process import end_all, with_mark
from workbench.pods.bootstrap.process import session_environment

NODE = "node-1"
_TICK_S = 0.03
_PREEMPTION = (
    "no new claims to deallocate, preemption: 0/3 nodes are "
    "available: 3 Preemption is not helpful for scheduling."
)
_OUT_OF_REACH = {
    "pending": (
        f"0/3 nodes are available: 3 Insufficient nvidia.com/gpu. {_PREEMPTION}",
        "FailedScheduling",
    ),
    "no-claim": (
        f'0/3 nodes are available: persistentvolumeclaim "data" not found. {_PREEMPTION}',
        "FailedScheduling",
    ),
}
_WAITING = {
    "image": ("ImagePullBackOff", 'Back-off pulling image "example.org/nothing:1": not found'),
    "creating": ("ContainerCreating", ""),
}
_INSTEAD = {"silent": ["sleep", "600"], "crash": ["sh", "-c", "echo no sshd here; exit 3"]}


_CONTAINER = """
mount --make-rprivate /
mkdir -p /run/sshd
if [ -n "$2" ]; then mount --bind "$2" /etc/passwd; fi
if [ -n "$3" ]; then
    for writable in /tmp "$1"; do mount --rbind "$writable" "$writable"; done
    mount -o remount,bind,ro /
fi
user=$4
shift 4
if [ -n "$user" ]; then
    set -- setpriv --reuid="$user" --regid=0 --clear-groups --no-new-privs "$@"
fi
exec "$@"
"""
"""Starts a container: its accounts, its mounts in a read-only root file system, its user id."""


@dataclass
class Running:
    """One pod on this node."""

    manifest: dict[str, Any]
    folder: Path
    address: str
    root: str = ""
    process: subprocess.Popen[bytes] | None = None
    deleting: asyncio.Event = field(default_factory=asyncio.Event)
    code: int | None = None
    """Exit code of a program that ended by itself."""
    ended: dict[str, Any] | None = None
    """What `Kubelet.fail` wants its end to look like."""

    @property
    def name(self) -> str:
        return str(self.manifest["metadata"]["name"])

    @property
    def log(self) -> Path:
        return self.folder / "log"

    @property
    def container(self) -> dict[str, Any]:
        return dict(self.manifest["spec"]["containers"][0])


class Kubelet:
    """The node. All methods but `behave` run on the event loop of the API server."""

    def __init__(self, url: str, environment: dict[str, str]) -> None:
        self.behave: dict[str, str] = {}
        """By host name of a pod (`pod-1`), how it misbehaves.

        The words: pending, no-claim, image, creating, silent, crash; pull: its image comes
        once `pulled` is set; registry-away: so, and each pull before it fails; gated: Kueue admits
        it once `admitted` is set.
        """
        self.pulled = asyncio.Event()
        self.admitted = asyncio.Event()
        self.going_s = 0.1
        """How long a deleted pod is still there, as Succeeded, once its program has ended."""
        self.user: int | None = None
        """The user id of containers that name none, as on OpenShift; None: this process's."""
        self.environment = {**session_environment(), **environment}
        """What the image sets."""
        self.apart: tuple[str, ...] = ()
        """Words before a container's own: what hides the notebook's folders and Python from it."""
        self.pods: dict[str, Running] = {}
        self._url = url
        self.folder = Path(tempfile.mkdtemp(prefix="wbk"))
        self._numbers = itertools.count(2)
        self._net = f"127.{random.randrange(16, 250)}.{random.randrange(250)}"
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Follow the API server until cancelled."""
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(
            self._url, headers={KUBELET: "1"}, timeout=timeout
        ) as self._session:
            try:
                async with self._session.get("/api/v1/pods?watch=true") as response:
                    async for line in response.content:
                        if line.strip():
                            self._hear(json.loads(line))
            finally:
                for task in self._tasks:
                    task.cancel()
                for pod in self.pods.values():
                    kill(pod)
                shutil.rmtree(self.folder, ignore_errors=True)

    def read_log(self, name: str) -> str | None:
        """Give what a pod has written."""
        pod = self.pods.get(name)
        return pod.log.read_text(errors="replace") if pod is not None and pod.log.exists() else None

    async def fail(self, host: str, **status: Any) -> None:
        """End a pod's processes and let its status say why."""
        pod = self._by_host(host)
        pod.ended = status
        await asyncio.to_thread(kill, pod)

    async def condition(self, host: str, **condition: str) -> None:
        """Give a pod one more condition, the first."""
        pod = self._by_host(host)
        await self._patch(pod, {"status": {"conditions": [condition, _condition("Ready", True)]}})

    async def be_lost(self) -> None:
        """Lose the node, as the node controller notes it: no reason, and an Event for each pod."""
        lost = {
            "type": "Ready",
            "status": "False",
            "lastTransitionTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        }
        for pod in list(self.pods.values()):
            await self._patch(pod, {"status": {"conditions": [lost]}})
            await self._event(pod, "NodeNotReady", "Node is not ready")

    async def be_found(self) -> None:
        """Report again."""
        for pod in list(self.pods.values()):
            await self._patch(pod, {"status": {"conditions": [_condition("Ready", True)]}})

    async def make_secret(self, name: str, data: dict[str, str]) -> None:
        """Make a Secret, as a user does."""
        coded = {key: base64.b64encode(value.encode()).decode() for key, value in data.items()}
        secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "data": coded}
        async with self._session.post("/api/v1/namespaces/lab/secrets", json=secret) as response:
            await response.read()

    async def delete(self, host: str) -> None:
        """Delete a pod, as an administrator does."""
        async with self._session.delete(
            f"/api/v1/namespaces/lab/pods/{self._by_host(host).name}"
        ) as response:
            await response.read()

    def _by_host(self, host: str) -> Running:
        return next(
            pod for pod in self.pods.values() if pod.manifest["spec"].get("hostname") == host
        )

    def _hear(self, event: dict[str, Any]) -> None:
        manifest = event["object"]
        name = manifest["metadata"]["name"]
        if name not in self.pods and event["type"] != "DELETED":
            number = next(self._numbers)
            folder = self.folder / f"{number}"
            folder.mkdir()
            pod = self.pods[name] = Running(manifest, folder, f"{self._net}.{number}")
            self._begin(self._live(pod))
        if manifest["metadata"].get("deletionTimestamp") and name in self.pods:
            self.pods[name].deleting.set()
        if event["type"] == "DELETED":
            self.pods.pop(name, None)
            self._begin(self._collect(manifest["metadata"]["uid"]))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _live(self, pod: Running) -> None:
        """Be one pod from its creation to its deletion."""
        behaviour = self.behave.get(pod.manifest["spec"].get("hostname", ""), "")
        try:
            if behaviour in _OUT_OF_REACH:
                await self._stay_pending(pod, *_OUT_OF_REACH[behaviour])
            elif behaviour in _WAITING:
                await self._wait_for_ever(pod, *_WAITING[behaviour])
            elif behaviour != "gated" or await self._is_admitted(pod):
                await self._run_container(pod, behaviour)
            await pod.deleting.wait()
        finally:
            if pod.code is None:  # else a replacement may have the folder by now
                await asyncio.to_thread(_terminate, pod)
                await asyncio.to_thread(kill, pod)
            if pod.root and pod.code is None:
                shutil.rmtree(pod.root, ignore_errors=True)
        if pod.process is not None and pod.code is None:  # its program took SIGTERM
            code = pod.process.returncode
            reason = "Error" if code else "Completed"
            ended = _container_status(
                terminated={"exitCode": code, "reason": reason, "finishedAt": _now()}
            )
            phase = "Failed" if code else "Succeeded"
            await self._patch(pod, {"status": {"phase": phase, "containerStatuses": [ended]}})
            await asyncio.sleep(self.going_s)
        await self._let_go(pod)

    async def _let_go(self, pod: Running) -> None:
        """Have the server forget a pod whose processes have ended, unless Kueue keeps the pod."""
        await self._patch(pod, {"metadata": {"finalizers": []}})

    async def _bind(self, pod: Running) -> None:
        """Be the scheduler: note the node."""
        await self._patch(pod, {"spec": {"nodeName": NODE}})

    async def _is_admitted(self, pod: Running) -> bool:
        """Wait until Kueue lifts its scheduling gate; False if the pod is deleted before."""
        words = "Scheduling is blocked due to non-empty scheduling gates"
        condition = _condition("PodScheduled", False) | {
            "reason": "SchedulingGated",
            "message": words,
        }
        await self._patch(pod, {"status": {"phase": "Pending", "conditions": [condition]}})
        await _first(self.admitted, pod.deleting)
        return not pod.deleting.is_set()

    async def _stay_pending(self, pod: Running, words: str, reason: str) -> None:
        condition = {
            "type": "PodScheduled",
            "status": "False",
            "reason": "Unschedulable",
            "message": words,
        }
        await self._patch(pod, {"status": {"phase": "Pending", "conditions": [condition]}})
        await self._event(pod, reason, words)

    async def _wait_for_ever(self, pod: Running, reason: str, message: str) -> None:
        status = _container_status(waiting={"reason": reason, "message": message})
        await self._patch(pod, {"status": {"phase": "Pending", "containerStatuses": [status]}})

    async def _run_container(self, pod: Running, behaviour: str) -> None:
        if behaviour == "pull":
            await self._pull(pod)
        elif behaviour == "registry-away":
            await self._pull_in_vain(pod)
        if pod.deleting.is_set():
            return
        missing = [await self._secret_key(pod, env) for env in pod.container["env"]]
        if words := next((words for words, _ in missing if words), ""):
            await self._wait_for_ever(pod, "CreateContainerConfigError", words)
            return
        mounts = await self._mount(pod)
        if mounts is None:
            return
        environment = {
            env["name"]: value
            for env, (_, value) in zip(pod.container["env"], missing, strict=True)
        }
        environment = {name: _moved(value, mounts) for name, value in environment.items()}
        pod.root = environment["WORKBENCH_POD"]
        command = [
            _moved(word, mounts) for word in (*pod.container["command"], *pod.container["args"])
        ]
        command = _INSTEAD.get(behaviour, command)
        program = command[0]
        for container in pod.manifest["spec"].get("initContainers", ()):
            first = [_moved(word, mounts) for word in (*container["command"], *container["args"])]
            await asyncio.to_thread(
                subprocess.run, self._contained(pod, container, first), check=True, timeout=300
            )
        command = self._contained(pod, pod.container, command, mounts.get("/etc/passwd", ""))
        with pod.log.open("ab") as log:
            try:
                if shutil.which(program, path=self.environment["PATH"]) is None:
                    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
                pod.process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd=pod.folder,
                    env={
                        **self.environment,
                        **environment,
                        "POD_IP": pod.address,
                        "WORKBENCH_LISTEN": pod.address,
                    },
                    start_new_session=True,
                )
            except OSError as error:
                message = f'exec: "{program}": {error.strerror}'
                await self._wait_for_ever(pod, "RunContainerError", message)
                return
        await self._bind(pod)
        running = {"phase": "Running", "podIP": pod.address, "startTime": _now()}
        status = _container_status(running={"startedAt": _now()})
        ready = _condition("Ready", False, "ContainersNotReady")
        await self._patch(
            pod, {"status": {**running, "containerStatuses": [status], "conditions": [ready]}}
        )
        await self._watch(
            pod, Path(_moved(pod.container["startupProbe"]["exec"]["command"][-1], mounts))
        )

    def _contained(
        self, pod: Running, container: dict[str, Any], command: list[str], accounts: str = ""
    ) -> list[str]:
        if os.geteuid() != 0:
            return command
        read_only = "yes" if container["securityContext"]["readOnlyRootFilesystem"] else ""
        user = (
            str(self.user or "")
            if "runAsUser" not in pod.manifest["spec"]["securityContext"]
            else ""
        )
        return [
            *self.apart,
            "unshare",
            "--mount",
            "sh",
            "-ec",
            _CONTAINER,
            "sh",
            str(self.folder),
            accounts,
            read_only,
            user,
            *command,
        ]

    async def _pull(self, pod: Running) -> None:
        image = pod.container["image"]
        await self._event(pod, "Pulling", f'Pulling image "{image}"', "Normal")
        await self._wait_for_ever(pod, "ContainerCreating", "")
        await _first(self.pulled, pod.deleting)
        await self._event(pod, "Pulled", f'Successfully pulled image "{image}" in 1m2s', "Normal")

    async def _pull_in_vain(self, pod: Running) -> None:
        """Try to pull and fail, with growing pauses, until the registry answers (`pulled`)."""
        image = pod.container["image"]
        cause = (
            f'failed to resolve reference "{image}": dial '
            "tcp 10.0.0.9:443: connect: connection refused"
        )
        await self._event(pod, "Pulling", f'Pulling image "{image}"', "Normal")
        await self._event(pod, "Failed", f'Failed to pull image "{image}": {cause}')
        while not self.pulled.is_set() and not pod.deleting.is_set():
            await self._wait_for_ever(pod, "ErrImagePull", cause)
            await asyncio.sleep(0.5)
            await self._wait_for_ever(
                pod, "ImagePullBackOff", f'Back-off pulling image "{image}": ErrImagePull: {cause}'
            )
            await asyncio.sleep(0.5)

    async def _watch(self, pod: Running, listening: Path) -> None:
        """Probe until the container is up, with an Event for each failure; wait until it ends."""
        ready, probe_s = False, 0.0
        while not pod.deleting.is_set():
            code = pod.process.poll() if pod.process is not None else None
            if code is not None:
                await self._end(pod, code)
                return
            if not ready and listening.exists():
                ready = True
                await self._patch(pod, {"status": {"conditions": [_condition("Ready", True)]}})
            elif not ready and time.monotonic() >= probe_s:
                probe_s = time.monotonic() + 1.0
                await self._event(pod, "Unhealthy", "Startup probe failed: ")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(pod.deleting.wait(), _TICK_S)

    async def _end(self, pod: Running, code: int) -> None:
        pod.code = code
        await asyncio.to_thread(kill, pod)
        if pod.root:
            shutil.rmtree(pod.root, ignore_errors=True)
        last = "" if code == 0 else "\n".join((self.read_log(pod.name) or "").splitlines()[-3:])
        ended = {"exitCode": abs(code), "reason": "Error" if code else "Completed", "message": last}
        status = {"phase": "Failed" if code else "Succeeded", "containerStatuses": None}
        status["containerStatuses"] = [
            _container_status(terminated={**ended, "finishedAt": _now()})
        ]
        await self._patch(pod, {"status": {**status, **(pod.ended or {})}})

    async def _mount(self, pod: Running) -> dict[str, str] | None:
        """Make the volumes; wait for Secrets that are not there yet, as the real one does."""
        folders = {}
        for volume in pod.manifest["spec"]["volumes"]:
            # One folder for the work of all pods, so that it
            # has the same path on each, as in containers.
            claim = volume.get("persistentVolumeClaim", {}).get("claimName")
            shared = "work" if volume["name"] == "work" else f"claim-{claim}" if claim else ""
            if claim and not await self._claim(pod, claim):
                return None
            if "configMap" in volume and not await self._config_map(
                pod, volume["name"], volume["configMap"]["name"]
            ):
                return None
            folder = self.folder / shared if shared else pod.folder / volume["name"]
            folder.mkdir(exist_ok=True)
            if self.user is not None:
                for parent in (self.folder, pod.folder):  # whatever this process's umask
                    parent.chmod(0o755)
                folder.chmod(0o755 if "secret" in volume else 0o777)
            folders[volume["name"]] = folder
            if "secret" in volume:
                while (data := await self._secret(pod, volume["secret"]["secretName"])) is None:
                    space = pod.manifest["metadata"]["namespace"]
                    missing = f'object "{space}"/"{volume["secret"]["secretName"]}" not registered'
                    await self._event(
                        pod,
                        "FailedMount",
                        f'MountVolume.SetUp failed for volume "secret" : {missing}',
                    )
                    if pod.deleting.is_set():
                        return None
                    await asyncio.sleep(_TICK_S)
                for item in volume["secret"]["items"]:
                    (folder / item["path"]).write_bytes(base64.b64decode(data[item["key"]]))
                    (folder / item["path"]).chmod(volume["secret"]["defaultMode"])
        containers = [*pod.manifest["spec"].get("initContainers", ()), pod.container]
        mounts = {
            mount["mountPath"]: str(folders[mount["name"]] / mount.get("subPath", ""))
            for container in containers
            for mount in container["volumeMounts"]
        }
        return {path: folder for path, folder in mounts.items() if path not in ("/dev/shm", "/tmp")}

    async def _claim(self, pod: Running, name: str) -> bool:
        """Wait until a claim is there, and say that it is missing; False if the pod is deleted."""
        namespace, told = pod.manifest["metadata"]["namespace"], False
        while True:
            async with self._session.get(
                f"/api/v1/namespaces/{namespace}/persistentvolumeclaims/{name}"
            ) as response:
                if response.status == 200:
                    return True
            if not told:
                words = f'0/3 nodes are available: persistentvolumeclaim "{name}" not found.'
                told = await self._stay_pending(pod, words, "FailedScheduling") is None
            if pod.deleting.is_set():
                return False
            await asyncio.sleep(_TICK_S)

    async def _config_map(self, pod: Running, volume: str, name: str) -> bool:
        """Wait until a ConfigMap is there, with an Event meanwhile; False if the pod is deleted."""
        words = f'MountVolume.SetUp failed for volume "{volume}" : configmap "{name}" not found'
        path = f"/api/v1/namespaces/{pod.manifest['metadata']['namespace']}/configmaps"
        while not pod.deleting.is_set():
            async with self._session.get(f"{path}/{name}") as response:
                if response.status == 200:
                    return True
            await self._event(pod, "FailedMount", words)
            await asyncio.sleep(_TICK_S)
        return False

    async def _secret(self, pod: Running, name: str) -> dict[str, str] | None:
        namespace = pod.manifest["metadata"]["namespace"]
        async with self._session.get(f"/api/v1/namespaces/{namespace}/secrets/{name}") as response:
            return dict((await response.json())["data"]) if response.status == 200 else None

    async def _secret_key(self, pod: Running, env: dict[str, Any]) -> tuple[str, str]:
        """Give what is wrong with a variable, and its value."""
        source = env.get("valueFrom", {}).get("secretKeyRef")
        if source is None:
            return "", str(env.get("value", pod.address))
        data = await self._secret(pod, source["name"])
        if data is None:
            return f'secret "{source["name"]}" not found', ""
        if source["key"] not in data:
            space = pod.manifest["metadata"]["namespace"]
            return f"couldn't find key {source['key']} in Secret {space}/{source['name']}", ""
        return "", base64.b64decode(data[source["key"]]).decode()

    async def _patch(self, pod: Running, patch: dict[str, Any]) -> None:
        metadata = pod.manifest["metadata"]
        path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}"
        async with self._session.patch(path, json=patch) as response:
            await response.read()

    async def _event(self, pod: Running, reason: str, message: str, kind: str = "Warning") -> None:
        metadata = pod.manifest["metadata"]
        event = {
            "metadata": {"name": f"{metadata['name']}.{reason.lower()}"},
            "involvedObject": {
                "kind": "Pod",
                **{name: metadata[name] for name in ("namespace", "name", "uid")},
            },
            "type": kind,
            "lastTimestamp": _now(),
            "reason": reason,
            "message": message,
        }
        async with self._session.post(
            f"/api/v1/namespaces/{metadata['namespace']}/events", json=event
        ) as response:
            await response.read()

    async def _collect(self, uid: str) -> None:
        """Be the garbage collector: delete what the pod owned."""
        for kind in ("pods", "secrets", "services", "persistentvolumeclaims", "networkpolicies"):
            api = "apis/networking.k8s.io" if kind == "networkpolicies" else "api"
            async with self._session.get(f"/{api}/v1/{kind}") as response:
                items = (await response.json())["items"]
            for item in items:
                if any(
                    owner["uid"] == uid for owner in item["metadata"].get("ownerReferences", ())
                ):
                    space, name = item["metadata"]["namespace"], item["metadata"]["name"]
                    path = f"/{api}/v1/namespaces/{space}/{kind}/{name}"
                    async with self._session.delete(path) as response:
                        await response.read()


def _moved(text: str, mounts: dict[str, str]) -> str:
    """Give a path within a mount as it is on this machine."""
    for path, folder in mounts.items():
        if text == path or text.startswith(f"{path}/"):
            return folder + text.removeprefix(path)
    return text


def _terminate(pod: Running) -> None:
    """Ask the container to end, and give it the 30 s of Kubernetes."""
    if pod.process is not None:
        pod.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            pod.process.wait(30.0)


def kill(pod: Running) -> None:
    """End every process of a pod at once, as the end of its container does."""
    if pod.process is not None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(
                pod.process.pid, signal.SIGKILL
            )  # sshd among them, which overwrites its variables
        pod.process.wait(300)
    if pod.root:
        end_all(lambda: with_mark("WORKBENCH_POD", [pod.root]), grace_s=0.0)


def left_below(folder: str) -> list[str]:
    """Give the processes that work in a folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            argv = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            found += [f"{path.parent.name} {argv}"] if f"{folder}/" in argv else []
    return found


def _container_status(**state: Any) -> dict[str, Any]:
    return {"name": "worker", "restartCount": 0, "state": state}


async def _first(*events: asyncio.Event) -> None:
    """Wait for one of the events."""
    waits = [asyncio.create_task(each.wait()) for each in events]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()


def _condition(kind: str, value: bool, reason: str = "") -> dict[str, str]:
    return {"type": kind, "status": str(value), **({"reason": reason} if reason else {})}


def _now() -> str:
    return datetime.now(UTC).isoformat()
