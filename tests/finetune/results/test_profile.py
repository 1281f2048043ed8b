from __future__ import annotations

import contextlib
import html
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.sentences import says, sentence
from workbench.base.errors import ConfigError, RunError
from workbench.finetune.profile.compare import compare
from workbench.finetune.profile.parse import ModuleProfile, parse_profile, read_profile

# deepspeed 0.19.8 on a T5 of two layers, 8 rows of 24 and 16 tokens, one CPU core.
SAMPLE = Path(__file__).resolve().parent.parent.parent / "samples" / "flops_profile.txt"


def child(module: ModuleProfile, *names: str) -> ModuleProfile:
    for name in names:
        module = next(c for c in module.children if c.name == name)
    return module


def test_the_figures_of_a_real_report() -> None:
    profile = read_profile(SAMPLE)
    assert (profile.step, profile.world_size, profile.micro_batch_size) == (5, 1, 8)
    assert profile.params == pytest.approx(4.67e6)
    assert profile.macs == pytest.approx(691.54e6)
    assert profile.flops == pytest.approx(1.38e9)
    assert profile.fwd_latency_s == pytest.approx(0.33788)
    assert profile.fwd_flops_per_s == pytest.approx(4.09e9)
    assert profile.bwd_latency_s == pytest.approx(0.4684)
    assert profile.bwd_flops_per_s == pytest.approx(5.91e9)
    assert profile.step_latency_s == pytest.approx(0.39195)
    assert profile.iter_latency_s == pytest.approx(1.2)
    assert profile.flops_per_s == pytest.approx(3.46e9)
    assert profile.samples_per_s == 6.68


def test_the_modules_of_a_real_report() -> None:
    root = read_profile(SAMPLE).root
    assert root is not None
    assert root.name == root.module == "T5ForConditionalGeneration"
    assert [c.name for c in root.children] == ["shared", "encoder", "decoder", "lm_head"]
    encoder = child(root, "encoder")
    assert [c.name for c in encoder.children] == [
        "embed_tokens",
        "block.0",
        "block.1",
        "final_layer_norm",
        "dropout",
    ]
    query = child(encoder, "block.0", "layer.0", "SelfAttention", "q")
    assert (query.module, query.children) == ("Linear", ())
    assert query.params == pytest.approx(65.54e3)
    assert query.macs == pytest.approx(12.58e6)
    assert query.latency_s == pytest.approx(2.21e-3)
    assert (query.params_share, query.macs_share, query.latency_share) == pytest.approx(
        (0.014, 0.0182, 0.0065)
    )
    bias = child(encoder, "block.0", "layer.0", "SelfAttention", "relative_attention_bias")
    assert (bias.params, bias.macs, bias.latency_s) == pytest.approx((256, 0, 60.8e-6))


def test_every_line_of_figures_became_a_module() -> None:
    root = read_profile(SAMPLE).root
    assert root is not None
    assert sum(1 for _ in root.walk(99)) == SAMPLE.read_text().count("% Params")


def test_children_have_no_more_operations_than_their_parents() -> None:
    root = read_profile(SAMPLE).root
    assert root is not None
    for _, module in root.walk(99):
        if module.children and module.macs:
            assert 0.9 * module.macs < sum(c.macs for c in module.children) < 1.01 * module.macs


def test_a_table_shows_so_many_levels() -> None:
    profile = read_profile(SAMPLE)
    assert [row[0] for row in profile.table(depth=1).rows] == [
        "T5ForConditionalGeneration",
        "· shared",
        "· encoder",
        "· decoder",
        "· lm_head",
    ]
    assert len(profile.table(depth=0).rows) == 1
    assert profile.table(depth=2).rows[4][:4] == ("· · block.0", "T5Block", "525.1 K", "11.2 %")


def test_text_and_html_show_the_same_figures() -> None:
    profile = read_profile(SAMPLE)
    text, page = str(profile), profile._repr_html_()
    for grid in (profile.summary(), profile.table()):
        for row in grid.rows:
            for cell in row:
                assert str(cell) in text
                assert str(cell).lstrip("· ") in html.unescape(page)
    assert repr(profile) == "Profile(4.67 M parameters, 691.5 MMACs forward, 1.2 s, 3.46 GFLOP/s)"


def test_a_report_without_modules_and_timers() -> None:
    head = SAMPLE.read_text().split("\nbwd latency:")[0]
    profile = parse_profile(head)
    assert profile.root is None
    assert profile.bwd_latency_s is None
    assert profile.fwd_latency_s == pytest.approx(0.33788)
    assert "Modules" not in str(profile)
    assert "–" in str(profile.summary())


def test_repeated_modules_stay_one_row() -> None:
    figures = "1 K = 50% Params, 2 KMACs = 50% MACs, 3 ms = 50% latency, 4 KFLOPS"
    text = (
        "DeepSpeed Flops Profiler\nDetailed Profile per GPU\n"
        f"Net(\n  {figures}\n  (h): ModuleList(\n    (0-3): 4 x Block({figures}, bias=False)\n  )\n"
        f"  (<img src=x>): Linear({figures}, in_features=1)\n)\n-----\n"
    )
    root = parse_profile(text).root
    assert root is not None
    assert [(c.name, c.module) for c in root.children] == [
        ("h.0-3", "Block"),
        ("<img src=x>", "Linear"),
    ]
    assert "<img" not in parse_profile(text)._repr_html_()


def test_what_is_no_report_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=sentence("is not a report of DeepSpeed's FLOPS profiler")):
        parse_profile("Traceback (most recent call last):")
    with pytest.raises(RunError, match="No such file"):
        read_profile(tmp_path / "profile.txt")


def test_the_modules_of_a_level_are_the_whole_model_and_can_be_sorted() -> None:
    profile = read_profile(SAMPLE)
    assert profile.root is not None
    level = dict(profile.root.at(3))
    assert level["encoder.block.0.layer.0"].module == "T5LayerSelfAttention"
    assert level["lm_head"].children == ()
    assert sum(m.macs for m in level.values()) == pytest.approx(profile.root.macs, rel=0.02)
    times = [
        level[row[0]].latency_s
        for row in profile.table(3, sort="latency").rows
        if isinstance(row[0], str)
    ]
    assert len(times) == len(level)
    assert times == sorted(times, reverse=True)
    assert profile.table(2, sort="params").rows[0][0] in (
        "shared",
        "lm_head",
        "encoder.embed_tokens",
    )
    with pytest.raises(ConfigError, match=sentence(": did you mean '{}'?", "latency")):
        profile.table(2, sort="latencies")


@pytest.mark.parametrize(
    ("trainer", "word"), [(6.1, ""), (7.3, ""), (5.9, "more"), (7.6, "less"), (None, "")]
)
def test_a_profile_says_when_the_trainer_measured_another_speed(
    trainer: float | None, word: str
) -> None:
    profile = read_profile(SAMPLE, trainer_samples_per_s=trainer)  # 6.68 by the profiler
    assert (says(profile.note, "through hooks and without what lies between steps", word)) is bool(
        word
    )
    assert bool(profile.note) is bool(word)
    assert profile.note in str(profile)
    assert profile.note in html.unescape(profile._repr_html_())


def test_the_tree_folds_what_is_deep_and_holds_every_module() -> None:
    profile = read_profile(SAMPLE)
    assert profile.root is not None
    page = profile._repr_html_()
    assert page.count("<details open>") == 3  # the model, encoder and decoder
    assert page.count("</small>") == sum(1 for _ in profile.root.walk(99)) + 1
    assert "left out" not in page
    assert ">own 9.3 %<" in page, "what the model itself takes, besides encoder, decoder and head"
    assert says(profile, "sort='latency') shows those of a level")


def test_a_tree_of_a_deep_model_is_cut_and_says_so() -> None:
    profile = read_profile(SAMPLE)
    assert profile.root is not None
    encoder = child(profile.root, "encoder")
    wide = replace(profile, root=replace(profile.root, children=(encoder,) * 30))
    page = wide._repr_html_()
    assert says(page, "; {} modules deeper than level {} are left out", 870, 3)
    assert len(page) < 400_000


def test_two_profiles_side_by_side() -> None:
    one, other = read_profile(SAMPLE), read_profile(SAMPLE, 6.0)
    assert other.root is not None and other.iter_latency_s is not None
    less = tuple(c for c in other.root.children if c.name != "lm_head")
    other = replace(
        other, iter_latency_s=other.iter_latency_s * 2, root=replace(other.root, children=less)
    )
    two = compare(one, other, names=("zero1", "<b>"))
    text, page = str(two), two._repr_html_()
    assert repr(two) == "ProfileComparison(<b> takes 2 x the time of zero1)"
    assert two.modules(1, sort="latency")[0].path == "lm_head"
    assert two.modules(1)[0].path == "shared"
    (head,) = [row for row in two.table(1).rows if row[0] == "lm_head"]
    assert list(head) == ["lm_head", "2.05 M", "–", "262.1 M", "–", "132 ms", "–", "–"]
    same = compare(one, one, names=("a", "b")).table(1)
    assert list(same.columns) == [
        "module",
        "params",
        "MACs",
        "forward a",
        "forward b",
        "time b / a",
    ]
    assert same.keys[-1][-1] == 1.0, "a click on a title sorts"
    assert "<b>" not in page
    for grid in (two.summary(), two.table()):
        for row in grid.rows:
            assert all(str(cell) in text and str(cell) in html.unescape(page) for cell in row)
    assert not two.note and "Not like for like" not in text
    apart = compare(one, replace(other, step=11, micro_batch_size=99))
    for shown in (str(apart), apart._repr_html_()):
        assert says(
            shown,
            "Profile both runs with the same profile_step",
            "step",
            one.step,
            "and 11",
            one.micro_batch_size,
            "and 99",
        ) and says(shown, "rows per rank")
    with pytest.raises(RunError, match=sentence("has no FLOPS profile", "b")):
        compare(one, None)
    with pytest.raises(ConfigError, match=sentence("both profiles are called {}; give two names")):
        compare(one, one, names=("a", "a"))
    with pytest.raises(ConfigError, match="sort"):
        two.table(1, sort="time")


@given(
    st.recursive(
        st.just(()), lambda inner: st.lists(inner, min_size=1, max_size=4).map(tuple), max_leaves=30
    )
)
def test_the_modules_of_any_level_are_all_leaves_or_of_that_level(
    shape: tuple[object, ...],
) -> None:
    def make(shape: tuple[object, ...], name: str) -> ModuleProfile:
        within = tuple(make(s, str(n)) for n, s in enumerate(shape))  # type: ignore[arg-type]
        params = sum(c.params for c in within) if within else 1.0
        return ModuleProfile(
            name=name,
            module="M",
            params=params,
            macs=0,
            latency_s=0,
            params_share=0,
            macs_share=0,
            latency_share=0,
            children=within,
        )

    root = make(shape, "root")
    for depth in range(5):
        level = list(root.at(depth))
        assert sum(module.params for _, module in level) == root.params
        assert len({path for path, _ in level}) == len(level)


def test_the_modules_are_a_data_frame() -> None:
    profile = read_profile(SAMPLE)
    frame = profile.to_dataframe()
    assert list(frame.columns)[:3] == ["path", "level", "module"]
    assert len(frame) == sum(1 for _ in profile.root.walk(99))  # type: ignore[union-attr]
    root = frame.iloc[0]
    assert (root["level"], root["params"], root["macs_share"]) == (0, pytest.approx(4.67e6), 1.0)
    attention = frame[frame["path"] == "encoder.block.0.layer.0"].iloc[0]
    assert attention["latency_s"] == child(profile.root, "encoder", "block.0", "layer.0").latency_s  # type: ignore[arg-type]
    assert len(parse_profile("DeepSpeed Flops Profiler").to_dataframe()) == 0


def test_a_torn_report_is_read_as_far_as_it_goes() -> None:
    """Rank 0 writes it, and may be ended amid it; a number that is none is not known."""
    whole = SAMPLE.read_text()
    for end in range(0, len(whole), max(1, len(whole) // 60)):
        with contextlib.suppress(RunError):
            parse_profile(whole[:end])
    for torn, number in (
        ("1.2.3", "1"),
        ("..", "1"),
        ("1e999", "1"),
        (".", "2"),
        ("9" * 400, "3"),
        ("1e+", "4"),
    ):
        profile = parse_profile(whole.replace(number, torn))
        assert profile.step is None or isinstance(profile.step, int)
