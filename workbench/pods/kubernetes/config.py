"""Where the Kubernetes API server is and who we are there; sends nothing but what a kubeconfig's login helper does."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workbench.base.errors import ConfigError
from workbench.pods.kubernetes.options import KubernetesOptions

_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


@dataclass(frozen=True, kw_only=True, slots=True)
class Access:
    configuration: Any = field(repr=False)
    """The client's `Configuration`; holds credentials, never print it."""
    namespace: str
    in_cluster: bool


def find_access(options: KubernetesOptions) -> Access:
    """Find the API server: what the options name, else the service account of this pod, else the kubeconfig."""
    import yaml
    from kubernetes import client, config

    configuration = client.Configuration()
    configuration.retries = False  # our own know which calls may be made twice
    if not (options.kubeconfig or options.context):
        with contextlib.suppress(config.ConfigException, OSError):  # not in a cluster, or without an account
            config.load_incluster_config(client_configuration=configuration)
            namespace = options.namespace or account_namespace() or "default"
            return Access(configuration=configuration, namespace=namespace, in_cluster=True)
    path = options.kubeconfig or None
    try:
        config.load_kube_config(path, context=options.context or None, client_configuration=configuration)
        contexts, active = config.list_kube_config_contexts(path)
        context = next((entry for entry in contexts if entry["name"] == options.context), active)["context"]
        namespace = options.namespace or str(context.get("namespace") or "default")
    except (config.ConfigException, yaml.YAMLError, OSError, ValueError, LookupError, TypeError) as error:
        where = options.kubeconfig or os.environ.get("KUBECONFIG") or "~/.kube/config"
        raise ConfigError(f"the kubeconfig {where} cannot be used: {error}") from error
    return Access(configuration=configuration, namespace=namespace, in_cluster=False)


def account_namespace() -> str:
    """Return the namespace that this process runs in; empty outside a cluster."""
    with contextlib.suppress(OSError):
        return _NAMESPACE.read_text().strip()
    return ""
