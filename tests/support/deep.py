"""A tree of folders that is deeper than recursion, descriptors and paths allow."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from workbench.base.files.folders import remove_folder


@contextmanager
def deep_tree(folder: Path, depth: int = 3000) -> Iterator[Path]:
    """Make folders within one another, with a file in each, and remove the tree afterwards."""
    folder.mkdir()
    try:
        at = os.open(folder, os.O_RDONLY)
        for _ in range(depth):
            os.close(os.open("file", os.O_CREAT, dir_fd=at))
            os.mkdir("d", dir_fd=at)
            deeper = os.open("d", os.O_RDONLY, dir_fd=at)
            os.close(at)
            at = deeper
        os.close(at)
        yield folder
    finally:
        # pytest cannot remove such a tree.
        remove_folder(folder)
