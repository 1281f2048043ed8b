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

import workbench
from tests.pods.test_kubeobjects import objects
from tests.support.sentences import says, templates
from workbench.base.errors import WorkbenchError
from workbench.base.redact import mask_secrets
from workbench.pods.hosts import names
from workbench.pods.hosts.note import make_folder
from workbench.pods.hosts.pods import SSHPods
from workbench.pods.hosts.provision import HostFacts, check_hosts
from workbench.pods.hosts.remote_helper import check_names
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

PACKAGE = Path(workbench.__file__).parent
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
WORD = re.compile(r"[A-Za-z]{2,}")
NO_ADVICE = {
    "wait-all-nodes": "an option",
    'fi done echo "PodSpec.image needs pyxis': "a program",
    "unset PYTHONPATH; p=$1; shift;": "a program",
    "unset PYTHONHOME; base64 </dev/null": "a program",
    "the pod has GPUs {}.": "a report",
    "text; a number needs quotes": "the end of a sentence of a test in test_kubeaccess",
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


def read_configuration(name: str, more: str = "") -> Use:
    def use(folder: Path) -> None:
        (folder / "config").write_text(f"Host lab\n  HostName 192.0.2.1\n  User ada\n{more}")
        SSHPods(["lab"], ssh_config=str(folder / name))._complete(names.Host(address="lab"))

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
    "the key {} is a folder; name the file of the private key in it": (
        key_file("."),
        key_file("id"),
    ),
    "which usually lies beside it": (key_file("id.pub"), key_file("id")),
    "OpenSSH cannot use the path": (
        lambda _folder: config_path(Path('/my "keys"/id')),
        lambda _folder: config_path(Path("/my keys/id")),
    ),
    "is not empty; a cluster's identity needs a folder of its own": (
        own_folder("full"),
        own_folder("own"),
    ),
    "its first line is not -----BEGIN … PRIVATE KEY-----": (on_one_line(True), on_one_line(False)),
    "the cluster's folder must have the same path on all hosts": (
        two_hosts("/home/a/c/pod-0", "/u/a/c/pod-1"),
        two_hosts("/scratch/c/pod-0", "/scratch/c/pod-1"),
    ),
    "and {} are two names of the same host; name the host once": (
        two_hosts("/r/c/pod-0", "/r/c/pod-1", daemons="aa"),
        two_hosts("/r/c/pod-0"),
    ),
    "is not the name of a cluster's folder on a host": (
        lambda _folder: check_names("lab", "pod-0"),
        lambda _folder: check_names(f"lab-{'0' * 16}", "pod-0"),
    ),
    "look for a Match exec in the configuration that hangs": (
        match_that_hangs("sleep 600"),
        match_that_hangs("true"),
    ),
    "no folder for the host keys of the cluster in": (state_home("file"), state_home("mine")),
    "SSHPods needs either hosts=[…], a list, or hostfile=PATH": (ssh(hosts=[]), ssh(hosts=["a"])),
    "it must be a fingerprint as ssh shows it": (
        ssh(trust={"a": "AAAA"}),
        ssh(trust={"a": f"SHA256:{'A' * 43}"}),
    ),
    "pods and SSHPods names": (
        lambda _folder: SSHPods(["a"], key="k").hosts_for(2),
        lambda _folder: SSHPods(["a", "b"], key="k").hosts_for(2),
    ),
    "SSHPods ssh_config is the folder": (read_configuration("."), read_configuration("config")),
    "has ForkAfterAuthentication, which hides the end of a connection": (
        read_configuration("config", "  ForkAfterAuthentication yes\n  SessionType none\n"),
        read_configuration("config"),
    ),
    # Kubernetes.
    "Kubernetes pods need an image with sshd and the pinned": (
        lambda _folder: objects(image=""),
        lambda _folder: objects(image="x/y:1"),
    ),
    "which has several YAML documents; keep the document of the pod alone": (
        template("spec: {}\n---\nkind: Service\n"),
        template("---\nspec: {}\n"),
    ),
    "pods of this cluster have {}; leave the line out{}": (
        template({"spec": {"restartPolicy": "Always"}}),
        template({"spec": {}}),
    ),
    "or give {}= of KubernetesPods": (
        template({"spec": {"activeDeadlineSeconds": 60}}),
        kubernetes(deadline_s=60),
    ),
    "or give another PodSpec": (
        template(spec_of([{**WORKER, "resources": {"limits": {"memory": "1Gi"}}}], "containers")),
        lambda _folder: objects(spec=PodSpec(memory_gib=1)).pod(0, None),
    ),
    "the field's name is serviceAccountName; rename it": (
        template({"spec": {"serviceAccount": "lab"}}),
        template({"spec": {"serviceAccountName": "lab"}}),
    ),
    "a GPU carries a rank; give PodSpec(gpus=…)": (
        template(spec_of([{**WORKER, "resources": {"limits": {"x.com/gpu": 1}}}], "containers")),
        lambda _folder: objects(spec=PodSpec(gpus=1), gpu_resource="x.com/gpu").pod(0, None),
    ),
    "give an object of names to values": (
        template({"metadata": {"labels": ["a"]}}),
        template({"metadata": {"labels": {"a": "b"}}}),
    ),
    "give a list of objects with": (
        template(spec_of(WORKER, "containers")),
        template(spec_of([WORKER], "containers")),
    ),
    "give every object of the list its": (
        template(spec_of([{"emptyDir": {}}])),
        template(spec_of([{"name": "a", "emptyDir": {}}])),
    ),
    "stands there twice; keep one": (
        template(spec_of([{"name": "a", "emptyDir": {}}] * 2)),
        template(spec_of([{"name": "a", "emptyDir": {}}])),
    ),
    "a pod template has metadata and spec alone; leave the field out": (
        template({"hostNetwork": True}),
        template({"spec": {"hostNetwork": True}}),
    ),
    "write a sidecar into initContainers with restartPolicy": (
        template(spec_of([{"name": "log", "image": "x"}], "containers")),
        template(
            spec_of([{"name": "log", "image": "x", "restartPolicy": "Always"}], "initContainers")
        ),
    ),
    "and namespace= is an option of KubernetesPods": (
        template({"metadata": {"namespace": "lab"}}),
        kubernetes(pod_template={"spec": {}}, namespace="lab"),
    ),
    "the workbench sets and selects by this name itself": (
        template({"metadata": {"labels": {"kueue.x-k8s.io/queue-name": "q"}}}),
        kubernetes(pod_template={"metadata": {"labels": {}}}, queue="q"),
    ),
    "is no pod; give metadata and spec of a pod": (
        template({"kind": "Deployment"}),
        template({"kind": "Pod", "spec": {}}),
    ),
    "repeats a field of the same object": (
        template("spec:\n  hostNetwork: true\n  hostNetwork: false\n"),
        template("spec:\n  hostNetwork: true\n"),
    ),
    "which must hold one pod as YAML": (
        template("- spec\n"),
        template("metadata: {}\nspec: {}\n"),
    ),
    "give an absolute path of the nodes": (
        volume(host_path="mnt"),
        volume(host_path="/mnt/nvme"),
    ),
    "it must be an absolute path in the pods": (volume(mount="data"), volume(mount="/data")),
    "as in 'files.example.org:/exports/data": (
        volume(nfs="/exports"),
        volume(nfs="files.example.org:/exports/data"),
    ),
    "give a path within the volume": (
        volume(sub_path="/team"),
        volume(sub_path="team/wikisql"),
    ),
    "KubernetesPods.volumes has two caches of the hub": (
        volumes({"mount": "/a", "hub_cache": True}, {"mount": "/b", "hub_cache": True}),
        volumes({"mount": "/a", "hub_cache": True}, {"mount": "/b"}),
    ),
    "KubernetesPods.volumes makes the claim": (
        volumes(
            {"mount": "/a", "claim": "c", "size_gib": 1},
            {"mount": "/b", "claim": "c", "size_gib": 1},
        ),
        volumes({"mount": "/a", "claim": "c", "size_gib": 1}, {"mount": "/b", "claim": "c"}),
    ),
    "KubernetesPods.volumes mounts two volumes at": (
        volumes({"mount": "/a"}, {"mount": "/a"}),
        volumes({"mount": "/a"}, {"mount": "/b"}),
    ),
    "give claim and size_gib too": (
        volume(keep=True, claim="c"),
        volume(keep=True, claim="c", size_gib=1),
    ),
    "has medium, an option of empty folders only; leave medium out": (
        volume(medium="Memory", claim="c"),
        volume(claim="c"),
    ),
    "has size_gib, but the size of {} is fixed; leave size_gib out": (
        volume(nfs="s:/x", size_gib=1),
        volume(nfs="s:/x"),
    ),
    "give size_gib too": (
        volume(storage_class="nfs"),
        volume(storage_class="nfs", size_gib=1),
    ),
    "has {}; a volume has a single source: write two volumes": (
        volume(claim="c", nfs="s:/x"),
        volumes({"mount": "/a", "claim": "c"}, {"mount": "/b", "nfs": "s:/x"}),
    ),
    "is the hub's cache and can only be read": (
        volume(hub_cache=True, claim="c", read_only=True),
        volume(hub_cache=True, claim="c"),
    ),
    "write the name as Kubernetes does": (
        kubernetes(capabilities=["ipc-lock"]),
        kubernetes(capabilities=["IPC_LOCK"]),
    ),
    "the workbench's own mark of its objects": (
        kubernetes(labels={"deepspeed-workbench/x": "y"}),
        kubernetes(labels={}),
    ),
    'write a device as in {"rdma/hca_shared_devices_a': (
        kubernetes(extra_resources={"rdma": 1}),
        kubernetes(extra_resources={"rdma/hca_shared_devices_a": 1, "hugepages-2Mi": "512Mi"}),
    ),
    'hub/token"} for the key token of the Secret hub': (
        kubernetes(secrets={"HF_TOKEN": "hf_x y"}),
        kubernetes(secrets={"HF_TOKEN": "hub/token"}),
    ),
    # Slurm.
    "or the path of an image file that the nodes share": (
        container("-x", "/data"),
        container("x.sif", "/data"),
    ),
    "and cannot be mounted into a container": (
        container("x.sif", "/a:b"),
        container("x.sif", "/ab"),
    ),
    "which the workbench sets itself": (
        slurm(options=["--output=x"]),
        slurm(options=[]),
    ),
    "The job's script would run in the container": (
        slurm(options=["--container=x"]),
        lambda _folder: PodSpec(image="x.sif"),
    ),
    "Write each option of sbatch as one text in the long form": (
        slurm(options=["-q high"]),
        slurm(options=["--qos=high", "--exclusive"]),
    ),
    "SlurmPods options has {}. Use": (
        slurm(options=["--partition=gpu"]),
        slurm(partition="gpu"),
    ),
    "it must be an absolute path on the nodes": (slurm(root="$TMP"), slurm(root="/tmp/x")),
    "pyxis starts the pod inside the container": (
        in_pyxis(setup=["module load cuda"]),
        in_pyxis(),
    ),
    "Leave PodSpec.memory_gib or the option out": (
        lambda _folder: SlurmPods(options=["--mem-per-cpu=4G"])._check(PodSpec(memory_gib=8)),
        slurm(options=["--mem-per-cpu=4G"]),
    ),
    "and PodSpec.gpus is 0": (slurm(gpu_type="a100"), slurm()),
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
    "impersonates no account; write a user with the token": (
        "test_kubeaccess.py::test_a_kubeconfig_that_impersonates_is_refused"
    ),
    "as the client knows no other kind of proxy": URL_ACCEPTED,
    "the cluster {} has the server {}; write https://HOST:PORT": URL_ACCEPTED,
    "backslashes or letters that do not print": (
        "test_any_path.py::test_a_path_that_sshd_cannot_have_is_refused_before_pods_start"
    ),
    "then give KubernetesPods(kubeconfig=PATH) or set KUBECONFIG": (
        "test_kubeaccess.py::test_a_kubeconfig_that_a_later_cell_names_counts"
    ),
    "Let the login command of your cluster write the kubeconfig anew": (
        "test_kubeaccess.py::test_an_auth_provider_without_a_token_is_named"
    ),
    "does not answer as a Kubernetes API server": SERVER_ANSWERS,
    "there is no TLS connection to the Kubernetes API server": SERVER_ANSWERS,
    "Choose KubernetesPods(context=NAME) of": (
        "test_kubeaccess.py::test_a_context_needs_no_current_one_beside_it"
    ),
    "; KubernetesPods(…, connect_timeout_s={}) waits longer": (
        "test_kubernetes.py::test_the_shipped_role_allows_what_is_called_and_no_more"
    ),
    "the credentials are not valid (any more": SERVER_ANSWERS,
    "the credentials were valid before": SERVER_ANSWERS,
    "say ephemeral_storage_gib= in KubernetesPods": (
        "test_remedies.py::test_a_pod_has_the_limits_that_a_quota_asks_for"
    ),
    "say memory_gib= in the PodSpec": (
        "test_remedies.py::test_a_pod_has_the_limits_that_a_quota_asks_for"
    ),
    "the server knows no account for this request": SERVER_ANSWERS,
    "; the namespace {} is being deleted: use another namespace": SERVER_ANSWERS,
    "was deleted or never made": SERVER_ANSWERS,
    "for example with `kubectl get pods`": SERVER_ANSWERS,
    "Install it, or use another kubeconfig": SERVER_ANSWERS,
    "ssh cannot read the certificate": (
        "test_ssh_configurations.py::test_a_damaged_certificate_is_named"
    ),
    "renew the certificate": (
        "test_ssh_configurations.py::"
        "test_a_certificate_that_ends_during_a_run_ends_no_connection_and_is_named_at_the_next"
    ),
    "opens no further session in the connection": (
        f"{REMEDIES}::test_a_daemon_serves_after_the_advised_line"
    ),
    "Hosts behind a slow line need more time": (
        "test_hosts.py::"
        "test_a_host_behind_a_slow_line_needs_more_time_and_is_never_told_to_have_refused"
    ),
    "or try the line in a login shell of bash on the host": (
        "test_hosts.py::test_setup_lines_run_on_a_host_before_its_agent"
    ),
    "Give python=PATH of the Python with torch and DeepSpeed": KEY_MENDED,
    "is {}; 3.11 or newer is needed, see python=": KEY_MENDED,
    "A login without a terminal activates no environment": KEY_MENDED,
    "or take another host": (
        "test_seats.py::test_two_clusters_on_one_host_never_have_the_same_gpu"
    ),
    "GPUs of this machine are free": (
        "test_seats.py::test_local_pods_and_hosts_never_have_the_same_gpu"
    ),
    "choose another folder on the host: SSHPods(root=PATH)": "test_hosts.py::"
    "test_an_open_folder_on_a_host_is_not_mended_by_a_variable_of_the_notebook",
    "so other users may read the key": KEY_MENDED,
    "add this line to /etc/passwd": (
        f"{REMEDIES}::test_a_user_without_a_name_has_one_after_the_advised_line"
    ),
    "Write the key in OpenSSH's form": "test_openssh.py::"
    "test_a_key_of_another_program_is_named_with_the_command_that_converts_it",
    "its lines end with carriage returns": KEY_MENDED,
    "blanks or empty lines stand before its lines": KEY_MENDED,
    "its last line has no line end. Add the end": KEY_MENDED,
    "Make a key without a passphrase": KEY_MENDED,
    "and add its .pub to the hosts' authorized_keys": KEY_MENDED,
    '. Or give SSHPods(…, trust={"{}": FINGERPRINT})': NAMELESS,
    ". Or name the account of the host: SSHPods(…, user=NAME)": NAMELESS,
    "The account has the shell nologin": ("test_logins.py::test_commands_and_files_pass_any_login"),
    "~/.cshrc) exit, start another shell or redirect the output": LOGIN_SERVES,
    "Its start-up files leave no env, sh or base64 in PATH: let them add to PATH.": LOGIN_SERVES,
    "look in the start-up files for a waiting command": LOGIN_SERVES,
    "start the program with </dev/null": LOGIN_SERVES,
    "Let them read nothing without a terminal: COMMAND": LOGIN_SERVES,
    "add its .pub to ~/.ssh/authorized_keys there": KEY_MENDED,
    "Name the right key: SSHPods(key=PATH)": (
        "test_ssh_configurations.py::test_more_keys_than_a_host_takes_need_the_right_ones_name"
    ),
    "Plug the key into this machine": "test_ssh_configurations.py::"
    "test_a_security_key_that_is_not_there_is_named_with_what_it_needs",
    "` in a terminal shows which keys ssh tried": (
        f"{REMEDIES}::test_the_command_for_a_refused_login_shows_the_keys"
    ),
    "and compare the fingerprint that ssh shows": (
        f"{REMEDIES}::test_an_unknown_host_key_is_trusted_in_both_ways_of_the_message"
    ),
    "either give SSHPods(…": (
        f"{REMEDIES}::test_an_unknown_host_key_is_trusted_in_both_ways_of_the_message"
    ),
    "The ssh configuration notes no keys (UserKnownHostsFile": (
        f"{REMEDIES}::test_an_unknown_host_key_is_trusted_in_both_ways_of_the_message"
    ),
    "log in there once with ssh to note the key": (
        f"{REMEDIES}::test_an_unknown_host_key_is_trusted_in_both_ways_of_the_message"
    ),
    'write "name" or "user@name:port': OPTIONS_ACCEPTED,
    'user@name:port" or {"address': OPTIONS_ACCEPTED,
    "Name the host with its address between the hosts": OPTIONS_ACCEPTED,
    "Name each host with its own address between the hosts": OPTIONS_ACCEPTED,
    "or ssh_config=True to use your ssh configuration": OPTIONS_ACCEPTED,
    "a name in your ssh configuration needs ssh_config=True": OPTIONS_ACCEPTED,
    "and no ranks run on a jump host": OPTIONS_ACCEPTED,
    "with slots for the number of ranks": OPTIONS_ACCEPTED,
    "it must be a path on the hosts that begins with / or ~/": OPTIONS_ACCEPTED,
    '. The launcher "ssh" needs no name': (
        "test_openssh.py::test_a_user_without_a_name_has_a_client_of_the_same_streams_and_codes"
    ),
    "quotes and % and start another cluster": PATH_LEFT,
    "mpirun cannot use the path": PATH_LEFT,
    "and would be deleted with the cluster": MENDED_CLAIM,
    "check that Kueue's controller runs": (
        "test_kueue.py::test_pods_that_kueue_keeps_are_named_until_they_are_gone"
    ),
    "the Kubernetes objects of": (
        "test_kubernetes.py::test_objects_of_another_server_are_not_forgotten"
    ),
    "Call the cluster's close() again once the server answers": (
        "test_kubernetes.py::test_what_could_not_be_deleted_is_told_and_deleted_later"
    ),
    "SlurmPods(new_job=True": ("test_slurm_inside.py::test_a_new_job_is_submitted_only_when_asked"),
    "count is {}, and the Slurm job {} around this notebook has": (
        "test_slurm_inside.py::test_pods_that_the_job_has_no_room_for_are_refused_before_a_start"
    ),
    "a pod takes {} {} (PodSpec.{}), and the Slurm job": (
        "test_slurm_inside.py::test_pods_that_the_job_has_no_room_for_are_refused_before_a_start"
    ),
    "Start this notebook outside the ended job": (
        "test_slurm_inside.py::test_a_new_job_is_submitted_only_when_asked"
    ),
    "the cluster's directory holds pods already": (
        "test_local.py::test_launching_twice_and_into_a_used_directory"
    ),
}

AGAIN = "the same again, with nothing changed"
INSTALLS = "takes a package of the machine"
OTHERS = "an action of other people or machines"
OUT_OF_REACH: Mapping[str, str] = {
    "does not answer about a file in the form of this package": AGAIN,
    "became shorter during the transfer; submit the run again": AGAIN,
    "arrived cut or damaged on {}; submit again": AGAIN,
    "Slurm did not answer {} in {} s; try again": AGAIN,
    "so the pods' folders on the hosts are unknown": AGAIN,
    "so the names of the pods are unknown": AGAIN,
    "does not hold the jobs of all pods; start another cluster": AGAIN,
    "look for a failing disk or memory on either side": OTHERS,
    "the start-up files of the login take": OTHERS,
    "Ask its administrators for a login by key or certificate alone": OTHERS,
    "`ssh HOST echo works` must print works": "a command that shows the cause",
    "; ask for fewer or smaller pods, or for a larger quota": OTHERS,
    "SlurmPods works on a login node or inside an allocation": OTHERS,
    "end the job with: scancel": OTHERS,
    "run the notebook on a login node": OTHERS,
    "The job waited in Slurm's queue": "a longer wait",
    "path=…) a folder that they share": OTHERS,
    "Convert it and name the new file": INSTALLS,
    "ssh is not installed here": INSTALLS,
    "KubernetesPods needs the kubernetes package": INSTALLS,
}


def remedies() -> Iterator[str]:
    """Yield the sentences of the rooms that ask for something."""
    for room in ROOMS:
        for path in sorted((PACKAGE / "pods" / room).rglob("*.py")):
            for template in templates(path.read_text(encoding="utf-8")):
                if len(WORD.findall(template)) > 2 and ASKS.search(template):
                    yield template


def test_every_sentence_that_asks_for_something_says_here_how_it_is_proven() -> None:
    known = {*CARRIED_OUT, *ELSEWHERE, *OUT_OF_REACH}
    assert len(known) == len(CARRIED_OUT) + len(ELSEWHERE) + len(OUT_OF_REACH)
    asked = list(remedies())
    assert [
        each for each in asked if not any(says(each, words) for words in known | NO_ADVICE.keys())
    ] == []
    assert [words for words in known if not any(says(each, words) for each in asked)] == []


def test_the_tests_that_carry_out_advice_are_there() -> None:
    folder = Path(__file__).parent
    for place in ELSEWHERE.values():
        file, _, name = place.partition("::")
        assert f"def {name}(" in (folder / file).read_text(encoding="utf-8"), place


@pytest.mark.parametrize("words", CARRIED_OUT)
def test_the_trouble_is_gone_once_the_advice_is_followed(tmp_path: Path, words: str) -> None:
    refused, advised = CARRIED_OUT[words]
    said: object = None
    try:
        said = refused(tmp_path)
    except (WorkbenchError, ValueError) as error:
        said = error
    assert says(said, words), said
    assert mask_secrets(str(said)) == str(said)
    advised(tmp_path)


def test_a_pod_has_the_limits_that_a_quota_asks_for() -> None:
    def limits(spec: PodSpec, **options: object) -> set[str]:
        pod: Any = objects(spec=spec, **options).pod(0, None)
        return set(pod["spec"]["containers"][0]["resources"]["limits"])

    assert not limits(PodSpec()) & {"memory", "ephemeral-storage"}
    assert "memory" in limits(PodSpec(memory_gib=4))
    assert "ephemeral-storage" in limits(PodSpec(), ephemeral_storage_gib=4)
