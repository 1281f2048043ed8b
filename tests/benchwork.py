"""What `make bench` measures of rows: trained on, answered and read, each beside the plain way.

The rows are WikiSQL's, which lie beside the checkout; where they do not, nothing of this is measured.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchpair import Pair, Turn

from workbench import Cluster, FineTune, LocalPods, PodSpec, Script
from workbench.jobs.data.rows import row_from

HERE = Path(__file__).resolve().parent
ROWS = HERE.parents[1] / "shared" / "data" / "wikisql"
PADDED = str(HERE / "scripts" / "padded.py")
READING = str(HERE / "scripts" / "reading.py")


def training(root: Path) -> Iterator[Pair]:
    """Compare a run's training with the plain Trainer's over rows padded to 96 + 96 tokens, on the same pod."""
    if not ROWS.exists():
        return
    for name, steps in (("tiny-t5", 150), ("t5-small", 6)):
        folder = root / name
        write_model(folder, name)
        job = FineTune(
            model=str(folder / "model"), dataset=str(folder), technique="single", max_steps=steps, profile_step=0,
            per_device_train_batch_size=8, gradient_accumulation_steps=4, learning_rate=1e-3, max_source_length=96,
            max_target_length=96, predict_rows=0, precision="fp32",
        )  # fmt: skip
        script = Script(PADDED, args=["train", str(folder), str(steps)])
        with Cluster(LocalPods(), PodSpec(cpus=2), path=root / f"{name}-cluster") as cluster:
            last: dict[str, dict[str, float]] = {}

            def ours(cluster: Cluster = cluster, job: FineTune = job, last: dict[str, Any] = last) -> float:
                result = cluster.submit(job).wait(progress=False).raise_for_status()
                useful, padded = result.useful_tokens_per_s or 0.0, result.padded_tokens_per_s or 1.0
                last["ours"] = {"eval_loss": result.eval_loss, "useful": useful / padded}
                return result.train_samples_per_s or 0.0

            def plain(cluster: Cluster = cluster, script: Script = script, last: dict[str, Any] = last) -> float:
                run = cluster.submit(script)
                run.wait(progress=False).raise_for_status()
                last["plain"] = json.loads(run.logs(stream="stdout").strip().splitlines()[-1])
                return last["plain"]["samples_per_s"]

            def told(who: str, figure: str, last: dict[str, Any] = last) -> Turn:
                return lambda: last[who][figure]

            both = {"plain_is": "plain Trainer, padded to 96 + 96", "more_is_better": True}
            bound = ">= 4 x" if name == "tiny-t5" else ">= 5.5 x"
            yield Pair(what=f"samples/s, {name}, one pod, FP32, 32 rows", ours=ours, plain=plain, bound=bound, **both)
            for figure, what, bound in (
                ("useful", f"useful of all tokens, {name}", ">= 0.9"),
                ("eval_loss", f"masked evaluation loss after {32 * steps} samples, {name}", "<= 1.02 of plain"),
            ):
                yield Pair(
                    what=what, ours=told("ours", figure), plain=told("plain", figure), bound=bound,
                    **{**both, "more_is_better": figure == "useful"},
                )  # fmt: skip


def write_model(folder: Path, name: str) -> None:
    """Write a model of random weights and real rows: `model/`, `train.jsonl`, 512 rows in `eval.jsonl`."""
    from transformers import PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

    from workbench.jobs.data.rows import Example
    from workbench.worker.model.load import load
    from workbench.worker.model.tokenizer import END, PAD, train_tokenizer

    (folder / "model").mkdir(parents=True)
    examples: list[Example] = []
    for part, most in (("train", None), ("eval", 512)):
        lines = (ROWS / f"{part}.jsonl").read_text(encoding="utf-8").splitlines()[:most]
        rows = [row_from(json.loads(line), part) for line in lines]
        (folder / f"{part}.jsonl").write_text("".join(row.to_json() + "\n" for row in rows), encoding="utf-8")
        examples += [Example(source=row.source, target=row.target) for row in rows]
    if name == "tiny-t5":
        loaded = load(name, examples, seed=0)
        model, tokenizer = loaded.model, loaded.tokenizer
    else:
        text = train_tokenizer([text for e in examples for text in (e.source, e.target)], vocabulary=8192)
        from tokenizers import Tokenizer

        tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(text), pad_token=PAD, eos_token=END)
        model = T5ForConditionalGeneration(T5Config(decoder_start_token_id=0))  # whose defaults are t5-small's
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")


def answers(root: Path) -> Iterator[Pair]:
    """Compare the answers a second of `run.predict` with those of a loop of one question at a time."""
    if not ROWS.exists():
        return
    folder, asked = root / "asked", 1000
    write_model(folder, "tiny-t5")
    job = FineTune(
        model=str(folder / "model"), dataset=str(folder), technique="single", max_steps=300, learning_rate=2e-3,
        per_device_train_batch_size=32, max_source_length=96, max_target_length=96, predict_rows=0,
        eval_strategy="no", profile_step=0,
    )  # fmt: skip
    with Cluster(LocalPods(), PodSpec(cpus=2), path=root / "asked-cluster") as cluster:
        run = cluster.submit(job)
        run.wait(progress=False).raise_for_status()
    shutil.rmtree(folder / "model")
    shutil.copytree(run.paths.model, folder / "model")
    lines = (ROWS / "eval.jsonl").read_text(encoding="utf-8").splitlines()[:asked]
    questions = [row_from(json.loads(line), "eval").source for line in lines]
    run.predict(questions[:1])  # the model is loaded

    def ours() -> float:
        began = time.monotonic()
        assert len(run.predict(questions)) == asked
        return asked / (time.monotonic() - began)

    def plain() -> float:
        command = [sys.executable, PADDED, "ask", str(folder), "100"]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}  # of a model this small, more are slower
        out = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True).stdout
        return float(json.loads(out.splitlines()[-1])["answers_per_s"])

    yield Pair(
        what="answers/s, 1,000 questions, tiny-t5 after 300 steps",
        ours=ours,
        plain=plain,
        plain_is="generate, one question at a time",
        bound=">= 10 x",
        more_is_better=True,
    )


def reading(root: Path) -> Iterator[Pair]:
    """Compare how long 80,000 rows take to token batches, and how much more memory than 8,000 rows."""
    if not ROWS.exists():
        return
    for count in (8_000, 80_000):
        write_model(folder := root / f"read-{count}", "tiny-t5")
        lines = (folder / "train.jsonl").read_text(encoding="utf-8").splitlines()
        rows = (json.loads(lines[n % len(lines)]) for n in range(count))
        texts = (json.dumps({**row, "source": f"{row['source']} {n}"}) for n, row in enumerate(rows))
        (folder / "train.jsonl").write_text("\n".join(texts) + "\n", encoding="utf-8")
    last: dict[str, float] = {}

    def turn(who: str) -> Turn:
        def measure() -> float:
            small, large = (_read(who, root / f"read-{count}") for count in (8_000, 80_000))
            last[who] = large["mib"] - small["mib"]
            return large["seconds"]

        return measure

    plain_is = "tokenized whole, DataCollatorForSeq2Seq"
    yield Pair(
        what="seconds from 80,000 rows to token batches, one core",
        ours=turn("ours"), plain=turn("plain"), plain_is=plain_is, bound="<= 60 s",
    )  # fmt: skip
    yield Pair(
        what="MiB of memory more for 80,000 rows than for 8,000",
        ours=lambda: last["ours"], plain=lambda: last["plain"], plain_is=plain_is, bound="<= 10 MiB",
    )  # fmt: skip


def _read(who: str, folder: Path) -> dict[str, float]:
    command = [sys.executable, READING, who, str(folder)]
    figures: dict[str, float] = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    return figures
