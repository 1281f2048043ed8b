"""Views of a benchmark: table, report, plots."""
