"""Ranks that start without keeper and agents: a `SPEC.json` and a shared folder are all they are given.

`python -m workbench.worker.unattended SPEC.json OUT` is one rank; torchrun, mpirun or an operator of Kubernetes starts
as many as there are. The ranks meet in files beside OUT (`rendezvous`), the first prepares and judges (`coordinator`),
and each runs the same trainer, or script, as a rank that an agent starts (`rank`). OUT becomes a run directory.
"""
