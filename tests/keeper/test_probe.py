"""A folder counts as shared if each side reads what the other wrote: no process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.sentences import sentence
from workbench.base.errors import ConfigError, RemoteError
from workbench.keeper.link.shared import folders_to_probe, is_within, seen_by, shared_words
from workbench.pods.pod import Pod
from workbench.pods.ssh.channel import Completed
from workbench.rundir.spec import ClusterSpec

POD = Pod(name="pod-1", root="/nowhere/pods/pod-1", python="/usr/bin/python3")


class FarEnd:
    """A pod that reads the token of a probe and writes an answer, as a test says."""

    def __init__(self) -> None:
        self.prints: Callable[[str], str] = str
        self.writes: Callable[[str], str | None] = lambda token: token[::-1]
        self.asked: list[tuple[Sequence[str], float]] = []
        self.modes: list[int] = []

    def run(self, argv: Sequence[str], timeout_s: float) -> Completed:
        self.asked.append((argv, timeout_s))
        path, mine = Path(argv[-2]), Path(argv[-1])
        self.modes.append(path.stat().st_mode & 0o777)
        token = path.read_text()
        answer = self.writes(token)
        if answer is not None:
            mine.write_text(answer)
        return Completed(exit_code=0, stdout=self.prints(token), stderr="")


def seen(far: Any, *folders: Path) -> tuple[Path, ...]:
    return seen_by(far, POD, folders)


def test_a_folder_that_both_sides_write_to_is_shared(tmp_path: Path) -> None:
    far = FarEnd()
    assert seen(far, tmp_path, tmp_path / "none") == (tmp_path,)
    ((argv, timeout_s),) = far.asked
    assert argv[0] == "/usr/bin/python3"
    assert timeout_s == 20.0
    assert far.modes == [0o644], "another user of the pod may read the token"
    assert Path(argv[-1]).name.endswith(".pod-1"), "several pods may answer at once"
    assert list(tmp_path.iterdir()) == [], "a probe leaves nothing"


def test_each_probe_has_a_token_and_a_name_of_its_own(tmp_path: Path) -> None:
    far = FarEnd()
    tokens: list[str] = []
    far.prints = lambda token: tokens.append(token) or token  # type: ignore[func-returns-value]
    seen(far, tmp_path, tmp_path)
    assert len({*tokens}) == len({argv[-2] for argv, _ in far.asked}) == 2
    assert all(len(token) == 64 for token in tokens)


@pytest.mark.parametrize("prints", ["", "another token"])
def test_a_pod_that_reads_other_bytes_shares_nothing(prints: str, tmp_path: Path) -> None:
    far = FarEnd()
    far.prints = lambda _token: prints
    assert seen(far, tmp_path) == ()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("writes", [None, "another answer"])
def test_a_pod_whose_writes_are_not_seen_shares_nothing(writes: str | None, tmp_path: Path) -> None:
    far = FarEnd()
    far.writes = lambda _token: writes
    assert seen(far, tmp_path) == ()
    assert list(tmp_path.iterdir()) == []


def test_a_pod_that_repeats_the_token_shares_nothing(tmp_path: Path) -> None:
    far = FarEnd()
    far.writes = str
    assert seen(far, tmp_path) == ()


def test_a_pod_without_an_answer_shares_nothing(tmp_path: Path) -> None:
    far = FarEnd()

    def silent(_token: str) -> str:
        raise RemoteError("no line", host="")

    far.prints = silent
    assert seen(far, tmp_path) == ()
    assert list(tmp_path.iterdir()) == []


def test_folders_are_probed_unless_pods_are_here_or_the_user_says_no(tmp_path: Path) -> None:
    def probed(kind: str, shared: bool | str | None) -> list[Path]:
        return folders_to_probe(ClusterSpec(backend={"kind": kind}, shared=shared), root)

    root = tmp_path / "c"
    assert probed("local", None) == probed("local", False) == probed("ssh", False) == []
    assert probed("local", True) == probed("ssh", None) == probed("ssh", True) == [root]
    assert probed("local", str(tmp_path)) == probed("ssh", str(tmp_path)) == [root, tmp_path]
    with pytest.raises(
        ConfigError,
        match=sentence("give a path that is equal here and on the pods", "/no/such"),
    ):
        probed("ssh", "/no/such")


def test_a_path_is_within_a_folder_if_its_links_are(tmp_path: Path) -> None:
    for name in ("nfs", "home"):
        (tmp_path / name).mkdir()
    nfs = tmp_path / "nfs"
    (nfs / "out").symlink_to(tmp_path / "home")
    (tmp_path / "home" / "in").symlink_to(nfs)
    assert is_within(nfs / "file", [tmp_path / "other", nfs])
    assert not is_within(nfs / "out" / "file", [nfs])
    assert not is_within(tmp_path / "home" / "in" / "file", [nfs]), "the pod has no such link"
    assert not is_within(nfs / "file", [])


def test_shared_folders_are_told_with_their_pods() -> None:
    nfs, home = Path("/nfs"), Path("/home")
    assert shared_words([]) == shared_words([("pod-0", [])]) == ""
    alone = shared_words([("pod-0", [nfs])])
    assert alone == "pod-0 shares /nfs"
    assert shared_words([("pod-0", [nfs, home]), ("pod-1", [nfs])]) == (
        "all share /nfs; pod-0 shares /home"
    )
    three = [("pod-0", [nfs]), ("pod-1", [nfs]), ("pod-2", [])]
    assert shared_words(three) == "pod-0, pod-1 share /nfs"
