"""Two stages of a model on two ranks, with DeepSpeed's pipeline."""

import deepspeed
import torch
from deepspeed.pipe import PipelineModule

deepspeed.comm.init_distributed(dist_backend="gloo")
torch.manual_seed(1)
layers = [torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 16), torch.nn.Linear(16, 1)]
model = PipelineModule(layers, num_stages=2, loss_fn=torch.nn.MSELoss(), partition_method="uniform")
config = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "SGD", "params": {"lr": 0.05}},
}
engine, *_ = deepspeed.initialize(
    model=model, model_parameters=list(model.parameters()), config=config
)
generator = torch.Generator().manual_seed(1)
rows = torch.rand(64, 8, generator=generator)
pairs = [(row, row.sum().reshape(1)) for row in rows]


def batches():
    while True:
        for first in range(0, len(pairs), 2):
            two = pairs[first : first + 2]
            yield torch.stack([row for row, _ in two]), torch.stack([target for _, target in two])


rows_of_rank = batches()
losses = [float(engine.train_batch(data_iter=rows_of_rank)) for _ in range(12)]
assert losses[-1] < losses[0], losses
engine.save_checkpoint("stages")
print("stage", engine.stage_id, "of", engine.num_stages, "losses", losses[0], losses[-1])

torch.distributed.destroy_process_group()
