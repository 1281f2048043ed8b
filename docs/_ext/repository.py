"""The address of the project's repository on the web, for the header of every page."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

_SSH = re.compile(r"(?:ssh://)?[\w.-]+@([\w.-]+)[:/](?!//)(?:\d+/)?(.+)")


def address_of(remote: str) -> str:
    """Return the web address of a git remote without the login; empty for a folder."""
    remote = remote.strip()
    if found := _SSH.fullmatch(remote):
        host, path = found.groups()
    else:
        parts = urlsplit(remote)
        host, path = parts.netloc.rpartition("@")[2], parts.path
        if parts.scheme not in ("http", "https"):
            return ""
    return f"https://{host}/{path.strip('/').removesuffix('.git')}"
