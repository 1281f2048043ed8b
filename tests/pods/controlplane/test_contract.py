"""What every place must do, against a real Kubernetes server (`make test-kubernetes`)."""

from __future__ import annotations

import pytest

from tests.pods import test_contract as contract
from tests.pods.conftest import Launched
from tests.pods.test_contract import (  # noqa: F401 (collected here too)
    test_a_host_that_is_not_pinned_is_not_greeted,
    test_a_hostfile_can_be_made,
    test_a_wrong_host_key_is_a_hard_stop,
    test_another_key_is_refused,
    test_each_is_reached_by_the_keeper,
    test_each_is_reached_by_the_ssh_client,
    test_files_travel_both_ways,
    test_it_describes_itself,
    test_logs_are_as_long_as_asked_and_of_pods_that_exist,
    test_pods_come_in_rank_order_and_know_themselves,
    test_stop_during_launch_leaves_nothing,
    test_stop_ends_all_and_may_be_repeated_and_a_launch_after_it_works,
    test_the_printed_command_works_when_pasted,
)

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(600)]


def test_no_forwarding_and_no_password(launched: Launched) -> None:
    contract.test_no_forwarding_and_no_password(launched)


def test_logs_are_the_pods_own(launched: Launched) -> None:
    contract.test_logs_are_the_pods_own(launched)
