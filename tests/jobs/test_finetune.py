"""What `FineTune` and `Script` say of their options."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.sentences import sentence
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
        (
            {"technique": "zero-1"},
            sentence("base.errors.one_of.known-allowed", "job technique 'zero-1'", "zero1")
            + sentence("base.errors.one_of.did-you-mean"),
        ),
        (
            {"epochs": 0},
            sentence("base.record._worded.must", "job epochs is 0", "a number more than 0"),
        ),
        (
            {"max_steps": 0},
            sentence("base.record._worded.must", "job max_steps is 0", "or None")
            + sentence("finetune.kinds.whole-number-more-2"),
        ),
        (
            {"gradient_checkpointing": 1},
            sentence("base.record.true-false", "job gradient_checkpointing is 1")
            + sentence("base.record._worded.must"),
        ),
        (
            {"model": ""},
            sentence("finetune.options.FineTuneOptions.hub-id-folder", "job model is ''")
            + sentence("base.record._worded.must"),
        ),
        (
            {"report_to": "wandb"},
            sentence("base.record._worded.must", "job report_to is 'wandb'", "trackio, wandb"),
        ),
        (
            {"report_to": ["tensorbord"]},
            sentence(
                "base.record._worded.must",
                "job report_to is ['tensorbord']",
                "a list of azure_ml, clearml",
            ),
        ),
        (
            {"prompt": "{input}"},
            sentence(
                "base.record._worded.must",
                "job prompt is '{input}'",
                "chat, plain, alpaca, llama2-chat, or a",
            ),
        ),
        (
            {"model": "tiny-llama", "system": "Be brief."},
            sentence("finetune.refusals._check_prompt.system-system-turn"),
        ),
        (
            {"model": "tiny-llama", "prompt": "chat"},
            sentence("finetune.refusals.no_template.model-chat-template", "tiny-llama")
            + sentence("finetune.refusals._check_prompt.prompt-chat"),
        ),
        (
            {"model": "me/m", "prompt": "plain", "chat_template": "x"},
            sentence("finetune.refusals._check_prompt.chat-template-prompt"),
        ),
        (
            {"chat_template": "x"},
            sentence(
                "finetune.refusals.check_family.causal-models-encoder", "chat_template", "tiny-t5"
            ),
        ),
        (
            {"peft": "lora", "lora": {"rank": 4}},
            sentence("base.record._worded.option-known", "lora", "rank"),
        ),
        (
            {"peft": "lora", "lora": {"r": 0}},
            sentence("base.record._worded.must", "lora r is 0")
            + sentence("finetune.kinds.whole-number-more-2"),
        ),
        (
            {"technique": "fsdp", "fsdp": {"layers": "T5Block"}},
            sentence(
                "finetune.options.FineTuneOptions.list-class-names", "fsdp layers is 'T5Block'"
            )
            + sentence("base.record._worded.must"),
        ),
        (
            {"local_sgd": {"sync_steps": 5}},
            sentence(
                "finetune.refusals._check_technique.options-technique-choose",
                "local_sgd",
                "zero1",
                "local-sgd",
            ),
        ),
        (
            {"technique": "local-sgd", "local_sgd": {"sync_steps": 0}},
            sentence("base.record._worded.must", "local_sgd sync_steps is 0", "a whole"),
        ),
        ({"env": {"1A": "x"}}, sentence("base.types._environment.name-name-letters", "env", "1A")),
        (
            {"lr_scheduler_type": "cosin"},
            sentence("base.errors.one_of.known-allowed", "job lr_scheduler_type 'cosin'", "cosine")
            + sentence("base.errors.one_of.did-you-mean"),
        ),
        (
            {"warmup_steps": 5, "warmup_ratio": 0.1},
            sentence("finetune.refusals._check_schedule.warmup-steps-warmup"),
        ),
        (
            {"warmup_ratio": 1.0},
            sentence("base.record.less-than", "job warmup_ratio is 1.0", 1)
            + sentence("base.record._worded.must")
            + sentence("finetune.kinds.number-more"),
        ),
        (
            {"lr_scheduler_type": "constant", "warmup_steps": 5},
            sentence("finetune.refusals._check_schedule.lr-scheduler-type-constant"),
        ),
        (
            {"lr_scheduler_type": "warmup_stable_decay"},
            sentence(
                "finetune.refusals._check_schedule.lr-scheduler-type-needs", "num_decay_steps"
            ),
        ),
        (
            {"optimizer": "sgd", "adam_beta2": 0.9},
            sentence("finetune.refusals._check_optimizer.adamws-optimizer-sgd", "adam_beta2"),
        ),
        (
            {"adam_beta1": 1},
            sentence("base.record.less-than", "job adam_beta1 is 1", 1)
            + sentence("base.record._worded.must")
            + sentence("finetune.kinds.number-more"),
        ),
        (
            {"max_grad_norm": -1},
            sentence("base.record._worded.must", "job max_grad_norm is -1")
            + sentence("finetune.kinds.number-more"),
        ),
        (
            {"attn_implementation": "flash"},
            sentence("base.errors.one_of.known-allowed", "job attn_implementation 'flash'"),
        ),
        (
            {"checkpoint_layers": ["T5Block"]},
            sentence("finetune.refusals.check_together.checkpoint-layers-says"),
        ),
        (
            {"peft": "qlora", "technique": "zero3"},
            sentence("finetune.zero3.refuse.peft-qlora-technique"),
        ),
        (
            {"technique": "fsdp", "torch_compile": True},
            sentence("finetune.fsdp.refuse.torch-compile-technique"),
        ),
        (
            {"device_map": "auto"},
            sentence("finetune.technique.refuse.device-map-spreads", "zero1"),
        ),
        (
            {"device_map": "balanced"},
            sentence("base.errors.one_of.known-allowed", "job device_map 'balanced'"),
        ),
        (
            {"technique": "single", "max_memory": {0: 1}},
            sentence("finetune.refusals._check_device_map.max-memory-says"),
        ),
        (
            {"max_memory": {0: 20, "disk": 9}},
            sentence("finetune.adapters._by_gpu.max-memory-names", "disk"),
        ),
        (
            {"max_memory": {0: "20 GiB each"}},
            sentence("base.record.from_dict.must-object", "job max_memory", "a dict")
            + sentence("finetune.adapters.object-gpu-numbers"),
        ),
        (
            {"max_memory": {"gpu": 1}},
            sentence("finetune.adapters.object-gpu-numbers", "{0: 20, 1: '20GiB'}")
            + sentence("base.record.from_dict.must-object"),
        ),
        (
            {"training": {"neftune_noise_alfa": 5}},
            sentence(
                "base.errors.one_of.known-allowed", "neftune_noise_alfa", "neftune_noise_alpha"
            )
            + sentence("base.errors.one_of.did-you-mean"),
        ),
        (
            {"training": {"output_dir": "x"}},
            sentence("finetune.training.check_training.training-job-set", "output_dir")
            + sentence("finetune.instead.what-run-writes"),
        ),
        (
            {"num_train_epochs": 3},
            sentence("base.record._worded.option-known", "job", "num_train_epochs", "use epochs"),
        ),
        (
            {"bf16": True},
            sentence("base.record._worded.option-known", "job", "bf16")
            + sentence("finetune.instead.use-precision-bf"),
        ),
        ({"fp16": True}, sentence("finetune.instead.use-precision-fp")),
        (
            {"batch_size": 8},
            sentence("finetune.instead.use-per-device-train"),
        ),
        ({"per_device_batch_size": 8}, sentence("finetune.instead.use-per-device-train")),
        (
            {"output_dir": "out"},
            sentence("finetune.instead.what-run-writes"),
        ),
        ({"logging_dir": "out"}, sentence("finetune.instead.tensorboard-metrics-every-run-run")),
        ({"trust_remote_code": True}, sentence("finetune.instead.models-own-python")),
        ({"resume_from_checkpoint": "x"}, sentence("finetune.instead.use-resume-run")),
        ({"save_strategy": "no"}, sentence("finetune.instead.use-save-steps-checkpoints-alike")),
        ({"lr": 1e-3}, sentence("finetune.instead.use-learning-rate")),
        (
            {"max_length": 512},
            sentence("finetune.instead.use-max-source-length-what-2"),
        ),
        ({"max_seq_length": 512}, sentence("finetune.instead.use-max-source-length-what-2")),
        ({"lora_r": 8}, sentence("finetune.instead.adapters-chosen-peft")),
        ({"revision": "v2"}, "use model_revision"),
        (
            {"neftune_noise_alpha": 5},
            sentence("finetune.training.option_hint.training", "neftune_noise_alpha"),
        ),
        (
            {"training": {"lr": 1e-3}},
            sentence("finetune.training.check_training.training-argument-transformers", "lr")
            + sentence("finetune.instead.use-learning-rate"),
        ),
        (
            {"report_to": ["tensorboard"]},
            sentence("finetune.instead.tensorboard-metrics-every-run-leave"),
        ),
        (
            {"report_to": "none"},
            sentence("finetune.instead.leave-out-tracker", "job report_to 'none'")
            + sentence("base.record._worded.offered"),
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
            sentence("base.record._worded.option-known", "lora", "lora_alpha", "use alpha"),
        ),
        (
            {"peft": "dora"},
            sentence("finetune.instead.use-lora-lora-use-dora", "job peft 'dora'")
            + sentence("base.record._worded.offered"),
        ),
        (
            {"attn_implementation": "flash_attention_3"},
            sentence("finetune.instead.use-sdpa-flash") + sentence("base.record._worded.offered"),
        ),
        (
            {"attn_implementation": "kernels-community/flash-attn"},
            sentence("finetune.instead.use-sdpa-flash") + sentence("base.record._worded.offered"),
        ),
        (
            {"precision": "bfloat16"},
            sentence("base.record._worded.offered", "job precision 'bfloat16'", "use 'bf16'"),
        ),
        ({"technique": "dpo"}, "use method='dpo'"),
        (
            {"model": "s3://bucket/m"},
            sentence("finetune.models.check_address.model-address-pod", "s3://bucket/m"),
        ),
        (
            {"model": "https://huggingface.co/me/m"},
            sentence(
                "finetune.models.check_address.model-address-hub", "https://huggingface.co/me/m"
            ),
        ),
        (
            {"training": {"seed": 1}},
            sentence("finetune.training.check_training.training-option-job", "seed"),
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
        match=sentence(
            "base.record._worded.needs-option",
            "job of kind 'script'",
            "path",
            "Path of the script, a Python file",
        ),
    ):
        job_from_dict({"kind": "script"})
    with pytest.raises(
        ConfigError,
        match=sentence("jobs.script.Script.list-strings-argument", "job args is '-v'")
        + sentence("base.record._worded.must"),
    ):
        Script(path="a.py", args="-v")
    with pytest.raises(
        ConfigError,
        match=sentence("base.errors.one_of.known-allowed", "job kind 'scrip'", "script")
        + sentence("base.errors.one_of.did-you-mean"),
    ):
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
    with pytest.raises(ConfigError, match=sentence("base.record.from_dict.must-object")) as refused:
        RunSpec.from_dict(spec)
    assert "canary" not in str(refused.value)


def test_the_memory_of_each_gpu_is_kept_in_gib_and_is_of_gpus_that_there_are() -> None:
    sizes = {0: "20GiB", 1: 20, 2: "40960MB"}
    job = FineTune(technique="single", device_map="auto", max_memory=sizes)
    assert job.max_memory == {"0": 20.0, "1": 20, "2": pytest.approx(38.147, abs=1e-3)}
    assert job_from_dict(job.to_dict()) == job
    check_at_submit(job, gpus=3)
    with pytest.raises(
        ConfigError, match=sentence("finetune.refusals.check_at_submit.max-memory-names", 2)
    ):
        check_at_submit(job, gpus=2)


def test_a_job_is_not_changed_in_place() -> None:
    with pytest.raises(
        AttributeError, match=sentence("base.record.Record.assigned-changed-replace")
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
    with pytest.raises(
        ConfigError, match=sentence("finetune.refusals.no_template.model-chat-template")
    ):
        check_at_submit(job, gpus=0)
    check_at_submit(job.replace(chat_template="{{ messages }}"), gpus=0)
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    check_at_submit(job, gpus=0)
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    check_at_submit(job, gpus=0)
