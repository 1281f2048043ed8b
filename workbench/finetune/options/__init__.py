"""The options of a fine-tuning job, each by itself."""
