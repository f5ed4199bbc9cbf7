"""The core's groups of flags, in the order in which they are declared, derived and checked."""

from __future__ import annotations

from argparse import Namespace

from slime.arguments.critic import check_critic_flags
from slime.arguments.cross_group import check_rewards, check_rollout_functions, check_run
from slime.arguments.hooks import add_hook_arguments
from slime.arguments.unsupported import add_historical_arguments
from slime.flags import (
    algorithm,
    cluster,
    data,
    debug,
    distillation,
    fault_tolerance,
    observability,
    reward,
    rollout,
    security,
    train,
    weight_sync,
)
from slime.flags.checkpoint import check_saves, derive_starting_point
from slime.flags.group import FlagGroup
from slime.rollout.eval_config import eval_datasets_from_args

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


def _runtime_facts(args: Namespace) -> None:
    for name in RUNTIME_FACTS - vars(args).keys():
        setattr(args, name, None)


def derive_for_extensions(args: Namespace) -> None:
    """Set what extensions change: the plug-ins, loaders and settings of engines, and what is special about weights."""
    args.engine_plugins, args.weight_loaders, args.engine_settings = [], [], {}
    args.push_sends_model = True  # False: the engines' weights stay those of --hf-checkpoint
    args.reference_in_actor = False  # True: the actor's frozen weights are the reference


def _external_engines(args: Namespace) -> None:
    """Ask external engines what they are; their GPUs are not ours to place anything on."""
    args.rollout_external = args.rollout_external_engine_addrs is not None
    if args.rollout_external and not args.debug_train_only:
        from slime.backends.sglang_utils.external_engines import record_external_engines

        for name, value in record_external_engines(args).items():
            setattr(args, name, value)


def _eval(args: Namespace) -> None:
    """Fill in what eval takes from the rollout when it has no flag of its own."""
    if args.eval_function_path is None:
        args.eval_function_path = args.rollout_function_path
    args.eval_datasets = eval_datasets_from_args(args)


def _hook_lists(args: Namespace) -> None:
    args.rollout_sample_hook_path = args.rollout_sample_hook_path or []


GROUPS = (
    FlagGroup(
        cluster.add_cluster_arguments,
        derive=(
            _runtime_facts,
            derive_for_extensions,
            debug.derive_debug_modes,  # which halves of the job there are
            algorithm.derive_critic,
            _external_engines,
            cluster.derive_distributed_backend,
            cluster.derive_cluster,
        ),
        check=(debug.check_modes, cluster.check_gpus),
        once=(_external_engines,),
    ),
    FlagGroup(
        security.add_security_arguments,
        derive=(security.derive_job_secret,),
        check=(security.check_security,),
        once=(security.derive_job_secret,),
    ),
    FlagGroup(
        train.add_train_arguments,
        derive=(train.derive_precision, derive_starting_point),
        check=(check_saves, train.check_trained_parameters, train.check_stateless_adam),
        once=(derive_starting_point,),
    ),
    FlagGroup(
        rollout.add_rollout_arguments,
        derive=(rollout.derive_lengths,),
        check=(
            rollout.check_length_of_the_run,
            rollout.check_data_transport,
            rollout.check_sampling,
            check_rollout_functions,
        ),
    ),
    FlagGroup(data.add_data_arguments, derive=(data.derive_batch_sizes,), check=(data.check_batches,)),
    FlagGroup(data.add_eval_arguments, derive=(reward.derive_reward, _eval), check=(data.check_eval,), once=(_eval,)),
    FlagGroup(
        algorithm.add_algorithm_arguments,
        derive=(algorithm.derive_algorithm,),
        check=(
            algorithm.check_loss,
            algorithm.check_off_policy,
            algorithm.check_reference,
            algorithm.check_routing_replay,
        ),
    ),
    FlagGroup(distillation.add_distillation_arguments, check=(distillation.check_distillation,)),
    FlagGroup(reward.add_reward_arguments, check=(check_rewards, reward.check_reward)),
    FlagGroup(
        weight_sync.add_weight_sync_arguments,
        derive=(weight_sync.derive_weight_sync,),
        check=(weight_sync.check_weight_flags,),
    ),
    FlagGroup(
        fault_tolerance.add_fault_tolerance_arguments,
        derive=(fault_tolerance.derive_fault_tolerance,),
        check=(
            fault_tolerance.check_trainer_recovery,
            fault_tolerance.check_spare_nodes,
            fault_tolerance.check_on_nan,
        ),
    ),
    FlagGroup(add_hook_arguments, derive=(_hook_lists,)),
    FlagGroup(observability.add_observability_arguments, derive=(observability.derive_observability,)),
    FlagGroup(debug.add_debug_arguments, check=(debug.check_ci, debug.check_dump_templates)),
    FlagGroup(add_historical_arguments, check=(check_run, check_critic_flags)),
)
