"""What a fine-tuning job does to its run directory and its pods; the core calls it through `Job`."""
