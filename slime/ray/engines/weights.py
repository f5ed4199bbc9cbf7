"""Which engines take weights, and how pushes to them are reported."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from slime.backends.sglang_utils.sglang_config import EVALUATION_MODEL
from slime.flags.cluster import plan_gpus
from slime.ray.engines.group import EngineGroup, raise_if_given_up
from slime.ray.engines.lifecycle import LIVE, EngineEvent, EngineState
from slime.ray.engines.models import RolloutServer
from slime.ray.engines.ray_engine import RayEngine, UpdatableEngines
from slime.utils.errors import EngineError, ProcessError, WeightSyncError

if TYPE_CHECKING:
    from slime.weights.push.participants import ExcludedEngine


def _groups_with_weights(model: RolloutServer | None) -> list[EngineGroup]:
    """Return the model's groups whose engines hold language-model weights: all but encoders."""
    return [group for group in model.groups if group.config.worker_type != "encoder"] if model else []


class WeightTargets:
    """The engines that trainers push to: those of the first model that takes updates, and those for evaluation.

    Invariant: ``_connected`` lists the engines that the trainers are connected to, in order.  While the described
    engines differ from it, ``UpdatableEngines.num_new`` is positive and makes the trainers reconnect.
    """

    def __init__(self, args: Namespace, servers: Sequence[RolloutServer]) -> None:
        self._args = args
        self._all_groups = [group for server in servers for group in server.groups]
        self.model = next((server for server in servers if server.config.update_weights), None)
        self._groups = _groups_with_weights(self.model)
        evaluating = next((server for server in servers if server.config.name == EVALUATION_MODEL), None)
        self._evaluating = _groups_with_weights(evaluating)
        self._connected: list[Any] = []
        self._described: list[Any] = []
        """The engines described last."""

    def for_evaluation(self) -> UpdatableEngines:
        """Describe the engines for background evaluation; the trainers connect to them each time."""
        return self._describe(self._evaluating, *LIVE)

    def updatable(self) -> UpdatableEngines:
        """Describe the live engines of the model that takes updates."""
        return self._describe(self._groups, *LIVE)

    def without_weights(self) -> UpdatableEngines:
        """Describe the restarted engines that wait for the current weights before they get requests.

        Raises:
            EngineDiedError: the run needs an engine that cannot be restarted.
        """
        raise_if_given_up(self._all_groups)
        if not any(group.indices(EngineState.UPDATING) for group in self._groups):
            return UpdatableEngines([], num_new=0)
        return self._describe(self._groups, EngineState.UPDATING)

    def _describe(self, groups: Sequence[EngineGroup], *states: EngineState) -> UpdatableEngines:
        offset = plan_gpus(self._args).rollout_offset
        num_trainer_gpus = self._args.actor_num_nodes * self._args.actor_num_gpus_per_node
        engines: list[RayEngine] = []
        for group, index in [(g, i) for g in groups for i in g.indices(*states)]:
            actors = group.actors_of(index)  # read only once, because an engine may be killed meanwhile
            if actors[0] is None:
                continue
            first_gpu = offset + group.gpu_offset + index * group.num_gpus_per_engine
            engine = RayEngine(
                index=len(engines),
                num_gpus=group.num_gpus_per_engine,
                gpu_offset=first_gpu,
                is_colocated=first_gpu + group.num_gpus_per_engine <= num_trainer_gpus,
                loaders=group.weight_loaders,
                dtype=group.dtype,
                node_handles=actors,
            )
            engines.append(engine)
        self._described = [engine.handle for engine in engines]
        num_new = len([handle for handle in self._described if handle not in self._connected])
        # A lost engine leaves a hole in the sender's group; reconnecting closes it.
        return UpdatableEngines(engines, num_new or int(self._described != self._connected))

    def connected(self) -> None:
        """Record that the trainers have connected to the engines described last."""
        self._connected = list(self._described)

    def push_started(self) -> UpdatableEngines:
        """Report that the trainers begin a push; return the engines that take it.

        Raises:
            EngineDiedError: the run has lost an engine that it needs and that may still answer with old weights.
        """
        raise_if_given_up(self._all_groups)
        engines = self.updatable()
        self._report(engines.handles, EngineEvent.PUSH_STARTED)
        return engines

    def push_done(self, excluded: Sequence[ExcludedEngine] = ()) -> None:
        """Report that the engines described last, except ``excluded``, hold the current weights.

        Raises:
            ProcessError: the router does not accept a restarted engine.
        """
        without = {engine.index for engine in excluded}
        updated = [handle for index, handle in enumerate(self._described) if index not in without]
        self._report(updated, EngineEvent.PUSH_DONE)

    def push_refused(self, excluded: Sequence[ExcludedEngine]) -> None:
        """Report that a push excluded engines; ``--weight-push-failure`` decides what happens to them.

        Args:
            excluded: engines, indexed by their position in the list described last.

        Raises:
            WeightSyncError: ``--weight-push-failure`` is stop.
            EngineError: no engine of the model is left, or one cannot be restarted.
        """
        reasons = "; ".join(f"engine {engine.index}: {engine.reason}" for engine in excluded)
        policy = self._args.weight_push_failure
        if policy == "stop":
            raise WeightSyncError(
                f"{len(excluded)} engines did not take the weights (--weight-push-failure stop). {reasons}. The "
                "others serve the new version; restart the job to resume from the last checkpoint"
            )
        for engine in excluded:
            reason = f"it did not take the weights: {engine.reason}"
            self._report([self._described[engine.index]], EngineEvent.PUSH_REFUSED, reason)
        raise_if_given_up(self._all_groups)
        states = {state for group in self._groups for state in group.states}
        if policy == "drop" and not states - {EngineState.RETIRED}:
            raise EngineError("no engine is left; the last were excluded (--weight-push-failure drop). " + reasons)

    def _report(self, handles: Sequence[Any], event: EngineEvent, reason: str = "") -> None:
        """Report an event of the engines of ``handles`` that still exist; raise the first failure at the end."""
        failures: list[ProcessError] = []
        for group, index in [(g, i) for g in self._groups for i, e in enumerate(g.engines) if e in handles]:
            try:
                group.report(index, event, reason)
            except ProcessError as error:
                failures.append(error)
        if failures:
            raise failures[0]
