"""The user's own loss."""

from __future__ import annotations

from argparse import Namespace

from torch import Tensor

from slime.backends.megatron_utils.losses.columns import Batch, LossAndMetrics, Reducer
from slime.utils.errors import ConfigError
from slime.utils.misc import load_function


def custom_loss_function(args: Namespace, batch: Batch, logits: Tensor, sum_of_sample_mean: Reducer) -> LossAndMetrics:
    """The function of ``--custom-loss-function-path``, which sees fp32 logits and the columns as they are."""
    if args.custom_loss_function_path is None:
        raise ConfigError("--loss-type custom_loss needs --custom-loss-function-path")
    loss, metrics = load_function(args.custom_loss_function_path)(args, batch, logits.float(), sum_of_sample_mean)
    return loss, {"loss": loss, **metrics}
