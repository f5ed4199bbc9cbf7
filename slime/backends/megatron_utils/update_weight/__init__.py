"""Weights from the trainer to the engines: which sender a run needs."""

from __future__ import annotations

from argparse import Namespace

from slime.backends.megatron_utils.update_weight.sender import WeightSender
from slime.backends.megatron_utils.update_weight.update_weight_from_disk import UpdateWeightFromDisk
from slime.backends.megatron_utils.update_weight.update_weight_from_disk_delta import UpdateWeightFromDiskDelta
from slime.backends.megatron_utils.update_weight.update_weight_from_distributed import UpdateWeightFromDistributed
from slime.backends.megatron_utils.update_weight.update_weight_from_tensor import UpdateWeightFromTensor


def sender_class(args: Namespace) -> type[WeightSender]:
    """The sender for ``--update-weight-mode``, ``--update-weight-transport`` and ``--colocate``."""
    if args.update_weight_mode == "delta":
        return UpdateWeightFromDiskDelta
    if args.update_weight_transport == "disk":
        return UpdateWeightFromDisk
    return UpdateWeightFromTensor if args.colocate else UpdateWeightFromDistributed
