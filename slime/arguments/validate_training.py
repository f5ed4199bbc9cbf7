"""Checks of the flags that change what a training step is: which parameters, which experts, which optimizer."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Iterator

from slime.utils.errors import ConfigError


def check_training_flags(args: Namespace) -> Iterator[str]:
    """What is wrong, one message each."""
    yield from _trained_parameters(args)
    yield from _routing_replay(args)
    yield from _stateless_adam(args)


def check_in_step_arguments(args: Namespace) -> None:
    """What ``train.py``, whose rollouts are drawn by the weights that then train on them, cannot do.

    Raises:
        ConfigError: names the flag.
    """
    if args.keep_old_actor:
        raise ConfigError(
            "--keep-old-actor keeps the weights that drew a rollout while the trainer goes on (train_async.py); with "
            "train.py those are the actor's own; drop the flag, or use train_async.py."
        )


def _trained_parameters(args: Namespace) -> Iterator[str]:
    if args.only_train_params_name_list and args.freeze_params_name_list:
        yield "--only-train-params-name-list and --freeze-params-name-list contradict each other; give one of them."
    for flag in ("only_train_params_name_list", "freeze_params_name_list"):
        for pattern in getattr(args, flag) or []:
            try:
                re.compile(pattern)
            except re.error as error:
                yield f"--{flag.replace('_', '-')}: {pattern!r} is no regular expression: {error}."


def _routing_replay(args: Namespace) -> Iterator[str]:
    records = args.use_routing_replay and not args.use_rollout_routing_replay
    if records and not args.compute_advantages_and_returns:
        yield (
            "--use-routing-replay writes experts down in the pass over the old policy, which "
            "--disable-compute-advantages-and-returns leaves out; drop one of them."
        )


def _stateless_adam(args: Namespace) -> Iterator[str]:
    if not args.use_stateless_adam:
        return
    if args.save is not None and not args.no_save_optim:
        yield "--use-stateless-adam keeps nothing that a checkpoint could hold; add --no-save-optim."
    if args.reset_optimizer_states:
        yield "--reset-optimizer-states is about moments, and --use-stateless-adam has none; drop one of them."
