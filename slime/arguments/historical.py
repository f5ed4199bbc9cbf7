"""Flags of older scripts that have no effect any more, and say so.

They are accepted, so that a command written for an older slime runs; each one given is named in a log line with the
reason.  A value that asked for something else than what happens today is refused.
"""

from __future__ import annotations

import argparse
import logging

from slime.utils.errors import ConfigError

logger = logging.getLogger(__name__)

HISTORICAL = {
    "qkv_format": "training always packs sequences (thd)",
    "megatron_to_hf_mode": "weights are always converted by slime itself",
    "log_probs_max_tokens_per_gpu": "the log-prob pass uses the micro-batches of training (--max-tokens-per-gpu)",
    "http_proxy": "requests to engines never go through a proxy",
    "min_batch_collection_ratio": "nothing reads it",
    "use_critic": "there is a critic exactly with --advantage-estimator ppo",
    "critic_num_nodes": "the critic has as many GPUs as the actor",
    "critic_num_gpus_per_node": "the critic has as many GPUs as the actor",
}
"""Attribute of each such flag, and why it does nothing."""


def add_historical_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of older scripts to ``parser``."""
    group = parser.add_argument_group("historical", "Accepted for older scripts; without effect.")
    group.add_argument("--qkv-format", choices=["thd", "bshd"], default=None, help=_help("qkv_format"))
    group.add_argument(
        "--megatron-to-hf-mode", choices=["raw", "bridge"], default=None, help=_help("megatron_to_hf_mode")
    )
    group.add_argument(
        "--log-probs-max-tokens-per-gpu", type=int, default=None, help=_help("log_probs_max_tokens_per_gpu")
    )
    group.add_argument("--http-proxy", default=None, help=_help("http_proxy"))
    group.add_argument(
        "--min-batch-collection-ratio", type=float, default=None, help=_help("min_batch_collection_ratio")
    )
    group.add_argument("--use-critic", action="store_true", default=None, help=_help("use_critic"))
    group.add_argument("--critic-num-nodes", type=int, default=None, help=_help("critic_num_nodes"))
    group.add_argument("--critic-num-gpus-per-node", type=int, default=None, help=_help("critic_num_gpus_per_node"))


def note_historical(args: argparse.Namespace) -> None:
    """Log one line that names the historical flags given; refuse what cannot be ignored."""
    if args.qkv_format == "bshd":
        raise ConfigError("--qkv-format is bshd; slime packs sequences (thd) and has no other layout. Drop the flag.")
    if args.use_critic and args.advantage_estimator != "ppo":
        raise ConfigError(
            f"--use-critic with --advantage-estimator {args.advantage_estimator}: only ppo has a critic. "
            "Use --advantage-estimator ppo, or drop --use-critic."
        )
    given = [name for name in HISTORICAL if getattr(args, name) is not None]
    if given:
        reasons = "; ".join(f"--{name.replace('_', '-')}: {HISTORICAL[name]}" for name in given)
        logger.info("Flags without effect: %s", reasons)


def _help(name: str) -> str:
    return f"Without effect: {HISTORICAL[name]}."
