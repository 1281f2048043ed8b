"""The user's own ssh configuration is read only when asked."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from workbench.base.errors import WorkbenchError
from workbench.pods.hosts.pods import SSHPods
from workbench.pods.pod import LaunchContext
from workbench.pods.pod_spec import PodSpec
from workbench.pods.ssh.identity import Identity


@pytest.mark.parametrize("asked", [False, True])
def test_the_ssh_configuration_is_read_only_when_asked(
    asked: bool, tmp_path: Path, identity: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "key")], check=True
    )
    told, bin_folder = tmp_path / "told", tmp_path / "bin"
    bin_folder.mkdir()
    (bin_folder / "ssh").write_text(
        f'#!/bin/sh\necho "$*" >> {told}\nexec {shutil.which("ssh")} -F /dev/null "$@"\n'
    )
    (bin_folder / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", str(bin_folder), prepend=":")
    context = LaunchContext(
        cluster_id="test",
        directory=tmp_path,
        public_key=identity.public_key,
        lease_s=5.0,
        timeout_s=300.0,
    )
    backend = SSHPods(
        hosts=["127.0.0.1"], port=1, user="me", key=str(tmp_path / "key"), ssh_config=asked
    )
    with pytest.raises(WorkbenchError, match=r"127\.0\.0\.1"):  # nothing listens on port 1
        backend.launch(PodSpec(), 1, context)
    backend.stop()
    calls = told.read_text().splitlines()
    assert calls
    if asked:
        assert all(" -F " not in call for call in calls)
        assert calls[0].startswith("-G ")
    else:
        assert all(" -F none " in f" {call}" for call in calls)
