"""The trainers of a job as one: the actor, and PPO's critic beside it.

They have the same GPUs, one after the other, and values go from rank to rank:

    rollout k -> critic: values of rollout k, then its own steps -> sleeps -> actor: advantages from them, its steps

The critic trains first, with the values that it had before: what the actor's advantages are measured against is the
critic that had not seen the rollout.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from slime.observability.telemetry import span
from slime.ray.actor_group import RayTrainGroup
from slime.ray.gpus import GpuSlice
from slime.utils.errors import CheckpointError, ConfigError
from slime.utils.misc import Box


class Trainers:
    """The actor, and the critic if there is one.

    Args:
        actor: trains the policy.
        critic: None without one.
        num_critic_only_steps: the first rollouts, which train the critic alone.
    """

    def __init__(self, actor: RayTrainGroup, critic: RayTrainGroup | None, *, num_critic_only_steps: int = 0) -> None:
        self._num_critic_only_steps = num_critic_only_steps
        self.actor, self.critic = actor, critic
        self.all = [actor] if critic is None else [actor, critic]
        """In the order in which they start."""

    @property
    def names(self) -> list[str]:
        """The names of all ranks, as they are watched."""
        return [name for trainer in self.all for name in trainer.names]

    def train(self, rollout_id: int, rollout_data: list[Box]) -> None:
        """Train the critic first, since the actor's advantages need its values, then the actor."""
        values = None
        if self.critic is not None:
            with span("train_critic"):
                values = self.critic.async_train(rollout_id, rollout_data)
                self.critic.wait_trained(rollout_id, values)
        if self.critic is None or rollout_id >= self._num_critic_only_steps:
            self.actor.wait_trained(rollout_id, self.actor.async_train(rollout_id, rollout_data, values))

    def save(self, rollout_id: int, save_position: Callable[[], None], *, force_sync: bool) -> None:
        """Write everything that a run resumes from, and make it count.

        The order makes a kill at any moment harmless: the models, then the position in the data with its buffer, and
        last of all the actor's tracker file, which makes the checkpoint count.  A critic is saved with the actor, also
        while only the critic trains, so that every checkpoint is of both; its tracker comes before the actor's, and it
        resumes from the iteration of the actor's whatever its own says.

        ``save_position`` writes the position in the data; with ``force_sync`` nothing is written in the background.
        """
        if self.actor.checkpoints.last == rollout_id:
            return  # a rank died after that, and the save is repeated: to write again would take it away meanwhile
        if self.critic is not None:
            # Not in the background (--async-save): the actor's might be on disk, and count, before it.
            self.critic.write_checkpoint(rollout_id, force_sync=True)
        self.actor.write_checkpoint(rollout_id, force_sync=force_sync)
        save_position()
        for trainer in reversed(self.all):
            trainer.publish_checkpoint(rollout_id)


def create_critic(args: Namespace, gpus: GpuSlice, actor: RayTrainGroup) -> RayTrainGroup:
    """Start the critic on the actor's GPUs, once the actor sleeps, and load its model.

    It must resume at the actor's rollout, and share the work alike.
    """
    nodes, per_node = args.critic_num_nodes, args.critic_num_gpus_per_node
    critic = type(actor)(args.critic_args, nodes, per_node, gpus, role="critic", parts=actor.parts, leader=actor)
    start = critic.create()
    if start != actor.start_rollout_id:
        raise CheckpointError(
            f"the actor goes on with rollout {actor.start_rollout_id} and the critic with rollout {start}: their "
            "checkpoints are not of one save. Name one that both have with --ckpt-step."
        )
    scatter_values(["" for _ in range(critic.world_size)], critic.layouts, actor.layouts)  # fails now or never
    actor.deal_external_data = lambda values: scatter_values(values, critic.layouts, actor.layouts)
    return critic


def scatter_values(
    values: Sequence[Any], critic_ranks: Sequence[Mapping[str, int]], actor_ranks: Sequence[Mapping[str, int]]
) -> list[Any]:
    """Return what each actor rank gets of what the critic's ranks returned.

    A critic's last pipeline stage has the values, cut over data- and context-parallel ranks as the actor's samples
    are; its tensor-parallel ranks have the same ones.  Actor ranks that compute no advantages get None.

    Args:
        values: of each critic rank.
        critic_ranks: ``TrainWorker.get_parallel_config`` of each.
        actor_ranks: the same of the actor's.
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
