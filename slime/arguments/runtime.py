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
        "rollout_num_engines",
        "sglang_router_ip",
        "sglang_router_port",
        "run_folder",
        "tb_experiment_name",
        "update_weight_start_version",
        "wandb_run_id",
    }
)
"""The attributes that ``record_runtime`` may set."""


def record_runtime(args: Namespace, **facts: Any) -> None:
    """Set attributes of ``args``, and of the critic's, that only the running job can know: a router's address.

    Raises:
        ConfigError: a name is not in ``RUNTIME_FACTS``; add it there first.
    """
    strangers = sorted(set(facts) - RUNTIME_FACTS)
    if strangers:
        raise ConfigError(
            f"record_runtime does not know {', '.join(strangers)}; the facts it records are RUNTIME_FACTS of "
            "slime/arguments/runtime.py."
        )
    for role_args in (args, getattr(args, "critic_args", None)):
        if role_args is not None:
            for name, value in facts.items():
                setattr(role_args, name, value)


def args_to_resume(args: Namespace, *, weight_version: int, is_saved: bool) -> Namespace:
    """What a trainer gets that takes the place of one of the same run (``--release-train``).

    Args:
        args: of the run; they stay as they are.
        weight_version: of the last push, above which the new trainer counts on.
        is_saved: a checkpoint of this run is in ``--save``, from which the new trainer goes on; otherwise it starts as
            the first one did.
    """
    resumed = Namespace(**vars(args))
    resumed.update_weight_start_version = weight_version
    if is_saved:
        resumed.load = args.save
        resumed.ckpt_step = None
        resumed.finetune = False
        resumed.no_load_optim = args.no_save_optim and not args.use_stateless_adam
        resumed.no_load_rng = False
        resumed.start_rollout_id = None
    return resumed
