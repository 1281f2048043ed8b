from __future__ import annotations

from pathlib import Path

import pytest

from workbench.errors import RunError
from workbench.results.modules import ModuleProfile
from workbench.results.profile import parse_profile, read_profile

# deepspeed 0.19.8 on a T5 of two layers, 8 rows of 24 and 16 tokens, one CPU core.
SAMPLE = Path(__file__).resolve().parent.parent / "samples" / "flops_profile.txt"


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
    assert [c.name for c in encoder.children] == ["embed_tokens", "block.0", "block.1", "final_layer_norm", "dropout"]
    query = child(encoder, "block.0", "layer.0", "SelfAttention", "q")
    assert (query.module, query.children) == ("Linear", ())
    assert query.params == pytest.approx(65.54e3)
    assert query.macs == pytest.approx(12.58e6)
    assert query.latency_s == pytest.approx(2.21e-3)
    assert (query.params_share, query.macs_share, query.latency_share) == pytest.approx((0.014, 0.0182, 0.0065))
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
        "T5ForConditionalGeneration", "· shared", "· encoder", "· decoder", "· lm_head",
    ]  # fmt: skip
    assert len(profile.table(depth=0).rows) == 1
    assert profile.table(depth=2).rows[4][:4] == ("· · block.0", "T5Block", "525.1 K", "11.2 %")


def test_text_and_html_show_the_same_figures() -> None:
    profile = read_profile(SAMPLE)
    text, page = str(profile), profile._repr_html_()
    for grid in (profile.summary(), profile.table()):
        for row in grid.rows:
            for cell in row:
                assert str(cell) in text
                assert str(cell).replace("'", "&#x27;") in page
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
    assert [(c.name, c.module) for c in root.children] == [("h.0-3", "Block"), ("<img src=x>", "Linear")]
    assert "<img" not in parse_profile(text)._repr_html_()


def test_what_is_no_report_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="is no report of DeepSpeed's FLOPS profiler"):
        parse_profile("Traceback (most recent call last):")
    with pytest.raises(RunError, match="No such file"):
        read_profile(tmp_path / "profile.txt")
