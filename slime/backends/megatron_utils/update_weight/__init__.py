"""Weights from the trainer to the engines: which sender a run needs."""

from __future__ import annotations

from argparse import Namespace

from slime.backends.megatron_utils.update_weight.sender import WeightSender
from slime.backends.megatron_utils.update_weight.update_weight_from_distributed import UpdateWeightFromDistributed
from slime.backends.megatron_utils.update_weight.update_weight_from_tensor import UpdateWeightFromTensor
from slime.utils.errors import ConfigError


def sender_class(args: Namespace) -> type[WeightSender]:
    """The sender for ``--update-weight-mode``, ``--update-weight-transport`` and ``--colocate``.

    Raises:
        ConfigError: weights are to travel over disk.
    """
    if args.update_weight_mode == "delta" or args.update_weight_transport == "disk":
        raise ConfigError(
            f"--update-weight-mode {args.update_weight_mode} with --update-weight-transport "
            f"{args.update_weight_transport} is not available yet; use full and nccl (the defaults)"
        )
    return UpdateWeightFromTensor if args.colocate else UpdateWeightFromDistributed
