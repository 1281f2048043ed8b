"""Views of a run: its panel, card and page."""
