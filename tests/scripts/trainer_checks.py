"""Trainer over several ranks: answers are in the rows' order, and each worker has its own seed.

transformers tests the same in two programs of its repository, which its wheel does not have.
"""

import random

import numpy
import torch
import torch.distributed as dist
from torch.utils.data import Dataset, IterableDataset
from transformers import Trainer, TrainingArguments, set_seed


class Numbers(Dataset):
    """Row n is the number n."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, number):
        return {"row": torch.tensor([float(number)]), "labels": torch.tensor(number)}


class Streamed(IterableDataset):
    """Three rows for two ranks, without a length."""

    def __iter__(self):
        return iter([{"row": torch.ones(1), "labels": torch.tensor(1)}] * 3)


class Drawn(Dataset):
    """Rows that the three generators of a worker draw."""

    def __len__(self):
        return 64

    def __getitem__(self, number):
        return {
            "row": torch.tensor([random.random(), numpy.random.random(), torch.rand([]).item()])
        }


class Same(torch.nn.Module):
    """Answer with the row itself."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(1))

    def forward(self, row, labels=None):
        return {"loss": (self.scale * row).mean(), "answer": row.flatten().long()}


class Differs(torch.nn.Module):
    """Compare the rows of this rank with those of the others."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(1))

    def forward(self, row):
        rows = [torch.zeros_like(row) for _ in range(dist.get_world_size())]
        dist.all_gather(rows, row.contiguous())
        assert all((other != rows[0]).all() for other in rows[1:]), "two ranks drew the same rows"
        return {"loss": (self.scale * row).mean()}


def arguments(**more):
    return TrainingArguments(output_dir="out", report_to=[], **more)


def in_order(answers):
    rows = list(range(len(answers.label_ids)))
    right = answers.label_ids.tolist() == rows and answers.predictions.tolist() == rows
    return {"in_order": float(right)}


set_seed(42)
for rows in (Numbers(length) for length in (101, 40, 7)):
    for held in (None, 2):  # batches that stay on the device before the ranks gather them
        trainer = Trainer(
            Same(),
            arguments(eval_accumulation_steps=held),
            eval_dataset=rows,
            compute_metrics=in_order,
        )
        assert trainer.evaluate()["eval_in_order"] == 1
        assert trainer.predict(rows).metrics["test_in_order"] == 1
print("in order", trainer.args.world_size, flush=True)

undispatched = {"dispatch_batches": False}
streaming = arguments(max_steps=1, per_device_train_batch_size=1, accelerator_config=undispatched)
Trainer(Same(), streaming, train_dataset=Streamed()).train()
print("streamed", flush=True)

drawing = arguments(max_steps=10, per_device_train_batch_size=2, dataloader_num_workers=2)
Trainer(Differs(), drawing, train_dataset=Drawn()).train()
print("drew", flush=True)
