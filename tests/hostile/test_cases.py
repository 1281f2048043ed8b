"""The ten attacks and the 25 faults that once broke something, each with its tests."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

ATTACKS: Mapping[str, list[str]] = {
    "a given directory runs code or removes folders": [
        "client/test_given_folder.py::test_no_program_of_a_given_kubeconfig_runs",
        "client/test_given_folder.py::test_a_queue_ends_no_run_of_another_cluster",
        "client/test_given_folder.py::test_a_host_removes_no_folder_that_enter_cannot_have_made",
        "hostile/test_folder.py::test_every_file_and_folder_may_be_hostile",
    ],
    "a pod that shares the cluster's folder writes to the notebook's files": [
        "faults/test_shared_folder.py::"
        "test_key_configuration_and_socket_are_not_in_the_clusters_directory",
        "rundir/test_links.py::test_events_are_not_written_through_a_link",
        "rundir/test_links.py::test_logs_are_not_written_through_a_link",
    ],
    "export and push publish files of the reader": [
        "finetune/results/test_export.py::test_a_link_or_a_pipe_in_a_model_is_refused_by_name",
        "finetune/results/test_export.py::test_a_push_refuses_what_no_library_saved",
    ],
    "a printed line freezes the keeper": [
        "base/test_patterns.py::test_any_text_is_searched_masked_and_parsed_soon",
    ],
    "another user blocks every start": [
        "agent/test_forkserver.py::test_another_user_cannot_reach_it",
    ],
    "a line of a script leaves a run without a result": [
        "rundir/test_workers.py::"
        "test_a_line_with_numbers_that_are_none_is_left_out_and_the_run_has_its_figures",
        "rundir/test_workers.py::test_a_run_has_its_result_where_no_figures_can_be_had",
    ],
    "the chart makes an unguarded namespace": [
        "docker/test_chart.py::test_a_namespace_without_a_pod_security_standard_is_refused",
    ],
    "a hand-over job is outside the network policy": [
        "finetune/results/test_kubeflow.py::test_the_shipped_policy_selects_every_pod",
    ],
    "a line without an end keeps the keeper reading": [
        "pods/test_transfer.py::test_a_line_that_never_ends_is_given_up",
        "hostile/test_pod.py::test_a_hostile_pod_ends_its_run_in_words_and_nothing_else",
    ],
    "a message holds escape sequences": [
        "rundir/test_state_words.py::test_a_message_holds_no_escape_sequences",
    ],
}

FAULTS: Mapping[str, list[str]] = {
    "1 a failed accept or thread start": [
        "faults/test_own_resources.py::"
        "test_a_keeper_without_descriptors_for_some_seconds_answers_again_and_loses_no_line",
        "keeper/test_requests.py::"
        "test_a_server_that_can_start_no_thread_answers_short_requests_and_refuses_others",
    ],
    "2 the folder of a run ends the cluster": [
        "faults/test_own_resources.py::test_a_queued_run_whose_disk_becomes_read_only_ends_alone",
        "faults/test_own_resources.py::"
        "test_another_keeper_takes_over_though_the_disk_of_one_run_takes_nothing",
    ],
    "3 an unreadable state reads as the keeper's death": [
        "rundir/test_status.py::test_a_process_without_a_free_descriptor_says_that_it_cannot_tell",
        "faults/test_silence.py::test_a_deleted_state_of_a_live_cluster_never_reads_as_lost",
    ],
    "4 a submit with a late answer": [
        "faults/test_submit.py::"
        "test_a_submit_that_is_answered_late_is_queued_then_runs_and_can_be_cancelled",
    ],
    "5 restarts and the keeper's death": [
        "faults/test_own_resources.py::"
        "test_a_run_with_restarts_outlives_a_pod_and_its_keeper_that_die_together",
    ],
    "6 events after a full disk and another keeper": [
        "rundir/test_numbers.py::"
        "test_a_disk_that_was_full_for_a_while_and_a_dead_keeper_leave_one_history",
        "faults/test_own_resources.py::"
        "test_a_disk_full_for_a_while_and_then_another_keeper_leave_every_event_once",
    ],
    "7 a run that was over is trained again": [
        "faults/test_own_resources.py::test_a_run_whose_pods_are_cleared_has_its_result_already",
        "keeper/test_restart.py::"
        "test_a_run_that_is_over_and_unknown_on_its_pods_is_not_begun_again",
    ],
    "8 a frozen machine": [
        "faults/test_sleep.py::test_a_run_outlives_sleep_that_is_longer_than_the_lease",
    ],
    "9 the shared import ends too early": [
        "agent/test_forkserver.py::test_agents_share_one_and_outlive_it",
    ],
    "10 a locale that is not UTF-8": [
        "pods/test_locale.py::test_a_cluster_starts_under_a_locale_that_is_not_utf8",
    ],
    "11 a slow line to hosts": [
        "pods/test_hosts.py::"
        "test_a_host_behind_a_slow_line_needs_more_time_and_is_never_told_to_have_refused",
        "pods/test_ssh.py::test_a_login_that_is_not_answered_in_time_is_no_refusal",
    ],
    "12 the kernel dies while it submits": [
        "faults/test_submit.py::test_a_run_whose_notebook_died_before_it_was_handed_over_says_so"
        "_and_is_not_waited_for",
    ],
    "13 the keeper is ended while it replaces a pod": [
        "faults/test_own_resources.py::"
        "test_a_keeper_that_is_ended_while_it_replaces_a_pod_leaves_nothing",
    ],
    "14 a stopped keeper": [
        "faults/test_silence.py::test_a_stopped_keeper_is_shown_with_what_continues_it",
    ],
    "15 files of a run are removed on a pod": [
        "faults/test_removed.py::"
        "test_a_run_whose_files_on_a_pod_are_removed_says_so_and_keeps_its_lines",
    ],
    "16 the store is removed": [
        "faults/test_removed.py::test_a_store_that_is_removed_is_filled_again",
    ],
    "17 a cancel during a take-over": [
        "faults/test_submit.py::"
        "test_a_run_is_cancelled_while_another_keeper_still_looks_for_its_pods",
    ],
    "18 a failed start reads as lost": [
        "faults/test_own_resources.py::"
        "test_a_start_that_failed_keeps_its_reason_when_its_notebook_goes",
    ],
    "19 a file system without locks": [
        "client/test_lifecycle.py::test_a_file_system_without_locks_is_named_with_what_to_do",
    ],
    "20 a deleted working directory": [
        "client/test_lifecycle.py::test_a_deleted_working_directory_is_refused_with_what_to_do",
        "faults/test_removed.py::test_a_submit_from_a_deleted_working_directory_is_refused",
    ],
    "21 a dead warm server": [
        "agent/test_warm.py::test_a_server_that_died_is_replaced_once_the_pod_is_idle",
    ],
    "22 a kill counts as two restarts": [
        "keeper/test_keeper_deaths.py::test_a_restart_counts_once_wherever_its_keeper_dies",
        "faults/test_own_resources.py::"
        "test_a_restart_whose_keeper_dies_is_done_by_another_keeper_and_counts_once",
    ],
    "23 the keeper dies while a run is made ready again": [
        "keeper/test_keeper_deaths.py::test_a_restart_counts_once_wherever_its_keeper_dies",
        "keeper/test_keeper_deaths.py::test_another_pod_dies_with_the_keeper_within_a_restart",
        "faults/test_own_resources.py::"
        "test_a_restart_whose_keeper_dies_is_done_by_another_keeper_and_counts_once",
    ],
    "24 the package is removed under a cluster": [
        "jobs/test_deepspeed.py::test_a_package_that_was_removed_under_a_live_notebook_is_named",
    ],
    "25 the victims of `make chaos`": [
        "chaos/test_victims.py::test_every_kind_of_victim_is_exactly_the_processes_that_it_names",
    ],
}


def test_the_tables_hold_every_case() -> None:
    assert len(ATTACKS) == 10
    assert len(FAULTS) == 25
    assert [case for case, tests in {**ATTACKS, **FAULTS}.items() if not tests] == []


def named() -> list[str]:
    found = []
    for tests in [*ATTACKS.values(), *FAULTS.values()]:
        found += tests
    return sorted(set(found))


@pytest.mark.parametrize("name", named())
def test_every_named_test_is_there(name: str) -> None:
    file, _, function = name.partition("::")
    tree = ast.parse((TESTS / file).read_text())
    assert function in [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
