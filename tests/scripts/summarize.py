"""A summarization script as people write it with transformers; it knows nothing of this package."""

from collections import Counter
from dataclasses import dataclass

import numpy
from datasets import load_dataset
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    HfArgumentParser,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    set_seed,
)


@dataclass
class DataArguments:
    """What it reads."""

    model_name_or_path: str
    train_file: str
    validation_file: str
    source_prefix: str = "summarize: "
    max_source_length: int = 64
    max_target_length: int = 16


data, args = HfArgumentParser(
    (DataArguments, Seq2SeqTrainingArguments)
).parse_args_into_dataclasses()
set_seed(args.seed)
tokenizer = AutoTokenizer.from_pretrained(data.model_name_or_path)
model = AutoModelForSeq2SeqLM.from_pretrained(data.model_name_or_path)
rows = load_dataset(
    "json", data_files={"train": data.train_file, "validation": data.validation_file}
)


def encode(batch):
    """Make token ids of some rows."""
    sources = [data.source_prefix + text for text in batch["document"]]
    ids = tokenizer(sources, max_length=data.max_source_length, truncation=True)
    targets = tokenizer(
        text_target=batch["summary"], max_length=data.max_target_length, truncation=True
    )
    return {**ids, "labels": targets["input_ids"]}


def rouge1(evaluated):
    """Compare words of the generated summaries with those of the wanted ones."""
    texts = [
        tokenizer.batch_decode(
            numpy.where(ids < 0, tokenizer.pad_token_id, ids), skip_special_tokens=True
        )
        for ids in (evaluated.predictions, evaluated.label_ids)
    ]
    shares = []
    for made, wanted in zip(*texts, strict=True):
        both = sum((Counter(made.split()) & Counter(wanted.split())).values())
        shares.append(2 * both / max(1, len(made.split()) + len(wanted.split())))
    return {"rouge1": sum(shares) / len(shares)}


with args.main_process_first(desc="tokenizing"):
    encoded = rows.map(encode, batched=True, remove_columns=rows["train"].column_names)
trainer = Seq2SeqTrainer(
    model=model,
    args=args,
    train_dataset=encoded["train"],
    eval_dataset=encoded["validation"],
    processing_class=tokenizer,
    data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
    compute_metrics=rouge1,
)
trainer.train()
trainer.save_model()
trainer.save_state()
metrics = trainer.evaluate()
trainer.log_metrics("eval", metrics)
trainer.save_metrics("eval", metrics)
