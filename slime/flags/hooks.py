"""The contract of every plug-in: one Protocol per flag that takes an import path.

A plug-in is named by ``package.module.attribute``.  The flag, the start-up check and docs/hooks.md are generated from
the table ``HOOKS`` at the end of this file, so they cannot differ.  How to read a protocol's ``__call__``:

* parameters before the ``/`` are passed by position; a plug-in may name them as it likes;
* parameters after the ``*`` are always passed by keyword;
* those of them with a default are passed only to a plug-in that has a parameter of that name.

The checks are in ``hook_checks.py``.
"""

from __future__ import annotations

import argparse
import inspect
from argparse import Namespace
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from slime.flags.group import FlagGroup
from slime.flags.kinds import file_path, wait_s
from slime.utils.plugins import IMPORT_TIMEOUT_S

if TYPE_CHECKING:
    from torch import Tensor

    from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
    from slime.rollout.data_source import DataSource
    from slime.utils.types import RolloutBatch, Sample


class RolloutFunction(Protocol):
    """Generate one rollout of training samples. A bare list of groups is accepted too.

    Runs in the rollout manager. Every sample must have tokens, response_length, reward and status.
    """

    def __call__(
        self, args: Namespace, rollout_id: int, data_source: DataSource, /, *, evaluation: bool
    ) -> RolloutFnTrainOutput | list[list[Sample]]: ...


class EvalFunction(Protocol):
    """Evaluate the current weights; called with evaluation=True. Default: the rollout function.

    Returns a RolloutFnEvalOutput or ``{data set: {"rewards": [...], "truncated": [...], "samples": [...]}}``.
    """

    def __call__(
        self, args: Namespace, rollout_id: int, data_source: DataSource, /, *, evaluation: bool
    ) -> RolloutFnEvalOutput | dict[str, dict[str, Any]]: ...


class DataSourceClass(Protocol):
    """A class whose instances return prompt groups and take back unfinished ones.

    Has get_samples(num), add_samples(groups), save(rollout_id), load(rollout_id=None) and __len__ (prompts).
    """

    def __call__(self, args: Namespace, /) -> DataSource: ...


class Generate(Protocol):
    """Generate the response of one sample; each call gets its own copy of the sampling parameters.

    Sets tokens, response, response_length, status (and loss_mask, rollout_log_probs). May set the reward, which skips
    the grader. A list of samples must share one rollout_id.
    """

    def __call__(
        self, args: Namespace, sample: Sample, sampling_params: dict[str, Any], /, *, evaluation: bool = False
    ) -> Awaitable[Sample | list[Sample]]: ...


class RolloutSampleHook(Protocol):
    """Inspect or replace a sample after generation and before grading; None keeps it. May be async."""

    def __call__(
        self, args: Namespace, sample: Sample, /, *, rollout_id: int | None = None, evaluation: bool = False
    ) -> Sample | None | Awaitable[Sample | None]: ...


class RewardModel(Protocol):
    """Grade a sample: return a number, or a dict whose entry --reward-key is the reward. A plain def runs in a thread.

    With --group-rm it gets a list of samples and returns a list. So does a grader whose second parameter is not named
    ``sample``, or is annotated as a list, for the samples that a generate function made from one.
    """

    def __call__(self, args: Namespace, sample: Sample | list[Sample], /) -> Any | Awaitable[Any]: ...


class DynamicSamplingFilter(Protocol):
    """Keep or drop a finished group: a DynamicFilterOutput or a bool."""

    def __call__(self, args: Namespace, group: list[Sample], /) -> Any: ...


class BufferFilter(Protocol):
    """Choose at most num_samples groups of the buffer, and delete them from it. rollout_id is None."""

    def __call__(
        self, args: Namespace, rollout_id: None, buffer: list[list[Sample]], num_samples: int, /
    ) -> list[list[Sample]]: ...


class RolloutSampleFilter(Protocol):
    """Set remove_sample on samples that must not be trained on; they still count in reward normalization."""

    def __call__(self, args: Namespace, groups: list[list[Sample]], /) -> None: ...


class RolloutAllSamplesProcess(Protocol):
    """Process every group of a rollout, including dropped ones; also gets the data source's get_samples."""

    def __call__(
        self, args: Namespace, all_groups: list[list[Sample]], get_samples: Callable[[int], list[list[Sample]]], /
    ) -> None: ...


class RewardPostProcess(Protocol):
    """Turn the rewards of all samples into (raw rewards, rewards to train on), both as long as the samples."""

    def __call__(self, args: Namespace, samples: list[Sample], /) -> tuple[Sequence[float], Sequence[float]]: ...


class ConvertSamplesToTrainData(Protocol):
    """Convert all samples to train data: a dict of columns (slime.train_data.columns)."""

    def __call__(self, args: Namespace, samples: list[Sample], /) -> RolloutBatch: ...


class RolloutLog(Protocol):
    """Log a rollout; a true result skips the usual log."""

    def __call__(
        self,
        rollout_id: int,
        args: Namespace,
        samples: list[Sample],
        rollout_extra_metrics: dict[str, Any] | None,
        rollout_time: float,
        /,
    ) -> bool | None: ...


class EvalLog(Protocol):
    """Log an eval; a true result skips the usual log."""

    def __call__(
        self,
        rollout_id: int,
        args: Namespace,
        data: dict[str, dict[str, Any]],
        extra_metrics: dict[str, Any] | None,
        /,
    ) -> bool | None: ...


class RolloutDataPostprocess(Protocol):
    """Edit one rank's train data in place, after advantages; runs on every trainer rank, once per rollout."""

    def __call__(self, args: Namespace, rollout_id: int, rollout_data: RolloutBatch, /) -> None: ...


class AdvantageFunction(Protocol):
    """Set rollout_data["advantages"] and ["returns"]: lists of tensors, one per sample, this rank's part of each."""

    def __call__(self, args: Namespace, rollout_data: RolloutBatch, /) -> None: ...


class LossFunction(Protocol):
    """The loss of a micro-batch with --loss-type custom_loss: the sum over samples, and metrics."""

    def __call__(
        self,
        args: Namespace,
        batch: RolloutBatch,
        logits: Tensor,
        sum_of_sample_mean: Callable[[Tensor], Tensor],
        /,
    ) -> tuple[Tensor, dict[str, Tensor]]: ...


class TisFunction(Protocol):
    """Correct the policy loss for the mismatch of trainer and engine, with --use-tis or --get-mismatch-metrics.

    Returns (loss per token, loss masks, metrics per token). train_log_probs come from the weights before training,
    cur_log_probs from those in training, with a gradient. Accept ``**kwargs``: later versions may pass more.
    """

    def __call__(
        self,
        *,
        args: Namespace,
        pg_loss: Tensor,
        train_log_probs: list[Tensor],
        rollout_log_probs: list[Tensor],
        loss_masks: list[Tensor],
        total_lengths: list[int],
        response_lengths: list[int],
        cur_log_probs: list[Tensor] | None = None,
    ) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]: ...


class PgLossReducer(Protocol):
    """Return the reducer of the policy loss: a function from per-token values to a scalar."""

    def __call__(
        self,
        total_lengths: list[int],
        response_lengths: list[int],
        loss_masks: list[Tensor],
        calculate_per_token_loss: bool,
        /,
    ) -> Callable[[Tensor], Tensor]: ...


class ModelProvider(Protocol):
    """Build this pipeline stage's model; slime adds the critic's head."""

    def __call__(self, *, pre_process: bool, post_process: bool, vp_stage: int | None = None) -> Any: ...


class MegatronInit(Protocol):
    """Runs in every trainer process at the end of Megatron's initialization."""

    def __call__(self, args: Namespace, /) -> None: ...


class MegatronBeforeLogProb(Protocol):
    """Runs before each forward-only pass; store_prefix is "", "ref_" or "teacher_"."""

    def __call__(self, args: Namespace, model: list[Any], store_prefix: str, /) -> None: ...


class MegatronBeforeTrainStep(Protocol):
    """Runs before each optimizer step, after gradients are zeroed."""

    def __call__(
        self,
        args: Namespace,
        rollout_id: int,
        step_id: int,
        model: list[Any],
        optimizer: Any,
        opt_param_scheduler: Any,
        /,
    ) -> None: ...


class UpdateWeightPostWrite(Protocol):
    """Runs on every trainer rank after weights were written to disk and before engines read them."""

    def __call__(self, args: Namespace, version_dir: str, rollout_engines: list[Any], /) -> None: ...


class PullWeightsPreRead(Protocol):
    """Runs on every engine host before weights are read from ``--update-weight-disk-dir``; it may fetch them."""

    def __call__(self, source_dir: str, target_version: int, /) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Hook:
    """One flag that takes an import path."""

    flag: str
    protocol: type
    side: Literal["rollout", "trainer"]
    """Caller: the rollout manager's side (imported and checked on the driver) or the trainer's processes."""
    kind: Literal["sync", "async", "either", "class"] = "sync"
    """async: the result is awaited. either: it is awaited if it is awaitable. class: the attribute is a class."""
    default: str | None = None
    repeatable: bool = False

    @property
    def dest(self) -> str:
        """The attribute of args."""
        return self.flag.removeprefix("--").replace("-", "_")


HOOKS: tuple[Hook, ...] = (
    Hook(
        flag="--rollout-function-path",
        protocol=RolloutFunction,
        side="rollout",
        default="slime.rollout.sglang_rollout.generate_rollout",
    ),
    Hook(flag="--eval-function-path", protocol=EvalFunction, side="rollout"),
    Hook(
        flag="--data-source-path",
        protocol=DataSourceClass,
        side="rollout",
        kind="class",
        default="slime.rollout.data_source.RolloutDataSourceWithBuffer",
    ),
    Hook(flag="--custom-generate-function-path", protocol=Generate, side="rollout", kind="async"),
    Hook(
        flag="--rollout-sample-hook-path", protocol=RolloutSampleHook, side="rollout", kind="either", repeatable=True
    ),
    Hook(flag="--custom-rm-path", protocol=RewardModel, side="rollout", kind="either"),
    Hook(flag="--dynamic-sampling-filter-path", protocol=DynamicSamplingFilter, side="rollout"),
    Hook(flag="--buffer-filter-path", protocol=BufferFilter, side="rollout"),
    Hook(flag="--rollout-sample-filter-path", protocol=RolloutSampleFilter, side="rollout"),
    Hook(flag="--rollout-all-samples-process-path", protocol=RolloutAllSamplesProcess, side="rollout"),
    Hook(flag="--custom-reward-post-process-path", protocol=RewardPostProcess, side="rollout"),
    Hook(flag="--custom-convert-samples-to-train-data-path", protocol=ConvertSamplesToTrainData, side="rollout"),
    Hook(flag="--custom-rollout-log-function-path", protocol=RolloutLog, side="rollout"),
    Hook(flag="--custom-eval-rollout-log-function-path", protocol=EvalLog, side="rollout"),
    Hook(flag="--rollout-data-postprocess-path", protocol=RolloutDataPostprocess, side="trainer"),
    Hook(flag="--custom-advantage-function-path", protocol=AdvantageFunction, side="trainer"),
    Hook(flag="--custom-loss-function-path", protocol=LossFunction, side="trainer"),
    Hook(flag="--custom-tis-function-path", protocol=TisFunction, side="trainer"),
    Hook(flag="--custom-pg-loss-reducer-function-path", protocol=PgLossReducer, side="trainer"),
    Hook(flag="--custom-model-provider-path", protocol=ModelProvider, side="trainer"),
    Hook(flag="--custom-megatron-init-path", protocol=MegatronInit, side="trainer"),
    Hook(flag="--custom-megatron-before-log-prob-hook-path", protocol=MegatronBeforeLogProb, side="trainer"),
    Hook(flag="--custom-megatron-before-train-step-hook-path", protocol=MegatronBeforeTrainStep, side="trainer"),
    Hook(flag="--custom-update-weight-post-write-path", protocol=UpdateWeightPostWrite, side="trainer"),
    Hook(flag="--sglang-custom-pull-weights-pre-read-hook", protocol=PullWeightsPreRead, side="rollout"),
)
"""Every plug-in flag, in the order in which a step uses them."""


def add_hook_arguments(parser: argparse.ArgumentParser) -> None:
    """Add one flag per row of ``HOOKS`` to ``parser``."""
    group = parser.add_argument_group(
        "plug-ins", "Your own code, by import path package.module.attribute. Contracts: slime/flags/hooks.py."
    )
    group.add_argument(
        "--plugin-import-timeout-s",
        type=wait_s,
        default=IMPORT_TIMEOUT_S,
        help="Seconds that importing a plug-in's module may take before the run ends with an error that names it.",
    )
    for hook in HOOKS:
        if hook.repeatable:
            group.add_argument(
                hook.flag, action="append", type=file_path, metavar="PATH", help=f"{purpose(hook)} May be repeated."
            )
        else:
            group.add_argument(hook.flag, default=hook.default, type=file_path, metavar="PATH", help=purpose(hook))


def purpose(hook: Hook) -> str:
    """Return the first sentence of the protocol's docstring, escaped for argparse."""
    first_line = (inspect.getdoc(hook.protocol) or "").splitlines()[0]
    return first_line.replace("%", "%%")


def derive_hook_lists(args: Namespace) -> None:
    """Turn the values of repeatable hooks into lists."""
    args.rollout_sample_hook_path = args.rollout_sample_hook_path or []


GROUP = FlagGroup(add_hook_arguments, derive=(derive_hook_lists,))
