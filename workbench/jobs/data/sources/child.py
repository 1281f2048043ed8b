"""Rows that `datasets` reads, in a process of its own: the notebook imports no such library, and holds one row."""

from __future__ import annotations

import json
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping

from workbench.base import entries
from workbench.base.child import child_environment, start
from workbench.base.errors import ConfigError
from workbench.base.json_values import parse_json


def child_rows(request: Mapping[str, object], what: str, limit_s: float | None = None) -> Iterator[object]:
    """Ask `workbench.worker.data.stream` for rows; it is ended when no more are wanted, or after so many seconds."""
    env = child_environment(HF_DATASETS_DISABLE_PROGRESS_BARS="1", HF_HUB_DISABLE_TELEMETRY="1")
    with tempfile.TemporaryFile() as words:
        command = ("-W", "ignore", "-m", entries.ROW_STREAM, json.dumps(request))
        child = start(*command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=words)
        assert child.stdout is not None
        end = threading.Timer(limit_s or 0.0, child.kill)
        end.daemon = True
        try:
            if limit_s is not None:
                end.start()
            for line in child.stdout:
                yield parse_json(line)
            if child.wait():
                words.seek(0)
                tail = words.read().decode(errors="replace").strip().splitlines()[-1:]
                raise ConfigError(f"{what} cannot be read: {(tail or [f'exit code {child.returncode}'])[0]}")
        except ValueError as error:
            raise ConfigError(f"{what} cannot be read: {error}") from error
        finally:
            end.cancel()
            child.kill()
            child.stdout.close()
            child.wait()
