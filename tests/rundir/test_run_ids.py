"""The id of a run is a folder name that pods take, whatever the job is called."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from tests.support.examples import tries
from workbench.agent.ranks.request import check_run_id
from workbench.rundir.make.prepare import new_run_id


@given(st.text(max_size=300))
@example("日本語é🚀")
@example("\u202eabc\u202c \u200f\u05d0\u05d1")
@example("n" * 300)
@example("../..")
@tries(200)
def test_every_name_of_a_job_gives_an_id_that_pods_take(word: str) -> None:
    assert check_run_id(new_run_id(word))


def test_a_plain_name_is_in_the_id() -> None:
    assert "-train-" in new_run_id("train")
    assert "-zero3-offload-" in new_run_id("zero3-offload")
