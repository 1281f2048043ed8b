"""The doctor: examines all pods in parallel over OpenSSH, without keeper and agents.

The doctor changes nothing on a pod.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

from workbench.base import entries
from workbench.base.display_protocol import Displayable
from workbench.base.versions import installed_versions
from workbench.pods.doctor.exchange import Exchange
from workbench.pods.doctor.verdicts import CHECKS, Finding, Verdict, find_facts, judge_facts
from workbench.pods.pod import Pod
from workbench.pods.pod_spec import PodSpec
from workbench.pods.ssh.identity import Identity, fingerprint
from workbench.pods.ssh.openssh import NO_CLIENT, CommandResult, run_over_openssh

_HOST_S = 4.5
_AT_ONCE = 32
_CHANGED = re.compile(
    r"IDENTIFICATION HAS CHANGED|Host key verification failed|No \S+ host key is known"
)
_SHOWN = re.compile(r"SHA256:[A-Za-z0-9+/]+")


@dataclass(frozen=True, kw_only=True, slots=True)
class HostReport:
    pod: str
    address: str
    findings: tuple[Finding, ...]
    """Findings in the order of `CHECKS`. A check that does not apply is left out, such as memory of
    no GPU."""
    interface: str = ""
    gpu_gib: float | None = None
    """GiB of its smallest GPU; None where none was found."""
    memory_limit_gib: float | None = None
    """Limit on the memory of all processes of the pod, in GiB. None: unknown."""
    process_gib: float | None = None
    """Memory of a process with the imports of a rank, in GiB. None: not measured."""

    @property
    def reached(self) -> bool:
        """Whether the examination ran on the pod."""
        return self.findings[0].verdict is Verdict.GOOD

    @property
    def ok(self) -> bool:
        return not any(finding.verdict is Verdict.BAD for finding in self.findings)


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis(Displayable):
    """Findings of the doctor on every host, and between the hosts."""

    hosts: tuple[HostReport, ...]
    exchange: Exchange | None = None
    """The all-reduce between them; None where none was measured."""
    note: str = ""
    """Why no exchange was measured."""
    hosts_s: float

    @property
    def ok(self) -> bool:
        """Whether nothing is bad; a warning is not."""
        return all(host.ok for host in self.hosts) and not (self.exchange and self.exchange.problem)

    @property
    def problems(self) -> list[tuple[HostReport, Finding]]:
        """Return failures and warnings, host by host."""
        wrong = (Verdict.BAD, Verdict.WARNING)
        return [
            (host, finding)
            for host in self.hosts
            for finding in host.findings
            if finding.verdict in wrong
        ]

    def to_dict(self) -> dict[str, object]:
        """Return the JSON form, with the verdict on the whole as `ok`."""
        return {"ok": self.ok, **asdict(self)}

    def __repr__(self) -> str:
        return (
            f"Diagnosis({len(self.hosts)} hosts, "
            f"{'well' if self.ok else f'{len(self.problems)} to look at'})"
        )


def examine_pods(
    pods: Sequence[Pod], identity: Identity, package: str, spec: PodSpec
) -> tuple[HostReport, ...]:
    """Examine all pods in parallel.

    Give up a silent pod five seconds after the last answer of another.
    """
    here = installed_versions()
    answered_s = 0.0

    def examine(pod: Pod) -> HostReport:
        command = [
            "env",
            f"PYTHONPATH={package}",
            pod.python,
            "-P",
            "-m",
            entries.EXAMINE,
            pod.address,
            pod.root,
        ]
        nonlocal answered_s
        seen = run_over_openssh(
            pod, identity, command, timeout_s=_HOST_S, answered_s=lambda: answered_s
        )
        if seen.reached:
            answered_s = time.monotonic()
        return judge_result(seen, pod, spec, here, identity.pinned(pod.address, pod.ssh_port))

    with ThreadPoolExecutor(max_workers=max(1, min(_AT_ONCE, len(pods)))) as pool:
        return tuple(pool.map(examine, pods))


def judge_result(
    seen: CommandResult,
    pod: Pod,
    spec: PodSpec,
    here: Mapping[str, str],
    pinned: Sequence[str] = (),
) -> HostReport:
    """Turn the result of the examination command on a pod into findings. Pure."""
    facts = find_facts(seen.out)
    if facts is None:
        findings = [*_unreached(seen, pod, pinned)]
    else:
        login = Finding(
            check="ssh", verdict=Verdict.GOOD, detail=f"{seen.ended_s - seen.began_s:.1f} s"
        )
        key = Finding(check="host key", verdict=Verdict.GOOD, detail="as pinned")
        skew_s = _skew(facts.time_s, seen.began_s, seen.ended_s)
        findings = [login, key, *judge_facts(facts, pod, spec, here, skew_s)]
    return HostReport(
        pod=pod.name,
        address=pod.address,
        findings=tuple(findings),
        interface=facts.interface if facts else "",
        gpu_gib=facts.gpu_gib if facts else None,
        memory_limit_gib=facts.memory_limit_gib if facts else None,
        process_gib=facts.process_gib if facts else None,
    )


def _skew(there_s: float, began_s: float, ended_s: float) -> float:
    """Return the least error of a clock in seconds, from readings of our clock before and after."""
    return max(0.0, there_s - ended_s) - max(0.0, began_s - there_s)


def _unreached(seen: CommandResult, pod: Pod, pinned: Sequence[str]) -> Sequence[Finding]:
    words = " ".join(seen.words.split()) or f"it ended with {seen.exit_code}"
    changed = _CHANGED.search(seen.words) is not None
    ssh, fix = Verdict.BAD, _ssh_fix(seen, pod)
    key = Finding(check="host key", verdict=Verdict.UNKNOWN, detail="not seen")
    if changed:
        words = "stopped at the host key"
        fix = "see host key"
        key = Finding(
            check="host key", verdict=Verdict.BAD, detail=_keys(seen.words, pinned), fix=_KEY_FIX
        )
    elif seen.reached:
        key = Finding(check="host key", verdict=Verdict.GOOD, detail="as pinned")
    unknown = [
        Finding(check=name, verdict=Verdict.UNKNOWN, detail="not seen") for name in CHECKS[2:]
    ]
    return [Finding(check="ssh", verdict=ssh, detail=words, fix=fix), key, *unknown]


_KEY_FIX = (
    "another machine answers there, or the pod was made anew: close the cluster and start it again"
)


def _keys(words: str, pinned: Sequence[str]) -> str:
    shown = _SHOWN.search(words)
    expected = " or ".join(fingerprint(key) for key in pinned) or "none"
    return f"expected {expected}, got {shown[0] if shown else 'another one'}"


def _ssh_fix(seen: CommandResult, pod: Pod) -> str:
    for words, fix in _SSH_FIXES.items():
        if words in seen.words:
            return fix.format(
                pod=pod.name, address=pod.address, port=pod.ssh_port, python=pod.python
            )
    if seen.reached:
        return f"ssh works, but {pod.python} there cannot look around: run it by hand on {pod.name}"
    return f"look at the log of {pod.name}, or close the cluster and start it again"


_SSH_FIXES = {
    NO_CLIENT: "install the OpenSSH client here: sudo apt-get install openssh-client",
    "is gone, and the keeper": "the keeper logs in again, with pauses: the cluster's panel has the"
    " words of ssh",
    "runs no commands": "log in to {address} by hand: look at the account's shell and its start-up"
    " files",
    "refused": "nothing listens on {address}:{port}: {pod} or its "
    "sshd has ended; close the cluster and start it again",
    "timed out": "no way to {address}:{port}: is {pod} up, and does "
    "a firewall or network policy let the port through?",
    "No route": "no way to {address}: is {pod} up and in a network that this machine reaches?",
    "no answer": "{pod} accepts the connection and says nothing: it hangs or is overloaded, or"
    " the start-up files of the login are slow",
    "Permission denied": "{pod} does not know the cluster's key: "
    "close the cluster and start it again",
    "Could not resolve": "the name {address} is not known here: "
    "look at the DNS, or use the address",
    "No module named": "the cluster's package is gone from {pod}: "
    "close the cluster and start it again",
    "No such file": "{python} is not there any more: close the cluster and start it again",
}
