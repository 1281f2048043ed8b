"""Predict the needs of a run while the run starts, and write the prediction to its directory.

A failed prediction does not fail the run.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workbench.base.errors import WorkbenchError
from workbench.base.files import gate, read_json, write_json
from workbench.jobs.job import Companion, FirstPod
from workbench.rundir.paths import RunPaths

logger = logging.getLogger(__name__)
_LOOK_S = 0.2
_LIMIT_S = 120.0


def companion(pod: FirstPod, run_id: str, root: Path) -> Companion:
    """Return the companion for an inquiry of the notebook in the run directory."""
    return PredictionInquiry(pod, run_id, RunPaths(root))


class PredictionInquiry:
    def __init__(self, link: FirstPod, run_id: str, paths: RunPaths):
        self._link = link
        self._run_id = run_id
        self._paths = paths
        self._thread = threading.Thread(target=self._work, name="prediction", daemon=True)

    def start(self) -> None:
        if self._paths.inquiry.exists():
            self._thread.start()

    def wait(self, seconds: float) -> None:
        """Wait at most `seconds` for the answer. A later answer is still written."""
        if self._thread.is_alive():
            self._thread.join(seconds)

    def _work(self) -> None:
        inquiry: Mapping[str, Any] = read_json(self._paths.inquiry)
        try:
            answer = self._from_pod(inquiry)
            if answer is None and not self._paths.prediction.exists():
                answer = _from_here(inquiry)
            if answer is not None:
                write_json(self._paths.prediction, answer["prediction"])
                if "trace" in answer:
                    # Runs without a keeper have no planner, and no inquiry.
                    from workbench.finetune.plan.tracing import remember

                    remember(inquiry["request"], answer["trace"])
        except Exception as error:  # thread boundary: a failed prediction must not fail the run
            logger.warning("what run %s needs is not predicted: %s", self._run_id, error)
            why = str(error)
            if not isinstance(error, WorkbenchError):
                why = f"{type(error).__name__}: {error}"
            if not self._paths.prediction.exists():
                with contextlib.suppress(OSError):
                    write_json(self._paths.prediction, {"why": why})
        with contextlib.suppress(OSError):
            gate.remove(self._paths.inquiry)

    def _from_pod(self, inquiry: Mapping[str, object]) -> Mapping[str, Any] | None:
        deadline = time.monotonic() + _LIMIT_S
        while time.monotonic() < deadline:
            try:
                reply = self._link.call("predict", run=self._run_id, inquiry=inquiry)
                if reply["state"] != "busy":
                    return reply.get("answer")
            except WorkbenchError as error:  # the owner of the run reconnects
                logger.debug("%s", error)
            time.sleep(_LOOK_S)
        return None


def _from_here(inquiry: Mapping[str, Any]) -> Mapping[str, Any]:
    # Imported here because it is rarely needed and imports 25 modules.
    from workbench.finetune.plan.prediction import prediction_of
    from workbench.finetune.plan.tracing import one_at_a_time, trace_step

    # On Linux, only for this thread and its child process.
    os.nice(19)
    with one_at_a_time():
        return {"prediction": prediction_of(inquiry, trace_step(inquiry["request"]))}
