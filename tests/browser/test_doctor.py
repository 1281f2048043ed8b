"""The doctor's findings as a person sees them, with troubles of every kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.browser.conftest import notebook

pytestmark = [pytest.mark.slow, pytest.mark.browser, pytest.mark.timeout(300)]

EXAMINED = """
import json
from workbench.pods.doctor.examination import Diagnosis, judge_result
from workbench.pods.doctor.exchange import Exchange
from workbench.pods.pod import Pod
from workbench.pods.pod_spec import PodSpec
from workbench.pods.ssh.command import CommandResult

here = {"python": "3.11.7", "torch": "2.13.0+cpu", "deepspeed": "0.19.8", "transformers": "5.23.0",
        "workbench": "0.1.0"}

def host(number, words="", **changes):
    pod = Pod(name=f"pod-{number}", address=f"10.0.0.{number + 1}", ssh_port=2222, user="me", root="/data",
              python="/opt/python")
    facts = {"time_s": 0.5, "interface": "eth0", "versions": here, "gpus": [], "memory_gib": 60.0, "locks": [],
             "disk": {"free_gib": 200.0, "total_gib": 500.0}, "shm": {"free_gib": 8.0, "total_gib": 8.0}, **changes}
    seen = CommandResult(reached=not words, exit_code=255 if words else 0, out="" if words else json.dumps(facts),
                 words=words, began_s=0.0, ended_s=0.8)
    return judge_result(seen, pod, PodSpec(), here)

hosts = [host(0), host(1, words="ssh: connect to host 10.0.0.2 port 2222: Connection refused <img src=x>")]
hosts += [host(n, versions={**here, "torch": "2.12.1"}, disk={"free_gib": 5.0, "total_gib": 10.0}) for n in (2, 3)]
hosts += [host(n) for n in (4, 5, 6)]
"""
ILL = "Diagnosis(hosts=tuple(hosts), note='not all pods can be relied on', hosts_s=0.9)"
WELL = """
sizes = tuple((1 << n, 0.0008 * 2 ** (n - 20)) for n in (20, 22, 24))
Diagnosis(hosts=tuple(hosts[:1] + hosts[4:6]), exchange=Exchange(pods=3, backend="gloo", latency_s=2e-4, sizes=sizes),
          hosts_s=0.9)
"""


def test_the_doctors_findings(lab: Any, open_book: Callable[[str], Any]) -> None:
    book = open_book(lab.add(notebook(EXAMINED, ILL, WELL), "doctor.ipynb"))
    book.run(0)
    book.run(1)
    said = book.see(1, "Fix:", 30)
    assert "pod-2, pod-3, torch: 2.12.1" in said
    assert "Connection refused <img src=x>" in said
    assert book.page.locator("img[src=x]").count() == 0
    book.shoot(1, "doctor-ill")
    book.page.set_viewport_size({"width": 640, "height": 800})
    assert not book.is_wider_than_its_place(1)
    assert book.output(1).locator(".wb-wide").evaluate("e => e.scrollWidth > e.clientWidth")
    book.run(2)
    book.see(2, "all well", 30)
    book.shoot(2, "doctor-well")
