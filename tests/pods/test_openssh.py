from __future__ import annotations

import os
import pwd
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from tests.pods.conftest import Launched
from tests.support.sentences import says, sentence
from workbench.base.errors import ConfigError
from workbench.pods.hostfile import Hostfile
from workbench.pods.pod import Pod
from workbench.pods.ssh import transport
from workbench.pods.ssh.identity import Identity
from workbench.pods.ssh.openssh import pdsh_environment, ssh_argv, ssh_wrapper

needs_pdsh = pytest.mark.skipif(
    shutil.which("pdsh") is None, reason="needs pdsh: apt-get install pdsh"
)
needs_mpirun = pytest.mark.skipif(
    shutil.which("mpirun") is None, reason="needs mpirun: apt-get install openmpi-bin"
)


def pdsh(launched: Launched, command: str) -> subprocess.CompletedProcess[str]:
    hosts = ",".join(Hostfile.from_pods(launched.pods).addresses)
    return subprocess.run(
        ["pdsh", "-S", "-w", hosts, command],
        env={**os.environ, **pdsh_environment(launched.identity)},
        capture_output=True,
        text=True,
        timeout=300,
        stdin=subprocess.DEVNULL,
    )


@needs_pdsh
def test_pdsh_reaches_all(launched: Launched) -> None:
    done = pdsh(launched, "basename $WORKBENCH_POD")
    assert sorted(done.stdout.splitlines()) == ["127.0.0.2: pod-0", "127.0.0.3: pod-1"], done
    assert pdsh(launched, "exit 5").returncode == 5


@needs_pdsh
def test_pdsh_runs_nothing_on_a_host_with_another_key(launched: Launched, tmp_path: Path) -> None:
    first, second = launched.pods
    launched.identity.pin(
        [replace(first, host_key=second.host_key), replace(second, host_key=first.host_key)]
    )
    done = pdsh(launched, f"touch {tmp_path}/canary")
    assert done.returncode == 255
    assert not (tmp_path / "canary").exists()


def mpirun(launched: Launched, *command: str) -> subprocess.CompletedProcess[str]:
    hosts = ",".join(f"{address}:1" for address in Hostfile.from_pods(launched.pods).addresses)
    wrapper = ssh_wrapper(launched.identity, launched.pods)
    mca = ["plm_rsh_agent", wrapper], ["oob_tcp_if_include", "lo"], ["btl_tcp_if_include", "lo"]
    argv = ["mpirun", "--allow-run-as-root", "-np", "2", "--host", hosts]
    options = [word for pair in mca for word in ("--mca", *pair)]
    return subprocess.run(
        [*argv, *options, *command],
        capture_output=True,
        text=True,
        timeout=300,
        stdin=subprocess.DEVNULL,
    )


@needs_mpirun
@pytest.mark.slow
def test_mpirun_reaches_all(launched: Launched) -> None:
    done = mpirun(launched, "sh", "-c", "basename $WORKBENCH_POD")
    assert sorted(done.stdout.split()) == ["pod-0", "pod-1"], done


@needs_mpirun
@pytest.mark.slow
def test_mpirun_runs_nothing_on_a_host_with_another_key(launched: Launched, tmp_path: Path) -> None:
    first, second = launched.pods
    launched.identity.pin(
        [replace(first, host_key=second.host_key), replace(second, host_key=first.host_key)]
    )
    done = mpirun(launched, "touch", f"{tmp_path}/canary")
    assert done.returncode != 0
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize(
    "words",
    [
        ["sh", "-c", "'echo $WORKBENCH_POD $TMPDIR'", "127.0.0.3"],
        # mpirun's form for an account whose shell is sh or ksh
        ["( test ! -r ./.profile || . ./.profile; PATH=$PATH ; echo $WORKBENCH_POD $TMPDIR )"],
    ],
    ids=["program", "brackets"],
)
def test_the_wrapper_is_ssh(launched: Launched, words: list[str]) -> None:
    wrapper = ssh_wrapper(launched.identity, launched.pods)
    argv = [wrapper, "-x", "127.0.0.3", *words]
    done = subprocess.run(
        argv, capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL
    )
    own = launched.pods[1].root
    assert done.stdout == f"{own} {own}\n", (
        "two orteds of one machine must not share a folder: they race in it"
    )


def test_paths_that_the_launchers_would_split_are_refused(tmp_path: Path) -> None:
    blank = Identity.create(tmp_path / "a b")
    with pytest.raises(
        ConfigError, match=sentence("quotes and % and start another cluster", "a b")
    ):
        pdsh_environment(blank)
    with pytest.raises(ConfigError, match=sentence("mpirun cannot use the path", "a b")):
        ssh_wrapper(blank, [Pod(name="pod-0")])
    with pytest.raises(ConfigError, match=sentence("quotes and % and start another cluster")):
        pdsh_environment(Identity.create(tmp_path / "100%h"))
    with pytest.raises(ConfigError, match=sentence("mpirun cannot use the path")):
        ssh_wrapper(Identity.create(tmp_path / "a:b"), [Pod(name="pod-0")])


def test_a_hostile_address_never_becomes_an_argument(launched: Launched) -> None:
    for address in ("-oProxyCommand=touch canary", "a b", "^file"):
        with pytest.raises(ConfigError):
            ssh_argv(replace(launched.pods[0], address=address), launched.identity, ["true"])


@pytest.mark.parametrize(
    ("content", "words", "command"),
    [
        ("pkcs8", "form PKCS#8", "ssh-keygen -p -N '' -f "),
        ("PuTTY-User-Key-File-3: ssh-ed25519\n", "puttygen", ""),
        ("b3BlbnNzaC1rZXktdjEAAAAABG5vbmUAAAAEbm9uZQ==\n", "first line", ""),
        ("-----BEGIN OPENSSH PRIVATE KEY----- b3BlbnNzaC1rZXktdjEAAAAABG5v", "line ends", ""),
    ],
)
def test_a_key_of_another_program_is_named_with_the_command_that_converts_it(
    tmp_path: Path, content: str, words: str, command: str
) -> None:
    key = tmp_path / "my key"
    if content == "pkcs8":
        make = ["openssl", "genpkey", "-algorithm", "RSA", "-out", str(key)]
        subprocess.run(make, check=True, capture_output=True, timeout=300)
    else:
        key.write_text(content)
    key.chmod(0o600)
    with pytest.raises(ConfigError, match=sentence("is no usable private key")) as error:
        transport._load_key(key)
    assert words in str(error.value)
    if command:
        line = command + str(error.value).partition(command)[2].partition(". OpenSSH")[0]
        subprocess.run(["sh", "-ec", line], check=True, capture_output=True, timeout=300)
        assert transport._load_key(key).get_name() == "ssh-rsa"


def test_a_user_without_a_name_has_a_client_of_the_same_streams_and_codes(
    launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    pod = launched.pods[0]
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    data = os.urandom(3 << 20)
    shell = ["sh", "-c", "cat; echo words >&2; exit 7"]
    argv = ssh_argv(pod, launched.identity, shell, ["-o", "ConnectTimeout=5"])
    done = subprocess.run(argv, input=data, capture_output=True, timeout=300)
    assert (done.stdout == data, done.stderr, done.returncode) == (True, b"words\n", 7)
    strange = replace(pod, host_key=launched.pods[1].host_key)
    launched.identity.pin([strange])
    done = subprocess.run(ssh_argv(strange, launched.identity, ["true"]), capture_output=True)
    assert done.returncode == 255
    assert says(done.stderr.decode(), "; another machine answers there")
    line = f"workbench:x:{os.geteuid()}:{os.getegid()}:"
    with pytest.raises(ConfigError, match=line):
        pdsh_environment(launched.identity)
    with pytest.raises(ConfigError, match=line):
        ssh_wrapper(launched.identity, launched.pods)
