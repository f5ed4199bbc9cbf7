"""The Megatron trainer of one rank: trains, saves, pushes weights, sleeps and wakes up."""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist
from megatron.core import mpu

from slime.backends.megatron_utils import checkpoint, initialize, memory, reloadable_groups
from slime.backends.megatron_utils.checkpoints.checkpoint_writer import BackgroundSave
from slime.backends.megatron_utils.data import get_data_iterator, prepare_rollout_data
from slime.backends.megatron_utils.guide import Guide
from slime.backends.megatron_utils.hf_checkpoint_saver import save_hf_model_to_path
from slime.backends.megatron_utils.model import setup_model_and_optimizer
from slime.backends.megatron_utils.model_transform import added_parameters
from slime.backends.megatron_utils.policies import ModelSwitch, Policies, reference_update
from slime.backends.megatron_utils.rollout_training import RolloutTraining
from slime.backends.megatron_utils.sleep import OffloadedState, TrainerSleep
from slime.backends.megatron_utils.train_reports import TrainReports
from slime.backends.megatron_utils.update_weight.transport import MakeTransport
from slime.backends.megatron_utils.update_weight.updater import WeightUpdater
from slime.backends.train_worker import TrainWorker
from slime.flags.checkpoint import version_before
from slime.observability import telemetry
from slime.observability.telemetry import Timer, span
from slime.observability.text_log import configure_logger, level_of
from slime.train_data.columns import RankBatch
from slime.utils.distributed_utils import get_gloo_group
from slime.utils.files import read_model_config
from slime.weights.push.engine import EngineProxy
from slime.weights.push.participants import ExcludedEngine

logger = logging.getLogger(__name__)


class MegatronTrainRayActor(TrainWorker):
    """One rank of the actor or the critic.

    Invariant: between two verbs the model holds the role's own weights.  With ``--offload-train`` the trainer then
    sleeps, and the actor's host copy (tag ``"actor"``) is up to date.
    """

    def init(
        self,
        args: Namespace,
        role: str,
        with_ref: bool = False,
        transforms: tuple[type, ...] = (),
        transport: MakeTransport | None = None,
        guides: tuple[type[Guide], ...] = (),
    ) -> int:
        """Join the process group, build the model, load all policies, and sleep if the accelerator is shared.

        Returns:
            the rollout that training starts with.
        """
        self.args, self.role = args, role
        if args.debug_rollout_only:
            return args.start_rollout_id or 0
        configure_logger(prefix=f"{role} {self.rank}", level=level_of(args))
        logging.getLogger("megatron").setLevel(logging.WARNING)
        self.join_process_group(args.distributed_backend, timedelta(minutes=args.distributed_timeout_minutes))
        initialize.init(args)
        sleeps = memory.sleeps(args.offload_train)
        if sleeps:
            reloadable_groups.make_groups_reloadable()
        self._hf_config = read_model_config(args.hf_checkpoint or "")
        with span("init"):
            self.model, self.optimizer, self.scheduler = setup_model_and_optimizer(args, role, transforms)
            iteration = self.load_state()
            self.weights = ModelSwitch(self.model, role)
            self._sleep = TrainerSleep(
                OffloadedState(self.model, self.optimizer) if sleeps else None,
                self.weights,
                role,
                always=args.offload_train,
                mem_fraction_static=args.sglang_mem_fraction_static
                if sleeps and args.offload_train_if_needed
                else None,
            )
            self._policies = Policies(args, self.model, self.weights)
            if role == "actor":
                self._policies.load(with_ref=with_ref, is_from_load=self.loads_checkpoint, iteration=iteration)
        self._reports = TrainReports(args, role, world_size=self.world_size)
        self.training = RolloutTraining(
            args,
            role,
            self.model,
            self.optimizer,
            self.scheduler,
            weights=self.weights,
            policies=self._policies,
            reports=self._reports,
            guides=[guide(args) for guide in guides],
        )
        self._last_rollout_id: int | None = None
        self._background_save = BackgroundSave(self._publish) if args.async_save else None
        memory.report(f"of {role} rank {self.rank} after loading")
        memory.freeze_long_lived_objects()
        self._sleep.rest()
        Timer().reset()
        Timer().start("train_wait")
        self._start_rollout_id = args.start_rollout_id if args.start_rollout_id is not None else iteration + 1
        folders, at_least = (args.load, args.save), args.update_weight_start_version
        version = version_before(self._start_rollout_id, folders, at_least=at_least)
        self._updater = WeightUpdater(
            args,
            self.model,
            self._sleep.host_weights,
            hf_config=self._hf_config,
            first_version=version,
            make_transport=transport,
        )
        return self._start_rollout_id

    @property
    def loads_checkpoint(self) -> bool:
        """Return True if :meth:`load_state` reads ``--load``."""
        return True

    def load_state(self) -> int:
        """Load the state that training continues from into the freshly built model; return its rollout."""
        return checkpoint.load_checkpoint(self.args, self.model, self.optimizer, self.scheduler)

    def end_training(self, rollout_id: int) -> None:
        """Hook after all optimizer steps of a rollout, while the trainer is awake."""

    def get_parallel_config(self) -> dict[str, int]:
        """Return the parallel sizes and ranks by which the rollout manager splits the data."""
        config: Any = self.model[0].config
        return {
            "dp_size": mpu.get_data_parallel_world_size(with_context_parallel=False),
            "cp_size": mpu.get_context_parallel_world_size(),
            "vpp_size": mpu.get_virtual_pipeline_model_parallel_world_size() or 1,
            "microbatch_group_size_per_vp_stage": config.microbatch_group_size_per_vp_stage or 1,
            "dp_rank": mpu.get_data_parallel_rank(with_context_parallel=False),
            "cp_rank": mpu.get_context_parallel_rank(),
            "is_last_stage": int(mpu.is_pipeline_last_stage(ignore_virtual=True)),
        }

    # Memory

    def sleep(self) -> None:
        """Free the accelerator's memory, unless it is freed already or may stay; a CPU trainer keeps its memory."""
        self._sleep.fall_asleep()

    def wake_up(self) -> None:
        """Restore the memory, with the role's own weights in it."""
        self._sleep.wake_up()

    def clear_memory(self) -> None:
        """Return cached memory to the device."""
        memory.clear_memory()

    # Training

    def train(
        self, rollout_id: int, rank_batch: RankBatch, external_data: dict[str, Any] | None = None
    ) -> dict[str, Any] | None:
        """Take all optimizer steps of one rollout; see the base class."""
        clock = Timer()
        if clock.is_running("train_wait"):
            clock.end("train_wait")
        args = self.args
        if args.use_dynamic_batch_size:
            size = f"--max-tokens-per-gpu (it is {args.max_tokens_per_gpu})"
        else:
            size = f"--micro-batch-size (it is {args.micro_batch_size})"
        with span("train", rollout=rollout_id), memory.naming_flags(size):
            self.wake_up()
            memory.restart_peak()
            with span("data_preprocess"):
                data = prepare_rollout_data(rank_batch, args.padded_vocab_size)
                iterators = get_data_iterator(data, len(self.model))
                self.training.begin(data, iterators)
            outcome: Any = self.training.train(rollout_id, data, iterators, external_data or {})
            self._updater.record_weights_changed()
        self.end_training(rollout_id)
        metrics = self._reports.performance(rollout_id, data, iterators[0])
        self._last_rollout_id = rollout_id
        del data, iterators  # freed only while the trainer sleeps, they would stay in the allocator's cache
        self._sleep.rest()
        clock.start("train_wait")
        return outcome if self.role == "critic" else ({**outcome, **metrics} if metrics else None)

    def save_model(self, rollout_id: int, force_sync: bool = False) -> None:
        """Save model, optimizer, scheduler and random generators; then write the Hugging Face export of ``--save-hf``.

        Args:
            force_sync: write before returning, even with ``--async-save``.
        """
        args = self.args
        with span("save_model"):
            self.wake_up()
            if self._background_save is not None:
                self._background_save.wait()
            background = None if force_sync else self._background_save
            parts = self.model, self.optimizer, self.scheduler
            checkpoint.save_checkpoint(args, rollout_id, *parts, background=background)
            if args.save_hf and self.role == "actor":
                folder = args.save_hf.format(rollout_id=rollout_id)
                save_hf_model_to_path(args, folder, self.model, model_name=args.model_name)
            if (added := added_parameters(self.model)) is not None:
                added.after_save(self.model, rollout_id)
            self._sleep.rest()
        self._reports.span(rollout_id, "save_model")

    def publish_checkpoint(self, rollout_id: int) -> None:
        """Publish the checkpoint: rank 0 writes the tracker file, with ``--async-save`` once the data is on disk."""
        telemetry.flush()  # the trainer may be released
        if self._background_save is not None:
            self._background_save.publish(self.args.save, rollout_id)
            return
        if dist.get_rank() == 0:
            self._publish(self.args.save, rollout_id)
        dist.barrier(group=get_gloo_group())  # NCCL would allocate memory, and the trainer may be asleep

    def _publish(self, save_dir: str, iteration: int | str) -> None:
        # The critic publishes before the actor: keep the critic checkpoint that matches the actor's last one.
        keep_last = self.args.keep_last and self.args.keep_last + (self.role == "critic")
        reference_of = partial(reference_update, self.args)
        checkpoint.publish_checkpoint(save_dir, iteration, keep_last=keep_last, reference_of=reference_of)

    # Weights to the engines

    def connect_rollout_engines(self, engines: Sequence[EngineProxy], num_new_engines: int) -> None:
        """Push to these engines from here on."""
        self._updater.connect(engines, num_new_engines)

    def update_weights(self) -> dict[str, float] | None:
        """Push the actor's weights; returns the push's metrics on the main rank."""
        with span("update_weights"):
            metrics = self._updater.push().as_metrics()
            self._sleep.end_push()
        self._policies.record_pushed()
        if self._last_rollout_id is None:
            Timer().reset("update_weights")
            return None  # a push before the first rollout belongs to no step
        return self._reports.span(self._last_rollout_id, "update_weights", **metrics) or None

    def resend_weights(self) -> None:
        """Push the last push's weights, under the same version, to the engines connected now, which started late."""
        with span("update_weights"):
            self._updater.resend()
            self._sleep.end_push()

    def write_weights(self) -> Any:
        """Write the weights to disk without contacting engines; return the ``WrittenVersion`` on rank 0."""
        with span("update_weights"):
            written = self._updater.write()
            self._sleep.end_push()
        if self._last_rollout_id is not None:
            self._reports.span(self._last_rollout_id, "update_weights", **written.metrics)
        return written if self.rank == 0 else None

    def excluded_engines(self) -> list[ExcludedEngine]:
        """Return the engines that the last push excluded."""
        return self._updater.excluded
