"""The critic's args: the command line, overridden by the critic's entry in ``--megatron-config-path``.

They are complete args, ``args.critic_args`` (None without a critic), derived and checked like the actor's, because a
critic may have another model, learning rate or layout.  Settings of the whole run (engines, data, evaluation) are the
actor's.

A critic starts

* in a new run: from the weights in its ``load``, or else its ``ref_load``, or else the actor's starting point;
* in a run that resumes after rollout k: from ``iter_k`` of its own saves, in ``{--load}/critic`` unless its ``load``
  is set.  If that has no save, it starts from the weights in ``ref_load``, but only if the critic's entry sets one.
"""

from __future__ import annotations

import copy
import logging
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from slime.flags.checkpoint import TRACKER, has_finished_save, inspect_checkpoint, is_iteration_folder, read_tracker
from slime.flags.group import FlagGroup, derive_all
from slime.flags.historical import refuse_missing_features
from slime.flags.overlay import ROLES, ROLES_FLAG, load_role_overrides, set_overrides
from slime.flags.parser import Parser
from slime.utils.errors import ConfigError

logger = logging.getLogger(__name__)

FOLDER = "critic"
"""Subfolder for the critic's checkpoints in the folder of the actor's."""

ALWAYS: dict[str, Any] = {
    # Its returns contain only the reward: it trains before the actor has log-probs to compare.
    "kl_coef": 0.0,
    "use_kl_loss": False,
    "custom_advantage_function_path": None,
    # No vocabulary projection: nothing to draft with, nothing to export.
    "enable_mtp_training": False,
    "save_hf": None,
    # One set of weights, and no loss that compares the routing of two passes.
    "keep_old_actor": False,
    "ref_update_interval": None,
    "use_routing_replay": False,
    "use_rollout_routing_replay": False,
}
"""Attributes that every critic has, whatever the flags."""

ALWAYS_OF_ITS_MODEL: dict[str, Any] = {"untie_embeddings_and_output_weights": True, "mtp_num_layers": None}
"""Further such attributes, set after the flags have been compared with the HF config of the language model."""

UNLESS_OVERRIDDEN: dict[str, Any] = {"disable_param_buffers_cpu_backup": False}
"""Defaults that only overrides change.  Nothing else keeps a critic's weights while it sleeps."""

_SCHEDULE = (
    *("micro_batch_size", "use_dynamic_batch_size", "max_tokens_per_gpu", "balance_data", "balance_by_flops"),
    *("global_batch_size", "num_steps_per_rollout", "rollout_batch_size", "n_samples_per_prompt"),
    *("num_rollout", "num_epoch"),
)
"""Flags for the number of rollouts and their division into micro-batches, which is shared by both roles."""


def critic_flags(args: Namespace, parser: Parser) -> Namespace:
    """Return the critic's flags before any derivation.  Call it before the actor's overrides are set on ``args``.

    Raises:
        ConfigError: the file of ``--megatron-config-path`` is invalid.
    """
    critic = copy.deepcopy(args)
    vars(critic).update(UNLESS_OVERRIDDEN)
    overrides = load_role_overrides(args.megatron_config_path).get("critic", {})
    critic.role_overrides = set_overrides(critic, "critic", overrides, parser)
    return critic


def resolve_critic(critic: Namespace, args: Namespace, groups: Iterable[FlagGroup]) -> None:
    """Derive the critic's flags, except those of the backends.

    Args:
        critic: result of ``critic_flags``; changed in place.
        args: the actor's args, resolved.
        groups: the flag groups that derive values.

    Raises:
        ConfigError: an override requests a feature that does not exist yet.
    """
    given: dict[str, Any] = critic.role_overrides
    if not any(given.get(name) for name in ("fp32", "bf16", "fp16")):
        critic.fp32, critic.bf16, critic.fp16 = args.fp32, args.bf16, args.fp16
    critic.advantage_estimator = args.advantage_estimator
    for name in _SCHEDULE:
        setattr(critic, name, getattr(args, name))
    refuse_missing_features(critic)
    derive_all(critic, groups, of_the_run=False)
    for name in vars(args).keys() - vars(critic).keys():
        setattr(critic, name, copy.deepcopy(getattr(args, name)))
    set_always(critic, ALWAYS)
    for name, value in UNLESS_OVERRIDDEN.items():
        setattr(critic, name, given.get(name, value))
    critic.run_folder = args.save
    if "save" not in given:
        critic.save = str(Path(args.save) / FOLDER) if args.save is not None else None
    _starting_point(critic, args)


def parse_megatron_role_args(
    args: Namespace, megatron_config_path: str | None, role: str, parser: Parser
) -> Namespace:
    """Return the args of a role: a copy of ``args`` with the role's overrides in the file.

    For drivers that start trainers themselves.  After ``parse_args`` both roles are complete already: ``args`` is the
    actor's, ``args.critic_args`` the critic's.

    Raises:
        ConfigError: there is no such role, or the file is invalid.
    """
    if role not in ROLES:
        raise ConfigError(f"the role {role!r} is asked for; it must be {' or '.join(ROLES)}.")
    if role == "critic" and args.critic_args is not None and megatron_config_path == args.megatron_config_path:
        return copy.deepcopy(args.critic_args)
    mine = copy.deepcopy(args)
    overrides = load_role_overrides(megatron_config_path).get(role, {})
    mine.megatron_config_path = megatron_config_path
    mine.role_overrides = set_overrides(mine, role, overrides, parser)
    if role == "critic":
        for name, value in UNLESS_OVERRIDDEN.items():
            setattr(mine, name, mine.role_overrides.get(name, value))
        set_always(mine, ALWAYS | ALWAYS_OF_ITS_MODEL)
    return mine


def set_always(critic: Namespace, settings: Mapping[str, Any]) -> None:
    """Set attributes that every critic has, and log overrides that differ."""
    for name, value in settings.items():
        if critic.role_overrides.get(name, value) != value:
            logger.warning(
                "%s: %s of the critic is %r, which has no effect: it is always %r.",
                ROLES_FLAG, name, critic.role_overrides[name], value,
            )  # fmt: skip
        setattr(critic, name, value)


def _starting_point(critic: Namespace, args: Namespace) -> None:
    given: dict[str, Any] = critic.role_overrides
    critic.start_rollout_id = args.start_rollout_id
    if args.finetune:
        own_start = given.get("load") or given.get("ref_load")
        _start_from_weights(critic, own_start or args.load, args.ckpt_step if own_start is None else None)
        return
    if args.load is None:
        return  # there is nothing to start from; the check of the actor's files reports it
    root = Path(args.load).parent if is_iteration_folder(args.load) else Path(args.load)
    folder = given.get("load") or str(root / FOLDER)
    if (start := given.get("ref_load")) and not has_finished_save(folder):
        logger.warning("The critic has no checkpoint in %s and starts from the weights in %s.", folder, start)
        _start_from_weights(critic, start, None)
        iteration = iteration_of(args.load, args.ckpt_step)
        if critic.start_rollout_id is None and iteration is not None:
            critic.start_rollout_id = iteration + 1  # as the actor, which resumes
        return
    critic.load, critic.ckpt_step = folder, iteration_of(args.load, args.ckpt_step)


def _start_from_weights(critic: Namespace, folder: str, step: int | None) -> None:
    given: dict[str, Any] = critic.role_overrides
    critic.load, critic.ckpt_step = folder, given.get("ckpt_step", given.get("ref_ckpt_step", step))
    critic.finetune = critic.no_load_optim = critic.no_load_rng = True


def iteration_of(load: str, ckpt_step: int | None) -> int | None:
    """Return the iteration from which an actor resumes with --load and --ckpt-step; None if the folder has none.

    Raises:
        ConfigError: the tracker file is invalid.
    """
    if ckpt_step is not None:
        return ckpt_step
    path = Path(load)
    if is_iteration_folder(load):
        return int(path.name.removeprefix("iter_"))
    found = read_tracker(path / TRACKER, "--load") if (path / TRACKER).is_file() else None
    return None if found == "release" else found


def check_critic_flags(args: Namespace) -> Iterator[str]:
    """Yield one message per invalid setting of the critic."""
    if not args.use_critic and args.num_critic_only_steps:
        yield (
            f"--num-critic-only-steps is {args.num_critic_only_steps}, and --advantage-estimator "
            f"{args.advantage_estimator} has no critic; use ppo or drop it."
        )
    critic = args.critic_args
    if critic is None:
        return
    if "save" in critic.role_overrides and None not in (critic.save, args.save):
        if Path(critic.save).resolve() == Path(args.save).resolve():
            yield (
                f"{ROLES_FLAG}: save of the critic is {critic.save}, the folder of the actor's checkpoints, which "
                f"have the same names; leave it out (it is {FOLDER} in --save by default) or name another folder."
            )
    if critic.save is None and args.save is not None:
        yield f"{ROLES_FLAG}: save of the critic is empty while --save is {args.save}; both are saved or neither."
    for name in _SCHEDULE:
        actors = getattr(args, name)
        if (mine := critic.role_overrides.get(name, actors)) != actors:
            yield (
                f"{ROLES_FLAG}: {name} of the critic is {mine} and of the actor {actors}; both "
                "roles train on the same micro-batches: give it as a flag."
            )


def check_critic_layout(args: Namespace) -> None:
    """Check that actor and critic distribute samples over their ranks in the same way.

    Raises:
        ConfigError: the critic's ranks would not have the samples whose values the actor's ranks need.
    """
    critic = args.critic_args
    names = ["data_parallel_size", "context_parallel_size", "virtual_pipeline_model_parallel_size"]
    if args.virtual_pipeline_model_parallel_size is not None:
        names.append("microbatch_group_size_per_vp_stage")
    for name in names:
        mine, actors = getattr(critic, name), getattr(args, name)
        if mine != actors:
            raise ConfigError(
                f"{ROLES_FLAG}: {name} of the critic is {mine} and of the actor {actors}, but its values go from rank "
                "to rank, so both must be the same. Change tensor_model_parallel_size and "
                "pipeline_model_parallel_size together so that their product stays, or drop the overrides."
            )


def check_critic_files(args: Namespace) -> None:
    """Check that the critic's starting point exists.

    Raises:
        ConfigError: it does not; the message says what to do for a run that had no critic so far.
    """
    critic = args.critic_args
    if critic is None or critic.load is None:
        return
    try:
        inspect_checkpoint(critic.load, f"{ROLES_FLAG}: load of the critic", step=critic.ckpt_step)
    except ConfigError as error:
        if critic.finetune:
            raise
        raise ConfigError(
            f"The actor resumes after rollout {critic.ckpt_step}, so the critic must have a checkpoint of it. {error} "
            "To begin with a new critic instead, give it weights to start from: overrides {ref_load: FOLDER} of the "
            f"role critic in {ROLES_FLAG}, for instance --ref-load of the actor."
        ) from error


GROUP = FlagGroup(check=(check_critic_flags,))
