"""Submit a fine-tuning job: write its inputs, send files to pods, and resume checkpoints."""
