"""A kubeconfig that starts a program, as a colleague could give one."""

from __future__ import annotations

from pathlib import Path

_TEXT = """
apiVersion: v1
kind: Config
current-context: c
clusters: [{{name: c, cluster: {{server: "http://127.0.0.1:9"}}}}]
contexts: [{{name: c, context: {{cluster: c, user: u}}}}]
users:
- name: u
  user:
    exec: {{apiVersion: client.authentication.k8s.io/v1, command: touch, args: ["{canary}"],
           interactiveMode: Never}}
"""


def write_kubeconfig(path: Path, canary: Path) -> str:
    """Write a kubeconfig whose `exec` plugin makes the file `canary`. Return the path."""
    path.write_text(_TEXT.format(canary=canary))
    return str(path)
