"""Every command and stream of a login, in each shell and between each kind of output of its own.

A login is what sshd does with it: the account's shell with `-c` and one line. The start-up file of
the shell prints, and so does a trap of the file at the end; for a shell that reads no file, the
login prints before and after the shell.
"""

from __future__ import annotations

import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.fakes.sshhosts import NOISE, READS
from workbench.pods.pod import Pod
from workbench.pods.ssh import child, openssh
from workbench.pods.ssh.bulk.transfer import SshRoute, fetch_file, send_file
from workbench.pods.ssh.connection import SSHConnection
from workbench.pods.ssh.identity import Identity
from workbench.pods.ssh.openssh import run_over_openssh

NASTY = "a'b\"c!d\\e\n\nf  g * $HOME `x` é \t#~ %s {a,b} \udcff"
SHOWN = NASTY.replace("\udcff", "\\xff")
BYTES = bytes(range(256)) * 100
AT_END = {
    "bash": "trap '{}' EXIT",
    "rbash": "trap '{}' EXIT",
    "zsh": "TRAPEXIT() {{ {} }}",
    "fish": "function bye --on-event fish_exit; {}; end",
}
"""A line of a start-up file that prints at the end. No file of csh can do so."""


def login_of(shell: str, home: Path, noise: bytes) -> Callable[[Sequence[str]], list[str]]:
    """Return what sshd would run for the words of an `ssh`."""
    home.mkdir()
    (home / "noise").write_bytes(noise)
    show = f"cat {home}/noise"
    program = shutil.which(shell) or shell
    known = ["env", "-i", f"HOME={home}", "PATH=/usr/bin:/bin", "SSH_CLIENT=127.0.0.1 1 22"]
    if READS[shell]:
        file = home / READS[shell]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{show}\n{AT_END.get(shell, '').format(show)}\n")
        return lambda words: [*known, program, "-c", shlex.join(words)]
    before = f'{show}; "$@"; {show}'
    return lambda words: [*known, "sh", "-c", before, "sh", program, "-c", shlex.join(words)]


@pytest.fixture
def pod(tmp_path: Path) -> Iterator[Pod]:
    """Give a host whose standing connection stands."""
    with socket.socket(socket.AF_UNIX) as control:
        control.bind(str(tmp_path / "c"))
        control.listen(100)
        yield Pod(
            name="pod-0",
            address="127.0.0.2",
            root=str(tmp_path / "pod"),
            python=sys.executable,
            control=str(tmp_path / "c"),
        )


@pytest.mark.parametrize("noise", NOISE)
@pytest.mark.parametrize("shell", READS)
def test_commands_streams_and_files_are_the_same_in_every_shell_amid_any_output(
    pod: Pod, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shell: str, noise: str
) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    login = login_of(shell, tmp_path / "home", NOISE[noise])
    for module in (child, openssh):
        monkeypatch.setattr(module, "ssh_argv", lambda _pod, _identity, words, *_: login(words))
    identity = Identity(tmp_path / "own")
    with SSHConnection(pod, identity) as connection:
        # A command: its exit code, both outputs, what it reads, and its words.
        done = connection.run(["sh", "-c", "cat; echo err >&2; exit 7"], stdin=b"in\n")
        assert (done.exit_code, done.stdout, done.stderr) == (7, "in\n", "err\n")
        words = [NASTY, "", "-n", "x" * 5000]
        done = connection.run(["printf", "%s|", *words], stdin=b"not read")
        assert done.stdout == "|".join([SHOWN, *words[1:], ""])
        done = connection.run(["env", f"ODD={NASTY}", "sh", "-c", 'printf "%s|" "$ODD" "$HOME"'])
        assert done.stdout == f"{SHOWN}|{tmp_path}/home|"

        # A stream, both ways.
        stream = connection.stream(["cat"])
        stream.write(b"asked\n")
        assert stream.read(300) == b"asked\n"
        stream.write(BYTES)
        come = b""
        while len(come) < len(BYTES):
            come += stream.read(300)
        assert come == BYTES
        stream.close()

        # A small file, in and out.
        there = f"{pod.root}/deep/it's.bin"
        connection.put_bytes(BYTES, there)
        connection.get(there, tmp_path / "back")
        assert (tmp_path / "back").read_bytes() == BYTES

    # A large file, in and out.
    route = SshRoute(
        name=pod.name,
        host=pod.address,
        login=pod.login,
        python=pod.python,
        command=login,
        patience_s=0.0,
    )
    send_file(route, tmp_path / "back", f"{there}2", f"{there}.part")
    fetch_file(route, f"{there}2", tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == BYTES

    # The doctor's own way.
    seen = run_over_openssh(pod, identity, ["sh", "-c", "echo own; exit 3"], timeout_s=300)
    assert (seen.exit_code, seen.out) == (3, "own\n")


def test_the_shells_read_the_files_that_print(tmp_path: Path) -> None:
    """Without this, silence of a start-up file would pass for a marker that works."""
    for shell in filter(shutil.which, READS):
        login = login_of(shell, tmp_path / shell, b"Welcome\n")
        done = subprocess.run(login(["printf", "own\\n"]), capture_output=True, timeout=300)
        after = b"" if "csh" in shell else b"Welcome\n"
        assert done.stdout == b"Welcome\nown\n" + after, shell
