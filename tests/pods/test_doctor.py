"""The doctor: how it judges, what it says on real pods, and what their all-reduce gives."""

from __future__ import annotations

import functools
import json
import os
import re
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.pods.conftest import Launched, on_pods
from tests.support.poll import until
from tests.support.sentences import says
from workbench.agent.probe.examine import compile_locks, limits
from workbench.base.display_protocol import as_text
from workbench.base.versions import installed_versions
from workbench.pods.doctor.examination import Diagnosis, HostReport, examine_pods, judge_result
from workbench.pods.doctor.exchange import Exchange, measure_exchange
from workbench.pods.doctor.verdicts import CHECKS, Finding, Verdict
from workbench.pods.pod import Pod
from workbench.pods.pod_spec import PodSpec
from workbench.pods.ssh import openssh
from workbench.pods.ssh.identity import fingerprint
from workbench.pods.ssh.openssh import CommandResult, run_over_openssh

PACKAGE = str(Path(__file__).resolve().parents[2])
POD = Pod(
    name="pod-1",
    address="127.0.0.3",
    ssh_port=2222,
    user="me",
    root="/data/pod-1",
    python="/opt/python",
)
HERE = {
    "python": "3.11.7",
    "torch": "2.13.0+cpu",
    "deepspeed": "0.19.8",
    "transformers": "5.23.0",
    "workbench": "0.1.0",
}
GOOD = {
    "time_s": 1000.5,
    "interface": "eth0",
    "address": "gpu-1",
    "own_addresses": ["10.0.1.7"],
    "address_for_others": "gpu-1",
    "versions": {**HERE, "torch": "2.13.0+cu129"},
    "gpus": [{"index": 0, "percent": 0.0, "used_gib": 0.5, "total_gib": 80.0}],
    "memory_gib": 60.0,
    "disk": {"free_gib": 200.0, "total_gib": 500.0},
    "shm": {"free_gib": 8.0, "total_gib": 8.0},
    "cores": 16,
    "locks": [],
    "torch_build": "CUDA 12.9",
    "nvcc": "12.6",
}
SPEC = PodSpec(gpus=1)


def judged(
    facts: Mapping[str, object] | None = None,
    words: str = "",
    spec: PodSpec = SPEC,
    **changes: object,
) -> dict[str, Finding]:
    out = (
        ""
        if facts is None
        else "welcome to this machine\n" + json.dumps({**facts, **changes}) + "\n"
    )
    code = 255 if facts is None else 0
    seen = CommandResult(
        reached=code != 255, exit_code=code, out=out, words=words, began_s=1000.0, ended_s=1001.0
    )
    report = judge_result(seen, POD, spec, HERE, [])
    found = {finding.check: finding for finding in report.findings}
    assert [check for check in CHECKS if check in found] == list(found)
    assert all(
        bool(finding.fix) == (finding.verdict in (Verdict.BAD, Verdict.WARNING))
        for finding in found.values()
    )
    return found


def test_a_pod_that_is_well() -> None:
    found = judged(GOOD)
    assert list(found) == list(CHECKS)
    assert {finding.verdict for finding in found.values()} == {Verdict.GOOD}
    assert found["GPU memory"].detail == "79.5 of 80.0 GiB free"


@pytest.mark.parametrize(
    ("name", "own", "others", "words"),
    [
        ("gpu-1", ["10.0.1.7"], "gpu-1", ""),
        ("10.0.1.7", ["10.0.1.7"], "10.0.1.7", ""),
        ("127.0.0.2", ["127.0.0.2"], "127.0.0.2", ""),  # a local pod
        (
            "gpu-1",
            ["127.0.1.1"],
            "10.0.1.7",
            "gpu-1 is 127.0.1.1 there; others get 10.0.1.7, from the SSH connection",
        ),
        (
            "gpu-1",
            ["127.0.1.1", "10.9.9.9"],
            "10.9.9.9",
            "gpu-1 is 127.0.1.1 there; others get 10.9.9.9, from the name",
        ),
        (
            "gpu-1",
            [],
            "10.0.1.7",
            "gpu-1 is unknown there; others get 10.0.1.7, from the SSH connection",
        ),
        (
            "gpu-1",
            ["::1"],
            "gpu-1",
            "gpu-1 is ::1 there, and no other address is known; pods on other machines cannot "
            "reach it: correct gpu-1 in /etc/hosts there, or give the host as {",
        ),
    ],
)
def test_a_name_that_is_loopback_at_home_has_a_row(
    name: str, own: list[str], others: str, words: str
) -> None:
    found = judged(GOOD, address=name, own_addresses=own, address_for_others=others)["address"]
    assert f"{found.detail}; {found.fix}".startswith(words or f"{others}; ")
    assert found.verdict is (Verdict.WARNING if own == ["::1"] else Verdict.GOOD)


def test_what_a_pod_has_is_known_whatever_is_taken_of_it() -> None:
    gpus = [
        {"index": n, "used_gib": 30.0, "total_gib": size} for n, size in enumerate((80.0, 40.0))
    ]
    whole = int(Path("/proc/meminfo").read_text().split()[1]) / 2**20  # MemTotal comes first
    gpu_gib, memory_gib = limits(gpus)  # type: ignore[arg-type]
    assert gpu_gib == 40.0 and memory_gib is not None and 0 < memory_gib <= whole
    assert limits([])[0] is None
    facts = json.dumps({**GOOD, "gpu_gib": gpu_gib, "memory_limit_gib": 48.5, "process_gib": 0.5})
    seen = CommandResult(
        reached=True, exit_code=0, out=facts, words="", began_s=1000.0, ended_s=1001.0
    )
    report = judge_result(seen, POD, PodSpec(gpus=2), HERE)
    assert (report.gpu_gib, report.memory_limit_gib, report.process_gib) == (40.0, 48.5, 0.5)
    lost = judge_result(replace(seen, out="", exit_code=255, reached=False), POD, PodSpec(), HERE)
    assert (lost.gpu_gib, lost.memory_limit_gib) == (None, None)


@pytest.mark.parametrize(
    ("check", "changes", "verdict", "said"),
    [
        (
            "torch",
            {"versions": {**HERE, "torch": "2.12.1"}},
            "bad",
            "2.12.1 .*has 2.13.0.*pip install torch==2.13.0",
        ),
        (
            "deepspeed",
            {"versions": {"torch": "2.13.0"}},
            "bad",
            "not installed .*pip install deepspeed==0.19.8",
        ),
        ("python", {"versions": {**HERE, "python": "3.11.9"}}, "warning", "3.11.9 .*has 3.11.7"),
        ("python", {"versions": {**HERE, "python": "3.12.1"}}, "bad", "3.12.1 .*has 3.11.7"),
        (
            "workbench",
            {"versions": {**HERE, "workbench": "0.0.9"}},
            "bad",
            "0.0.9 .*has 0.1.0.*start it again",
        ),
        ("clock", {"time_s": 1031.0}, "warning", r"\+30.0 s .*clock"),
        ("clock", {"time_s": 970.0}, "warning", "-30.0 s"),
        ("GPUs", {"gpus": []}, "bad", "0 1 were asked for"),
        (
            "GPU memory",
            {"gpus": [{"index": 0, "used_gib": 35.0, "total_gib": 40.0}]},
            "warning",
            "5.0 of .*GPU 0",
        ),
        ("cores", {}, "good", "16, 16 for each GPU"),
        ("cores", {"cores": 1.5}, "warning", "1.5, 1.5 for each GPU .*cpus="),
        ("cores", {"cores": 12, "spec": PodSpec(gpus=8)}, "warning", "12, 1.5 for each GPU"),
        ("cores", {"cores": 16, "spec": PodSpec(gpus=8)}, "good", "16, 2 for each GPU"),
        ("cores", {"cores": 1, "spec": PodSpec()}, "good", "1"),
        ("cores", {"cores": None}, "unknown", "unknown"),
        ("memory", {"memory_gib": 0.4}, "bad", "0.4 GiB, free on its machine"),
        ("memory", {"memory_limit_gib": 0.5}, "bad", "0.5 GiB, the pod's limit"),
        ("memory", {"memory_limit_gib": 64.0}, "good", "60.0 GiB, free on its machine"),
        (
            "memory",
            {"memory_limit_gib": 64.0, "spec": PodSpec(gpus=1, memory_gib=2)},
            "good",
            "2.0 GiB, the pod's",
        ),
        ("GPUs", {"gpus": [], "spec": PodSpec()}, "absent", "none"),
        ("memory", {"memory_gib": None}, "unknown", "unknown"),
        (
            "disk",
            {"disk": {"free_gib": 0.02, "total_gib": 10.0}},
            "bad",
            "20 MiB free .*/data/pod-1",
        ),
        ("disk", {"disk": {"free_gib": 5.0, "total_gib": 10.0}}, "warning", "5.0 GiB free"),
        ("disk", {"disk": None}, "bad", "no folder"),
        (
            "/dev/shm",
            {"shm": {"free_gib": 0.0625, "total_gib": 0.0625}},
            "bad",
            "64 MiB free .*shm-size",
        ),
        ("/dev/shm", {"shm": None}, "bad", "missing"),
        (
            "compiled ops",
            {"locks": [{"path": "/x y/lock", "age_s": 900.0, "busy": False}]},
            "bad",
            "'/x y/lock'",
        ),
        (
            "compiled ops",
            {"locks": [{"path": "/x/lock", "age_s": 900.0, "busy": True}]},
            "good",
            "being compiled",
        ),
    ],
)
def test_what_is_wrong_is_said_with_what_mends_it(
    check: str, changes: dict[str, Any], verdict: str, said: str
) -> None:
    finding = judged(GOOD, **changes)[check]
    assert finding.verdict == verdict
    assert re.search(said, f"{finding.detail} {finding.fix}")


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (
            "ssh: connect to host 127.0.0.3 port 2222: Connection refused",
            "nothing listens on 127.0.0.3:2222",
        ),
        ("ssh: connect to host 127.0.0.3 port 2222: Connection timed out", "firewall"),
        ("me@127.0.0.3: Permission denied (publickey).", "does not know the cluster's key"),
        ("ssh: Could not resolve hostname pod-1: Name or service not known", "DNS"),
        ("something else", "look at the log of pod-1"),
    ],
)
def test_ssh_that_fails_is_shown_in_its_own_words(words: str, fix: str) -> None:
    found = judged(None, words)
    assert found["ssh"].detail == words
    assert fix in found["ssh"].fix
    assert {found[check].verdict for check in CHECKS[1:] if check in found} == {Verdict.UNKNOWN}


@pytest.mark.parametrize(
    ("spec", "changes", "detail"),
    [
        (PodSpec(), {}, "NCCL eth0, of the pod's address; gloo eth0, of the pod's address"),
        (PodSpec(), {"interface": ""}, "NCCL chooses; gloo chooses"),
        (
            PodSpec(),
            {"own_interfaces": {"NCCL_SOCKET_IFNAME": "=ib0,ib1"}},
            "NCCL =ib0,ib1, by the pod; gloo eth0, of the pod's address",
        ),
        (
            PodSpec(),
            {"own_interfaces": {"NCCL_SOCKET_IFNAME": "…"}},
            "NCCL by nccl.conf; gloo eth0, of the pod's address",
        ),
        (
            PodSpec(env={"GLOO_SOCKET_IFNAME": "eth1"}),
            {},
            "NCCL eth0, of the pod's address; gloo eth1, by PodSpec.env",
        ),
        (
            PodSpec(interfaces=["ib0", "ib1"]),
            {"own_interfaces": {"NCCL_SOCKET_IFNAME": "=eth1"}, "interfaces": ["ib0", "ib1", "lo"]},
            "NCCL =ib0,ib1, by PodSpec.interfaces, not =eth1 of the pod;"
            " gloo ib0,ib1, by PodSpec.interfaces",
        ),
    ],
)
def test_the_interfaces_that_ranks_use_are_named_with_their_origin(
    spec: PodSpec, changes: dict[str, Any], detail: str
) -> None:
    found = judged(GOOD, spec=spec, **changes)["interfaces"]
    assert (found.verdict, found.detail) == (Verdict.GOOD, detail)


def test_an_interface_that_a_pod_lacks_is_named_with_those_that_are_there() -> None:
    found = judged(GOOD, spec=PodSpec(interfaces="ib9"), interfaces=["eth0", "lo"])["interfaces"]
    assert (found.verdict, found.fix) == (Verdict.BAD, "ib9 is not there; there are eth0, lo")


def test_two_real_pods_are_well(launched: Launched) -> None:
    hosts = examine_pods(launched.pods, launched.identity, PACKAGE, PodSpec())
    for host, pod in zip(hosts, launched.pods, strict=True):
        found = {finding.check: finding for finding in host.findings}
        assert host.pod == pod.name
        for check in (
            "ssh",
            "host key",
            "clock",
            "python",
            "torch",
            "deepspeed",
            "transformers",
            "workbench",
        ):
            assert found[check].verdict is Verdict.GOOD, found[check]
        assert found["GPUs"].verdict is (
            Verdict.GOOD if found["GPUs"].detail != "none" else Verdict.ABSENT
        )
        assert found["torch"].detail == installed_versions()["torch"]
        assert host.interface == "lo"
        assert found["address"].detail.startswith("127.")


def test_a_pod_that_is_gone_and_one_with_another_host_key(launched: Launched) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        free = taken.getsockname()[1]
    gone = replace(launched.pods[0], address="127.0.0.1", ssh_port=free)
    changed = replace(launched.pods[1], host_key=launched.identity.public_key)
    launched.identity.pin([gone, changed])
    first, second = examine_pods([gone, changed], launched.identity, PACKAGE, PodSpec())
    refused = first.findings[0]
    assert refused.verdict is Verdict.BAD
    assert "Connection refused" in refused.detail
    key = second.findings[1]
    assert (key.check, key.verdict) == ("host key", Verdict.BAD)
    real = fingerprint(launched.pods[1].host_key)
    assert key.detail == f"expected {fingerprint(launched.identity.public_key)}, got {real}"
    assert not first.reached
    assert not second.reached


def test_a_host_that_accepts_and_says_nothing_is_given_up(launched: Launched) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        pod = replace(launched.pods[0], address="127.0.0.1", ssh_port=silent.getsockname()[1])
        launched.identity.pin([pod])
        seen = run_over_openssh(pod, launched.identity, ["true"], timeout_s=2.0)
    assert not seen.reached
    assert re.search("timed out|no answer", seen.words)


def test_a_pod_is_waited_for_while_others_answer(
    launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The client's own limit would be that second too.
    start = openssh.start_ssh
    monkeypatch.setattr(openssh, "start_ssh", lambda *words, **_limit: start(*words))
    late = functools.partial(
        run_over_openssh, launched.pods[0], launched.identity, ["sleep", "1.5"], timeout_s=1.0
    )
    assert not late().reached
    assert late(answered_s=time.monotonic).exit_code == 0


def test_a_python_that_is_gone_is_told_from_a_host_that_is(launched: Launched) -> None:
    pods = [replace(launched.pods[0], python="/nowhere/python")]
    (host,) = examine_pods(pods, launched.identity, PACKAGE, PodSpec())
    ssh, key = host.findings[:2]
    assert (ssh.verdict, key.verdict) == (Verdict.BAD, Verdict.GOOD)
    assert "No such file" in ssh.detail
    assert says(
        ssh.fix, "is not there any more: close the cluster and start it again", "/nowhere/python"
    )


@pytest.mark.slow
def test_pods_exchange_and_leave_nothing(launched: Launched) -> None:
    before = {process.pid for process in on_pods(launched.pods)}
    interfaces = {pod.name: "lo" for pod in launched.pods}
    exchange = measure_exchange(
        launched.pods, launched.identity, PACKAGE, interfaces, {"WORKBENCH_CANARY": "seen"}
    )
    assert not exchange.problem
    assert (exchange.pods, exchange.backend) == (2, "gloo")
    assert exchange.latency_s is not None
    assert exchange.sizes[0][0] == 1 << 20
    assert [size for size, _ in exchange.sizes] == sorted(size for size, _ in exchange.sizes)
    assert exchange.bandwidth_gb_per_s is not None
    until(lambda: {p.pid for p in on_pods(launched.pods)} <= before)


@pytest.mark.slow
def test_an_exchange_that_cannot_be_names_the_pod(launched: Launched) -> None:
    interfaces = {pod.name: "nosuchnet" for pod in launched.pods}
    exchange = measure_exchange(launched.pods, launched.identity, PACKAGE, interfaces, {})
    assert "pod-" in exchange.problem
    assert exchange.bandwidth_gb_per_s is None


@pytest.fixture
def building(tmp_path: Path) -> Iterator[Path]:
    """A folder in which a process works, as a compiler does."""
    folder = tmp_path / "py311_cpu" / "cpu_adam"
    folder.mkdir(parents=True)
    (folder / "lock").touch()
    child = os.fork()
    if child == 0:
        os.chdir(folder)
        time.sleep(600)
        os._exit(0)
    yield folder
    os.kill(child, 9)
    os.waitpid(child, 0)


def test_locks_of_compiled_ops(tmp_path: Path, building: Path) -> None:
    stale = tmp_path / "py311_cpu" / "deepspeed_shm_comm" / "lock"
    stale.parent.mkdir()
    stale.touch()
    os.utime(stale, (time.time() - 600,) * 2)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        found = {str(lock["path"]): lock for lock in compile_locks(tmp_path)}
        if found[str(building / "lock")]["busy"]:
            break
    assert found[str(building / "lock")]["busy"]
    assert not found[str(stale)]["busy"]
    assert float(str(found[str(stale)]["age_s"])) > 500


class Seen(HTMLParser):
    """The text and the tags of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.parts: list[str] = []
        self.tags: set[str] = set()
        self.feed(page)
        self.text = " ".join(" ".join(self.parts).split())

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.add(tag)

    def handle_data(self, data: str) -> None:
        self.parts.append(data)


def test_pods_that_are_alike_share_a_column_with_the_details_of_all() -> None:
    def host(number: int, torch: str) -> HostReport:
        findings = (
            Finding(check="ssh", verdict=Verdict.GOOD, detail=f"0.{number} s"),
            Finding(check="torch", verdict=Verdict.GOOD, detail=torch),
        )
        return HostReport(pod=f"pod-{number}", address=f"10.0.0.{number}", findings=findings)

    hosts = (host(1, "2.13.0"), host(2, "2.12.0"), host(3, "2.13.0"))
    text = as_text(Diagnosis(hosts=hosts, hosts_s=0.1))
    assert "pod-1 10.0.0.1 and 1 alike" in text and "pod-2 10.0.0.2" in text
    assert "✓ 0.1 s, 0.3 s" in text
    assert "pod-3" not in text


def test_text_and_html_state_the_same_and_escape() -> None:
    evil = "<img src=x onerror=alert(1)>"
    bad = Finding(
        check="torch", verdict=Verdict.BAD, detail=f"2.12 {evil}", fix=f"pip install {evil}"
    )
    well = Finding(check="ssh", verdict=Verdict.GOOD, detail="0.3 s")
    diagnosis = Diagnosis(
        hosts=(
            HostReport(pod="pod-0", address="127.0.0.2", findings=(well, bad)),
            HostReport(pod="pod-1", address="127.0.0.3", findings=(well, bad)),
        ),
        exchange=Exchange(
            pods=2,
            ranks=4,
            transports=("NVLink", "sockets over eth0"),
            backend="nccl",
            latency_s=0.0002,
            sizes=((1 << 20, 0.002), (1 << 24, 0.02)),
        ),
        hosts_s=0.8,
    )
    text, page = " ".join(str(diagnosis).split()), Seen(diagnosis._repr_html_())
    said = [
        "pod-0 127.0.0.2",
        "2 of 2 hosts cannot be relied on",
        f"pod-0, pod-1, torch: 2.12 {evil}",
        "200 µs",
        f"Fix: pip install {evil}",
        "1.26 GB/s",
        "Between 4 ranks on 2 pods, by nccl over NVLink, sockets over eth0",
        "t5-small",
    ]
    for fact in said:
        assert fact in text
        assert fact in page.text
    assert "img" not in page.tags
    assert not diagnosis.ok
    assert len(diagnosis.problems) == 2
    nothing = Diagnosis(hosts=diagnosis.hosts[:1], note="there is one pod", hosts_s=0.1)
    assert says(nothing, "Bandwidth between pods: not measured ({})") and says(
        nothing, "there is one pod"
    )


@pytest.mark.parametrize(
    ("check", "changed", "verdict", "detail"),
    [
        ("clock", {"time_s": 1002.0}, Verdict.GOOD, "+1.00 s"),
        ("clock", {"time_s": 1002.1}, Verdict.WARNING, "+1.1 s"),
        ("memory", {"memory_gib": 1.0}, Verdict.GOOD, "1.0 GiB, free on its machine"),
        ("memory", {"memory_gib": 0.99}, Verdict.BAD, "1.0 GiB, free on its machine"),
        ("clock", {"time_s": 999.0}, Verdict.GOOD, "-1.00 s"),
        ("disk", {"disk": {"free_gib": 10.0, "total_gib": 500.0}}, Verdict.GOOD, "10.0 GiB free"),
        ("disk", {"disk": {"free_gib": 2.0, "total_gib": 500.0}}, Verdict.WARNING, "2.0 GiB free"),
        ("disk", {"disk": {"free_gib": 0.05, "total_gib": 1.0}}, Verdict.BAD, "51 MiB free"),
        ("disk", {"disk": {"free_gib": 0.1, "total_gib": 1.0}}, Verdict.BAD, "0.1 GiB free"),
        (
            "/dev/shm",
            {"shm": {"free_gib": 1.0, "total_gib": 8.0}},
            Verdict.GOOD,
            "1.0 GiB free of 8.0",
        ),
        (
            "/dev/shm",
            {"shm": {"free_gib": 0.5, "total_gib": 8.0}},
            Verdict.BAD,
            "0.5 GiB free of 8.0",
        ),
    ],
)
def test_a_limit_itself_is_enough(
    check: str, changed: dict[str, object], verdict: Verdict, detail: str
) -> None:
    finding = judged(GOOD, **changed)[check]
    assert (finding.verdict, finding.detail) == (verdict, detail)


def test_the_time_of_the_examination_is_the_time_of_the_login() -> None:
    assert judged(GOOD)["ssh"].detail == "1.0 s"


def test_shared_memory_matters_less_without_gpus() -> None:
    def verdict(free_gib: float) -> Verdict:
        shm = {"free_gib": free_gib, "total_gib": 8.0}
        return judged(GOOD, spec=PodSpec(), gpus=[], shm=shm)["/dev/shm"].verdict

    small = [verdict(free_gib) for free_gib in (8.0, 0.25, 0.24)]
    assert small == [Verdict.GOOD, Verdict.WARNING, Verdict.BAD]


@pytest.mark.parametrize(
    ("build", "nvcc", "verdict", "words"),
    [
        ("CUDA 12.9", "12.9", Verdict.GOOD, "torch CUDA 12.9, nvcc 12.9"),
        ("CUDA 12.9", "11.8", Verdict.WARNING, "torch CUDA 12.9, nvcc 11.8"),
        ("CUDA 13.0", "12.9", Verdict.WARNING, "torch CUDA 13.0, nvcc 12.9"),
        ("CUDA 12.9", "", Verdict.GOOD, "no nvcc: ops that are not built cannot be compiled"),
        ("ROCm 6.4", "", Verdict.GOOD, "torch ROCm 6.4"),
        ("CPUs", "12.9", Verdict.BAD, "torch is built for CPUs"),
    ],
)
def test_the_compiler_has_the_cuda_of_torch(
    build: str, nvcc: str, verdict: Verdict, words: str
) -> None:
    found = judged(GOOD, torch_build=build, nvcc=nvcc)["CUDA"]
    assert found.verdict is verdict
    assert words in found.detail
    assert ("CUDA_HOME" in found.fix) == (verdict is Verdict.WARNING)
    # A pod without GPUs compiles nothing for them.
    assert "CUDA" not in judged(GOOD, spec=PodSpec(), gpus=[], torch_build=build, nvcc=nvcc)


def test_ops_are_listed_by_state() -> None:
    ops = {"prebuilt": ["fused_adam"], "compiled": ["cpu_adam"], "missing": ["aio", "cpu_lion"]}
    assert judged(GOOD, ops=ops)["compiled ops"].detail == (
        "no locks; built with DeepSpeed: fused_adam; compiled: cpu_adam; "
        "compiled on first use: aio, cpu_lion"
    )


def test_only_an_idle_old_lock_is_stale() -> None:
    def state(*locks: tuple[bool, float]) -> str:
        listed = [
            {"path": f"/c/{n}/lock", "busy": busy, "age_s": age_s}
            for n, (busy, age_s) in enumerate(locks)
        ]
        return judged(GOOD, locks=listed)["compiled ops"].detail

    assert state() == "no locks"
    assert state((True, 1e6)) == state((False, 60.0)) == "one is being compiled"
    assert state((False, 1e6)) == "1 stale lock"
    assert state((False, 1e6), (False, 1e6), (True, 1e6)) == "2 stale locks"


def test_a_diagnosis_is_well_unless_a_host_or_the_exchange_is_bad() -> None:
    def host(verdict: Verdict) -> HostReport:
        findings = (
            Finding(check="ssh", verdict=Verdict.GOOD, detail=""),
            Finding(check="disk", verdict=verdict, detail=""),
        )
        return HostReport(pod="pod-0", address="127.0.0.2", findings=findings)

    good, warned, bad = (host(v) for v in (Verdict.GOOD, Verdict.WARNING, Verdict.BAD))
    assert (good.ok, warned.ok, bad.ok) == (True, True, False)
    assert good.reached
    assert Diagnosis(hosts=(good, warned), hosts_s=0.1).ok
    assert not Diagnosis(hosts=(good, bad), hosts_s=0.1).ok
    assert Diagnosis(hosts=(good,), exchange=Exchange(pods=2), hosts_s=0.1).ok
    refused = Exchange(pods=2, problem="refused")
    assert not Diagnosis(hosts=(good,), exchange=refused, hosts_s=0.1).ok
