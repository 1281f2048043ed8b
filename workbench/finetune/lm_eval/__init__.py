"""Benchmarks of a run's model by lm-eval, on the pods, before and after training."""
