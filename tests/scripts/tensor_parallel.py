"""A Llama whose weights two ranks share, with DeepSpeed's AutoTP."""

import deepspeed
import torch
from transformers import LlamaConfig, LlamaForCausalLM

deepspeed.comm.init_distributed(dist_backend="gloo")
torch.manual_seed(1)
config = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
)
model = LlamaForCausalLM(config)
whole = sum(weight.numel() for weight in model.parameters())
engine, *_ = deepspeed.initialize(
    model=model,
    model_parameters=model.parameters(),
    config={
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 5e-3, "torch_adam": True}},
        "zero_optimization": {"stage": 0},
        "tensor_parallel": {"autotp_size": 2},
    },
)
part = sum(weight.numel() for weight in engine.module.parameters())
rows = torch.arange(32).reshape(4, 8) % 64  # both ranks have the same rows
losses = []
for _ in range(8):
    loss = engine(input_ids=rows, labels=rows).loss
    engine.backward(loss)
    engine.step()
    losses.append(float(loss))
assert part < whole, (part, whole)
assert losses[-1] < losses[0], losses
print(f"{part} of {whole} weights, losses {losses[0]:.6f} {losses[-1]:.6f}")

torch.distributed.destroy_process_group()
