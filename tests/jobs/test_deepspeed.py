from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.sentences import sentence
from workbench.base.errors import ConfigError
from workbench.finetune.deepspeed import keys as dskeys
from workbench.finetune.deepspeed.defaults import choose
from workbench.finetune.deepspeed.files import load
from workbench.finetune.deepspeed.kinds import Kind, Table, Whole
from workbench.finetune.deepspeed.unsupported_keys import NOT_DONE
from workbench.finetune.job.deepspeed_config import resolve
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.techniques.registry import TECHNIQUES, technique_of
from workbench.rundir.spec import ClusterSpec

WITH_DEEPSPEED = [each.name for each in TECHNIQUES if each.uses_deepspeed]


def own(config: object, **options: object) -> FineTune:
    return FineTune(deepspeed=config, **{"technique": "zero1", **options})  # type: ignore[arg-type]


@pytest.mark.parametrize("technique", WITH_DEEPSPEED)
@pytest.mark.parametrize("gpus", [0, 2])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_every_shipped_file_fits_its_technique(
    technique: str, gpus: int, optimizer: str, precision: str
) -> None:
    job = FineTune(technique=technique, optimizer=optimizer, precision=precision)
    config = resolve(job, gpus=gpus)
    assert config is not None
    assert config["zero_optimization"]["stage"] == technique_of(technique).zero_stage  # type: ignore[index]
    assert json.loads(json.dumps(config)) == config


def test_single_has_no_configuration() -> None:
    assert resolve(FineTune(technique="single"), gpus=0) is None


@pytest.mark.parametrize(
    ("technique", "ranks", "instead"), [("local-sgd", 1, "single"), ("single", 2, "ddp")]
)
def test_a_technique_that_takes_another_number_of_ranks_is_refused(
    technique: str, ranks: int, instead: str
) -> None:
    with pytest.raises(ConfigError, match=f"technique '{technique}' .* use '{instead}'"):
        resolve(FineTune(technique=technique), gpus=0, world_size=ranks)
    assert resolve(FineTune(technique=technique), gpus=0, world_size=3 - ranks) is None


def test_tf32_is_refused_on_cpus_under_every_technique() -> None:
    for technique in (each.name for each in TECHNIQUES):
        with pytest.raises(ConfigError, match="tf32"):
            resolve(FineTune(technique=technique, precision="tf32"), gpus=0)
    assert resolve(FineTune(technique="zero1", precision="tf32"), gpus=1) is not None


def test_offload_takes_an_optimizer_that_needs_no_compiler_on_cpus_and_the_fast_one_on_gpus() -> (
    None
):
    job = FineTune(technique="zero3-offload")
    on_cpu, on_gpu = resolve(job, gpus=0), resolve(job, gpus=1)
    assert on_cpu is not None and on_gpu is not None
    assert on_cpu["optimizer"]["params"]["torch_adam"] is True  # type: ignore[index]
    assert "torch_adam" not in on_gpu["optimizer"]["params"]  # type: ignore[index]
    for key in ("offload_optimizer", "offload_param"):
        assert on_cpu["zero_optimization"][key]["pin_memory"] is False  # type: ignore[index]
        assert on_gpu["zero_optimization"][key]["pin_memory"] is True  # type: ignore[index]


def test_sgd_under_offload_is_allowed_to_be_torch_s() -> None:
    config = resolve(FineTune(technique="zero3-offload", optimizer="sgd"), gpus=1)
    assert config is not None
    assert "optimizer" not in config
    assert config["zero_force_ds_cpu_optimizer"] is False


def test_the_profiler_is_left_to_the_trainer_and_its_options_are_kept() -> None:
    config = {
        "zero_optimization": {"stage": 1},
        "flops_profiler": {"enabled": True, "top_modules": 3},
    }
    resolved = resolve(own(config), gpus=0)
    assert resolved is not None
    assert resolved["flops_profiler"] == {"enabled": False, "top_modules": 3}


def test_an_object_of_the_user_s_is_filled_in_and_not_changed() -> None:
    config: dict[str, object] = {"zero_optimization": {"stage": 3}}
    before = json.dumps(config)
    resolved = resolve(own(config, technique="zero3"), gpus=0)
    assert resolved is not None
    assert json.dumps(config) == before
    assert resolved["train_micro_batch_size_per_gpu"] == "auto"
    assert resolved["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] is True  # type: ignore[index]


def test_a_path_is_read(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text('{"zero_optimization": {"stage": 1, "reduce_bucket_size": 7}}')
    resolved = resolve(own(str(path)), gpus=0)
    assert resolved is not None
    assert resolved["zero_optimization"]["reduce_bucket_size"] == 7  # type: ignore[index]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '{"zero_optimization": {"stage": 1},\n  "bf16": {enabled": true}}',
            sentence("line {} column {}: {}; it must be JSON", "mine.json", 2, 12),
        ),
        ("", sentence("line {} column {}: {}; it must be JSON", 1)),
        ("[1]", sentence("holds {}; a DeepSpeed configuration is an object", "list")),
        ('{"fp16": {}, "fp16": {}}', sentence("key '{}' stands there twice; remove one", "fp16")),
    ],
)
def test_what_is_no_json_object_is_refused_with_its_place(
    tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "mine.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        resolve(own(str(path)), gpus=0)


def test_a_byte_order_mark_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "my.json"
    path.write_bytes(b"\xef\xbb\xbf" + b'{"zero_optimization": {"stage": 2}}')
    assert load(str(path))[0] == {"zero_optimization": {"stage": 2}}


def test_a_configuration_is_read_by_its_path_too(tmp_path: Path) -> None:
    path = tmp_path / "my.json"
    path.write_text('{"zero_optimization": {"stage": 2}}')
    assert load(str(path)) == load(path) == ({"zero_optimization": {"stage": 2}}, str(path))
    with pytest.raises(
        ConfigError,
        match=sentence("deepspeed file {} cannot be read", "gone.json", "No such file"),
    ):
        load(tmp_path / "gone.json")
    with pytest.raises(
        ConfigError,
        match=sentence("a DeepSpeed configuration is read of a FineTune job or of a path", "dict"),
    ):
        load({"zero_optimization": {}})  # type: ignore[arg-type]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "nowhere.json"
    with pytest.raises(ConfigError, match=r"nowhere\.json.*does not exist"):
        own(str(file))
    file.write_text("{}")
    job = own(str(file))
    file.unlink()
    with pytest.raises(ConfigError, match=r"nowhere\.json.*No such file"):
        resolve(job, gpus=0)


@pytest.mark.parametrize("key", sorted(dskeys.REMOVED))
def test_a_removed_key_is_named_with_what_to_do(key: str) -> None:
    with pytest.raises(ConfigError, match=f"'{key}' was removed from DeepSpeed: (use|delete)"):
        resolve(own({"zero_optimization": {"stage": 1}, key: {}}), gpus=0)


ZERO1 = {"stage": 1}
ZERO3 = {"stage": 3}
SET: dict[str, object] = {
    "precision": "fp32",
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "learning_rate": 1e-3,
    "profile_step": 5,
}
OFFLOAD = {"stage": 3, "offload_optimizer": {"device": "cpu"}}


@pytest.mark.parametrize(
    ("technique", "config", "message"),
    [
        (
            "zero1",
            {"zero_optimization": {**ZERO1, "mics_shard_size": 2}},
            "zero_optimization.mics_shard_size.*removed",
        ),
        ("zero1", {"zero_optimisation": ZERO1}, "did you mean 'zero_optimization'"),
        (
            "zero1",
            {"zero_optimization": {**ZERO1, "reduce_bucket": 1}},
            "did you mean 'zero_optimization.reduce_buck",
        ),
        (
            "zero1",
            {"zero_optimization": ZERO1, "compile": {"deepcompil": True}},
            "did you mean 'compile.deepcompile'",
        ),
        (
            "zero1",
            {"zero_optimization": ZERO1, "autotuning": {"metric": "speed"}},
            "metric is 'speed'; it must be one of",
        ),
        ("zero1", {}, "zero_optimization has no stage, and FineTune"),
        ("zero2", {"zero_optimization": {"stage": 0}}, 'stage is 0, .*Write "stage": 2 '),
        ("zero1", {"zero_optimization": ZERO3}, "stage is 3"),
        ("zero1", {"zero_optimization": 1}, "must be an object"),
        ("zero3", {"zero_optimization": OFFLOAD}, "choose technique 'zero3-offload'"),
        ("zero3", {"zero_optimization": {**ZERO3, "cpu_offload": True}}, "deprecated"),
        (
            "zero3-offload",
            {"zero_optimization": ZERO3},
            "needs zero_optimization.offload_optimizer",
        ),
        (
            "zero2",
            {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}},
            "'zero2' offloads optimizer states alone",
        ),
        (
            "zero1",
            {
                "zero_optimization": {
                    **ZERO1,
                    "offload_optimizer": {"device": "nvme", "nvme_path": "/x"},
                }
            },
            "use device 'cpu'",
        ),
        (
            "zero3-offload",
            {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}},
            "give a folder of each pod as nvme_path",
        ),
        (
            "zero3-offload",
            {
                "zero_optimization": {
                    "stage": 3,
                    "offload_optimizer": {"device": "nvme", "nvme_path": "swap"},
                }
            },
            "nvme_path, from / on",
        ),
        (
            "zero3",
            {"zero_optimization": ZERO3, "aio": {"block_size": 8}},
            "aio is for offload to disks",
        ),
        (
            "zero3-offload",
            {
                "zero_optimization": {
                    "stage": 3,
                    "offload_optimizer": {"device": "nvme", "nvme_path": "/x"},
                },
                "aio": {"use_gds": True},
            },
            "aio.use_gds needs GPUs",
        ),
        (
            "zero3-offload",
            {
                "zero_optimization": {
                    "stage": 3,
                    "offload_optimizer": {"device": "cpu", "super_offload": True},
                }
            },
            "super_offload needs GPUs",
        ),
        (
            "zero1",
            {"zero_optimization": ZERO1, "comms_logger": {"enabled": True}},
            "add 'verbose': true",
        ),
        (
            "zero1",
            {"zero_optimization": ZERO1, "torch_autocast": {"dtyp": "x"}},
            "did you mean 'torch_autocast.dtype'",
        ),
        (
            "zero2",
            {"zero_optimization": {"stage": 2, "zero_quantized_weights": True}},
            "which is of stage 3",
        ),
        (
            "zero3",
            {"zero_optimization": {**ZERO3, "zero_quantized_gradients": True}},
            "gradients needs GPUs",
        ),
        (
            "zero3",
            {"zero_optimization": {**ZERO3, "zero_hpz_partition_size": 2}},
            "3 ranks cannot be put",
        ),
        (
            "zero3-offload",
            {"zero_optimization": {**ZERO3, "offload_optimizer": {"device": "none"}}},
            "needs zero_optimization.offload_optimizer",
        ),
        (
            "zero3",
            {"zero_optimization": {**ZERO3, "stage3_gather_16bit_weights_on_model_save": False}},
            "must be true",
        ),
        ("zero1", {"zero_optimization": ZERO1, "fp16": {"enabled": True}}, "T5 overflows"),
        ("zero1", {"zero_optimization": ZERO1, "bf16": {"enabled": True}}, "precision is 'fp32'"),
        (
            "zero1",
            {"zero_optimization": ZERO1, "train_micro_batch_size_per_gpu": 4},
            "per_device_train_batch_size is 8",
        ),
        (
            "zero1",
            {"zero_optimization": ZERO1, "gradient_accumulation_steps": 2},
            "gradient_accumulation_steps is 1",
        ),
        ("zero1", {"zero_optimization": ZERO1, "train_batch_size": 8}, "x 3 ranks is 24"),
        ("zero1", {"zero_optimization": ZERO1, "gradient_clipping": "yes"}, "gradient_clipping"),
        (
            "zero1",
            {"zero_optimization": ZERO1, "optimizer": {"type": "OneBitAdam"}},
            "'OneBitAdam' was removed",
        ),
        (
            "zero1",
            {"zero_optimization": ZERO1, "optimizer": {"type": "Adagrad"}},
            "'Adagrad', which FineTune does not have",
        ),
        (
            "zero1",
            {"zero_optimization": ZERO1, "optimizer": {"type": "AdamW", "params": {"lr": 3e-5}}},
            "optimizer.params.lr is 3e-05, and the job's learning_rate is 0.001",
        ),
        (
            "zero1",
            {
                "zero_optimization": ZERO1,
                "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1}},
            },
            "warmup_max_lr is 1",
        ),
        (
            "zero1",
            {
                "zero_optimization": ZERO1,
                "scheduler": {"type": "OneCycle", "params": {"cycle_max_lr": 1}},
            },
            "scheduler.type is 'OneCycle', which FineTune does not run. Use WarmupLR",
        ),
        (
            "zero1",
            {"zero_optimization": ZERO1, "flops_profiler": {"enabled": True, "profile_step": 9}},
            "profile_step is 9",
        ),
    ],
)
def test_what_contradicts_the_job_is_refused(
    technique: str, config: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(own(config, technique=technique, **SET), gpus=0, world_size=3)


def test_quantized_zero_plus_plus_is_taken_for_gpus() -> None:
    config = {
        "zero_optimization": {**ZERO3, "zero_quantized_weights": True, "zero_hpz_partition_size": 2}
    }
    assert resolve(own(config, technique="zero3"), gpus=2, world_size=4) is not None


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"compile": {"deepcompile": True}},
            sentence("the trainer does not call engine.compile", "compile.deepcompile is True"),
        ),
        (
            {"pipeline": {"stages": 2}},
            sentence("ranks hold different rows and not different layers", "pipeline.stages is 2"),
        ),
        (
            {"data_efficiency": {"enabled": True, "data_routing": {"enabled": True}}},
            "data_efficiency.enabled is True, .*",
        ),
        (
            {"weight_quantization": {"enabled": True}},
            sentence(
                "use peft='qlora' to train over 4-bit weights",
                "weight_quantization.enabled is True",
            ),
        ),
        (
            {"checkpoint": {"load_universal": True}},
            sentence(
                "checkpoints are the workbench's own: use save_steps and resume",
                "checkpoint.load_universal is True",
            ),
        ),
        (
            {"activation_checkpointing": {"cpu_checkpointing": True}},
            sentence(
                "models recompute by torch: use gradient_checkpointing=True",
                "activation_checkpointing.cpu_checkpointing is True",
            ),
        ),
        (
            {"tensor_parallel": {"autotp_size": 2}},
            r"tensor_parallel.autotp_size is 2, .* use FineTune\(tensor_parallel=N\)",
        ),
        (
            {"sequence_parallel_size": 2},
            r"sequence_parallel_size is 2, .* use FineTune\(sequence_parallel=N\)",
        ),
        (
            {"autotuning": {"enabled": True}},
            sentence("ask plan(job) for the largest micro-batch", "autotuning.enabled is True"),
        ),
        (
            {"expert_parallel": {"enabled": True}},
            sentence("AutoEP needs another order of rows", "expert_parallel.enabled is True"),
        ),
        (
            {"hybrid_engine": {"enabled": True}},
            sentence("and this training has no such step", "hybrid_engine.enabled is True"),
        ),
        (
            {"zero_optimization": {**ZERO1, "zenflow": {"topk_ratio": 0.1}}},
            sentence(
                "checkpoints and the audit do not know its optimizer", "zenflow.topk_ratio is 0.1"
            ),
        ),
        (
            {"zero_optimization": {**ZERO1, "allgather_partitions": False}},
            sentence(
                "DeepSpeed 0.19.8 always gathers: remove the key", "allgather_partitions is False"
            ),
        ),
        (
            {"flops_profiler": {"enabled": True, "output_file": "x"}},
            sentence(
                "the profile is a file of the run directory: read result.profile",
                "output_file is 'x'",
            ),
        ),
    ],
)
def test_a_key_that_the_trainer_does_nothing_with_is_refused(
    config: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(own({"zero_optimization": ZERO1, **config}), gpus=2, world_size=2)


@pytest.mark.parametrize(
    "config",
    [
        {"compile": {"deepcompile": False}, "pipeline": {"stages": "auto", "seed_layers": False}},
        {
            "autotuning": {"enabled": False, "metric": "flops"},
            "sequence_parallel_size": 1,
            "checkpoint": {},
        },
        {"activation_checkpointing": {"partition_activations": False, "number_checkpoints": None}},
        {
            "zero_optimization": {
                **ZERO1,
                "allgather_partitions": True,
                "load_from_fp32_weights": True,
            }
        },
    ],
)
def test_a_key_that_is_switched_off_is_accepted(config: dict[str, object]) -> None:
    assert resolve(own({"zero_optimization": ZERO1, **config}), gpus=0, world_size=2) is not None


def test_an_optimizer_that_is_not_the_job_s_is_refused() -> None:
    config = {"zero_optimization": ZERO1, "optimizer": {"type": "SGD"}}
    with pytest.raises(
        ConfigError,
        match=sentence("'; change one of them", "SGD", "adamw"),
    ):
        resolve(own(config, optimizer="adamw"), gpus=0)


@pytest.mark.parametrize(
    ("optimizer", "params", "rate", "options"),
    [
        ("Lion", {}, 2e-4, {}),
        ("lion", {"lr": 1e-4, "betas": [0.8, 0.95]}, 1e-4, {"beta1": 0.8, "beta2": 0.95}),
        ("Muon", {}, 1e-3, {}),
        ("Muon", {"lr": 0.02}, 0.02, {"adjust_lr_fn": "original"}),
        (
            "Muon",
            {"muon_lr": 0.02, "lr": 1e-3, "momentum": 0.9},
            0.02,
            {"adjust_lr_fn": "original", "momentum": 0.9, "adam_learning_rate": 1e-3},
        ),
        (
            "Muon",
            {"lr": 0.02, "adam_lr": 1e-3},
            0.02,
            {"adjust_lr_fn": "original", "adam_learning_rate": 1e-3},
        ),
    ],
)
def test_lion_and_muon_of_a_json_are_the_job_s_and_not_deepspeed_s(
    optimizer: str, params: object, rate: float, options: object
) -> None:
    config = {"zero_optimization": ZERO1, "optimizer": {"type": optimizer, "params": params}}
    job = choose(FineTune(deepspeed=config), gpus=0)
    assert (job.optimizer, job.learning_rate) == (optimizer.lower(), rate)
    assert job.optimizer_options == options
    again = FineTune.from_dict(job.to_dict())
    for each in (FineTune(deepspeed=config), job, again):
        resolved = resolve(each, gpus=0, world_size=2)
        assert resolved is not None and "optimizer" not in resolved


@pytest.mark.parametrize(
    ("optimizer", "params", "zero", "message"),
    [
        ("Muon", {"ns_method": "gram"}, ZERO1, "ns_method has no effect on optimizer 'muon'"),
        ("Lion", {"eps": 1e-6}, ZERO1, "adam_epsilon is AdamW's, and the optimizer is 'lion'"),
        ("Lion", {"torch_adam": True}, ZERO1, "torch_adam has no effect on optimizer 'lion'"),
        (
            "Muon",
            {},
            {"stage": 2, "offload_optimizer": {"device": "cpu"}},
            "remove it, or use optimizer 'adamw' or 'lion'",
        ),
        ("Muon", {}, {"stage": 1, "round_robin_gradients": True}, "matrices in order; remove it"),
        ("Muon", {}, {"stage": 3}, "technique 'zero3' shards them; use 'single'"),
    ],
)
def test_what_muon_and_lion_cannot_use_is_refused(
    optimizer: str, params: object, zero: object, message: str
) -> None:
    config = {"zero_optimization": zero, "optimizer": {"type": optimizer, "params": params}}
    with pytest.raises(ConfigError, match=message):
        resolve(FineTune(deepspeed=config), gpus=0)


def test_a_scheduler_of_deepspeed_leaves_no_second_rate() -> None:
    scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": 2}}
    config = {"zero_optimization": ZERO1, "scheduler": scheduler}
    assert resolve(own(config, optimizer="muon"), gpus=0) is not None
    config["optimizer"] = {"type": "Muon", "params": {"lr": 0.02, "adam_lr": 1e-3}}
    with pytest.raises(ConfigError, match="remove scheduler and use lr_scheduler_type"):
        resolve(own(config), gpus=0)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"muon_lr": 0.02}, "optimizer.params.muon_lr is 0.02, and the job's learning_rate"),
        ({"adam_lr": 0.02}, "optimizer.params.adam_lr is 0.02, and the job's adam_learning_rate"),
        ({"momentum": 0.5}, "optimizer.params.momentum is 0.5, and the job's momentum is 0.95"),
    ],
)
def test_a_json_that_contradicts_muon_s_options_is_refused(params: object, message: str) -> None:
    config = {"zero_optimization": ZERO1, "optimizer": {"type": "Muon", "params": params}}
    options = {"adjust_lr_fn": "original"}
    with pytest.raises(ConfigError, match=message):
        resolve(
            own(config, optimizer="muon", learning_rate=1e-3, optimizer_options=options), gpus=0
        )


def test_every_key_that_is_refused_is_one_that_deepspeed_knows() -> None:
    known = {f"{at}.{key}".lstrip(".") for at, table in sections(dskeys.TOP_LEVEL) for key in table}
    assert set(NOT_DONE) <= known


def test_a_profiler_that_is_switched_off_profiles_no_step() -> None:
    config = {"zero_optimization": ZERO1, "flops_profiler": {"enabled": False}}
    assert choose(own(config), gpus=0).profile_step == 0
    assert choose(own(config, profile_step=7), gpus=0).profile_step == 7


def test_numbers_that_agree_with_the_job_are_accepted() -> None:
    config = {
        "zero_optimization": ZERO1,
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 1,
        "train_batch_size": 24,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "bf16": {"enabled": False},
    }
    assert resolve(own(config), gpus=0, world_size=3) is not None


def test_the_files_are_found_in_a_wheel_and_in_a_zip(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    inside, beside = tmp_path / "wheel.zip", tmp_path / "checkout.zip"
    for archive, folder in ((inside, "workbench/dsconfig"), (beside, "dsconfig")):
        with zipfile.ZipFile(archive, "w") as z:
            for path in sorted((root / "workbench").rglob("*.py")):
                z.write(path, path.relative_to(root))
            z.writestr(
                f"{folder}/zero1.json", '{"zero_optimization": {"stage": 1}, "log_level": "info"}'
            )
    code = (
        "from workbench.finetune.deepspeed.files import *; "
        "from workbench.finetune.job.finetune import *; print(load(FineTune())[0])"
    )
    for archive in (inside, beside):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": str(archive), "PYTHONSAFEPATH": "1"},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert "log_level" in done.stdout, done.stderr
    assert load(FineTune())[1] == "dsconfig/zero1.json"


MODELS = {
    "": "",
    "bf16": "runtime.precision_config.DeepSpeedBF16Config",
    "bfloat16": "runtime.precision_config.DeepSpeedBF16Config",
    "comet": "monitor.config.CometConfig",
    "comms_logger": "comm.config.CommsLoggerConfig",
    "compile": "compile.config.CompileConfig",
    "csv_monitor": "monitor.config.CSVConfig",
    "expert_parallel": "module_inject.auto_ep_config.AutoEPConfig",
    "fp16": "runtime.precision_config.DeepSpeedFP16Config",
    "hybrid_engine": "runtime.config.HybridEngineConfig",
    "tensor_parallel": "runtime.tensor_parallel.config.TPTrainingConfig",
    "tensor_parallel.tensor_parallel": "runtime.tensor_parallel.config.TPConfig",
    "tensor_parallel.tp": "runtime.tensor_parallel.config.TPConfig",
    "tensorboard": "monitor.config.TensorBoardConfig",
    "timers.throughput": "utils.config.DeepSpeedThroughputTimerConfig",
    "wandb": "monitor.config.WandbConfig",
    "weight_quantization": "inference.config.WeightQuantConfig",
    "zero_optimization": "runtime.zero.config.DeepSpeedZeroConfig",
    "zero_optimization.leaf_module": (
        "runtime.zero.leaf_module_config.DeepSpeedZeroLeafModuleConfig"
    ),
    "zero_optimization.offload_optimizer": (
        "runtime.zero.offload_config.DeepSpeedZeroOffloadOptimizerConfig"
    ),
    "zero_optimization.offload_param": (
        "runtime.zero.offload_config.DeepSpeedZeroOffloadParamConfig"
    ),
    "zero_optimization.zenflow": "runtime.zenflow.zenflow_config.ZenFlowConfig",
}
"""What DeepSpeed reads each section with whose keys are all written down."""
NOT_IN_JSON = {"dtype", "mpu", "tp_group", "load_balance_coeff", "_load_balance_coeff_explicit"}
"""Objects of Python, and a key that DeepSpeed itself refuses."""
ASK = """
import dataclasses, importlib, json, pathlib, sys, deepspeed.runtime.config as c
models, keys = json.loads(sys.argv[1])
def names(path):
    module, name = path.rsplit(".", 1)
    model = getattr(importlib.import_module("deepspeed." + module), name)
    if dataclasses.is_dataclass(model):
        return 2 * [[f.name for f in dataclasses.fields(model)]]
    return [[f.alias or n for n, f in model.model_fields.items()], list(model.model_fields)]
text = "".join(p.read_text() for p in pathlib.Path(c.__file__).parents[1].rglob("*.py"))
print(json.dumps([c._REMOVED_TOP_LEVEL_CONFIG_KEYS and sorted(c._REMOVED_TOP_LEVEL_CONFIG_KEYS),
                  sorted(c._REMOVED_ZERO_CONFIG_KEYS),
                  {at: names(model) for at, model in models.items() if model},
                  [k for k in keys if f'"{k}"' not in text and f"'{k}'" not in text]]))
"""


def sections(table: Table, at: str = "") -> Iterator[tuple[str, Table]]:
    yield at, table
    for key, inner in table.items():
        if not isinstance(inner, Kind):
            yield from sections(inner, f"{at}.{key}".lstrip("."))


@pytest.mark.slow
def test_the_written_down_keys_are_those_of_the_installed_deepspeed() -> None:
    tables = dict(sections(dskeys.TOP_LEVEL))
    assert {at for at, table in tables.items() if type(table) is Whole} <= set(MODELS)
    read_by_name = {key for at, table in tables.items() if at not in MODELS for key in table}
    parameters = {
        "compile",
        "dampening",
        "nesterov",
        "cycle_momentum",
        "set_grad_none",
    }  # of functions: not quoted
    ask = json.dumps([MODELS, sorted({*dskeys.TOP_LEVEL, *read_by_name} - parameters)])
    done = subprocess.run(
        [sys.executable, "-c", ASK, ask], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    removed, removed_zero, models, strange = json.loads(done.stdout.splitlines()[-1])
    assert set(removed) == set(dskeys.REMOVED)
    assert set(removed_zero) == set(dskeys.REMOVED_ZERO)
    for at, (keys, other_names) in models.items():
        assert set(keys) - NOT_IN_JSON <= set(tables[at]) <= {*keys, *other_names}, at
    assert strange == []


def test_hybrid_shards_need_pods_of_several_gpus() -> None:
    job = FineTune(technique="fsdp", fsdp={"shard": "hybrid"})
    for gpus in (0, 1):
        with pytest.raises(
            ConfigError, match=sentence("and a pod without several GPUs has one slot")
        ):
            resolve(job, gpus=gpus)
    assert resolve(job, gpus=2) is None
    assert resolve(job.replace(fsdp={"shard": "hybrid", "group": 2}), gpus=0) is None
    with pytest.raises(
        ConfigError, match=sentence("fsdp group is for shard 'hybrid', and shard is '{}'; drop one")
    ):
        job.replace(fsdp={"group": 2})
    with pytest.raises(
        ConfigError, match=sentence("fsdp layers and layer_parameters both say what is sharded by")
    ):
        job.replace(fsdp={"layers": ["T5Block"], "layer_parameters": 5})


def test_fp16_is_for_causal_models_on_gpus_and_the_configuration_must_agree() -> None:
    llama: dict[str, object] = {"model": "tiny-llama", "precision": "fp16", "technique": "zero1"}
    resolved = resolve(FineTune(**llama), gpus=1)  # type: ignore[arg-type]
    assert resolved is not None and resolved["fp16"] == {"enabled": "auto"}
    with pytest.raises(
        ConfigError,
        match=sentence(".enabled is true, and the job's precision is '{}'", "fp16", "fp32"),
    ):
        told = {"zero_optimization": ZERO1, "fp16": {"enabled": True}}
        resolve(own(told, model="tiny-llama", precision="fp32"), gpus=1)
    with pytest.raises(
        ConfigError,
        match=sentence("fp16.enabled is {}, and the job's precision is '{}'", "false", "fp16"),
    ):
        resolve(own({"zero_optimization": ZERO1, "fp16": {"enabled": False}}, **llama), gpus=1)
    with pytest.raises(ConfigError, match=sentence("precision 'fp16' needs GPUs")):
        resolve(FineTune(**llama), gpus=0)  # type: ignore[arg-type]
    assert resolve(FineTune(**{**llama, "technique": "fsdp"}), gpus=0) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("technique", WITH_DEEPSPEED)
def test_a_profiler_variant_is_its_technique_s_file_with_the_profiler_s_options(
    technique: str,
) -> None:
    plain, source = load(FineTune(technique=technique))
    variant, named = load(own(f"dsconfig/{technique}-profiler.json", technique=technique))
    assert named.removesuffix("-profiler.json") == source.removesuffix(".json")
    options = variant.pop("flops_profiler")
    assert variant == plain
    assert set(options) == {"enabled", "module_depth", "top_modules", "detailed"}
    resolved = resolve(
        own(f"dsconfig/{technique}-profiler.json", technique=technique), gpus=0, world_size=3
    )
    assert resolved is not None
    assert resolved["flops_profiler"] == {**options, "enabled": False}  # the trainer drives it


@pytest.mark.parametrize("left", ["an empty folder", "no folder"])
def test_a_package_that_was_removed_under_a_live_notebook_is_named(
    left: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The modules are in memory; the shipped files were on the disk alone."""
    package = tmp_path / "site-packages" / "workbench"
    if left == "an empty folder":
        package.mkdir(parents=True)
    monkeypatch.setattr("importlib.resources.files", lambda _name: package)
    with pytest.raises(ConfigError, match=sentence("none; install again")) as refused:
        resolve(FineTune(technique="zero1"), gpus=0)
    assert "dsconfig/zero1.json" in str(refused.value)
    # What needs no shipped file is planned as before.
    assert resolve(FineTune(technique="single"), gpus=0) is None
    assert resolve(own({"zero_optimization": {"stage": 1}}), gpus=0) is not None


def test_a_shipped_file_is_found_by_its_name_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load(own("dsconfig/zero1-profiler.json"))[1] == "dsconfig/zero1-profiler.json"
    with pytest.raises(
        ConfigError,
        match=sentence(
            "dsconfig/{} is not among the files that are shipped",
            "zero9.json",
            "zero1-profiler.json, zero1.json",
        ),
    ):
        load(own("dsconfig/zero9.json"))
    (tmp_path / "dsconfig").mkdir()
    (tmp_path / "dsconfig" / "zero1.json").write_text(
        '{"zero_optimization": {"stage": 1}, "log_level": "info"}'
    )
    assert "log_level" in load(own("dsconfig/zero1.json"))[0], "a file of one's own comes first"


@pytest.mark.parametrize(
    "more",
    [
        {"comet": {"enabled": True, "api_key": "plainword"}},
        {"tensorboard": {"enabled": True, "output_path": "https://me:hunter2@host/x"}},
        {"wandb": {"enabled": True, "group": "hf_abcdefghijklmnopqrst"}},
    ],
)
def test_a_secret_in_it_is_refused_and_not_shown(more: dict[str, object]) -> None:
    with pytest.raises(
        ConfigError, match=sentence("which would be written to the run directory")
    ) as refused:
        resolve(own({"zero_optimization": {"stage": 1}, **more}), gpus=0)
    assert not [word for word in ("plainword", "hunter2", "hf_abc") if word in str(refused.value)]
    assert resolve(
        own({"zero_optimization": {"stage": 1}, "comet": {"enabled": False, "api_key": ""}}), gpus=0
    )


WALK_THROUGH: dict[str, object] = {
    "train_micro_batch_size_per_gpu": 32,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.5,
    "bf16": {"enabled": True},
    "communication_data_type": "bf16",
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 5e-4, "betas": [0.8, 0.99], "eps": 1e-7, "weight_decay": 0.01},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_num_steps": 7, "total_num_steps": 70},
    },
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
    "flops_profiler": {"enabled": True, "profile_step": 1},
}


def test_a_user_s_json_wins_over_what_the_user_left_open_and_its_stage_is_the_technique() -> None:
    job = FineTune(deepspeed=WALK_THROUGH)
    chosen = choose(job, gpus=0)
    assert {
        name for name in FineTune.model_fields if getattr(chosen, name) != getattr(job, name)
    } == {
        "technique",
        "precision",
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "max_grad_norm",
        "learning_rate",
        "adam_beta1",
        "adam_beta2",
        "adam_epsilon",
        "weight_decay",
        "warmup_steps",
        "max_steps",
        "profile_step",
        "communication",
    }
    assert (chosen.technique, chosen.precision, chosen.profile_step) == ("zero3-offload", "bf16", 1)
    assert (chosen.learning_rate, chosen.adam_beta1, chosen.max_steps) == (5e-4, 0.8, 70)
    assert choose(chosen, gpus=0) == choose(FineTune.from_dict(chosen.to_dict()), gpus=0) == chosen
    assert resolve(job, gpus=0, world_size=3) == resolve(chosen, gpus=0, world_size=3)


def test_the_rows_of_a_rank_follow_from_a_json_s_whole_batch() -> None:
    job = FineTune(deepspeed={"zero_optimization": {"stage": 2}, "train_batch_size": 24})
    assert choose(job, gpus=0, world_size=3).per_device_train_batch_size == 8
    assert choose(job, gpus=0, world_size=2).per_device_train_batch_size == 12
    with pytest.raises(ConfigError, match="train_batch_size is 24"):
        resolve(job, gpus=0, world_size=5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"technique": "zero1"},
            sentence("zero_optimization.stage is", 3, "zero1", 1),
        ),
        (
            {"profile_step": 5},
            sentence(
                "or change one",
                "flops_profiler.profile_step",
                1,
                "profile_step",
                5,
            ),
        ),
        (
            {"weight_decay": 0.2},
            sentence(
                "or change one",
                "optimizer.params.weight_decay",
                "0.01",
                "weight_decay",
                "0.2",
            ),
        ),
        (
            {"adam_beta2": 0.9},
            sentence("adam_beta1 and adam_beta2", "optimizer.params.betas")
            + sentence("or change one"),
        ),
        (
            {"max_grad_norm": 2},
            sentence(
                "or change one",
                "gradient_clipping",
                "0.5",
                "max_grad_norm",
                2,
            ),
        ),
        (
            {"warmup_ratio": 0.2},
            sentence(
                "or change one",
                "scheduler.params.warmup_num_steps",
                7,
                "warmup_steps",
                "None",
            ),
        ),
        (
            {"lr_scheduler_type": "cosine"},
            sentence("scheduler.type decides how the learning rate continues", "linear"),
        ),
        (
            {"communication": "fp32"},
            sentence("and the job's communication is", "bf16", "fp32"),
        ),
        (
            {"precision": "fp32"},
            sentence(".enabled is true, and the job's precision is '{}'", "bf16", "fp32"),
        ),
    ],
)
def test_what_contradicts_an_option_that_was_set_is_refused_by_name(
    options: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(FineTune(deepspeed=WALK_THROUGH, **options), gpus=0)  # type: ignore[arg-type]


def test_rate_and_precision_are_chosen_by_the_model_the_adapters_and_the_pods() -> None:
    def chosen(gpus: int = 0, **options: object) -> tuple[object, object]:
        job = choose(FineTune(**options), gpus=gpus)  # type: ignore[arg-type]
        return job.learning_rate, job.precision

    assert chosen() == chosen(gpus=2) == chosen(model="tiny-llama", peft="lora") == (1e-3, "fp32")
    assert chosen(model="google/flan-t5-small") == (3e-4, "fp32")
    assert (
        chosen(model="meta-llama/Llama-2-7b", gpus=1)
        == chosen(model="gpt2", gpus=1)
        == (2e-5, "bf16")
    )
    assert chosen(model="meta-llama/Llama-2-7b", gpus=1, peft="qlora") == (2e-4, "bf16")
    assert chosen(model="gpt2", gpus=1, learning_rate=1, precision="fp16") == (1, "fp16")


def test_gradients_are_sent_in_bf16_between_pods_apart_that_have_no_gpus() -> None:
    def chosen(job: FineTune, **place: object) -> str | None:
        return ClusterSpec.from_dict({"count": 3, **place}).chosen(job).communication

    ssh = {"backend": {"kind": "ssh", "hosts": ["a", "b", "c"]}}
    job, full = FineTune(), {"communication_data_type": "fp32", "zero_optimization": ZERO1}
    assert chosen(job, **ssh) == "bf16"
    assert (
        chosen(job, **ssh, pods={"gpus": 1}) is chosen(job, **ssh, count=1) is chosen(job) is None
    )
    assert chosen(job.replace(communication="fp32"), **ssh) == chosen(own(full), **ssh) == "fp32"
    for asked, sent in (
        (job, None),
        (job.replace(communication="bf16"), "bf16"),
        (own(full), "fp32"),
    ):
        config = resolve(asked, gpus=0)
        assert config is not None and config.get("communication_data_type") == sent
