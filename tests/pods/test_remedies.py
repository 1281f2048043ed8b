"""Every sentence of the places that asks people to do something, and how the advice is proven.

A sentence is in one of three tables: the advice is carried out here, is carried out by another
test, or is out of reach of a test. A new sentence without an entry fails the first test.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.pods.test_kubeobjects import objects
from tests.support.sentences import PACKAGE, load, pattern, sentences_of
from workbench.base.errors import WorkbenchError
from workbench.pods.hosts import names
from workbench.pods.hosts.entry import HostFacts, check_hosts
from workbench.pods.hosts.far_end import check_names
from workbench.pods.hosts.note import make_folder
from workbench.pods.hosts.pods import SSHPods
from workbench.pods.kubernetes.manifests.volumes import Volume
from workbench.pods.kubernetes.options import KubernetesOptions
from workbench.pods.pod import Pod
from workbench.pods.pod_spec import PodSpec
from workbench.pods.slurm.container import Container, Runner
from workbench.pods.slurm.pods import SlurmPods
from workbench.pods.ssh.identity import (
    Identity,
    check_key_file,
    config_path,
    generate_key,
    key_remedy,
)

ROOMS = ("ssh", "hosts", "kubernetes", "slurm", "local")
VERBS = (
    "add|ask|call|check|choose|compare|convert|copy|correct|delete|drop|end|get|give|install|keep"
    "|leave|let|log|look|make|move|name|plug|put|remove|rename|renew|restart|run|say|set|start"
    "|submit|take|touch|try|use|wait|write"
)
ASKS = re.compile(
    rf"(?:^|[.:;,] |\b(?:or|and|then|either) )(?:{VERBS})\b"
    r"|\b(?:needs? (?!the kube|\{})|must |waits longer|for a longer|see python=)",
    re.IGNORECASE,
)
NO_ADVICE = {
    "pods.container.each-apptainer-singularity": "a program",
    "pods.entry._ask.unset-pythonpath-shift": "a program",
    "pods.entry.create_pod_folder.pod-gpus": "a report",
    "pods.access.text-number-needs": "the end of a sentence of a test in test_kubeaccess",
}

Use = Callable[[Path], object]


def ssh(**options: object) -> Use:
    def use(_folder: Path) -> None:
        backend = SSHPods(**{"hosts": ["a"], "key": "k", **options})  # type: ignore[arg-type]
        backend.hosts_for(len(backend.hosts))

    return use


def kubernetes(**options: object) -> Use:
    return lambda _folder: KubernetesOptions(**{"image": "x/y:1", **options})  # type: ignore[arg-type]


def template(text: object) -> Use:
    """Merge a pod template into the workbench's pod; a text is the content of a file."""

    def use(folder: Path) -> None:
        given = text
        if isinstance(text, str):
            given = str(folder / "pod.yaml")
            Path(given).write_text(text)
        objects(pod_template=given).pod(0, None)

    return use


def volume(**options: object) -> Use:
    return lambda _folder: Volume(**{"mount": "/data", **options})  # type: ignore[arg-type]


def volumes(*given: dict[str, object]) -> Use:
    return kubernetes(volumes=list(given))


def slurm(**options: object) -> Use:
    def use(_folder: Path) -> None:
        SlurmPods(**options)._check(PodSpec())  # type: ignore[arg-type]

    return use


def in_pyxis(**options: object) -> Use:
    def use(folder: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("workbench.pods.slurm.pods.runner_here", lambda: Runner.PYXIS)
            backend = SlurmPods(**options)  # type: ignore[arg-type]
            backend._folder = folder
            backend._container_of(PodSpec(image="x", env={"CUDA_HOME": "/cuda"}))

    return use


def container(image: str, folder: str) -> Use:
    mounts = [Path(folder)]
    return lambda _folder: Container(
        image=image, runner=Runner.APPTAINER, mounts=mounts, gpus=False
    ).check()


def spec_of(items: object, part: str = "volumes") -> Mapping[str, object]:
    return {"spec": {part: items}}


def key_file(path: str) -> Use:
    """Check a file beside a key pair."""

    def use(folder: Path) -> None:
        if not (folder / "id").exists():
            generate_key(folder / "id", "")
        check_key_file(folder / path)

    return use


def on_one_line(is_one: bool) -> Use:
    def use(folder: Path) -> str:
        generate_key(folder / "id", "")
        text = (folder / "id").read_text()
        (folder / "id").write_text(text.replace("\n", " ") if is_one else text)
        said = key_remedy(folder / "id")
        assert is_one or not said
        return said

    return use


def two_hosts(*roots: str, daemons: str = "ab") -> Use:
    facts = [
        HostFacts(
            root=root,
            python="p",
            versions={},
            gpus=0,
            cores=1,
            memory_gib=1,
            daemon=[daemons[number]],
        )
        for number, root in enumerate(roots)
    ]
    pods = [Pod(name=f"pod-{number}", address=f"h{number}") for number in range(len(roots))]
    return lambda _folder: check_hosts(pods, facts, PodSpec())


def match_that_hangs(command: str) -> Use:
    def use(folder: Path) -> None:
        (folder / "config").write_text(f'Match exec "{command}"\n  User ada\n')
        names.ask_ssh(["-F", str(folder / "config"), "--", "lab"])

    return use


def state_home(name: str) -> Use:
    def use(folder: Path) -> None:
        (folder / "file").touch()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("XDG_STATE_HOME", str(folder / name))
            make_folder(folder / "cluster")

    return use


def own_folder(name: str) -> Use:
    def use(folder: Path) -> None:
        (folder / "full").mkdir(exist_ok=True)
        (folder / "full" / "file").touch()
        Identity.create(folder / name)

    return use


WORKER = {"name": "worker"}

CARRIED_OUT: Mapping[str, tuple[Use, Use]] = {
    # Hosts.
    "pods.identity.check_key_file.key-folder-name": (key_file("."), key_file("id")),
    "pods.identity.check_key_file.key-public-key": (key_file("id.pub"), key_file("id")),
    "pods.identity.config_path.openssh-use-path": (
        lambda _folder: config_path(Path('/my "keys"/id')),
        lambda _folder: config_path(Path("/my keys/id")),
    ),
    "pods.identity.create.empty-clusters-identity": (own_folder("full"), own_folder("own")),
    "pods.identity.not_usable.first-line-begin": (on_one_line(True), on_one_line(False)),
    "pods.entry.check_hosts.clusters-folder-must": (
        two_hosts("/home/a/c/pod-0", "/u/a/c/pod-1"),
        two_hosts("/scratch/c/pod-0", "/scratch/c/pod-1"),
    ),
    "pods.entry.check_hosts.host-under-two": (
        two_hosts("/r/c/pod-0", "/r/c/pod-1", daemons="aa"),
        two_hosts("/r/c/pod-0"),
    ),
    "pods.far_end.check_names.name-clusters-folder": (
        lambda _folder: check_names("lab", "pod-0"),
        lambda _folder: check_names(f"lab-{'0' * 16}", "pod-0"),
    ),
    "pods.names.ask_ssh.did-end-does": (match_that_hangs("sleep 600"), match_that_hangs("true")),
    "pods.note.make_folder.folder-host-keys": (state_home("file"), state_home("mine")),
    "pods.pods.SSHPods.sshpods-needs-either": (ssh(hosts=[]), ssh(hosts=["a"])),
    "pods.pods._check_marks.trust-must-fingerprint": (
        ssh(trust={"a": "AAAA"}),
        ssh(trust={"a": f"SHA256:{'A' * 43}"}),
    ),
    "pods.pods.hosts_for.cluster-wants-pods": (
        lambda _folder: SSHPods(["a"], key="k").hosts_for(2),
        lambda _folder: SSHPods(["a", "b"], key="k").hosts_for(2),
    ),
    # Kubernetes.
    "pods.objects.ClusterObjects.kubernetes-pods-need": (
        lambda _folder: objects(image=""),
        lambda _folder: objects(image="x/y:1"),
    ),
    "pods.template._equal.pods-cluster-leave": (
        template({"spec": {"restartPolicy": "Always"}}),
        template({"spec": {}}),
    ),
    "pods.template._mapping.object-names-values": (
        template({"metadata": {"labels": ["a"]}}),
        template({"metadata": {"labels": {"a": "b"}}}),
    ),
    "pods.template._names.list-objects": (
        template(spec_of(WORKER, "containers")),
        template(spec_of([WORKER], "containers")),
    ),
    "pods.template._names.every-object-list": (
        template(spec_of([{"emptyDir": {}}])),
        template(spec_of([{"name": "a", "emptyDir": {}}])),
    ),
    "pods.template._names.stands-twice-keep": (
        template(spec_of([{"name": "a", "emptyDir": {}}] * 2)),
        template(spec_of([{"name": "a", "emptyDir": {}}])),
    ),
    "pods.template.check_template.pod-template-metadata": (
        template({"hostNetwork": True}),
        template({"spec": {"hostNetwork": True}}),
    ),
    "pods.template.check_template.beside-container-would": (
        template(spec_of([{"name": "log", "image": "x"}], "containers")),
        template(
            spec_of([{"name": "log", "image": "x", "restartPolicy": "Always"}], "initContainers")
        ),
    ),
    "pods.template.check_template.workbench-names-pods": (
        template({"metadata": {"namespace": "lab"}}),
        kubernetes(pod_template={"spec": {}}, namespace="lab"),
    ),
    "pods.template.check_template.workbench-sets-selects": (
        template({"metadata": {"labels": {"kueue.x-k8s.io/queue-name": "q"}}}),
        kubernetes(pod_template={"metadata": {"labels": {}}}, queue="q"),
    ),
    "pods.template.check_template.pod-metadata-spec": (
        template({"kind": "Deployment"}),
        template({"kind": "Pod", "spec": {}}),
    ),
    "pods.template.read_template.kubernetespods-pod-template-2": (
        template("spec:\n  hostNetwork: true\n  hostNetwork: false\n"),
        template("spec:\n  hostNetwork: true\n"),
    ),
    "pods.template.read_template.kubernetespods-pod-template-file-must": (
        template("- spec\n"),
        template("metadata: {}\nspec: {}\n"),
    ),
    "pods.volumes._check_host_path.volume-host-path": (
        volume(host_path="mnt"),
        volume(host_path="/mnt/nvme"),
    ),
    "pods.volumes._check_mount.volume-mount-must": (volume(mount="data"), volume(mount="/data")),
    "pods.volumes._check_nfs.volume-nfs-server": (
        volume(nfs="/exports"),
        volume(nfs="files.example.org:/exports/data"),
    ),
    "pods.volumes._check_sub_path.volume-sub-path": (
        volume(sub_path="/team"),
        volume(sub_path="team/wikisql"),
    ),
    "pods.volumes.check_volumes.kubernetespods-volumes-two": (
        volumes({"mount": "/a", "hub_cache": True}, {"mount": "/b", "hub_cache": True}),
        volumes({"mount": "/a", "hub_cache": True}, {"mount": "/b"}),
    ),
    "pods.volumes.check_volumes.kubernetespods-volumes-makes": (
        volumes(
            {"mount": "/a", "claim": "c", "size_gib": 1},
            {"mount": "/b", "claim": "c", "size_gib": 1},
        ),
        volumes({"mount": "/a", "claim": "c", "size_gib": 1}, {"mount": "/b", "claim": "c"}),
    ),
    "pods.volumes.check_volumes.kubernetespods-volumes-mounts": (
        volumes({"mount": "/a"}, {"mount": "/a"}),
        volumes({"mount": "/a"}, {"mount": "/b"}),
    ),
    "pods.volumes.model_post_init.keep-claim-made": (
        volume(keep=True, claim="c"),
        volume(keep=True, claim="c", size_gib=1),
    ),
    "pods.volumes.model_post_init.medium-empty-folder": (
        volume(medium="Memory", claim="c"),
        volume(claim="c"),
    ),
    "pods.volumes.model_post_init.size-gib-size": (
        volume(nfs="s:/x", size_gib=1),
        volume(nfs="s:/x"),
    ),
    "pods.volumes.model_post_init.storage-class-claim": (
        volume(storage_class="nfs"),
        volume(storage_class="nfs", size_gib=1),
    ),
    "pods.volumes.model_post_init.volume-source-make": (
        volume(claim="c", nfs="s:/x"),
        volumes({"mount": "/a", "claim": "c"}, {"mount": "/b", "nfs": "s:/x"}),
    ),
    "pods.volumes.model_post_init.hubs-cache-only": (
        volume(hub_cache=True, claim="c", read_only=True),
        volume(hub_cache=True, claim="c"),
    ),
    "pods.options._check_capability.kubernetespods-capabilities-write": (
        kubernetes(capabilities=["ipc-lock"]),
        kubernetes(capabilities=["IPC_LOCK"]),
    ),
    "pods.options._check_label.kubernetespods-labels-we": (
        kubernetes(labels={"deepspeed-workbench/x": "y"}),
        kubernetes(labels={}),
    ),
    "pods.options._check_resources.kubernetespods-extra-resources": (
        kubernetes(extra_resources={"rdma": 1}),
        kubernetes(extra_resources={"rdma/hca_shared_devices_a": 1, "hugepages-2Mi": "512Mi"}),
    ),
    "pods.options._check_sources.kubernetespods-secrets-write": (
        kubernetes(secrets={"HF_TOKEN": "hf_x y"}),
        kubernetes(secrets={"HF_TOKEN": "hub/token"}),
    ),
    # Slurm.
    "pods.container.check.podspec-image-must": (
        container("-x", "/data"),
        container("x.sif", "/data"),
    ),
    "pods.container.check.folder-colon-comma": (
        container("x.sif", "/a:b"),
        container("x.sif", "/ab"),
    ),
    "pods.options.check_options.slurmpods-options-workbench": (
        slurm(options=["--output=x"]),
        slurm(options=[]),
    ),
    "pods.options.check_options.slurmpods-options-jobs": (
        slurm(options=["--container=x"]),
        lambda _folder: PodSpec(image="x.sif"),
    ),
    "pods.options.check_options.slurmpods-options-write": (
        slurm(options=["-q high"]),
        slurm(options=["--qos=high", "--exclusive"]),
    ),
    "pods.options.check_options.slurmpods-options-use": (
        slurm(options=["--partition=gpu"]),
        slurm(partition="gpu"),
    ),
    "pods.options.check_root.slurmpods-root-must": (slurm(root="$TMP"), slurm(root="/tmp/x")),
    "pods.pods._container_of.slurmpods-setup-podspec": (
        in_pyxis(setup=["module load cuda"]),
        in_pyxis(),
    ),
    "pods.pods._check.slurmpods-gpu-type": (slurm(gpu_type="a100"), slurm()),
}

REMEDIES = "test_ssh_remedies.py"
KEY_MENDED = f"{REMEDIES}::test_a_key_is_mended_by_the_command_in_the_message"
OPTIONS_ACCEPTED = f"{REMEDIES}::test_options_are_accepted_as_the_message_asks_for_them"
PATH_LEFT = f"{REMEDIES}::test_a_path_that_a_launcher_cannot_use_is_left_by_the_advised_variable"
LOGIN_SERVES = "test_logins.py::test_a_login_serves_once_its_start_up_file_follows_the_advice"
NAMELESS = "test_ssh_configurations.py::test_a_user_without_a_name_logs_in_where_all_is_given"
URL_ACCEPTED = "test_kubeaccess.py::test_an_address_that_is_no_url_is_refused_before_a_request"
SERVER_ANSWERS = "test_kubeaccess.py::test_the_server_answers_after_the_advice_of_a_refusal"
MENDED_CLAIM = "test_kubernetes.py::test_pods_share_a_claim_that_is_made_and_only_a_kept_one_stays"

ELSEWHERE: Mapping[str, str] = {
    "pods.access.check.cluster-proxy-url": URL_ACCEPTED,
    "pods.access.check.cluster-server": URL_ACCEPTED,
    "pods.pods.launch.clusters-directory-quotes": (
        "test_any_path.py::test_a_path_that_sshd_cannot_have_is_refused_before_pods_start"
    ),
    "pods.access._check_exists.kubeconfig-missing-kubeconfig": (
        "test_kubeaccess.py::test_a_kubeconfig_that_a_later_cell_names_counts"
    ),
    "pods.access._load_auth_provider_token.auth-provider-gives": (
        "test_kubeaccess.py::test_an_auth_provider_without_a_token_is_named"
    ),
    "pods.api._foreign.does-answer-kubernetes": SERVER_ANSWERS,
    "pods.api._once.kubernetespods-connect-timeout": (
        "test_kubernetes.py::test_the_option_of_a_slow_line_reaches_the_pods"
    ),
    "pods.api._refusal.credentials-valid-any": SERVER_ANSWERS,
    "pods.api._refusal.credentials-valid-any-2": SERVER_ANSWERS,
    "pods.api._refusal.namespaces-quota-asks-limit-say": (
        "test_remedies.py::test_a_pod_has_the_limits_that_a_quota_asks_for"
    ),
    "pods.api._refusal.namespaces-quota-asks-limit-say-2": (
        "test_remedies.py::test_a_pod_has_the_limits_that_a_quota_asks_for"
    ),
    "pods.api._refusal.server-knows-account": SERVER_ANSWERS,
    "pods.api._namespace_advice.namespace-being-deleted": SERVER_ANSWERS,
    "pods.api._namespace_advice.namespace-deleted-never": SERVER_ANSWERS,
    "pods.login.log-terminal-example": SERVER_ANSWERS,
    "pods.login.credentials.install-use-another": SERVER_ANSWERS,
    "pods.certificates._damaged.ssh-read-certificate": (
        "test_ssh_configurations.py::test_a_damaged_certificate_is_named"
    ),
    "pods.certificates.ended.renew-certificate": (
        "test_ssh_configurations.py::"
        "test_a_certificate_that_ends_during_a_run_ends_no_connection_and_is_named_at_the_next"
    ),
    "pods.direct.few_sessions.sshd-opens-further": (
        f"{REMEDIES}::test_a_daemon_serves_after_the_advised_line"
    ),
    "pods.entry.connect_all.hosts-behind-slow": (
        "test_hosts.py::"
        "test_a_host_behind_a_slow_line_needs_more_time_and_is_never_told_to_have_refused"
    ),
    "pods.entry.create_pod_folder.correct-sshpods-setup": (
        "test_hosts.py::test_setup_lines_run_on_a_host_before_its_agent"
    ),
    "pods.entry.create_pod_folder.does-run-should": KEY_MENDED,
    "pods.entry.create_pod_folder.newer-needed-see": KEY_MENDED,
    "pods.entry.create_pod_folder.torch-installed-login": KEY_MENDED,
    "pods.entry.create_pod_folder.fewer-than-gpus": (
        "test_seats.py::test_two_clusters_on_one_host_never_have_the_same_gpu"
    ),
    "pods.seats.seat_pods.fewer-than-gpus": (
        "test_seats.py::test_local_pods_and_hosts_never_have_the_same_gpu"
    ),
    "pods.entry.create_pod_folder.folder-pod-below": "test_hosts.py::"
    "test_an_open_folder_on_a_host_is_not_mended_by_a_variable_of_the_notebook",
    "pods.far_end.enter.choose-another-folder": "test_hosts.py::"
    "test_an_open_folder_on_a_host_is_not_mended_by_a_variable_of_the_notebook",
    "pods.identity.check_key_file.key-file-mode": KEY_MENDED,
    "pods.identity.nameless.user-id-name": (
        f"{REMEDIES}::test_a_user_without_a_name_has_one_after_the_advised_line"
    ),
    "pods.identity.not_usable.form-pkcs-write": "test_openssh.py::"
    "test_a_key_of_another_program_is_named_with_the_command_that_converts_it",
    "pods.identity.not_usable.lines-end-carriage": KEY_MENDED,
    "pods.identity.passphrase_advice.key-passphrase-nobody": KEY_MENDED,
    "pods.keys._try_one.sshpods-trust-host": NAMELESS,
    "pods.names.completed.name-account-host": NAMELESS,
    "pods.login._cause.account-shell-nologin": (
        "test_logins.py::test_commands_and_files_pass_any_login"
    ),
    "pods.login._cause.start-up-files-bashrc": LOGIN_SERVES,
    "pods.login._cause.start-up-files-leave": LOGIN_SERVES,
    "pods.login._login_advice.account-key-add": KEY_MENDED,
    "pods.login._login_advice.security-key-did": "test_ssh_configurations.py::"
    "test_a_security_key_that_is_not_there_is_named_with_what_it_needs",
    "pods.login._login_advice.terminal-shows-keys": (
        f"{REMEDIES}::test_the_command_for_a_refused_login_shows_the_keys"
    ),
    "pods.login._unknown_key.log-once-ssh": (
        f"{REMEDIES}::test_an_unknown_host_key_is_trusted_in_both_ways_of_the_message"
    ),
    "pods.login.unknown.host-key-unknown": (
        f"{REMEDIES}::test_an_unknown_host_key_is_trusted_in_both_ways_of_the_message"
    ),
    "pods.login.unknown.known-hosts-path": (
        f"{REMEDIES}::test_an_unknown_host_key_is_trusted_in_both_ways_of_the_message"
    ),
    "pods.login.unknown.log-once-ssh": (
        f"{REMEDIES}::test_an_unknown_host_key_is_trusted_in_both_ways_of_the_message"
    ),
    "pods.names._read_text.host-write-name": OPTIONS_ACCEPTED,
    "pods.names.read_host.host-write-name": OPTIONS_ACCEPTED,
    "pods.names.check_between.address-behind-jump": OPTIONS_ACCEPTED,
    "pods.names.check_between.same-address-pods": OPTIONS_ACCEPTED,
    "pods.names.completed.key-log-sshpods": OPTIONS_ACCEPTED,
    "pods.pods.SSHPods.name-your-ssh": OPTIONS_ACCEPTED,
    "pods.pods._check_jump.jump-host-ranks": OPTIONS_ACCEPTED,
    "pods.pods._check_once.host-named-twice": OPTIONS_ACCEPTED,
    "pods.pods.check.sshpods-must-path": OPTIONS_ACCEPTED,
    "pods.openssh._check_named.launcher-ssh-needs": (
        "test_openssh.py::test_a_user_without_a_name_has_a_client_of_the_same_streams_and_codes"
    ),
    "pods.openssh.pdsh_environment.pdsh-use-path": PATH_LEFT,
    "pods.openssh.ssh_wrapper.mpirun-use-path": PATH_LEFT,
    "pods.session._make_claim.claim-already-would": MENDED_CLAIM,
    "pods.session.held_by_kueue.kueue-keeps-finalizer": (
        "test_kueue.py::test_pods_that_kueue_keeps_are_named_until_they_are_gone"
    ),
    "pods.pods.remove_left.kubernetes-objects-made": (
        "test_kubernetes.py::test_objects_of_another_server_are_not_forgotten"
    ),
    "pods.session.left_behind.kubernetes-objects-may": (
        "test_kubernetes.py::test_what_could_not_be_deleted_is_told_and_deleted_later"
    ),
    "pods.pods.launch.exists-clusters-directory": (
        "test_local.py::test_launching_twice_and_into_a_used_directory"
    ),
}

AGAIN = "the same again, with nothing changed"
INSTALLS = "takes a package of the machine"
OTHERS = "an action of other people or machines"
OUT_OF_REACH: Mapping[str, str] = {
    "pods.transfer._other_form.does-answer-about": AGAIN,
    "pods.transfer.once.became-shorter-while": AGAIN,
    "pods.connection.put_bytes.arrived-cut-damaged": AGAIN,
    "pods.commands.call.slurm-did-answer": AGAIN,
    "pods.pods.adopt.gone-says-where": AGAIN,
    "pods.pods.adopt.gone-names-pods": AGAIN,
    "pods.pods.adopt.does-hold-jobs": AGAIN,
    "pods.transfer.damaged.look-failing-disk": OTHERS,
    "pods.entry.create_pod_folder.start-up-files": OTHERS,
    "pods.login.why_no_command.login-runs-commands": "a command that shows the cause",
    "pods.master.wait_up.ssh-waits-touch": "a touch; a test of test_ssh_configurations plays it",
    "pods.api._refusal.ask-fewer-smaller": OTHERS,
    "pods.commands._missing.slurms-command-machine": OTHERS,
    "pods.commands.cancel.end-job-scancel": OTHERS,
    "pods.pods._own_address.machine-route-slurms": OTHERS,
    "pods.pods._launch_job.job-waited-slurms": "a longer wait",
    "pods.pods._last_lines.log-nodes-must": OTHERS,
    "pods.identity.not_usable.key-putty-convert": INSTALLS,
    "pods.master.program.ssh-installed-here": INSTALLS,
    "pods.names.ask_ssh.ssh-installed-here": INSTALLS,
    "pods.pods.model_post_init.kubernetespods-needs-kubernetes": INSTALLS,
}


def remedies() -> Iterator[str]:
    """Yield the identities of the sentences of the rooms that ask for something."""
    identities = {(each.place, each.template): name for name, each in load().items()}
    for room in ROOMS:
        for path in sorted((PACKAGE / "pods" / room).rglob("*.py")):
            for each in sentences_of(path.read_text(encoding="utf-8"), f"pods.{path.stem}"):
                if ASKS.search(each.template):
                    yield identities[each.place, each.template]


def test_every_sentence_that_asks_for_something_says_here_how_it_is_proven() -> None:
    known = {*CARRIED_OUT, *ELSEWHERE, *OUT_OF_REACH}
    assert len(known) == len(CARRIED_OUT) + len(ELSEWHERE) + len(OUT_OF_REACH)
    assert sorted(set(remedies()) - known - NO_ADVICE.keys()) == []
    assert sorted(known - set(load())) == []


def test_the_tests_that_carry_out_advice_are_there() -> None:
    folder = Path(__file__).parent
    for place in ELSEWHERE.values():
        file, _, name = place.partition("::")
        assert f"def {name}(" in (folder / file).read_text(encoding="utf-8"), place


@pytest.mark.parametrize("identity", CARRIED_OUT)
def test_the_trouble_is_gone_once_the_advice_is_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, identity: str
) -> None:
    monkeypatch.setattr(names, "_CONFIG_S", 2.0)
    refused, advised = CARRIED_OUT[identity]
    said: object = None
    try:
        said = refused(tmp_path)
    except (WorkbenchError, ValueError) as error:
        said = error
    assert re.search(pattern(load()[identity].template), str(said), re.DOTALL), said
    advised(tmp_path)


def test_a_pod_has_the_limits_that_a_quota_asks_for() -> None:
    def limits(spec: PodSpec, **options: object) -> set[str]:
        pod: Any = objects(spec=spec, **options).pod(0, None)
        return set(pod["spec"]["containers"][0]["resources"]["limits"])

    assert not limits(PodSpec()) & {"memory", "ephemeral-storage"}
    assert "memory" in limits(PodSpec(memory_gib=4))
    assert "ephemeral-storage" in limits(PodSpec(), ephemeral_storage_gib=4)
