"""PPO's critic beside the actor: the same GPUs, one after the other, and values that go from rank to rank.

    rollout k -> critic: values of rollout k, then its own steps -> sleeps -> actor: advantages from them, its steps

The critic trains first, with the values that it had before: what the actor's advantages are measured against is the
critic that had not seen the rollout.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

from slime.ray.actor_group import RayTrainGroup
from slime.ray.gpus import GpuSlice
from slime.utils.errors import CheckpointError, ConfigError


def create_critic(args: Namespace, gpus: GpuSlice, actor: RayTrainGroup) -> RayTrainGroup:
    """Start the critic on the actor's GPUs, once the actor sleeps, and load its model.

    Args:
        args: of the run; ``args.critic_args`` are the critic's.
        gpus: the actor's.
        actor: created before; the critic must go on with the same rollout and share the work alike.

    Raises:
        CheckpointError: it does not.
    """
    critic = type(actor)(
        args.critic_args, args.critic_num_nodes, args.critic_num_gpus_per_node, gpus, role="critic", parts=actor.parts
    )
    critic.follow(actor)
    start = critic.create()
    if start != actor.start_rollout_id:
        raise CheckpointError(
            f"the actor goes on with rollout {actor.start_rollout_id} and the critic with rollout {start}: their "
            "checkpoints are not of one save. Name one that both have with --ckpt-step."
        )
    scatter_values(["" for _ in range(critic.world_size)], critic.layouts(), actor.layouts())  # fails now or never
    actor.deal_external_data = lambda values: scatter_values(values, critic.layouts(), actor.layouts())
    return critic


def scatter_values(
    values: Sequence[Any], critic_ranks: Sequence[Mapping[str, int]], actor_ranks: Sequence[Mapping[str, int]]
) -> list[Any]:
    """Return what each actor rank gets of what the critic's ranks returned.

    A critic's last pipeline stage has the values, cut over data- and context-parallel ranks as the actor's samples
    are; its tensor-parallel ranks have the same ones.

    Args:
        values: of each critic rank.
        critic_ranks: ``TrainWorker.get_parallel_config`` of each.
        actor_ranks: the same of the actor's.

    Returns:
        one entry per actor rank; None on those that compute no advantages.

    Raises:
        ConfigError: no critic rank trains on the samples of some actor rank.
    """
    by_place = {
        (rank["dp_rank"], rank["cp_rank"]): value
        for value, rank in zip(values, critic_ranks, strict=True)
        if rank["is_last_stage"]
    }
    sizes = [{(rank["dp_size"], rank["cp_size"]) for rank in ranks} for ranks in (critic_ranks, actor_ranks)]
    if sizes[0] != sizes[1]:
        raise ConfigError(
            f"the critic has (data, context) parallel sizes {sizes[0]} and the actor {sizes[1]}; they must be equal"
        )
    return [by_place[rank["dp_rank"], rank["cp_rank"]] if rank["is_last_stage"] else None for rank in actor_ranks]
