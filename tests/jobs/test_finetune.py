"""What `FineTune` and `Script` say of their options."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

from workbench.base.errors import ConfigError
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.job.refusals import check_at_submit
from workbench.finetune.options.adapters import Fsdp, LocalSgd, Lora
from workbench.finetune.options.instead import ELSEWHERE, LORA, OTHERWISE
from workbench.finetune.techniques.registry import TECHNIQUE_NAMES
from workbench.jobs.registry import job_from_dict
from workbench.jobs.script import Script
from workbench.rundir.spec import RunSpec


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
        ({"technique": "zero-1"}, "job technique 'zero-1' is not known: did you mean 'zero1'?"),
        ({"epochs": 0}, "job epochs is 0; it must be a number more than 0"),
        ({"max_steps": 0}, "job max_steps is 0; it must be a whole number, 1 or more, or None"),
        (
            {"gradient_checkpointing": 1},
            "job gradient_checkpointing is 1; it must be true or false",
        ),
        ({"model": ""}, "job model is ''; it must be a hub id, a folder or 'tiny-t5'"),
        ({"report_to": "wandb"}, "job report_to is 'wandb'; it must be a list of wandb, mlflow"),
        (
            {"report_to": ["tensorbord"]},
            r"job report_to is \['tensorbord'\]; it must be a list of wandb, mlflow",
        ),
        (
            {"prompt": "{input}"},
            "job prompt is '{input}'; it must be chat, plain, alpaca, llama2-chat, or a",
        ),
        (
            {"model": "tiny-llama", "system": "Be brief."},
            "system is the system turn of prompt 'chat', for a model with a chat",
        ),
        (
            {"model": "tiny-llama", "prompt": "chat"},
            "prompt is 'chat', and the model 'tiny-llama' has no chat",
        ),
        (
            {"model": "me/m", "prompt": "plain", "chat_template": "x"},
            "chat_template is for prompt 'chat', and prompt",
        ),
        (
            {"chat_template": "x"},
            "chat_template is for causal models, and 'tiny-t5' is an encoder-decoder model",
        ),
        ({"peft": "lora", "lora": {"rank": 4}}, "lora option 'rank' is not known"),
        ({"peft": "lora", "lora": {"r": 0}}, "lora r is 0; it must be a whole number, 1 or more"),
        (
            {"technique": "fsdp", "fsdp": {"layers": "T5Block"}},
            "fsdp layers is 'T5Block'; it must be a list of class",
        ),
        (
            {"local_sgd": {"sync_steps": 5}},
            "local_sgd has options, and the technique is 'zero1'; choose 'local-sgd'",
        ),
        (
            {"technique": "local-sgd", "local_sgd": {"sync_steps": 0}},
            "local_sgd sync_steps is 0; it must be a whole",
        ),
        ({"env": {"1A": "x"}}, "env has the name '1A'"),
        (
            {"lr_scheduler_type": "cosin"},
            "job lr_scheduler_type 'cosin' is not known: did you mean 'cosine'",
        ),
        ({"warmup_steps": 5, "warmup_ratio": 0.1}, "both set the length of the warm-up"),
        (
            {"warmup_ratio": 1.0},
            "job warmup_ratio is 1.0; it must be a number, 0 or more and less than 1",
        ),
        ({"lr_scheduler_type": "constant", "warmup_steps": 5}, "use 'constant_with_warmup'"),
        (
            {"lr_scheduler_type": "warmup_stable_decay"},
            "needs num_decay_steps: training={'lr_scheduler_kwargs'",
        ),
        (
            {"optimizer": "sgd", "adam_beta2": 0.9},
            "adam_beta2 is AdamW's, and the optimizer is 'sgd'",
        ),
        ({"adam_beta1": 1}, "job adam_beta1 is 1; it must be a number, 0 or more and less than 1"),
        ({"max_grad_norm": -1}, "job max_grad_norm is -1; it must be a number, 0 or more"),
        ({"attn_implementation": "flash"}, "job attn_implementation 'flash' is not known"),
        (
            {"checkpoint_layers": ["T5Block"]},
            "checkpoint_layers says which layers are recomputed: give gradient_ch",
        ),
        (
            {"peft": "qlora", "technique": "zero3"},
            "would shard weights of 4 bits; use 'fsdp', which can, 'zero2'",
        ),
        (
            {"technique": "fsdp", "torch_compile": True},
            "torch_compile with technique 'fsdp' is not offered",
        ),
        (
            {"device_map": "auto"},
            "technique 'zero1' takes a process for each; use 'single', or 'fsdp' without device",
        ),
        ({"device_map": "balanced"}, "job device_map 'balanced' is not known"),
        ({"technique": "single", "max_memory": {0: 1}}, "give device_map='auto' too"),
        (
            {"max_memory": {0: 20, "disk": 9}},
            "max_memory names 'disk': weights that accelerate keeps there get no",
        ),
        (
            {"max_memory": {0: "20 GiB each"}},
            "job max_memory is a dict; it must be an object of GPU numbers and GiB",
        ),
        (
            {"max_memory": {"gpu": 1}},
            "it must be an object of GPU numbers and GiB, such as {0: 20, 1: '20GiB'}",
        ),
        (
            {"training": {"neftune_noise_alfa": 5}},
            "'neftune_noise_alfa' is not known: did you mean 'neftune_noise_alp",
        ),
        (
            {"training": {"output_dir": "x"}},
            "training 'output_dir' is not for a job to set: what a run writes",
        ),
        ({"num_train_epochs": 3}, "job option 'num_train_epochs' is not known: use epochs$"),
        ({"bf16": True}, "job option 'bf16' is not known: use precision='bf16'$"),
        ({"fp16": True}, "use precision='fp16'$"),
        (
            {"batch_size": 8},
            "use per_device_train_batch_size, the rows of one rank in one forward pass",
        ),
        ({"per_device_batch_size": 8}, "use per_device_train_batch_size"),
        (
            {"output_dir": "out"},
            r"what a run writes is in its run directory; submit\(job, path=…\) chooses it$",
        ),
        ({"logging_dir": "out"}, "TensorBoard has the metrics of every run"),
        ({"trust_remote_code": True}, "a model's own Python code is never run"),
        ({"resume_from_checkpoint": "x"}, "use resume with the run directory to continue from$"),
        ({"save_strategy": "no"}, "use save_steps and `checkpoints`"),
        ({"lr": 1e-3}, "use learning_rate$"),
        (
            {"max_length": 512},
            "use max_source_length for what is asked and max_target_length for the answer",
        ),
        ({"max_seq_length": 512}, "use max_source_length"),
        ({"lora_r": 8}, "adapters are chosen by peft='lora', with lora={'r': …"),
        ({"revision": "v2"}, r"a model has no revision.*snapshot_download\(…, revision=…\)"),
        ({"neftune_noise_alpha": 5}, "give it as training={'neftune_noise_alpha': …}$"),
        (
            {"training": {"lr": 1e-3}},
            "training 'lr' is no argument of transformers: use learning_rate$",
        ),
        ({"report_to": ["tensorboard"]}, "TensorBoard has the metrics of every run; leave it out$"),
        (
            {"report_to": "none"},
            "job report_to 'none' is not offered: leave it out: no tracker is the default$",
        ),
        (
            {"report_to": ["trackio"]},
            "wandb and mlflow are offered; TensorBoard has the metrics anyway, and a Script",
        ),
        (
            {"peft": "lora", "lora": {"modules_to_save": ["lm_head"]}},
            "'modules_to_save' is not known: a run trains adap",
        ),
        (
            {"peft": "lora", "lora": {"lora_alpha": 4}},
            "lora option 'lora_alpha' is not known: use alpha$",
        ),
        (
            {"peft": "dora"},
            "job peft 'dora' is not offered: use 'lora' with lora={'use_dora': True}$",
        ),
        (
            {"attn_implementation": "flash_attention_3"},
            "is not offered: use 'sdpa', or 'flash_attention_2' where the",
        ),
        (
            {"attn_implementation": "kernels-community/flash-attn"},
            "is not offered: use 'sdpa', or 'flash_attention_2'",
        ),
        ({"precision": "bfloat16"}, "job precision 'bfloat16' is not offered: use 'bf16'$"),
        ({"technique": "dpo"}, "FineTune learns from given answers; a Script with TRL can do it$"),
        (
            {"model": "s3://bucket/m"},
            "model 's3://bucket/m' is an address, and no pod fetches a model from an address: down",
        ),
        (
            {"model": "https://huggingface.co/me/m"},
            "model 'https://huggingface.co/me/m' is an address; give the hub id",
        ),
        (
            {"training": {"seed": 1}},
            "training 'seed' is an option of the job itself: give seed=… beside",
        ),
    ],
)
def test_a_refusal_says_what_is_allowed(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FineTune(**options)  # type: ignore[arg-type]


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
        match="job of kind 'script' needs the option 'path': Path of the script, a Python file",
    ):
        job_from_dict({"kind": "script"})
    with pytest.raises(
        ConfigError, match="job args is '-v'; it must be a list of strings, one an argument"
    ):
        Script(path="a.py", args="-v")
    with pytest.raises(ConfigError, match="job kind 'scrip' is not known: did you mean 'script'"):
        job_from_dict({"kind": "scrip"})


def test_values_of_an_enum_are_kept_as_text() -> None:
    job = FineTune(technique="zero2", report_to=["mlflow"])
    assert type(job.technique) is str and job == FineTune(technique="zero2", report_to=("mlflow",))
    assert job.to_dict()["report_to"] == ["mlflow"] and job_from_dict(job.to_dict()) == job


def test_paths_may_be_paths() -> None:
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
    with pytest.raises(ConfigError, match="must be an object") as refused:
        RunSpec.from_dict(spec)
    assert "canary" not in str(refused.value)


def test_the_memory_of_each_gpu_is_kept_in_gib_and_is_of_gpus_that_there_are() -> None:
    sizes = {0: "20GiB", 1: 20, 2: "40960MB"}
    job = FineTune(technique="single", device_map="auto", max_memory=sizes)
    assert job.max_memory == {"0": 20.0, "1": 20, "2": pytest.approx(38.147, abs=1e-3)}
    assert job_from_dict(job.to_dict()) == job
    check_at_submit(job, gpus=3)
    with pytest.raises(
        ConfigError, match="max_memory names GPU 2, and a pod has 2, numbered from 0"
    ):
        check_at_submit(job, gpus=2)


def test_a_job_is_not_changed_in_place() -> None:
    with pytest.raises(AttributeError, match="replace") as refused:
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
    assert options["technique"].choices == TECHNIQUE_NAMES
    assert (options["max_source_length"].unit, options["save_steps"].unit) == ("tokens", "steps")
    assert (options["dataset"].section, options["lora"].section) == ("Model and data", "Technique")


def test_help_of_the_command_line_needs_no_record() -> None:
    code = "import sys, workbench.cli; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pydantic" not in run.stdout.split()


def test_a_model_with_a_chat_template_of_its_own_is_known_by_its_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    model = str(tmp_path)
    job = FineTune(model=model, prompt="chat", system="Be brief.")
    with pytest.raises(ConfigError, match="has no chat template; set chat_template"):
        check_at_submit(job, gpus=0)
    check_at_submit(job.replace(chat_template="{{ messages }}"), gpus=0)
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    check_at_submit(job, gpus=0)
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    check_at_submit(job, gpus=0)
