"""Collect the files of a run for a ConfigMap. No values of environment variables are included."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from workbench.base.errors import ConfigError
from workbench.handover.files import files_of
from workbench.handover.kubeflow.objects import RESULTS
from workbench.handover.kubeflow.options import HandoverOptions
from workbench.jobs.job import Handover, HandoverRequest, Job
from workbench.jobs.script import references
from workbench.pods.pod_spec import PodSpec

# Limit of Kubernetes for a ConfigMap: 1 MiB, including names.
_MOST_BYTES = (1 << 20) - 4096


def handover_of(job: Job, root: Path, options: HandoverOptions) -> Handover:
    """Ask the run's job for its files, with the input folder on the claim from the options."""
    request = HandoverRequest(
        root=root,
        folder=f"{RESULTS}/{options.inputs}/" if options.inputs else "",
        script=options.script,
        elastic=options.elastic is not None,
    )
    return job.handed_over(request)


def config_files(
    handover: Handover, env: Mapping[str, str], options: HandoverOptions, pod: PodSpec, nodes: int
) -> Mapping[str, bytes]:
    """Return the files of the ConfigMap: specification, zipped package, and zipped inputs."""
    _check_secrets({**pod.env, **env}, options)
    files = files_of(handover, pod, nodes)
    size = sum(map(len, files.values()))
    if size > _MOST_BYTES:
        raise ConfigError(
            f"{handover.large} would make a ConfigMap of {size / 2**20:.1f} MiB, and "
            f"Kubernetes takes 1 MiB: put {handover.put} into a folder of the claim "
            "and name claim and folder: run.manifest(…, pvc='claim', inputs='folder')"
        )
    return files


def _check_secrets(env: Mapping[str, str], options: HandoverOptions) -> None:
    given = {*options.sources, *options.env}
    missing = [variable for variable in references(env.values()) if variable not in given]
    if missing:
        others = ", ".join(
            f'"{variable}": "secret/key"' for variable in missing if variable != "HF_TOKEN"
        )
        hints = ["token_secret='hub'"] * ("HF_TOKEN" in missing) + [f"secrets={{{others}}}"] * bool(
            others
        )
        raise ConfigError(
            f"the run takes {', '.join(missing)} from the environment, and no value "
            "is in a manifest: name the Secrets that hold them, run.manifest(…, "
            f"{', '.join(hints)}), or give what is no secret with env="
        )
