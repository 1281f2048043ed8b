"""The way to a Kubernetes API server: kubeconfigs, login helpers, and answers of other servers."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import workbench
import workbench.places
from tests.support.hurried import HurriedClock
from tests.support.poll import until
from tests.support.sentences import says, sentence
from workbench.base.errors import BackendError, ConfigError, WorkbenchError
from workbench.base.process import find
from workbench.pods.kubernetes import login
from workbench.pods.kubernetes.access import find_access
from workbench.pods.kubernetes.api import ApiRefusal, KubeApi
from workbench.pods.kubernetes.login import LoginWait
from workbench.pods.kubernetes.pods import KubernetesPods
from workbench.pods.pod import LaunchContext
from workbench.pods.pod_spec import PodSpec

VERSION = "client.authentication.k8s.io/v1"
PAGE = "<!DOCTYPE html><html><head><title>Sign in to Lab</title></head><body>…</body></html>"


class Server:
    """A server in place of the API, with one answer for everything."""

    def __init__(self) -> None:
        self.body = '{"items": [], "metadata": {}}'
        self.status = 200
        self.type = "application/json"
        self.tokens: list[str | None] = []
        self.before: Callable[[str | None, str], None] = lambda _token, _path: None
        """Called with the token and the path of a request; may change the answer."""
        server = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                server.tokens.append(self.headers.get("Authorization"))
                server.before(server.tokens[-1], self.path)
                body = server.body.encode()
                self.send_response(server.status)
                self.send_header("Content-Type", server.type)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_POST = do_DELETE = answer  # noqa: N815

            def log_message(self, *_: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    thread = threading.Thread(target=made.http.serve_forever, args=(0.01,))
    thread.start()
    yield made
    made.http.shutdown()
    made.http.server_close()
    thread.join(300)


def kubeconfig(path: Path, server: str, user: dict[str, Any]) -> KubernetesPods:
    """Write a kubeconfig of one user, and return its place."""
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "c",
        "clusters": [{"name": "c", "cluster": {"server": server}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u", "namespace": "lab"}}],
        "users": [{"name": "u", "user": user}],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
    return KubernetesPods(image="example.org/worker:1", kubeconfig=str(path))


def helper(path: Path, script: str) -> dict[str, Any]:
    """Write a login helper, and return the user of a kubeconfig beside the helper."""
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return {"exec": {"apiVersion": VERSION, "command": f"./{path.name}", "args": ["get", "--x=y"]}}


def credential(**status: object) -> str:
    return json.dumps({"apiVersion": VERSION, "kind": "ExecCredential", "status": status})


OLD = credential(token="t").replace("/v1", "/v1beta1")


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (
            "echo 'Reauthentication required. Please run: cloud auth login' >&2; exit 3",
            "expired get ended with exit code 3: Reauthentication required. Please run: cloud auth",
        ),
        ("exit 1", "ended with exit code 1: it gave no reason"),
        ("kill -9 $$", "ended with exit code -9"),
        ("echo hint >&2", "printed no credentials: its output is empty. It says: hint"),
        ("echo secret-1", "its output is no JSON"),
        ("echo '[\"secret-1\"]'", "its output is no ExecCredential"),
        ("echo '{}'", "its output is no ExecCredential"),
        (f"echo '{OLD}'", f"its output is of another version than {VERSION}"),
        (f"echo '{credential()}'", "its output has neither a token nor a certificate"),
        (
            f"echo '{credential(clientCertificateData='secret-1')}'",
            "its output has neither a token nor a certificate",
        ),
        *(
            (f"echo '{credential(**status)}'", "its output has neither a token nor a certificate")
            for status in (
                {"token": None},
                {"clientCertificateData": "secret-1", "clientKeyData": "secret-1"},
                {"clientCertificateData": 1, "clientKeyData": 2},
            )
        ),
        *(
            (f"cat <<'END'\n{credential(token=token)}\nEND", "its token is empty, or has a blank")
            for token in ("", 7, ["secret-1"], "secret-1\n", "secret-1 b", "secret-1é", True)
        ),
        (f"echo '{credential(token='t', expirationTimestamp=5)}'", "expirationTimestamp is no"),
        (f"echo '{credential(token='t', expirationTimestamp='soon')}'", "datetime: 'soon'"),
    ],
)
def test_a_login_helper_that_fails_is_quoted_and_nothing_is_asked_without_credentials(
    tmp_path: Path, server: Server, context: LaunchContext, script: str, words: str
) -> None:
    place = kubeconfig(tmp_path / "config", server.url, helper(tmp_path / "expired", script))
    for ask in (
        lambda: place.launch(PodSpec(), 1, context),
        lambda: workbench.places.nodes(place),
    ):
        with pytest.raises(ConfigError) as caught:
            ask()
        said = str(caught.value)
        assert says(said, "the kubeconfig {} cannot be used", tmp_path / "config")
        assert words in said
        assert "Log in in a terminal" in said or "soon" in script
        assert not any(word in said for word in ("Role", "secret-1", "--x=y"))
    assert server.tokens == []


@pytest.mark.parametrize("end", ["", "\n", " \r\n"])
def test_a_token_of_a_file_may_have_a_last_line(tmp_path: Path, server: Server, end: str) -> None:
    (tmp_path / "token").write_bytes(f"t-1{end}".encode())
    place = kubeconfig(tmp_path / "config", server.url, {"tokenFile": "token"})
    workbench.places.nodes(place)
    assert set(server.tokens) == {"Bearer t-1"}


@pytest.mark.parametrize("token", ["secret-1\nb", "secret-1 b", "secret-1é", "\0secret-1"])
def test_an_odd_token_is_refused_and_not_shown(tmp_path: Path, server: Server, token: str) -> None:
    place = kubeconfig(tmp_path / "config", server.url, {"token": token})
    with pytest.raises(ConfigError) as caught:
        workbench.places.nodes(place)
    assert says(caught.value, "the user's token has a blank")
    assert "secret-1" not in str(caught.value)
    assert server.tokens == []


@pytest.mark.parametrize(
    "provider",
    ["gcp", {"name": "gcp"}, {"name": "gcp", "config": {}}, {"name": "azure", "config": {}}, []],
)
def test_an_auth_provider_without_a_token_is_named(
    tmp_path: Path, server: Server, provider: object
) -> None:
    place = kubeconfig(tmp_path / "config", server.url, {"auth-provider": provider})
    with pytest.raises(ConfigError) as caught:
        workbench.places.nodes(place)
    assert says(caught.value, "Let the login command of your cluster write the kubeconfig anew")
    assert server.tokens == []
    # The advice: a login helper in its place.
    user = helper(tmp_path / "helper", f"echo '{credential(token='t')}'")
    workbench.places.nodes(kubeconfig(tmp_path / "config", server.url, user))
    assert set(server.tokens) == {"Bearer t"}


def test_a_login_helper_that_is_missing_is_named_with_the_hint_of_the_kubeconfig(
    tmp_path: Path, server: Server
) -> None:
    given = {"apiVersion": VERSION, "command": "no-such-helper", "installHint": "Get it from lab."}
    with pytest.raises(
        ConfigError, match=r"no-such-helper is not on this machine\. Get it from lab"
    ):
        KubeApi(kubeconfig(tmp_path / "config", server.url, {"exec": given}))
    (tmp_path / "broken").write_text("no program")
    given = {"apiVersion": VERSION, "command": "./broken"}
    with pytest.raises(ConfigError, match="broken cannot be started: Permission denied"):
        KubeApi(kubeconfig(tmp_path / "config", server.url, {"exec": given}))
    with pytest.raises(ConfigError, match="Expected key apiVersion"):
        KubeApi(kubeconfig(tmp_path / "config", server.url, {"exec": {"command": "true"}}))


BROWSER = 'echo $$ >"$0.pid"; echo "Open https://login.lab/device?code=AB12" >&2; sleep 600; true'


def pid_of(path: Path) -> int:
    until(lambda: path.exists() and path.read_text().strip() != "")
    return int(path.read_text())


def test_a_login_helper_that_waits_for_a_browser_shows_its_url_and_has_a_limit(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = HurriedClock()
    monkeypatch.setattr(login, "time", clock)
    monkeypatch.setattr(login, "_QUIET_S", 0.0)
    place = kubeconfig(tmp_path / "config", server.url, helper(tmp_path / "browser", BROWSER))
    told: list[str] = []

    def tell(line: str) -> None:
        told.append(line)
        if "login.lab" in line:
            clock.ahead_s = 4000.0

    with pytest.raises(ConfigError) as caught:
        KubeApi(place, LoginWait(limit_s=4000.0, report=tell))
    assert (
        "browser get has not ended after 4000 s. It says: Open https://login.lab/device?code"
        in str(caught.value)
    )
    assert told[-1].endswith("waits: Open https://login.lab/device?code=AB12")
    until(lambda: find(pid_of(tmp_path / "browser.pid")) is None)


def test_a_start_that_is_given_up_ends_the_login_helper(
    tmp_path: Path, server: Server, context: LaunchContext
) -> None:
    place = kubeconfig(tmp_path / "config", server.url, helper(tmp_path / "browser", BROWSER))
    failed: list[WorkbenchError] = []

    def launch() -> None:
        try:
            place.launch(PodSpec(), 1, context)
        except WorkbenchError as error:
            failed.append(error)

    thread = threading.Thread(target=launch)
    thread.start()
    pid = pid_of(tmp_path / "browser.pid")
    place.stop()
    thread.join(300)
    assert says(str(failed[0]), "the login helper {} was stopped before it had ended")
    until(lambda: find(pid) is None)
    assert server.tokens == []


def test_a_login_helper_gives_a_token_and_another_when_it_has_expired(
    tmp_path: Path, server: Server
) -> None:
    answer = tmp_path / "answer"
    script = f'test "$KUBERNETES_EXEC_INFO" && test "$LAB" = 1 && cat {answer}'
    user = helper(tmp_path / "works", script)
    user["exec"]["env"] = [{"name": "LAB", "value": "1"}]
    answer.write_text(credential(token="one", expirationTimestamp="2020-01-01T00:00:00Z"))
    api = KubeApi(kubeconfig(tmp_path / "config", server.url, user))
    answer.write_text(credential(token="two", expirationTimestamp="2020-01-01T00:00:00Z"))
    api.list("pod")
    assert server.tokens == ["Bearer two"]
    (tmp_path / "works").write_text("#!/bin/sh\necho session over >&2; exit 1\n")
    with pytest.raises(ApiRefusal) as caught:
        api.list("pod")
    assert says(str(caught.value), "the login to the Kubernetes API server {} has expired")
    assert "session over" in str(caught.value)
    assert caught.value.status == 401
    assert len(server.tokens) == 1, "a request went without a login"


def test_a_request_without_an_account_is_no_matter_of_a_role(
    tmp_path: Path, server: Server, context: LaunchContext
) -> None:
    words = 'pods is forbidden: User "system:anonymous" cannot list resource "pods"'
    server.status = 403
    server.body = json.dumps({"kind": "Status", "message": words})
    place = kubeconfig(tmp_path / "config", server.url, {})
    for ask in (
        lambda: place.launch(PodSpec(), 1, context),
        lambda: workbench.places.nodes(place),
    ):
        with pytest.raises(BackendError) as caught:
            ask()
        assert f"(403): {words}; " in str(caught.value)
        assert "log in to the cluster" in str(caught.value)
        assert "Role" not in str(caught.value)


def test_credentials_that_were_valid_before_may_have_gone_with_their_namespace(
    tmp_path: Path, server: Server
) -> None:
    api = KubeApi(kubeconfig(tmp_path / "config", server.url, {"token": "t"}))
    refused = '{"kind": "Status", "message": "Unauthorized"}'
    allowed = server.body
    server.status, server.body = 401, refused
    with pytest.raises(ApiRefusal, match="Unauthorized; the credentials are not valid"):
        api.list("pod")
    server.status, server.body = 200, allowed
    api.list("pod")
    server.status, server.body = 401, refused
    with pytest.raises(ApiRefusal) as caught:
        api.list("pod")
    assert says(str(caught.value), "the credentials were valid before", "lab")
    assert api.namespace_end() == str(caught.value).replace("list the pod", "get the namespace")


CALLS: dict[str, Callable[[KubeApi], object]] = {
    "list": lambda api: api.list("pod"),
    "nodes": lambda api: api.list_everywhere("node"),
    "create": lambda api: api.create("pod", {"metadata": {"name": "x"}}),
    "read": lambda api: api.read_pod("x"),
    "delete": lambda api: api.delete("pod", "x"),
    "log": lambda api: api.log("x", 1),
    "watch": lambda api: [api.read(line) for line in api.watch("pod", "1")],
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("status", "kind", "body", "words"),
    [
        (200, "text/html", PAGE, 'an HTML page "Sign in to Lab"'),
        (401, "text/html; charset=utf-8", PAGE, 'an HTML page "Sign in to Lab"'),
        (403, "text/html", PAGE, 'an HTML page "Sign in to Lab"'),
        (404, "text/html", "<html><h1>Not Found</h1></html>", 'an HTML page "Not Found"'),
        (302, "text/plain", "", 'an answer "302 Found"'),
    ],
)
def test_a_page_in_place_of_the_api_is_named(
    tmp_path: Path, server: Server, call: str, status: int, kind: str, body: str, words: str
) -> None:
    server.status, server.type, server.body = status, kind, body
    api = KubeApi(kubeconfig(tmp_path / "config", server.url, {"token": "t"}))
    with pytest.raises(ApiRefusal) as caught:
        CALLS[call](api)
    assert says(str(caught.value), "does not answer as a Kubernetes API server", server.url, words)
    assert len(server.tokens) == 1, "another try helps nothing"


SECRET = "secret-1"
WHOLE = {
    "apiVersion": "v1",
    "kind": "Config",
    "current-context": "c",
    "clusters": [
        {
            "name": "c",
            "cluster": {
                "server": "https://127.0.0.1:1",
                "certificate-authority-data": "",
                "insecure-skip-tls-verify": False,
                "proxy-url": "http://127.0.0.1:1",
                "extensions": [
                    {"name": "client.authentication.k8s.io/exec", "extension": {"audience": "a"}}
                ],
            },
        }
    ],
    "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u", "namespace": "lab"}}],
    "users": [
        {
            "name": "u",
            "user": {
                "exec": {
                    "apiVersion": VERSION,
                    "command": "./helper",
                    "args": ["get"],
                    "env": [{"name": "LAB", "value": SECRET}],
                    "provideClusterInfo": True,
                }
            },
        }
    ],
}
WITH_TOKEN = {**WHOLE, "users": [{"name": "u", "user": {"token": SECRET, "password": SECRET}}]}
OTHERS: Sequence[object] = (
    "x",
    7,
    1.5,
    True,
    None,
    [],
    {},
    [7],
    [None],
    [[]],
    {"a": 1},
    [{"name": "c"}],
)
OF_PYTHON = re.compile(r"object|NoneType|iterable|subscript|attribute|indices|ConfigNode")


def changed(value: Any, other: object) -> Iterator[Any]:
    """Yield copies of a value with one part in exchange for another."""
    yield other
    keys = range(len(value)) if isinstance(value, list) else value
    for key in keys if isinstance(value, dict | list) else ():
        for inside in changed(value[key], other):
            copy = value.copy()
            copy[key] = inside
            yield copy


@pytest.mark.parametrize("whole", [WHOLE, WITH_TOKEN], ids=["helper", "token"])
@pytest.mark.parametrize("other", OTHERS, ids=repr)
def test_every_part_of_a_kubeconfig_in_another_type_is_read_or_named_without_its_secrets(
    tmp_path: Path, whole: object, other: object
) -> None:
    helper(tmp_path / "helper", f"echo '{credential(token='t')}'")
    path = tmp_path / "config"
    place = KubernetesPods(image="example.org/worker:1", kubeconfig=str(path))
    for content in changed(whole, other):
        path.write_text(json.dumps(content))
        try:
            configuration, namespace, _ = find_access(place, LoginWait())
        except ConfigError as error:
            said = str(error).removeprefix(f"the kubeconfig {path} cannot be used: ")
            assert SECRET not in said
            # These three phrases are no words of Python.
            own = re.sub(
                r"must be an object|Expected object with name \w+|no JSON object", "", said
            )
            assert not OF_PYTHON.search(own), (content, said)
        else:
            assert configuration.host.startswith("https://")
            assert isinstance(namespace, str)


def test_a_wrong_type_in_a_kubeconfig_is_mended_as_the_message_asks(tmp_path: Path) -> None:
    path = tmp_path / "config"
    place = kubeconfig(path, "http://127.0.0.1:1", {"token": 12345})
    for user, words in (
        ({"token": 12345}, "users[0].user.token must be text; a number needs quotes"),
        ({"exec": {"args": "get"}}, "users[0].user.exec.args must be a list"),
        ([], "users[0].user must be an object"),
    ):
        kubeconfig(path, "http://127.0.0.1:1", user)  # type: ignore[arg-type]
        with pytest.raises(ConfigError) as caught:
            KubeApi(place)
        assert str(caught.value).endswith(f"{path}: {words}")
    kubeconfig(path, "http://127.0.0.1:1", {"token": "12345"})
    KubeApi(place)


@pytest.mark.parametrize(
    ("key", "value"), [("as", "team"), ("as-groups", ["a"]), ("as-user-extra", {"reason": ["x"]})]
)
def test_a_kubeconfig_that_impersonates_is_refused(tmp_path: Path, key: str, value: object) -> None:
    """The client would act as the user itself, without a word."""
    path = tmp_path / "config"
    place = KubernetesPods(image="example.org/worker:1", kubeconfig=str(path))
    kubeconfig(path, "http://127.0.0.1:1", {"token": "12345", key: value})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=sentence("impersonates no account; write a user", key)):
        KubeApi(place)
    kubeconfig(path, "http://127.0.0.1:1", {"token": "12345"})
    KubeApi(place)


@pytest.mark.parametrize(
    ("key", "value", "words", "advised"),
    [
        ("server", "127.0.0.1:6443", "; write https://HOST:PORT", "https://127.0.0.1:6443"),
        ("server", "lab", "; write https://HOST:PORT", "https://lab"),
        ("server", "ftp://lab", "; write https://HOST:PORT", "https://lab"),
        ("proxy-url", "socks5://lab:1080", "; write http://HOST:PORT", "http://lab:1080"),
        ("proxy-url", "nonsense", "; write http://HOST:PORT", "http://nonsense"),
    ],
)
def test_an_address_that_is_no_url_is_refused_before_a_request(
    tmp_path: Path, key: str, value: str, words: str, advised: str
) -> None:
    path = tmp_path / "config"
    place = kubeconfig(path, "http://127.0.0.1:1", {"token": "t"})
    content = json.loads(path.read_text())
    content["clusters"][0]["cluster"][key] = value
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=f"the cluster c has the {key} '{value}'{words}"):
        KubeApi(place)
    content["clusters"][0]["cluster"][key] = advised
    path.write_text(json.dumps(content))
    KubeApi(place)


def test_a_user_that_the_kubeconfig_lacks_is_named_before_a_request_goes_without_a_login(
    tmp_path: Path, server: Server
) -> None:
    place = kubeconfig(tmp_path / "config", server.url, {"token": "t"})
    content = json.loads((tmp_path / "config").read_text())
    content["users"][0]["name"] = "another"
    (tmp_path / "config").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="names the user u, and users has no such entry"):
        workbench.places.nodes(place)
    assert server.tokens == []


@pytest.mark.parametrize("body", ["", " ", "[]", "null", '{"items": [', "welcome", '{"error": 1}'])
def test_an_answer_that_is_not_kubernetes_is_named(
    tmp_path: Path, server: Server, context: LaunchContext, body: str
) -> None:
    server.body = body
    place = kubeconfig(tmp_path / "config", server.url, {"token": "t"})
    for ask in (
        lambda: place.launch(PodSpec(), 1, context),
        lambda: workbench.places.nodes(place),
    ):
        with pytest.raises(BackendError) as caught:
            ask()
        assert says(str(caught.value), "does not answer as a Kubernetes API server", server.url)


def test_an_answer_that_is_no_pod_is_named(
    tmp_path: Path, server: Server, context: LaunchContext
) -> None:
    """A list is no answer to the making of a pod."""
    place = kubeconfig(tmp_path / "config", server.url, {"token": "t"})
    with pytest.raises(BackendError) as caught:
        place.launch(PodSpec(), 1, context)
    assert says(caught.value, "does not answer as a Kubernetes API server", '{"items": []')


def test_a_gateway_before_the_api_server_is_quoted_without_tags(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workbench.pods.kubernetes.api._PATIENCE_S", 0.0)
    server.status, server.body = 502, "<html><head><title>502 Bad Gateway</title></head></html>"
    with pytest.raises(ApiRefusal, match=r"\(502\): an HTML page \"502 Bad Gateway\"$"):
        KubeApi(kubeconfig(tmp_path / "config", server.url, {"token": "t"})).list("pod")


def test_a_kubeconfig_that_a_later_cell_names_counts(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("KUBECONFIG", raising=False)
    place = KubernetesPods(image="example.org/worker:1")
    with pytest.raises(ConfigError) as caught:
        workbench.places.nodes(place)
    assert says(str(caught.value), "then give KubernetesPods(kubeconfig=PATH) or set KUBECONFIG")
    kubeconfig(tmp_path / "good", server.url, {"token": "good"})
    missing = tmp_path / "missing"
    monkeypatch.setenv("KUBECONFIG", str(missing))
    with pytest.raises(ConfigError, match=f"kubeconfig {missing} cannot be used: there is no such"):
        workbench.places.nodes(place)
    monkeypatch.setenv("KUBECONFIG", f"{missing}:{tmp_path / 'good'}")
    workbench.places.nodes(place)
    monkeypatch.delenv("KUBECONFIG")
    kubeconfig(tmp_path / "home" / ".kube" / "config", server.url, {"token": "home"})
    workbench.places.nodes(place)
    assert list(dict.fromkeys(server.tokens)) == ["Bearer good", "Bearer home"]


def test_several_kubeconfigs_are_read_as_kubectl_reads_them(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first file that names a context wins; a helper lies beside the file of its user."""
    users = tmp_path / "users"
    kubeconfig(users / "config", "http://127.0.0.1:1", {})
    wanted = {"name": "wanted", "user": helper(users / "login", f"echo '{credential(token='t')}'")}
    content = json.loads((users / "config").read_text())
    content["users"].append(wanted)
    (users / "config").write_text(json.dumps(content))
    kubeconfig(tmp_path / "clusters", server.url, {})
    content = json.loads((tmp_path / "clusters").read_text())
    content["users"] = []
    content["contexts"][0] = {"name": "first", "context": {"cluster": "c", "user": "wanted"}}
    content["current-context"] = "first"
    (tmp_path / "clusters").write_text(json.dumps(content))
    empty, nameless = tmp_path / "empty", tmp_path / "nameless"
    empty.write_text("# nothing yet\n")
    nameless.write_text('{"current-context": "", "users": null}')
    monkeypatch.setenv(
        "KUBECONFIG", f"{empty}:{nameless}:{tmp_path / 'clusters'}:{users / 'config'}"
    )
    workbench.places.nodes(KubernetesPods(image="example.org/worker:1"))
    assert set(server.tokens) == {"Bearer t"}
    monkeypatch.setenv("KUBECONFIG", str(empty))
    with pytest.raises(ConfigError, match=r"the kubeconfig \S+ cannot be used: it is empty"):
        workbench.places.nodes(KubernetesPods(image="example.org/worker:1"))


def test_a_context_needs_no_current_one_beside_it(tmp_path: Path, server: Server) -> None:
    kubeconfig(tmp_path / "config", server.url, {"token": "t"})
    content = json.loads((tmp_path / "config").read_text())
    del content["current-context"]
    (tmp_path / "config").write_text(json.dumps(content))
    place = KubernetesPods(image="x", kubeconfig=str(tmp_path / "config"))
    for context, words in (
        ("", "no current-context is set"),
        ("prod", "there is no context 'prod'"),
    ):
        with pytest.raises(ConfigError) as caught:
            KubeApi(place.replace(context=context))
        assert says(caught.value, "Choose KubernetesPods(context=NAME) of: {}", words, "c")
    assert KubeApi(place.replace(context="c")).namespace == "lab"


def test_the_server_answers_after_the_advice_of_a_refusal(tmp_path: Path, server: Server) -> None:
    """Each refusal of a server with one account and no namespace `lab`, and its advice."""
    path, allowed = tmp_path / "config", server.body
    missing = {"lab": 'namespaces "lab" not found', "ends": "it is being terminated"}

    def answer(token: str | None, url: str) -> None:
        words = missing.get(url.partition("/namespaces/")[2].partition("/")[0])
        server.status = 404 if words and words.startswith("namespaces") else 403
        if token is None:
            words = 'pods is forbidden: User "system:anonymous" cannot list resource "pods"'
        elif token != "Bearer new":
            server.status, words = 401, "Unauthorized"
        elif words is None:
            server.status = 200
        server.body = json.dumps({"kind": "Status", "message": words}) if words else allowed

    server.before = answer

    def refused(user: dict[str, Any], url: str = "", **options: Any) -> str:
        place = kubeconfig(path, url or server.url, user).replace(**options)
        with pytest.raises(WorkbenchError) as caught:
            KubeApi(place).list("pod")
        return str(caught.value)

    def works(user: dict[str, Any], **options: Any) -> None:
        KubeApi(kubeconfig(path, server.url, user).replace(**options)).list("pod")

    new = {"token": "new"}
    assert says(refused(new), "was deleted or never made")
    assert says(
        refused(new, namespace="ends"), "; the namespace {} is being deleted: use another namespace"
    )
    works(new, namespace="another")
    del missing["lab"]  # it is made
    works(new)
    assert says(refused({}), "the server knows no account for this request")
    assert says(refused({"token": "old"}), "the credentials are not valid (any more")
    works(new)

    # A login helper that has to log in, and one that has to be installed.
    asks = helper(tmp_path / "asks", f"cat {tmp_path}/session || exit 1")
    assert says(refused(asks), "for example with `kubectl get pods`")
    (tmp_path / "session").write_text(credential(token="new"))
    works(asks)
    (tmp_path / "asks").rename(tmp_path / "installed")
    assert says(refused(asks), "Install it, or use another kubeconfig")
    (tmp_path / "installed").rename(tmp_path / "asks")
    works(asks)

    # A server without TLS, and a path that is none of the API server's.
    assert says(
        refused(new, url=server.url.replace("http:", "https:")),
        "there is no TLS connection to the Kubernetes API server",
    )
    server.before = lambda _token, _path: None
    server.status, server.body, server.type = 404, "404 page not found", "text/plain"
    assert says(refused(new), "does not answer as a Kubernetes API server", "404 page not found")
    server.before, server.type = answer, "application/json"
    works(new)

    # Another server than the API's.
    page = Server()
    page.body, page.type = PAGE, "text/html"
    thread = threading.Thread(target=page.http.serve_forever, args=(0.01,))
    thread.start()
    assert says(refused(new, url=page.url), "does not answer as a Kubernetes API server")
    page.http.shutdown()
    page.http.server_close()
    thread.join(300)
    works(new)
