"""GPUs of this machine for local pods: the same seats as on shared hosts.

The seats are taken by a process of its own, because a fork of the keeper would copy its threads'
locks.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from workbench.base import entries
from workbench.base.child import replies
from workbench.base.errors import ConfigError
from workbench.base.machine.nvml import VISIBLE
from workbench.base.machine.seats import (
    gpus_here,
    keep_seats,
    leave_seats,
    seat_variables,
    take_seats,
    taken_words,
)
from workbench.pods.bootstrap.machine import check_gpus
from workbench.pods.pod import Report
from workbench.pods.pod_spec import PodSpec

_LIMIT_S = 60.0


def seat_pods(
    roots: Sequence[Path], spec: PodSpec, cluster: str, report: Report
) -> list[Mapping[str, str]]:
    """Take GPUs for pods, and return the variables of each pod's sessions.

    A pod that is started again in its folder takes its own GPUs again. Raises ConfigError if too
    few GPUs are free, with the holders.
    """
    request = {
        "roots": [str(root) for root in roots],
        "cluster": cluster,
        "gpus": spec.gpus,
        "given": spec.env.get(VISIBLE, os.environ.get(VISIBLE)),
    }
    # A helper process takes the GPUs, and leaves a process behind that holds the locks.
    try:
        (answer,) = replies(entries.SEATS, request=request, limit_s=_LIMIT_S)
    except ValueError as error:
        raise ConfigError(f"no GPU of this machine can be taken: {error}") from error
    # Too few GPUs at all is another error than GPUs in use.
    if "usable" in answer:
        check_gpus(spec.gpus * len(roots), answer["usable"])
    if "error" in answer:
        raise ConfigError(f"no GPU of this machine can be taken: {answer['error']}")
    holders = [taken_words(each) for each in answer["taken"]]
    if "seats" not in answer:
        raise ConfigError(
            f"fewer than {spec.gpus * len(roots)} GPUs of this machine are free. Wait for a GPU, or"
            " ask for fewer GPUs. Taken:\n" + "\n".join(holders)
        )
    seats: list[Mapping[str, str]] = answer["seats"]
    # GPUs of others were passed over: users see which GPUs they have.
    if holders:
        own = "; ".join(
            f"{root.name} has GPUs {variables[VISIBLE]}"
            for root, variables in zip(roots, seats, strict=True)
        )
        report(f"{own}. {'; '.join(holders)}")
    return seats


def main() -> int:
    """Answer a request on standard input."""
    request = json.load(sys.stdin)
    os.environ.pop(VISIBLE, None)  # a helper process has none
    print(json.dumps(_seated(**request)))
    return 0


def _seated(roots: Sequence[str], cluster: str, gpus: int, given: str | None) -> dict[str, object]:
    """Return the variables of each pod, or why there are none."""
    places = [Path(root) for root in roots]
    try:
        seats = {place: kept for place in places if (kept := keep_seats(place))}
        fresh = [place for place in places if place not in seats]
        usable = len(gpus_here(given)) if fresh else 0
        if usable < gpus * len(fresh):
            return {"usable": usable}
        taken: list[dict[str, object]] = []
        if fresh:
            found, taken = take_seats(fresh, cluster, gpus, given)
            if not found:
                return {"taken": taken}
            seats.update(zip(fresh, found, strict=True))
    except (OSError, ValueError) as error:
        for place in places:
            leave_seats(place)
        return {"error": str(error)}
    return {"seats": [seat_variables(seats[place]) for place in places], "taken": taken}
