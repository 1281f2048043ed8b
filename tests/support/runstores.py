"""Stores of clusters, as their keepers leave them."""

from __future__ import annotations

from pathlib import Path

from workbench.keeper.decisions import DecisionLog
from workbench.rundir.register.store import (
    Decision,
    KnownRun,
    Registration,
    create_store,
    read_store,
    registration_in,
    write_store,
)


def list_runs(store: Path, *runs: KnownRun) -> None:
    """Replace the runs of a cluster's store by these, all without a decision."""
    create_store(store, registration_in(store) or Registration())
    write_store(store, runs=runs, decisions=(), first=1)


def decisions_in(store: Path) -> list[Decision]:
    return list(read_store(store).decisions)


def empty(log: DecisionLog, store: Path) -> None:
    """Have a log begin an empty store, as the start of a cluster does."""
    create_store(store, Registration())
    log.replay()
