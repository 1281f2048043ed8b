"""Upload the copied checkpoints of a run to an object store, beside the run."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Mapping

from workbench.base.clock import now_s
from workbench.base.errors import RunError, WorkbenchError
from workbench.base.files import records
from workbench.base.words import short_list
from workbench.keeper.link.context import RunContext
from workbench.keeper.link.pod_uploads import PodUploads
from workbench.keeper.resource_limits import start_thread
from workbench.rundir.checkpoints import number_in
from workbench.rundir.events import Event, EventKind
from workbench.rundir.journal import Journal
from workbench.rundir.stores.checkpoints import (
    checkpoint_of,
    is_stored,
    put_checkpoint,
    put_run,
    trim,
)
from workbench.rundir.stores.store import Store

logger = logging.getLogger(__name__)
_LOOK_S = 0.2
# A cancelled run ends in seconds.
_CANCELLED_S = 10.0


class CheckpointUploader:
    """Upload checkpoints in a thread of its own, so that neither run nor copying waits.

    A failure is an event of the run, and never fails the run. The upload is tried again with the
    next checkpoint, at the end of the run, and by `run.fetch()`.
    """

    def __init__(self, context: RunContext, journal: Journal) -> None:
        self._paths = context.paths
        self._run_id = context.run_id
        self._environment = context.store_environment
        self._most = context.spec.job.rules.checkpoints.most
        self._journal = journal
        store = context.spec.job.rules.checkpoints.store
        self.address = f"{store}/{context.run_id}" if store else ""
        """Address of the run in the object store. Empty: the run uploads nothing."""
        self.busy: Collection[int] = ()
        """Steps of the checkpoint in transfer: its copy here must not be removed now."""
        self.by_pods = PodUploads(context)
        self._uploaded: set[int] = set()
        self._problem = ""
        self._job_sha256 = ""
        self._wake = threading.Event()
        self._ended = threading.Event()
        self._uploading = threading.Lock()
        self._thread: threading.Thread | None = None
        self._store: Store | None = None
        self._abandoned = False

    def offer(self) -> None:
        """Upload the copied checkpoints soon. Return at once."""
        if not self.address:
            return
        self._wake.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="uploads", daemon=True)
            start_thread(self._thread)

    def finish(self, cancel: threading.Event) -> list[str]:
        """Upload the remaining checkpoints, and return notes for the result. Raises nothing.

        Blocks until the last upload has ended or failed. Of a cancelled run, an upload is
        abandoned after some seconds.
        """
        if not self.address:
            return []
        cancelled_s: float | None = None
        try:
            self._ended.set()
            self.offer()
            while self._thread is not None and self._thread.is_alive():
                self._thread.join(_LOOK_S)
                if cancel.is_set():
                    cancelled_s = cancelled_s or time.monotonic()
                    if time.monotonic() > cancelled_s + _CANCELLED_S:
                        self._abandon()
        except RuntimeError as error:  # no thread could start
            self._problem = str(error)
        return self._notes()

    def upload(self) -> list[str]:
        """Upload the checkpoints that are not in the store, and return notes. Raises nothing."""
        self._abandoned = False
        self.by_pods.resume()
        # Ask the store for everything again: its content may have changed.
        self._uploaded.clear()
        self._job_sha256 = ""
        self._upload()
        return self._notes()

    @property
    def is_behind(self) -> bool:
        """Whether a copied checkpoint is not in the store."""
        return bool(self.address) and bool(self._missing())

    def _notes(self) -> list[str]:
        here = self._here()
        uploaded = [step for step in here if step in self._uploaded]
        notes = []
        if here and here[0] not in self._uploaded:
            why = self._problem or "the run was cancelled"
            notes.append(
                f"the checkpoint of step {here[0]} is not in the object store: {why}; the copy in "
                f"{self._paths.checkpoints} is whole, and run.fetch() uploads the copy while the "
                "cluster exists"
            )
        if uploaded:
            steps = short_list(uploaded)
            are = f"checkpoint of step {steps} is"
            if uploaded[1:]:
                are = f"checkpoints of steps {steps} are"
            notes.append(f"the {are} in {self.address}")
        return notes + self.by_pods.notes

    def _loop(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            is_last = self._ended.is_set()
            self._upload()
            if is_last:
                return

    def _abandon(self) -> None:
        self._abandoned = True
        self.by_pods.abandon()
        store = self._store
        if store is not None:
            store.abandon()

    def _upload(self) -> None:
        """Upload the missing checkpoints, the newest first. Raises nothing."""
        with self._uploading, Store(self.address, self._environment) as store:
            self._store = store
            while (missing := self._missing()) and not self._abandoned:
                self.busy = (missing[0],)
                try:
                    # The collector may have removed the copy in the meantime.
                    if missing[0] in self._here():
                        self._upload_step(store, missing[0])
                except Exception as error:  # Thread boundary: an upload never fails a run.
                    if not isinstance(error, WorkbenchError):
                        logger.exception("uploading a checkpoint of %s", self._run_id)
                    self._problem = str(error)
                    failed = {"step": missing[0], "message": self._problem, "address": self.address}
                    self._tell(EventKind.UPLOAD_FAILED, failed)
                    break
                finally:
                    self.busy = ()
            self._store = None

    def _upload_step(self, store: Store, step: int) -> None:
        began_s = time.monotonic()
        self._put_run(store)
        checkpoint = checkpoint_of(self._paths, step)
        by_pods: Collection[str] = ()
        if not is_stored(store, checkpoint):
            by_pods = self.by_pods.upload(store, checkpoint)
            put_checkpoint(store, self._paths, checkpoint, by_pods)
        self._uploaded.add(step)
        data = {
            "step": step,
            "bytes": checkpoint.size,
            "by_pods": sum(checkpoint.files[name].bytes for name in by_pods),
            "took_s": round(time.monotonic() - began_s, 3),
            "address": self.address,
        }
        self._tell(EventKind.UPLOADED, data)
        trim(store, self._most)

    def _put_run(self, store: Store) -> None:
        """Write the record of the run, again after a restart has changed the job."""
        job = records.sha256_of(self._paths.job)
        if job != self._job_sha256:
            put_run(store, self._paths, self._run_id)
            self._job_sha256 = job

    def _tell(self, kind: EventKind, data: Mapping[str, object]) -> None:
        try:
            self._journal.event(Event(time_s=now_s(), rank=None, kind=kind, data=data))
        except (OSError, RunError) as error:
            logger.warning("%s", error)

    def _here(self) -> list[int]:
        """Return the steps of the copied checkpoints, newest first."""
        try:
            folders = records.folders_in(self._paths.checkpoints, "step-*")
        except OSError as error:  # the run directory is gone
            logger.warning("%s", error)
            return []
        steps = [number_in(folder.name, "step") for folder in folders]
        return sorted((step for step in steps if step > 0), reverse=True)

    def _missing(self) -> list[int]:
        return [step for step in self._here() if step not in self._uploaded]
