"""Ranks on CPUs take their memory from jemalloc, and what they start does not."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from workbench.base.machine import allocator

LOOKS = """
import json, os, subprocess, sys
from workbench.base.machine.allocator import keep_from_children
keep_from_children()
has = lambda pid: "libjemalloc" in open(f"/proc/{pid}/maps").read()
child = subprocess.Popen(["sleep", "60"])
while b"sleep" not in open(f"/proc/{child.pid}/cmdline", "rb").read(): pass
print(json.dumps([has("self"), has(child.pid), os.environ.get("LD_PRELOAD")]))
child.kill()
"""


def looked(env: dict[str, str]) -> list[object]:
    done = subprocess.run(
        [sys.executable, "-c", LOOKS], env={**os.environ, **env}, stdout=subprocess.PIPE, check=True
    )
    return json.loads(done.stdout)


@pytest.mark.skipif(not allocator.preloaded(), reason="libjemalloc2 is not installed")
def test_it_is_loaded_and_its_children_have_their_own() -> None:
    assert looked(allocator.preloaded()) == [True, False, None]
    assert looked({}) == [False, False, None]


def test_what_a_user_preloads_stays() -> None:
    assert looked({"LD_PRELOAD": ""})[2] == ""


def test_there_is_none_beside_a_gpu_or_where_it_is_not_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(allocator, "_GPU", os.devnull)
    assert allocator.preloaded() == {}
    monkeypatch.undo()
    monkeypatch.setattr(allocator, "_LIBRARY", "libnone.so")
    assert allocator.preloaded() == {}
