"""What runs on pods: the agent, the warm server and the trainer. Only this room may import torch."""

import logging

# transformers' Trainer imports peft, and that bitsandbytes, which warns on CPUs with AVX512-BF16 that a faster kernel
# is not there: it would be fetched from a hub at import. Every rank of every run would say so.
# https://github.com/bitsandbytes-foundation/bitsandbytes/blob/0.50.2/bitsandbytes/backends/cpu/ops.py
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
