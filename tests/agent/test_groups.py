"""What a script's rank learns of its pod before Accelerate, and what it notes of its group."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from workbench.agent import script_site
from workbench.agent.rank.groups import changes, has_gpu, worked_alone

SCRIPT_SITE = Path(script_site.__file__).parent


def started(
    monkeypatch: pytest.MonkeyPatch, folder: Path, **env: str
) -> Mapping[str, Callable[[Any], None]]:
    """The changes at imports that a rank with the variables waits for."""
    for name in ("ACCELERATE_USE_CPU", "CUDA_VISIBLE_DEVICES", "WORLD_SIZE"):
        monkeypatch.setenv(name, "")  # `changes` may set it: to be undone, it must have been here
        monkeypatch.delenv(name)
    monkeypatch.setenv("WORKBENCH_RANK_DIR", str(folder))
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    return changes()


@pytest.mark.parametrize(
    ("env", "use_cpu"),
    [
        ({"WORLD_SIZE": "2", "CUDA_VISIBLE_DEVICES": ""}, "true"),
        ({"WORLD_SIZE": "2", "CUDA_VISIBLE_DEVICES": "-1,0"}, "true"),
        ({"WORLD_SIZE": "2", "CUDA_VISIBLE_DEVICES": "NoDevFiles"}, "true"),
        ({"WORLD_SIZE": "2", "CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "false"}, "false"),
        ({"WORLD_SIZE": "1", "CUDA_VISIBLE_DEVICES": ""}, None),
        ({"CUDA_VISIBLE_DEVICES": ""}, None),
    ],
)
def test_accelerate_is_asked_to_connect_ranks_without_gpus(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, env: dict[str, str], use_cpu: str | None
) -> None:
    started(monkeypatch, tmp_path, **env)
    assert os.environ.get("ACCELERATE_USE_CPU") == use_cpu


@pytest.mark.parametrize("deepspeed", ["true", "false"])
def test_the_variable_does_not_switch_deepspeed_off(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, deepspeed: str
) -> None:
    """accelerate/state.py chooses DeepSpeed only without the variable."""
    seen: list[object] = []

    class Partial:
        def __init__(self, cpu: bool = False) -> None:
            seen.append((cpu, os.environ.get("ACCELERATE_USE_CPU")))

    class Whole:
        def __init__(self, *args: object) -> None:
            seen.append((args, os.environ.get("ACCELERATE_USE_CPU")))

    changes = started(monkeypatch, tmp_path, WORLD_SIZE="2", CUDA_VISIBLE_DEVICES="")
    changes["accelerate.state"](SimpleNamespace(PartialState=Partial, AcceleratorState=Whole))
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", deepspeed)
    Partial()
    Whole("no")
    kept = None if deepspeed == "true" else "true"
    assert seen == [(kept == "true", kept), (("no",), kept)]


@pytest.mark.parametrize(
    ("device", "visible", "gpu"),
    [
        ("nvidia0", None, True),
        ("nvidiactl", "0,1", True),
        ("nvidia0", "", False),
        ("dxg", None, True),
        ("kfd", None, True),
        ("null", None, False),
        ("null", "0", False),
    ],
)
def test_a_gpu_is_known_by_its_device(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: str, visible: str | None, gpu: bool
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    (tmp_path / device).touch()
    assert has_gpu(str(tmp_path)) is gpu
    assert has_gpu(str(tmp_path / "missing")) is (visible != "")  # unknown: nothing is changed


@pytest.mark.parametrize(
    ("places", "alone"),
    [
        ([], True),
        ([1], False),
        # The first rank of the run, a script that sets RANK=0, and torchrun within a rank.
        ([0], True),
        ([0, 1], False),
        ([1, 0], True),
    ],
)
def test_a_rank_is_alone_unless_another_is_the_first_of_its_group(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, places: list[int], alone: bool
) -> None:
    change = started(monkeypatch, tmp_path, WORLD_SIZE="2")["torch.distributed.distributed_c10d"]
    assert not worked_alone(tmp_path)
    seen: list[object] = []
    module = SimpleNamespace(init_process_group=lambda *args, **options: seen.append(args))
    change(module)
    for place in places:
        module.get_rank = lambda place=place: place
        module.init_process_group("gloo", rank=0)
    assert seen == [("gloo",)] * len(places)
    assert worked_alone(tmp_path) is alone
    change(SimpleNamespace(init_process_group=print))  # a child of the rank imports torch later
    assert worked_alone(tmp_path) is alone


@pytest.mark.parametrize("offset", [0, 2])
def test_ranks_that_start_torchrun_are_alone_where_each_has_a_first_rank(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, offset: int
) -> None:
    for place in (offset + 1, offset):
        change = started(monkeypatch, tmp_path, WORLD_SIZE="2")
        module = SimpleNamespace(init_process_group=print, get_rank=lambda place=place: place)
        change["torch.distributed.distributed_c10d"](module)
        module.init_process_group()
    assert worked_alone(tmp_path) is (offset == 0)


@pytest.mark.parametrize(
    ("caller", "backend", "alone"),
    [
        ("accelerate.state", None, True),
        ("accelerate.state", "gloo", False),
        ("train", None, False),
    ],
)
def test_a_group_that_accelerate_opens_without_a_backend_connects_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caller: str, backend: str | None, alone: bool
) -> None:
    """ACCELERATE_USE_CPU=false on a pod without GPUs."""
    module = SimpleNamespace(init_process_group=lambda **_: None, get_rank=lambda: 1)
    started(monkeypatch, tmp_path, WORLD_SIZE="2")["torch.distributed.distributed_c10d"](module)
    exec(
        "module.init_process_group(backend=backend)",
        {"__name__": caller, "module": module, "backend": backend},
    )
    assert worked_alone(tmp_path) is alone


def test_a_group_that_cannot_be_opened_connects_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse() -> None:
        raise ValueError("no address")

    module = SimpleNamespace(init_process_group=refuse)
    change = started(monkeypatch, tmp_path, WORLD_SIZE="2")["torch.distributed.distributed_c10d"]
    change(module)
    with pytest.raises(ValueError, match="no address"):
        module.init_process_group()
    assert worked_alone(tmp_path)


def test_a_single_rank_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert started(monkeypatch, tmp_path, WORLD_SIZE="1") == {}


@pytest.mark.parametrize(("version", "prepared"), [("(3, 9, 18)", False), ("(3, 11, 0)", True)])
def test_a_child_with_an_older_python_is_left_as_it_is(version: str, prepared: bool) -> None:
    """A script may start a program of a conda environment, which inherits PYTHONPATH."""
    program = (
        f"import sys; sys.version_info = {version}; sys.path.insert(0, {str(SCRIPT_SITE)!r})\n"
        "import sitecustomize\n"
        "print(any(hasattr(finder, 'changes') for finder in sys.meta_path))\n"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", program], capture_output=True, text=True, timeout=300
    )
    assert (done.stdout, done.stderr) == (f"{prepared}\n", "")
