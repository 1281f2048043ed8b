"""Parts about the machine: GPUs, seats of GPUs, and the allocator of memory."""
