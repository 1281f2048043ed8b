"""A real Kubernetes control plane on this machine: etcd and three programs of Debian's source.

`.ci/kubernetes` builds the programs. All listen on the loopback address, over TLS. All state is in
a folder of `/tmp`. One control plane serves a session of pytest.
"""

from __future__ import annotations

import datetime
import ipaddress
import json
import os
import secrets
import shutil
import ssl
import subprocess
import tempfile
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.measured import MEASURED
from tests.support.poll import until
from workbench.pods.bootstrap.machine import free_port

REPOSITORY = Path(__file__).resolve().parents[3]
PROGRAMS = REPOSITORY / "build" / "kubernetes" / "bin"
_NAMES = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")
NAMESPACE = "workbench"
"""The namespace of the shipped manifests."""
NODE_GRACE_S = 8
"""Seconds without a sign of life after which the server counts a node as lost; by default 40."""
_USERS = {
    "admin": ("admin", "system:masters"),
    "manager": ("system:kube-controller-manager", ""),
    "scheduler": ("system:kube-scheduler", ""),
    "node": ("system:node:node-1", "system:nodes"),
    "stranger": ("stranger", ""),
}
"""By our name, a user's name on the server and its group."""
# Addresses of our pods are loopback addresses, which the server allows in no Endpoints.
_CONTROLLERS = "*,-endpoint,-endpointslice,-endpointslicemirroring"


class Answer(Exception):
    """A refusal by the server."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class ControlPlane:
    """The processes, and what an administrator does with the server."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="kube-"))
        self.port = free_port(["127.0.0.1"])
        self.url = f"https://127.0.0.1:{self.port}"
        self.certificate = self.folder / "server.crt"
        self.key = self.folder / "server.key"
        self.tokens = {name: secrets.token_hex(16) for name in _USERS}
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._etcd_port = 0

    def start(self) -> None:
        """Start all programs, and make the namespace with the shipped Role."""
        _write_certificate(self.certificate, self.key)
        rows = [
            f'{self.tokens[name]},{user},{name},"{group}"' for name, (user, group) in _USERS.items()
        ]
        self._write("tokens.csv", "\n".join(rows))
        for name in ("manager", "scheduler"):
            self._write(f"{name}.kubeconfig", json.dumps(self.kubeconfig(self.tokens[name])))
        self._start_etcd()
        self.start_server()
        self._start(
            "kube-controller-manager",
            f"--kubeconfig={self.folder}/manager.kubeconfig",
            f"--service-account-private-key-file={self.key}",
            f"--root-ca-file={self.certificate}",
            "--use-service-account-credentials",
            f"--controllers={_CONTROLLERS}",
            f"--node-monitor-grace-period={NODE_GRACE_S}s",
            "--node-monitor-period=1s",
            "--leader-elect=false",
            "--secure-port=0",
            "--port=0",
        )
        self._start(
            "kube-scheduler",
            f"--kubeconfig={self.folder}/scheduler.kubeconfig",
            "--leader-elect=false",
            "--secure-port=0",
            "--port=0",
        )
        for file in ("namespace.yaml", "rbac.yaml"):
            text = (REPOSITORY / "docker" / "kubernetes" / file).read_text()
            for manifest in yaml.safe_load_all(text):
                self.create(manifest)
        path = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/default"
        until(lambda: self._has_tokens(path), 60, every_s=0.2, why=self._logs)

    def _has_tokens(self, path: str) -> bool:
        try:
            return bool(self.ask("GET", path).get("secrets"))
        except Answer:
            return False

    def end(self) -> None:
        """End the programs, by their ids, at once: what they would save is not needed again."""
        for program in self._running.values():
            program.kill()
            program.wait()
        shutil.rmtree(self.folder)

    def start_server(self) -> None:
        """Start the API server and wait until it answers."""
        self._start(
            "kube-apiserver",
            "--bind-address=127.0.0.1",
            "--advertise-address=127.0.0.1",
            "--endpoint-reconciler-type=none",
            f"--secure-port={self.port}",
            f"--tls-cert-file={self.certificate}",
            f"--tls-private-key-file={self.key}",
            f"--etcd-servers=http://127.0.0.1:{self._etcd_port}",
            f"--token-auth-file={self.folder}/tokens.csv",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction,OwnerReferencesPermissionEnforcement",
            "--kubelet-preferred-address-types=InternalIP",
            "--service-cluster-ip-range=10.96.0.0/16",
            f"--service-account-issuer={self.url}",
            f"--service-account-key-file={self.key}",
            f"--service-account-signing-key-file={self.key}",
        )
        until(self._is_ready, 120, every_s=0.2, why=self._logs)

    def kill_server(self) -> None:
        """Kill the API server, as a crash of its machine does."""
        server = self._running.pop("kube-apiserver")
        server.kill()
        server.wait()

    def account_token(self) -> str:
        """Return a token of the shipped service account, good for an hour."""
        path = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/workbench/token"
        asked = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
        return str(self.ask("POST", path, asked)["status"]["token"])

    def kubeconfig(self, token: str) -> dict[str, Any]:
        """Return a kubeconfig for the bearer of a token."""
        cluster = {"server": self.url, "certificate-authority": str(self.certificate)}
        context = {"cluster": "real", "user": "me", "namespace": NAMESPACE}
        return {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "real",
            "contexts": [{"name": "real", "context": context}],
            "clusters": [{"name": "real", "cluster": cluster}],
            "users": [{"name": "me", "user": {"token": token}}],
        }

    def ask(self, method: str, path: str, body: Any = None, user: str = "admin") -> Any:
        """Call the server and return its answer; an `Answer` is raised where it refuses."""
        request = urllib.request.Request(
            self.url + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={
                "Authorization": f"Bearer {self.tokens[user]}",
                "Content-Type": "application/merge-patch+json"
                if method == "PATCH"
                else "application/json",
            },
        )
        trust = ssl.create_default_context(cafile=str(self.certificate))
        try:
            with urllib.request.urlopen(request, timeout=300, context=trust) as answer:
                text = answer.read()
        except urllib.error.HTTPError as error:
            raise Answer(error.code, error.read().decode()) from error
        return json.loads(text) if text.startswith(b"{") else text.decode()

    def create(self, manifest: dict[str, Any], query: str = "") -> Any:
        """Create an object of a kind that the tests and the shipped manifests have."""
        return self.ask("POST", f"{_path_of(manifest)}{query}", manifest)

    def remove(self, manifest: dict[str, Any]) -> None:
        """Delete the object that a manifest made."""
        self.ask("DELETE", f"{_path_of(manifest)}/{manifest['metadata']['name']}")

    def items(self, kind: str, **query: str) -> list[dict[str, Any]]:
        """List the objects of a kind in the namespace."""
        words = "&".join(f"{name}={value}" for name, value in query.items())
        listed = self.ask("GET", f"/api/v1/namespaces/{NAMESPACE}/{kind}?{words}")
        return list(listed["items"])

    def delete(self, kind: str, name: str, grace_s: int | None = None) -> None:
        """Delete an object of the namespace, if it is there."""
        body = {} if grace_s is None else {"gracePeriodSeconds": grace_s}
        try:
            self.ask("DELETE", f"/api/v1/namespaces/{NAMESPACE}/{kind}/{name}", body)
        except Answer as error:
            if error.status != 404:
                raise

    def _start_etcd(self) -> None:
        self._etcd_port = free_port(["127.0.0.1"])
        peers = f"http://127.0.0.1:{free_port(['127.0.0.1'])}"
        clients = f"http://127.0.0.1:{self._etcd_port}"
        self._start(
            "etcd",
            f"--data-dir={self.folder}/etcd",
            f"--listen-client-urls={clients}",
            f"--advertise-client-urls={clients}",
            f"--listen-peer-urls={peers}",
            f"--initial-advertise-peer-urls={peers}",
            f"--initial-cluster=default={peers}",
        )

    def _start(self, name: str, *flags: str) -> None:
        assert name not in self._running, f"{name} runs already"
        with (self.folder / f"{name}.log").open("ab") as log:
            self._running[name] = subprocess.Popen(
                ["nice", "-n", "5", str(PROGRAMS / name), *flags],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
            )

    def _is_ready(self) -> bool:
        assert self._running["kube-apiserver"].poll() is None, self._logs()
        try:
            return bool(self.ask("GET", "/readyz") == "ok")
        except (Answer, OSError):
            return False

    def _write(self, name: str, text: str) -> None:
        path = self.folder / name
        path.write_text(text)
        path.chmod(0o600)

    def _logs(self) -> str:
        return "\n".join(path.read_text()[-2000:] for path in self.folder.glob("*.log"))


def _path_of(manifest: dict[str, Any]) -> str:
    """Return where objects of a manifest's kind and namespace are on a server."""
    kind = manifest["kind"].lower()
    plural = f"{kind[:-1]}ies" if kind.endswith("y") else f"{kind}s"
    version = manifest["apiVersion"]
    root = f"/api/{version}" if version == "v1" else f"/apis/{version}"
    space = manifest["metadata"].get("namespace")
    return f"{root}/namespaces/{space}/{plural}" if space else f"{root}/{plural}"


def _write_certificate(certificate: Path, key_file: Path) -> None:
    """Write a key, which also signs tokens, and a certificate that vouches for itself."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import rsa

    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "kubernetes")])
    now = datetime.datetime.now(datetime.UTC)
    hosts = [
        x509.IPAddress(ipaddress.ip_address("127.0.0.1")),
        x509.DNSName("localhost"),
    ]
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName(hosts), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    certificate.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.TraditionalOpenSSL,
        serialization.NoEncryption(),
    )
    key_file.write_bytes(private)
    key_file.chmod(0o600)


_RUNNING: list[ControlPlane] = []


def missing() -> str:
    """Return why no control plane can run here; empty if one can."""
    if os.geteuid() != 0:
        return "pods without the notebook's folders take root here"
    absent = [name for name in _NAMES if not (PROGRAMS / name).is_file()]
    if absent:
        return f"{', '.join(absent)} not built; make test-kubernetes builds all on Debian 12"
    return ""


def control_plane() -> ControlPlane:
    """Return the session's control plane; skip the test where there can be none."""
    if not _RUNNING:
        if reason := missing():
            pytest.skip(reason)
        made = ControlPlane()
        _RUNNING.append(made)
        made.start()
        MEASURED.append(f"Kubernetes {made.ask('GET', '/version')['gitVersion']}")
    return _RUNNING[0]


def end_control_plane() -> None:
    """End the session's control plane, if one was started."""
    while _RUNNING:
        _RUNNING.pop().end()
