"""Training on one rollout, on one rank: log-probs of frozen policies -> advantages -> optimizer steps -> reports."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

from megatron.core import mpu
from torch import Tensor

from slime.backends.megatron_utils import train_metrics
from slime.backends.megatron_utils.advantages import compute_advantages_and_returns
from slime.backends.megatron_utils.cp_utils import packing_of
from slime.backends.megatron_utils.data import DataIterator, current_device
from slime.backends.megatron_utils.forward import forward_only, needs_old_log_probs
from slime.backends.megatron_utils.guide import Guide, Reference
from slime.backends.megatron_utils.log_probs import Reader, get_log_probs_and_entropy, get_values
from slime.backends.megatron_utils.policies import ModelSwitch, Policies
from slime.backends.megatron_utils.routing_replay import RoutingReplay
from slime.backends.megatron_utils.train_metrics import TOKEN_COLUMNS, ExpertLoad
from slime.backends.megatron_utils.train_reports import TrainReports, dump_train_data
from slime.backends.megatron_utils.train_step import OptimizerSteps, StepResult
from slime.flags.observability import MetricsConfig
from slime.observability.telemetry import span
from slime.train_data.device_batch import DeviceBatch
from slime.utils.errors import ConfigError
from slime.utils.misc import call_hook


class RolloutTraining:
    """Trains the model of one rank on rollouts.  Before and after, the model holds the role's own weights.

    Args:
        role: "actor" or "critic".
        model: the chunks of the model on this rank.
        optimizer: None with ``--num-rollout 0``.
        scheduler: learning rate and weight decay; None without an optimizer.
        weights: switches the model between policies.
        policies: the actor's other policies: reference, old actor and those of extensions.
        reports: the log.
        guides: the actor's guides other than the reference.
    """

    def __init__(
        self,
        args: Namespace,
        role: str,
        model: Any,
        optimizer: Any,
        scheduler: Any,
        *,
        weights: ModelSwitch,
        policies: Policies,
        reports: TrainReports,
        guides: Sequence[Guide] = (),
    ) -> None:
        self.args = args
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        self.weights, self._policies, self._reports = weights, policies, reports
        is_actor = role == "actor"
        self._guides = guides if "ref" not in weights.tags else (Reference(args), *guides)
        self._loss_terms = tuple(guide.loss_term for guide in guides if guide.loss_term is not None)
        self._token_columns = (*TOKEN_COLUMNS, *(name for guide in guides for name in guide.token_columns))
        self.train = self._train_actor if is_actor else self._train_critic
        self._routing: RoutingReplay | None = None
        if args.use_routing_replay and is_actor:
            self._routing = RoutingReplay(model, packing_of(args), from_engine=args.use_rollout_routing_replay)
        has_load = args.log_expert_load and args.num_experts and is_actor
        self._expert_load = ExpertLoad(model, args.num_layers, args.num_experts) if has_load else None

    def begin(self, data: DeviceBatch, iterators: list[DataIterator]) -> None:
        """Prepare the iterators: guides' loss terms and, with routing replay, the recorded experts."""
        if self._routing is not None:
            self._routing.begin(data)
        for iterator in iterators:
            iterator.loss_terms = self._loss_terms
            if self._routing is not None:
                iterator.attach = self._routing.attach

    def _train_actor(
        self, rollout_id: int, data: DeviceBatch, iterators: list[DataIterator], external_data: Mapping[str, Any]
    ) -> dict[str, float]:
        """Compute log-probs and advantages, then take the optimizer steps of the policy.

        Returns:
            the metrics of the rollout and the last step on the main rank, an empty dict elsewhere.
        """
        args = self.args
        if args.compute_advantages_and_returns:
            self._compute_log_probs(rollout_id, data, iterators)
            if "values" in external_data:
                data.critic_values = [values.to(current_device()) for values in external_data["values"]]
            with span("advantages"):
                compute_advantages_and_returns(args, data, self._guides)
        if path := args.rollout_data_postprocess_path:
            call_hook("--rollout-data-postprocess-path", path, args, rollout_id, data)
        metrics = self._rollout_metrics(data)
        self._reports.rollout(rollout_id, metrics)
        self._reports.keep_tokens(iterators[-1])
        dump_only = self._log_probs_for_dump(data, iterators) if args.save_debug_train_data else {}
        with span("actor_train", rollout=rollout_id), self._routed("train"):
            metrics |= self.take_steps(rollout_id, data, iterators, args.loss_type)
        self._reports.record(rollout_id, data, iterators[-1].kept)
        if args.save_debug_train_data:
            columns = DeviceBatch(data | dump_only)
            dump_train_data(args.save_debug_train_data, rollout_id, columns, self._token_columns)
        if self._routing is not None:
            self._routing.clear()
        self._record_weights(rollout_id)
        self._policies.record_trained(rollout_id)
        return metrics

    def _compute_log_probs(self, rollout_id: int, data: DeviceBatch, iterators: list[DataIterator]) -> None:
        """Add the log-probs of the frozen policies and of the old policy to ``data``.

        Afterwards the model holds the actor's weights.
        """

        def passes(tag: str, read: Reader, prefix: str) -> dict[str, list[Tensor]]:
            self.weights.switch_to(tag)
            return self._forward(rollout_id, read, data, iterators, prefix)

        for guide in self._guides:
            guide.read(passes, data)
        self.weights.switch_to("old_actor" if self.args.keep_old_actor else "actor")
        with self._routed("old_log_probs"):
            if needs_old_log_probs(self.args, len(data.num_microbatches)):
                data.update(self._forward(rollout_id, get_log_probs_and_entropy, data, iterators, ""))
            elif self._routing is not None and self._routing.must_record:
                forward_only(get_log_probs_and_entropy, self.args, self.model, iterators, data.num_microbatches)
        self.weights.switch_to("actor")

    def _train_critic(
        self, rollout_id: int, data: DeviceBatch, iterators: list[DataIterator], external_data: Mapping[str, Any]
    ) -> dict[str, Any] | None:
        """Compute values and returns, then take the optimizer steps of the value loss.

        Returns:
            the values, for the actor, on the last pipeline stage; None elsewhere.
        """
        data.update(self._forward(rollout_id, get_values, data, iterators, ""))
        compute_advantages_and_returns(self.args, data, ())
        metrics = train_metrics.value_metrics(data)
        is_alone = rollout_id < self.args.num_critic_only_steps  # the actor, which logs the others, does not get it
        if is_alone:
            metrics |= self._rollout_metrics(data)
        self._reports.rollout(rollout_id, metrics)
        with span("actor_train", rollout=rollout_id):
            self.take_steps(rollout_id, data, iterators, "value_loss")
        if is_alone and self.args.save_debug_train_data:
            dump_train_data(self.args.save_debug_train_data, rollout_id, data, self._token_columns)
        self._record_weights(rollout_id)
        if not mpu.is_pipeline_last_stage(ignore_virtual=True):
            return None
        return {"values": [values.cpu() for values in data.critic_values]}

    def _rollout_metrics(self, data: DeviceBatch) -> dict[str, float]:
        has_rewards = MetricsConfig.of(self.args).has_rewards
        return train_metrics.rollout_metrics(
            data, self._token_columns, per_token=self.args.calculate_per_token_loss, has_rewards=has_rewards
        )

    def _record_weights(self, rollout_id: int) -> None:
        """Gather the updated weights on every rank, and record their digest."""
        if self.args.overlap_param_gather:
            for chunk in self.model:  # without this a rank has only its own shard's update until the next forward pass
                chunk.start_param_sync(force_sync=True)
        self._reports.record_weights(rollout_id, self.model)

    def _routed(self, passes: Literal["old_log_probs", "train"]) -> AbstractContextManager[None]:
        """Replay or record the experts in these passes, with routing replay."""
        return nullcontext() if self._routing is None else self._routing.during(passes)

    def _forward(
        self, rollout_id: int, read: Reader, data: DeviceBatch, iterators: list[DataIterator], prefix: str
    ) -> dict[str, list[Tensor]]:
        """Run a forward pass with the weights that the model holds."""
        name = "values" if read is get_values else f"{prefix}log_probs"
        with span(name, rollout=rollout_id):
            return forward_only(read, self.args, self.model, iterators, data.num_microbatches, prefix)

    def _log_probs_for_dump(self, data: DeviceBatch, iterators: list[DataIterator]) -> dict[str, Any]:
        """Return log-probs that only the dump needs, if training takes them from its own forward pass."""
        counts, args = data.num_microbatches, self.args
        if not needs_old_log_probs(args, len(counts)) or not args.compute_advantages_and_returns:
            with self._routed("train"):
                return forward_only(get_log_probs_and_entropy, args, self.model, iterators, counts)
        return {}

    def take_steps(
        self, rollout_id: int, data: DeviceBatch, iterators: list[DataIterator], loss_type: str
    ) -> dict[str, float]:
        """Take the optimizer steps.  Return the metrics of the last one on the main rank, an empty dict elsewhere."""
        if self.optimizer is None or self.scheduler is None:
            raise ConfigError("--num-rollout is 0, so there is no optimizer, but a rollout was given to train on")
        last: dict[str, float] = {}

        def on_step(step_id: int, result: StepResult) -> None:
            changed = self._routing.take_metrics() if self._routing is not None else {}
            if self._expert_load is not None:
                changed |= self._expert_load.take_metrics()
            last.update(self._reports.step(rollout_id, step_id, result, changed, data=data))

        self.weights.record_changed()
        steps = OptimizerSteps(self.args, self.model, self.optimizer, self.scheduler)
        steps.take(rollout_id, data, iterators, loss_type=loss_type, on_step=on_step)
        return last
