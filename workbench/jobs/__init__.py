"""Describe jobs, techniques, datasets and DeepSpeed configurations; start nothing."""
