"""Text of a model: tokenizer, chat template, and rows as tokens."""
