"""One kind of job: what a fine-tuning job does to its run directory, its pods and its checkpoints."""
