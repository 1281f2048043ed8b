"""List the kinds of Kubeflow jobs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from workbench.handover.kubeflow.objects import JobKind
from workbench.handover.kubeflow.pytorchjob import PyTorchJob
from workbench.handover.kubeflow.trainjob import TrainJob

ManifestKind = Literal["trainjob", "pytorchjob"]
_ALL: tuple[JobKind, ...] = (TrainJob(), PyTorchJob())
KINDS: Mapping[str, JobKind] = {kind.name: kind for kind in _ALL}
"""Kinds of Kubeflow jobs, by the name for `Run.manifest`."""
