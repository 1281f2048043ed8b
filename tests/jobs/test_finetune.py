"""What `FineTune` and `Script` say of their options."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.finetune.submit import folders
from tests.support.refusals import check_on
from tests.support.sentences import sentence
from workbench.base.errors import ConfigError
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.options.adapters import Fsdp, LocalSgd, Lora
from workbench.finetune.options.renamed_options import ELSEWHERE, LORA, OTHERWISE
from workbench.finetune.techniques.registry import TECHNIQUES
from workbench.jobs.registry import job_from_dict
from workbench.jobs.script import Script
from workbench.rundir.make.prepare import prepare_run
from workbench.rundir.spec import ClusterSpec, RunSpec


def test_a_misspelt_option_is_refused_alike_in_python_and_in_json() -> None:
    with pytest.raises(ConfigError) as in_python:
        FineTune(modle="x")  # type: ignore[call-arg]
    with pytest.raises(ConfigError) as in_json:
        job_from_dict({"modle": "x"})
    assert str(in_python.value) == str(in_json.value)
    assert str(in_python.value).startswith(
        "job option 'modle' is not known: did you mean 'model'? Allowed: model, "
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"technique": "zero-1"},
            sentence("is not known", "job technique 'zero-1'", "zero1")
            + sentence(": did you mean '{}'?"),
        ),
        (
            {"epochs": 0},
            sentence("it must be", "job epochs is 0", "a number more than 0"),
        ),
        (
            {"max_steps": 0},
            sentence("it must be", "job max_steps is 0", "or None")
            + sentence("a whole number, 1 or more"),
        ),
        (
            {"gradient_checkpointing": 1},
            sentence("true or false", "job gradient_checkpointing is 1") + sentence("it must be"),
        ),
        (
            {"model": ""},
            sentence("a hub id, a folder or 'tiny-t5'", "job model is ''") + sentence("it must be"),
        ),
        (
            {"report_to": "wandb"},
            sentence("it must be", "job report_to is 'wandb'", "trackio, wandb"),
        ),
        (
            {"report_to": ["tensorbord"]},
            sentence(
                "it must be",
                "job report_to is ['tensorbord']",
                "a list of azure_ml, clearml",
            ),
        ),
        (
            {"prompt": "{input}"},
            sentence(
                "it must be",
                "job prompt is '{input}'",
                "chat, plain, alpaca, llama2-chat, or a",
            ),
        ),
        (
            {"model": "tiny-llama", "system": "Be brief."},
            sentence("or the system block of prompt 'llama2-chat"),
        ),
        (
            {"model": "tiny-llama", "prompt": "chat"},
            sentence("or use a model with a chat template", "tiny-llama")
            + sentence("prompt is 'chat', and"),
        ),
        (
            {"model": "me/m", "prompt": "plain", "chat_template": "x"},
            sentence("chat_template is for prompt 'chat"),
        ),
        (
            {"chat_template": "x"},
            sentence("is for causal models", "chat_template", "tiny-t5"),
        ),
        (
            {"peft": "lora", "lora": {"rank": 4}},
            sentence("option {} is not known", "lora", "rank"),
        ),
        (
            {"peft": "lora", "lora": {"r": 0}},
            sentence("it must be", "lora r is 0") + sentence("a whole number, 1 or more"),
        ),
        (
            {"technique": "fsdp", "fsdp": {"layers": "T5Block"}},
            sentence("a list of class names", "fsdp layers is 'T5Block'") + sentence("it must be"),
        ),
        (
            {"local_sgd": {"sync_steps": 5}},
            sentence(
                "and the technique is",
                "local_sgd",
                "zero1",
                "local-sgd",
            ),
        ),
        (
            {"technique": "local-sgd", "local_sgd": {"sync_steps": 0}},
            sentence("it must be", "local_sgd sync_steps is 0", "a whole"),
        ),
        (
            {"env": {"1A": "x"}},
            sentence(
                "has the name {}; a name is letters, digits and _, no digit first", "env", "1A"
            ),
        ),
        (
            {"lr_scheduler_type": "cosin"},
            sentence("is not known", "job lr_scheduler_type 'cosin'", "cosine")
            + sentence(": did you mean '{}'?"),
        ),
        (
            {"warmup_steps": 5, "warmup_ratio": 0.1},
            sentence("both set the length of the warm-up"),
        ),
        (
            {"warmup_ratio": 1.0},
            sentence("and less than", "job warmup_ratio is 1.0", 1)
            + sentence("it must be")
            + sentence("a number, 0 or more"),
        ),
        (
            {"lr_scheduler_type": "constant", "warmup_steps": 5},
            sentence("lr_scheduler_type 'constant' is at its peak from the first step"),
        ),
        (
            {"lr_scheduler_type": "warmup_stable_decay"},
            sentence("lr_scheduler_type {} needs", "num_decay_steps"),
        ),
        (
            {"optimizer": "sgd", "adam_beta2": 0.9},
            sentence("or choose 'adamw", "adam_beta2"),
        ),
        (
            {"adam_beta1": 1},
            sentence("and less than", "job adam_beta1 is 1", 1)
            + sentence("it must be")
            + sentence("a number, 0 or more"),
        ),
        (
            {"max_grad_norm": -1},
            sentence("it must be", "job max_grad_norm is -1") + sentence("a number, 0 or more"),
        ),
        (
            {"attn_implementation": "flash"},
            sentence("is not known", "job attn_implementation 'flash'"),
        ),
        (
            {"checkpoint_layers": ["T5Block"]},
            sentence("checkpoint_layers says which layers are recomputed"),
        ),
        (
            {"peft": "qlora", "technique": "zero3"},
            sentence("zero2' or 'ddp' (4-bit weights are small"),
        ),
        (
            {"technique": "fsdp", "fsdp": {"reduce": "step"}},
            sentence("fsdp reduce 'step' is for several micro-batches", "drop one"),
        ),
        (
            {"device_map": "auto"},
            sentence("device_map spreads layers over the GPUs that one process sees", "zero1"),
        ),
        (
            {"device_map": "balanced"},
            sentence("is not known", "job device_map 'balanced'"),
        ),
        (
            {"technique": "single", "max_memory": {0: 1}},
            sentence("max_memory limits the weights that device_map puts on a GPU"),
        ),
        (
            {"max_memory": {0: 20, "disk": 9}},
            sentence("weights that accelerate keeps there get no gradients", "disk"),
        ),
        (
            {"max_memory": {0: "20 GiB each"}},
            sentence("is {}; it must be an object", "job max_memory", "a dict")
            + sentence("an object of GPU numbers and GiB, such as"),
        ),
        (
            {"max_memory": {"gpu": 1}},
            sentence("an object of GPU numbers and GiB, such as", "{0: 20, 1: '20GiB'}")
            + sentence("is {}; it must be an object"),
        ),
        (
            {"training": {"neftune_noise_alfa": 5}},
            sentence("is not known", "neftune_noise_alfa", "neftune_noise_alpha")
            + sentence(": did you mean '{}'?"),
        ),
        (
            {"training": {"output_dir": "x"}},
            sentence("training {} is not for a job to set", "output_dir")
            + sentence("what a run writes is in its run directory"),
        ),
        (
            {"training": {"torch_compile_mode": "max-autotune"}},
            sentence("training {} does nothing without torch_compile", "torch_compile_mode"),
        ),
        (
            {"num_train_epochs": 3},
            sentence("option {} is not known", "job", "num_train_epochs", "use epochs"),
        ),
        (
            {"bf16": True},
            sentence("option {} is not known", "job", "bf16") + sentence("use precision='bf16'"),
        ),
        ({"fp16": True}, sentence("use precision='fp16'")),
        (
            {"batch_size": 8},
            sentence("the rows of one rank in one forward pass"),
        ),
        ({"per_device_batch_size": 8}, sentence("the rows of one rank in one forward pass")),
        (
            {"output_dir": "out"},
            sentence("what a run writes is in its run directory"),
        ),
        (
            {"logging_dir": "out"},
            sentence("TensorBoard has the metrics of every run: `run.tensorboard()`"),
        ),
        ({"trust_remote_code": True}, sentence("take a model that transformers has itself")),
        (
            {"resume_from_checkpoint": "x"},
            sentence("use resume with the run directory to continue from"),
        ),
        ({"save_strategy": "no"}, sentence("which are alike under every technique")),
        ({"lr": 1e-3}, sentence("use learning_rate")),
        (
            {"max_length": 512},
            sentence("a text has both together"),
        ),
        ({"max_seq_length": 512}, sentence("a text has both together")),
        ({"lora_r": 8}, sentence("adapters are chosen by peft='lora")),
        ({"revision": "v2"}, "use model_revision"),
        (
            {"neftune_noise_alpha": 5},
            sentence("give it as training={{}: …}", "neftune_noise_alpha"),
        ),
        (
            {"training": {"lr": 1e-3}},
            sentence("training {} is no argument of transformers", "lr")
            + sentence("use learning_rate"),
        ),
        (
            {"report_to": ["tensorboard"]},
            sentence("TensorBoard has the metrics of every run; leave it out"),
        ),
        (
            {"report_to": "none"},
            sentence("leave it out: no tracker is the default", "job report_to 'none'")
            + sentence("is not offered"),
        ),
        ({"optimizer": "lion_32bit"}, "use 'lion'"),
        ({"optimizer": "paged_lion_8bit"}, "use 'lion', whose one state"),
        (
            {"optimizer": "lion", "adam_beta2": 0.9},
            "drop adam_beta2, or use optimizer_options, or choose 'adamw'",
        ),
        (
            {"optimizer": "lion", "optimizer_options": {"momentum": 0.9}},
            "optimizer_options option 'momentum' is not known",
        ),
        (
            {"optimizer": "muon", "optimizer_options": {"adjust_lr_fn": "none"}},
            "optimizer_options adjust_lr_fn 'none'",
        ),
        (
            {"optimizer_options": {"momentum": 0.9}},
            "for lion and muon, and the optimizer is 'adamw'; drop optimizer_options",
        ),
        (
            {"optimizer": "muon", "peft": "lora"},
            "trains two factors of the update; use 'adamw' or 'lion', or peft 'none'",
        ),
        (
            {"optimizer": "muon", "model": "tiny-llama", "tensor_parallel": 2},
            "use 'adamw' or 'lion', or drop tensor_parallel",
        ),
        *(
            ({"optimizer": "muon", "technique": name}, f"{name}.*; use 'single', 'ddp', 'zero1'")
            for name in ("zero3", "zero3-offload", "fsdp", "local-sgd")
        ),
        (
            {"report_to": ["aim"]},
            "transformers reports to no such tracker",
        ),
        (
            {"modules_to_save": ["lm_head"]},
            r"use peft='lora', with lora=\{'modules_to_save': \[…\]\}",
        ),
        (
            {"peft": "lora", "lora": {"lora_alpha": 4}},
            sentence("option {} is not known", "lora", "lora_alpha", "use alpha"),
        ),
        (
            {"peft": "dora"},
            sentence("use 'lora' with lora={'use_dora': True}", "job peft 'dora'")
            + sentence("is not offered"),
        ),
        (
            {"attn_implementation": "flash_attention_4"},
            sentence("or 'flash_attention_2' where the pods have flash-attn")
            + sentence("is not offered"),
        ),
        (
            {"attn_implementation": "kernels-community/flash-attn"},
            sentence("or 'flash_attention_2' where the pods have flash-attn")
            + sentence("is not offered"),
        ),
        ({"precision": "fp8"}, sentence("is not offered", "job precision 'fp8'", "float8=True")),
        ({"fp8": True}, sentence("is not known", "job option 'fp8'", "float8=True")),
        (
            {"precision": "bfloat16"},
            sentence("is not offered", "job precision 'bfloat16'", "use 'bf16'"),
        ),
        ({"technique": "dpo"}, "use method='dpo'"),
        (
            {"model": "s3://bucket/m"},
            sentence("download the model to this machine and give its folder", "s3://bucket/m"),
        ),
        (
            {"model": "https://huggingface.co/me/m"},
            sentence("model {} is an address; give the hub id", "https://huggingface.co/me/m"),
        ),
        (
            {"training": {"seed": 1}},
            sentence("is an option of the job itself", "seed"),
        ),
    ],
)
def test_a_refusal_says_what_is_allowed(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        FineTune(**options)  # type: ignore[arg-type]
    error = refused.value
    assert error.option in options
    hidden = error.option == "env"  # may hold secrets
    assert error.value == (None if hidden else options[error.option])


def test_a_refusal_at_submit_names_its_option(tmp_path: Path) -> None:
    dataset = {"kind": "files", "train": str(tmp_path / "gone.jsonl")}
    spec = RunSpec(job=FineTune(dataset=dataset), cluster=ClusterSpec())
    with pytest.raises(ConfigError) as refused:
        prepare_run(spec, root=tmp_path / "run")
    assert (refused.value.option, refused.value.value) == ("dataset", dataset)


def test_a_hint_is_never_for_an_option_that_there_is() -> None:
    assert not {*OTHERWISE, *ELSEWHERE} & set(FineTune.model_fields)
    assert not set(OTHERWISE) & set(ELSEWHERE)
    assert not set(LORA) & set(Lora.model_fields)


def test_every_option_that_a_hint_names_exists() -> None:
    hints = {*OTHERWISE.values(), *ELSEWHERE.values()}
    named = {
        name
        for hint in hints
        for name in re.findall(r"^use (\w+)(?:$|=| with | for |,| and | or )", hint)
    }
    assert len(named) > 20
    # These hints begin with a word that is no option.
    assert named - set(FineTune.model_fields) <= {"activation_checkpointing_kwargs", "technique"}
    assert {name for hint in LORA.values() for name in re.findall(r"^use (\w+)$", hint)} <= set(
        Lora.model_fields
    )


def test_a_script_needs_its_path_and_a_list_of_strings() -> None:
    with pytest.raises(
        ConfigError,
        match=sentence(
            "needs the option",
            "job of kind 'script'",
            "path",
            "Path of the script, a Python file",
        ),
    ):
        job_from_dict({"kind": "script"})
    with pytest.raises(
        ConfigError,
        match=sentence("a list of strings, one an argument", "job args is '-v'")
        + sentence("it must be"),
    ):
        Script(path="a.py", args="-v")
    with pytest.raises(
        ConfigError,
        match=sentence("is not known", "job kind 'scrip'", "script")
        + sentence(": did you mean '{}'?"),
    ):
        job_from_dict({"kind": "scrip"})


def test_values_of_an_enum_are_kept_as_text() -> None:
    job = FineTune(technique="zero2", report_to=["mlflow"])
    assert type(job.technique) is str and job == FineTune(technique="zero2", report_to=("mlflow",))
    assert job.to_dict()["report_to"] == ["mlflow"] and job_from_dict(job.to_dict()) == job


def test_paths_may_be_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "a").mkdir(parents=True)
    (tmp_path / "zero1.json").write_text("{}")
    job = FineTune(resume=Path("runs/a"), dataset=Path("rows.jsonl"), deepspeed=Path("zero1.json"))
    assert (job.resume, job.dataset, job.deepspeed) == ("runs/a", "rows.jsonl", "zero1.json")


@pytest.mark.parametrize(
    "spec",
    [
        [{"job": {"env": {"TOKEN": "canary"}}}],
        {"cluster": {"pods": [{"env": {"TOKEN": "canary"}}]}, "job": {}},
        {"cluster": {}, "job": [{"env": {"TOKEN": "canary"}}]},
    ],
)
def test_a_refused_spec_shows_no_secret(spec: object) -> None:
    with pytest.raises(ConfigError, match=sentence("is {}; it must be an object")) as refused:
        RunSpec.from_dict(spec)
    assert "canary" not in str(refused.value)


@pytest.mark.parametrize("technique", ["zero3", "zero3-offload"])
def test_adapters_of_single_tokens_under_zero3_need_gpus(technique: str, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"trainable_token_indices": [1, 2]}')
    lora = {"resume_from": str(tmp_path)}
    job = FineTune(model="tiny-llama", technique=technique, peft="lora", lora=lora)
    with pytest.raises(ConfigError, match=sentence("peft gathers the embeddings on a GPU")):
        check_on(job, gpus=0)
    check_on(job, gpus=1)
    check_on(job.replace(technique="zero2"), gpus=0)


def test_the_memory_of_each_gpu_is_kept_in_gib_and_is_of_gpus_that_there_are() -> None:
    sizes = {0: "20GiB", 1: 20, 2: "40960MB"}
    job = FineTune(technique="single", device_map="auto", max_memory=sizes)
    assert job.max_memory == {"0": 20.0, "1": 20, "2": pytest.approx(38.147, abs=1e-3)}
    assert job_from_dict(job.to_dict()) == job
    check_on(job, gpus=3)
    with pytest.raises(ConfigError, match=sentence("max_memory names GPU", 2)):
        check_on(job, gpus=2)


def test_a_job_is_not_changed_in_place() -> None:
    with pytest.raises(
        AttributeError, match=sentence(".{} cannot be assigned to; {} is changed by .replace({}=…)")
    ) as refused:
        FineTune().env = {"TOKEN": "canary"}  # type: ignore[misc]
    assert "canary" not in str(refused.value)


def test_what_was_left_open_stays_so_in_a_changed_job() -> None:
    assert FineTune(seed=1).replace(model="tiny-llama").model_fields_set == {"seed", "model"}


def test_the_global_batch() -> None:
    assert (
        FineTune(per_device_train_batch_size=4, gradient_accumulation_steps=3).global_batch(2) == 24
    )


@pytest.mark.parametrize("record", [FineTune, Script, Lora, Fsdp, LocalSgd])
def test_help_explains_every_option(
    record: type[FineTune | Script | Lora | Fsdp | LocalSgd],
) -> None:
    text = inspect.getdoc(record) or ""
    for option in record.options():
        assert option.meaning and f"\n    {option.name}: " in text
        assert option.name in inspect.signature(record).parameters
    assert set(record.sections) <= set(record.model_fields)


def test_the_form_and_the_pages_have_choices_units_and_sections() -> None:
    options = {option.name: option for option in FineTune.options()}
    assert options["technique"].choices == tuple(each.name for each in TECHNIQUES)
    assert (options["max_source_length"].unit, options["save_steps"].unit) == ("tokens", "steps")
    assert (options["dataset"].section, options["lora"].section) == ("Model and data", "Technique")


def test_help_of_the_command_line_needs_no_record() -> None:
    code = "import sys, workbench.cli; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pydantic" not in run.stdout.split()


def test_a_model_with_a_chat_template_of_its_own_is_known_by_its_folder(tmp_path: Path) -> None:
    job = FineTune(model=str(folders.model(tmp_path)), prompt="chat", system="Be brief.")
    with pytest.raises(ConfigError, match=sentence("or use a model with a chat template")):
        check_on(job, gpus=0)
    check_on(job.replace(chat_template="{{ messages }}"), gpus=0)
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    check_on(job, gpus=0)
    (tmp_path / "chat_template.jinja").unlink()
    folders.change(tmp_path / "tokenizer_config.json", chat_template="{{ messages }}")
    check_on(job, gpus=0)
