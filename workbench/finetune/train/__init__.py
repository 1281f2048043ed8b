"""Trainer of every rank of a `FineTune` job."""
