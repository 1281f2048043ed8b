"""The model and tokenizer of a job."""
