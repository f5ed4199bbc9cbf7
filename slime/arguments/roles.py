"""``--megatron-config-path``: overrides of the trainer's flags by role.

    megatron:
      - name: policy
        role: actor
        overrides: {lr: 1e-6, tensor_model_parallel_size: 2}

Both roles start from the command line, and a role's overrides are set before anything is derived from it, so that they
are resolved and checked like flags.  What a critic is beyond that is in critic.py; overrides of a critic that is not
there are noted.
"""

from __future__ import annotations

import difflib
import logging
from argparse import Namespace
from typing import Any

from slime.algorithms.advantages import get_estimator
from slime.arguments.overlay import as_type_of, load_yaml_mapping
from slime.utils.errors import ConfigError

logger = logging.getLogger(__name__)

FLAG = "--megatron-config-path"
ROLES = ("actor", "critic")
ENTRY_KEYS = frozenset({"name", "role", "overrides", "args"})
IGNORED = ("num_nodes", "num_gpus_per_node")
"""Sizes of a role's cluster; every role has the actor's."""


def load_role_overrides(path: str) -> dict[str, dict[str, Any]]:
    """Role -> attributes to override, as the file says.

    Raises:
        ConfigError: the file is missing or malformed, or names a role that does not exist, or one twice.
    """
    entries = load_yaml_mapping(path, FLAG).get("megatron")
    if not isinstance(entries, list):
        raise ConfigError(f"{FLAG}: {path} needs a list under the key megatron, with one entry for each role.")
    by_role: dict[str, dict[str, Any]] = {}
    for position, entry in enumerate(entries):
        role, overrides = _read_entry(entry, f"{FLAG}: {path}, entry {position}")
        if role in by_role:
            raise ConfigError(f"{FLAG}: {path} has two entries for the role {role}; one is allowed.")
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
        logger.info("%s: there is no critic, so its overrides are not used.", FLAG)
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
            logger.info("%s: %s of a role is not used; every role has the actor's GPUs.", FLAG, name)
            continue
        if not hasattr(args, name):
            similar = difflib.get_close_matches(name, vars(args), n=1)
            hint = f" Did you mean {similar[0]}?" if similar else ""
            raise ConfigError(f"{FLAG}: the {role}'s override {key} is no attribute of args.{hint}")
        given[name] = as_type_of(getattr(args, name), value, source=f"{FLAG}: {key} of the {role}")
        setattr(args, name, given[name])
    return given


def _read_entry(entry: Any, where: str) -> tuple[str, dict[str, Any]]:
    if not isinstance(entry, dict):
        raise ConfigError(f"{where} is {entry!r}; an entry has the keys name, role and overrides.")
    strangers = sorted(set(entry) - ENTRY_KEYS)
    if strangers:
        raise ConfigError(f"{where} has the key {strangers[0]}; an entry has the keys name, role and overrides.")
    role = entry.get("role")
    if role not in ROLES:
        raise ConfigError(f"{where} has the role {role!r}; it must be actor or critic.")
    if "overrides" in entry and "args" in entry:
        raise ConfigError(f"{where} has both overrides and args, two names of one thing; keep overrides.")
    overrides = entry.get("overrides", entry.get("args")) or {}
    if not isinstance(overrides, dict):
        raise ConfigError(f"{where} has overrides {overrides!r}; a mapping of attributes to values is needed.")
    return role, overrides
