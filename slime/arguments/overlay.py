"""YAML files laid over the flags before anything is derived from them.

``--custom-config-path`` sets attributes of ``args``, those of flags and others that plug-ins read.
``--megatron-config-path`` overrides the trainer's flags by role:

    megatron:
      - name: policy
        role: actor
        overrides: {lr: 1e-6, tensor_model_parallel_size: 2}

Both roles start from the command line, and a role's overrides are set before anything is derived from it, so that they
are resolved and checked like flags.  What a critic is beyond that is in critic.py; overrides of a critic that is not
there are logged.
"""

from __future__ import annotations

import difflib
import logging
from argparse import Namespace
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, cast

import yaml

from slime.algorithms.advantages import get_estimator
from slime.arguments.parser import Parser, add_slime_arguments
from slime.utils.errors import ConfigError

logger = logging.getLogger(__name__)

ROLES_FLAG = "--megatron-config-path"
ROLES = ("actor", "critic")
ENTRY_KEYS = frozenset({"name", "role", "overrides", "args"})
IGNORED = ("num_nodes", "num_gpus_per_node")
"""Sizes of a role's cluster; every role has the actor's."""


def load_yaml_mapping(path: str, flag: str) -> dict[str, Any]:
    """Return the mapping at the top of a YAML file.

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
    """Log a key that is no flag's and looks like one; it may still be a plug-in's own."""
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
    """Return ``value`` in the type of the flag it overrides; refuse what is none of the flag's choices."""
    value = as_type_of(vars(args).get(name), value, source=source)
    allowed = choices.get(name)
    chosen = [v for v in (value if isinstance(value, list) else [value]) if v is not None]
    if allowed is not None and any(v not in allowed for v in chosen):
        raise ConfigError(f"{source} is {value!r}; it must be one of {', '.join(map(str, allowed))}.")
    return value


def as_type_of(current: Any, value: Any, *, source: str) -> Any:
    """Return ``value``, turned into the numeric type of ``current`` when it is a text and ``current`` a number.

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


def load_role_overrides(path: str) -> dict[str, dict[str, Any]]:
    """Return role -> attributes to override, as the file says.

    Raises:
        ConfigError: the file is missing or malformed, or names a role that does not exist, or one twice.
    """
    entries = load_yaml_mapping(path, ROLES_FLAG).get("megatron")
    if not isinstance(entries, list):
        raise ConfigError(f"{ROLES_FLAG}: {path} needs a list under the key megatron, with one entry for each role.")
    by_role: dict[str, dict[str, Any]] = {}
    for position, entry in enumerate(entries):
        role, overrides = _read_entry(entry, f"{ROLES_FLAG}: {path}, entry {position}")
        if role in by_role:
            raise ConfigError(f"{ROLES_FLAG}: {path} has two entries for the role {role}; one is allowed.")
        by_role[role] = overrides
    return by_role


def apply_role_overrides(args: Namespace) -> None:
    """Set the actor's overrides on ``args``.

    Raises:
        ConfigError: the file is wrong, or overrides an attribute that no flag has.
    """
    if args.megatron_config_path is None:
        return
    by_role = load_role_overrides(args.megatron_config_path)
    if "critic" in by_role and not get_estimator(args.advantage_estimator).needs_values:
        logger.info("%s: there is no critic, so its overrides are not used.", ROLES_FLAG)
    set_overrides(args, "actor", by_role.get("actor", {}))


def set_overrides(args: Namespace, role: str, overrides: dict[str, Any]) -> dict[str, Any]:
    """Set a role's overrides on ``args``; gives those that were set, by attribute.

    Raises:
        ConfigError: an attribute that no flag has, or a text for a number.
    """
    given: dict[str, Any] = {}
    for key, value in overrides.items():
        name = str(key).replace("-", "_")
        if name in IGNORED:
            logger.info("%s: %s of a role is not used; every role has the actor's GPUs.", ROLES_FLAG, name)
            continue
        if not hasattr(args, name):
            similar = difflib.get_close_matches(name, vars(args), n=1)
            hint = f" Did you mean {similar[0]}?" if similar else ""
            raise ConfigError(f"{ROLES_FLAG}: the {role}'s override {key} is no attribute of args.{hint}")
        given[name] = as_type_of(getattr(args, name), value, source=f"{ROLES_FLAG}: {key} of the {role}")
        setattr(args, name, given[name])
    return given


def _read_entry(entry: Any, where: str) -> tuple[str, dict[str, Any]]:
    if not isinstance(entry, dict):
        raise ConfigError(f"{where} is {entry!r}; an entry has the keys name, role and overrides.")
    unknown_keys = sorted(set(entry) - ENTRY_KEYS)
    if unknown_keys:
        raise ConfigError(f"{where} has the key {unknown_keys[0]}; an entry has the keys name, role and overrides.")
    role = entry.get("role")
    if role not in ROLES:
        raise ConfigError(f"{where} has the role {role!r}; it must be actor or critic.")
    if "overrides" in entry and "args" in entry:
        raise ConfigError(f"{where} has both overrides and args, two names of one thing; keep overrides.")
    overrides = entry.get("overrides", entry.get("args")) or {}
    if not isinstance(overrides, dict):
        raise ConfigError(f"{where} has overrides {overrides!r}; a mapping of attributes to values is needed.")
    return role, overrides
