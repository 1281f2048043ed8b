"""Learn the tokenizer of the built-in models from texts.

The module needs only `tokenizers`, so a notebook can call it.
"""

from __future__ import annotations

from collections.abc import Sequence

from workbench.base.errors import require_package

PAD = "<pad>"
END = "</s>"
START = "<s>"
VOCABULARY = 4096


def train_tokenizer(
    texts: Sequence[str], *, vocabulary: int = VOCABULARY, causal: bool = False
) -> str:
    """Learn a byte-level BPE tokenizer from texts.

    Every text is decoded exactly as it was encoded: bytes have no unknown token, and no text is
    normalised. Digits are separate tokens, so unseen numbers are spelled, and can be copied, digit
    by digit.

    Args:
        texts: Texts to learn from.
        vocabulary: Maximum number of tokens.
        causal: Begin texts with `<s>`, like Llama's tokenizer, instead of ending texts with `</s>`,
            like T5's.

    Returns:
        The tokenizer as JSON of `tokenizers`.

    Raises:
        ConfigError: The package `tokenizers` is not installed here.
    """
    require_package("tokenizers", "train_tokenizer", extra="worker")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[PAD, END, *([START] if causal else [])],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    added = START if causal else END
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{added} $A" if causal else f"$A {added}",
        special_tokens=[(added, tokenizer.token_to_id(added))],
    )
    return str(tokenizer.to_str())
