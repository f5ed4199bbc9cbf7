"""The names of ``slime.rollout.sglang_rollout`` that plug-ins and tests replace.

``generate``, ``generate_and_rm``, ``generate_and_rm_group``, ``GenerateState`` and ``load_function`` are promised
to be looked up in that module at every call.  The modules that implement them therefore reach each other through here.
"""

from __future__ import annotations

from types import ModuleType


def entry_points() -> ModuleType:
    """The module whose attributes count; imported late, because it imports the modules that ask."""
    from slime.rollout import sglang_rollout

    return sglang_rollout
