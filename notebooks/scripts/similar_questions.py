"""Learn vectors of questions with sentence-transformers: a question lies near its SQL query.

A plain sentence-transformers script: it runs as well with `python` or `torchrun`.
"""

import argparse

from datasets import load_dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.evaluation import InformationRetrievalEvaluator
from sentence_transformers.losses import MultipleNegativesRankingLoss
from sentence_transformers.models import StaticEmbedding
from transformers import AutoTokenizer

parser = argparse.ArgumentParser()
parser.add_argument("--tokenizer")
parser.add_argument("--rows")
parser.add_argument("--steps", type=int, default=30)
args = parser.parse_args()

tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
words = StaticEmbedding(tokenizer.backend_tokenizer, embedding_dim=128)
model = SentenceTransformer(modules=[words], device="cpu")

rows = load_dataset("json", data_files={"train": f"{args.rows}/train.jsonl"})["train"]
held_out = load_dataset("json", data_files={"eval": f"{args.rows}/eval.jsonl"})["eval"]
retrieval = InformationRetrievalEvaluator(
    queries={str(n): text for n, text in enumerate(held_out["question"])},
    corpus={str(n): text for n, text in enumerate(held_out["query"])},
    relevant_docs={str(n): {str(n)} for n in range(len(held_out))},
    accuracy_at_k=[1],
    name="questions",
)
trainer = SentenceTransformerTrainer(
    model=model,
    args=SentenceTransformerTrainingArguments(
        output_dir="checkpoints",
        max_steps=args.steps,
        per_device_train_batch_size=64,
        learning_rate=0.1,
        logging_steps=5,
        eval_strategy="steps",
        eval_steps=10,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
    ),
    train_dataset=rows,
    loss=MultipleNegativesRankingLoss(model),
    evaluator=retrieval,
)
trainer.evaluate()
trainer.train()
model.save_pretrained("questions-model")
