"""What is masked in text that people see or that stays on disk, and what is not."""

from __future__ import annotations

import json
import re

import pytest

from workbench.base.redact import Redactor, is_secret, mask_secrets

ORDINARY = (
    "num_tokens=1234 max_new_tokens: 128 tokens per second: 1534.25",
    "tokenizer: google-t5/t5-small2, special_tokens_map.json 12ab34cd",
    "eos_token='</s>' pad_token_id=0 bos_token: <s> token: tensor([1, 2, 3])",
    '{"useful_tokens_per_s": 1.23456e5, "token": 1.2345678e5, "auth": null}',
    "Basic authentication is off; bearer of bad news",
    "http://127.0.0.1:6006/ and https://user@host/x and a:b@c",
    'File "/home/me/lib/python3.11/site-packages/x.py", line 3, in <module>',
    "task-12345678901234567890 disk-full 0x7f3a9c sha256:" + "ab" * 32,
    "NCCL INFO Bootstrap : Using eth0:10.0.0.1<0>",
)


@pytest.mark.parametrize("text", ORDINARY)
def test_ordinary_lines_stay_what_they_are(text: str) -> None:
    assert (
        Redactor(
            {
                "NCCL_DEBUG": "INFO",
                "OMP_NUM_THREADS": "4",
                "HF_HOME": "/home/me/lib",
                "MODE": "training",
            }
        )(text)
        == text
    )


@pytest.mark.parametrize(
    ("name", "value", "hidden"),
    [
        *[
            (name, "abcd", True)
            for name in ("HF_TOKEN", "GH_PAT", "PGPASS", "OPENAI_KEY", "SENTRY_DSN", "MY_AUTH")
        ],
        ("MLFLOW_TRACKING_URI", "https://u:pw@host", True),
        ("LOGIN", "me:hunter2secret", True),
        ("LD_LIBRARY_PATH", "/opt/lib:/usr/lib", False),
        ("NCCL_SOCKET_IFNAME", "eth0", False),
        ("TOKENIZERS_PARALLELISM", "no", False),
        *[
            (name, "abcdef", True)
            for name in (
                *(
                    "WANDB_API_KEY",
                    "DB_PASSWORD",
                    "AWS_SECRET_ACCESS_KEY",
                    "HF_TOKEN_2",
                    "myApiKey",
                ),
                *("PGPASSWORD", "mysql_pwd", "SSHKEY", "AZURE_STORAGE_CONNECTION_STRING"),
            )
        ],
        *[
            (name, "abcdef", False)
            for name in (
                *("TOKENIZERS_PARALLELISM", "MAX_TOKENS", "AUTHOR", "SORT_KEY", "PRIMARY_KEY"),
                *("MAX_CONNECTIONS", "MAX_NEW_TOKENS", "CONNECTOR", "COMPASS", "TURKEY"),
                *("TEXT_KEY", "LABEL_KEYS", "FEATURE_KEY", "INPUT_KEY"),
            )
        ],
        *[
            (name, "=bond0.100,ib1", False)
            for name in ("NCCL_SOCKET_IFNAME", "UCX_NET_DEVICES", "OMPI_MCA_btl_tcp_if_include")
        ],
        ("NCCL_AUTH_TOKEN", "=bond0.100,ib1", True),
        *[("SESSION_COOKIE", value, True) for value in ("abcdef", "<secret", "[a1B2]")],
        *[
            (name, value, False)
            for name in ("EOS_TOKEN", "MY_SETTING", "MASK_TOKEN")
            for value in (
                *("</s>", "<s>", "<pad>", "<|im_end|>", "<|endoftext|>", "<image>", "[PAD]"),
                *("<｜end▁of▁sentence｜>", "<extra_id_99>", "<|reserved_special_token_250|>"),
            )
        ],
        *[
            ("HF_TOKEN", value, False)
            for value in ("true", "FALSE", "null", "12345678", "-1.5e300", "127.0.0.2", "none")
        ],
    ],
)
def test_which_variables_are_secret(name: str, value: str, hidden: bool) -> None:
    assert is_secret(name, value) is hidden


def test_a_value_is_hidden_in_every_form_that_it_may_take() -> None:
    value = 'pä"ss\nwörd-77/x'
    redact = Redactor(
        {"DATABASE_URL": f"postgres://me:{value.splitlines()[1]}@db", "MY_AUTH": value}
    )
    shown = (
        f"{value} {json.dumps(value)} {value.encode().decode('latin-1')} "
        f"p%C3%A4%22ss%0Aw%C3%B6rd-77%2Fx {value!r}"
    )
    assert "rd-77" not in redact(shown)
    assert redact.blob(shown.encode()).count(b"\n") == shown.encode().count(b"\n")
    assert len(redact.blob(shown.encode())) == len(shown.encode())
    assert redact.json({"a": [value, 3], value: None})["a"][1] == 3
    assert "rd-77" not in json.dumps(redact.json({"a": [value, 3], value: None}))


def test_a_key_is_masked_to_its_end_though_another_rank_speaks_in_the_midst_of_a_line() -> None:
    head, rest = (
        "-----BEGIN EC PRIVATE KEY-----\nMHcCAQ",
        "EEIB\nAAEC\n[pod-1]: AwQF\\nBgcI\n-----END EC PRIVATE KEY-----",
    )
    shown = mask_secrets(f"{head}loss (0.25) {rest} is read")
    assert "(0.25) ****\n****\n" in shown and shown.endswith("* is read")
    assert not {"MHcCAQ", "EEIB", "AAEC", "AwQF", "BgcI"} & set(re.split(r"\W", shown))


def test_json_stays_json_whatever_stands_in_it() -> None:
    key = "-----BEGIN EC PRIVATE KEY-----\nMHcCAQEEIB\n-----END EC PRIVATE KEY-----\n"
    data = {
        "key": key,
        "after": "plain",
        "url": 'x://u:p@h"',
        "token": "a1b2c3d4\\",
        "n": 1.5e300,
        "auth": "q" * 9 + '1"',
    }
    masked = json.loads(mask_secrets(json.dumps(data)))
    assert (masked["after"], masked["n"]) == ("plain", 1.5e300)
    assert "MHcC" not in json.dumps(masked)


@pytest.mark.parametrize(
    ("name", "value", "hidden"),
    [
        ("MY_TOKEN", "abc", False),
        ("MY_TOKEN", "abcd", True),
        # A name that tells nothing: eight characters of several kinds.
        ("MY_SETTING", "x7-Qp2m", False),
        ("MY_SETTING", "x7-Qp22m", True),
    ],
)
def test_a_secret_has_four_characters_and_eight_if_its_name_tells_nothing(
    name: str, value: str, hidden: bool
) -> None:
    assert is_secret(name, value) is hidden


def test_of_two_secrets_that_begin_alike_the_longer_is_masked_whole() -> None:
    for names in (("A_TOKEN", "B_TOKEN"), ("B_TOKEN", "A_TOKEN")):
        redact = Redactor(dict(zip(names, ("sesame", "sesameopen"), strict=True)))
        assert redact("sesameopen sesame") == "********** ******"


def test_a_value_and_the_form_of_another_secret_are_masked_in_the_same_text() -> None:
    redact = Redactor({"MY_TOKEN": "opensesame"})
    assert redact("opensesame https://me:hunter2@host") == "********** https://me:*******@host"
    # The value is the context of the password.
    assert redact("https://opensesame:hunter2@host") == "https://**********:*******@host"
    assert redact("opensesame") == "**********" and redact("open") == "open"


def test_telling_parts_and_lines_of_a_value_are_masked_and_short_ones_are_not() -> None:
    redact = Redactor(
        {"DB_CONN": "Server=db;Pwd=abc12345;App=abc1234", "MY_KEY": "--BEGIN--ok\nyes\nMHcCAQEE"}
    )
    assert redact("abc12345 abc1234 Server") == "******** abc1234 Server"
    assert redact("MHcCAQEE --BEGIN--ok yes") == "******** --BEGIN--ok yes"


def test_a_value_is_masked_to_its_last_character_in_json_and_in_urls() -> None:
    redact = Redactor({"MY_TOKEN": 'a"b/c"'})
    for written in ('a"b/c"', 'a\\"b/c\\"', "a%22b%2Fc%22"):
        assert redact(f"<{written}>") == f"<{'*' * len(written)}>"


@pytest.mark.parametrize("filler", ["x" * 9000, "a line\n" * 2000, "x" * 9000 + "\n", "\n"])
def test_a_secret_is_masked_wherever_it_stands_in_a_long_text(filler: str) -> None:
    secret = "hf_" + "a1" * 10
    for text in (f"{filler} {secret}", f"{secret} {filler}", f"{filler} {secret} {filler}"):
        assert mask_secrets(text) == text.replace(secret, "*" * len(secret))


def test_a_secret_is_masked_across_the_pieces_of_a_long_line() -> None:
    secret = "hf_" + "a1" * 10
    for before in range((8 << 10) - 30, (8 << 10) + 3, 3):
        text = " " * before + secret + " " * 5000
        assert mask_secrets(text) == text.replace(secret, "*" * len(secret)), before
