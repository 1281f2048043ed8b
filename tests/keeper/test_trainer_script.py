"""Scripts with transformers' Trainer: their models are kept, their figures in panel and history."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.support.poll import until
from workbench import Cluster, Script, history
from workbench.client.tensorboard.board import board_folder

pytestmark = pytest.mark.long
SCRIPTS = Path(__file__).parent.parent / "scripts"
ZERO = {
    "zero_optimization": {"stage": 1},
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}},
}


def test_its_model_and_its_figures_are_there_through_deepspeed_and_pdsh(
    cluster: Cluster, tmp_path: Path
) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    shutil.copy(SCRIPTS / "trainer.py", folder)
    (folder / "zero.json").write_text(json.dumps(ZERO))
    run = cluster.submit(Script(folder / "trainer.py", args=["zero.json"], launcher="pdsh"))
    result = run.wait(600, progress=False).raise_for_status()
    out = run.paths.outputs
    assert (out / "final" / "model.safetensors").stat().st_size > 10_000
    assert (out / "out" / "checkpoint-4" / "trainer_state.json").exists()
    state = json.loads((out / "out" / "checkpoint-4" / "trainer_state.json").read_text())
    logged = [entry["loss"] for entry in state["log_history"] if "loss" in entry]
    steps = [event for event in run.events() if event.kind == "step" and "loss" in event.data]
    assert [(event.rank, event.data["step"], event.data["max_steps"]) for event in steps] == [
        (0, 2, 4),
        (0, 4, 4),
    ]
    assert [event.data["loss"] for event in steps] == logged
    assert all(float(str(event.data["samples_per_s"])) > 0 for event in steps)
    assert (result.steps, result.eval_loss, result.first_eval_loss) == (
        4,
        run.progress.eval_loss,
        None,
    )
    assert None not in (
        result.train_loss,
        result.train_samples_per_s,
        result.train_runtime_s,
        result.eval_loss,
    )
    assert history(run.path).records[0].eval_loss == result.eval_loss
    assert "notebook is not told" not in run.logs(0, "stderr")
    assert "built successfully" not in run.logs(0), "a minute of compiling for nothing"
    assert board_folder(run.paths) == run.path, "its own event files are shown beside ours"


STAGE_3 = """
from transformers import LlamaForCausalLM, Trainer, TrainingArguments

args = TrainingArguments("out", max_steps=2, report_to=[], use_cpu=True,
                         save_strategy="no", deepspeed="zero.json")
model = LlamaForCausalLM.from_pretrained("tiny")
rows = [{"input_ids": [n % 60] * 8, "labels": [n % 60] * 8} for n in range(32)]
Trainer(model=model, args=args, train_dataset=rows).train()
"""


def test_a_trainer_script_with_zero_3_runs_on_cpus_once_deepspeed_knows_the_ranks(
    cluster: Cluster, tmp_path: Path
) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path / "three"
    folder.mkdir()
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes)).save_pretrained(folder / "tiny")
    own = {**ZERO, "zero_optimization": {"stage": 3}, "train_batch_size": "auto"}
    (folder / "zero.json").write_text(json.dumps(own))
    (folder / "opened.py").write_text(
        "import deepspeed, torch\ndeepspeed.init_distributed('gloo')\n"
        f"{STAGE_3}\ntorch.distributed.destroy_process_group()\n"  # or torch may abort at the exit
    )
    cluster.submit(Script(folder / "opened.py")).wait(400, progress=False).raise_for_status()


def tiny_t5(folder: Path) -> None:
    """Save a T5 of some thousand weights, with a tokenizer of twenty words."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration, set_seed

    set_seed(1)
    words = ["<pad>", "</s>", "<unk>", "summarize", ":", *(f"w{n}" for n in range(20))]
    words_of = Tokenizer(
        models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>")
    )
    words_of.pre_tokenizer = pre_tokenizers.Whitespace()
    words_of.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=words_of, **special).save_pretrained(folder)
    sizes = {
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 64,
        "num_layers": 1,
        "num_heads": 4,
        "dropout_rate": 0.0,
    }
    T5ForConditionalGeneration(
        T5Config(
            vocab_size=len(words), pad_token_id=0, eos_token_id=1, decoder_start_token_id=0, **sizes
        )
    ).save_pretrained(folder)


def test_a_summarization_script_that_is_stopped_saves_its_model_and_that_is_here(
    cluster: Cluster, tmp_path: Path
) -> None:
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    folder = tmp_path / "summaries"
    folder.mkdir()
    shutil.copy(SCRIPTS / "summarize.py", folder)
    tiny_t5(folder / "t5")
    for part, count in (("train", 96), ("validation", 8)):
        rows = [
            {"document": f"w{n % 20} w{n % 7} w{n % 5}", "summary": f"w{n % 20}"}
            for n in range(count)
        ]
        (folder / f"{part}.json").write_text("\n".join(map(json.dumps, rows)))
    args = (
        "--model_name_or_path t5 --train_file train.json --validation_file validation.json "
        "--output_dir out --use_cpu --max_steps 1000000 --per_device_train_batch_size 8 "
        "--learning_rate 5e-3 --logging_steps 10 --save_strategy no "
        "--predict_with_generate --generation_max_length 6 --report_to none"
    )
    run = cluster.submit(Script(folder / "summarize.py", args=args.split(), stop_grace_s=240))
    until(
        lambda: run.state.is_terminal or (run.progress.loss or 9.0) < 2.0,
        300,
        why=lambda: run.message,
    )
    run.stop()
    result = run.wait(300, progress=False)
    assert result.state == "stopped", result.message
    how = (
        r"stopped when asked: the Trainer ended after a step, "
        r"and the ranks by themselves within \d+ s; outputs/ has .*"
    )
    assert re.fullmatch(how, result.message), result.message
    out = run.paths.outputs / "out"
    figures = json.loads((out / "eval_results.json").read_text())
    assert (result.eval_loss, result.metrics["rouge1"]) == (
        figures["eval_loss"],
        figures["eval_rouge1"],
    )
    assert result.steps == json.loads((out / "trainer_state.json").read_text())["global_step"]
    assert {path.name for path in out.iterdir()} >= {"model.safetensors", "tokenizer.json"}
    model, tokenizer = (
        AutoModelForSeq2SeqLM.from_pretrained(out),
        AutoTokenizer.from_pretrained(out),
    )
    documents, summaries = zip(*(row.values() for row in rows), strict=True)
    batch = tokenizer(
        [f"summarize: {text}" for text in documents], padding=True, return_tensors="pt"
    )
    loss = model(**batch, labels=tokenizer(list(summaries), return_tensors="pt").input_ids).loss
    assert loss.item() == pytest.approx(figures["eval_loss"], rel=1e-3), (
        "it is the model that was evaluated"
    )
