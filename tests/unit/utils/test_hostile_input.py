"""Hostile and broken files, answers, plug-ins and environment variables: each ends at once in one clear error."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from slime.flags.checkpoint import check_huggingface_folder, inspect_checkpoint
from slime.utils import env
from slime.utils.errors import ConfigError, SlimeError
from slime.utils.sglang_meta import problem_with_answer
from slime.weights.file_digests import FolderDigests
from slime.weights.stored_tensors import read_layout

pytestmark = pytest.mark.timeout(30)  # an endless read fails

DEEP, DIGITS = "[" * 100_000, "9" * 5000
ODD = {
    "a list": [1], "a text": "x", "a negative number": -1, "a fraction": 1.5, "true": True, "an object": {"a": 1},
    "a large number": 10**30, "nested lists": [[[]]],
}  # fmt: skip
"""Replacements for a value of another type."""


def one_line(call: Callable[[], Any]) -> str:
    with pytest.raises(SlimeError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message and len(message) < 1500, message
    return message


# ------------------------------------------------------------------------------------------ model folders


def header(text: Any) -> bytes:
    data = text.encode() if isinstance(text, str) else json.dumps(text).encode()
    return struct.pack("<Q", len(data)) + data + b"1234"


def entry(**changes: Any) -> bytes:
    return header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} | changes})


TWICE = '"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
FOLDERS = {
    "config nested": ({"config.json": DEEP}, "config.json is not JSON"),
    "index of numbers": ({"model.safetensors.index.json": '{"weight_map": {"a": 3}}'}, "names '3'"),
    "index out of the folder": ({"model.safetensors.index.json": '{"weight_map": {"a": "../x"}}'}, "'../x'"),
    "index of nothing": ({"model.safetensors.index.json": '{"weight_map": {}}'}, "no weight_map|holds no|is no"),
    "weights nested": ({"a.safetensors": header(DEEP)}, "a.safetensors is no whole safetensors file"),
    "a dtype of no format": ({"a.safetensors": entry(dtype="Q7")}, "the dtype 'Q7'"),
    "a negative shape": ({"a.safetensors": entry(shape=[-1, -1])}, r"'a' the shape \[-1, -1\]"),
    "a shape of floats": ({"a.safetensors": entry(shape=[1.0])}, "the shape"),
    "a tensor twice": ({"a.safetensors": header(f"{{{TWICE},{TWICE}}}")}, "twice"),
    "metadata that is a list": ({"a.safetensors": header('{"__metadata__":[1],' + TWICE + "}")}, "a.safetensors"),
    "digests nested": ({"digests.json": DEEP}, "digests.json is damaged"),
}  # fmt: skip


def write_broken_folder(name: str, folder: Path) -> Path:
    files, _ = FOLDERS[name]
    if "a.safetensors" not in files:
        save_file({"a": torch.ones(2)}, folder / "model.safetensors")
    for file, content in ({"config.json": "{}"} | files).items():
        if callable(content):
            content(folder / file)
        else:
            (folder / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


@pytest.mark.parametrize("name", FOLDERS)
def test_a_broken_model_folder_is_named_with_its_file(name, tmp_path):
    says = FOLDERS[name][1]
    write_broken_folder(name, tmp_path)
    readers = (
        lambda: check_huggingface_folder(str(tmp_path), "--hf-checkpoint"),
        *(lambda: read_layout(tmp_path), lambda: FolderDigests.read(tmp_path)),
    )
    told = []
    for read in readers:
        try:
            read()
        except SlimeError as error:
            told.append(str(error))
    assert told and all("\n" not in message and len(message) < 1500 for message in told), told
    assert any(re.search(says, message) for message in told), told


# ------------------------------------------------------------------------------------------ checkpoints


@pytest.mark.parametrize(
    "text",
    [
        b"-1",
        b"1.5",
        b"1\0",
        b"1\n2",
        b"\xef\xbb\xbf1",
        b"9" * 40,
        b"",
        b"RELEASE",
        b"../1",
        b"latest",
        "\u00b2".encode(),
        b"\xff\xfe3",
    ],
)
def test_a_tracker_that_names_no_iteration_is_shown(text, tmp_path):
    (tmp_path / "latest_checkpointed_iteration.txt").write_bytes(text)
    assert "an iteration or the word release" in one_line(lambda: inspect_checkpoint(str(tmp_path), "--load"))


# ------------------------------------------------------------------------------------------ environment


@pytest.mark.parametrize("host", ["not an ip", "10.0.0.1:80", "http://10.0.0.1", "0.0.0.0", "::", "999.1.1.1", "-x"])
def test_an_address_that_nobody_reaches_is_refused(host, monkeypatch):
    monkeypatch.setenv("SLIME_HOST_IP", host)
    with pytest.raises(ConfigError, match="SLIME_HOST_IP is .*without a port"):
        env.host_ip_override()


def test_a_secret_that_cannot_be_read_is_named_by_its_variable(monkeypatch, tmp_path):
    for path in (tmp_path, tmp_path / "nothing"):
        monkeypatch.setenv("SLIME_JOB_SECRET_FILE", str(path))
        with pytest.raises(ConfigError, match="SLIME_JOB_SECRET_FILE is .* cannot be read"):
            env.job_secret()


# ------------------------------------------------------------------------------------------ engine answers


def answer(**meta: Any) -> dict[str, Any]:
    plain = {"finish_reason": {"type": "stop"}, "output_token_logprobs": [[-1.0, 5, None]], "completion_tokens": 1}
    return {"text": "x", "meta_info": plain | meta}


USUAL = (("completion_tokens", True), ("finish_reason", {"a": 1}))


@pytest.mark.parametrize("value", [*ODD.values(), None])
@pytest.mark.parametrize(
    "key", ["finish_reason", "type", "output_token_logprobs", "completion_tokens", "prompt_tokens", "text"]
)
def test_an_answer_with_a_field_of_another_type_is_refused(key, value):
    output = (
        answer(finish_reason={"type": value}) if key == "type" else answer(**{key: value} if key != "text" else {})
    )
    output |= {"text": value} if key == "text" else {}
    is_usual = value is None and key in ("type", "completion_tokens", "prompt_tokens", "text")
    if is_usual or (key in ("type", "text") and value == "x") or (key, value) in USUAL:
        return
    assert problem_with_answer(output, {"input_ids": [1, 2]})
