"""ZeRO-3's own: optimizer and weights offloaded to files, and ZeRO++'s groups; real ranks.

The op that writes the files is compiled, which takes a minute the first time on a machine.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.support.disks import folder_on_disk
from tests.support.forkedruns import Plan, Ran
from tests.support.poll import until
from tests.support.sentences import says
from workbench.finetune.techniques.zero.nvme import folders

pytestmark = pytest.mark.long
MEMORY = Path(
    "/dev/shm"
)  # files there can be read to any address, which not every disk of a test machine allows
STEPS, SAVED = 4, 2
HELD = f"held-{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"


@pytest.fixture(scope="module")
def swap() -> Iterator[Path]:
    if not Path("/usr/include/libaio.h").exists() or not shutil.which("c++"):
        pytest.skip("needs libaio's headers and a C++ compiler (Debian: libaio-dev, g++)")
    if shutil.disk_usage(MEMORY).free < 2**28:
        pytest.skip("needs 256 MiB of room in /dev/shm")
    folder = MEMORY / f"workbench-test-{os.getpid()}"
    for name in ("workbench-killed", "workbench-alive", "own"):
        (folder / name).mkdir(parents=True)
        (folder / name / HELD).touch()
    with (folder / "workbench-alive" / HELD).open() as alive:
        fcntl.flock(alive, fcntl.LOCK_SH)
        yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def disk() -> Iterator[Path]:
    with folder_on_disk() as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory, swap: Path, disk: Path) -> dict[str, Ran]:
    plan = Plan(tmp_path_factory.mktemp("nvme"))
    make_model(plan.root / "model")

    def add(
        name: str,
        ranks: int,
        zero: dict[str, object],
        more: Mapping[str, object] | None = None,
        **job: object,
    ) -> None:
        plan.add(
            name,
            ranks,
            more={"compiles": True, **(more or {})},
            model=str(plan.root / "model"),
            max_steps=STEPS,
            per_device_train_batch_size=12 // ranks,
            profile_step=0,
            deepspeed={
                "zero_optimization": {
                    "stage": 3,
                    "stage3_param_persistence_threshold": 1000,
                    **zero,
                }
            },
            **job,  # type: ignore[arg-type]
        )

    def to(folder: Path) -> dict[str, object]:
        nvme = {"device": "nvme", "nvme_path": str(folder)}
        weights = {**nvme, "buffer_size": 2**20, "max_in_cpu": 0}
        # Several groups, so that one is read while another is not in memory.
        return {"offload_optimizer": nvme, "offload_param": weights, "sub_group_size": 600_000}

    add("cpu", 2, {"offload_optimizer": {"device": "cpu"}}, technique="zero3-offload")
    add("nvme", 2, to(swap), technique="zero3-offload", save_steps=SAVED)
    saved = {"checkpoint": str(plan.root / "nvme" / "checkpoints" / f"step-{SAVED}")}
    add("nvme-on", 2, to(swap), saved, technique="zero3-offload", resume="a run")
    weights = {"offload_optimizer": {"device": "cpu"}, "offload_param": to(swap)["offload_param"]}
    add("weights", 2, weights, technique="zero3-offload", save_steps=SAVED)
    saved = {"checkpoint": str(plan.root / "weights" / "checkpoints" / f"step-{SAVED}")}
    add("weights-on", 2, weights, saved, technique="zero3-offload", resume="a run")
    add("alone", 1, to(swap), technique="zero3-offload")
    add("disk", 1, to(disk), technique="zero3-offload")
    add("groups", 4, {"zero_hpz_partition_size": 2}, technique="zero3")
    return plan.run()


def make_model(folder: Path) -> None:
    """Save a T5 with matrices of a MiB a rank, the least that DeepSpeed moves."""
    from tokenizers import Tokenizer
    from transformers import (
        PreTrainedTokenizerFast,
        T5Config,
        T5ForConditionalGeneration,
        set_seed,
    )

    from workbench.finetune.model.text.tokenizer import train_tokenizer

    set_seed(0)
    config = T5Config(
        vocab_size=512,
        d_model=128,
        d_kv=32,
        d_ff=4096,
        num_layers=1,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=1,
    )
    T5ForConditionalGeneration(config).save_pretrained(folder)
    text = train_tokenizer(["how many rows of the table have a year after 1990"], vocabulary=500)
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(text), pad_token="<pad>", eos_token="</s>"
    ).save_pretrained(folder)


@pytest.mark.parametrize("name", ["nvme", "weights", "groups"])
def test_losses_are_those_of_zero3_with_its_states_in_memory(
    ran: dict[str, Ran], name: str
) -> None:
    run = ran[name]
    assert set(run.exit_codes.values()) == {0}, run.stderr()
    for metric in ("loss", "grad_norm"):
        assert run.curve(metric) == pytest.approx(ran["cpu"].curve(metric), rel=1e-4), metric
    assert run.data("end")[0]["eval_loss"] == pytest.approx(
        ran["cpu"].data("end")[0]["eval_loss"], rel=1e-4
    )


def test_what_lies_in_files_is_counted_there_and_only_that_of_others_is_left(
    ran: dict[str, Ran], swap: Path
) -> None:
    for rank in (0, 1):
        (told,) = ran["nvme"].data("engine", rank)
        assert told["offload"] == ["optimizer", "parameters"]
        for name in ("updated", "states"):
            assert told[name]["local"] == pytest.approx(told[name]["whole"] / 2, rel=0.01)  # type: ignore[index]
    assert {path.name for path in swap.iterdir()} == {"workbench-alive", "own"}


@pytest.mark.parametrize("name", ["nvme", "weights"])
def test_a_resumed_run_has_its_files_written_again(ran: dict[str, Ran], name: str) -> None:
    whole, rest = ran[name], ran[f"{name}-on"]
    assert set(rest.exit_codes.values()) == {0}, rest.stderr()
    for figure in ("step", "loss", "grad_norm", "learning_rate"):
        assert rest.curve(figure) == whole.curve(figure)[SAVED:]


def test_a_disk_that_would_be_misread_is_refused_before_the_model_is_loaded(
    ran: dict[str, Ran], disk: Path
) -> None:
    run = ran["disk"]
    if set(run.exit_codes.values()) == {0}:  # this machine's disk can be read to any address
        assert run.curve("loss") == pytest.approx(ran["cpu"].curve("loss"), rel=1e-4)
    else:
        assert says(
            run.record(0, "error.json")["message"],
            "and DeepSpeed would train with wrong gradients without a word",
        )
        assert "loading model" not in [phase["name"] for phase in run.data("phase")]
    assert not list(disk.iterdir())


def test_a_rank_alone_has_its_weights_in_files(ran: dict[str, Ran]) -> None:
    assert set(ran["alone"].exit_codes.values()) == {0}, ran["alone"].stderr()
    assert ran["alone"].curve("loss") == pytest.approx(ran["cpu"].curve("loss"), rel=1e-4)


def test_a_build_is_told_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "async_io"
    folder.mkdir()
    (folder / "lock").touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(folders, "_TELL_EVERY_S", 0.02)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, cwd=folder), folders._builds_reported():
        for _ in range(2):
            until(lambda: "compiling DeepSpeed's async_io" in capfd.readouterr().out)
