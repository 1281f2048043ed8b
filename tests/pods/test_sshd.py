from __future__ import annotations

import os
import pwd
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from workbench.base.child import HOME
from workbench.base.errors import ConfigError
from workbench.pods.bootstrap.sshd import Daemon, find_sshd, login_user
from workbench.pods.ssh.identity import Identity


@pytest.fixture
def daemon(tmp_path: Path, identity: Identity) -> Daemon:
    return Daemon(
        folder=tmp_path / "pod 0 50%" / "sshd",
        address="127.0.0.2",
        port=22022,
        user="root",
        public_key=identity.public_key,
        environment={"A": "b c #1", "EMPTY": ""},
    )


def test_sshd_reads_the_configuration_as_meant(daemon: Daemon) -> None:
    daemon.folder.parent.mkdir()
    daemon.prepare()
    argv = [find_sshd(), "-T", "-f", "/dev/stdin"]
    shown = subprocess.run(argv, input=daemon.config(), capture_output=True, text=True, timeout=300)
    assert shown.returncode == 0, shown.stderr
    lines = shown.stdout.splitlines()
    for line in (
        "passwordauthentication no",
        "kbdinteractiveauthentication no",
        "permituserenvironment no",
        "permituserrc no",
        "allowtcpforwarding no",
        "allowagentforwarding no",
        "x11forwarding no",
        "maxsessions 100",
        "maxstartups 100:30:100",
        "listenaddress 127.0.0.2:22022",
        "subsystem sftp internal-sftp",
        "setenv A=b c #1",
        "setenv EMPTY=",
        f"hostkey {daemon.folder}/host_key",
    ):
        assert line in lines, line
    allowed = (daemon.folder / "authorized_keys").read_text()
    assert allowed.startswith('restrict,from="127.0.0.0/8" ssh-ed25519 ')
    assert {stat.S_IMODE(path.stat().st_mode) for path in daemon.folder.iterdir()} == {0o600}


def test_a_pod_of_an_image_needs_python_and_openssh_alone(tmp_path: Path) -> None:
    """The Python of an image has torch, and may have none of the notebook's packages."""
    program = f"""
import sys
sys.path.insert(0, {HOME!r})
import workbench.pods.cml.worker, workbench.pods.slurm.worker
from pathlib import Path
from workbench.pods.bootstrap import guardian, sshd
daemon = sshd.Daemon(
    folder=Path({str(tmp_path / "sshd")!r}), address="127.0.0.2", port=22022, user="root",
    public_key="ssh-ed25519 AAAAC3NzaC1lZDI1NTE5", environment={{}},
)
daemon.prepare()
daemon.config()
print(daemon.host_key, guardian.installed_versions())
"""
    argv = [sys.executable, "-I", "-S", "-c", program]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("ssh-ed25519 ")


def test_values_that_would_break_out_are_refused(daemon: Daemon) -> None:
    for bad in (
        replace(daemon, environment={"A": 'x"\nPasswordAuthentication yes'}),
        replace(daemon, environment={"A": "x\ny"}),
        replace(daemon, address="0.0.0.0"),
        replace(daemon, address="127.0.0.2\nPort 1"),
        replace(daemon, port=0),
        replace(daemon, folder=Path('/a"b')),
    ):
        with pytest.raises(ConfigError):
            bad.config()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("root:!:1:0:::::", "usermod -p '\\*' root"),
        ("root:!$y$j9T$x:1:0:::::", "is locked"),
        ("root:*:1:", ""),
    ],
)
def test_a_locked_user_is_told_how_to_unlock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, words: str
) -> None:
    user = pwd.getpwuid(os.geteuid()).pw_name
    (tmp_path / "shadow").write_text(f"other:!:\n{line}\n".replace("root", user))
    monkeypatch.setattr("workbench.pods.bootstrap.sshd._SHADOW", tmp_path / "shadow")
    if not words:
        assert login_user() == user
        return
    with pytest.raises(ConfigError, match=words.replace("root", user)):
        login_user()


def test_a_user_without_a_name_is_told_the_line_that_gives_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    line = f"workbench:x:{os.geteuid()}:{os.getegid()}::{os.environ['HOME']}:/bin/sh"
    with pytest.raises(ConfigError, match=f"sshd needs a name.*: {line}$"):
        login_user()
