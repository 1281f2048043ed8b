"""Packages of `PodSpec.pip` on the pods: where they lie, and how they come there."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import PurePosixPath

from workbench.base.errors import PodError, RemoteError
from workbench.base.redact import mask_secrets
from workbench.keeper.link.agent import AgentLink
from workbench.pods.pod_spec import PodSpec


def packages_folder(link: AgentLink, requirements: Sequence[str]) -> str:
    """Return the folder of these packages on a pod; empty for none. Pods that share a store share it."""
    if not requirements:
        return ""
    asked = hashlib.sha256(json.dumps([link.pod.python, *requirements]).encode()).hexdigest()
    return str(link.store / f"packages-{asked[:16]}")


def install_packages(link: AgentLink, spec: PodSpec, timeout_s: float) -> None:
    """Install what a pod lacks of them, with pip's settings of the pod and of the spec's variables."""
    if not spec.pip:
        return
    request = {"folder": packages_folder(link, spec.pip), "requirements": list(spec.pip), "env": dict(spec.env)}
    path = str(PurePosixPath(link.pod.root) / "packages.json")  # not in argv: an index may have a password
    link.write(json.dumps(request).encode(), path)
    try:
        link.run(link.agent("packages", path), timeout_s)
    except RemoteError as error:
        why = mask_secrets(error.stderr.strip() or str(error))  # the address of an index may have a password
        raise PodError(f"pip could not install {', '.join(spec.pip)} on {link.pod.name}:\n{why}") from error
