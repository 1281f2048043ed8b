"""A stand-in of the hub's HTTP API on loopback.

It has what `huggingface_hub` calls to make a repository of a model and fill it,
and what it and `datasets` call to read one of rows.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_" + "a1" * 17
COMMIT = "2" * 40
Headers = dict[str, str]


@dataclass(slots=True)
class Hub:
    """What it was asked, and what it holds."""

    role: str = "write"
    writable: bool = True
    private: dict[str, bool] = field(default_factory=dict)
    """Whether a repository is private, by name."""
    files: dict[str, bytes] = field(default_factory=dict)
    """What was committed, by path; every byte of it came over HTTP."""
    rows: dict[str, bytes] = field(default_factory=dict)
    """The files of the dataset `me/rows`, which anybody may read."""
    stored: dict[str, bytes] = field(default_factory=dict)
    """Large files by their SHA-256."""
    asked: list[str] = field(default_factory=list)
    commits: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""

    def reply(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str]
    ) -> tuple[int, object, Headers]:
        self.asked.append(f"{method} {path}")
        if "/datasets/" in path:
            return self.of_rows(path.partition("?")[0])
        status, answer = self.of_models(method, path, body, headers.get("authorization", ""))
        return status, answer, {}

    def of_rows(self, path: str) -> tuple[int, object, Headers]:
        repository, _, rest = path.partition("/datasets/")[2].partition("/rows/")
        if repository != "me":
            return 401, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"}
        kind, revision, *name = rest.split("/", 2)
        assert revision in ("v1", COMMIT), path
        match kind, name:
            case "revision", []:
                return 200, {"id": "me/rows", "sha": COMMIT, "private": False, "siblings": []}, {}
            case "tree", []:
                files = [
                    {"type": "file", "path": n, "size": len(b), "oid": "3" * 40}
                    for n, b in self.rows.items()
                ]
                return 200, files, {}
            case "resolve", [file] if file in self.rows:
                return 200, self.rows[file], {"ETag": '"3"', "X-Repo-Commit": COMMIT}
            case "tree" | "resolve", _:
                return (
                    404,
                    {"error": "Entry not found"},
                    {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT},
                )
        raise AssertionError(f"{path} is not what this version of datasets was read to ask")

    def of_models(self, method: str, path: str, body: bytes, token: str) -> tuple[int, object]:  # noqa: C901
        if path.startswith("/store/"):
            return self.store(path.removeprefix("/store/"), body)
        if token != f"Bearer {TOKEN}":
            return 401, {"error": "Invalid credentials"}
        if path == "/api/whoami-v2":
            return 200, {
                "name": "me",
                "orgs": [{"name": "team"}],
                "auth": {"accessToken": {"role": self.role}},
            }
        if path == "/api/repos/create":
            return self.create(json.loads(body))
        if path == "/api/validate-yaml":
            asked = json.loads(body)
            assert asked["repoType"] == "model" and asked["content"].startswith("---\n")
            return 200, {"errors": [], "warnings": []}
        kind, _, rest = path.removeprefix("/api/models/").partition("me/model")
        assert kind == "" or path == "/me/model.git/info/lfs/objects/batch", path
        if "me/model" not in self.private:
            return 404, {"error": "Repository not found"}
        match method, rest:
            case "GET", "":
                siblings = [{"rfilename": name} for name in self.files]
                return 200, {
                    "id": "me/model",
                    "private": self.private["me/model"],
                    "siblings": siblings,
                }
            case (
                "GET",
                "/tree/main?recursive=true&expand=false" | "/tree/main?recursive=True&expand=False",
            ):
                return 200, [
                    {"type": "file", "path": p, "size": len(b), "oid": "0" * 40}
                    for p, b in self.files.items()
                ]
            case "GET", "/auth-check/write":
                return (200, {}) if self.writable else (403, {"error": "no"})
            case "POST", "/preupload/main":
                return 200, {"files": [self.mode(each) for each in json.loads(body)["files"]]}
            case "POST", ".git/info/lfs/objects/batch":
                return 200, {
                    "transfer": "basic",
                    "objects": [self.place(o) for o in json.loads(body)["objects"]],
                }
            case "POST", "/commit/main":
                return self.commit([json.loads(line) for line in body.splitlines()])
        raise AssertionError(
            f"{method} {path} is not what this version of huggingface_hub was read to ask"
        )

    def create(self, asked: dict[str, Any]) -> tuple[int, object]:
        name = f"{asked['organization'] or 'me'}/{asked['name']}"
        if not self.writable and name not in self.private:
            return 403, {"error": "no"}
        url = {"url": f"{self.url}/{name}"}
        if name in self.private:
            return 409, {"error": "You already created this model repo", **url}
        self.private[name] = asked["visibility"] == "private"
        return 200, url

    def mode(self, file: dict[str, Any]) -> dict[str, object]:
        large = file["path"].endswith((".safetensors", "tokenizer.json"))
        assert len(base64.b64decode(file["sample"])) == min(512, file["size"])
        return {
            "path": file["path"],
            "uploadMode": "lfs" if large else "regular",
            "shouldIgnore": False,
        }

    def place(self, wanted: dict[str, Any]) -> dict[str, object]:
        return {**wanted, "actions": {"upload": {"href": f"{self.url}/store/{wanted['oid']}"}}}

    def store(self, oid: str, body: bytes) -> tuple[int, object]:
        assert hashlib.sha256(body).hexdigest() == oid
        self.stored[oid] = body
        return 200, {}

    def commit(self, lines: list[dict[str, Any]]) -> tuple[int, object]:
        for line in lines:
            value = line["value"]
            match line["key"]:
                case "header":
                    self.commits.append(value)
                case "file":
                    assert value["encoding"] == "base64"
                    self.files[value["path"]] = base64.b64decode(value["content"])
                case "lfsFile":
                    assert len(self.stored[value["oid"]]) == value["size"]
                    self.files[value["path"]] = self.stored[value["oid"]]
                case "deletedFile":
                    del self.files[value["path"]]
                case key:
                    raise AssertionError(key)
        return 200, {"commitUrl": f"{self.url}/me/model/commit/{'1' * 40}", "commitOid": "1" * 40}


@contextmanager
def hub() -> Iterator[Hub]:
    """Serve one until the end; an unknown request gets a 500, and fails the test at the end."""
    held, errors = Hub(), []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            try:
                status, reply, headers = held.reply(
                    self.command, self.path, self.body(), self.headers
                )
            except Exception as error:
                errors.append(error)
                status, reply, headers = 500, {"error": repr(error)}, {}
            data = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
            self.send_response(status)
            for name, value in {"Content-Type": "application/json", **headers}.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(b"" if self.command == "HEAD" else data)

        def body(self) -> bytes:
            if self.headers.get("transfer-encoding") == "chunked":
                parts = []
                while size := int(self.rfile.readline(), 16):
                    parts.append(self.rfile.read(size))
                    self.rfile.readline()
                self.rfile.readline()
                return b"".join(parts)
            return self.rfile.read(int(self.headers.get("content-length", 0)))

        do_GET = do_POST = do_PUT = do_HEAD = answer  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        held.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield held
        finally:
            server.shutdown()
            thread.join(300)
    assert not errors, errors
