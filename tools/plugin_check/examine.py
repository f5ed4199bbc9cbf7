"""Examine one plug-in: parse the flags with it, check its signature, call it as the product does."""

from __future__ import annotations

import re
from collections.abc import Callable

from slime.flags.hook_checks import check_import
from slime.flags.hooks import HOOKS, Hook
from slime.utils.errors import HookError
from tools.plugin_check import conversation_contracts, rollout_contracts, trainer_contracts
from tools.plugin_check.bench import Bench
from tools.plugin_check.findings import Findings

Contract = Callable[[Findings, Bench, str, str], None]
"""``contract(findings, bench, flag, path)``."""

CONTRACTS: dict[str, Contract] = rollout_contracts.CONTRACTS | trainer_contracts.CONTRACTS
OTHERS: dict[str, Contract] = conversation_contracts.CONTRACTS | trainer_contracts.OTHERS
"""Of flags that are no hooks."""
ALL = (*HOOKS, *(Hook(flag=flag, protocol=object, side="rollout", repeatable=True) for flag in OTHERS))


def short_name(flag: str) -> str:
    """Return what a flag may also be called: ``--rm`` for ``--custom-rm-path``."""
    name = re.sub(r"(-function|-hook)?-path$", "", flag.removeprefix("--"))
    return "--" + re.sub(r"^(custom|rollout|dynamic-sampling)-", "", name)


def find_hook(name: str) -> Hook:
    """Return the hook that a user names: ``--custom-rm-path``, ``custom_rm``, ``rm``.

    Raises:
        KeyError: nothing has the name.
    """
    plain = name.removeprefix("--").replace("_", "-")
    names = [f"--{plain}{end}" for end in ("", "-path", "-function-path", "-hook-path")]
    for hook in ALL:
        if hook.flag in names or short_name(hook.flag) == names[0]:
            return hook
    raise KeyError(f"there is no hook {name!r}; there are {', '.join(hook.flag for hook in ALL)}")


def examine(name: str, path: str, bench: Bench) -> Findings:
    """Return everything that can be said of the plug-in at ``path`` in the place of hook ``name``."""
    hook = find_hook(name)
    findings = Findings(hook.flag, path)
    if hook.flag in OTHERS:
        OTHERS[hook.flag](findings, bench, hook.flag, path)
        return findings
    with findings.step("it is importable and takes the call"):
        check_import(hook, path, hook.flag)
    if not findings.failures:
        try:
            CONTRACTS[hook.flag](findings, bench, hook.flag, path)
        except HookError as error:  # raised where the contract parses the flags of a run
            findings.steps.append(("FAIL", "a run with it starts", str(error)))
    return findings
