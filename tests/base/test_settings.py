"""Variables that a user sets are used as they are, or refused by name and value before a start."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from workbench import FineTune, PodSpec, Script
from workbench.base.errors import ConfigError
from workbench.base.settings import SAVE_EVERY_S, check_settings, setting_s
from workbench.rundir.make.prepare import prepare_run
from workbench.rundir.spec import ClusterSpec, RunSpec


@given(st.text() | st.floats().map(str) | st.integers().map(str))
def test_seconds_are_used_or_refused_by_name_and_value(text: str) -> None:
    try:
        is_fit = 0 < float(text) < math.inf
    except ValueError:
        is_fit = "${" in text
    if is_fit:
        check_settings({SAVE_EVERY_S: text})
        return
    with pytest.raises(ConfigError, match=r"WORKBENCH_SAVE_EVERY_S is .+ must be a number"):
        check_settings({SAVE_EVERY_S: text})


@pytest.mark.parametrize("value", ["ten minutes", "", "0"])
def test_every_option_env_refuses_a_bad_value_at_once(value: str) -> None:
    for record in (FineTune, PodSpec):
        with pytest.raises(ConfigError, match=f"{SAVE_EVERY_S} is {value!r}"):
            record(env={SAVE_EVERY_S: value})
        record(env={SAVE_EVERY_S: "${SOME_VARIABLE}"})


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(["ten", "-1", "nan"]))
def test_a_reference_to_a_bad_value_is_refused_at_submit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("SECONDS_OF_MINE", value)
    job = FineTune(env={SAVE_EVERY_S: "${SECONDS_OF_MINE}"}, max_steps=1)
    with pytest.raises(ConfigError, match=f"{SAVE_EVERY_S} is {value!r}"):
        prepare_run(RunSpec(cluster=ClusterSpec(), job=job), root=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_setting_that_nothing_reads_is_refused_at_submit(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print(1)")
    job = Script(script, env={"WORKBENCH_SAVE_EVERY": "60"})
    with pytest.raises(ConfigError, match="did you mean 'WORKBENCH_SAVE_EVERY_S'"):
        prepare_run(RunSpec(cluster=ClusterSpec(), job=job), root=tmp_path / "run")


def test_a_process_refuses_a_bad_value_of_its_own_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert setting_s(SAVE_EVERY_S, 600) == 600
    monkeypatch.setenv(SAVE_EVERY_S, "30")
    assert setting_s(SAVE_EVERY_S, 600) == 30
    monkeypatch.setenv(SAVE_EVERY_S, "soon")
    with pytest.raises(ConfigError, match="soon"):
        setting_s(SAVE_EVERY_S, 600)
