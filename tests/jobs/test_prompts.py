from __future__ import annotations

import pytest

from workbench.finetune.options.text.prompts import fill, source_text, wording

# As tatsu-lab/stanford_alpaca prints them in its README,
# and meta-llama/llama joins them in generation.py.
PUBLISHED = {
    ("alpaca", "Sort these.", "3 1 2", None): (
        "Below is an instruction that describes a task, paired with an input that "
        "provides further context. Write a response that appropriately completes "
        "the request.\n\n### Instruction:\nSort these.\n\n### Input:\n3 1 2\n\n"
        "### Response:"
    ),
    ("alpaca", "Say hi.", "", None): (
        "Below is an instruction that describes a task. Write a "
        "response that appropriately completes the request.\n\n"
        "### Instruction:\nSay hi.\n\n### Response:"
    ),
    ("llama2-chat", "Say hi.", "", None): "[INST] Say hi. [/INST]",
    ("llama2-chat", "Say hi.", "to Ann", "Be brief."): (
        "[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nSay hi.\nto Ann [/INST]"
    ),
    ("plain", "Say hi.", "", None): "Say hi.\n",
    ("plain", "Say hi.", "to Ann", None): "Say hi.\nto Ann\n",
}


@pytest.mark.parametrize("asked", PUBLISHED)
def test_the_forms_are_those_that_were_published(asked: tuple[str, str, str, str | None]) -> None:
    prompt, instruction, given, system = asked
    assert fill(prompt, instruction, given, system=system) == PUBLISHED[asked]


def test_a_template_of_ones_own_takes_both_or_puts_the_input_after_the_instruction() -> None:
    assert fill("<{input}> {instruction} =", "Sum", "1 2") == "<1 2> Sum ="
    assert fill("Q: {instruction} A:", "Sum", "1 2") == "Q: Sum\n1 2 A:"


def test_words_in_braces_of_a_row_or_a_template_stay_as_they_are() -> None:
    assert (
        fill("{instruction}|{input}", "{input}", "{instruction}{system}")
        == "{input}|{instruction}{system}"
    )
    assert fill("{instruction} {system} {json}", "a") == "a {system} {json}"
    assert fill("llama2-chat", "a", system="{instruction}").count("{instruction}") == 1


@pytest.mark.parametrize("prompt", ["plain", "alpaca", "llama2-chat", "Q: {instruction}"])
def test_plain_text_asks_nothing_whatever_the_form(prompt: str) -> None:
    assert fill(prompt, "", "", system=None) == ""


def test_an_encoder_decoder_model_reads_instruction_and_input_in_two_lines() -> None:
    assert source_text("Summarize:", "Ann: Hi!") == "Summarize:\nAnn: Hi!"
    assert source_text("translate to SQL: Who?") == "translate to SQL: Who?"


def test_the_words_around_rows_are_those_of_the_form() -> None:
    assert (
        wording("alpaca").split()
        == PUBLISHED["alpaca", "Say hi.", "", None].replace("Say hi.", "").split()
    )
    assert "Be brief." in wording("llama2-chat", system="Be brief.")
    assert not wording("plain").strip()
