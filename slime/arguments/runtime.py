"""What becomes known only while the job starts, written to ``args`` in the one place that may."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from slime.utils.errors import ConfigError

RUNTIME_FACTS = frozenset(
    {
        "num_rollout",
        "num_rollout_per_epoch",
        "start_rollout_id",
        "rollout_num_gpus",
        "sglang_model_routers",
        "sglang_router_ip",
        "sglang_router_port",
        "run_folder",
        "tb_experiment_name",
        "wandb_run_id",
    }
)
"""The attributes that ``record_runtime`` may set."""


def record_runtime(args: Namespace, **facts: Any) -> None:
    """Set attributes of ``args`` that only the running job can know, such as the router's address.

    Raises:
        ConfigError: a name is not in ``RUNTIME_FACTS``; add it there first.
    """
    strangers = sorted(set(facts) - RUNTIME_FACTS)
    if strangers:
        raise ConfigError(
            f"record_runtime does not know {', '.join(strangers)}; the facts it records are RUNTIME_FACTS of "
            "slime/arguments/runtime.py."
        )
    for name, value in facts.items():
        setattr(args, name, value)
