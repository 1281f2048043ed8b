from __future__ import annotations

import errno
import hashlib
import json
import os
import pwd
import re
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.pods.conftest import children, on_pods
from tests.support.hurried import HurriedClock
from tests.support.poll import until
from tests.support.sentences import says, sentence
from workbench import Cluster
from workbench.base.errors import BackendError, ConfigError, PodError, PodTimeout
from workbench.base.files.private import cluster_folder
from workbench.base.process import Process, find, live_descendants, of_pods, with_mark
from workbench.pods.bootstrap.machine import check_free, port_holder
from workbench.pods.local.pods import LocalPods
from workbench.pods.pod import LaunchContext, Phase, Pod
from workbench.pods.pod_spec import PodSpec
from workbench.pods.rendezvous import listener
from workbench.pods.ssh.connection import SSHConnection
from workbench.pods.ssh.identity import Identity


@pytest.fixture
def local() -> Iterator[LocalPods]:
    made = LocalPods()
    yield made
    made.stop()


def listening(port: int) -> set[str]:
    """The addresses, in /proc's hexadecimal, on which anyone listens at this port."""
    lines = [
        line
        for table in ("tcp", "tcp6")
        for line in Path("/proc/net", table).read_text().splitlines()[1:]
    ]
    rows = [line.split() for line in lines]
    return {
        row[1].split(":")[0]
        for row in rows
        if row[3] == "0A" and int(row[1].split(":")[1], 16) == port
    }


def python_that(tmp_path: Path, script: str) -> str:
    """An executable that the backend takes for Python; `REAL` in the script is the real one."""
    path = tmp_path / "python-that"
    path.write_text("#!/bin/sh\n" + script.replace("REAL", f"exec '{sys.executable}' \"$@\""))
    path.chmod(0o700)
    return str(path)


def test_pods_start_together(
    local: LocalPods, context: LaunchContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each waits for the other two, so pods that start in turn would never come."""
    begun = tmp_path / "begun"
    begun.mkdir()
    script = f"touch {begun}/$$\nwhile [ $(ls {begun} | wc -l) -lt 3 ]; do sleep 0.05; done\nREAL"
    monkeypatch.setattr(sys, "executable", python_that(tmp_path, script))
    assert len(local.launch(PodSpec(), 3, context)) == 3


def test_what_sessions_are_given_is_in_no_file(
    local: LocalPods, context: LaunchContext, identity: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy's address may hold its password: sshd_config was on the disk while the pod lived."""
    proxy = "http://me:canary-77aa@proxy.example.org:3128"
    monkeypatch.setenv("HTTPS_PROXY", proxy)
    pods = local.launch(PodSpec(), 1, context)
    identity.pin(pods)
    for _ in range(2):  # each login has the configuration anew
        with SSHConnection(pods[0], identity) as connection:
            assert connection.run(["printenv", "HTTPS_PROXY"]).stdout == f"{proxy}\n"
    files = [path for path in context.directory.rglob("*") if path.is_file()]
    assert {"host_key", "authorized_keys"} <= {path.name for path in files}
    assert [path for path in files if b"canary-77aa" in path.read_bytes()] == []


def test_each_pod_has_its_own_loopback_address_and_listens_there_alone(
    local: LocalPods, context: LaunchContext
) -> None:
    pods = local.launch(PodSpec(), 3, context)
    assert [pod.address for pod in pods] == ["127.0.0.2", "127.0.0.3", "127.0.0.4"]
    assert len({pod.ssh_port for pod in pods}) == 1
    assert len({pod.host_key for pod in pods}) == 3
    assert listening(pods[0].ssh_port) == {"0200007F", "0300007F", "0400007F"}
    assert all(
        pod.python == sys.executable and pod.user == pwd.getpwuid(os.geteuid()).pw_name
        for pod in pods
    )
    local.stop()
    assert listening(pods[0].ssh_port) == set()


def test_two_clusters_at_once(local: LocalPods, context: LaunchContext, tmp_path: Path) -> None:
    ours = local.launch(PodSpec(), 2, context)
    other, other_identity = LocalPods(), Identity.create(tmp_path / "other-identity")
    try:
        theirs = other.launch(
            PodSpec(),
            2,
            replace(context, directory=tmp_path / "other", public_key=other_identity.public_key),
        )
        assert ours[0].address == theirs[0].address
        assert ours[0].ssh_port != theirs[0].ssh_port
        local.stop()
        other_identity.pin(theirs)
        with SSHConnection(theirs[1], other_identity) as connection:
            assert connection.run(["echo", "alive"]).stdout == "alive\n"
    finally:
        other.stop()


def test_a_port_in_use_names_address_port_and_holder(context: LaunchContext) -> None:
    with socket.create_server(("127.0.0.3", 0)) as taken:
        port = taken.getsockname()[1]
        local = LocalPods(port=port)
        with pytest.raises(ConfigError) as caught:
            local.launch(PodSpec(), 2, context)
        assert f"port {port} on 127.0.0.3 is in use by process {os.getpid()}, " in str(caught.value)
        assert port_holder("127.0.0.3", port) == os.getpid()
        assert port_holder("127.0.0.2", port) is None
        assert len(local.launch(PodSpec(), 1, context)) == 1  # 127.0.0.2 is free
        local.stop()
    with (
        socket.create_server(("", 0)) as everywhere,
        pytest.raises(ConfigError, match="in use by process"),
    ):
        LocalPods(port=everywhere.getsockname()[1]).launch(PodSpec(), 1, context)
    assert children() == []


def test_the_holder_of_a_port_is_found_while_other_processes_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = os.scandir

    def scandir(path: object = ".") -> object:
        if str(path).endswith("/fd") and str(os.getpid()) not in str(path):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return real(path)  # type: ignore[call-overload]

    with socket.create_server(("127.0.0.3", 0)) as taken:
        monkeypatch.setattr(os, "scandir", scandir)
        assert port_holder("127.0.0.3", taken.getsockname()[1]) == os.getpid()


def test_a_port_taken_between_look_and_use(
    context: LaunchContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    with socket.create_server(("127.0.0.3", 0)) as taken:
        port = taken.getsockname()[1]
        ports = iter([port, port])
        from workbench.pods.bootstrap import machine as module

        real = module.free_port
        monkeypatch.setattr(
            module, "free_port", lambda addresses: next(ports, None) or real(addresses)
        )
        local = LocalPods()
        pods = local.launch(PodSpec(), 2, replace(context, report=lines.append))
        assert pods[0].ssh_port != port
        assert lines[-1].startswith("2 of 2")
        assert len([line for line in lines if f"port {port} was taken" in line]) == 2
        local.stop()


@pytest.mark.parametrize("port", [0, 70_000, "2222", True])
def test_no_port_at_all(port: object) -> None:
    with pytest.raises(
        ConfigError,
        match=sentence("a port, a whole number from 1 to 65535") + sentence("it must be"),
    ):
        LocalPods(port=port)  # type: ignore[arg-type]


def test_a_machine_without_the_addresses_is_told_how_to_get_them() -> None:
    with pytest.raises(
        BackendError,
        match=sentence("and every local pod needs its own loopback address", "192.0.2.1"),
    ):
        check_free(["192.0.2.1"], 40_000)


def test_a_worker_that_dies_is_told_at_once(
    local: LocalPods, context: LaunchContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = "for i in $(seq 30); do echo line $i >&2; done; exit 3"
    monkeypatch.setattr(sys, "executable", python_that(tmp_path, script))
    with pytest.raises(PodError) as caught:
        local.launch(PodSpec(), 3, context)
    assert not isinstance(caught.value, PodTimeout)
    first, *lines = str(caught.value).splitlines()
    # All three end at about the same time; whichever is seen first is named.
    assert re.match(r"pod-[012] ended with exit code 3, \d+\.\d s after its start", first), first
    assert lines == [f"line {i}" for i in range(11, 31)]
    assert children() == []


def test_a_worker_that_is_killed_at_its_start(
    local: LocalPods, context: LaunchContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", python_that(tmp_path, "kill -9 $$"))
    with pytest.raises(PodError, match="pod-0 was killed by SIGKILL"):
        local.launch(PodSpec(), 1, context)


def test_a_worker_that_never_comes_is_named_at_the_deadline(
    local: LocalPods, context: LaunchContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = f"cd '{tmp_path}'\nexec 9>>lock\nflock 9\n"
    third = "[ -e third ] && { echo pulling the image >&2; exec sleep 3600; }\n"
    others = "[ -e second ] && touch third\ntouch second\nexec 9>&-\nREAL"
    monkeypatch.setattr(sys, "executable", python_that(tmp_path, here + third + others))
    clock = HurriedClock()
    monkeypatch.setattr(listener, "time", clock)

    def report(line: str) -> None:
        clock.ahead_s = 2 * context.timeout_s if line.startswith("2 of 3") else 0.0

    with pytest.raises(PodTimeout) as caught:
        local.launch(PodSpec(), 3, replace(context, report=report))
    assert str(caught.value).startswith("2 of 3 workers reported in 300 s; missing: pod-")
    assert says(caught.value, "started {} s ago, last log line")
    assert children() == []
    assert list((context.directory / "pods").glob("pod-?")) == []


def test_a_slow_pod_is_waited_for(
    local: LocalPods, context: LaunchContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(sys, "executable", python_that(tmp_path, "sleep 1.5\nREAL"))
    assert len(local.launch(PodSpec(), 1, replace(context, report=lines.append))) == 1
    assert lines and lines[0].startswith("1 of 1 workers reported: pod-0 at 127.0.0.2:")


def test_gpus_that_are_not_there(
    local: LocalPods, context: LaunchContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7,9")
    with pytest.raises(ConfigError, match=sentence("the pods of this machine need", 4, 3)):
        local.launch(PodSpec(gpus=2), 2, context)


def test_gpus_are_shared_out(
    local: LocalPods, context: LaunchContext, identity: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"GPU-{secrets.token_hex(8)}" for _ in range(3)]  # seats of their own: no driver
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(names))
    pods = local.launch(PodSpec(gpus=1), 3, context)
    identity.pin(pods)
    with SSHConnection(pods[1], identity) as connection:
        assert connection.run(["printenv", "CUDA_VISIBLE_DEVICES"]).stdout == f"{names[1]}\n"
    assert [pod.slots for pod in pods] == [1, 1, 1]
    for name in names:
        for lock in Path("/var/tmp").glob(f"*-gpu-{name}.*"):
            lock.unlink()


def test_a_missing_sshd_is_told_with_the_line_that_installs_it(
    local: LocalPods, context: LaunchContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name, path=None: None)
    with pytest.raises(
        ConfigError, match=r"sshd is not installed.*sudo apt-get install openssh-server"
    ):
        local.launch(PodSpec(), 1, context)


NAMELESS_RUN = """
import getpass, os, sys
from pathlib import Path
from workbench import Cluster, LocalPods, PodSpec, Script

folder = Path(os.environ["HOME"])
(folder / "job").mkdir()
(folder / "job/train.py").write_text(
    "import getpass, os, pathlib\\n"
    "print(getpass.getuser(), os.getuid(), os.environ['HOME'])\\n"
    "pathlib.Path('made.bin').write_bytes(bytes(9 << 20))\\n"
)
with Cluster(LocalPods(), PodSpec(), count=1, path=folder / "cluster", warm=False) as cluster:
    run = cluster.submit(Script(folder / "job/train.py"))
    result = run.wait(300, progress=False).raise_for_status()
    print(run.logs())
    print((run.path / "outputs/made.bin").stat().st_size)
print((folder / "cluster/keeper.log").read_text())
"""


@pytest.mark.slow
@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs root, for another user id"
)
@pytest.mark.parametrize("account", ["", "x-12345:x:12345:0::/:/sbin/nologin\n"])
def test_a_user_id_without_a_name_or_without_a_shell_has_local_pods(
    tmp_path: Path, account: str
) -> None:
    """OpenShift starts a notebook as such an id; newer releases name it, with the shell nologin."""
    home = tmp_path / "home"
    home.mkdir()
    os.chown(home, 12345, 0)
    passwd = tmp_path / "passwd"
    passwd.write_text(Path("/etc/passwd").read_text() + account)
    inside = 'mount --make-rprivate /; mount --bind "$1" /etc/passwd; shift; exec "$@"'
    # The Python of the tests may lie in a folder of root.
    caps = ["--inh-caps", "+dac_read_search", "--ambient-caps", "+dac_read_search"]
    user = ["setpriv", "--reuid", "12345", "--regid", "0", "--clear-groups", *caps]
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-ec", inside, "sh", str(passwd), *user, sys.executable, "-"],
        input=NAMELESS_RUN,
        cwd=home,
        env={"PATH": os.environ["PATH"], "HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"12345 12345 {home}" in done.stdout
    assert str(9 << 20) in done.stdout
    assert says(done.stdout + done.stderr, "the pods have an SSH daemon of this package")


def test_launching_twice_and_into_a_used_directory(
    local: LocalPods, context: LaunchContext
) -> None:
    local.launch(PodSpec(), 1, context)
    with pytest.raises(BackendError, match="launched already"):
        local.launch(PodSpec(), 1, context)
    other = LocalPods()
    with pytest.raises(ConfigError, match=sentence("the cluster's directory holds pods already")):
        other.launch(PodSpec(), 1, context)
    assert local.refresh()[0].phase is Phase.RUNNING
    assert Path(local.refresh()[0].root).is_dir()
    with pytest.raises(ConfigError, match="at least one"):
        other.launch(PodSpec(), 0, context)
    with pytest.raises(ConfigError, match=sentence("is not an OpenSSH public key line")):
        other.launch(PodSpec(), 1, replace(context, public_key="x\ny"))


def workers_and_daemons(pods: list[Pod]) -> dict[str, list[Process]]:
    """The worker of each pod and all its descendants, its daemon first."""

    found = {}
    for process in children():
        argv = Path(f"/proc/{process.pid}/cmdline").read_bytes().split(b"\0")
        if b"workbench.pods.bootstrap.guardian" in argv:
            log = Path(f"/proc/{process.pid}/fd/2").readlink()
            found[log.stem] = [process, *live_descendants(process.pid)]
    assert sorted(found) == [pod.name for pod in pods]
    return found


def is_daemon(process: Process) -> bool:
    return Path(f"/proc/{process.pid}/cmdline").read_bytes().startswith(b"sshd: ")


def leave_something_running(pod: Pod, identity: Identity) -> None:
    with SSHConnection(pod, identity) as connection:
        connection.run(["sh", "-c", "setsid sleep 600 >/dev/null 2>&1 </dev/null &"])


def test_a_killed_worker_takes_its_daemon_along_and_is_seen(
    local: LocalPods, context: LaunchContext, identity: Identity
) -> None:
    pods = local.launch(PodSpec(), 2, context)
    identity.pin(pods)
    leave_something_running(pods[1], identity)
    worker, *rest = workers_and_daemons(pods)["pod-1"]
    daemon = next(process for process in rest if is_daemon(process))
    worker.send(signal.SIGKILL)
    until(lambda: not daemon.is_alive(), 2.0)
    until(lambda: local.refresh()[1].phase is Phase.FAILED, 2.0)
    assert "pod-1 was killed by SIGKILL" in local.refresh()[1].message
    assert local.refresh()[0].phase is Phase.RUNNING
    until(lambda: on_pods(pods[1:]) == [])
    local.stop()
    assert children() == []


def test_a_killed_daemon_is_the_end_of_its_pod(
    local: LocalPods, context: LaunchContext, identity: Identity
) -> None:
    pods = local.launch(PodSpec(), 1, context)
    identity.pin(pods)
    leave_something_running(pods[0], identity)
    until(lambda: len(workers_and_daemons(pods)["pod-0"]) == 3)
    daemon = next(process for process in workers_and_daemons(pods)["pod-0"] if is_daemon(process))
    daemon.send(signal.SIGKILL)
    until(lambda: local.refresh()[0].phase is Phase.FAILED, 4.0)
    assert "worker: the pod's sshd ended with -9" in local.refresh()[0].message
    assert on_pods(pods) == []


KEEPER = """
    import json, sys, time
    from pathlib import Path
    from workbench.pods.local import pods as local
    from workbench.pods.ssh.identity import Identity
    from workbench.pods.local.pods import LocalPods
    from workbench.pods.pod import LaunchContext
    from workbench.pods.pod_spec import PodSpec

    folder = Path(sys.argv[1])
    identity = Identity.create(folder / "identity")
    plain = local.session_environment()
    local.session_environment = lambda: {**plain, "WORKBENCH_WARM_MODULES": "json"}
    backend = LocalPods()
    pods = backend.launch(
        PodSpec(),
        2,
        LaunchContext(
            cluster_id="k",
            directory=folder,
            public_key=identity.public_key,
            lease_s=2.0,
            warm=True,
        ),
    )
    identity.pin(pods)
    print(json.dumps([pod.to_dict() for pod in pods]), flush=True)
    time.sleep(600)
"""


def test_pods_outlive_a_killed_keeper_by_their_lease(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", textwrap.dedent(KEEPER), str(tmp_path)]
    keeper = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    assert keeper.stdout is not None
    pods = [Pod.from_dict(data) for data in json.loads(keeper.stdout.readline())]
    identity = Identity(tmp_path / "identity")
    for pod in pods:
        leave_something_running(pod, identity)
    until(lambda: fork_servers(tmp_path), 60.0)
    with SSHConnection(pods[0], identity) as connection:
        keeper.kill()
        keeper.wait(300)
        time.sleep(4.0)  # twice the lease
        assert connection.run(["echo", "here"]).stdout == "here\n", (
            "a pod stays for as long as a keeper is logged in"
        )
    until(lambda: not fork_servers(tmp_path), 60.0)
    until(lambda: not on_pods(pods) and not listening(pods[0].ssh_port), 60.0)
    assert says(
        (tmp_path / "pods" / "pod-0.log").read_text(), "s after the last login of another", 2
    )
    until(lambda: not any((tmp_path / "pods").glob("*/sshd")), 5.0)


def fork_servers(folder: Path) -> list[Process]:
    return of_pods([str(folder / "pods" / "fork-server")])


def test_pods_that_are_to_be_warm_have_one_fork_server_which_goes_with_them(
    local: LocalPods, context: LaunchContext
) -> None:
    pods = local.launch(PodSpec(), 2, replace(context, warm=True))
    until(lambda: fork_servers(context.directory), 60.0)
    # Others may share the cluster's directory, and any user sees abstract names.
    address = cluster_folder(context.directory) / "fork-server.sock"
    assert stat.S_ISSOCK(address.lstat().st_mode)
    assert stat.S_IMODE(address.parent.stat().st_mode) == 0o700
    assert not list(context.directory.rglob("*fork-server*.sock"))
    bound = Path("/proc/net/unix").read_text().splitlines()
    assert not [line for line in bound if "fork-server" in line and "@" in line]
    local.stop()
    assert fork_servers(context.directory) == [] == on_pods(pods)
    assert not address.exists()
    local.launch(PodSpec(), 1, context)
    assert fork_servers(context.directory) == []


def test_nothing_is_readable_by_others_whatever_the_umask(local: LocalPods, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        identity = Identity.create(tmp_path / "c" / "identity")
        context = LaunchContext(
            cluster_id="t", directory=tmp_path / "c", public_key=identity.public_key, warm=True
        )
        identity.pin(local.launch(PodSpec(), 1, context))
        with SSHConnection(local.refresh()[0], identity) as connection:
            connection.put_bytes(b"x", f"{tmp_path}/c/pods/pod-0/sent")
            connection.run(["touch", f"{tmp_path}/c/pods/pod-0/made"])
    finally:
        os.umask(before)
    below = [
        *(tmp_path / "c" / "pods").rglob("*"),
        *(tmp_path / "c" / "identity").rglob("*"),
        tmp_path / "c" / "pods",
    ]
    assert len(below) > 10
    assert {
        str(path): oct(path.stat().st_mode) for path in below if path.stat().st_mode & 0o077
    } == {}


def snapshot(folder: Path) -> dict[str, object]:
    if not folder.exists():
        return {}
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {
        str(p): (p.stat().st_mtime_ns, hashlib.sha256(p.read_bytes()).hexdigest()) for p in files
    } | {".": True}


def test_the_users_ssh_folder_is_neither_read_nor_written(
    local: LocalPods, context: LaunchContext, identity: Identity
) -> None:
    from workbench.pods.ssh.openssh import ssh_argv

    home = Path(pwd.getpwuid(os.geteuid()).pw_dir) / ".ssh"
    before = snapshot(home)
    pods = local.launch(PodSpec(), 1, context)
    identity.pin(pods)
    with SSHConnection(pods[0], identity) as connection:
        connection.run(["true"])
    argv = ssh_argv(pods[0], identity, ["true"])
    if strace := shutil.which("strace"):
        traced = subprocess.run(
            [strace, "-f", "-e", "trace=file", *argv], capture_output=True, text=True, timeout=300
        )
        assert f"{home}/" not in traced.stderr
    else:
        shown = subprocess.run(
            [*argv[:1], "-v", *argv[1:]], capture_output=True, text=True, timeout=300
        )
        assert shown.returncode == 0
        assert f"{home}/" not in shown.stderr
    local.stop()
    assert snapshot(home) == before


def test_the_token_is_in_no_argument_environment_or_file(
    local: LocalPods, context: LaunchContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = b"canary-canary-canary-canary-cana"
    monkeypatch.setattr("secrets.token_bytes", lambda count=32: token)
    looks, hits = 0, []

    def look(_line: str) -> None:
        nonlocal looks
        looks += 1
        for folder in Path("/proc").glob("[0-9]*"):
            for name in ("cmdline", "environ"):
                try:
                    data = (folder / name).read_bytes()
                except OSError:
                    continue
                if int(folder.name) != os.getpid() and (
                    token in data or token.hex().encode() in data
                ):
                    hits.append(f"{folder}/{name}")

    local.launch(PodSpec(), 2, replace(context, report=look))
    files = [path for path in context.directory.rglob("*") if path.is_file()]
    hits += [str(path) for path in files if token.hex() in path.read_text(errors="replace")]
    assert looks == 2
    assert len(files) > 8
    assert hits == []


def test_the_session_has_what_a_terminal_has_and_no_secret(
    local: LocalPods, context: LaunchContext, identity: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "canary")
    monkeypatch.setenv("HF_HOME", "/data/hf home")
    monkeypatch.setenv("TMPDIR", 'quo"te')
    pods = local.launch(PodSpec(), 1, context)
    identity.pin(pods)
    with SSHConnection(pods[0], identity) as connection:
        lines = connection.run(["env"]).stdout.splitlines()
    found = dict(line.split("=", 1) for line in lines if "=" in line)
    assert found["HF_HOME"] == "/data/hf home"
    assert found["PATH"].startswith(str(Path(sys.executable).parent) + ":")
    assert found["WORKBENCH_POD"] == pods[0].root
    assert found["CUDA_VISIBLE_DEVICES"] == ""
    assert "HF_TOKEN" not in found
    assert not found.get("TMPDIR", "").startswith("quo")
    for process in with_mark("HF_TOKEN", ["canary"]):
        assert b"workbench.pods" not in Path(f"/proc/{process.pid}/cmdline").read_bytes()


def test_a_directory_with_blanks(local: LocalPods, tmp_path: Path) -> None:
    folder = tmp_path / "my cluster 100% é"
    identity = Identity.create(folder / "identity")
    pods = local.launch(
        PodSpec(),
        1,
        LaunchContext(cluster_id="t", directory=folder, public_key=identity.public_key),
    )
    identity.pin(pods)
    with SSHConnection(pods[0], identity) as connection:
        assert connection.run(["sh", "-c", "echo $WORKBENCH_POD"]).stdout.strip() == pods[0].root


def test_a_process_that_only_looks_like_ours_lives_on(
    local: LocalPods, context: LaunchContext
) -> None:
    pods = local.launch(PodSpec(), 1, context)
    worker = workers_and_daemons(pods)["pod-0"][0]
    words = Path(f"/proc/{worker.pid}/cmdline").read_text().split("\0")[1:-1]
    sleeper = ["-c", "import time; time.sleep(60)"]
    decoy = subprocess.Popen(
        [f"sshd: {pods[0].root}", *sleeper, *words, pods[0].root],
        executable=sys.executable,
        # By another name it does not find a standard library that was moved.
        env={**os.environ, "PYTHONHOME": sys.base_prefix},
    )
    try:
        local.stop()
        assert find(decoy.pid) is not None
    finally:
        decoy.kill()
        decoy.wait(300)


def test_nothing_is_leaked_by_launching_and_stopping(context: LaunchContext) -> None:
    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    local = LocalPods()
    counts = []
    for _ in range(3):
        local.launch(PodSpec(), 1, context)
        local.stop()
        counts.append(descriptors())
    assert counts[2] <= counts[0]


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_a_start_on_another_system_than_linux_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, system: str
) -> None:
    monkeypatch.setattr(sys, "platform", system)
    folder = tmp_path / "cluster"
    with pytest.raises(
        ConfigError,
        match=sentence("Start JupyterLab in the containers of docker/compose.yaml", system),
    ):
        Cluster(LocalPods(), PodSpec(), count=1, path=folder).start()
    assert not folder.exists()
