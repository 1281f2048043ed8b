from __future__ import annotations

import fnmatch
import os
import pwd
import stat
import subprocess
from dataclasses import replace
from pathlib import Path

import paramiko
import pytest

from tests.pods.test_hostfile import DIRECTORY_ACCOUNTS
from tests.support.sentences import sentence
from workbench.base.errors import ConfigError
from workbench.pods.bootstrap.pod_main import user_pattern
from workbench.pods.bootstrap.sshd import find_sshd
from workbench.pods.hosts.names import read_host
from workbench.pods.pod import Pod
from workbench.pods.ssh.identity import Identity, check_key_file, check_key_line, fingerprint


@pytest.fixture
def open_umask() -> object:
    before = os.umask(0)
    yield
    os.umask(before)


def pod(identity: Identity, address: str = "127.0.0.2", port: int = 2222) -> Pod:
    return Pod(
        name="pod-0", address=address, ssh_port=port, user="me", host_key=identity.public_key
    )


@pytest.mark.usefixtures("open_umask")
def test_everything_is_private_whatever_the_umask(tmp_path: Path) -> None:
    identity = Identity.create(tmp_path / "a" / "identity")
    identity.pin([pod(identity)])
    assert stat.S_IMODE(identity.folder.stat().st_mode) == 0o700
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in identity.folder.iterdir()}
    assert modes == dict.fromkeys(
        ["id_ed25519", "id_ed25519.pub", "known_hosts", "ssh_config"], 0o600
    )


def test_each_cluster_has_another_key(tmp_path: Path) -> None:
    one, two = Identity.create(tmp_path / "1"), Identity.create(tmp_path / "2")
    assert one.public_key != two.public_key
    assert one.public_key.startswith("ssh-ed25519 ")
    assert "PRIVATE" not in repr(one)


def test_a_used_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(
        ConfigError, match=sentence("is not empty; a cluster's identity needs a folder of its own")
    ):
        Identity.create(tmp_path)
    assert (tmp_path / "mine.txt").read_text() == "keep"


def test_pins_are_found_by_openssh_and_by_us(tmp_path: Path) -> None:
    identity, other = Identity.create(tmp_path / "1"), Identity.create(tmp_path / "2")
    identity.pin([pod(identity), pod(other, "127.0.0.3", 22)])
    assert identity.pinned("127.0.0.2", 2222) == [check_key_line(identity.public_key)]
    assert identity.pinned("127.0.0.3", 22) == [check_key_line(other.public_key)]
    assert identity.pinned("127.0.0.3", 2222) == identity.pinned("127.0.0.2", 22) == []
    for name in ("[127.0.0.2]:2222", "127.0.0.3"):
        found = subprocess.run(
            ["ssh-keygen", "-F", name, "-f", identity.known_hosts], capture_output=True, timeout=300
        )
        assert found.returncode == 0, name


def test_pinning_replaces_what_was_trusted_before(tmp_path: Path) -> None:
    identity = Identity.create(tmp_path / "1")
    identity.pin([pod(identity)])
    identity.pin([pod(identity, "127.0.0.9")])
    assert identity.pinned("127.0.0.2", 2222) == []


@pytest.mark.parametrize(
    "field",
    [
        {"host_key": "ssh-ed25519 AAAA\nevil ssh-ed25519 AAAA"},
        {"host_key": ""},
        {"address": "-oProxyCommand=id"},
        {"address": "x slots=9\ny"},
        {"user": "a\nProxyCommand id"},
        {"ssh_port": 0},
    ],
)
def test_a_hostile_pod_is_not_pinned_and_nothing_changes(
    tmp_path: Path, field: dict[str, object]
) -> None:
    identity = Identity.create(tmp_path / "1")
    identity.pin([pod(identity)])
    before = (identity.known_hosts.read_text(), identity.ssh_config.read_text())
    data = pod(identity, "127.0.0.3").to_dict() | field
    with pytest.raises(ConfigError):
        identity.pin([Pod.from_dict(data)])
    assert (identity.known_hosts.read_text(), identity.ssh_config.read_text()) == before


def test_openssh_gives_a_host_behind_a_slow_line_more_time(tmp_path: Path) -> None:
    identity = Identity.create(tmp_path / "identity")
    slow = replace(pod(identity), connect_timeout_s=30.5)
    identity.pin([slow])
    argv = ["ssh", "-G", "-F", identity.ssh_config, "--", slow.address]
    shown = subprocess.run(argv, capture_output=True, text=True, timeout=300)
    assert "connecttimeout 31" in shown.stdout.splitlines(), shown.stderr


def test_openssh_reads_the_config_as_meant_even_from_an_odd_path(tmp_path: Path) -> None:
    identity = Identity.create(tmp_path / "a b 100%h é")
    identity.pin([pod(identity)])
    shown = subprocess.run(
        ["ssh", "-G", "-F", identity.ssh_config, "--", "127.0.0.2"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    options = dict(line.split(" ", 1) for line in shown.stdout.splitlines() if " " in line)
    assert shown.returncode == 0, shown.stderr
    assert options["port"] == "2222"
    assert options["user"] == "me"
    assert options["batchmode"] == "yes"
    assert options["stricthostkeychecking"] == "true"
    assert options["globalknownhostsfile"] == "/dev/null"
    assert options["identitiesonly"] == "yes"
    assert options["identityagent"] == "none"
    assert options["forwardagent"] == "no"
    assert options["connecttimeout"] == "5"
    assert (options["serveraliveinterval"], options["serveralivecountmax"]) == ("3", "3")
    keys = [
        line.split(" ", 1)[1]
        for line in shown.stdout.splitlines()
        if line.startswith("identityfile ")
    ]
    assert [key.replace("%%", "%") for key in keys] == [str(identity.key), "none"]
    assert options["userknownhostsfile"].replace("%%", "%") == str(identity.known_hosts)
    assert (
        "sntrup761" not in options["kexalgorithms"]
        and "curve25519-sha256" in options["kexalgorithms"]
    )


@pytest.mark.parametrize("name", ['quo"te', "do$llar", "back\\slash", "new\nline"])
def test_paths_that_openssh_cannot_take_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=sentence("OpenSSH cannot use the path")):
        Identity.create(tmp_path / name)


def test_a_readable_or_missing_key_is_refused_with_the_remedy(tmp_path: Path) -> None:
    identity = Identity.create(tmp_path / "1")
    check_key_file(identity.key)
    identity.key.chmod(0o644)
    with pytest.raises(ConfigError, match=sentence("so other users may read the key", "0644")):
        check_key_file(identity.key)
    identity.destroy()
    with pytest.raises(ConfigError, match=sentence("the key {} cannot be read")):
        check_key_file(identity.key)


def test_destroy_leaves_nothing_and_may_be_repeated(tmp_path: Path) -> None:
    identity = Identity.create(tmp_path / "1")
    identity.destroy()
    identity.destroy()
    assert not identity.folder.exists()


def test_fingerprint_is_the_one_ssh_shows(tmp_path: Path) -> None:
    identity = Identity.create(tmp_path / "1")
    shown = subprocess.run(
        ["ssh-keygen", "-lf", identity.key], capture_output=True, text=True, timeout=300
    ).stdout
    assert shown.split()[1] == fingerprint(identity.public_key)


@pytest.mark.parametrize(
    "line",
    [
        "ssh-dss AAAA",
        "ssh-ed25519",
        "ssh-ed25519 !!!!",
        "ssh-ed25519 AAAAB3Nz",
        'from="*" ssh-ed25519 AAAA',
        "a\nb",
    ],
)
def test_other_key_lines_are_refused(line: str) -> None:
    with pytest.raises(ConfigError):
        check_key_line(line)


def test_a_user_without_a_name_and_without_programs_has_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    identity = Identity.create(tmp_path / "identity")
    check_key_file(identity.key)
    assert paramiko.PKey.from_path(identity.key).get_base64() in identity.public_key
    assert identity.public_key.endswith(" workbench")


def test_a_pods_own_key_and_address_reach_openssh(tmp_path: Path) -> None:
    identity, other = Identity.create(tmp_path / "a b %h"), Identity.create(tmp_path / "2")
    forwarded = replace(pod(identity, "Pod-0.example"), ssh_address="127.0.0.1", key=str(other.key))
    identity.pin([forwarded, pod(other, "127.0.0.3")])
    assert Pod.from_dict(forwarded.to_dict()) == forwarded
    assert identity.pinned("Pod-0.example", 2222) == [check_key_line(identity.public_key)]

    def shown(host: str) -> dict[str, list[str]]:
        argv = ["ssh", "-G", "-F", str(identity.ssh_config), "--", host]
        lines = subprocess.run(
            argv, capture_output=True, text=True, timeout=300, check=True
        ).stdout.splitlines()
        pairs = [line.split(" ", 1) for line in lines if " " in line]
        return {name: [value for key, value in pairs if key == name] for name, _ in pairs}

    options = shown("Pod-0.example")
    assert (options["hostname"], options["port"]) == (["127.0.0.1"], ["2222"])
    assert options["hostkeyalias"] == ["[pod-0.example]:2222"]
    assert options["identityfile"] == [str(other.key), "none"]
    assert shown("127.0.0.3")["identityfile"] != options["identityfile"]
    assert (
        options["kexalgorithms"]
        == shown("elsewhere")["kexalgorithms"]
        != shown("127.0.0.3")["kexalgorithms"]
    )


@pytest.mark.parametrize(
    "change",
    [
        {"ssh_address": "-oProxyCommand=id"},
        {"key": '/a"\nProxyCommand id'},
        {"host_key": "ssh-ed25519 AAAA"},
    ],
)
def test_hostile_ways_to_a_pod_are_not_pinned(tmp_path: Path, change: dict[str, object]) -> None:
    identity = Identity.create(tmp_path / "1")
    with pytest.raises(ConfigError):
        identity.pin([replace(pod(identity), **change)])  # type: ignore[arg-type]
    assert identity.known_hosts.read_text() == ""


@pytest.mark.parametrize("user", DIRECTORY_ACCOUNTS)
def test_openssh_and_its_daemon_read_an_account_as_it_is(tmp_path: Path, user: str) -> None:
    identity = Identity.create(tmp_path / "identity")
    identity.pin([replace(pod(identity), user=user)])
    argv = ["ssh", "-G", "-F", str(identity.ssh_config), "--", "127.0.0.2"]
    shown = subprocess.run(argv, capture_output=True, check=True, timeout=300).stdout
    assert f"user {user}" in shown.decode().splitlines()
    assert read_host(f"{user}@[fd00::2]:2222").user == user
    config = f"HostKey {identity.key}\nAllowUsers {user_pattern(user)}\n"
    shown = subprocess.run(
        [find_sshd(), "-T", "-f", "/dev/stdin"], input=config.encode(), capture_output=True
    ).stdout
    pattern = next(
        line.split()[1] for line in shown.decode().splitlines() if line.startswith("allowusers ")
    )
    assert fnmatch.fnmatchcase(user.encode(), pattern.encode())
    assert not set(pattern) & set("@!*\\")


def test_a_folder_or_a_public_key_keeps_its_mode(tmp_path: Path) -> None:
    identity = Identity.create(tmp_path / "identity")
    public = identity.key.with_suffix(".pub")
    public.chmod(0o644)
    with pytest.raises(ConfigError, match=sentence("which usually lies beside it")) as error:
        check_key_file(public)
    assert "chmod" not in str(error.value)
    # The remedy.
    check_key_file(public.with_suffix(""))
    identity.folder.chmod(0o755)
    with pytest.raises(
        ConfigError,
        match=sentence("the key {} is a folder; name the file of the private key in it"),
    ) as error:
        check_key_file(identity.folder)
    assert "chmod" not in str(error.value)


@pytest.mark.parametrize("content", ["Host *\n", "gpu-1 ssh-ed25519 AAAA\n", ""])
def test_another_file_keeps_its_mode(tmp_path: Path, content: str) -> None:
    (tmp_path / "config").write_text(content)
    (tmp_path / "config").chmod(0o644)
    with pytest.raises(ConfigError, match=sentence("is no usable private key")) as error:
        check_key_file(tmp_path / "config")
    assert "chmod" not in str(error.value)


def test_a_mode_is_mended_by_the_command_in_the_message(tmp_path: Path) -> None:
    key = Identity.create(tmp_path / "it's mine").key
    key.chmod(0o644)
    with pytest.raises(ConfigError) as error:
        check_key_file(key)
    command = str(error.value).rpartition("run: ")[2]
    subprocess.run(["sh", "-ec", command], check=True, timeout=300)
    check_key_file(key)
