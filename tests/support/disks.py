"""Folders on a disk, where the folders of tests may be in memory."""

from __future__ import annotations

import tempfile


def folder_on_disk() -> tempfile.TemporaryDirectory[str]:
    """Return a new folder that is removed at the end of the block."""
    return tempfile.TemporaryDirectory(prefix="wb-", dir="/var/tmp")
