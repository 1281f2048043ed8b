"""LoRA's small matrices put beside a model: for training, and for the trace, which must load little."""

from __future__ import annotations

from typing import Any

from workbench.jobs.adapters import Lora


def with_lora(model: Any, options: Lora, *, checkpointing: bool) -> Any:
    """Freeze a model and put fresh adapters beside it; a ValueError says that no module has the names."""
    from peft import LoraConfig, get_peft_model

    names = options.target_modules
    if checkpointing:
        # Nothing before the first adapter has a gradient: recomputing would cut the graph there.
        model.enable_input_require_grads()
    config = LoraConfig(
        r=options.r,
        lora_alpha=options.alpha,
        lora_dropout=options.dropout,
        use_rslora=options.use_rslora,
        use_dora=options.use_dora,
        bias=options.bias,
        target_modules=names if isinstance(names, str) else list(names),
        task_type="SEQ_2_SEQ_LM" if model.config.is_encoder_decoder else "CAUSAL_LM",
    )
    return get_peft_model(model, config)
