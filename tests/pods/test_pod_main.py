"""The first process of a Kubernetes pod alone: what it refuses, when it ends, how logins work."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.sentences import says
from workbench.pods.bootstrap import pod_main
from workbench.pods.bootstrap.machine import free_port
from workbench.pods.bootstrap.pod_main import REPORT
from workbench.pods.kubernetes.manifests.objects import HostKey
from workbench.pods.rendezvous.listener import decode_report
from workbench.pods.ssh.connection import SSHConnection
from workbench.pods.ssh.identity import Identity

ADDRESS = "127.77.3.4"


@pytest.fixture
def arguments(tmp_path: Path, identity: Identity) -> list[str]:
    """The command line of a pod whose Secret is mounted."""
    key, secret = HostKey.generate(), tmp_path / "secret"
    secret.mkdir()
    (secret / "host_key").write_text(key.private)
    (secret / "host_key.pub").write_text(key.public + "\n")
    (secret / "authorized_keys").write_text(f"restrict {identity.public_key}\n")
    flags = {
        "--name": "pod-0",
        "--root": tmp_path / "work" / "pod-0",
        "--secret": secret,
        "--slots": 1,
    }
    flags |= {"--port": free_port([ADDRESS]), "--lease-s": 1, "--wait-s": 300}
    return [str(word) for pair in flags.items() for word in pair]


@pytest.fixture
def start(arguments: list[str], tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts it as a container does."""
    started = []

    def run(*more: str, **env: str) -> subprocess.Popen[str]:
        place = {
            "POD_IP": ADDRESS,
            "WORKBENCH_LISTEN": ADDRESS,
            "WORKBENCH_POD": str(tmp_path / "work" / "pod-0"),
        }
        pod = subprocess.Popen(
            [sys.executable, "-u", pod_main.__file__, *arguments, *more],
            env={**os.environ, **place, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(pod)
        return pod

    yield run
    for pod in started:
        pod.terminate()  # with its sshd, which would keep the pipe open
        pod.communicate(timeout=300)


def until(pod: subprocess.Popen[str], words: str) -> str:
    assert pod.stdout is not None
    for line in pod.stdout:
        if words in line:
            return line
    raise AssertionError(f"the pod ended without saying {words!r}")


def test_a_pod_says_who_it_is_and_gives_logins_its_variables(
    start: Callable[..., subprocess.Popen[str]], identity: Identity
) -> None:
    pod = start(
        "--lease-s", "30", HF_TOKEN="canary 1", ODD='a"b', KUBERNETES_SERVICE_HOST="10.0.0.1"
    )
    assert says(until(pod, "ODD"), "is left out: sshd takes no quotes", "ODD")
    who = decode_report(until(pod, REPORT).removeprefix(REPORT))
    assert (who.name, who.address, who.python) == ("pod-0", ADDRESS, sys.executable)
    root = Path(who.root)
    assert all(path.stat().st_mode & 0o077 == 0 for path in (root, *root.rglob("*")))
    identity.pin([who])
    with SSHConnection(who, identity) as connection:
        found = json.loads(
            connection.run(
                [who.python, "-c", "import json,os; print(json.dumps(dict(os.environ)))"]
            ).stdout
        )
    assert (found["HF_TOKEN"], found["WORKBENCH_POD"]) == ("canary 1", who.root)
    assert found["PATH"].split(":")[0] == str(Path(sys.executable).parent)
    assert not {"ODD", "KUBERNETES_SERVICE_HOST"} & set(found)
    pod.send_signal(signal.SIGTERM)
    assert pod.wait(300) == 143, "Kueue takes no replacement for a pod that ended with 0"


def test_a_pod_ends_when_nobody_is_logged_in_for_the_lease(
    start: Callable[..., subprocess.Popen[str]], identity: Identity
) -> None:
    pod = start()
    who = decode_report(until(pod, REPORT).removeprefix(REPORT))
    identity.pin([who])
    with SSHConnection(who, identity):
        time.sleep(2.5)
        assert pod.poll() is None, "it ended though somebody was logged in"
    assert "nobody was logged in for 1 s" in until(pod, "pod:")
    assert pod.wait(300) == 0


@pytest.mark.long
def test_a_pod_that_slept_for_longer_than_its_lease_gives_the_keeper_time(
    start: Callable[..., subprocess.Popen[str]],
) -> None:
    pod = start("--wait-s", "9")
    until(pod, REPORT)
    time.sleep(1.5)  # its lease begins only after the report
    pod.send_signal(signal.SIGSTOP)
    time.sleep(11)
    pod.send_signal(signal.SIGCONT)
    assert "this machine slept for " in until(pod, "pod:")
    assert "nobody was logged in for" in until(pod, "pod:")
    assert pod.wait(300) == 0


def test_a_pod_that_nobody_ever_calls_ends(start: Callable[..., subprocess.Popen[str]]) -> None:
    pod = start("--wait-s", "0.5")
    until(pod, "nobody was logged in for")
    assert pod.wait(300) == 0


def test_an_image_without_sshd_or_with_a_nameless_user_says_so(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    handler, mask = signal.getsignal(signal.SIGTERM), os.umask(0o077)
    try:
        with monkeypatch.context() as bare:
            bare.setattr(shutil, "which", lambda *_args, **_named: None)
            assert pod_main.main(arguments) == 1
        with monkeypatch.context() as nameless:
            nameless.setattr(os, "geteuid", lambda: 3_999_999)
            assert pod_main.main(arguments) == 1
    finally:
        signal.signal(signal.SIGTERM, handler)
        os.umask(mask)
    said = capfd.readouterr().out
    assert says(said, "install openssh-server in the image")
    assert says(said, "has no name in the image's /etc/passwd", 3999999)
