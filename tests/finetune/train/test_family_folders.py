"""Tiny families are read, saved, exported and merged as plain transformers reads them.

The reading under ZeRO-3 has one rank here: what transformers does otherwise there depends on no
number of ranks. FSDP reads as `single` does, and shards afterwards.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from peft import PeftModel

import tests.support.tinyfolders as folders
from tests.support.familyfolders import CAUSAL, TRANSLATORS, folder_of, loss_of, plain
from workbench.base.errors import ConfigError
from workbench.finetune.answers.serving.export import export_model
from workbench.finetune.export.folder import SHARD
from workbench.finetune.model import adapters
from workbench.finetune.model import load as model
from workbench.finetune.model.files import saving
from workbench.finetune.model.layers import with_lora
from workbench.finetune.model.targets import adapted_weights, left_out, linear_weights
from workbench.finetune.options.adapters import Lora
from workbench.finetune.recipe.standalone import without_shm_op

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.usefixtures("one_thread")]

# Models whose code reads the shape of a weight while the model is made.
ONLY_WHOLE = ("pegasus",)


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    import deepspeed
    import torch.distributed as dist

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=0, world_size=1)
    without_shm_op()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
            patch.setenv(name, value)
        deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
        yield
    dist.destroy_process_group()


def check_zero3(folder: Path, expected: float) -> None:
    """Read and save under ZeRO-3, as a rank does."""
    import deepspeed
    from transformers.integrations import HfDeepSpeedConfig

    config = {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1}
    held = HfDeepSpeedConfig(config)
    try:
        if transformers.AutoConfig.from_pretrained(folder).model_type in ONLY_WHOLE:
            with pytest.raises(ConfigError, match=r"with sharded weights .* Use technique 'fsdp'"):
                model.load(str(folder), (), seed=0)
            return
        loaded = model.load(str(folder), (), seed=0)
        saving.save_model(loaded.model, folder / "zero3", read=True)
        with deepspeed.zero.GatheredParameters(list(loaded.model.parameters())):
            values = {name: p.detach().clone() for name, p in loaded.model.named_parameters()}
    finally:
        del held
    whole = plain(folder)
    mine = dict(whole.named_parameters())
    assert values.keys() == mine.keys()
    assert all(torch.equal(values[name], mine[name]) for name in values)
    assert loss_of(plain(folder / "zero3")) == pytest.approx(expected, rel=1e-5)


def check_adapters(folder: Path) -> None:
    base = plain(folder)
    linear = set(linear_weights(base))
    trained = with_lora(base, Lora(), checkpointing=False)
    # Each linear layer has an adapter, or the run's note names the layer.
    assert adapted_weights(trained) | set(left_out(trained)) == linear
    assert {name.split(".")[-2] for name in left_out(trained)} <= {"out_proj", "dt_proj"}
    assert not left_out(trained) or "Mamba" in str(base)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in trained.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape) * 0.1)
    learned = loss_of(trained)
    adapters.save(trained, folder / "adapters", base=str(folder), seed=0)
    again = PeftModel.from_pretrained(plain(folder), str(folder / "adapters"))
    assert loss_of(again) == pytest.approx(learned, rel=1e-5)
    merged = adapters.merged(folder / "adapters", model.load(str(folder), (), seed=0))
    export_model(merged, folder / "merged", None, SHARD)
    assert loss_of(plain(folder / "merged")) == pytest.approx(learned, rel=1e-5)


@pytest.fixture(autouse=True)
def unpatched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo at the end what DeepSpeed's `zero.Init` changes in torch."""
    monkeypatch.setattr(torch.nn.functional, "linear", torch.nn.functional.linear)


@pytest.mark.parametrize("family", [*CAUSAL, *TRANSLATORS])
def test_a_family_is_read_saved_exported_and_merged_as_plain_transformers_does(
    family: str, tmp_path: Path
) -> None:
    folder = folder_of(family, tmp_path / "model")
    expected = loss_of(plain(folder))
    loaded = model.load(str(folder), (), seed=0)
    assert not loaded.remarks
    assert loss_of(loaded.model) == pytest.approx(expected, rel=1e-5)
    saving.save_model(loaded.model, folder / "again", read=True)
    assert loss_of(plain(folder / "again")) == pytest.approx(expected, rel=1e-5)
    export_model(loaded, folder / "exported", None, SHARD)
    assert loss_of(plain(folder / "exported")) == pytest.approx(expected, rel=1e-5)
    check_zero3(folder, expected)
    check_adapters(folder)


def test_a_t5_with_an_output_layer_of_its_own_keeps_the_layer_under_zero3(tmp_path: Path) -> None:
    folder = folder_of("T5", tmp_path / "model")

    def with_head(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {**state, "lm_head.weight": torch.randn(state["shared.weight"].shape)}

    folders.change_weights(folder, with_head)
    check_zero3(folder, loss_of(plain(folder)))
