"""Adapters are on the weights that were asked for, in mixtures too, or the run says so."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

import tests.support.tinyfolders as folders
from tests.support.familyfolders import DENSE_FIRST, HEADS, LATENT, MOE
from tests.support.refusals import check_on
from workbench.base.errors import ConfigError
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.model import adapters
from workbench.finetune.model import load as model
from workbench.finetune.model.files.opened import check_values
from workbench.finetune.model.layers import with_lora
from workbench.finetune.model.targets import adapted_weights, left_out, plain_name
from workbench.finetune.options.adapters import Lora
from workbench.finetune.plan.plan import plan

SIZES = {**folders.SIZES, "vocab_size": 64, "num_attention_heads": 4, "hidden_size": 32}
# Families by the name of their classes.
FAMILIES: dict[str, dict[str, object]] = {
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen2Moe": {**MOE, "shared_expert_intermediate_size": 16},
    "Qwen3Moe": {**MOE, **HEADS},
    "GptOss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    "Olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "GraniteMoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Glm4Moe": {**DENSE_FIRST, **HEADS},
    "DeepseekV3": {**DENSE_FIRST, **LATENT},
    "Ernie4_5_Moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16},
    # The routers are linear layers by their class, and return scores and logits.
    "Llama4": {
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "moe_layers": [1],
        "intermediate_size_mlp": 16,
        "head_dim": 8,
    },
    "Phimoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
}
# Experts in matrices that the model cuts apart outside of their module.
DBRX = {
    "d_model": 32,
    "n_heads": 4,
    "n_layers": 1,
    "ffn_config": {"moe_num_experts": 4, "moe_top_k": 2, "ffn_hidden_size": 16},
    "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4},
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}
CAUSAL = "causal"
IDS = torch.arange(3, 13).view(1, 10)


def made(family: str) -> Any:
    # A language model of a composite family has a configuration of its own.
    text = getattr(transformers, f"{family}TextConfig", None)
    config = text or getattr(transformers, f"{family}Config")
    torch.manual_seed(0)
    kind = getattr(transformers, f"{family}ForCausalLM")
    sizes = DBRX | {"vocab_size": 64} if family == "Dbrx" else {**SIZES, **FAMILIES[family]}
    return kind(config(**sizes)).eval()


def logits(one: Any) -> torch.Tensor:
    with torch.no_grad():
        return torch.as_tensor(one.eval()(input_ids=IDS).logits)


def matrices(one: Any) -> set[str]:
    """Return the weights of two and three dimensions outside embeddings and the output layer."""
    embeddings = {name for name, module in one.named_modules() if isinstance(module, nn.Embedding)}
    names = set()
    for name, parameter in one.named_parameters():
        module = name.rpartition(".")[0]
        if parameter.dim() > 1 and "bias" not in name and module not in {*embeddings, "lm_head"}:
            names.add(name)
    return names


def check_in_plain_peft(trained: Any, before: torch.Tensor, folder: Path, kind: Any) -> None:
    """Adapters with other weights are the same in plain peft, read and merged."""
    with torch.no_grad():
        for parameter in trained.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape) * 0.1)
    after = logits(trained)
    assert not torch.allclose(before, after, atol=1e-3)
    adapters.save(trained, folder / "adapters", base=str(folder / "base"), seed=0)
    again = kind.from_pretrained(folder / "base")
    plain = PeftModel.from_pretrained(again, str(folder / "adapters"))
    assert torch.allclose(logits(plain), after, atol=1e-4)
    plain.merge_and_unload().save_pretrained(folder / "merged")
    merged = kind.from_pretrained(folder / "merged")
    assert torch.allclose(logits(merged), after, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["OPTForCausalLM", "BartForConditionalGeneration"])
def test_a_table_of_positions_is_adapted_by_its_weight(family: str, tmp_path: Path) -> None:
    kind = getattr(transformers, family)
    layers = {"encoder_layers": 1, "decoder_layers": 1, "num_hidden_layers": 1}
    layers |= {"num_attention_heads": 4, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    sizes = {"vocab_size": 64, "d_model": 32, "hidden_size": 32, "word_embed_proj_dim": 32}
    config = kind.config_class(**sizes, **layers, decoder_start_token_id=2)
    torch.manual_seed(0)
    kind(config).save_pretrained(tmp_path / "base")
    base = kind.from_pretrained(tmp_path / "base")
    before = logits(base)
    lora = Lora(target_modules=["embed_positions"])
    trained = with_lora(base, lora, checkpointing=False)
    assert {name.split(".")[-2] for name in adapted_weights(trained)} == {"embed_positions"}
    check_in_plain_peft(trained, before, tmp_path, kind)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_linear_weight_of_a_mixture_gets_an_adapter_that_plain_peft_reads(
    family: str, tmp_path: Path
) -> None:
    base = made(family)
    whole = matrices(base)
    base.save_pretrained(tmp_path / "base")
    before = logits(base)
    trained = with_lora(base, Lora(), checkpointing=False)
    assert adapted_weights(trained) == whole
    assert not left_out(trained)
    check_in_plain_peft(trained, before, tmp_path, AutoModelForCausalLM)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("Qwen3Moe", ["gate_up_proj", "down_proj"]),
        ("Qwen3Moe", ["q_proj", "gate_proj", "up_proj", "down_proj"]),
        ("DeepseekV3", ["gate_proj", "up_proj", "down_proj"]),
        ("GptOss", ["q_proj", "experts.down_proj"]),
        ("Llama4", ["q_proj", "router"]),
        ("Phimoe", ["router"]),
    ],
)
def test_names_of_weights_and_of_modules_are_all_followed(family: str, names: list[str]) -> None:
    base = made(family)
    ends = {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}
    wanted = set()
    for weight in matrices(base):
        for name in names:
            for end in (name, f"{name}.weight", ends.get(name, name)):
                if weight.endswith(f".{end}"):
                    wanted.add(weight)
    trained = with_lora(base, Lora.from_dict({"target_modules": names}), checkpointing=False)
    assert adapted_weights(trained) == wanted


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_module_with_an_adapter_returns_what_the_module_without_returns(family: str) -> None:
    before = outputs(made(family))
    after = outputs(with_lora(made(family), Lora(), checkpointing=False))
    assert before.keys() <= after.keys()
    for name, output in before.items():
        assert after[name] == output, name


def outputs(one: Any) -> dict[str, object]:
    """Return type and shapes of what each module returns."""
    found: dict[str, object] = {}

    def note(name: str, output: Any) -> None:
        tensors = output if isinstance(output, tuple | list) else [output]
        shapes = [tuple(t.shape) for t in tensors if isinstance(t, torch.Tensor)]
        found[name] = type(output), shapes

    for name, module in one.named_modules():
        # An adapter's module is noted after the module inside, by the same name.
        plain = plain_name(name)
        module.register_forward_hook(lambda _m, _i, output, name=plain: note(name, output))
    one.eval()(input_ids=IDS)
    return found


@pytest.mark.slow
def test_weights_alone_can_be_named(tmp_path: Path) -> None:
    options = {"target_modules": [], "target_parameters": ["experts.gate_up_proj"], "r": 4}
    trained = with_lora(made("Qwen3Moe"), Lora.from_dict(options), checkpointing=False)
    names = {f"model.layers.{number}.mlp.experts.gate_up_proj" for number in range(2)}
    assert adapted_weights(trained) == names


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "lora", "message"),
    [
        ("Mixtral", {"target_modules": ["q_proj", "no_such"]}, "'no_such' is not known.*q_proj"),
        ("Mixtral", {"target_modules": ["q_prj"]}, "did you mean 'q_proj'"),
        ("GptOss", {"target_parameters": ["experts.gate_up"]}, "experts.gate_up_proj"),
        ("GptOss", {"dropout": 0.1}, "lora dropout is 0.1, .*experts"),
        ("Mixtral", {"use_dora": True}, "lora use_dora is True"),
        ("Llama4", {"target_modules": ["router"], "dropout": 0.1}, "lora dropout is 0.1, .*router"),
    ],
)
def test_adapters_that_cannot_be_made_are_refused_by_name(
    family: str, lora: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        with_lora(made(family), Lora.from_dict(lora), checkpointing=False)


@pytest.mark.slow
@pytest.mark.parametrize("names", [["q_proj", "lm_head"], ["embed_tokens"]])
@pytest.mark.parametrize("tie", [True, False])
def test_adapters_on_tied_weights_are_refused_and_on_untied_ones_merged(
    names: list[str], tie: bool, tmp_path: Path
) -> None:
    folder = folders.llama(tmp_path / "base", tie=tie)
    job = FineTune(model=str(folder), peft="lora", lora={"target_modules": names})
    loaded = model.load(str(folder), (), seed=0)
    if tie:
        with pytest.raises(ConfigError, match=rf"names '(model\.)?{names[-1]}', .*tied embeddings"):
            adapters.attached(loaded, job)
        return
    trained = adapters.attached(loaded, job).model
    with torch.no_grad():
        for parameter in trained.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape) * 0.3)
    adapters.save(trained, tmp_path / "adapters", base=str(folder), seed=0)
    merged = adapters.merged(tmp_path / "adapters", model.load(str(folder), (), seed=0)).model
    merged.save_pretrained(tmp_path / "merged")
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert torch.allclose(logits(whole), logits(trained), atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["shared", "lm_head", "encoder.embed_tokens"])
def test_adapters_on_the_tied_weights_of_a_t5_are_refused(name: str) -> None:
    from workbench.finetune.data.rows import Example

    loaded = model.load("tiny-t5", [Example(source="How many?", target="Three")], seed=0)
    job = FineTune(model="tiny-t5", peft="lora", lora={"target_modules": ["q", name]})
    with pytest.raises(ConfigError, match=rf"names '{name}', .*tied embeddings"):
        adapters.attached(loaded, job)


@pytest.mark.slow
def test_adapters_of_others_on_a_tied_weight_are_neither_merged_nor_trained(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    folder = folders.llama(tmp_path / "base", tie=True)
    base = AutoModelForCausalLM.from_pretrained(folder)
    config = LoraConfig(target_modules=["lm_head"], init_lora_weights=False)
    get_peft_model(base, config).save_pretrained(str(tmp_path / "theirs"))
    with pytest.raises(ConfigError, match=r"adapt 'lm_head', .*tied embeddings"):
        adapters.merged(tmp_path / "theirs", model.load(str(folder), (), seed=0))
    job = FineTune(model=str(folder), peft="lora", lora={"resume_from": str(tmp_path / "theirs")})
    with pytest.raises(ConfigError, match=r"adapt 'lm_head', .*tied embeddings"):
        adapters.attached(model.load(str(folder), (), seed=0), job)


def without_first(state: dict[str, Any]) -> dict[str, Any]:
    return {name: state[name] for name in sorted(state)[1:]}


def under_other_names(state: dict[str, Any]) -> dict[str, Any]:
    return {f"module.{name}": value for name, value in state.items()}


def with_another(state: dict[str, Any]) -> dict[str, Any]:
    value = next(iter(state.values()))
    extra = "base_model.model.model.layers.0.self_attn.v_proj.lora_A.weight"
    return {**state, extra: value.clone()}


def not_finite(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value * float("nan") for name, value in state.items()}


def unchanged(state: dict[str, Any]) -> dict[str, Any]:
    return state


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "config", "message"),
    [
        (without_first, {}, "the file of weights lacks 1 weight such as .*lora_A"),
        (under_other_names, {}, "the file of weights lacks 8 weights"),
        (with_another, {}, "the file of weights has 1 weight such as .*v_proj"),
        (unchanged, {"r": 4}, r"other sizes than adapter_config\.json.*size mismatch"),
        (unchanged, {"target_modules": ["k_proj"]}, "the file of weights has 4 weights"),
        (unchanged, {"peft_type": 7}, "cannot be read"),
        (not_finite, {}, "lora_A.* holds numbers that are not finite"),
    ],
)
def test_saved_adapters_that_do_not_fit_are_neither_trained_nor_merged(
    change: Any, config: dict[str, object], message: str, tmp_path: Path
) -> None:
    from peft import LoraConfig, get_peft_model

    folder = folders.llama(tmp_path / "base")
    theirs = tmp_path / "theirs"
    base = AutoModelForCausalLM.from_pretrained(folder)
    made = LoraConfig(target_modules=["q_proj", "k_proj"], r=2, init_lora_weights=False)
    get_peft_model(base, made).save_pretrained(str(theirs))
    file = theirs / "adapter_model.safetensors"
    save_file(change(load_file(file)), file, {"format": "pt"})
    settings = theirs / "adapter_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), **config}))
    loaded = model.load(str(folder), (), seed=0)
    with pytest.raises(ConfigError, match=message):
        trained = adapters.with_saved(loaded.model, str(theirs), trains=True)
        check_values(trained, str(theirs))
    if change is not_finite:
        return
    with pytest.raises(ConfigError, match=message):
        adapters.merged(theirs, model.load(str(folder), (), seed=0))


@pytest.mark.slow
def test_experts_that_no_adapter_reaches_are_noted_or_refused() -> None:
    base = made("Dbrx")
    experts = {name for name in matrices(base) if ".experts." in name}
    assert len(experts) == 3
    loaded = model.Loaded(model=base, tokenizer=None, family=CAUSAL)
    trained = adapters.attached(loaded, FineTune(model="dbrx", peft="lora"))
    assert set(left_out(trained.model)) == experts
    assert adapted_weights(trained.model) == matrices(made("Dbrx")) - experts
    (remark,) = trained.remarks
    assert "3 weights of linear layers got no adapter" in remark
    for lora in {"target_parameters": ["mlp.w1"]}, {"target_parameters": ["w2"]}:
        with pytest.raises(ConfigError, match=r"lora names .*experts\.mlp\.w[12], which the model"):
            with_lora(
                made("Dbrx"), Lora.from_dict(lora | {"target_modules": []}), checkpointing=False
            )


@pytest.mark.slow
@pytest.mark.parametrize("option", ["target_modules", "modules_to_save"])
@pytest.mark.parametrize("name", ["lm_head", "model.embed_tokens"])
def test_a_configuration_that_ties_is_enough_to_refuse_at_submit(
    option: str, name: str, tmp_path: Path
) -> None:
    tied = folders.llama(tmp_path / "tied", tie=True)
    lora = {option: [name]}
    job = FineTune(model=str(tied), peft="lora", lora=lora)
    with pytest.raises(ConfigError, match=rf"lora {option} names '{name}'.*tie_word_embeddings"):
        check_on(job, gpus=0)
    for make in (folders.llama, folders.with_another_head):
        check_on(job.replace(model=str(make(tmp_path / make.__name__))), gpus=0)
    check_on(job.replace(lora={}), gpus=0)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Mixtral", "GptOss", "DeepseekV3", "Ernie4_5_Moe", "Dbrx"])
def test_a_mixture_in_4_bits_is_refused_at_submit_by_plan_and_on_the_ranks(
    family: str, tmp_path: Path
) -> None:
    base = made(family)
    base.config.save_pretrained(tmp_path)
    job = FineTune(model=str(tmp_path), peft="qlora")
    for refused in (
        lambda: check_on(job, gpus=1),
        lambda: plan(job, gpu_memory_gib=80),
        lambda: adapters.attached(model.Loaded(model=base, tokenizer=None, family=CAUSAL), job),
    ):
        with pytest.raises(ConfigError, match=r"stacked experts .* Use peft='lora'"):
            refused()


@pytest.mark.slow
def test_a_plan_refuses_adapters_as_submit_and_the_ranks_do(
    tmp_path: Path, forked_replies: Callable[..., Iterator[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workbench.finetune.plan.tracing.replies", forked_replies)
    folder = folders.llama(tmp_path / "tied", tie=True)
    for names, message in (
        (["lm_head"], "tie_word_embeddings"),  # the words of submit
        (["no_such"], "'no_such' is not known"),
    ):
        job = FineTune(model=str(folder), peft="lora", lora={"target_modules": names})
        with pytest.raises(ConfigError, match=message):
            plan(job, techniques=["single"])


def test_no_target_at_all_is_refused() -> None:
    with pytest.raises(ConfigError, match="lora target_modules is empty"):
        FineTune(model="tiny-llama", peft="lora", lora={"target_modules": []})
