"""Ranks that start without keeper and agents: a `SPEC.json` and a shared folder are all they are given.

`python -m workbench.jobs.unattended SPEC.json OUT` is one rank; torchrun, mpirun or an operator of Kubernetes starts as
many as there are. The ranks meet in files beside OUT (`muster.py`), the first one prepares and judges (`head.py`), and
each runs the same trainer, or script, as a rank that an agent starts (`rank.py`). OUT becomes a run directory.
"""
