"""The way to a Kubernetes API server: by the options, this pod's account or a kubeconfig.

Only a login helper of the kubeconfig may send anything. Every environment variable is read anew.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from kubernetes import client, config
from kubernetes.config.dateutil import parse_rfc3339
from kubernetes.config.kube_config import (
    ConfigNode,
    FileOrData,
    KubeConfigLoader,
    KubeConfigMerger,
)

from workbench.base.errors import ConfigError
from workbench.pods.kubernetes.login import LoginFailed, LoginWait, credentials, is_token
from workbench.pods.kubernetes.options import KubernetesOptions

_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_USUAL = "~/.kube/config"
_WEB = ("https://", "http://")
_TEXT = ""
_EXEC = {
    "apiVersion": _TEXT,
    "command": _TEXT,
    "args": [_TEXT],
    "env": [{"name": _TEXT, "value": _TEXT}],
    "provideClusterInfo": False,
}
_CLUSTER = {
    "server": _TEXT,
    "certificate-authority": _TEXT,
    "certificate-authority-data": _TEXT,
    "insecure-skip-tls-verify": False,
    "tls-server-name": _TEXT,
    "proxy-url": _TEXT,
    "extensions": [{"name": _TEXT}],
}
_USER = {
    "token": _TEXT,
    "tokenFile": _TEXT,
    "username": _TEXT,
    "password": _TEXT,
    "client-certificate": _TEXT,
    "client-certificate-data": _TEXT,
    "client-key": _TEXT,
    "client-key-data": _TEXT,
    "exec": _EXEC,
}
_SHAPE = {
    "current-context": _TEXT,
    "clusters": [{"name": _TEXT, "cluster": _CLUSTER}],
    "contexts": [{"name": _TEXT, "context": {"cluster": _TEXT, "user": _TEXT, "namespace": _TEXT}}],
    "users": [{"name": _TEXT, "user": _USER}],
}
"""What the client reads of a kubeconfig. The client neither checks types nor names the place."""
_TYPES = {
    str: "text; a number needs quotes",
    bool: "true or false",
    list: "a list",
    dict: "an object",
}


def find_access(options: KubernetesOptions, wait: LoginWait) -> tuple[Any, str, bool]:
    """Find the API server: from the options, this pod's service account, or the kubeconfig.

    Returns the client's `Configuration`, the namespace, and whether this process runs in the
    cluster. The configuration holds credentials: never print it.

    Raises:
        ConfigError: There is no kubeconfig, or it cannot be used, or its login helper failed.
    """
    configuration = client.Configuration()
    configuration.retries = False  # our own know which calls may be made twice
    if not (options.kubeconfig or options.context):
        # Neither error matters: this process is outside a cluster, or has no account.
        with contextlib.suppress(config.ConfigException, OSError):
            config.load_incluster_config(client_configuration=configuration)
            namespace = options.namespace or account_namespace() or "default"
            return configuration, namespace, True
    # The client itself reads KUBECONFIG only once, when it is imported.
    named = options.kubeconfig or os.environ.get("KUBECONFIG")
    where = named or _USUAL
    _check_exists(where, bool(named))
    try:
        merged = _Merger(where)
        if merged.config is None:
            raise ValueError("it is empty")
        _check_context(merged.config, options.context)
        loader = _Loader(
            wait,
            config_dict=merged.config,
            active_context=options.context or None,
            config_base_path=None,  # paths are relative to the file that names them
            config_persister=merged.save_changes,
        )
        loader.load_and_set(configuration)
        context = loader.current_context["context"]
        loader.check(context)
        namespace = options.namespace or str(context.get("namespace") or "default")
    except (
        config.ConfigException,
        yaml.YAMLError,
        LoginFailed,
        OSError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
    ) as error:
        raise ConfigError(f"the kubeconfig {where} cannot be used: {error}") from error
    return configuration, namespace, False


def account_namespace() -> str:
    """Return the namespace of this process; empty outside a cluster."""
    return _NAMESPACE.read_text().strip() if _NAMESPACE.is_file() else ""


class _Merger(KubeConfigMerger):  # type: ignore[misc]
    """The client's reader of the files of a kubeconfig, with a check of every file."""

    def load_config(self, path: str) -> None:
        # A stream, as an error on a text would quote the text.
        with Path(path).open("rb") as file:
            content = yaml.safe_load(file)
        if content is None:  # kubectl passes over an empty file beside others
            return
        wrong = _misshapen(content, _SHAPE)
        if wrong:
            raise ValueError(f"{path}: {wrong}")
        earlier = self.config_merged and self.config_merged.value.get("current-context")
        super().load_config(path)
        # Of several files the first one counts, as for kubectl. The client takes the last one.
        if earlier:
            self.config_merged.value["current-context"] = earlier

    def _merge(self, item: str, add_cfg: Sequence[Mapping[str, Any]], path: str) -> None:
        # The client's own names for entries, which stand in its errors, hold the credentials.
        known = {each.value["name"] for each in self.config_merged.value[item]}
        for number, entry in enumerate(add_cfg):
            place = f"{path}: {item}[{number}]"
            if "name" not in entry:
                raise ValueError(f"{place} has no name")
            if entry["name"] not in known:
                self.config_merged.value[item].append(ConfigNode(place, entry, path))


class _Loader(KubeConfigLoader):  # type: ignore[misc]
    """The client's reader of a kubeconfig, with our way to run a login helper.

    The client calls the helper at the start, and again when a token has expired.
    """

    def __init__(self, wait: LoginWait, **given: Any):
        self._wait = wait
        super().__init__(**given)

    def check(self, context: Mapping[str, Any]) -> None:
        """Refuse a server or a proxy that is no URL, and a user that is missing or another's."""
        server, proxy = getattr(self, "host", ""), getattr(self, "proxy", None)
        if not server.startswith(_WEB):
            raise ValueError(
                f"the cluster {context['cluster']} has the server {server!r}; write"
                " https://HOST:PORT"
            )
        if proxy and not proxy.startswith(_WEB):
            raise ValueError(
                f"the cluster {context['cluster']} has the proxy-url {proxy!r}; write"
                " http://HOST:PORT, as the client knows no other kind of proxy"
            )
        user = context.get("user")
        if user and self._user is None:
            raise ValueError(f"the context names the user {user}, and users has no such entry")
        for key in ("as", "as-uid", "as-groups", "as-user-extra"):
            if user and self._user.safe_get(key):
                raise ValueError(
                    f"the user {user} has {key}, and the client impersonates no account; write a"
                    " user with the token or the login helper of the account itself"
                )

    def _load_auth_provider_token(self) -> str | None:
        if "auth-provider" not in self._user:
            return None
        found: str | None = None
        # The client fails in its own code where a provider has no token.
        with contextlib.suppress(LookupError, TypeError, AttributeError):
            found = super()._load_auth_provider_token()
        if not found:
            raise LoginFailed(
                "its auth-provider gives no token, and Kubernetes 1.26 removed auth-providers. Let"
                " the login command of your cluster write the kubeconfig anew, with a login helper"
                " (exec)"
            )
        return found

    def _load_user_token(self) -> bool | None:
        if not super()._load_user_token():
            return None
        # A file's last line ends with a line break.
        token = str(getattr(self, "token", "")).removeprefix("Bearer ").strip()
        if not is_token(token):
            raise LoginFailed("the user's token has a blank, a line break or another odd character")
        self.token = f"Bearer {token}"
        return True

    def _load_from_exec_plugin(self) -> bool | None:
        if "exec" not in self._user:
            return None
        helper = self._user["exec"]
        for key in ("command", "apiVersion"):
            helper[key]  # the client's own words, with the place, where it is missing
        folder = self._get_base_path(self._user.path)
        cluster = None
        if helper.safe_get("provideClusterInfo"):
            cluster = dict(self._cluster.value)
            for extension in cluster.get("extensions") or ():
                if extension["name"] == "client.authentication.k8s.io/exec":
                    cluster["config"] = extension["extension"]
        status = credentials(helper.value, cluster, folder, self._wait)
        if status.get("token") is not None:
            self.token = f"Bearer {status['token']}"
        else:
            self.cert_file = self._file_of(status, "clientCertificateData", folder)
            self.key_file = self._file_of(status, "clientKeyData", folder)
        if "expirationTimestamp" in status:
            self.expiry = parse_rfc3339(status["expirationTimestamp"])
        return True

    def _file_of(self, status: Any, key: str, folder: str) -> str:
        data = FileOrData(
            status,
            None,
            data_key_name=key,
            file_base_path=folder,
            base64_file_content=False,
            temp_file_path=self._temp_file_path,
        )
        return str(data.as_file())


def _check_context(content: ConfigNode, asked: str) -> None:
    """Refuse a context that is neither chosen nor there; the client's words name none."""
    names = [str(each["name"]) for each in content.value.get("contexts") or ()]
    name = asked or content.value.get("current-context")
    if name not in names:
        wrong = f"there is no context {name!r}" if name else "no current-context is set"
        raise ValueError(
            f"{wrong}. Choose KubernetesPods(context=NAME) of: {', '.join(names) or 'none'}"
        )


def _misshapen(value: object, shape: object, place: str = "") -> str:
    """Return the place of the first value of another type than the shape, with the right type.

    Quotes no value, as a value may be a secret. Empty if all is right.
    """
    if type(value) is not type(shape):
        return f"{place or 'the file'} must be {_TYPES[type(shape)]}"
    inside: list[tuple[object, object, str]] = []
    if isinstance(value, list) and isinstance(shape, list):
        inside = [(each, shape[0], f"{place}[{number}]") for number, each in enumerate(value)]
    if isinstance(value, dict) and isinstance(shape, dict):
        # The client takes null for nothing.
        read = [key for key in shape if value.get(key) is not None]
        inside = [(value[key], shape[key], f"{place}.{key}".lstrip(".")) for key in read]
    found = (_misshapen(*each) for each in inside)
    return next(filter(None, found), "")


def _check_exists(where: str, is_named: bool) -> None:
    if any(Path(each).expanduser().exists() for each in where.split(os.pathsep) if each):
        return
    if is_named:
        raise ConfigError(f"the kubeconfig {where} cannot be used: there is no such file")
    raise ConfigError(
        f"there is no kubeconfig: {where} is missing and KUBECONFIG is not set. Get the file from"
        " the cluster's login command or its administrator, then give"
        " KubernetesPods(kubeconfig=PATH) or set KUBECONFIG"
    )
