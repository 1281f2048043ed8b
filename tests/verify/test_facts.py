"""The calls of torch.cuda that ranks make, recorded: no GPU is here, and none is claimed."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from workbench.verify.pods import Facts
from workbench.verify.ranks import collectives, kernels
from workbench.verify.ranks.facts import facts_of_rank, how_started

pytestmark = pytest.mark.slow


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Two GPUs as torch.cuda tells of them, seen by the second rank of a pod."""
    made: list[Any] = []
    monkeypatch.setenv("LOCAL_RANK", "1")
    answers = {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "get_device_name": lambda device: f"GPU {device}",
        "get_device_capability": lambda device: (9, device),
        "is_bf16_supported": lambda including_emulation: not including_emulation,
        "set_device": lambda device: made.append(("set_device", str(device))),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 3))
    monkeypatch.setattr(torch.version, "cuda", "12.9")
    monkeypatch.setattr(
        torch.distributed,
        "init_process_group",
        lambda backend, **options: made.append((backend, {k: str(v) for k, v in options.items()})),
    )
    return made


def test_a_rank_tells_of_its_own_gpu(calls: list[Any]) -> None:
    facts = Facts.read(json.loads(facts_of_rank()))
    assert (facts.device, facts.name, facts.capability, facts.bf16) == (
        "cuda",
        "GPU 1",
        (9, 1),
        True,
    )
    assert facts.versions == {"torch": torch.__version__, "CUDA": "12.9", "NCCL": "2.27.3"}


def test_a_rank_takes_its_own_gpu_before_it_joins_nccl(calls: list[Any]) -> None:
    device, backend = collectives.joined()
    assert (str(device), backend) == ("cuda:1", "nccl")
    assert calls == [("set_device", "cuda:1"), ("nccl", {"device_id": "cuda:1"})]
    assert str(kernels._device()) == "cuda:1"


def test_without_a_gpu_a_rank_tells_of_its_processor() -> None:
    facts = Facts.read(json.loads(facts_of_rank()))
    assert facts.device == "cpu" and facts.name and facts.capability == (0, 0)
    assert not facts.bf16  # a torch for GPUs brings nvcc, also without a GPU


def test_the_start_of_a_rank_is_read_from_its_arguments_and_its_fork(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert how_started([], []) == {"forked": 1.0, "cuda_before_fork": 0.0}
    monkeypatch.setattr(torch._C, "_cuda_isInBadFork", lambda: True, raising=False)
    assert how_started([], [])["cuda_before_fork"] == 1.0


def test_kernels_agree_on_this_processor() -> None:
    assert kernels.fused_adamw()["off"] < 1e-5
    assert kernels.flash_in_torch()["off"] < 0.03
    lean = kernels.lean_loss(64, 1000, 64)
    assert lean["in_pieces"] == 1 and lean["loss_off"] < 1e-5 and lean["gradient_off"] < 1e-4
