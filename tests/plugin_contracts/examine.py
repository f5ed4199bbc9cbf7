"""Examine one plug-in: parse the flags with it, check its signature, call it as the product does."""

from __future__ import annotations

from collections.abc import Callable

from slime.arguments.hook_checks import check_import
from slime.arguments.hooks import HOOKS, Hook
from tests.plugin_contracts import rollout_contracts, trainer_contracts
from tests.plugin_contracts.bench import Bench
from tests.plugin_contracts.findings import Findings

Contract = Callable[[Findings, Bench, str, str], None]
"""``contract(findings, bench, flag, path)``."""

CONTRACTS: dict[str, Contract] = rollout_contracts.CONTRACTS | trainer_contracts.CONTRACTS
BY_NAME: dict[str, Hook] = {
    name: hook for hook in HOOKS for name in (hook.flag, hook.dest, hook.flag.removeprefix("--"))
}


def find_hook(name: str) -> Hook:
    """The hook that a user names: ``--custom-rm-path``, ``custom-rm-path`` or ``custom-rm``.

    Raises:
        KeyError: nothing has the name.
    """
    plain = name.removeprefix("--").replace("_", "-")
    for candidate in (plain, f"{plain}-path", f"{plain}-function-path", f"{plain}-hook-path"):
        if candidate in BY_NAME:
            return BY_NAME[candidate]
    raise KeyError(f"there is no hook {name!r}; there are {', '.join(hook.flag for hook in HOOKS)}")


def examine(name: str, path: str, bench: Bench) -> Findings:
    """Everything that can be said of the plug-in at ``path`` in the place of hook ``name``."""
    hook = find_hook(name)
    findings = Findings(hook.flag, path)
    with findings.step("it is importable and takes the call"):
        check_import(hook, path, hook.flag)
    if not findings.failures:
        CONTRACTS[hook.flag](findings, bench, hook.flag, path)
    return findings
