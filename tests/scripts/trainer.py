"""A script as people write it with transformers' Trainer; it knows nothing of this package."""

import sys

from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

set_seed(1)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
)
rows = [{"input_ids": [n % 60] * 8, "labels": [n % 60] * 8} for n in range(32)]
args = TrainingArguments(
    output_dir="out",
    max_steps=4,
    logging_steps=2,
    eval_strategy="steps",
    eval_steps=4,
    save_steps=4,
    per_device_train_batch_size=2,
    learning_rate=1e-2,
    report_to=["tensorboard"],
    use_cpu=True,
    deepspeed=sys.argv[1] if len(sys.argv) > 1 else None,
)
trainer = Trainer(model=model, args=args, train_dataset=rows, eval_dataset=rows[:8])
trainer.train()
trainer.save_model("final")
