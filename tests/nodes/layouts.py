"""A job's first actions on a cluster: reserve GPUs, place trainer and engines, tell the engines of each other."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import ray

from slime.backends.sglang_utils.sglang_config import resolve_sglang_config
from slime.flags.parse import parse_args
from slime.ray.actor_group import RayTrainGroup
from slime.ray.engines import actor as engine_actor
from slime.ray.engines.actor import PortCursors
from slime.ray.engines.group import EngineGroup
from slime.ray.engines.models import wait_until_serving
from slime.ray.gpus import GpuSlice, create_placement_groups
from slime.ray.waiting import forget_all, wait_for
from tests.nodes.recorders import RecordingEngine, RecordingTrainer
from tests.unit.flags.broken_configurations import Broken
from tests.unit.flags.test_broken_configurations import flags_of_model, write_files


def arguments(folder: Path, flags: str) -> Namespace:
    """Complete args of a run of Qwen3-4B with ``flags``; its files are in ``folder``."""
    run = Broken(mistake="none", says=(), flags=flags)
    write_files(run, folder)
    return parse_args(argv=[*flags_of_model(run.script), *run.words(str(folder))])


@dataclass
class Layout:
    """A job's trainer and engines, placed."""

    gpus: dict[str, GpuSlice | None]
    trainer: RayTrainGroup | None
    groups: list[EngineGroup]

    def ranks(self) -> list[tuple[int, str, int]]:
        """(rank, node, GPU) of every trainer rank."""
        assert self.trainer is not None
        return wait_for(self.trainer.actors[0].ask.remote("where_all_are"), what="the ranks", timeout_s=120)

    def engines(self) -> list[dict[str, Any]]:
        """The server arguments of every engine actor, with its node and GPU, in order."""
        refs = [actor.describe.remote() for group in self.groups for actor in group.all_engines]
        return wait_for(refs, what="the engines' arguments", timeout_s=120)

    def take_down(self) -> None:
        """Release everything to the cluster."""
        forget_all()
        for group in self.groups:
            for actor in group.all_engines:
                ray.kill(actor)
        if self.trainer is not None:
            self.trainer.release()
        everything = next((s for s in self.gpus.values() if s is not None and s.placement_group is not None), None)
        if everything is not None:
            ray.util.remove_placement_group(everything.placement_group)


def place(args: Namespace, *, with_trainer: bool = True) -> Layout:
    """Reserve, start the trainer's ranks and the engines' actors, as a job does; nothing touches a GPU."""
    layout = Layout(create_placement_groups(args), None, [])
    rollout = layout.gpus["rollout"]
    assert rollout is not None
    with patch.object(engine_actor, "RemoteEngine", RecordingEngine):
        gpu_offset = rank_offset = 0
        cursors = PortCursors()
        for model in resolve_sglang_config(args).models:
            for config in model.server_groups:
                group = EngineGroup(
                    args=args,
                    gpus=rollout,
                    model=model,
                    config=config,
                    gpu_offset=gpu_offset,
                    rank_offset=rank_offset,
                    router=None,
                    needs_offload=args.offload_rollout,
                    cursors=cursors,
                )
                group.start()
                wait_until_serving([group], args.engine_start_timeout_s)
                layout.groups.append(group)
                gpu_offset += config.num_gpus
                rank_offset += len(group.all_engines)
    actor = layout.gpus["actor"]
    assert actor is not None
    if with_trainer:
        layout.trainer = RayTrainGroup(
            args, args.actor_num_nodes, args.actor_num_gpus_per_node, actor, actor_cls=RecordingTrainer
        )
        layout.trainer.create()
    return layout
