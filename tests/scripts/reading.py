"""Read rows to an epoch's batches; print seconds and peak memory (`ours|plain FOLDER`)."""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path

os.environ.update(TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1")

import torch
from transformers import AutoTokenizer, DataCollatorForSeq2Seq


def ours(folder: Path) -> Iterator[dict[str, torch.Tensor]]:
    from workbench.finetune.data.training.pod_rows import PodRanks, SharedRows, rows_of_pod
    from workbench.finetune.data.training.rows import load
    from workbench.finetune.job.finetune import FineTune
    from workbench.finetune.model.load import load as load_model
    from workbench.finetune.model.text.encode import Encoder
    from workbench.finetune.recipe.standalone import GlobalBatchSampler

    model = str(folder / "model")
    outline = load_model(model, (), seed=0, weights=False)
    encoder = Encoder(outline, FineTune(model=model, dataset=str(folder), technique="single"))
    examples = load(str(folder / "train.jsonl"), None, None).train
    alone = PodRanks(folder=folder / "tokens", number=0, count=1)
    rows = rows_of_pod(SharedRows(examples, encoder.rows, alone))
    one = {"micro_batch": 32, "accumulation": 1, "rank": 0, "world_size": 1, "seed": 0}
    sampler = GlobalBatchSampler(rows=len(rows), lengths=rows.lengths, **one)
    loader = torch.utils.data.DataLoader(rows, batch_sampler=sampler, collate_fn=encoder.collator)
    yield from loader


def plain(folder: Path) -> Iterator[dict[str, torch.Tensor]]:
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    read = [
        json.loads(line)
        for line in (folder / "train.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    source, target = (
        tokenizer([row[key] for row in read], truncation=True, max_length=96).input_ids
        for key in ("source", "target")
    )
    rows = [
        {"input_ids": ids, "labels": labels} for ids, labels in zip(source, target, strict=True)
    ]
    collate = DataCollatorForSeq2Seq(tokenizer)
    yield from torch.utils.data.DataLoader(rows, batch_size=32, shuffle=True, collate_fn=collate)


def main() -> None:
    began = time.monotonic()
    rows = sum(
        len(batch["labels"])
        for batch in {"ours": ours, "plain": plain}[sys.argv[1]](Path(sys.argv[2]))
    )
    took_s, peak = (
        time.monotonic() - began,
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    )
    print(json.dumps({"seconds": took_s, "mib": peak, "rows": rows}))


if __name__ == "__main__":
    main()
