"""Evaluation beside training (``--eval-in-background``): other engines, one weight version, no step that waits.

    rollout k trained, evaluation due  ->  the trainer sends its weights to the engines of the model ``eval``
    those answer and are graded by another process                   the loop continues: train, push, generate
    an evaluation that is due before the last one has ended          is left out, with a line in the log

Pushes go to the engines that generate, never to these: so nothing changes under an evaluation.  It is checked all the
same (an engine may have been started again meanwhile): a data set whose answers are of several versions is not logged.
What the loop pays is the time of a push to these engines, and the connections to them and back.
"""

from __future__ import annotations

import copy
import logging
import time
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import ray

from slime.backends.sglang_utils.sglang_config import EVALUATION_MODEL, resolve_sglang_config
from slime.flags.parse import record_runtime
from slime.observability import telemetry
from slime.observability.dumps import dump_rollout
from slime.observability.rollout_metrics import log_eval
from slime.observability.text_log import configure_logger, level_of
from slime.ray.actor_group import RayTrainGroup
from slime.ray.engines.deadlines import ROLLOUT_MARGIN_S
from slime.ray.parts import Evaluation, Parts, load_all
from slime.ray.utils import COMMON_ACTOR_ENV, NOSET_VISIBLE_DEVICES
from slime.ray.waiting import WATCH_GROUP, Watched, wait_for, watch
from slime.rollout.base_types import call_rollout_fn, eval_samples
from slime.rollout.config import RolloutConfig
from slime.rollout.engine_client import engine_versions
from slime.rollout.run_state import RunState, use_run
from slime.utils.async_utils import StallTimeout, run
from slime.utils.errors import ProcessError, WeightSyncError
from slime.utils.http_utils import init_http_client
from slime.utils.misc import load_function
from slime.utils.plugins import PluginCall, call_plugin
from slime.utils.types import Sample

logger = logging.getLogger(__name__)


def evaluation_args(args: Namespace) -> Namespace:
    """Return a copy of the manager's args, by which requests go to the router of the model that evaluates."""
    own = copy.deepcopy(args)
    host, port = args.sglang_model_routers[EVALUATION_MODEL]
    model = next(model for model in resolve_sglang_config(args).models if model.name == EVALUATION_MODEL)
    record_runtime(own, sglang_router_ip=host, sglang_router_port=port, rollout_num_engines=model.num_engines)
    return own


class BackgroundEvaluator(Watched):
    """The process that evaluates.

    Args:
        args: of :func:`evaluation_args`.
        parts: of the run.
    """

    def __init__(self, args: Namespace, parts: Parts) -> None:
        configure_logger(prefix="eval", level=level_of(args))
        telemetry.start(args, "evaluation", load_all(parts.sinks))
        self.args = args
        StallTimeout.seconds = args.loop_stall_timeout_s
        init_http_client(args)
        self.run = use_run(RunState())
        self.data_source = load_function(args.data_source_path)(args)
        self.eval_rollout = load_function(args.eval_function_path)

    def eval(self, rollout_id: int) -> dict[str, float]:
        """Evaluate every data set; log and return the metrics of those that one weight version answered."""
        start = time.monotonic()
        self.run.begin(rollout_id)
        config = RolloutConfig.of(self.args)
        before = run(engine_versions(config))
        call = PluginCall("--eval-function-path", self.args.eval_function_path)
        work = (self.eval_rollout, self.args, rollout_id, self.data_source)
        output: Any = call_plugin(call, call_rollout_fn, *work, evaluation=True)
        engines = {*before, *run(engine_versions(config))}
        versions = {name: version_of(result.get("samples") or (), engines) for name, result in output.data.items()}
        dump_rollout(self.args, rollout_id, eval_samples(output), evaluation=True, weight_versions=versions)
        telemetry.samples("evaluation", rollout_id=rollout_id, data=output.data)
        telemetry.flush()  # nobody tells this process that the run ends
        bound = {name: version for name, version in versions.items() if version is not None}
        for name in versions.keys() - bound.keys():
            logger.error(
                "Evaluation of %s after rollout %d is not logged: no single weight version answered it (engines: %s).",
                name,
                rollout_id,
                ", ".join(sorted(engines)) or "none told theirs",
            )
        if not bound:
            return {}
        extra = dict(output.metrics or {}) | {f"eval/{name}/weight_version": bound[name] for name in bound}
        data = {name: output.data[name] for name in bound}
        return log_eval(self.args, rollout_id, data, extra, time.monotonic() - start)


def version_of(samples: Sequence[Sample], engines: set[str]) -> int | str | None:
    """Return the weight version that drew all samples, a number where it is one; None when there is no single one.

    Args:
        samples: of a data set; those of a function of the user's may name no version.
        engines: versions that the engines told before and after.
    """
    found = {str(version) for sample in samples for version in sample.weight_versions} | engines
    if len(found) != 1:
        return None
    version = found.pop()
    return int(version) if version.isdecimal() else version


_RemoteEvaluator: Any = ray.remote(num_cpus=0, num_gpus=0, concurrency_groups={WATCH_GROUP: 1})(BackgroundEvaluator)


class BackgroundEvaluation(Evaluation):
    """The driver's side: at most one evaluation at a time.

    Args:
        args: the run's.
        manager: the rollout manager.
        actor: the trainer whose weights are evaluated.
    """

    def __init__(self, args: Namespace, manager: Any, actor: RayTrainGroup) -> None:
        self._args, self._manager, self._actor = args, manager, actor
        self._evaluator: Any = None
        self._running: ray.ObjectRef | None = None
        self._running_id = -1

    def begin(self, rollout_id: int) -> None:
        """Give the engines the trainer's present weights and have them evaluated; the trainer must be idle.

        Nothing begins while an evaluation runs, or when an engine does not take the weights.
        """
        self.raise_if_failed()
        if self._running is not None:
            logger.warning(
                "The evaluation after rollout %d is left out: that of rollout %d still runs. Evaluate less often "
                "(--eval-interval), less data, or with more engines.",
                rollout_id,
                self._running_id,
            )
            return
        problem = self._send_weights()
        if problem is not None:
            logger.error("The evaluation after rollout %d is left out: %s.", rollout_id, problem)
            return
        if self._evaluator is None:
            args = evaluation_args(self._ask("get_args"))
            variables = COMMON_ACTOR_ENV | NOSET_VISIBLE_DEVICES
            self._evaluator = _RemoteEvaluator.options(runtime_env={"env_vars": variables}).remote(
                args, self._actor.parts
            )
            watch(self._evaluator, "the background evaluation")
        self._running, self._running_id = self._evaluator.eval.remote(rollout_id), rollout_id

    def _send_weights(self) -> str | None:
        """Return why the engines cannot evaluate; None when all of them hold the present weights."""
        engines = self._ask("describe_engines", "evaluation")
        if not engines.num:
            return f"no engine of the model {EVALUATION_MODEL} is there"
        try:
            self._actor.push.resend(engines)
        except (ProcessError, WeightSyncError) as error:  # a trainer that cannot push fails at its next push
            self._actor.push.excluded = []
            return f"its engines did not take the weights: {error}"
        excluded, self._actor.push.excluded = self._actor.push.excluded, []
        return (
            "; ".join(f"engine {engine.index} did not take the weights: {engine.reason}" for engine in excluded)
            or None
        )

    def raise_if_failed(self) -> None:
        """Raise the error of an evaluation that has ended with one."""
        if self._running is not None and ray.wait([self._running], timeout=0)[0]:
            self.finish()

    def finish(self) -> None:
        """Wait for the evaluation that runs, if one does."""
        running, self._running = self._running, None
        if running is not None:
            timeout_s = self._args.rollout_timeout_s + 2 * ROLLOUT_MARGIN_S
            wait_for(running, what=f"the evaluation after rollout {self._running_id}", timeout_s=timeout_s)

    def _ask(self, method: str, *arguments: Any) -> Any:
        ref = getattr(self._manager, method).remote(*arguments)
        return wait_for(ref, what=f"the rollout manager ({method})", timeout_s=self._args.weight_update_timeout_s)
