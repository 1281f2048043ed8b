"""Short forms in plots and reports: labels below an axis, and fingerprints in a table."""

from __future__ import annotations

from workbench.display.benchmark.sections import _cut
from workbench.display.kit.plots.static import _most_ticks


def test_an_axis_of_a_short_span_has_fewer_labels_because_they_are_longer() -> None:
    assert (_most_ticks(0.0, 40.0), _most_ticks(16.80, 16.84)) == (7, 4)


def test_fingerprints_are_cut_and_changed_files_stay_said() -> None:
    assert _cut("0123456789abcdef+changes fedcba9876543210") == "01234567+changes fedcba98"
