"""`CMLProject`: jobs without a notebook, and applications that outlive the session, by Cloudera ML's API v2.

Fields and paths: https://docs.cloudera.com/machine-learning/cloud/rest-api-reference/index.html
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, Field

from workbench.base.child import HOME
from workbench.base.errors import BackendError, ConfigError, PodTimeout
from workbench.base.files import read_json, write_text
from workbench.base.record import Allowed, PathText, Record
from workbench.pods.place import absolute

KEY = "CDSW_APIV2_KEY"
"""The variable that holds the API key; sessions have it."""

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9-]{0,40}[A-Za-z0-9])?")
_TIMEOUT_S = 30.0
_LOOK_S = 5.0
_RUN_ENDED = (
    "ENGINE_SUCCEEDED",
    "ENGINE_FAILED",
    "ENGINE_STOPPED",
    "ENGINE_TIMEDOUT",
    "ENGINE_SKIPPED",
)
_APP_ENDED = ("APPLICATION_RUNNING", "APPLICATION_STOPPED", "APPLICATION_FAILED")
_SCRIPT = """\
import os, subprocess, sys

subprocess.run([sys.executable, *{argv!r}{more}], check=True, cwd={folder!r})
"""


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"name is {name!r}; give letters, digits and -, a letter or digit first and last"
        )


def _check_address(url: str) -> str:
    if url and not url.startswith(("https://", "http://")):
        raise ConfigError(
            f"CMLProject url is {url!r}; give the workbench's address, as in 'https://ml-1.example.org'"
        )
    return url.rstrip("/")


class CMLProject(Record):
    """A Cloudera ML project, whose jobs and applications are made by the platform's API v2.

    The API key is taken from the variable CDSW_APIV2_KEY, which sessions have, and stands nowhere else.
    """

    label: ClassVar[str] = "CMLProject"

    runtime: Annotated[
        str, Field(min_length=1), Allowed("the image's name with its tag, as the catalog shows it")
    ]
    """Identifier of the runtime that jobs and applications have: its image, as the Runtime Catalog shows it."""
    url: Annotated[str, AfterValidator(_check_address)] = ""
    """Address of the workbench. Default: the session's own, by CDSW_API_URL or CDSW_DOMAIN."""
    project: str = ""
    """Id of the project. Default: the session's own, by CDSW_PROJECT_ID."""
    folder: Annotated[PathText, AfterValidator(absolute)] = "/home/cdsw"
    """The project's folder. Default `/home/cdsw`."""

    def run_job(
        self,
        spec: str | Path,
        *,
        name: str,
        out: str | Path | None = None,
        cpu: float = 2,
        memory_gib: float = 8,
        nvidia_gpu: int = 0,
        timeout_s: int | None = None,
        env: Mapping[str, str] | None = None,
    ) -> CMLJob:
        """Make a job that carries out a `SPEC.json` without a notebook, as `workbench run` does, and start it.

        Args:
            spec: The specification, a file in the project's folder.
            name: The job's name, which the platform shows.
            out: Run directory to be made, in the project's folder. Default: beside the specification, with the name.
            cpu: Processor cores of the job's own engine; workers have what the specification says.
            memory_gib: Its memory in GiB.
            nvidia_gpu: Its GPUs, for `LocalPods` or `CMLPods(session=True)`.
            timeout_s: Seconds after which the platform ends it. Default None: the site's.
            env: More variables of the job. Default none.

        Raises:
            ConfigError: The file is not there, is no specification, or lies outside the project; no session's key.
            BackendError: The platform refuses.
        """
        _check_name(name)
        path = self._within(spec, "the specification")
        read = read_json(path)
        if not {"cluster", "job"} <= read.keys():
            raise ConfigError(
                f"{path} is not there or has no cluster and job; write it as `workbench run` takes it"
            )
        directory = self._within(out or path.with_name(name), "the run directory")
        if directory.exists():
            raise ConfigError(f"{directory} is there already; name another with out=")
        script = self._script(
            f"job-{name}", ["-P", "-m", "workbench", "run", str(path), "--out", str(directory)]
        )
        limit = {} if timeout_s is None else {"timeout": str(timeout_s), "kill_on_timeout": True}
        asked = {**self._asked(name, script, cpu, memory_gib, nvidia_gpu, env), **limit}
        job = str(self._ask("POST", "/jobs", asked)["id"])
        run = self._ask("POST", f"/jobs/{job}/runs", {"project_id": self._project, "job_id": job})
        return CMLJob(project=self, id=job, run=str(run["id"]), name=name, path=directory)

    def tensorboard(
        self,
        folder: str | Path,
        *,
        name: str = "tensorboard",
        subdomain: str = "",
        cpu: float = 1,
        memory_gib: float = 4,
    ) -> CMLApplication:
        """Make an application that shows TensorBoard of a folder, such as a run directory; it outlives the session.

        Args:
            folder: What TensorBoard reads, in the project's folder: a run directory, or one of many.
            name: The application's name.
            subdomain: First part of its address, which nobody else may have. Default: the name with the project's id.
            cpu: Its processor cores.
            memory_gib: Its memory in GiB.

        Raises:
            ConfigError: The folder is not there or outside the project; no session's key.
            BackendError: The platform refuses.
        """
        _check_name(name)
        path = self._within(folder, "the folder")
        if not path.is_dir():
            raise ConfigError(f"{path} is not there; name a run directory, or a folder of several")
        subdomain = subdomain or f"{name}-{self._project}"
        argv = ["-m", "tensorboard.main", "--logdir", str(path), "--host", "127.0.0.1", "--port"]
        script = self._script(f"app-{name}", argv, ', os.environ["CDSW_APP_PORT"]')
        asked = self._asked(name, script, cpu, memory_gib, 0, None)
        made = self._ask(
            "POST",
            "/applications",
            {**asked, "subdomain": subdomain, "bypass_authentication": False},
        )
        scheme, _, domain = self._url.partition("://")
        return CMLApplication(
            project=self, id=str(made["id"]), name=name, url=f"{scheme}://{subdomain}.{domain}"
        )

    @property
    def _url(self) -> str:
        domain = os.environ.get("CDSW_DOMAIN", "")
        given = self.url or os.environ.get("CDSW_API_URL", "").removesuffix("/api/v1")
        if not (given or domain):
            raise ConfigError(
                "CMLProject needs the workbench's address outside a session: CMLProject(url='https://…')"
            )
        return given or f"https://{domain}"

    @property
    def _project(self) -> str:
        if not (project := self.project or os.environ.get("CDSW_PROJECT_ID", "")):
            raise ConfigError(
                "CMLProject needs the project's id outside a session: CMLProject(project='…')"
            )
        return project

    def _within(self, path: str | Path, what: str) -> Path:
        whole = Path(path).expanduser().absolute().resolve()
        if not whole.is_relative_to(Path(self.folder).resolve()):
            raise ConfigError(
                f"{what} {whole} is not in the project's folder {self.folder}, which is all that it sees"
            )
        return whole

    def _script(self, name: str, argv: Sequence[str], more: str = "") -> str:
        """Write what the platform runs, as it takes a file of the project alone; return its path there."""
        file = Path(self.folder, ".workbench", f"{name}.py")
        file.parent.mkdir(mode=0o700, exist_ok=True)
        write_text(file, _SCRIPT.format(argv=list(argv), more=more, folder=self.folder))
        return str(file.relative_to(self.folder))

    def _asked(
        self,
        name: str,
        script: str,
        cpu: float,
        memory_gib: float,
        gpus: int,
        env: Mapping[str, str] | None,
    ) -> dict[str, object]:
        home = {"PYTHONPATH": HOME} if Path(HOME).is_relative_to(self.folder) else {}
        return {
            "project_id": self._project,
            "name": name,
            "script": script,
            "runtime_identifier": self.runtime,
            "cpu": cpu,
            "memory": memory_gib,
            "nvidia_gpu": gpus,
            "environment": {**home, **(env or {})},
        }

    def _ask(
        self, method: str, path: str, body: Mapping[str, object] | None = None
    ) -> dict[str, Any]:
        import httpx2

        if not (key := os.environ.get(KEY, "")):
            raise ConfigError(
                f"{KEY} is not set: it holds the API key of a session; outside one make a key (API Keys)"
            )
        url, headers = (
            f"{self._url}/api/v2/projects/{self._project}{path}",
            {"Authorization": f"Bearer {key}"},
        )
        try:
            answer = httpx2.request(method, url, json=body, headers=headers, timeout=_TIMEOUT_S)
        except httpx2.HTTPError as error:
            raise BackendError(f"Cloudera ML at {self._url} does not answer: {error}") from error
        try:
            reply: dict[str, Any] = answer.json() if answer.content else {}
        except json.JSONDecodeError:
            reply = {"message": answer.text[:300]}
        if answer.status_code >= 400:
            words = reply.get("message") or reply.get("error") or "it gives no reason"
            raise BackendError(
                f"Cloudera ML refused {method} {path} ({answer.status_code}): {words}"
            )
        return reply


@dataclass(frozen=True, kw_only=True, slots=True)
class CMLJob:
    """A job of a project and the one run of it that was started."""

    project: CMLProject = field(repr=False)
    id: str
    run: str
    """Id of its run."""
    name: str
    path: Path
    """The run directory, which `Run.load` reads once it is there."""

    @property
    def status(self) -> str:
        """The platform's word for the run, such as ENGINE_RUNNING; asked anew each time."""
        return str(
            self.project._ask("GET", f"/jobs/{self.id}/runs/{self.run}").get(
                "status", "ENGINE_UNKNOWN"
            )
        )

    def wait(self, timeout_s: float | None = None) -> str:
        """Wait until the run has ended and return the platform's word for how.

        Raises:
            PodTimeout: It has not ended in that time.
        """
        return _await(lambda: self.status, _RUN_ENDED, timeout_s, f"job {self.name}")

    def stop(self) -> None:
        """Have the platform stop the run."""
        self.project._ask("POST", f"/jobs/{self.id}/runs/{self.run}:stop")

    def delete(self) -> None:
        """Delete the job with its history on the platform; the run directory stays."""
        self.project._ask("DELETE", f"/jobs/{self.id}")


@dataclass(frozen=True, kw_only=True, slots=True)
class CMLApplication:
    """An application of a project."""

    project: CMLProject = field(repr=False)
    id: str
    name: str
    url: str
    """Where it is seen, after the platform's login."""

    @property
    def status(self) -> str:
        """The platform's word for it, such as APPLICATION_RUNNING; asked anew each time."""
        return str(
            self.project._ask("GET", f"/applications/{self.id}").get(
                "status", "APPLICATION_UNKNOWN"
            )
        )

    def wait(self, timeout_s: float | None = 300) -> str:
        """Wait until it runs or will not; return the platform's word.

        Raises:
            PodTimeout: Neither is so in that time.
        """
        return _await(lambda: self.status, _APP_ENDED, timeout_s, f"application {self.name}")

    def delete(self) -> None:
        """Stop and delete the application."""
        self.project._ask("DELETE", f"/applications/{self.id}")


def _await(
    status: Callable[[], str], ends: Sequence[str], timeout_s: float | None, what: str
) -> str:
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while (now := status()) not in ends:
        left_s = _LOOK_S if deadline is None else deadline - time.monotonic()
        if left_s <= 0:
            raise PodTimeout(f"{what} is {now} after {timeout_s:.0f} s")
        time.sleep(min(_LOOK_S, left_s))
    return now
