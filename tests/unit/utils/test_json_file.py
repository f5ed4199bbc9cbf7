"""Files of others are read as JSON of one meaning, or refused in one line."""

from __future__ import annotations

import json

import pytest

from slime.flags.checkpoint import check_huggingface_folder
from slime.utils.errors import ConfigError, DataError
from slime.utils.json_file import MAX_DEPTH, parse_object, read_model_config, read_model_type, read_object

REFUSED = {
    "a key twice": ('{"a": 1, "b": {"c": 1, "c": 2}}', "the key 'c' twice"),
    "NaN": ('{"NaN": "NaN",\n "b": NaN}', r"NaN in line 2 \(char 21\)"),
    "infinity": ('{"a": [1, -Infinity]}', "-Infinity in line 1"),
    "a number beyond floats": ('{"a": 1e999}', "the number 1e999"),
    "a number of 5000 digits": ('{"a": ' + "9" * 5000 + "}", "4300 digits"),
    "bytes that are no UTF-8": (b'{"a": "\xff"}', "position 7"),
    "UTF-16": ('{"a": 1}'.encode("utf-16"), "position 0"),
    "a byte order mark": (b'\xef\xbb\xbf{"a": 1}', "BOM"),
    "half a surrogate pair": ('{"a": "\\ud800"}', "surrogates"),
    "half a pair in a key": ('{"\\udfff": 1}', "surrogates"),
    "depth": ('{"a":' * 100_000, "100 levels"),
    "depth of lists": ('{"a":' + "[" * 101 + "]" * 101 + "}", "100 levels"),
    "a list": ("[1]", "holds a list"),
    "a text": ('"a"', "holds a str"),
    "nothing": ("", "char 0"),
    "two objects": ("{}{}", "Extra data"),
    "a comment": ('{"a": 1} // b', "Extra data"),
    "a comma at the end": ('{"a": 1,}', "line 1"),
    "a line feed in a text": ('{"a": "\n"}', "control character"),
    "NUL": ('{"a": 1}\0', "Extra data"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_text_of_no_or_two_meanings_is_refused_with_its_place(name, tmp_path):
    text, says = REFUSED[name]
    path = tmp_path / "config.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=rf"--x: .*config\.json is not JSON.*{says}.*again\.") as caught:
        read_object(path, flag="--x", error=ConfigError)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
    assert caught.value.__cause__ is not None
    with pytest.raises(DataError):
        read_object(path)


def test_what_has_one_meaning_is_what_json_says():
    nested = '{"a":' + "[" * (MAX_DEPTH - 1) + "]" * (MAX_DEPTH - 1) + "}"
    for text in (nested, '{"a": [1e-9, -0.0, "\\ud83d\\ude00", true, null, 1000000000000000019884624838656]}', "{}"):
        assert parse_object(text) == parse_object(text.encode()) == json.loads(text)


@pytest.mark.parametrize("name", ["text_config", "quantization_config", "rope_scaling", "model_type"])
@pytest.mark.parametrize("value", [[1], 5])
@pytest.mark.parametrize("is_inside", [False, True])
def test_a_part_of_a_config_that_is_something_else_is_named(name, value, is_inside, tmp_path):
    config = {name: value}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": config} if is_inside else config))
    with pytest.raises(ConfigError, match=rf"config\.json: {name} is .*it must be an? (object|text)"):
        read_model_config(tmp_path)


def test_a_config_without_a_model_type_and_no_config_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json does not exist"):
        read_model_type(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": null}')
    with pytest.raises(ConfigError, match="has no model_type"):
        read_model_type(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json", "generation_config.json"])
def test_settings_that_transformers_reads_are_checked_at_the_start(name, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_text('{"eos_token": "a", "eos_token": "b"}')
    with pytest.raises(ConfigError, match=rf"{name}.*'eos_token' twice"):
        check_huggingface_folder(str(tmp_path), "--hf-checkpoint", weights=False)
