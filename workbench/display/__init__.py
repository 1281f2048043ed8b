"""For the eye: records in, HTML or text or widgets out; no logic."""
