"""Cloudera ML's API v2 for tests, for jobs and applications: real HTTP, documented fields alone.

A run and an application are processes of this machine
that carry out the project's script, as an engine does.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

from workbench.base.process import end_all, live_descendants
from workbench.pods.bootstrap.machine import free_port

KEY = "key.canary-77aa"
PROJECT = "proj-1234"
_ENGINE = {
    "project_id",
    "name",
    "script",
    "runtime_identifier",
    "cpu",
    "memory",
    "nvidia_gpu",
    "environment",
}
FIELDS = {
    "jobs": _ENGINE
    | {
        "arguments",
        "timeout",
        "kill_on_timeout",
        "kernel",
        "schedule",
        "timezone",
        "parent_id",
        "attachments",
    }
    | {
        "accelerator_label_id",
        "resource_profile_id",
        "runtime_addon_identifiers",
        "run_as",
        "paused",
    },
    "runs": {"project_id", "job_id", "environment", "arguments"},
    "applications": _ENGINE
    | {
        "subdomain",
        "description",
        "bypass_authentication",
        "kernel",
        "runtime_addon_identifiers",
        "run_as",
    }
    | {"accelerator_label_id", "resource_profile_id"},
}
"""The fields of CreateJobRequest, CreateJobRunRequest and CreateApplicationRequest."""
_PATH = re.compile(
    rf"/api/v2/projects/{PROJECT}/(?:(?P<apps>applications)(?:/(?P<app>[^/]+))?"
    r"|(?P<jobs>jobs)(?:/(?P<job>[^/]+)(?:/(?P<runs>runs)(?:/(?P<run>[^/:]+)(?P<stop>:stop)?)?)?)?)"
)


class CMLServer:
    """The platform, for one project."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.asked: list[tuple[str, str, dict[str, Any]]] = []
        self.jobs: dict[str, dict[str, Any]] = {}
        self.engines: dict[str, subprocess.Popen[bytes]] = {}
        self.stopped: set[str] = set()
        self.ports: dict[str, int] = {}
        self.refusal: tuple[int, str] | None = None
        """What every request gets instead of an answer."""

    def __enter__(self) -> Self:
        platform = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer()

            def do_POST(self) -> None:
                self._answer()

            def do_DELETE(self) -> None:
                self._answer()

            def _answer(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length)) if length else {}
                if self.headers["Authorization"] != f"Bearer {KEY}":
                    status, said = (
                        401,
                        {
                            "error": "unauthenticated",
                            "code": 16,
                            "message": "the API key is not valid",
                        },
                    )
                else:
                    status, said = platform.answer(self.command, self.path, body)
                text = json.dumps(said).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        for number in self.engines:
            self._end(number)

    def answer(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        self.asked.append((method, path, body))
        match = _PATH.fullmatch(path)
        if self.refusal is not None:
            return self.refusal[0], {"error": self.refusal[1], "message": self.refusal[1]}
        if match is None:
            return 404, {"code": 5, "message": "Not Found"}
        kind = "applications" if match["apps"] else "runs" if match["runs"] else "jobs"
        known = match["app"] or match["run"] or (match["job"] if kind == "jobs" else None)
        if method == "POST" and match["stop"]:
            self._end(match["run"])
            return 200, self._seen(match["run"])
        if method == "POST" and known is None:
            if strange := body.keys() - FIELDS[kind]:
                return 400, {"code": 3, "message": f"unknown field {', '.join(sorted(strange))}"}
            return 200, self._made(kind, match["job"] or "", body)
        if known not in {**self.jobs, **self.engines}:
            return 404, {"code": 5, "message": f"{known} not found"}
        if method == "DELETE":
            self._end(known)
            return 200, {}
        return (
            (200, self._seen(known))
            if method == "GET"
            else (405, {"message": "Method Not Allowed"})
        )

    def _made(self, kind: str, job: str, body: dict[str, Any]) -> dict[str, Any]:
        number = f"{kind[:3]}-{len(self.jobs) + len(self.engines)}"
        asked = self.jobs[job] if kind == "runs" else body
        if kind == "jobs":
            assert (self.folder / body["script"]).is_file(), (
                "the platform runs a file of the project"
            )
            self.jobs[number] = body
            return {**body, "id": number}
        self.ports[number] = free_port(["127.0.0.1"])
        environment = {
            "CDSW_APP_PORT": str(self.ports[number]),
            **asked["environment"],
            **body.get("environment", {}),
        }
        self.engines[number] = subprocess.Popen(
            [sys.executable, self.folder / asked["script"]],
            cwd=self.folder,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        return self._seen(number)

    def _seen(self, number: str) -> dict[str, Any]:
        if number not in self.engines:
            return {**self.jobs[number], "id": number}
        code = self.engines[number].poll()
        if number.startswith("app"):
            word = "RUNNING" if code is None else "STOPPED" if number in self.stopped else "FAILED"
            return {"id": number, "status": f"APPLICATION_{word}"}
        word = (
            "RUNNING"
            if code is None
            else "STOPPED"
            if number in self.stopped
            else "FAILED"
            if code
            else "SUCCEEDED"
        )
        return {"id": number, "status": f"ENGINE_{word}"}

    def _end(self, number: str) -> None:
        if number in self.engines and self.engines[number].poll() is None:
            self.stopped.add(number)
            engine = self.engines[number]
            end_all(lambda: live_descendants(engine.pid), grace_s=10)
            engine.terminate()
            engine.wait(300)
