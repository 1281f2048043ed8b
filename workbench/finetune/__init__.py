"""Fine-tuning, one kind of job: its options, techniques, trainer, plan, answers and export."""
