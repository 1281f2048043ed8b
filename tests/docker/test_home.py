"""JupyterLab's folders in a pod, as Kubernetes makes them: of root, and open to the pod's user."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.docker.test_chart import MANIFESTS, Render, helm, render

__all__ = ["helm", "render"]  # fixtures

REPOSITORY = Path(__file__).resolve().parents[2]
USER = 1000
# The pod's mounts hide /home and /tmp. The interpreter, the package and the volumes may lie there.
_AS_IN_THE_POD = """
mount --make-rprivate /
mount --bind "$PASSWD" /etc/passwd
mount -t tmpfs none /mnt
mkdir /mnt/machine
mount --rbind / /mnt/machine
mount -t tmpfs none /home
while [ "$1" != -- ]; do
    mkdir -p "$2"
    mount --bind "/mnt/machine$1" "$2"
    shift 2
done
shift
while [ "$1" != -- ]; do
    if [ -z "$(ls -A "$1" 2>/dev/null)" ]; then
        mkdir -p "$1"
        mount --rbind "/mnt/machine$1" "$1"
    fi
    shift
done
shift
# The interpreter may lie in root's home: its user may read all,
# and write no more than its modes say.
exec setpriv --reuid=1000 --regid=1000 --clear-groups --no-new-privs \
    --inh-caps=-all,+dac_read_search --ambient-caps=-all,+dac_read_search "$@"
"""
_START = """
import sys
from workbench import Cluster, LocalPods
with Cluster(LocalPods(), path=sys.argv[1], warm=False, idle_timeout_s=60) as cluster:
    print([pod.name for pod in cluster.pods])
"""
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts and another user id take root")


def shipped() -> dict[str, Any]:
    """The pod of the kustomization's Deployment."""
    documents = yaml.safe_load_all((MANIFESTS / "jupyterlab.yaml").read_text())
    pod: dict[str, Any] = next(documents)["spec"]["template"]["spec"]
    return pod


def in_pod(
    pod: dict[str, Any], tmp_path: Path, argv: list[str], **env: str
) -> subprocess.CompletedProcess[str]:
    """Run a program with the mounts of a pod's manifest, as its user, with only these variables."""
    (container,) = pod["containers"]
    claims = {volume["name"] for volume in pod["volumes"] if "persistentVolumeClaim" in volume}
    pairs = []
    for mount in container[
        "volumeMounts"
    ]:  # in the manifest's order: what lies within another comes after it
        kind = "csi" if mount["name"] in claims else "empty-dir"
        source = tmp_path / "pods" / "uid" / "volumes" / f"kubernetes.io~{kind}" / mount["name"]
        source.mkdir(parents=True, exist_ok=True)
        os.chown(source, 0, USER)
        source.chmod(0o777 if mount["name"] in claims else 0o2777)
        pairs += [str(source), mount["mountPath"]]
    (tmp_path / "passwd").write_text(
        f"root:x:0:0::/root:/bin/sh\nworkbench:x:{USER}:{USER}::/home/workbench:/bin/sh\n"
    )
    script = ["unshare", "--mount", "sh", "-ec", _AS_IN_THE_POD, "sh"]
    needed = [str(REPOSITORY), sys.prefix, sys.base_prefix]
    command = [*script, *pairs, "--", *needed, "--", *argv]
    own = {
        "HOME": "/home/workbench",
        "PATH": os.environ["PATH"],
        "PASSWD": str(tmp_path / "passwd"),
    }
    return subprocess.run(
        command, env={**own, **env}, capture_output=True, text=True, timeout=600, cwd="/"
    )


def variables(pod: dict[str, Any]) -> dict[str, str]:
    (container,) = pod["containers"]
    return {each["name"]: each["value"] for each in container["env"] if "value" in each}


def test_the_kustomization_trusts_each_folder_that_a_cluster_may_lie_in() -> None:
    (container,) = shipped()["containers"]
    trusted = variables(shipped())["WORKBENCH_TRUSTED_FOLDERS"].split(":")
    assert trusted == [mount["mountPath"] for mount in container["volumeMounts"]]


def test_the_chart_trusts_the_same_folders_and_lets_values_name_others(render: Render) -> None:
    pod = render()["Deployment", "lab"]["spec"]["template"]["spec"]
    assert variables(pod) == variables(shipped())
    assert pod["containers"][0]["volumeMounts"] == shipped()["containers"][0]["volumeMounts"]
    own = render({"env": {"WORKBENCH_TRUSTED_FOLDERS": "/data"}})["Deployment", "lab"]["spec"][
        "template"
    ]["spec"]
    named = [each["name"] for each in own["containers"][0]["env"]]
    assert named == ["WORKBENCH_TRUSTED_FOLDERS"], (
        "a name that stands twice is refused by a server-side apply"
    )
    assert variables(own) == {"WORKBENCH_TRUSTED_FOLDERS": "/data"}


@needs_root
@pytest.mark.parametrize(
    "folder", ["/home/workbench/work/runs/mine", "/home/workbench/mine", "/tmp/mine"]
)
def test_the_shipped_jupyterlab_takes_each_of_its_folders(tmp_path: Path, folder: str) -> None:
    take = (
        "import sys; from pathlib import Path; "
        "from workbench.base.files.folders import make_private as take"
    )
    argv = [sys.executable, "-P", "-c", f"{take}; take(Path(sys.argv[1]))", folder]
    done = in_pod(shipped(), tmp_path, argv, **variables(shipped()))
    assert done.returncode == 0, done.stderr


@needs_root
def test_the_shipped_jupyterlab_starts_a_cluster(tmp_path: Path) -> None:
    argv = [sys.executable, "-P", "-c", _START, "/home/workbench/work/runs/first"]
    done = in_pod(shipped(), tmp_path, argv, **variables(shipped()))
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["['pod-0']"]), done.stderr


@needs_root
def test_an_empty_dir_is_taken_without_a_word_and_a_claim_that_all_may_write_is_not(
    tmp_path: Path,
) -> None:
    look = "import sys; from pathlib import Path; from workbench.base.files.folders import weakness"
    argv = [
        sys.executable,
        "-P",
        "-c",
        f"{look}; print([weakness(Path(each)) for each in sys.argv[1:]])",
    ]
    done = in_pod(shipped(), tmp_path, [*argv, "/home/workbench/mine", "/tmp/mine"])
    assert done.stdout == "['', '']\n", done.stderr
    done = in_pod(shipped(), tmp_path, [*argv, "/home/workbench/work/mine"])
    assert "/home/workbench/work may be written by everybody" in done.stdout, done.stderr
    assert "set WORKBENCH_TRUSTED_FOLDERS=/home/workbench/work" in done.stdout
    assert "chmod" not in done.stdout, "only root may do that here"
