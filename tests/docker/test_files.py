"""What is seen of the images without a build: their files agree, and the entry point works."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.poll import until
from tools.images import locks
from workbench import SSHPods
from workbench.pods.bootstrap.machine import free_port
from workbench.pods.bootstrap.sshd import SSHD_OPTIONS, find_sshd

REPOSITORY = Path(__file__).resolve().parent.parent.parent
DOCKER = REPOSITORY / "docker"
ENTRYPOINT = DOCKER / "entrypoint"
SHELLCHECK = Path(sys.executable).parent / "shellcheck"
LISTEN_S = 60.0


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions, each a name and the rest of its line."""
    lines = [
        line
        for line in (DOCKER / "Dockerfile").read_text().splitlines()
        if not line.lstrip().startswith("#")
    ]
    whole = "\n".join(lines).replace("\\\n", " ")
    pairs = [line.strip().partition(" ") for line in whole.splitlines() if line.strip()]
    return [(name, " ".join(rest.split())) for name, _, rest in pairs]


def stages() -> dict[str, list[tuple[str, str]]]:
    """The instructions of each target; what comes before the first FROM is left out."""
    found: dict[str, list[tuple[str, str]]] = {}
    for name, rest in instructions():
        if name == "FROM":
            current = found.setdefault(rest.split(" AS ")[1], [])
        if found:
            current.append((name, rest))
    return found


def paragraph(heading: str) -> dict[str, str]:
    """The packages that the Dockerfile's `sed` takes from requirements.txt, with their versions."""
    text = (REPOSITORY / "requirements.txt").read_text()
    taken = text[text.index(f"\n{heading}") + 1 :].split("\n\n")[0]
    return dict(line.split("==") for line in taken.splitlines()[1:])


def compose() -> Any:
    return yaml.safe_load((DOCKER / "compose.yaml").read_text())


def first_cell() -> str:
    """The first cell that the documentation gives for the compose file."""
    blocks = re.findall(
        r"```python\n(.*?)```", (REPOSITORY / "docs/places/images.md").read_text(), re.DOTALL
    )
    (found,) = [block for block in blocks if "worker-1" in block]
    return str(found)


def target_of(service: Any, source: str) -> str:
    return next(
        (str(volume["target"]) for volume in service["volumes"] if volume["source"] == source), ""
    )


def test_the_dockerfile_has_its_targets_on_a_base_of_choice() -> None:
    assert [pair for pair in instructions() if pair[0] == "FROM"] == [
        ("FROM", "${CML_BASE_IMAGE} AS cml-runtime"),
        ("FROM", "${BASE_IMAGE} AS worker"),
        ("FROM", "worker AS jupyter"),
    ]
    name, base = instructions()[0]
    assert name == "ARG"
    assert re.fullmatch(r"BASE_IMAGE=nvidia/cuda:\d+\.\d+\.\d+-devel-ubuntu24\.04", base)


def test_the_runtime_for_cloudera_ml_has_the_labels_user_and_programs_that_it_needs() -> None:
    made = stages()["cml-runtime"]
    words = " ".join(rest for _, rest in made)
    (label,) = [rest for name, rest in made if name == "LABEL"]
    labels = dict(pair.split("=", 1) for pair in label.split())
    names = (
        "editor",
        "edition",
        "description",
        "kernel",
        "full-version",
        "short-version",
        "maintenance-version",
    )
    assert labels == {
        "com.cloudera.ml.runtime.runtime-metadata-version": "$ML_RUNTIME_METADATA_VERSION",
        **{
            f"com.cloudera.ml.runtime.{n}": f"$ML_RUNTIME_{n.upper().replace('-', '_')}"
            for n in names
        },
    }
    own = {
        match
        for name, rest in made
        if name == "ENV"
        for match in re.findall(r"ML_RUNTIME_\w+(?==)", rest)
    }
    assert own == {
        f"ML_RUNTIME_{n.upper().replace('-', '_')}" for n in names if n not in ("editor", "kernel")
    }
    assert [rest for name, rest in made if name == "USER"] == ["root", "8536:8536"]
    assert '"$(id -u cdsw):$(id -g cdsw)" = 8536:8536 && nvcc --version' in words
    assert all(f" {program} " in words for program in ("openssh-server", "pdsh", "openmpi-bin"))
    docs = (REPOSITORY / "docs/places/cloudera-ml.md").read_text()
    assert "--target cml-runtime" in docs and "Runtime Catalog" in docs


@pytest.mark.parametrize("target", ["worker", "jupyter"])
def test_both_images_end_as_an_ordinary_user(target: str) -> None:
    users = [rest for name, rest in stages()[target] if name == "USER"]
    assert users[-1] == "1000:1000"  # a number: Kubernetes' runAsNonRoot takes no name
    (command,) = [json.loads(rest) for name, rest in stages()[target] if name == "CMD"]
    assert [f"    {words}" for words in command] and f"{command[0]}() {{" in ENTRYPOINT.read_text()
    (entry,) = [json.loads(rest) for name, rest in stages()["worker"] if name == "ENTRYPOINT"]
    assert entry == ["/usr/bin/tini", "--", "/opt/workbench/entrypoint"]


def test_only_what_is_named_goes_into_an_image() -> None:
    ignored = (DOCKER / "Dockerfile.dockerignore").read_text().splitlines()
    let_in = {line[1:] for line in ignored if line.startswith("!")}
    copied = set()
    for name, rest in instructions():
        assert name != "ADD"
        if name == "COPY":
            copied |= {word for word in rest.split()[:-1] if not word.startswith("--")}
    assert copied == let_in
    assert all((REPOSITORY / path).exists() for path in copied)
    assert "*" in ignored
    assert any(fnmatch("notebooks/runs", line) for line in ignored if line[:1] not in "!#*")


def test_no_key_and_no_secret_stays_in_a_layer() -> None:
    for name, rest in instructions():
        if "openssh-server" in rest:
            assert re.search(
                r"&& rm -rf .* /etc/ssh/ssh_host_\*", rest
            )  # in the step that made them
        assert "ssh-keygen" not in rest
        if name in ("ARG", "ENV"):
            assert not re.search(r"token|passw|secret|key", rest, re.IGNORECASE)
        if "pip " in rest:
            assert rest.startswith("--mount=type=secret,id=pip,target=/etc/pip.conf ")


def test_the_images_hold_all_that_the_package_needs() -> None:
    pods, notebook = paragraph("# What runs on"), paragraph("# The notebook")
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    needed = {re.split(r"[><=]", line)[0] for line in project["dependencies"]}
    assert needed <= pods.keys() | notebook.keys()
    assert {"torch", "deepspeed", "transformers", "accelerate", "datasets"} <= pods.keys()
    assert "jupyterlab" in notebook
    for path, text in locks().items():
        assert path.read_text() == text, "run: make requirements"
        assert not re.search(r"^(torch|triton|nvidia-.*)==", text, re.MULTILINE)
        for package in re.split(r"^(?=\S+==)", text, flags=re.MULTILINE)[1:]:
            assert "--hash=sha256:" in package


@pytest.mark.parametrize("target", ["cml-runtime", "worker", "jupyter"])
def test_every_package_has_its_hash_and_torch_alone_comes_from_its_index(target: str) -> None:
    steps = [
        step.strip()
        for name, rest in stages()[target]
        if name == "RUN"
        for step in re.split(r"&&|;", rest)
        if re.search(r"\bpip (install|download)\b", step)
    ]
    assert steps
    for step in steps:
        has_index = "index-url" in step
        if step.endswith(" torch"):
            assert "--extra-index-url" not in step and has_index
        elif step.endswith((" .", " /opt/workbench")):  # a folder of the image
            assert "--no-deps" in step and not has_index
        else:
            assert "--no-deps --require-hashes" in step and not has_index


@pytest.mark.parametrize(
    "script", ["docker/entrypoint", ".ci/base-image", ".ci/run", ".ci/system-packages"]
)
def test_shell_scripts_are_clean(script: str) -> None:
    done = subprocess.run(
        [SHELLCHECK, REPOSITORY / script], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "base",
    [
        "",
        "ubuntu:24.04",
        "ubuntu@sha256:abc",
        "ubuntu:24.04@sha256:" + "g" * 64,
        "u@sha256:" + "a" * 64 + " -x",
    ],
)
def test_images_for_others_are_not_built_on_a_tag(base: str) -> None:
    done = subprocess.run(
        ["make", "images", f"BASE_IMAGE={base}"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 2
    assert "is not named by digest" in done.stderr
    assert "imagetools inspect" in done.stderr


def test_a_base_by_digest_is_taken() -> None:
    base = f"nvidia/cuda:13.0.2-devel-ubuntu24.04@sha256:{'0a' * 32}"
    assert subprocess.run([REPOSITORY / ".ci" / "base-image", base], timeout=300).returncode == 0


def test_compose_gives_each_worker_a_name_and_the_notebook_alone_the_key() -> None:
    services = compose()["services"]
    jupyter = services.pop("jupyter")
    assert sorted(services) == jupyter["depends_on"] == ["worker-1", "worker-2", "worker-3"]
    for name, service in services.items():
        assert service.pop("hostname") == name
    first, *others = services.values()
    assert others == [first, first]
    for service, target in ((first, "worker"), (jupyter, "jupyter")):
        assert service["build"]["target"] == target
        assert service["image"] == f"deepspeed-workbench/{target}"
        assert target_of(service, "trust") == service["environment"]["WORKBENCH_TRUST"]
        assert service["cap_drop"] == ["ALL"]
        assert not {"privileged", "cap_add", "user", "network_mode"} & service.keys()
        arguments = {rest.split("=")[0] for name, rest in instructions() if name == "ARG"}
        assert service["build"]["args"].keys() <= arguments
    assert target_of(first, "key") == ""
    assert target_of(jupyter, "key") == "/home/workbench/.ssh"
    assert all(port.startswith("127.0.0.1:") for port in jupyter["ports"])
    assert "ports" not in first
    assert compose()["volumes"].keys() == {volume["source"] for volume in jupyter["volumes"]}


def test_the_readme_tells_the_notebook_what_compose_starts() -> None:
    (call,) = [
        node
        for node in ast.walk(ast.parse(first_cell()))
        if ast.unparse(node).startswith("SSHPods(")
    ][:1]
    assert isinstance(call, ast.Call)
    said = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
    services = compose()["services"]
    assert said["hosts"] == sorted(services.keys() - {"jupyter"})
    assert said["port"] == 2222
    home = "/home/workbench"
    assert said["key"].replace("~", home).startswith(target_of(services["jupyter"], "key") + "/")
    assert f"key={said['key']} " in ENTRYPOINT.read_text()
    assert said["known_hosts"] == target_of(services["jupyter"], "trust") + "/known_hosts"
    assert SSHPods(**{**said, "known_hosts": ""}).to_dict()["port"] == 2222


def test_kubernetes_runs_jupyterlab_as_the_image_does() -> None:
    documents = yaml.safe_load_all((DOCKER / "kubernetes" / "jupyterlab.yaml").read_text())
    pod = next(document for document in documents if document["kind"] == "Deployment")["spec"][
        "template"
    ]["spec"]
    (container,) = pod["containers"]
    assert container["image"] == compose()["services"]["jupyter"]["image"]
    assert not {"command", "args"} & container.keys()
    assert (
        f"{pod['securityContext']['runAsUser']}:{pod['securityContext']['runAsGroup']}"
        == "1000:1000"
    )
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    (mount,) = [mount for mount in container["volumeMounts"] if mount["name"] == "notebooks"]
    assert {"/home/workbench", "/tmp"} <= {each["mountPath"] for each in container["volumeMounts"]}
    assert mount["mountPath"] == target_of(compose()["services"]["jupyter"], "work")
    assert any(mount["mountPath"] in rest for name, rest in stages()["worker"] if name == "RUN")
    assert ("EXPOSE", str(container["ports"][0]["containerPort"])) in stages()["jupyter"]
    assert f"--port={container['ports'][0]['containerPort']} " in ENTRYPOINT.read_text()


class Containers:
    """The entry point as containers run it, but on this machine: a home each, one shared folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.trust = folder / "trust"
        self.trust.mkdir()
        self.port = free_port(["0.0.0.0"])
        self.entrypoint = folder / "image" / "entrypoint"
        (self.entrypoint.parent / "notebooks").mkdir(parents=True)
        (self.entrypoint.parent / "notebooks" / "a.ipynb").write_text("as shipped")
        shutil.copy(ENTRYPOINT, self.entrypoint)
        fake = folder / "bin" / "jupyter"
        fake.parent.mkdir()
        fake.write_text('#!/bin/sh\necho "$@"\n')
        fake.chmod(0o755)

    def environment(self, name: str) -> dict[str, str]:
        home = self.folder / name
        home.mkdir(exist_ok=True)
        said = {
            "HOSTNAME": name,
            "HOME": str(home),
            "WORKBENCH_TRUST": str(self.trust),
            "A_SETTING": "of the image",
        }
        path = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        return {
            **said,
            "PATH": path,
            "WORKBENCH_SSH_PORT": str(self.port),
            "ODD": 'a "quoted" word',
        }

    def notebook(self) -> str:
        done = subprocess.run(
            [self.entrypoint, "jupyter"],
            env=self.environment("jupyter"),
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    @contextmanager
    def worker(self) -> Iterator[Path]:
        find_sshd()  # as root, sshd wants an empty folder of the machine's
        log = self.folder / "worker.log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                [self.entrypoint, "sshd"], env=self.environment("worker-1"), stderr=file
            )
        try:
            listens = "Server listening"
            until(
                lambda: listens in log.read_text() or process.poll() is not None,
                LISTEN_S,
                why=log.read_text,
            )
            assert listens in log.read_text(), log.read_text()
            yield log
        finally:
            process.terminate()
            process.wait(300)

    def ssh(self, *words: str) -> subprocess.CompletedProcess[str]:
        options = (
            "BatchMode=yes",
            "StrictHostKeyChecking=yes",
            f"UserKnownHostsFile={self.trust / 'known_hosts'}",
        )
        argv = [
            "ssh",
            "-F",
            "none",
            "-p",
            str(self.port),
            "-o",
            f"HostKeyAlias=[worker-1]:{self.port}",
        ]
        argv += [word for option in options for word in ("-o", option)]
        return subprocess.run(
            [*argv, *words], capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL
        )

    def login(self, *command: str) -> subprocess.CompletedProcess[str]:
        return self.ssh(
            "-i", str(self.folder / "jupyter" / ".ssh" / "id_ed25519"), "127.0.0.1", *command
        )


@pytest.fixture
def containers(tmp_path: Path) -> Containers:
    made = Containers(tmp_path)
    (tmp_path / "jupyter" / ".ssh").mkdir(parents=True)
    return made


def test_the_notebook_gets_in_with_the_key_it_made_and_nobody_else(containers: Containers) -> None:
    assert "lab --ip=0.0.0.0 --port=8888 --no-browser" in containers.notebook()
    with containers.worker() as log:
        done = containers.login("printenv A_SETTING; printenv ODD; printenv PATH")
        assert done.stdout.splitlines() == [
            "of the image",
            containers.environment("worker-1")["PATH"],
        ], done.stderr
        refused = containers.ssh(
            "-o", "PreferredAuthentications=password,keyboard-interactive", "127.0.0.1", "true"
        )
        assert refused.returncode == 255
        assert "Permission denied (publickey)" in refused.stderr
        assert "variable ODD is left out" in log.read_text()
    private = containers.folder / "jupyter" / ".ssh" / "id_ed25519"
    assert private.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in containers.trust.iterdir() if "PRIVATE" in path.read_text()] == []


def test_a_second_start_keeps_keys_and_what_a_person_wrote(containers: Containers) -> None:
    containers.notebook()
    own = containers.folder / "jupyter" / "work" / "a.ipynb"
    assert own.read_text() == "as shipped"
    own.write_text("as changed")
    with containers.worker():
        known = (containers.trust / "known_hosts").read_text()
    containers.notebook()
    with containers.worker():
        assert containers.login("true").returncode == 0
    assert (containers.trust / "known_hosts").read_text() == known
    assert known.count("\n") == 1
    assert own.read_text() == "as changed"


def test_a_worker_made_anew_takes_the_place_of_its_last_key(containers: Containers) -> None:
    containers.notebook()
    with containers.worker():
        before = (containers.trust / "known_hosts").read_text()
    (containers.trust / "known_hosts").write_text(before + "[worker-10]:2222 ssh-ed25519 AAAA\n")
    shutil.rmtree(containers.folder / "worker-1")
    with containers.worker():
        assert containers.login("true").returncode == 0
    lines = (containers.trust / "known_hosts").read_text().splitlines()
    assert len(lines) == 2
    assert before.strip() not in lines


def test_workers_are_told_what_every_daemon_of_ours_is_told() -> None:
    text = ENTRYPOINT.read_text()
    told = set(text.split("<<CONFIG\n")[1].split("\nCONFIG\n")[0].splitlines())
    assert set(SSHD_OPTIONS.splitlines()) <= told
