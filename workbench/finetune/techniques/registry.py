"""List of all techniques, in the order of the docs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from workbench.base.errors import one_of
from workbench.finetune.techniques.ddp import DDP
from workbench.finetune.techniques.fsdp import FSDP
from workbench.finetune.techniques.local_sgd import LocalSGD
from workbench.finetune.techniques.single import Single
from workbench.finetune.techniques.technique import Technique
from workbench.finetune.techniques.zero.zero1 import Zero1
from workbench.finetune.techniques.zero.zero2 import Zero2
from workbench.finetune.techniques.zero.zero3 import Zero3
from workbench.finetune.techniques.zero.zero3_offload import Zero3Offload

TECHNIQUES: Sequence[Technique] = (
    Single(),
    DDP(),
    Zero1(),
    Zero2(),
    Zero3(),
    Zero3Offload(),
    FSDP(),
    LocalSGD(),
)
YARDSTICK = Single.name
"""Technique against which speed and losses of the others are measured."""
_BY_NAME = {technique.name: technique for technique in TECHNIQUES}
TechniqueName = Literal[
    "single", "ddp", "zero1", "zero2", "zero3", "zero3-offload", "fsdp", "local-sgd"
]
"""Names of all techniques, which an editor completes; a test compares both."""


def technique_of(name: str) -> Technique:
    """Return the technique with the given name.

    Raises:
        ConfigError: No technique has the name.
    """
    if name not in _BY_NAME:
        raise one_of("technique", name, list(_BY_NAME))
    return _BY_NAME[name]


def by_preference() -> list[Technique]:
    """Return the techniques in `plan`'s order of preference."""
    return sorted(TECHNIQUES, key=lambda technique: technique.preference)


def find_technique(name: object) -> Technique | None:
    """Return the technique that a file names; None for a script and for an unknown name."""
    return _BY_NAME.get(str(name))


def has_recipe(name: object) -> bool:
    """Return whether a run of the technique can be repeated without the project."""
    technique = find_technique(name)
    return technique is None or technique.recipe


def runs_alone(name: object) -> bool:
    """Return whether a job of the technique has a single rank; False without a technique."""
    technique = find_technique(name)
    return technique is not None and technique.alone
