"""Pods and nodes of a place, and functions of a single place."""

from __future__ import annotations

from workbench.pods.bootstrap.machine import can_limit_memory
from workbench.pods.cml.project import CMLProject
from workbench.pods.nodes import nodes
from workbench.pods.pod import Pod

__all__ = [
    "CMLProject",
    "Pod",
    "can_limit_memory",
    "nodes",
]
