"""Let a single pod fetch the files of a job from the internet, and the others take its copies."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import PurePosixPath
from typing import Any

from workbench.base.errors import DiskFull, RemoteError, RunError
from workbench.base.files import read_json, write_text
from workbench.base.json_values import as_int, as_objects, as_str, get_object
from workbench.base.redact import mask_secrets
from workbench.base.words import truncate
from workbench.jobs.job import PodFetch
from workbench.keeper.link.agent import AgentLink
from workbench.keeper.link.context import RunContext
from workbench.keeper.link.files import PodFiles
from workbench.pods.backends import backend_class

FETCHED = "fetched.json"
"""Record in the run directory, and file beside the ranks with the folder on their pod."""
_COMMIT = re.compile("[0-9a-f]{40,64}")
_Answer = Mapping[str, Any]


class PodFetches:
    """The fetch of a run. `folders` has the folder of each pod, by the name of the pod."""

    def __init__(
        self,
        context: RunContext,
        wanted: PodFetch,
        note: Callable[[str], None],
        unwanted: Callable[[], bool],
    ) -> None:
        self._context = context
        self._wanted = wanted
        self._note = note
        self._unwanted = unwanted
        self._lock = threading.Lock()
        self._paths: dict[tuple[str, str], str] = {}
        """Path of a file on a pod, by the name of the pod and the SHA-256."""
        self.folders: dict[str, str] = {}

    def run(self, retry: Callable[[Callable[[AgentLink], None], AgentLink], None]) -> None:
        """Fetch on the first pod, and pass the files on. Without the hub, ranks fetch themselves.

        Raises:
            RunError: A pod can neither take nor fetch the files of the commit.
        """
        first = self._context.links[0]
        record = self._context.paths.root / FETCHED
        # A restart continues with the commit of the start.
        commit = as_str(read_json(record).get("commit")) or self._wanted.revision
        try:
            listing = self._ask(first, "fetch", revision=commit)
            files = _checked(listing)
        except (RemoteError, ValueError) as error:
            why = mask_secrets(truncate(error))
            self._note(f"{first.name} did not fetch {self._wanted.name}, so ranks fetch it: {why}")
            return
        commit = listing["commit"]
        self._keep(first, listing)
        size = sum(as_int(file["size"]) or 0 for file in files)
        facts = {"name": self._wanted.name, "commit": commit, "bytes": size, "pod": first.name}
        write_text(record, json.dumps(facts))
        self._note(f"all pods use {self._wanted.name} at {commit}; {first.name} fetched the files")
        self._context.everywhere(partial(retry, partial(self._bring, files=files, commit=commit)))

    def _bring(self, link: AgentLink, *, files: list[_Answer], commit: str) -> None:
        if link.name in self.folders:
            return
        listed = {"files": files, "commit": commit}
        answer = self._ask(link, "place", **listed)
        missing = get_object(answer, "missing")
        try:
            for file in files:
                if file["name"] in missing:
                    self._take(link, file, as_str(missing[file["name"]]))
            answer = self._ask(link, "place", **listed)
            if answer.get("missing"):
                raise RemoteError("files are missing after the transfer", host=link.address)
            self.folders[link.name] = as_str(answer.get("folder"))
        except DiskFull:
            raise
        except RemoteError as error:
            self._note(
                f"{link.name} fetches {self._wanted.name} itself: {mask_secrets(truncate(error))}"
            )
            try:
                self._keep(link, self._ask(link, "fetch", revision=commit))
            except (RemoteError, ValueError) as failure:
                raise RunError(
                    f"{link.name} has no files of {self._wanted.name} at {commit}: "
                    f"{mask_secrets(truncate(failure))}"
                ) from failure

    def _take(self, link: AgentLink, file: _Answer, path: str) -> None:
        peers, digest = link.peers, file["sha256"]

        def take(source: PodFiles) -> bool:
            name, there = PurePosixPath(file["name"]).name, self._paths[source.name, digest]
            return link.take(name, digest, source, there, path, instead="from the internet")

        def refuse() -> None:
            raise RemoteError(link.unshared or "no pod has the file", host=link.address)

        if peers is None:
            refuse()
            return
        first = self._context.links[0]
        key = f"{self._context.run_id}-{self._context.attempt}-{digest}"
        peers.add(key, first)
        self._paths[link.name, digest] = path
        peers.deliver(key, link, take, refuse)

    def _keep(self, link: AgentLink, listing: _Answer) -> None:
        with self._lock:
            for file in _checked(listing):
                self._paths[link.name, file["sha256"]] = as_str(file["path"])
            self.folders[link.name] = as_str(listing.get("folder"))

    def _ask(self, link: AgentLink, verb: str, **fields: object) -> _Answer:
        spec = self._context.spec
        place = backend_class(spec.cluster.backend.get("kind"))
        env = {**place.rank_variables(spec.cluster.pods), **spec.job.env}
        request = {**self._wanted.request, "verb": verb, "env": env, **fields}
        argv = [link.pod.python, "-P", "-c", self._wanted.script]
        return link.answers(argv, request, self._wanted.name, self._unwanted)


def _checked(listing: _Answer) -> list[_Answer]:
    """Return the files of a pod's answer; ValueError for names that leave the cache."""
    files: list[_Answer] = [*as_objects(listing.get("files"))]
    hashes = [as_str(listing.get("commit"))]
    for file in files:
        path = PurePosixPath(as_str(file.get("name")))
        if path.is_absolute() or ".." in path.parts or not path.name:
            raise ValueError(f"the pod names the file {truncate(path)}")
        hashes += [as_str(file.get("blob")), as_str(file.get("sha256"))]
    if not files or not all(map(_COMMIT.fullmatch, hashes)):
        raise ValueError("the pod sent no list of files")
    return files
