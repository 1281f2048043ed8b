"""`CMLProject`: jobs without a notebook, and applications, by Cloudera ML's API v2.

Applications outlive the session.

Fields and paths: https://docs.cloudera.com/machine-learning/cloud/rest-api-reference/index.html
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, Field

from workbench.base.child import HOME
from workbench.base.errors import BackendError, ConfigError, PodTimeout
from workbench.base.files import read_json, user_path, write_text
from workbench.base.record import Allowed, PathText, Positive, Record, Unit
from workbench.pods.place import absolute

KEY = "CDSW_APIV2_KEY"
"""Name of the variable with the API key; sessions have the variable."""

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9-]{0,40}[A-Za-z0-9])?")
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
            f"CMLProject url is {url!r}; give the workbench's address, as in"
            " 'https://ml-1.example.org'"
        )
    return url.rstrip("/")


class CMLProject(Record):
    """A Cloudera ML project: makes jobs and applications through API v2 of the platform.

    The API key is read from the variable CDSW_APIV2_KEY, which sessions have, and stored nowhere.
    """

    label: ClassVar[str] = "CMLProject"

    runtime: Annotated[
        str, Field(min_length=1), Allowed("the image's name with its tag, as the catalog shows it")
    ]
    """Identifier of the runtime of jobs and applications: its image, as in the Runtime Catalog."""
    url: Annotated[str, AfterValidator(_check_address)] = ""
    """Address of the workbench. Default: the session's own, by CDSW_API_URL or CDSW_DOMAIN."""
    project: str = ""
    """Id of the project. Default: the session's own, by CDSW_PROJECT_ID."""
    folder: Annotated[PathText, AfterValidator(absolute)] = "/home/cdsw"
    """The project's folder. Default `/home/cdsw`."""
    request_timeout_s: Annotated[Positive, Unit("s")] = 30
    """Time limit for an answer of the platform, in seconds. Default 30."""

    def __dir__(self) -> list[str]:
        """Return what an editor completes."""
        return [*super().__dir__(), "run_job", "tensorboard"]

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
        """Make and start a job that runs a `SPEC.json` without a notebook, as `workbench run` does.

        Args:
            spec: The specification, a file in the project's folder.
            name: The job's name on the platform.
            out: Run directory to be made, in the project's folder. Default: beside the
                specification, with the name.
            cpu: Processor cores of the job's own engine; workers have the specification's.
            memory_gib: Memory of the engine in GiB.
            nvidia_gpu: GPUs of the engine, for `LocalPods` or `CMLPods(session=True)`.
            timeout_s: Seconds after which the platform ends the job. Default None: the site's
                limit.
            env: More variables of the job. Default none.

        Raises:
            ConfigError: The file is missing, is no specification, or lies outside the project; or
                there is no API key.
            BackendError: The platform refuses.
        """
        _check_name(name)
        path = self._within(spec, "the specification")
        read = read_json(path)
        if not {"cluster", "job"} <= read.keys():
            raise ConfigError(
                f"{path} is missing, or has no cluster and job; write a SPEC.json as for"
                " `workbench run`"
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
        """Make an application that shows TensorBoard of a folder.

        The application outlives the session.

        Args:
            folder: Folder in the project for TensorBoard: a run directory, or a folder of run
                directories.
            name: The application's name.
            subdomain: First part of the application's address, unique on the site. Default: the
                name with the project's id.
            cpu: Processor cores of the application.
            memory_gib: Memory of the application in GiB.

        Raises:
            ConfigError: The folder is missing or outside the project; or there is no API key.
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
                "CMLProject needs the workbench's address outside a session:"
                " CMLProject(url='https://…')"
            )
        return given or f"https://{domain}"

    @property
    def _project(self) -> str:
        project = self.project or os.environ.get("CDSW_PROJECT_ID", "")
        if not project:
            raise ConfigError(
                "CMLProject needs the project's id outside a session: CMLProject(project='…')"
            )
        return project

    def _within(self, path: str | Path, what: str) -> Path:
        whole = user_path(path).absolute().resolve()
        if not whole.is_relative_to(Path(self.folder).resolve()):
            raise ConfigError(
                f"{what} {whole} is not in the project's folder {self.folder}; the run sees only"
                " the project's folder"
            )
        return whole

    def _script(self, name: str, argv: Sequence[str], more: str = "") -> str:
        """Write the platform's start script, a file of the project, and return its path there."""
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

        key = os.environ.get(KEY, "")
        if not key:
            raise ConfigError(
                f"{KEY} is not set: a session has its API key there; outside a session make a key"
                " (API Keys)"
            )
        # Times out before the notebook seems to hang.
        url = f"{self._url}/api/v2/projects/{self._project}{path}"
        headers = {"Authorization": f"Bearer {key}"}
        try:
            answer = httpx2.request(
                method, url, json=body, headers=headers, timeout=self.request_timeout_s
            )
        except httpx2.TimeoutException as error:
            limit_s = self.request_timeout_s
            raise BackendError(
                f"Cloudera ML at {self._url} did not answer in {limit_s:g} s; "
                f"CMLProject(…, request_timeout_s={4 * limit_s:g}) waits longer"
            ) from error
        except httpx2.HTTPError as error:
            raise BackendError(f"Cloudera ML at {self._url} does not answer: {error}") from error
        try:
            reply: dict[str, Any] = answer.json() if answer.content else {}
        except ValueError:
            reply = {"message": answer.text[:300]}
        # The platform gives its reason under different keys.
        if answer.status_code >= 400:
            words = reply.get("message") or reply.get("error") or "it gives no reason"
            raise BackendError(
                f"Cloudera ML refused {method} {path} ({answer.status_code}): {words}"
            )
        return reply


@dataclass(frozen=True, kw_only=True, slots=True)
class CMLJob:
    """A job of a project and its started run."""

    project: CMLProject = field(repr=False)
    id: str
    run: str
    """Id of its run."""
    name: str
    path: Path
    """The run directory. `Run.load` reads the directory once the job has made it."""

    @property
    def status(self) -> str:
        """State of the run in the platform's words, such as ENGINE_RUNNING.

        Every read asks the platform.
        """
        return str(
            self.project._ask("GET", f"/jobs/{self.id}/runs/{self.run}").get(
                "status", "ENGINE_UNKNOWN"
            )
        )

    def wait(self, timeout_s: float | None = None) -> str:
        """Wait until the run has ended and return the final state in the platform's words.

        Raises:
            PodTimeout: The run has not ended in time.
        """
        return _await(self, _RUN_ENDED, timeout_s, f"job {self.name}")

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
        """State of the application in the platform's words, such as APPLICATION_RUNNING.

        Every read asks.
        """
        return str(
            self.project._ask("GET", f"/applications/{self.id}").get(
                "status", "APPLICATION_UNKNOWN"
            )
        )

    def wait(self, timeout_s: float | None = 300) -> str:
        """Wait until the application runs or has failed; return the state in the platform's words.

        Raises:
            PodTimeout: The application still starts when the time is over.
        """
        return _await(self, _APP_ENDED, timeout_s, f"application {self.name}")

    def delete(self) -> None:
        """Stop and delete the application."""
        self.project._ask("DELETE", f"/applications/{self.id}")


def _await(
    asked: CMLJob | CMLApplication, ends: Sequence[str], timeout_s: float | None, what: str
) -> str:
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while (now := asked.status) not in ends:
        left_s = _LOOK_S if deadline is None else deadline - time.monotonic()
        if left_s <= 0:
            raise PodTimeout(f"{what} is {now} after {timeout_s:.0f} s")
        time.sleep(min(_LOOK_S, left_s))
    return now
