"""Weights that a model's files lack, misname or size otherwise reach the user before step 1."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import tests.support.tinyfolders as folders
from tests.support.forkedruns import LENGTH, Plan, Ran
from tests.support.sentences import says, sentence
from workbench.base.errors import ConfigError
from workbench.finetune.model import load as model
from workbench.finetune.model.files.opened import check_values, extremes, named_errors
from workbench.finetune.train import main

HOW = {"max_steps": 2, "learning_rate": 5e-3, "profile_step": 0, "eval_steps": None, **LENGTH}
TECHNIQUES = ("single", "ddp", "zero1", "zero2", "zero3", "zero3-offload", "fsdp")


def one_layer_more(folder: Path) -> Path:
    return folders.change_config(folders.llama(folder), num_hidden_layers=3)


def one_layer_less(folder: Path) -> Path:
    return folders.change_config(folders.llama(folder), num_hidden_layers=1)


def another_vocabulary(folder: Path) -> Path:
    return folders.change_config(folders.llama(folder), vocab_size=5000)


def one_shard_less(folder: Path) -> Path:
    whole = AutoModelForCausalLM.from_pretrained(folders.llama(folder))
    (folder / "model.safetensors").unlink()
    whole.save_pretrained(folder, max_shard_size="40KB")
    sorted(folder.glob("model-*.safetensors"))[-1].unlink()
    return folder


def a_cut_file(folder: Path) -> Path:
    file = folders.llama(folder) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    return folder


REFUSED: dict[str, tuple[Callable[[Path], Path], str]] = {
    "no-head": (folders.without_head, "lack 1 of the 21 weights .*: lm_head.weight"),
    "names": (
        folders.with_foreign_names,
        r"lack 9 of the 21 .*: model\.layers\.1\..* and 6 more\. The files have 9 weights .*: "
        r"module\.model\.layers\.1\.",
    ),
    "deeper": (one_layer_more, r"lack 9 of the 30 weights .*: model\.layers\.2\."),
    "vocabulary": (another_vocabulary, r"lm_head.weight has the shape \d+×16 in the files and 50"),
    "shard": (one_shard_less, r"lacks a file of weights: model-.*\.safetensors"),
    "cut": (a_cut_file, "cannot be read"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_a_folder_without_all_weights_is_refused_by_name(name: str, tmp_path: Path) -> None:
    make, message = REFUSED[name]
    folder = make(tmp_path / "model")
    with pytest.raises(ConfigError, match=message) as caught:
        model.load(str(folder), (), seed=0)
    assert str(folder) in str(caught.value)


def a_config_with(**values: object) -> Callable[[Path], Path]:
    return lambda folder: folders.change_config(folders.llama(folder), **values)


def a_file_with(name: str, **values: object) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        file = folders.llama(folder) / name
        file.write_text(json.dumps({**json.loads(file.read_text()), **values}))
        return folder

    return make


# Values that the libraries refuse, each with an error of another class.
NOT_READ: dict[str, Callable[[Path], Path]] = {
    "text": a_config_with(hidden_size="16"),
    "tie": a_config_with(tie_word_embeddings=None),
    "function": a_config_with(hidden_act="gelu_fast9"),
    "heads": a_config_with(num_attention_heads=3),
    "format": a_config_with(dtype="flot16"),
    "rope": a_config_with(rope_parameters={"rope_type": "mine", "factor": 2.0}),
    "padding": a_config_with(pad_token_id=99999),
    "quantization": a_config_with(quantization_config={}),
    "role": a_file_with("tokenizer_config.json", pad_token=["<pad>"]),
    "side": a_file_with("tokenizer_config.json", padding_side="middle"),
    "own code": a_file_with(
        "tokenizer_config.json", tokenizer_class="Mine", auto_map={"AutoTokenizer": ["m.T", None]}
    ),
    "vocabulary": a_file_with("tokenizer.json", model={"type": "Mine", "vocab": {}}),
    "answers": a_file_with("generation_config.json", max_new_tokens=-4),
    "several answers": a_file_with("generation_config.json", num_return_sequences=3),
    "cache": a_file_with("generation_config.json", cache_implementation="mine"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NOT_READ)
def test_a_value_that_a_library_refuses_is_named_with_the_folder(name: str, tmp_path: Path) -> None:
    folder = NOT_READ[name](tmp_path / "model")
    refusal = sentence("Correct the file with this value (config.json", str(folder))
    with pytest.raises(ConfigError, match=refusal):
        model.load(str(folder), (), seed=0)


@pytest.mark.parametrize("error", [OSError, MemoryError, RuntimeError, ConfigError])
def test_errors_of_disks_and_of_memory_are_no_errors_of_the_files(error: type[Exception]) -> None:
    with pytest.raises(error, match=r"^as it was$"), named_errors("m"):
        raise error("as it was")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [0, 7, -1])
def test_any_number_that_is_not_finite_is_found(dtype: Any, bad: float, place: int) -> None:
    values = torch.randn(100).to(dtype)
    assert all(map(math.isfinite, extremes(values)))
    values[place] = bad
    assert not all(map(math.isfinite, extremes(values)))


def test_packed_and_empty_weights_are_finite() -> None:
    for values in (torch.zeros(0), torch.full((4,), 255, dtype=torch.uint8)):
        assert extremes(values) == (0, 0)


def words() -> Any:
    """Return embeddings as a model has them."""
    layer: Any = torch.nn.Embedding(4, 4)
    layer.get_input_embeddings = lambda: layer
    return layer


def test_a_weight_that_is_not_finite_is_named() -> None:
    layer = words()
    check_values(layer, "mine")
    layer.weight.data[1, 2] = float("nan")
    with pytest.raises(
        ConfigError,
        match=sentence(
            "or use precision 'bf16' or 'fp32' if the precision is fp16", "mine", "weight"
        ),
    ):
        check_values(layer, "mine")
    # ZeRO-3 leaves an empty tensor, and keeps the rank's part beside it.
    layer.weight.ds_tensor = torch.zeros(4)  # type: ignore[assignment]
    layer.weight.data = torch.zeros(0)
    check_values(layer, "mine")
    layer.weight.ds_tensor[3] = float("inf")  # type: ignore[index]
    with pytest.raises(ConfigError, match="weight holds numbers"):
        check_values(layer, "mine")


def test_matrices_of_zeros_are_named_and_embeddings_of_zeros_refused() -> None:
    model: Any = torch.nn.Sequential(words(), torch.nn.Linear(4, 4))
    model.get_input_embeddings = lambda: model[0]
    model[1].bias.data.zero_()
    assert not check_values(model, "mine")
    model[1].weight.data.zero_()
    assert says(check_values(model, "mine"), "If this is not meant", "1 of 2", "1.weight")
    model[0].weight.data.zero_()
    with pytest.raises(ConfigError, match=sentence("could not tell words apart", "2 of 2")):
        check_values(model, "mine")
    model[1].weight.data.fill_(1)
    with pytest.raises(ConfigError, match=sentence("could not tell words apart", "0.weight")):
        check_values(model, "mine")


@pytest.mark.parametrize("name", ["lora_B", "lora_A"])
def test_new_adapters_may_begin_with_zeros(name: str) -> None:
    model = words()
    model.add_module(name, torch.nn.Linear(4, 4, bias=False))
    model.get_parameter(f"{name}.weight").data.zero_()
    wrapped: Any = torch.nn.ModuleDict({"q": model})
    wrapped.get_input_embeddings = lambda: model
    assert not check_values(wrapped, "mine")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["safetensors", "bin"])
@pytest.mark.parametrize("dtype", [torch.complex64, torch.int8])
def test_formats_that_are_read_as_other_numbers_are_refused(
    kind: str, dtype: Any, tmp_path: Path
) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    folder = folders.change_weights(
        folders.llama(tmp_path / "model"), lambda state: {**state, name: state[name].to(dtype)}
    )
    file = folder / "model.safetensors"
    if kind == "bin":
        torch.save(load_file(file), folder / "pytorch_model.bin")
        file.unlink()
    with pytest.raises(ConfigError, match=f"has the weight {name} in the format"):
        model.load(str(folder), (), seed=0)


@pytest.mark.slow
def test_weights_without_a_place_and_untied_weights_are_remarked(tmp_path: Path) -> None:
    shallow = model.load(str(one_layer_less(tmp_path / "shallow")), (), seed=0)
    assert len(shallow.remarks) == 1
    assert "9 weights of the files were not read" in shallow.remarks[0]
    assert "model.layers.1." in shallow.remarks[0]
    loaded = model.load(str(folders.with_another_head(tmp_path / "head")), (), seed=0)
    assert "ties lm_head.weight to model.embed_tokens.weight" in loaded.remarks[0]
    for tie in (True, False):
        whole = folders.llama(tmp_path / f"tie-{tie}", tie=tie)
        assert not model.load(str(whole), (), seed=0).remarks


@pytest.mark.slow
def test_only_the_head_of_a_model_that_scores_may_be_new(tmp_path: Path) -> None:
    folder = folders.llama(tmp_path / "whole")
    loaded = model.load(str(folder), (), seed=0, scores=True)
    assert loaded.model.score.weight.shape == (1, 16)
    assert not loaded.remarks
    with pytest.raises(ConfigError, match="lack 9 of the 21"):
        model.load(str(folders.with_foreign_names(tmp_path / "names")), (), seed=0, scores=True)


def with_nan(folder: Path) -> Path:
    def changed(state: dict[str, Any]) -> dict[str, Any]:
        state["model.layers.1.mlp.up_proj.weight"][0, 0] = float("nan")
        return state

    return folders.change_weights(folders.llama(folder), changed)


def with_zeros(*, words: bool) -> Callable[[Path], Path]:
    """Zeros in the embeddings, or in half of a matrix and in the whole of another."""

    def changed(state: dict[str, Any]) -> dict[str, Any]:
        if words:
            state["model.embed_tokens.weight"].zero_()
        else:
            state["model.layers.0.mlp.up_proj.weight"][:16].zero_()
            state["model.layers.1.mlp.down_proj.weight"].zero_()
        return state

    return lambda folder: folders.change_weights(folders.llama(folder), changed)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ran]:
    plan = Plan(tmp_path_factory.mktemp("opened"))
    made = {name: make(plan.root / f"of-{name}") for name, (make, _) in REFUSED.items()}
    made["nan"] = with_nan(plan.root / "of-nan")
    for words in (True, False):
        folder = with_zeros(words=words)(plan.root / f"of-zeros-{words}")
        plan.add(f"zeros-{words}", 2, model=str(folder), technique="zero3", **HOW)
    made["head"] = folders.with_another_head(plan.root / "of-head")
    for technique in TECHNIQUES:
        ranks = 1 if technique == "single" else 2
        rows = {"per_device_train_batch_size": 8 // ranks, "technique": technique}
        plan.add(f"head-{technique}", ranks, model=str(made["head"]), **rows, **HOW)
    for name in ("no-head", "names", "vocabulary"):
        plan.add(f"{name}-zero3", 2, model=str(made[name]), technique="zero3", **HOW)
    for technique in ("single", "zero3", "fsdp"):
        ranks = 1 if technique == "single" else 2
        plan.add(f"nan-{technique}", ranks, model=str(made["nan"]), technique=technique, **HOW)
    plan.add("names-fsdp", 2, model=str(made["names"]), technique="fsdp", **HOW)
    return plan.run()


@pytest.mark.slow
@pytest.mark.long
class TestOnRanks:
    def test_a_head_beside_tied_embeddings_is_kept_under_every_technique(
        self, ran: dict[str, Ran]
    ) -> None:
        ends = {}
        for technique in TECHNIQUES:
            run = ran[f"head-{technique}"]
            assert set(run.exit_codes.values()) == {0}, run.stderr()
            ends[technique] = run.data("end")[0]
            (said,) = [n for n in run.data("note") if "config.json ties" in str(n["message"])]
            assert "lm_head.weight to model.embed_tokens.weight" in str(said["message"])
        first = ends["single"]
        for technique, end in ends.items():
            for figure in ("first_eval_loss", "eval_loss"):
                assert end[figure] == pytest.approx(first[figure], rel=1e-4), technique
        for technique in ("single", "zero3", "fsdp"):
            config = ran[f"head-{technique}"].folder / "out" / "model" / "config.json"
            assert json.loads(config.read_text())["use_cache"] is True, technique
        # The saved model has both weights, as plain transformers reads them.
        saved = ran["head-zero3"].folder / "out" / "model"
        whole = AutoModelForCausalLM.from_pretrained(saved)
        assert not torch.equal(whole.lm_head.weight, whole.model.embed_tokens.weight)

    @pytest.mark.parametrize(
        "name", ["no-head-zero3", "names-zero3", "vocabulary-zero3", "names-fsdp"]
    )
    def test_missing_weights_end_the_run_before_its_first_step(
        self, ran: dict[str, Ran], name: str
    ) -> None:
        run = ran[name]
        assert 0 not in run.exit_codes.values()
        assert not run.data("step")
        _, message = REFUSED[name.rpartition("-")[0]]
        for rank in (0, 1):
            error = json.dumps(run.record(rank, "error.json"), ensure_ascii=False)
            assert "ConfigError" in error
            assert re.search(message, error), error

    @pytest.mark.parametrize("technique", ["single", "zero3", "fsdp"])
    def test_a_weight_that_is_not_finite_ends_the_run_before_its_first_step(
        self, ran: dict[str, Ran], technique: str
    ) -> None:
        run = ran[f"nan-{technique}"]
        assert 0 not in run.exit_codes.values()
        assert not run.data("step") and not run.data("eval")
        error = json.dumps(run.record(0, "error.json"), ensure_ascii=False)
        assert "model.layers.1.mlp.up_proj.weight holds numbers that are not finite" in error

    def test_zeros_are_found_over_all_parts_of_a_weight(self, ran: dict[str, Ran]) -> None:
        refused = ran["zeros-True"]
        assert 0 not in refused.exit_codes.values()
        assert not refused.data("step")
        error = json.dumps(refused.record(0, "error.json"), ensure_ascii=False)
        assert "matrices hold zeros alone: model.embed_tokens.weight" in error
        run = ran["zeros-False"]
        assert set(run.exit_codes.values()) == {0}, run.stderr()
        notes = [str(note["message"]) for note in run.data("note")]
        (said,) = [note for note in notes if "zeros" in note]
        assert "1 of 16 matrices hold zeros alone: model.layers.1.mlp.down_proj.weight" in said


def test_a_rank_names_the_model_as_the_user_did(monkeypatch: pytest.MonkeyPatch) -> None:
    copy, given = "/scratch/pods/store/model-1f.pod-0", "~/models/llama"
    work = Mock(job=Mock(model=copy), base=given)
    written: list[str] = []
    monkeypatch.setattr(main.Assignment, "read", lambda: work)
    monkeypatch.setattr(main.report, "write_error", lambda *args: written.append(str(args[-1])))
    monkeypatch.setattr(
        main, "_run", Mock(side_effect=ConfigError(f"{copy}/config.json has no layers"))
    )
    with pytest.raises(ConfigError):
        main.main()
    assert written == [f"{given}/config.json has no layers"]
