"""The trainer that every rank of a `FineTune` job runs."""
