"""What is measured: models of random weights, ways of training, lengths. Formulas of the work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_LLAMA_3 = {"vocab_size": 128_256, "num_key_value_heads": 8, "intermediate_size": 14_336}
SHAPES: Mapping[str, Mapping[str, object]] = {
    "tiny": {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 512},
    "0.1B": {"hidden_size": 768, "num_hidden_layers": 12, "vocab_size": 32_000},
    # Sizes of Llama-3.2-1B and of Llama-3.1-8B.
    "1B": {
        **_LLAMA_3,
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "intermediate_size": 8192,
        "tie_word_embeddings": True,
    },
    "8B": {**_LLAMA_3, "hidden_size": 4096, "num_hidden_layers": 32},
}
"""Values of `LlamaConfig` that differ from `shape_of`."""
PEAKS: Mapping[str, float] = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
}
"""Dense bf16 FLOP/s by a part of the GPU's name, from NVIDIA's data sheets."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    size: str
    """Key of `SHAPES`."""
    peft: str
    tokens: int
    """Tokens of each row, all learned from."""
    rows: int
    """Rows of a micro-batch."""
    steps: int = 8
    expected_s: float = 60.0
    """Seconds that both ways need, models included: an estimate, so that no case is cut off."""

    @property
    def name(self) -> str:
        how = {"none": "full"}.get(self.peft, self.peft)
        return f"{self.size} {how}, {self.tokens} tokens x {self.rows}"

    @property
    def recomputes(self) -> bool:
        """Whether layers compute their activations again, in both ways."""
        return self.size == "8B"


# The cases of the goals come first.
ON_GPU: Sequence[Case] = (
    Case(size="1B", peft="none", tokens=2048, rows=8),
    Case(size="8B", peft="lora", tokens=2048, rows=4, expected_s=150),
    Case(size="0.1B", peft="none", tokens=2048, rows=16),
    Case(size="1B", peft="lora", tokens=8192, rows=2),
    Case(size="8B", peft="qlora", tokens=2048, rows=4, expected_s=150),
    Case(size="1B", peft="none", tokens=8192, rows=2),
    Case(size="1B", peft="lora", tokens=2048, rows=8),
    Case(size="1B", peft="qlora", tokens=2048, rows=8),
    Case(size="0.1B", peft="lora", tokens=8192, rows=4),
    Case(size="8B", peft="lora", tokens=8192, rows=1, expected_s=150),
)
ON_CPU: Sequence[Case] = (
    Case(size="tiny", peft="none", tokens=64, rows=2, steps=6, expected_s=1),
    Case(size="tiny", peft="lora", tokens=128, rows=1, steps=6, expected_s=1),
)


def shape_of(size: str) -> dict[str, object]:
    """Return the values of `LlamaConfig`: heads of 64 elements, and no room for longer rows."""
    shape = dict(SHAPES[size])
    hidden = int(str(shape["hidden_size"]))
    heads = hidden // (128 if size == "8B" else 64)
    return {
        "intermediate_size": 8 * hidden // 3 // 32 * 32,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": 8192,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 2,
        **shape,
    }


def flops_of_token(case: Case, parameters: int) -> float:
    """Return the arithmetic of a trained token, without what is recomputed.

    A weight takes 2 FLOP in the forward pass, 2 for the gradient of its input and, if trained, 2
    for its own. Causal attention reads half of the tokens on average (PaLM, appendix B). The
    adapters themselves are left out.

    Example:
        >>> case = Case(size="8B", peft="lora", tokens=2048, rows=1)
        >>> round(flops_of_token(case, 8_030_261_248) / 1e9, 1)
        31.6
    """
    shape = shape_of(case.size)
    hidden = int(str(shape["hidden_size"]))
    # The embeddings are looked up. If tied, the same weights multiply in the output layer.
    table = 0 if shape.get("tie_word_embeddings") else int(str(shape["vocab_size"])) * hidden
    of_weights = (6 if case.peft == "none" else 4) * (parameters - table)
    return of_weights + 6 * int(str(shape["num_hidden_layers"])) * hidden * case.tokens


def mfu(tokens_per_s: float, case: Case, parameters: int, gpu: str) -> float | None:
    """Return the share of the GPU's peak that trains. None: the peak is not known.

    Example:
        >>> case = Case(size="8B", peft="none", tokens=8192, rows=1)
        >>> round(mfu(5762, case, 8_030_261_248, "NVIDIA H100 80GB HBM3"), 2)
        0.3
    """
    peaks = [peak for part, peak in PEAKS.items() if part in gpu]
    return tokens_per_s * flops_of_token(case, parameters) / peaks[0] if peaks else None
