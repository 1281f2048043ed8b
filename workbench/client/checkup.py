"""Run the doctor on a live cluster.

The keeper reports its state. The examination itself bypasses the keeper.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from workbench.base.errors import RunError, WorkbenchError
from workbench.base.messages.wire import ask
from workbench.base.words import pluralize
from workbench.pods.backends import backend_class
from workbench.pods.doctor.examination import Diagnosis, examine_pods
from workbench.pods.doctor.exchange import Exchange, measure_exchange
from workbench.pods.kubernetes.options import KubernetesOptions
from workbench.pods.nodes import nodes
from workbench.pods.place import PlaceOptions
from workbench.pods.pod import Pod
from workbench.pods.slurm.pods import SlurmPods
from workbench.pods.ssh.identity import Identity
from workbench.rundir.paths import ClusterPaths
from workbench.rundir.register.registered import registered
from workbench.rundir.spec import ClusterSpec


def diagnose(
    paths: ClusterPaths, pods: list[Pod], cluster: ClusterSpec, *, bandwidth: bool
) -> Diagnosis:
    """Examine every pod, and measure the network unless a run would disturb the measurement."""
    spec = cluster.pods
    registered(paths.root)
    standing = ask(paths.socket, {"op": "status"})
    package = str(standing["package"])
    if not package:
        raise RunError(
            f"the cluster is {standing['phase']}; its pods can be examined once they are ready"
        )
    identity = Identity(paths.identity)
    began = time.monotonic()
    hosts = examine_pods(pods, identity, package, spec)
    hosts_s = time.monotonic() - began
    reached = all(host.reached for host in hosts)
    # Asked after the examination: a run that has just ended still clears its pods for a moment.
    running = ask(paths.socket, {"op": "status"})["running"]
    note = _obstacle(len(pods), bandwidth, running, reached)
    exchange: Exchange | None = None
    if not note:
        interfaces = {host.pod: host.interface for host in hosts}
        threads = max(1, int(spec.cores // spec.slots))  # as for a rank
        place = backend_class(cluster.backend.get("kind"))
        env = {"OMP_NUM_THREADS": str(threads), **place.rank_variables(spec)}
        exchange = measure_exchange(pods, identity, package, interfaces, env)
    return Diagnosis(hosts=hosts, exchange=exchange, note=note, hosts_s=hosts_s)


def _obstacle(pods: int, bandwidth: bool, running: Sequence[str], reached: bool) -> str:
    if not bandwidth:
        return "it was not asked for"
    if pods < 2:
        return "there is one pod"
    if not reached:
        return "not every pod can be reached"
    names = " and ".join(running)
    if len(running) > 1:
        return f"runs {names} are using the pods"
    if names:
        return f"run {names} is using the pods"
    return ""


def more_pods(spec: ClusterSpec) -> str:
    """Return how many more pods Kubernetes or Slurm could schedule now, or why that is unknown.

    Empty for other places.
    """
    kinds: dict[object, type[PlaceOptions]] = {
        KubernetesOptions.kind: KubernetesOptions,
        SlurmPods.kind: SlurmPods,
    }
    place = kinds.get(spec.backend.get("kind"))
    if place is None:
        return ""
    try:
        table = nodes(place.from_dict(spec.backend), pod=spec.pods)
    except WorkbenchError as error:
        return f"how many more pods could be scheduled is not known: {error}"
    more = ""
    if table.nodes:
        pods = pluralize(table.schedulable, "more pod")
        more = f"{pods} like these could be scheduled now"
    return "; ".join(part for part in (more, table.note) if part)
