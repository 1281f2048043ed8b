"""A watched standing connection: opened again after a break, with pauses and a word."""

from __future__ import annotations

import time
from dataclasses import replace

from workbench.pods.hosts.certificates import ended
from workbench.pods.pod import Phase, Pod
from workbench.pods.ssh.master import Master, is_refusal

_PAUSES_S = (0.0, 2.0, 5.0, 10.0)
_LONGEST_S = 15.0
_REFUSED_S = 60.0
_REFUSALS = 3  # one may be a daemon's that is starting
_LOOK_S = 0.8  # a look blocks for less than a second
_END_S = 1.0  # for ssh's own words on its time limit


class Reopening:
    """A host's connection, watched by the place."""

    def __init__(self, master: Master, connect_timeout_s: float) -> None:
        self.master = master
        self._limit_s = connect_timeout_s + _END_S
        self._tries = 0
        self._refusals = 0
        self._ended = ""
        """Certificates that had ended at the last refusal."""
        self._counted = True
        """Whether the end of the last try was looked at."""

    def look(self, pod: Pod) -> Pod:
        """Return the pod as its connection stands. Starts a try when due."""
        if self.master.is_up:
            self._tries = 0
            self._refusals = 0
            return replace(pod, phase=Phase.RUNNING, message="")
        if self.master.is_running:
            if self.master.tried_s < self._limit_s:
                return pod
            self.master.drop()
        said = self.master.note_end() or "ssh ended without a word"
        self._count(said)
        if self._refusals and self._ended:
            said = f"{said.rstrip('.')}; {self._ended}"
        if self.master.tried_s >= self._pause_s:
            self._tries += 1
            self._counted = False
            self.master.start()
            if self.master.wait_up(_LOOK_S):
                return self.look(pod)
        return self._shown(pod, said)

    def _count(self, said: str) -> None:
        """Count a refused try."""
        if self._tries and not self._counted:
            is_refused = is_refusal(said)
            self._refusals = self._refusals + 1 if is_refused else 0
            self._ended = ended(self.master.words) if is_refused else ""
            self._counted = True

    @property
    def _pause_s(self) -> float:
        if self._refusals >= _REFUSALS:
            return _REFUSED_S
        return _PAUSES_S[self._tries] if self._tries < len(_PAUSES_S) else _LONGEST_S

    def _shown(self, pod: Pod, said: str) -> Pod:
        if self._refusals >= _REFUSALS:
            words = f"its host refused {self._refusals} logins: {said}"
            return replace(pod, phase=Phase.FAILED, message=words)
        if pod.phase is Phase.UNKNOWN and not self._refusals:
            return pod  # its message has the time of the first failure
        since = f"{time.strftime('%H:%M:%S')}: the connection broke and is opened again: {said}"
        return replace(pod, phase=Phase.UNKNOWN, message=since)
