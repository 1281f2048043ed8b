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
