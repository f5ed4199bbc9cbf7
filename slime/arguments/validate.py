"""Checks of the complete args, before any GPU or engine is taken; nothing is changed here.

Each function of ``CHECKS`` yields one message for each thing that cannot work: the flag with its value, why, and what
to do.  All of them are shown together.  Files and plug-ins come after: validate_files.py, hook_checks.py.
"""

from __future__ import annotations

from argparse import Namespace

from slime.arguments.critic import check_critic_files, check_critic_flags
from slime.arguments.cross_group import advise, check_delta_checksum, check_rewards, check_rollout_functions, check_run
from slime.arguments.hook_checks import check_hooks_on_driver
from slime.arguments.validate_files import check_files
from slime.flags.algorithm import (
    check_loss,
    check_off_policy,
    check_reference,
    check_routing_replay,
)
from slime.flags.checkpoint import check_saves
from slime.flags.cluster import check_gpus
from slime.flags.data import check_batches, check_eval
from slime.flags.debug import check_ci, check_dump_templates, check_modes
from slime.flags.distillation import check_distillation
from slime.flags.fault_tolerance import check_on_nan, check_spare_nodes, check_trainer_recovery
from slime.flags.lora import check_lora
from slime.flags.reward import check_reward
from slime.flags.rollout import check_data_transport, check_length_of_the_run, check_sampling
from slime.flags.security import check_security
from slime.flags.train import check_stateless_adam, check_trained_parameters
from slime.flags.weight_sync import check_weight_flags
from slime.utils.errors import ConfigError

CHECKS = (
    check_modes,
    check_gpus,
    check_trainer_recovery,
    check_spare_nodes,
    check_on_nan,
    check_security,
    check_length_of_the_run,
    check_batches,
    check_data_transport,
    check_sampling,
    check_rewards,
    check_reward,
    check_loss,
    check_off_policy,
    check_distillation,
    check_rollout_functions,
    check_saves,
    check_eval,
    check_reference,
    check_ci,
    check_dump_templates,
    check_trained_parameters,
    check_lora,
    check_routing_replay,
    check_stateless_adam,
    check_weight_flags,
    check_delta_checksum,
    check_run,
    check_critic_flags,
)
"""In the order in which their messages are shown."""


def validate(args: Namespace) -> None:
    """Check ``args``, the files it names and the plug-ins it names.

    Raises:
        ConfigError: every combination that cannot work, or the first file that is wrong.
        DataError: a data file is malformed.
        HookError: a plug-in cannot be imported or does not fit its call.
    """
    problems = [message for check in CHECKS for message in check(args)]
    if problems:
        raise ConfigError("\n".join(problems))
    advise(args)
    if args.plan is None:  # a plan is made where the files need not be
        check_files(args)
        check_critic_files(args)
    check_hooks_on_driver(args)
