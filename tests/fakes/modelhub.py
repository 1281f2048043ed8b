"""A hub of one model on loopback, with what `huggingface_hub` asks to fetch the files."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

TOKEN = "hf_" + "b2" * 17
MODEL = "me/small"


class ModelHub:
    """Files of a gated model by commit, and the bytes that were served."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self.commits: dict[str, Mapping[str, bytes]] = {}
        self.main = ""
        self.served: Counter[str] = Counter()
        """Number of bytes served of each file."""
        self.breaks: set[str] = set()
        """Files whose next answer breaks half-way."""
        self.url = ""
        self.push(files)

    def push(self, files: Mapping[str, bytes]) -> str:
        """Make a commit the newest of `main`."""
        self.main = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        self.commits[self.main] = files
        return self.main


@contextmanager
def model_hub(files: Mapping[str, bytes]) -> Iterator[ModelHub]:  # noqa: C901  # one handler
    """Serve a model until the end of the context."""
    hub = ModelHub(files)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if self.headers.get("authorization") != f"Bearer {TOKEN}":
                self.answer(401, b"{}", {"X-Error-Code": "GatedRepo"})
                return
            path = unquote(urlsplit(self.path).path)
            revision = path.removeprefix(f"/api/models/{MODEL}/revision/")
            if revision != path:
                self.facts(hub.main if revision == "main" else revision)
                return
            commit = path.removeprefix(f"/api/models/{MODEL}/tree/")
            if commit != path:
                self.tree(commit)
                return
            commit, _, name = path.removeprefix(f"/{MODEL}/resolve/").partition("/")
            data = hub.commits.get(commit, {}).get(name)
            if data is None:
                self.answer(404, b"{}", {"X-Error-Code": "EntryNotFound"})
                return
            etag = hashlib.sha256(data).hexdigest()
            if not name.endswith(".safetensors"):
                etag = hashlib.sha1(data).hexdigest()
            headers = {"ETag": f'"{etag}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
            begin = self.headers.get("range", "").removeprefix("bytes=").partition("-")[0]
            if begin and self.command == "GET":
                size, at = len(data), int(begin)
                headers["Content-Range"] = f"bytes {at}-{size - 1}/{size}"
                self.answer(206, data[at:], headers, name)
            else:
                self.answer(200, data, headers, name)

        do_HEAD = do_GET  # noqa: N815

        def facts(self, commit: str) -> None:
            siblings = [{"rfilename": n, "size": len(b)} for n, b in hub.commits[commit].items()]
            facts = {"id": MODEL, "sha": commit, "private": True, "siblings": siblings}
            self.answer(200, json.dumps(facts).encode(), {"Content-Type": "application/json"})

        def tree(self, commit: str) -> None:
            entries = [
                {"type": "file", "path": name, "size": len(data), "oid": "0" * 40}
                for name, data in hub.commits[commit].items()
            ]
            self.answer(200, json.dumps(entries).encode(), {"Content-Type": "application/json"})

        def answer(
            self, status: int, data: bytes, headers: Mapping[str, str], name: str = ""
        ) -> None:
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(data))}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "HEAD":
                return
            if name in hub.breaks:
                hub.breaks.discard(name)
                data = data[: len(data) // 2]
                self.close_connection = True
            self.wfile.write(data)
            if name:
                hub.served[name] += len(data)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join(300)
