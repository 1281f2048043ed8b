"""Find folders that a pod sees under the same path as this machine, by a probe."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.base.errors import ConfigError, WorkbenchError
from workbench.base.files import read_text, write_text
from workbench.base.files.folders import remove_file
from workbench.pods.pod import Pod
from workbench.rundir.spec import ClusterSpec

if TYPE_CHECKING:
    from workbench.pods.ssh.connection import SSHConnection

logger = logging.getLogger(__name__)
# Runs on the pod. Prints the token and writes the reversed token to a second file.
_ANSWER = (
    "import sys\n"
    "path, mine = sys.argv[1:]\n"
    "token = open(path).read()\n"
    "open(mine, 'x').write(token[::-1])\n"
    "sys.stdout.write(token)\n"
)


def folders_to_probe(spec: ClusterSpec, root: Path) -> list[Path]:
    asked = spec.shared
    if asked is False or (asked is None and spec.is_local):
        return []
    if not isinstance(asked, str):
        return [root]
    named = Path(asked).expanduser().absolute()
    if not named.is_dir():
        raise ConfigError(
            f"shared is {asked!r}, but this machine has no such folder;"
            " give a path that is equal here and on the pods"
        )
    return [root, named]


def seen_by(ssh: SSHConnection, pod: Pod, folders: Sequence[Path]) -> tuple[Path, ...]:
    """Return the folders that the pod sees and may write to. Any error counts as no."""
    return tuple(folder for folder in folders if _sees(ssh, pod, folder))


def is_within(path: Path, folders: Sequence[Path]) -> bool:
    """Whether a path lies in one of the folders, with links resolved.

    Example:
        >>> folders = [Path("/mnt/nfs")]
        >>> is_within(Path("/mnt/nfs/models/t5"), folders), is_within(Path("/mnt/nfs2"), folders)
        (True, False)
    """
    return any(
        path.is_relative_to(folder) and path.resolve().is_relative_to(folder.resolve())
        for folder in folders
    )


def shared_words(pods: Sequence[tuple[str, Sequence[Path]]]) -> str:
    """Describe the folders that pods share with this machine. Empty if no folder is shared.

    Example:
        >>> shared_words([("pod-0", [Path("/nfs")]), ("pod-1", [])])
        'pod-0 shares /nfs'
        >>> shared_words([("pod-0", [Path("/nfs")]), ("pod-1", [Path("/nfs")])])
        'all share /nfs'
    """
    folders = dict.fromkeys(folder for _, seen in pods for folder in seen)
    parts = []
    for folder in folders:
        names = [name for name, seen in pods if folder in seen]
        who = (
            "all share"
            if len(names) == len(pods) > 1
            else f"{', '.join(names)} share{'s' * (len(names) == 1)}"
        )
        parts.append(f"{who} {folder}")
    return "; ".join(parts)


def _sees(ssh: SSHConnection, pod: Pod, folder: Path) -> bool:
    token, path = secrets.token_hex(32), folder / f".workbench-probe-{secrets.token_hex(8)}"
    mine = path.with_name(f"{path.name}.{pod.name}")
    try:
        write_text(path, token, mode=0o644)
        answer = ssh.run([pod.python, "-IS", "-c", _ANSWER, str(path), str(mine)], timeout_s=20.0)
        return answer.stdout == token and read_text(mine) == token[::-1]
    except (OSError, UnicodeDecodeError, WorkbenchError) as error:
        logger.info("%s does not share %s: %s", pod.name, folder, error)
        return False
    finally:
        for made in (path, mine):
            remove_file(made)
