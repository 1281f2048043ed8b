"""What the container test needs: the two images, and an engine for `docker compose`.

Everything is kept below one folder, with storage, volumes and networks of
its own: what else podman has on the machine is neither seen nor touched.
The folder outlives the test, so that a second run builds only what changed.
"""

from __future__ import annotations

import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from ast import literal_eval
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlparse

from tests.support.poll import until

REPOSITORY = Path(__file__).resolve().parent.parent.parent
PREFIX = (
    "docker.io/deepspeed-workbench/"  # where `docker compose` looks for an image without a registry
)
BASE = "localhost/workbench-base"
_PROGRAMS = ("buildah", "podman", "debootstrap", "runc", "iptables")
_FORWARDING = Path("/proc/sys/net/ipv4/ip_forward")
_CONFIG = """\
[containers]
default_ulimits = ["nofile={files}:{files}", "nproc={processes}:{processes}"]
log_driver = "k8s-file"
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
runtime = "runc"
[network]
network_backend = "netavark"
network_config_dir = "{folder}/networks"
"""


def missing() -> str:
    """Say why containers cannot be built and run here; empty if they can."""
    absent = [name for name in _PROGRAMS if shutil.which(name) is None]
    if absent:
        return f"{' and '.join(absent)} not installed; make test-images installs what Debian has"
    if tool("docker-compose") is None:
        return "docker-compose is not installed; make test-images installs it"
    return (
        "" if os.geteuid() == 0 else "containers with networks of their own are made by root here"
    )


def tool(name: str) -> str | None:
    """Find a program that came with this Python's packages, or that the machine has."""
    return shutil.which(name, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")


class Engine:
    """buildah and podman on a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "networks").mkdir(parents=True, exist_ok=True)
        # podman would ask for a million of each, which a
        # machine that is a container itself may not grant.
        files = min(4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
        processes = min(30_000, resource.getrlimit(resource.RLIMIT_NPROC)[1])
        (folder / "containers.conf").write_text(
            _CONFIG.format(files=files, processes=processes, folder=folder)
        )
        self.environment = {**os.environ, "CONTAINERS_CONF": str(folder / "containers.conf")}
        self._where = (
            "--root",
            f"{folder}/root",
            "--runroot",
            f"{folder}/run",
            "--storage-driver",
            "overlay",
        )

    def call(
        self, program: str, *words: str, timeout_s: float = 120.0, input: str | None = None
    ) -> str:
        """Run buildah or podman; give what it printed."""
        done = subprocess.run(
            [program, *self._where, *words],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            input=input,
        )
        assert done.returncode == 0, (
            f"{program} {' '.join(words)}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        )
        return done.stdout

    def podman(self, *words: str, timeout_s: float = 120.0, input: str | None = None) -> str:
        """Run podman; give what it printed."""
        return self.call("podman", *words, timeout_s=timeout_s, input=input)

    def make_base(self) -> None:
        """Make a small Debian for an image to stand on, unless there is one from before."""
        if self.call("buildah", "images", "--quiet", "--filter", f"reference={BASE}").strip():
            return
        with tempfile.TemporaryDirectory(dir=self.folder) as made:
            root = Path(made) / "root"
            argv = ["debootstrap", "--variant=minbase", "bookworm", str(root)]
            done = subprocess.run(argv, capture_output=True, text=True, timeout=1200)
            assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
            container = self.call("buildah", "from", "scratch").strip()
            self.call("buildah", "add", container, str(root), "/", timeout_s=600)
            self.call("buildah", "commit", "--rm", container, BASE, timeout_s=600)

    def build(self, target: str, log: Path) -> float:
        """Build a target of the Dockerfile with this machine's pip settings; return the seconds."""
        with tempfile.TemporaryDirectory() as folder:
            settings, mounts = pip_settings()
            (Path(folder) / "pip.conf").write_text(settings)
            arguments = {
                "BASE_IMAGE": BASE,
                "ACCELERATOR": "cpu",
                "TORCH_INDEX": os.environ.get("TORCH_INDEX", ""),
            }
            if platform.machine() != "x86_64":
                arguments["CPU_ARCH"] = "native"
            words = [
                "--isolation",
                "chroot",
                "--layers",
                "--target",
                target,
                "--tag",
                f"{PREFIX}{target}:latest",
            ]
            words += [
                "--file",
                "docker/Dockerfile",
                "--ignorefile",
                "docker/Dockerfile.dockerignore",
            ]
            words += ["--secret", f"id=pip,src={folder}/pip.conf"]
            words += [word for mount in mounts for word in ("--volume", f"{mount}:ro")]
            words += [
                word
                for name, value in arguments.items()
                for word in ("--build-arg", f"{name}={value}")
            ]
            began = time.monotonic()
            with log.open("wb") as file:
                done = subprocess.run(
                    ["buildah", *self._where, "bud", *words, "."],
                    cwd=REPOSITORY,
                    env=self.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    timeout=5400,
                )
            assert done.returncode == 0, log.read_text(errors="replace")[-6000:]
            return time.monotonic() - began

    def layers(self, target: str) -> list[Path]:
        """Give the folders that hold what each layer of an image adds."""
        form = "{{.GraphDriver.Data.UpperDir}}:{{.GraphDriver.Data.LowerDir}}"
        said = self.podman("image", "inspect", "--format", form, f"{PREFIX}{target}").strip()
        return [Path(path) for path in said.split(":") if path != "<no value>"]

    @contextmanager
    def compose(self, project: str) -> Iterator[Callable[..., str]]:
        """Serve podman's API for `docker compose`; give a function that runs one of its commands.

        What the project has started is gone afterwards, its volumes too,
        and the machine forwards packets again or not as it did before.
        """
        forwarded = _FORWARDING.read_text()
        with ExitStack() as undo:
            folder = Path(undo.enter_context(tempfile.TemporaryDirectory()))
            socket = folder / "api"  # a socket's path has at most 107 characters
            override = folder / "compose.yaml"
            override.write_text(
                "services: {jupyter: {ports: !reset []}}\n"
            )  # 8888 may be somebody's here
            undo.callback(_FORWARDING.write_text, forwarded)
            service = subprocess.Popen(
                ["podman", *self._where, "system", "service", "--time", "0", f"unix://{socket}"],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            undo.callback(service.wait, 30)
            undo.callback(service.terminate)
            until(lambda: socket.exists() or service.poll() is not None, every_s=0.05)
            assert socket.exists(), "podman serves no API"
            program = tool("docker-compose")
            assert program is not None
            files = ("--file", str(REPOSITORY / "docker" / "compose.yaml"), "--file", str(override))
            words = (program, "--project-name", project, *files)
            environment = {**os.environ, "DOCKER_HOST": f"unix://{socket}"}

            def command(*more: str) -> str:
                return run([*words, *more], timeout_s=300, environment=environment)

            undo.callback(command, "down", "--volumes", "--timeout", "1")
            yield command


def run(argv: Sequence[str], timeout_s: float, environment: Mapping[str, str] | None = None) -> str:
    """Run a program; give what it printed."""
    done = subprocess.run(
        argv,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        stdin=subprocess.DEVNULL,
        env=environment,
    )
    assert done.returncode == 0, f"{argv}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def pip_settings() -> tuple[str, list[str]]:
    """Give this machine's pip settings as a pip.conf for a build, and the mounts of their paths."""
    said = run([sys.executable, "-m", "pip", "config", "list"], timeout_s=60)
    settings, mounts = {}, set()
    for line in said.splitlines():
        where, _, value = line.partition("=")
        section, _, name = where.rpartition(".")
        if section not in ("global", ":env:"):
            continue
        words = literal_eval(value).split()
        for index, word in enumerate(words):
            path = Path(urlparse(word).path if word.startswith("file://") else word)
            if not path.is_absolute() or not path.exists():
                continue
            if path.is_file():  # not in its own place, where the base may have one of its own
                words[index] = f"/run/pip-{name}"
                mounts.add(f"{path}:{words[index]}")
            else:  # an index leads to files beside it
                shown = path.parent if word.startswith("file://") else path
                mounts.add(f"{shown}:{shown}")
        settings[name] = "\n    ".join(words)
    return "\n".join(
        ["[global]", *(f"{name} = {value}" for name, value in settings.items()), ""]
    ), sorted(mounts)
