"""Parts about the machine itself: its GPUs, their seats, and the allocator of its memory."""
