"""Have the agent of a pod make an environment for a job or for a cluster, and wait for the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from workbench.base.json_values import as_str
from workbench.pods.pod import Report, no_report

if TYPE_CHECKING:
    from workbench.keeper.link.agent import AgentLink

_LOOK_S = 0.5
# Time to end pip and to remove a half environment.
_END_S = 30.0


def make_environment(
    link: AgentLink,
    *,
    folder: str,
    request: Mapping[str, object],
    limit_s: float,
    run: str = "",
    unwanted: Callable[[], bool] = lambda: False,
    show: Report = no_report,
) -> Mapping[str, Any]:
    """Return the agent's last answer. The state is "made", "failed", or a state of our own.

    Our own states are "late" after the limit, and "ended" if the environment is not wanted any
    more. `show` is called with the last line of pip.
    """
    until = time.monotonic() + limit_s
    end_by = 0.0
    while True:
        now = time.monotonic()
        stop = unwanted() or now > until
        if stop and not end_by:
            end_by = now + _END_S

        def ask(_ssh: object, stop: bool = stop) -> Mapping[str, Any]:
            return link.call("environment", run=run, folder=folder, request=request, stop=stop)

        answer = link.retry_until_lease(ask, unwanted=unwanted)
        is_busy = answer.get("state") == "busy"
        if is_busy and (not stop or now < end_by):
            show(as_str(answer.get("line")))
            time.sleep(_LOOK_S)
            continue
        if stop and answer.get("state") != "made":
            return {"state": "late" if now > until else "ended"}
        return answer
