"""Scripts and tests of other packages run unchanged on pods: TRL, DeepSpeed, accelerate, torch."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import accelerate
import pytest

from tests.support.poll import until
from workbench import Cluster, Run, Script

pytestmark = [pytest.mark.slow, pytest.mark.long]
SCRIPTS = Path(__file__).parent / "scripts"
TEXTS = [f"Name the capital of country {n}. City {n} is it." for n in range(12)]
REPOSITORY = """
import os
from .sizes import SIZE

print("rank", os.environ["RANK"], "of size", SIZE)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from workbench.finetune.model.text.tokenizer import END, PAD, START, train_tokenizer

    folder = tmp_path_factory.mktemp("model")
    learned = train_tokenizer(TEXTS, causal=True)
    (folder / "learned.json").write_text(learned)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "learned.json"), pad_token=PAD, eos_token=END, bos_token=START
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def trained(cluster: Cluster, script: Path, *args: str, pods: int = 2) -> Run:
    # The header of TRL's scripts names packages that the pods have, and others without use here.
    run = cluster.submit(Script(script, args=args, requirements=[], stall_timeout_s=300), pods=pods)
    run.wait(500, progress=False).raise_for_status()
    return run


def test_trl_s_own_script_trains(cluster: Cluster, model: Path, tmp_path: Path) -> None:
    import trl

    rows = tmp_path / "rows"
    rows.mkdir()
    (rows / "train.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    run = trained(
        cluster,
        Path(trl.__file__).parent / "scripts" / "sft.py",
        f"--dataset_name={rows}",
        f"--model_name_or_path={model}",
        "--output_dir=trained",
        "--max_steps=2",
        "--per_device_train_batch_size=2",
        "--logging_steps=1",
        "--save_strategy=no",
        "--use_cpu",
        "--bf16=False",
        "--report_to=none",
        # A rank imports for ten seconds of CPU; the scripts below train on both pods.
        pods=1,
    )
    steps = [event for event in run.events() if event.kind == "step"]
    assert [event.whole("step") for event in steps] == [1, 2]
    assert all(event.number("entropy") is not None for event in steps)
    assert (run.paths.outputs / "trained" / "model.safetensors").exists()


def test_deepspeed_s_pipeline_trains(cluster: Cluster) -> None:
    run = trained(cluster, SCRIPTS / "pipeline.py")
    assert "stage 0 of 2 losses" in run.logs(rank=0, stream="stdout")


def test_accelerate_s_own_collectives_agree(cluster: Cluster) -> None:
    script = Path(accelerate.__file__).parent / "test_utils" / "scripts" / "test_ops.py"
    run = trained(cluster, script)
    printed = run.logs(rank=0, stream="stdout")
    assert "Num processes: 2" in printed
    assert "testing sending tensors across devices" in printed
    assert "alone" not in run.message


def test_answers_of_a_trainer_are_in_order_and_its_workers_differ(cluster: Cluster) -> None:
    run = trained(cluster, SCRIPTS / "trainer_checks.py")
    for rank in (0, 1):
        printed = run.logs(rank=rank, stream="stdout")
        assert re.findall("in order 2|streamed|drew", printed) == ["in order 2", "streamed", "drew"]


def test_torch_s_own_tests_pass_as_under_torchrun(cluster: Cluster, tmp_path: Path) -> None:
    script = SCRIPTS / "torch_distributed.py"
    theirs, ours = tmp_path / "torchrun", tmp_path / "pods"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, str(script), str(theirs)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    trained(cluster, script, str(ours))
    for rank in (0, 1):
        ends, expected = (
            json.loads((folder / f"ends-{rank}.json").read_text()) for folder in (ours, theirs)
        )
        assert ends == expected
        assert [name for name, end in ends.items() if end not in ("passed", "skipped")] == []
        assert [*ends.values()].count("passed") > 80


@pytest.mark.parametrize("start", [{"module": "pkg.train", "folder": "src"}, {"path": "run.py"}])
def test_a_repository_with_a_src_folder_runs(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: dict[str, str]
) -> None:
    package = tmp_path / "src" / "pkg"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "sizes.py").write_text("SIZE = 3\n")
    (package / "train.py").write_text(REPOSITORY)
    (tmp_path / "run.py").write_text(
        "import sys\nfrom pathlib import Path\n"
        "sys.path.insert(0, str(Path(__file__).parent / 'src'))\nimport pkg.train\n"
    )
    monkeypatch.chdir(tmp_path)
    run = cluster.submit(Script(**start))
    run.wait(300, progress=False).raise_for_status()
    for rank in (0, 1):
        assert run.logs(rank=rank, stream="stdout").strip() == f"rank {rank} of size 3"


def test_the_lock_of_an_aborted_build_is_named(cluster: Cluster, tmp_path: Path) -> None:
    lock = tmp_path / "fused_adam" / "lock"
    lock.parent.mkdir()
    lock.touch()
    script = tmp_path / "waiting.py"
    script.write_text(
        f"from torch.utils.file_baton import FileBaton\n\nFileBaton({str(lock)!r}).wait()\n"
    )
    run = cluster.submit(Script(script), pods=1)
    named = f"waiting for the build of an op that holds {lock}. If no process builds the op"
    until(lambda: named in run.logs(rank=0, stream="stderr"), 180)
    lock.unlink()
    run.wait(300, progress=False).raise_for_status()
