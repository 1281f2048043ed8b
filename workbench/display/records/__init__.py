"""Views of records: answers, doctor, history, manifest, plan, profile, result."""
