"""Draw records as HTML, text or widgets."""
