"""Ranks that start without keeper and agents: a `SPEC.json` and a shared folder are all they are given."""
