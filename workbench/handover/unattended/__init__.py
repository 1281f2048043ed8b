"""Run ranks without keeper and agents, from a `SPEC.json` and a shared folder."""
