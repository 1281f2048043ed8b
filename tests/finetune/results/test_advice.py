from __future__ import annotations

import pytest

from tests.support.scripts import script_job
from tests.support.sentences import says
from workbench.display.failure import fault_card
from workbench.finetune.advice.rules import advise
from workbench.finetune.job.finetune import FineTune
from workbench.rundir.result import RunFault

CUDA = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a "
    "total capacity of 79.19 GiB of which 1.23 GiB is free. Including "
    "non-PyTorch memory, this process has 77.95 GiB memory in use."
)
CASES = [
    ("OutOfMemoryError", CUDA, "Out of GPU memory"),
    (
        "RuntimeError",
        "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate "
        "memory: you tried to allocate 17179869184 bytes. Error code 12 (Cannot allocate memory)",
        "Out of memory on the pod",
    ),
    (
        "MemoryError",
        "Unable to allocate 3.2 GiB for an array with shape (1, 2)",
        "Out of memory on the pod",
    ),
    (
        "signal",
        "killed by SIGKILL; out of memory: the memory "
        "limit of 512 MiB was reached (oom_kill counter +1)",
        "Out of memory on the pod",
    ),
    ("ImportError", "cannot import name 'A' from 'token' (/a/token.py)", "A module lacks a name"),
    (
        "exit",
        "exit code 1: ModuleNotFoundError: No module named 'encodings'",
        "Python cannot start on the pod",
    ),
    ("AttributeError", "module 'random' has no attribute 'choice'", "A module lacks a name"),
    (
        "NameError",
        "name 'get_ipython' is not defined",
        "The script has lines of a notebook",
    ),
    (
        "EOFError",
        "EOF when reading a line",
        "The program asks a question, and ranks have no keyboard",
    ),
    ("OSError", "[Errno 24] Too many open files: '/pods/x'", "Too few file descriptors"),
    ("RemoteError", "pod-0: can't start new thread", "Too few processes or threads"),
    (
        "RemoteError",
        "pod-0 takes no command: its sshd starts no process",
        "Too few processes or threads",
    ),
    ("RuntimeError", "Resource temporarily unavailable", "Too few processes or threads"),
    ("signal", "killed by SIGKILL", "Killed from outside"),
    (
        "signal",
        "killed by SIGBUS; often shared memory that is too small: /dev/shm has 3 MiB free",
        "Shared memory is too small",
    ),
    ("signal", "killed by SIGSEGV", "Crashed in native code"),
    ("signal", "killed by SIGTERM", "Stopped by a signal from outside"),
    (
        "RunError",
        "loss is nan at step 3; try a lower learning rate",
        "The loss is no longer a number",
    ),
    ("RunError", "gradient norm is inf at step 3", "The loss is no longer a number"),
    ("DistNetworkError", "The server socket has failed to listen: EADDRINUSE", "A port was taken"),
    ("AcceleratorError", "CUDA error: invalid device ordinal", "A rank cannot use its GPU"),
    ("RuntimeError", "No CUDA GPUs are available", "A rank cannot use its GPU"),
    (
        "DistBackendError",
        "NCCL error: Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000",
        "A rank cannot use its GPU",
    ),
    (
        "RuntimeError",
        "[enforce fail at device.cc:84] ifa != nullptr. Unable to find address for: =lo",
        "A network interface is not on the pod",
    ),
    (
        "DistBackendError",
        "NCCL error: Bootstrap : no socket interface found",
        "A network interface is not on the pod",
    ),
    ("exit", "ended early with 0 while others waited for it", "One rank ended before the others"),
    (
        "RuntimeError",
        "[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.3]:1",
        "The ranks lost touch with each other",
    ),
    ("ModuleNotFoundError", "No module named 'flash_attn'", "A package is missing on the pods"),
    (
        "ImportError",
        "attempted relative import with no known parent package",
        "A module was started as a file",
    ),
    (
        "OSError",
        "t6-small is not a local folder and is not a valid "
        "model identifier listed on 'https://huggingface.co'",
        "The model could not be loaded",
    ),
    ("OSError", "[Errno 28] No space left on device", "The disk is full"),
    (
        "RuntimeError",
        "Error building extension 'cpu_adam'",
        "A compiled op of DeepSpeed could not be built",
    ),
    (
        "RunError",
        "technique zero3 was asked for (ZeRO stage 3 on "
        "3 ranks), but this ran: no DeepSpeed on 3 ranks",
        "Another technique ran than was asked for",
    ),
    ("IndexError", "index out of range in self", "A token beyond the vocabulary"),
    ("pod", "no sign from pod-1 for 120 s", "A pod was lost"),
    ("launcher", "the launcher pdsh ended with 255 before the ranks did", "The launcher gave up"),
    (
        "FileNotFoundError",
        "[Errno 2] No such file or directory: 'x.csv'",
        "A file is missing on the pod",
    ),
    ("KeyError", "'question'", "The program raised KeyError"),
]


@pytest.mark.parametrize(
    ("kind", "message", "title"), CASES, ids=[case[2] + " " + case[0] for case in CASES]
)
@pytest.mark.parametrize(
    "job", [None, FineTune(), script_job(path="train.py")], ids=["no job", "finetune", "script"]
)
def test_the_cause_is_named_and_has_a_few_fixes(
    kind: str, message: str, title: str, job: object
) -> None:
    advice = advise(RunFault(rank=1, kind=kind, message=message), job)  # type: ignore[arg-type]
    assert advice.title == title
    assert 1 <= len(advice.fixes) <= 3
    assert all(fix == fix.strip() and "\n" not in fix for fix in advice.fixes)


def test_a_script_that_misses_its_own_modules_is_told_of_the_options() -> None:
    fault = RunFault(rank=0, kind="ModuleNotFoundError", message="No module named 'pkg'")
    fixes = " ".join(advise(fault, script_job(path="train.py")).fixes)
    assert "Script('scripts/train.py', folder='.', env={'PYTHONPATH': '.'})" in fixes
    assert "Script(module='pkg.train', folder='src')" in fixes


def test_memory_is_told_in_the_words_of_the_error() -> None:
    gpu = advise(RunFault(kind="OutOfMemoryError", message=CUDA))
    assert (gpu.asked, gpu.free, gpu.limit) == ("2.50 GiB", "1.23 GiB", "79.19 GiB")
    host = advise(RunFault(kind="MemoryError", message=CASES[2][1]))
    assert (host.asked, host.free) == ("3.2 GiB", "")
    limit = advise(RunFault(kind="signal", message=CASES[3][1]))
    assert limit.limit == "512 MiB"
    assert advise(RunFault(kind="RuntimeError", message=CASES[1][1])).asked == "17179869184 bytes"


def test_fixes_name_the_jobs_own_figures_and_keep_its_global_batch() -> None:
    job = FineTune(technique="zero1", per_device_train_batch_size=16, gradient_accumulation_steps=2)
    first, second, _ = advise(RunFault(kind="OutOfMemoryError", message=CUDA), job).fixes
    assert first.startswith("per_device_train_batch_size=8, gradient_accumulation_steps=4: ")
    assert says(second, "cluster.plan(job) shows which technique and micro-batch fit")
    small = advise(
        RunFault(kind="OutOfMemoryError", message=CUDA), FineTune(per_device_train_batch_size=1)
    )
    assert "per_device_train_batch_size" not in " ".join(small.fixes)


@pytest.mark.parametrize(
    ("rate", "advised"),
    [(3e-4, "3e-05"), (1e9, "0.001"), (0.5, "0.001")],
    ids=["usual", "absurd", "high"],
)
def test_the_learning_rate_that_is_advised_is_one_that_people_use(
    rate: float, advised: str
) -> None:
    fault = RunFault(kind="RunError", message="loss is nan at step 3")
    assert (
        f"learning_rate={advised} instead of {rate:g}"
        in advise(fault, FineTune(learning_rate=rate)).fixes[0]
    )


@pytest.mark.parametrize("job", [FineTune(), FineTune(per_device_train_batch_size=1)])
def test_the_card_of_a_run_without_memory_asks_for_a_plan(job: FineTune) -> None:
    for kind, message, title in CASES:
        if title not in ("Out of GPU memory", "Out of memory on the pod"):
            continue
        fault = RunFault(kind=kind, message=message)
        assert says(
            str(advise(fault, job).fixes),
            "cluster.plan(job) shows which technique and micro-batch fit",
        )
        card = fault_card(fault, job)
        assert "cluster.plan(job)" in str(card) and "cluster.plan(job)" in card._repr_html_()
        assert "cluster.plan" not in str(fault_card(fault, script_job("train.py")))


@pytest.mark.parametrize(
    ("kind", "message", "_title"), CASES, ids=[case[2] + " " + case[0] for case in CASES]
)
def test_a_script_is_advised_nothing_about_options_that_it_does_not_have(
    kind: str, message: str, _title: str
) -> None:
    fixes = " ".join(
        advise(RunFault(rank=1, kind=kind, message=message), script_job(path="train.py")).fixes
    )
    for name in (
        "`model`",
        "technique=",
        "precision=",
        "per_device_train_batch_size",
        "gradient_checkpointing=",
    ):
        assert name not in fixes


def test_wrong_shapes_in_a_script_are_not_blamed_on_a_model() -> None:
    fault = RunFault(
        rank=0,
        kind="RuntimeError",
        message="mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)",
    )
    assert "`model`" not in " ".join(advise(fault, script_job(path="train.py")).fixes)
    assert "`model`" in advise(fault, FineTune()).fixes[0]


def test_source_lines_in_a_traceback_are_no_cause_but_the_last_words_of_a_process_are() -> None:
    quoting = (
        'Traceback (most recent call last):\n  File "x.py", '
        "line 3\n    connect(timeout=3)  # ssh: no memory\n"
    )
    assert advise(
        RunFault(rank=0, kind="KeyError", message="'a'", traceback=quoting)
    ).title.endswith("KeyError")
    last = RunFault(
        rank=0, kind="exit", message="exit code 1", traceback="torch.OutOfMemoryError: " + CUDA
    )
    assert advise(last).title == "Out of GPU memory"


def test_a_run_without_a_rank_to_blame_is_not_called_a_program() -> None:
    assert (
        advise(RunFault(kind="ConfigError", message="odd")).title
        == "The run could not be carried out"
    )
