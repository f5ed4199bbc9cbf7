"""JSON objects in files that others wrote: model folders, checkpoints, adapters.

``json.loads`` takes the last of two values of a key, NaN and infinity; other readers of the same file take something
else or nothing.  Here a text has one meaning or is refused.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slime.utils.errors import ConfigError, DataError, SlimeError
from slime.utils.outside_file import read_outside_file

COPY_AGAIN = "Download or copy it again."
MAX_DEPTH = 100
_CONSTANT = re.compile(r'"(?:[^"\\]|\\.)*"|(-?Infinity|NaN)')
_FORMS: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("model_type", "dtype", "torch_dtype"), (lambda value: isinstance(value, str), "a text")),
    **dict.fromkeys(
        ("text_config", "vision_config", "quantization_config", "rope_scaling", "rope_parameters"),
        (lambda value: isinstance(value, dict), "an object"),
    ),
    **dict.fromkeys(
        (
            *("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
            *("head_dim", "vocab_size", "max_position_embeddings"),
        ),
        (lambda value: type(value) is int and value > 0, "a whole number above 0"),
    ),
    **dict.fromkeys(
        ("rope_theta", "rms_norm_eps"), (lambda value: type(value) in (int, float) and value > 0, "a number above 0")
    ),
}
"""Key of a config.json -> what its value must be where it is not null, and that in words."""
_OF_FOLDER = ("model_type", "architectures", "tie_word_embeddings", "dtype", "torch_dtype", "quantization_config")
"""Keys that a ``text_config`` may have as well, perhaps with another value, and that a model reads at the top."""


def parse_object(data: str | bytes) -> dict[str, Any]:
    """Return the object that a JSON text in UTF-8 is.

    Raises:
        ValueError: as :func:`parse_value`, or it is something else.
    """
    value = parse_value(data)
    if not isinstance(value, dict):
        raise ValueError(f"it holds a {type(value).__name__}, not an object")
    return value


def parse_value(data: str | bytes) -> Any:
    """Return what a JSON text in UTF-8 says.

    Raises:
        ValueError: it is none, or a key is there twice, a number is not finite, half a surrogate pair is in a text;
            one line with the place.
    """

    def refuse(constant: str) -> None:
        begin = next(match.start(1) for match in _CONSTANT.finditer(text) if match[1])
        line = text.count("\n", 0, begin) + 1
        raise ValueError(f"it has {constant} in line {line} (char {begin}), which JSON does not have")

    text = data if isinstance(data, str) else data.decode("utf-8")
    try:
        value = json.loads(text, object_pairs_hook=_without_repeats, parse_constant=refuse, parse_float=_finite)
        _check_depth(value)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep") from None
    return value


def read_object(
    path: str | Path, *, flag: str = "", error: type[SlimeError] = DataError, remedy: str = COPY_AGAIN
) -> dict[str, Any]:
    """Return the object in a file.

    Args:
        path: the file.
        flag: that names it or its folder; the first word of an error.
        error: raised when the file holds something else.
        remedy: the last sentence of that error.

    Raises:
        ConfigError: there is no such file.
    """
    place = f"{flag}: {path}" if flag else str(path)
    if not Path(path).is_file():
        raise ConfigError(f"{place} does not exist, or is no file; give the folder that it belongs to.")
    try:
        return parse_object(read_outside_file(Path(path)))
    except ValueError as reason:
        raise error(f"{place} is not JSON as it is needed: {reason}. {remedy}") from reason


def read_model_config(
    folder: str | Path, *, flag: str = "--hf-checkpoint", error: type[SlimeError] = ConfigError
) -> dict[str, Any]:
    """Return ``config.json`` of a Hugging Face folder.

    Args:
        folder: of the model.
        flag: that names it.
        error: raised when the file is damaged.

    Raises:
        ConfigError: there is none.
    """
    path = Path(folder) / "config.json"
    config = read_object(path, flag=flag, error=error)
    for part in (config, config.get("text_config"), config.get("vision_config")):
        for name, value in (part or {}).items():
            fits, words = _FORMS.get(name, (lambda value: True, ""))
            if value is not None and not fits(value):
                shown = f"{flag}: {path}: {name} is {str(value)[:80]!r}"
                raise error(f"{shown}; it must be {words}. {COPY_AGAIN}")
    return config


def read_model_type(folder: str | Path, *, flag: str = "--hf-checkpoint") -> str:
    """Return the family's name in ``config.json``, which decides the names of tensors.

    Raises:
        ConfigError: it is not there.
    """
    if not (name := read_model_config(folder, flag=flag).get("model_type")):
        raise ConfigError(f"{flag}: {Path(folder) / 'config.json'} has no model_type. {COPY_AGAIN}")
    return str(name)


def language_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return what a config.json says of the language model.

    Where there is a ``text_config``, its keys are over those of the top, except for what the top decides.
    """
    text = config.get("text_config") or {}
    return {**config, **{name: text[name] for name in text if name not in _OF_FOLDER or config.get(name) is None}}


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        (name, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"it has the key {name[:80]!r} twice")
    return values


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"the number {text[:80]} is larger than a float may be")
    return value


def _check_depth(value: Any) -> None:
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_DEPTH):
        level = [
            item
            for node in level
            for item in (node.values() if isinstance(node, dict) else node)
            if isinstance(item, dict | list)
        ]
    if level:
        raise RecursionError
