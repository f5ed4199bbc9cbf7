"""Flags that say which GPUs exist and who owns them.

Training owns ``A = actor_num_nodes * actor_num_gpus_per_node`` GPUs, the engines ``rollout_num_gpus``.  With
``--colocate`` both are the same GPUs and take turns.
"""

from __future__ import annotations

import argparse

from slime.arguments.kinds import non_negative_int, positive_float, positive_int


def add_cluster_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the cluster group to ``parser``."""
    group = parser.add_argument_group("cluster", "Which GPUs the trainer and the engines use.")
    group.add_argument("--actor-num-nodes", type=non_negative_int, default=1, help="Nodes the trainer runs on.")
    group.add_argument(
        "--actor-num-gpus-per-node", type=non_negative_int, default=8, help="GPUs the trainer takes on each of them."
    )
    group.add_argument(
        "--rollout-num-gpus",
        type=non_negative_int,
        default=None,
        help="GPUs of all engines together. With --colocate it defaults to the trainer's GPUs; 0 starts only routers.",
    )
    group.add_argument(
        "--rollout-num-gpus-per-engine",
        type=positive_int,
        default=1,
        help="GPUs of one engine (its tensor-parallel times pipeline-parallel size).",
    )
    group.add_argument(
        "--num-gpus-per-node", type=positive_int, default=8, help="GPUs of one node on the engines' side."
    )
    group.add_argument(
        "--colocate", action="store_true", help="Trainer and engines share their GPUs and take turns on them."
    )
    group.add_argument(
        "--offload", action="store_true", help="Short for --offload-train and --offload-rollout together."
    )
    group.add_argument(
        "--offload-train",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="Put the trainer's GPU memory aside while engines generate. Default: on with --colocate, else off.",
    )
    group.add_argument(
        "--offload-rollout",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="Release the engines' GPU memory while the trainer works. Default: on with --colocate, else off.",
    )
    group.add_argument(
        "--distributed-backend",
        choices=["nccl", "gloo"],
        default=None,
        help="torch.distributed backend of the trainer. Default: nccl with CUDA, gloo without.",
    )
    group.add_argument(
        "--distributed-timeout-minutes", type=positive_int, default=10, help="Minutes until a collective is given up."
    )
    group.add_argument(
        "--cluster-wait-timeout-s",
        type=positive_float,
        default=600.0,
        help="Seconds to wait for the cluster to grant the GPUs before the job is given up.",
    )
    group.add_argument(
        "--engine-start-timeout-s",
        type=positive_float,
        default=1800.0,
        help="Seconds an engine may take from its start to its first healthy answer.",
    )
    group.add_argument(
        "--rollout-timeout-s", type=positive_float, default=86400.0, help="Seconds one rollout or one eval may take."
    )
    group.add_argument(
        "--train-timeout-s",
        type=positive_float,
        default=21600.0,
        help="Seconds one training step, one save or one load of the trainer may take.",
    )
    group.add_argument(
        "--weight-update-timeout-s", type=positive_float, default=1800.0, help="Seconds one weight push may take."
    )
    group.add_argument(
        "--shutdown-timeout-s",
        type=positive_float,
        default=20.0,
        help="Seconds that engines, routers and trainers get to end by themselves before they are killed.",
    )
