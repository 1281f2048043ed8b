from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path

import pytest

from tests.support.sentences import says, sentence
from workbench.base.errors import ConfigError
from workbench.base.files import folders
from workbench.base.files.folders import make_private, weakness
from workbench.client.cluster import Cluster
from workbench.jobs.script import Script
from workbench.pods.local.pods import LocalPods
from workbench.rundir.make.prepare import prepare_run
from workbench.rundir.spec import RunSpec

NOBODY = 65534


def another_s(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Have a folder belong to another user than the one who looks."""
    folder.mkdir(exist_ok=True)
    if os.geteuid() == 0:
        os.chown(folder, NOBODY, NOBODY)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: NOBODY)
    return folder


def weak(folder: Path, mode: int = 0o777) -> Path:
    folder.mkdir()
    folder.chmod(mode)
    return folder


def test_only_its_user_and_root_may_change_what_lies_in_a_folder(tmp_path: Path) -> None:
    assert weakness(tmp_path / "no" / "such") == ""
    assert weakness(weak(tmp_path / "sticky", 0o1777) / "mine") == ""
    assert weakness(weak(tmp_path / "private group", 0o775)) == ""
    team = weak(tmp_path / "team")
    words = weakness(team / "runs" / "mine")
    assert words.startswith(
        f"{team} may be written by everybody, who could put other files in the place of yours; "
    )
    assert (
        f"; run chmod o-w {team}, choose another folder, or where nobody else can log in set "
        in words
    )
    (tmp_path / "link").symlink_to(team)
    assert says(weakness(tmp_path / "link" / "mine"), "may be written by", "everybody")


def test_a_group_with_other_members_and_another_owner_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = weakness(another_s(tmp_path / "theirs", monkeypatch) / "mine")
    assert says(words, "is owned by")
    if os.geteuid() == 0:
        assert says(words, "is owned by", "nobody")
        os.chown(weak(tmp_path / "team", 0o2775), 0, NOBODY)
        assert says(weakness(tmp_path / "team" / "mine"), "of its group", "who")


def test_a_folder_of_nobody_here_and_one_that_is_trusted_by_name_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounted, shared = weak(tmp_path / "mounted", 0o755), weak(tmp_path / "shared")
    if (
        os.geteuid() == 0
    ):  # a container's root, and a folder of the host's user, who has no account in the container
        os.chown(mounted, 54_321, 54_321)
        assert weakness(mounted / "mine") == ""
    assert f"set WORKBENCH_TRUSTED_FOLDERS={shared}" in weakness(shared / "mine")
    monkeypatch.setenv("WORKBENCH_TRUSTED_FOLDERS", f"/somewhere:{shared}")
    assert weakness(shared / "mine") == ""


def test_advice_names_three_of_a_group_and_only_the_owner_is_told_to_change_the_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    team = weak(tmp_path / "team", 0o770)
    members = ["anna", "bert", "carl", "dora"]
    monkeypatch.setattr(folders, "_others_in", lambda _group: members)
    words = weakness(team / "mine")
    assert f"{team} may be written by anna, bert, carl of its group, who" in words
    assert f"run chmod g-w {team}, choose another folder" in words
    # A folder of root is as safe for other users. Its mode is not theirs to change.
    monkeypatch.setattr(os, "geteuid", lambda: 54_321)
    assert weakness(Path("/usr/bin")) == ""
    if team.stat().st_uid == 0:
        words = weakness(team / "mine")
        assert "chmod" not in words
        assert words.endswith(f"choose another folder, or {words.rpartition('or ')[2]}")


def test_the_mount_of_an_empty_dir_is_its_pods_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    volume = weak(tmp_path / "a b\\c")
    table = tmp_path / "mountinfo"
    monkeypatch.setattr(folders, "_MOUNTS", str(table))
    shown = str(volume).replace("\\", r"\134").replace(" ", r"\040")
    pods = "/var/lib/kubelet/pods/1/volumes/kubernetes.io~empty-dir/scratch"
    before = f"21 1 8:1 / / rw\n22 21 8:1 {pods} /other rw"
    own = f"23 21 8:1 {pods} {shown} rw"
    claim = f"24 21 8:2 /claim {shown} rw"
    assert "may be written by everybody" in weakness(volume / "mine"), "no table"
    for lines, is_taken in (
        ([before, own], True),
        ([before], False),
        ([before, own, claim], False),
        ([before, claim, own], True),
    ):
        table.write_text("\n".join(lines) + "\n")
        assert (weakness(volume / "mine") == "") == is_taken, lines


def test_the_folders_above_are_made_and_a_link_does_not_hide_where_it_leads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tmp_path / "a" / "b" / "c"
    make_private(made)
    make_private(made)
    assert stat.S_IMODE(made.stat().st_mode) == 0o700
    team = weak(tmp_path / "team")
    (team / "sub").mkdir()
    (tmp_path / "link").symlink_to(team / "sub")
    with pytest.raises(PermissionError, match="may be written by everybody"):
        make_private(tmp_path / "link")
    theirs = another_s(tmp_path / "theirs", monkeypatch)
    mode = theirs.stat().st_mode
    with pytest.raises(PermissionError, match="is owned by"):
        make_private(theirs)
    assert theirs.stat().st_mode == mode


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_what_is_made_is_private_under_any_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        make_private(tmp_path / "a" / "b")
        spec = RunSpec(job=Script(path=__file__))
        run = prepare_run(spec, parent=tmp_path / "runs").paths.root
        (tmp_path / "given").mkdir()
        given = prepare_run(spec, root=tmp_path / "given").paths.root
    finally:
        os.umask(before)
    for folder in (tmp_path / "a" / "b", run, given):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for parent in (tmp_path / "a", tmp_path / "runs"):
        assert stat.S_IMODE(parent.stat().st_mode) == 0o755 & ~umask


def test_a_cluster_and_a_run_in_a_folder_that_others_may_change_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    team = weak(tmp_path / "team")
    with pytest.raises(
        ConfigError,
        match=sentence("may be written by", "everybody", "run chmod"),
    ):
        Cluster(LocalPods(), path=team / "c").start()
    with pytest.raises(
        ConfigError,
        match=sentence("may be written by", "everybody", "run chmod"),
    ):
        prepare_run(RunSpec(job=Script(path=__file__)), root=team / "run")
    with pytest.raises(
        ConfigError,
        match=sentence("may be written by", "everybody", "run chmod"),
    ):
        Cluster.attach(team)
    assert list(team.iterdir()) == []
    theirs = another_s(tmp_path / "theirs", monkeypatch)
    theirs.chmod(0o777)
    # Who only pretends to be another user has a parent folder of another user too.
    owned = (
        sentence("is owned by")
        if os.getuid()
        else sentence("is owned by {}; make a folder of your own there")
    )
    with pytest.raises(ConfigError, match=owned):
        prepare_run(RunSpec(job=Script(path=__file__)), root=theirs)
    assert list(theirs.iterdir()) == []


def test_the_advice_for_a_folder_is_carried_out(tmp_path: Path) -> None:
    team = weak(tmp_path / "the team's")
    words = weakness(team / "mine", elsewhere="choose another root")
    assert words.endswith(", or choose another root")
    command = words.partition("run ")[2].removesuffix(", or choose another root")
    subprocess.run(["sh", "-ec", command], check=True, timeout=300)
    assert weakness(team / "mine") == ""
