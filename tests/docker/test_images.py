"""The images of the Dockerfile, and what `docker compose up` makes of them (`make test-images`).

Minutes of CPU and some GB of disk, so it is not part of `make test`.
The three workers are containers with a network address each; they
are trained on from this machine and from the JupyterLab beside them.
"""

from __future__ import annotations

import json
import platform
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import nbformat
import pytest

from tests.docker.imagelab import PREFIX, REPOSITORY, Engine, missing, tool
from tests.docker.test_files import first_cell
from tests.support.measured import MEASURED
from tests.support.poll import until
from workbench import Cluster, FineTune, PodSpec, SSHPods
from workbench.pods.ssh.identity import Identity

pytestmark = [pytest.mark.images, pytest.mark.timeout(7200)]
PROJECT = "workbench-test"
WORKERS = ("worker-1", "worker-2", "worker-3")
PRIVATE = re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY-----\s+[A-Za-z0-9+/=]{40}")
UP_S = 120.0
FEWER = ("--scale", "worker-3=0")
TWO = """
with Cluster(backend, pod, count=count, warm=False) as cluster:
    run = cluster.submit(Script(path="rank.py"))
    print(*[host.address for host in run.wait(300, progress=False).raise_for_status().hosts])
"""
RUN_S = 600.0
WHOSE = """
import pathlib
for status in pathlib.Path("/proc").glob("[0-9]*/status"):
    fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
    print(fields["Name"].strip(), fields["Uid"].split()[1], fields["CapEff"].strip())
"""


@pytest.fixture(scope="module")
def engine() -> Engine:
    """The engine, with both images built."""
    if reason := missing():
        pytest.skip(reason)
    made = Engine(REPOSITORY / "build" / "images")
    made.make_base()
    for target in ("worker", "jupyter"):
        took_s = made.build(target, made.folder / f"{target}.log")
        size = int(made.podman("image", "inspect", "--format", "{{.Size}}", f"{PREFIX}{target}"))
        MEASURED.append(
            f"image {target}: {size / 1024**3:.2f} GiB, built "
            f"in {took_s:.0f} s (less what was built before)"
        )
    return made


@dataclass(frozen=True)
class Stack:
    """What `docker compose up` made."""

    engine: Engine
    compose: Callable[..., str]

    def inside(
        self, service: str, *words: str, input: str | None = None, timeout_s: float = 60.0
    ) -> str:
        """Run a command in a container."""
        options = ("--interactive",) if input is not None else ()
        return self.engine.podman(
            "exec", *options, f"{PROJECT}-{service}-1", *words, input=input, timeout_s=timeout_s
        )

    def address(self, service: str) -> str:
        """Give a container's address on the network of the compose file."""
        said = json.loads(self.engine.podman("inspect", f"{PROJECT}-{service}-1"))
        (network,) = said[0]["NetworkSettings"]["Networks"].values()
        return str(network["IPAddress"])


@pytest.fixture(scope="module")
def stack(engine: Engine) -> Iterator[Stack]:
    """JupyterLab and three workers, each worker's key in known_hosts."""
    with engine.compose(PROJECT) as compose:
        began = time.monotonic()
        compose("up", "--no-build", "--pull", "never", "--detach")
        made = Stack(engine, compose)

        def up() -> bool:
            hosts = made.inside("jupyter", "cat", "/trust/known_hosts").count("\n")
            return hosts >= 3 and "token=" in compose("logs")

        until(up, UP_S, every_s=0.5, why=lambda: compose("logs"))
        MEASURED.append(
            f"docker compose up to JupyterLab's token: {time.monotonic() - began:.1f} s"
        )
        yield made


def test_the_dockerfile_has_no_fault_that_a_linter_knows() -> None:
    program = tool("hadolint")
    if program is None:
        pytest.skip("hadolint is not installed; make test-images installs it")
    # Debian keeps no older versions to pin; grep fails at the
    # end of its pipe if there is nothing; the rest is taste.
    ignored = [
        word for rule in ("DL3008", "DL4006", "DL3003", "DL3066") for word in ("--ignore", rule)
    ]
    done = subprocess.run(
        [program, *ignored, "docker/Dockerfile"], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


def test_no_layer_holds_a_key_or_this_machines_settings(engine: Engine) -> None:
    layers = engine.layers("jupyter")
    assert len(layers) >= 10
    found, looked_at = [], 0
    for layer in layers:
        for path in layer.rglob("*"):
            if not path.is_file() or path.is_symlink():
                continue
            looked_at += 1
            name = path.relative_to(layer)
            if re.fullmatch(
                r"ssh_host_\w+(\.pub)?|authorized_keys|known_hosts|id_\w+(\.pub)?", path.name
            ):
                found.append(f"{name}: its name")
            if path.name == "pip.conf" and path.stat().st_size:
                found.append(f"{name}: settings of pip")
            if path.stat().st_size < 1_000_000 and PRIVATE.search(path.read_bytes()):
                found.append(f"{name}: a private key")
    assert looked_at > 10_000
    # tornado's own tests come with a key and a certificate, the same for everybody.
    assert [
        line
        for line in found
        if not line.endswith("site-packages/tornado/test/test.key: a private key")
    ] == []


def test_the_ops_are_built_for_the_oldest_cpu(engine: Engine) -> None:
    report = engine.podman(
        "run", "--rm", "--network", "none", f"{PREFIX}worker", "ds_report", timeout_s=300
    )
    plain = re.sub(r"\x1b\[[0-9;]*m", "", report)
    for op in ("cpu_adam", "async_io", "pin_memory"):
        assert re.search(rf"^{op} \.+ \[YES\] \.+ \[OKAY\]", plain, re.MULTILINE), plain
    if platform.machine() == "x86_64":
        find = (
            "objdump --disassemble "
            "/opt/venv/lib/python3*/site-packages/deepspeed/ops/adam/cpu_adam_op*.so"
        )
        count = f"{find} | grep --count -E '%{{0}}mm[0-9]' || true"
        for register, used in (("y", True), ("z", False)):  # AVX2 it is, AVX-512 it is not
            words = ("--network", "none", f"{PREFIX}worker", "bash", "-c", count.format(register))
            assert (int(engine.podman("run", "--rm", *words)) > 0) is used


def test_jupyterlab_asks_for_its_token(stack: Stack) -> None:
    token = re.findall(r"token=(\w+)", stack.compose("logs", "jupyter"))[0]
    ask = (
        "import sys, urllib.request, urllib.error\n"
        "try: print(urllib.request.urlopen(sys.argv[1]).status)\n"
        "except urllib.error.HTTPError as error: print(error.code)"
    )
    where = "http://127.0.0.1:8888/api/contents"
    assert stack.inside("jupyter", "python3", "-c", ask, where).strip() == "403"
    assert stack.inside("jupyter", "python3", "-c", ask, f"{where}?token={token}").strip() == "200"


def test_the_workers_never_see_the_private_key_and_take_no_password(stack: Stack) -> None:
    private = stack.inside("jupyter", "cat", ".ssh/id_ed25519")
    assert private.startswith("-----BEGIN OPENSSH PRIVATE KEY-----")
    assert stack.inside("jupyter", "stat", "-c", "%a %u", ".ssh/id_ed25519").strip() == "600 1000"
    for worker in WORKERS:
        assert stack.inside(worker, "find", "/home/workbench/.ssh", "/trust", "-name", "id_*") == ""
        words = [
            "ssh",
            "-F",
            "none",
            "-p",
            "2222",
            "-o",
            "BatchMode=yes",
            "-o",
            "StrictHostKeyChecking=no",
        ]
        words += ["-o", "UserKnownHostsFile=/dev/null", "-o", "PubkeyAuthentication=no"]
        done = subprocess.run(
            [*words, f"workbench@{stack.address(worker)}", "true"],
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 255
        assert "Permission denied (publickey)" in done.stderr


def test_this_machine_trains_on_three_containers(stack: Stack, tmp_path: Path) -> None:
    user = Identity.create(tmp_path / "user")
    addresses = {stack.address(worker): worker for worker in WORKERS}
    assert len(addresses) == 3
    stack.inside("jupyter", "tee", "-a", "/trust/authorized_keys", input=f"{user.public_key}\n")
    known = stack.inside("jupyter", "cat", "/trust/known_hosts")
    for address, worker in addresses.items():
        known = known.replace(f"[{worker}]", f"[{address}]")
    (tmp_path / "known_hosts").write_text(known)
    backend = SSHPods(
        list(addresses),
        user="workbench",
        port=2222,
        key=user.key,
        known_hosts=tmp_path / "known_hosts",
    )
    options = {
        "model": "tiny-t5",
        "dataset": {"kind": "wikisql-mini", "train_rows": 400, "eval_rows": 50},
    }
    with Cluster(
        backend, PodSpec(cpus=1), count=3, path=tmp_path / "cluster", start_timeout_s=RUN_S
    ) as cluster:
        for technique in ("zero1", "zero3-offload"):
            began = time.monotonic()
            job = FineTune(
                technique=technique,
                max_steps=5,
                per_device_train_batch_size=4,
                predict_rows=0,
                **options,
            )
            run = cluster.submit(job)
            result = run.wait(RUN_S, progress=False).raise_for_status()
            assert [host.address for host in result.hosts] == list(addresses)
            assert (result.world_size, result.steps) == (3, 5)
            MEASURED.append(
                f"{technique} on three containers: {time.monotonic() - began:.0f} "
                f"s, the first step after {result.time_to_first_step_s:.1f} s"
            )
        for worker in WORKERS:  # the agents and their warm servers are still there
            whose = [
                line.split() for line in stack.inside(worker, "python3", "-c", WHOSE).splitlines()
            ]
            assert len(whose) > 5
            assert {(uid, capabilities) for _, uid, capabilities in whose} == {("1000", "0" * 16)}
    for worker in WORKERS:
        assert (
            stack.inside(worker, "find", "/home/workbench/.cache", "-name", "torch_extensions")
            == ""
        )
        assert (
            stack.inside(
                worker, "find", "/home/workbench/.cache/deepspeed-workbench", "-mindepth", "1"
            )
            == ""
        )


def test_notebook_three_runs_beside_the_workers_by_its_first_cell_alone(stack: Stack) -> None:
    book = nbformat.read(REPOSITORY / "notebooks" / "03_deepspeed_zero1.ipynb", as_version=4)
    first = next(cell for cell in book.cells if cell.cell_type == "code")
    head, tail = first.source.partition("train_rows")[::2]
    assert "backend = LocalPods()\npod = PodSpec(cpus=1)\ncount = 3\n" in head
    first.source = f"{first_cell()}train_rows{tail}"
    assert "03_deepspeed_zero1.ipynb" in stack.inside("jupyter", "ls", "work")
    stack.inside("jupyter", "tee", "work/03.ipynb", input=nbformat.writes(book))
    began = time.monotonic()
    words = ("jupyter", "nbconvert", "--to", "notebook", "--execute", "--inplace", "work/03.ipynb")
    stack.inside("jupyter", *words, timeout_s=2 * RUN_S)
    MEASURED.append(f"notebook 03 in the container of JupyterLab: {time.monotonic() - began:.0f} s")
    done = nbformat.reads(stack.inside("jupyter", "cat", "work/03.ipynb"), as_version=4)
    outputs = [out for cell in done.cells for out in cell.get("outputs", [])]
    text = "\n".join(
        out.get("text", "") or out.get("data", {}).get("text/plain", "") for out in outputs
    )
    assert re.search(r"^launcher +ssh +pdsh", text, re.MULTILINE), text
    assert "worker-2 slots=1" in text
    assert stack.inside("jupyter", "find", ".cache", "-name", "torch_extensions") == ""


def test_two_workers_take_one_option(stack: Stack) -> None:
    assert " ".join(FEWER) in (REPOSITORY / "docs" / "places" / "images.md").read_text()
    stack.compose("up", "--no-build", "--pull", "never", "--detach", *FEWER)
    services = stack.compose("ps", "--services").split()
    assert sorted(services) == ["jupyter", "worker-1", "worker-2"]
    cell = first_cell().replace(', "worker-3"', "").replace("PodSpec(cpus=1), 3", "PodSpec(), 2")
    stack.inside("jupyter", "tee", "rank.py", input="print('here')\n")
    program = f"from workbench import Script\n{cell}{TWO}"
    said = stack.inside("jupyter", "python3", "-", input=program, timeout_s=RUN_S)
    assert said.splitlines()[-1] == "worker-1 worker-2"
