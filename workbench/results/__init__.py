"""After the run: profile, predictions, reports. Records in, records out."""
