"""No secret is written to any file or log line: not by name, not by form, not at any nesting."""

from __future__ import annotations

import dataclasses
import io
import json
import logging
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from slime.backends.megatron_utils.checkpoint import common_state
from slime.observability import telemetry, text_log
from slime.utils.redaction import REDACTED, redacted, redacted_text, redacted_words

KEY = "k3yOfNobody42"
"""Has no recognizable form; found by the name of its place."""
FORMS = {
    "hugging face": "hf_" + "AbCdEfGhIj" * 3,
    "openai": "sk-proj-Ab12Cd34Ef56Gh78",
    "github": "ghp_Ab12Cd34Ef56Gh78Ij90",
    "aws": "AKIAABCDEFGHIJKLMNOP",
    "google": "AIzaAb12Cd34Ef56Gh78Ij90Kl",
    "jwt": "eyJhbGciOiJI.eyJzdWIiOiIx.c2lnbmVk",
    "bearer": "Bearer Ab12Cd34Ef56",
    "basic": "Basic dXNlcjpwYXNzd29yZA==",
    "pem": "-----BEGIN RSA PRIVATE KEY-----\nMIIEow\n-----END RSA PRIVATE KEY-----",
    "slack": "https://hooks.slack.com/services/T00/B00/Ab12Cd34",
}


@dataclasses.dataclass
class Settings:
    api_key: str
    batch: int


PLACES = {
    "flag": ("wandb_key", KEY),
    "flag of a plug-in": ("my_service_token", KEY),
    "variable in capitals": ("OPENAI_API_KEY", KEY),
    "word in camel case": ("clientSecret", KEY),
    "map": ("env", {"HF_TOKEN": KEY}),
    "list of maps": ("tools", [{"url": "x", "api_key": KEY}]),
    "tuple in a list in a map": ("tools", {"all": [({"password": KEY},)]}),
    "dataclass": ("data", Settings(KEY, 3)),
    "list of dataclasses": ("data", [Settings(KEY, 3)]),
    "namespace": ("critic", Namespace(access_token=KEY)),
    "namespace of another kind": ("critic", SimpleNamespace(access_token=KEY)),
    "set": ("urls", {f"https://h/?token={KEY}"}),
    "user of a URL": ("rm_url", f"https://me:{KEY}@host/x"),
    "URL with an at in its password": ("rm_url", f"https://me:p@{KEY}@host/x"),
    "query": ("rm_url", f"https://host/x?a=1&api_key={KEY}&b=2"),
    "query of a map in a list": ("urls", [{"u": f"https://host/?x=1&key={KEY}"}]),
    "path": ("data", Path(f"s3://me:{KEY}@host/x")),
    "bytes": ("body", f"api_key={KEY}".encode()),
    "array of texts": ("env", np.array([f"API_KEY={KEY}", "LANG=C"])),
    "header": ("headers", [f"Authorization: Token {KEY}"]),
    "header of another name": ("headers", f"X-Api-Key: {KEY}"),
    "pairs of headers": ("headers", [("X-Api-Key", KEY), ("Accept", "json")]),
    "name and value": ("env", [{"name": "GITHUB_TOKEN", "value": KEY}]),
    "variable": ("env", [f"HF_TOKEN={KEY}", "LANG=C"]),
    "shell": ("command", f"export WANDB_API_KEY='{KEY}'; python x.py --wandb-key {KEY} --lr 1"),
    "words": ("command", ["x.py", "--router-api-key", KEY, "--lr", "1"]),
    "JSON": ("extra", json.dumps({"a": [{"secret": KEY}]})),
    "JSON in JSON": ("extra", json.dumps({"a": json.dumps({"secret": f'"{KEY}'})})),
    "JSON in a sentence": ("extra", f'send {{"api_keys": ["{KEY}", "{KEY}"]}} there'),
    "a key twice in JSON": ("extra", f'{{"api_key": "{KEY}", "api_key": ""}}'),
    "YAML": ("extra", f"model: x\napi_keys:\n  - {KEY}\n  - {KEY}\ntoken: {KEY}\npassword: |\n  {KEY}\n"),
    "YAML in a line": ("extra", f"{{model: x, token: {KEY}}}"),
    "Python": ("extra", repr({"api_key": KEY})),
    **{f"form: {name}": ("note", f"use {form} here") for name, form in FORMS.items()},
    "form in a list": ("notes", [["x", (FORMS["openai"],)]]),
    "form as a key": ("notes", {FORMS["github"]: 1}),
}
SECRETS = (KEY, *(form.split()[-1].split("/")[-1] for form in FORMS.values()))


@pytest.fixture
def args(tmp_path, monkeypatch):
    """Arguments with a secret in every place, including the command line and the environment."""
    values = {f"{name}_{number}" if name.islower() else name: v for number, (name, v) in enumerate(PLACES.values())}
    values = {name.replace("wandb_key_0", "wandb_key"): value for name, value in values.items()}
    words = [f"--{name}={value}" for name, value in PLACES.values() if isinstance(value, str)]
    monkeypatch.setattr(sys, "argv", ["train.py", *words, "--extra", *map(str, PLACES["words"][1])])
    monkeypatch.setenv("SLIME_AGENT_EXTRA_ENVS", json.dumps({"GITHUB_TOKEN": KEY}))
    yield Namespace(save=str(tmp_path / "run"), **values)
    telemetry.stop()


def assert_absent(text: str) -> None:
    assert [secret for secret in SECRETS if secret in text] == []


@pytest.mark.parametrize("place", PLACES)
def test_every_place_is_found_by_itself(place):
    name, value = PLACES[place]
    shown = redacted({name: value})
    assert_absent(repr(shown))
    assert REDACTED in repr(shown)
    assert redacted(shown) == shown
    assert_absent(" ".join(redacted_words([f"--{name}", str(value)] if isinstance(value, str) else ["x"])))


def test_no_checkpoint_holds_a_secret(args):
    file = io.BytesIO()
    torch.save(common_state(args, 3), file)
    assert_absent(file.getvalue().decode(errors="replace"))
    file.seek(0)
    with torch.serialization.safe_globals([Namespace]):
        assert torch.load(file, weights_only=True)["args"].wandb_key == REDACTED


def test_no_log_line_holds_a_secret(args, capsys):
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(text_log.RedactingFormatter("%(message)s"))
    logger = logging.getLogger("of the test")
    logger.addHandler(handler)
    try:
        for name, value in PLACES.values():
            logger.error("%s=%s", name, value)
            logger.error("%s", {name: value})
        try:
            raise ValueError(f"cannot reach https://me:{KEY}@host")
        except ValueError:
            logger.exception("it failed")
    finally:
        logger.removeHandler(handler)
    said = capsys.readouterr().out
    assert "it failed" in said and "LANG=C" in said
    assert_absent(said)


@pytest.mark.parametrize(
    "value",
    [
        {"max_tokens": 5, "token_id": 7, "token": 3, "eos_token": "</s>", "token_2": "<pad>", "no_job_secret": True},
        {"tokenizer": "hf/Qwen3-Next-80B", "hf_checkpoint": "/models/hf_Qwen3Next80B", "job_secret_file": "/a/secret"},
        {"prompt": "The secret is out: basic training of sk-learn, the token: a word. Author: me. Bearer bonds."},
        {"url": "http://10.0.0.1:30000/generate?n=3&input_key=prompt", "mail": "me@host", "path": "/a@b/c"},
        {"command": ["train.py", "--input-key", "prompt", "--lr", "1e-6"], "pair": ["input_key", "label_key"]},
        {"json": '{"input_key": "a", "pad_token": "x" }', "yaml": "max_tokens: 5\nstop_token_ids:\n- 3"},
        {"log": "Listening, guarded by the job's secret: router default", "flag": "--no-job-secret: whoever asks"},
        {"wandb_key": None, "sglang_api_key": "", "router_control_plane_api_keys": []},
        ["x", 1, 2.5, None, True, (1, "a"), {"b"}, torch.float32, Path("a/b"), b"abc", float, np.arange(3)],
    ],
    ids=lambda value: next(iter(value)),
)  # fmt: skip
def test_what_is_no_secret_stays_as_it_is(value):
    assert str(redacted(value)) == str(value)
    assert redacted_text(str(value)) == str(value)
