"""``--custom-config-path``: a YAML file laid over the flags before anything is derived from them."""

from __future__ import annotations

import difflib
import logging
from argparse import Namespace
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, cast

import yaml

from slime.arguments.parser import Parser, add_slime_arguments
from slime.utils.errors import ConfigError

logger = logging.getLogger(__name__)


def load_yaml_mapping(path: str, flag: str) -> dict[str, Any]:
    """The mapping at the top of a YAML file.

    Raises:
        ConfigError: the file of ``flag`` is missing, is not YAML (with the line), or holds something else.
    """
    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"{flag}: {path} is not a file. Give the path of a YAML file.")
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ConfigError(f"{flag}: {path} is not YAML: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{flag}: {path} holds a {type(content).__name__}; a mapping of keys to values is needed.")
    return content


def apply_overlay(args: Namespace) -> None:
    """Set each top-level key of the file as an attribute of ``args``, over what flags said.

    Keys that no flag has are settings of plug-ins.  A text for a numeric flag becomes a number, as YAML reads 1e-6 as
    text.
    """
    if args.custom_config_path is None:
        return
    flag = "--custom-config-path"
    choices = _choices_by_attribute()
    for key, value in load_yaml_mapping(args.custom_config_path, flag).items():
        name = str(key).replace("-", "_")
        if name == "custom_config_path":
            raise ConfigError(f"{flag}: {args.custom_config_path} sets {key} itself; overlays do not nest.")
        _advise_spelling(args, name, source=f"{flag}: {args.custom_config_path}")
        setattr(args, name, _checked(choices, args, name, value, source=f"{flag}: {key}"))


def _advise_spelling(args: Namespace, name: str, *, source: str) -> None:
    """Say so when a key is no flag's and looks like one; it may still be a plug-in's own."""
    similar = [] if hasattr(args, name) else difflib.get_close_matches(name, vars(args), n=1, cutoff=0.85)
    if similar:
        logger.warning(
            "%s sets %s, which is no flag, for plug-ins to read; if a flag was meant, it is %s.",
            source,
            name,
            similar[0],
        )


def _choices_by_attribute() -> dict[str, Collection[Any]]:
    parser = Parser()
    add_slime_arguments(parser)
    # Not made into tuples: an object of RegistryChoices holds import paths too, which it does not list.
    return {a.dest: cast("Collection[Any]", a.choices) for a in parser._actions if a.choices is not None}


def _checked(choices: Mapping[str, Collection[Any]], args: Namespace, name: str, value: Any, source: str) -> Any:
    """``value`` in the type of the flag it overrides; refused when the flag has choices and it is none of them."""
    value = as_type_of(getattr(args, name, None), value, source=source)
    allowed = choices.get(name)
    strangers = [v for v in (value if isinstance(value, list) else [value]) if v is not None]
    if allowed is not None and any(v not in allowed for v in strangers):
        raise ConfigError(f"{source} is {value!r}; it must be one of {', '.join(map(str, allowed))}.")
    return value


def as_type_of(current: Any, value: Any, *, source: str) -> Any:
    """``value``, turned into the numeric type of ``current`` when it is a text and ``current`` a number.

    Raises:
        ConfigError: the text is no such number; ``source`` says where it stands.
    """
    if not isinstance(value, str) or isinstance(current, bool) or not isinstance(current, (int, float)):
        return value
    try:
        return type(current)(value)
    except ValueError as error:
        kind = "whole number" if isinstance(current, int) else "number"
        raise ConfigError(f"{source} is {value!r}; a {kind} is needed, as in {current!r}.") from error
