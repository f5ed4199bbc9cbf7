"""A job's trainers driven together: the actor, and the critic if PPO is used.

They use the same GPUs in turn, and values pass from critic ranks to actor ranks:

    rollout k -> critic: computes values, trains, sleeps -> actor: computes advantages from the values, trains

The critic computes the values before it trains, so the actor's advantages use a critic that has not seen the rollout.
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
    """The actor, and the critic if any.

    Args:
        actor: trains the policy.
        critic: trains the value model, or None.
        num_critic_only_steps: number of initial rollouts that train only the critic.
    """

    def __init__(self, actor: RayTrainGroup, critic: RayTrainGroup | None, *, num_critic_only_steps: int = 0) -> None:
        self._num_critic_only_steps = num_critic_only_steps
        self.actor, self.critic = actor, critic
        self.all = [actor] if critic is None else [actor, critic]
        """The trainers in start order."""

    @property
    def names(self) -> list[str]:
        """The names of all ranks, under which they are watched."""
        return [name for trainer in self.all for name in trainer.names]

    def train(self, rollout_id: int, rollout_data: list[Box]) -> None:
        """Train the critic, whose values the actor's advantages need, then the actor."""
        values = None
        if self.critic is not None:
            with span("train_critic"):
                values = self.critic.async_train(rollout_id, rollout_data)
                self.critic.wait_trained(rollout_id, values)
        if self.critic is None or rollout_id >= self._num_critic_only_steps:
            self.actor.wait_trained(rollout_id, self.actor.async_train(rollout_id, rollout_data, values))

    def save(self, rollout_id: int, save_position: Callable[[], None], *, force_sync: bool) -> None:
        """Write everything that a run resumes from, then publish it.

        The order makes a kill at any moment harmless: first the models, then the data position with the sample
        buffer, last the actor's tracker file, which publishes the checkpoint.  The critic is always saved with the
        actor, even while only the critic trains, so every checkpoint has both.  The critic's tracker is written before
        the actor's, and the critic resumes from the actor's iteration whatever its own tracker says.

        ``save_position`` writes the data position; with ``force_sync`` nothing is written in the background.
        """
        if self.actor.checkpoints.last == rollout_id:
            return  # a repeat after a rank died; rewriting would remove the published checkpoint
        if self.critic is not None:
            # Never in the background (--async-save): the actor's checkpoint could be published before the critic's.
            self.critic.write_checkpoint(rollout_id, force_sync=True)
        self.actor.write_checkpoint(rollout_id, force_sync=force_sync)
        save_position()
        for trainer in reversed(self.all):
            trainer.publish_checkpoint(rollout_id)


def create_critic(args: Namespace, gpus: GpuSlice, actor: RayTrainGroup) -> RayTrainGroup:
    """Start the critic on the GPUs of the sleeping actor and load its model.

    Raises:
        CheckpointError: the critic does not resume at the actor's rollout.
        ConfigError: data- or context-parallel sizes differ from the actor's.
    """
    nodes, per_node = args.critic_num_nodes, args.critic_num_gpus_per_node
    critic = type(actor)(args.critic_args, nodes, per_node, gpus, role="critic", parts=actor.parts, leader=actor)
    start = critic.create()
    if start != actor.start_rollout_id:
        raise CheckpointError(
            f"the actor resumes at rollout {actor.start_rollout_id} and the critic at rollout {start}: their "
            "checkpoints are from different saves. Name an iteration that both have with --ckpt-step."
        )
    scatter_values(["" for _ in range(critic.world_size)], critic.layouts, actor.layouts)  # check the layouts now
    actor.deal_external_data = lambda values: scatter_values(values, critic.layouts, actor.layouts)
    return critic


def scatter_values(
    values: Sequence[Any], critic_ranks: Sequence[Mapping[str, int]], actor_ranks: Sequence[Mapping[str, int]]
) -> list[Any]:
    """Return, for each actor rank, the matching critic rank's result.

    The critic's last pipeline stage has the values, sharded over data- and context-parallel ranks like the actor's
    samples and replicated over tensor-parallel ranks.  Actor ranks that compute no advantages get None.

    Args:
        values: one result per critic rank.
        critic_ranks: ``TrainWorker.get_parallel_config`` of each critic rank.
        actor_ranks: ``TrainWorker.get_parallel_config`` of each actor rank.
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
