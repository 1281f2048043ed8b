"""Where the Kubernetes API server is and who we are there: the service account's, or a kubeconfig.

Sends nothing, but for what a kubeconfig's own login helper does.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.base.errors import ConfigError
from workbench.pods.kubernetes.options import KubernetesOptions

__all__ = ["Access", "account_namespace", "find_access", "need_client"]

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


@dataclass(frozen=True, kw_only=True, slots=True)
class Access:
    """The way to an API server."""

    configuration: Any
    """The client's `Configuration`; holds credentials, never print it."""
    namespace: str
    """Where our objects go."""
    in_cluster: bool
    """Whether this process runs in a pod of that cluster."""

    def __repr__(self) -> str:
        """Show where; never the credentials."""
        return f"Access({self.configuration.host}, namespace {self.namespace})"


def need_client() -> Any:
    """Return the official client's module."""
    try:
        from kubernetes import client
    except ImportError as error:
        raise ConfigError(
            "KubernetesPods needs the kubernetes package; run: pip install 'deepspeed-workbench[kubernetes]'"
        ) from error
    return client


def find_access(options: KubernetesOptions) -> Access:
    """Find the API server: what the options name, else the service account of this pod, else the kubeconfig."""
    import yaml
    from kubernetes import config

    configuration = need_client().Configuration()
    configuration.retries = False  # our own know which calls may be made twice
    in_cluster = not (options.kubeconfig or options.context) and _is_in_cluster()
    try:
        if in_cluster:
            config.load_incluster_config(client_configuration=configuration)
            named = account_namespace()
        else:
            path = options.kubeconfig or None
            config.load_kube_config(path, context=options.context or None, client_configuration=configuration)
            named = _context_namespace(config.list_kube_config_contexts(path), options.context)
    except (config.ConfigException, yaml.YAMLError, OSError, ValueError, LookupError, TypeError) as error:
        where = options.kubeconfig or os.environ.get("KUBECONFIG") or "~/.kube/config"
        raise ConfigError(f"the kubeconfig {where} cannot be used: {error}") from error
    return Access(configuration=configuration, namespace=options.namespace or named or "default", in_cluster=in_cluster)


def account_namespace() -> str:
    """Return the namespace that this process runs in; empty outside a cluster."""
    with contextlib.suppress(OSError):
        return (_ACCOUNT / "namespace").read_text().strip()
    return ""


def _is_in_cluster() -> bool:
    return "KUBERNETES_SERVICE_HOST" in os.environ and (_ACCOUNT / "token").is_file()


def _context_namespace(listed: tuple[list[dict[str, Any]], dict[str, Any]], wanted: str) -> str:
    contexts, active = listed
    named = next((entry for entry in contexts if entry["name"] == wanted), active)
    return str(named["context"].get("namespace") or "")
