"""A model's revision: what is loaded, planned, saved and repeated is of the named commit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from workbench.base.errors import ConfigError
from workbench.finetune.deepspeed.defaults import on_base
from workbench.finetune.export.folder import start_lines
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.model.shapes import model_config
from workbench.finetune.submit.prepare import check_early

NEWEST, OLDER = "b" * 40, "a" * 40
HUB = "me/small"

# What a rank, a server of answers and a child for templates load of each revision.
LOADS = """
import json, sys
from pathlib import Path
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.model import adapters, load as model
from workbench.finetune.model.text import template

out = {}
for revision in (None, "v1", "a" * 40):
    job = FineTune(model="me/small", model_revision=revision, peft="lora")
    loaded = model.load(job.model, (), seed=0, revision=job.model_revision)
    tuned = adapters.attached(loaded, job)
    folder = Path(sys.argv[1]) / f"adapters-{revision}"
    adapters.save(tuned.model, folder, base=job.model, seed=0, revision=job.model_revision)
    loaded.tokenizer.save_pretrained(folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    known = template._known(job.model, job.model_revision, None)
    out[str(revision)] = {
        "weights": float(loaded.model.get_input_embeddings().weight.mean()),
        "words": len(loaded.tokenizer),
        "revision": config["revision"],
        "format": model.own_format(job.model, job.model_revision),
        "template": known.text([{"role": "user", "content": "a"}], False),
    }
print(json.dumps(out))
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache of a hub's model with two commits, as huggingface_hub writes it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from workbench.finetune.model.text.tokenizer import train_tokenizer

    home = tmp_path_factory.mktemp("home")
    folder = home / "hub" / "models--me--small"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(NEWEST)
    (folder / "refs" / "v1").write_text(OLDER)
    for commit, fill, width, texts in ((OLDER, 1.0, 16, ["aa"]), (NEWEST, 2.0, 32, ["abcd"] * 9)):
        from tokenizers import Tokenizer

        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer.from_str(train_tokenizer(texts, causal=True)),
            pad_token="<pad>",
            eos_token="</s>",
            bos_token="<s>",
        )
        tokenizer.chat_template = commit[0] + "{% for m in messages %}{{ m.content }}{% endfor %}"
        config = LlamaConfig(
            hidden_size=width,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            vocab_size=len(tokenizer),
            dtype=torch.bfloat16 if commit == OLDER else torch.float16,
        )
        model = LlamaForCausalLM(config).to(config.dtype)
        torch.nn.init.constant_(model.get_input_embeddings().weight, fill)
        model.save_pretrained(folder / "snapshots" / commit)
        tokenizer.save_pretrained(folder / "snapshots" / commit)
    return home


@pytest.mark.slow
def test_what_is_loaded_and_saved_is_of_the_revision(home: Path, tmp_path: Path) -> None:
    env = {**os.environ, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    env.pop("HF_HUB_CACHE", None)
    done = subprocess.run(
        [sys.executable, "-c", LOADS, str(tmp_path)],
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout.splitlines()[-1])
    assert made["None"]["weights"] == 2 and made["v1"]["weights"] == 1
    assert made["None"]["words"] > made["v1"]["words"]
    assert (made["None"]["format"], made["v1"]["format"]) == ("fp16", "bf16")
    assert (made["None"]["template"], made["v1"]["template"]) == ("ba", "aa")
    assert (made["None"]["revision"], made["v1"]["revision"]) == (None, "v1")
    assert made[OLDER] == {**made["v1"], "revision": OLDER}
    # The adapters go on with the base that they were trained on.
    job = on_base(FineTune(model=str(tmp_path / "adapters-v1"), peft="lora"))
    assert (job.model, job.model_revision) == (HUB, "v1")
    with pytest.raises(ConfigError, match="at revision 'v1', and model_revision is 'v2'; drop it"):
        on_base(FineTune(model=str(tmp_path / "adapters-v1"), peft="lora", model_revision="v2"))


def test_a_plan_is_of_the_revision(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(home))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    widths = [model_config(HUB, revision)["hidden_size"] for revision in (None, "v1", OLDER)]
    assert widths == [32, 16, 16]
    with pytest.raises(ConfigError, match="the planner does not know the shape"):
        model_config(HUB, "v9")


def test_only_a_model_of_the_hub_has_a_revision(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'v1', and model 'tiny-t5' is built in"):
        FineTune(model_revision="v1")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    job = FineTune(model=str(tmp_path), model_revision="v1")
    with pytest.raises(ConfigError, match="is a folder; only a model of the hub has revisions"):
        check_early(job, gpus=0)
    check_early(FineTune(model=HUB, model_revision="v1"), gpus=0)
    with pytest.raises(ConfigError, match="use model_revision"):
        FineTune(model=HUB, revision="v1")  # type: ignore[call-arg]


def test_the_lines_for_adapters_name_the_revision_of_their_base() -> None:
    lines = start_lines("out", "causal", "me/small", "v1")
    assert lines["vLLM"].startswith("vllm serve me/small --revision v1 --enable-lora")
    assert "--model-id me/small --revision v1 --lora" in lines["TGI"]
    assert "revision" not in str(start_lines("out", "causal", "", "v1"))
