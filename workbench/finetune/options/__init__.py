"""Options of a fine-tuning job."""
