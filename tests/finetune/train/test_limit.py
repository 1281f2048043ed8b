"""The limit of a collective operation follows the bytes that all pods read of a model's folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from workbench import FineTune
from workbench.finetune.train.settings import collective_limit_s

GB = 10**9


@pytest.mark.parametrize("pods", [1, 4, 32])
@pytest.mark.parametrize("sizes", [[], [GB], [5 * GB, 136 * GB]])
@pytest.mark.parametrize("own_s", [1800, 60])
def test_every_gigabyte_that_a_pod_reads_adds_a_second(
    tmp_path: Path, pods: int, sizes: list[int], own_s: int
) -> None:
    (tmp_path / "more").mkdir()
    for number, size in enumerate(sizes):
        with (tmp_path / f"model-{number}.safetensors").open("wb") as file:
            file.truncate(size)
    job = FineTune(model=str(tmp_path), ddp_timeout=own_s)
    assert collective_limit_s(job, pods) == own_s + pods * sum(sizes) // GB


@pytest.mark.parametrize("model", ["tiny-t5", "google-t5/t5-small"])
def test_a_model_without_a_folder_adds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert collective_limit_s(FineTune(model=model), 32) == 1800
