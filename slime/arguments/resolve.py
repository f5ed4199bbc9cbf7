"""Derived values: what the flags imply, filled in once, in order.

``resolve`` runs the functions of ``STEPS`` one after the other; each may rely on those before it.  Nothing is checked
here (see validate.py): a step that cannot derive its value leaves it for the check to name.
"""

from __future__ import annotations

from argparse import Namespace

from slime.flags.algorithm import derive_algorithm, derive_critic
from slime.flags.checkpoint import derive_starting_point
from slime.flags.cluster import derive_cluster, derive_distributed_backend
from slime.flags.data import derive_batch_sizes
from slime.flags.debug import derive_debug_modes
from slime.flags.fault_tolerance import derive_fault_tolerance
from slime.flags.observability import derive_observability
from slime.flags.reward import derive_reward
from slime.flags.rollout import derive_lengths, derive_turns
from slime.flags.security import derive_job_secret
from slime.flags.train import derive_precision
from slime.flags.weight_sync import derive_weight_sync

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
        "job_secret",
        "run_folder",
        "tb_experiment_name",
        "update_weight_start_version",
        "wandb_run_id",
    }
)
"""Attributes that only the running job knows (``record_runtime`` sets them); None until then."""


def resolve(args: Namespace, *, of_the_run: bool = True) -> None:
    """Fill in every derived attribute of ``args``.

    Args:
        args: changed in place.
        of_the_run: False leaves out what belongs to the run as a whole, for a second role in it.
    """
    for step in STEPS:
        if of_the_run or step not in OF_THE_RUN:
            step(args)


def _runtime_facts(args: Namespace) -> None:
    """Set what the running job will record to None, so that ``args`` are complete from the first line on."""
    for name in RUNTIME_FACTS - vars(args).keys():
        setattr(args, name, None)


def _external_engines(args: Namespace) -> None:
    """Ask external engines what they are; their GPUs are not ours to place anything on."""
    args.rollout_external = args.rollout_external_engine_addrs is not None
    if args.rollout_external and not args.debug_train_only:
        from slime.backends.sglang_utils.external_engines import record_external_engines

        for name, value in record_external_engines(args).items():
            setattr(args, name, value)


def _eval(args: Namespace) -> None:
    """Fill in what eval takes from the rollout when it has no flag of its own."""
    from slime.rollout.eval_config import eval_datasets_from_args

    if args.eval_function_path is None:
        args.eval_function_path = args.rollout_function_path
    args.eval_datasets = eval_datasets_from_args(args)


def _hook_lists(args: Namespace) -> None:
    """Make repeatable plug-ins a list, empty when none was named."""
    args.rollout_sample_hook_path = args.rollout_sample_hook_path or []


STEPS = (
    _runtime_facts,
    derive_debug_modes,
    derive_precision,
    derive_distributed_backend,
    derive_critic,
    derive_job_secret,
    _external_engines,
    derive_weight_sync,
    derive_cluster,
    derive_batch_sizes,
    derive_algorithm,
    derive_fault_tolerance,
    derive_lengths,
    derive_turns,
    _hook_lists,
    derive_reward,
    derive_observability,
    _eval,
    derive_starting_point,
)
"""In order; each may rely on those before it."""

OF_THE_RUN = (derive_job_secret, _external_engines, _eval, derive_starting_point)
"""Steps that make the secret, ask engines, read the evaluation's data sets, and say where the actor starts."""
