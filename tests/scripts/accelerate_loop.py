"""A classifier with accelerate's loop, as its own examples are written."""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

accelerator = Accelerator(cpu=True)
torch.manual_seed(1)
config = BertConfig(
    vocab_size=50,
    hidden_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=64,
)
model = BertForSequenceClassification(config)
rows = []
for number in range(64):
    ids = torch.randint(0, 50, (12,), generator=torch.Generator().manual_seed(number))
    rows.append({"input_ids": ids, "labels": int(ids[0] > 25)})
loader = DataLoader(rows, batch_size=8, shuffle=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
schedule = get_linear_schedule_with_warmup(optimizer, 0, 3 * len(loader))
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
for epoch in range(3):
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    right = total = 0
    for batch in loader:
        with torch.no_grad():
            guesses = model(**batch).logits.argmax(-1)
        found, labels = accelerator.gather_for_metrics((guesses, batch["labels"]))
        right += int((found == labels).sum())
        total += len(labels)
    accelerator.print(f"epoch {epoch}: {right} of {total}")
assert accelerator.num_processes == 2
accelerator.save_model(model, "classifier")
accelerator.end_training()
