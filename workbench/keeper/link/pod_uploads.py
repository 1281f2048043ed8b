"""Let pods upload the large files of their checkpoints, so that this machine sends no copy.

A pod gets a link for each part of a file: the right to write that part, for some hours. The
credentials of the store stay here. What a pod cannot upload is sent from here.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass

from workbench.base.errors import RunError, WorkbenchError
from workbench.base.words import truncate
from workbench.keeper.link.agent import AgentLink
from workbench.keeper.link.context import RunContext
from workbench.keeper.resource_limits import TRANSFERS, in_threads
from workbench.pods.ssh.bulk.transfer import LARGE
from workbench.rundir.stores.address import protocol_of
from workbench.rundir.stores.checkpoints import StoredCheckpoint
from workbench.rundir.stores.store import Parts, Store

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Upload:
    link: AgentLink
    file: str
    """Path on the pod."""
    name: str
    """Name in the checkpoint."""
    sha256: str
    parts: Parts


class PodUploads:
    """Uploads by the pods of a run."""

    def __init__(self, context: RunContext) -> None:
        self.context = context
        """Context of the current attempt."""
        self._failed: dict[str, str] = {}
        self._abandoned = threading.Event()

    def abandon(self) -> None:
        """End uploads in progress from another thread, within some seconds."""
        self._abandoned.set()

    def resume(self) -> None:
        """Ask all pods again."""
        self._abandoned.clear()
        self._failed.clear()

    @property
    def notes(self) -> list[str]:
        """Why pods uploaded nothing, a line for each pod."""
        return [
            f"this machine uploaded the checkpoints of {pod}, because {pod} could not: {why}"
            for pod, why in sorted(self._failed.items())
        ]

    def upload(self, store: Store, checkpoint: StoredCheckpoint) -> set[str]:
        """Have the pods upload their large files of a checkpoint. Return the names of the files.

        A file is uploaded only with the content of its copy here. Raise RunError if the store
        refuses.
        """
        if protocol_of(store.address) != "s3":
            return set()
        there: set[str] = set()
        uploads = self._begun(store, checkpoint)
        receipts = in_threads(self._sent, uploads, TRANSFERS)
        for upload, tags in zip(uploads, receipts, strict=True):
            if tags:
                store.join(upload.parts, tags)
                there.add(upload.name)
            elif not self._abandoned.is_set():
                store.drop(upload.parts)
        return there

    def _begun(self, store: Store, checkpoint: StoredCheckpoint) -> list[_Upload]:
        links = {link.pod.name: link for link in self.context.links}
        step = f"step-{checkpoint.step}"
        uploads = []
        for name, facts in checkpoint.files.items():
            pod, _, within = name.partition("/")
            if facts.bytes < LARGE or pod not in links or pod in self._failed:
                continue
            folder = self.context.on_pod(links[pod]).checkpoints / step
            uploads.append(
                _Upload(
                    link=links[pod],
                    file=str(folder / within),
                    name=name,
                    sha256=facts.sha256,
                    parts=store.begin(f"{step}/{name}", facts.bytes),
                )
            )
        return uploads

    def _sent(self, upload: _Upload) -> list[str]:
        """Return the store's receipts. Empty: the pod could not send the file."""
        pod = upload.link.pod.name
        if pod in self._failed:
            return []
        try:
            digest, tags = upload.link.upload(
                upload.file, upload.parts.links, upload.parts.part_bytes, self._tell
            )
            if digest != upload.sha256 or len(tags) != len(upload.parts.links):
                raise RunError(f"{upload.name} on the pod is not the file that was copied")
        except WorkbenchError as error:
            self._failed[pod] = truncate(error)
            logger.warning("%s uploads nothing: %s", pod, error)
            return []
        return tags

    def _tell(self, _done: int, _size: int) -> None:
        if self._abandoned.is_set():
            raise RunError("the upload was abandoned")
