"""The data types of a rollout: ``Sample`` and related types.

A sample is made from a data row (``prompt``, ``label``, ``metadata``), grows in calls to an engine through
``append_response_tokens``, gets a ``reward``, and is turned into columns of train data.  A *group* is the
``list[Sample]`` of one prompt.
"""

from __future__ import annotations

import functools
import logging
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, NamedTuple

import torch

from slime.utils import sglang_meta
from slime.utils.errors import DataError
from slime.utils.misc import copy_plain
from slime.utils.sglang_meta import SamplePrefixCacheInfo, SampleSpecInfo

logger = logging.getLogger(__name__)

RolloutBatch = dict[str, Any]
"""Train data by column: ``name -> one entry per sample``; a plain dict, as hooks expect."""


class SampleStatus(Enum):
    """The states of a sample."""

    PENDING = "pending"
    """Not generated yet."""
    COMPLETED = "completed"
    """Ended at a stop token or string."""
    TRUNCATED = "truncated"
    """Truncated at the length limit."""
    ABORTED = "aborted"
    """Aborted by slime before its end; its tokens can be continued."""
    FAILED = "failed"
    """Has no usable response, for a reason outside the policy."""


STATUS_OF_FINISH_REASON = {
    "stop": SampleStatus.COMPLETED,
    "length": SampleStatus.TRUNCATED,
    "abort": SampleStatus.ABORTED,
}


def _status_of(value: Any) -> SampleStatus:
    """Return ``value`` as a status; accepts a status or its text.

    Raises:
        DataError: it is neither.
    """
    try:
        return SampleStatus(value)
    except ValueError as error:
        allowed = ", ".join(status.value for status in SampleStatus)
        raise DataError(
            f"A sample's status is {value!r}; it must be one of {allowed}, as Sample.Status or as text."
        ) from error


class _StatusField:
    """Descriptor of ``Sample.status``: converts text to the status of that name and refuses anything else."""

    def __get__(self, sample: Any, owner: type) -> SampleStatus:
        return SampleStatus.PENDING if sample is None else sample.__dict__["status"]  # on the class: the default

    def __set__(self, sample: Any, value: SampleStatus | str) -> None:
        sample.__dict__["status"] = value if type(value) is SampleStatus else _status_of(value)


@dataclass
class Sample:
    """One prompt and one response.

    Invariants, checked by ``append_response_tokens``: ``tokens`` is prompt then response;
    ``len(loss_mask) == len(rollout_log_probs) == response_length`` where they are set.
    Example: prompt ids [5, 6], response ids [7, 8] gives ``tokens=[5, 6, 7, 8]``, ``response_length=2``,
    ``loss_mask=[1, 1]``, ``rollout_log_probs=[-0.1, -0.2]``.  Further attributes may be set; they survive
    ``to_dict`` and ``from_dict``.
    """

    Status = SampleStatus
    SpecInfo = SampleSpecInfo
    PrefixCacheInfo = SamplePrefixCacheInfo

    group_index: int | None = None
    """Number of the prompt group; increases over the whole run."""
    index: int | None = None
    """Number of the sample; increases over the whole run, and is the sort key within every rollout."""
    rollout_id: int | None = None
    """Execution that produced the sample; samples of one execution share it. None: the execution has one sample."""
    prompt: str | list[dict[str, Any]] = ""
    """Rendered text, or chat messages."""
    tokens: list[int] = field(default_factory=list)
    """Token ids of prompt and response."""
    multimodal_inputs: dict[str, Any] | None = None
    """Raw ``{"images": [...], "videos": [...]}``."""
    multimodal_train_inputs: dict[str, Any] | None = None
    """The processor's outputs for the trainer, such as ``pixel_values``."""
    multimodal_train_input_id: str | None = None
    """Samples with equal ids have equal ``multimodal_train_inputs``."""
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    response: str = ""
    response_length: int = 0
    """Number of trailing tokens that form the response, including those of tools and environments."""
    label: str | None = None
    """Ground truth, for the reward."""
    reward: float | dict[str, Any] | None = None
    loss_mask: list[int] | None = None
    """1 for each response token that is trained on. None: all are."""
    weight_versions: list[str] = field(default_factory=list)
    """Weight version of the engine, one entry per engine call."""
    rollout_log_probs: list[float] | None = None
    """Log-prob in nats of each response token under the engine that sampled it; 0.0 for tokens not sampled."""
    rollout_top_p_token_ids: Any = None
    """int32, flat: the ids from which each response token was sampled, if top-p is below 1."""
    rollout_top_p_token_offsets: Any = None
    """int32 [response_length + 1] into ``rollout_top_p_token_ids``."""
    rollout_routed_experts: Any = None
    """int32 [len(tokens) - 1, num_layers, top_k]: experts to which the engine routed each position."""
    remove_sample: bool = False
    """True if the sample takes part in reward normalization but is not trained on."""
    teacher_log_probs: list[float] | None = None
    status: _StatusField = _StatusField()
    """A ``Sample.Status``; may also be set as text."""
    metadata: dict[str, Any] = field(default_factory=dict)
    generate_function_path: str | None = None
    """Generate function of this sample; overrides ``--custom-generate-function-path``."""
    custom_rm_path: str | None = None
    """Reward function of this sample; overrides ``--custom-rm-path``.  "" selects a built-in grader."""
    train_metadata: dict[str, Any] | None = None
    """Sent to the trainer as the column ``metadata``."""
    session_id: str | None = None
    """Routing key: equal keys go to the same engine under consistent hashing."""
    non_generation_time: float = 0.0
    """Seconds spent in tools and environments."""
    spec_info: SampleSpecInfo = field(default_factory=SampleSpecInfo)
    prefix_cache_info: SamplePrefixCacheInfo = field(default_factory=SamplePrefixCacheInfo)
    num_untrained_calls: int = field(default=0, init=False, repr=False, compare=False)
    """Number of leading entries of ``weight_versions`` whose tokens are not trained on."""

    def to_dict(self) -> dict[str, Any]:
        """Return a shallow dict of plain values, including additional attributes."""
        values = dict(self.__dict__)
        if not self.num_untrained_calls:
            values.pop("num_untrained_calls", None)
        return values | {
            "status": self.status.value,
            "spec_info": self.spec_info.to_dict(),
            "prefix_cache_info": self.prefix_cache_info.to_dict(),
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Sample:
        """Return a sample from the result of ``to_dict``; unknown keys become attributes.

        Raises:
            DataError: ``status`` is missing or is not one of ``Sample.Status``.
        """
        values = dict(data)
        values["status"] = _status_of(values.get("status"))
        for name, kind in (
            ("spec_info", SampleSpecInfo),
            ("prefix_cache_info", SamplePrefixCacheInfo),
        ):
            if isinstance(values.get(name), Mapping):
                values[name] = kind.from_dict(values[name])
        sample = Sample(**{name: values.pop(name) for name in _SAMPLE_FIELDS if name in values})
        sample.__dict__.update(values)
        return sample

    def __deepcopy__(self, memo: dict[int, Any]) -> Sample:
        """Return a deep copy.  Data sources make one for each sample of a group."""
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update({name: copy_plain(value, memo) for name, value in self.__dict__.items()})
        return twin

    def get_reward_value(self, args: Namespace) -> Any:
        """Return the reward, or its entry ``args.reward_key`` if that is set."""
        return self.reward[args.reward_key] if args.reward_key else self.reward  # type: ignore[index]

    @property
    def effective_response_length(self) -> int:
        """Number of response tokens that are trained on."""
        return self.response_length if self.loss_mask is None else sum(self.loss_mask)

    @property
    def is_graded(self) -> bool:
        """False if grading failed: the reward is then a placeholder, and the sample does not train.

        Such a sample is excluded from all reward statistics.
        """
        return not (self.remove_sample and self.status == SampleStatus.FAILED)

    def append_response_tokens(
        self,
        args: Namespace | None = None,
        *,
        tokens: Sequence[int] | None = None,
        log_probs: Sequence[float] | None = None,
        trainable: bool = True,
        meta_info: Mapping[str, Any] | None = None,
        text: str | None = None,
        update_terminal_info: bool = True,
    ) -> None:
        """Extend the response and every per-token field.  On an error, the sample is unchanged.

        Lists grow in place: holders of ``sample.tokens`` or ``sample.loss_mask`` see the new entries.

        Args:
            args: needed for routed experts (``num_layers``, ``moe_router_topk``) and speculative-decoding counts.
            log_probs: log-prob in nats of each new token; required for trainable tokens, refused for others.
            trainable: whether the policy drew the tokens.  Others (tool output) get mask 0 and log-prob 0.0.
            update_terminal_info: whether ``meta_info`` sets the status, weight version, and cache and speculation
                counts; pass False for all but the last chunk of a stream.

        Raises:
            ValueError: the arguments do not fit each other or the response so far.
        """
        new_tokens = None if tokens is None else _list_of(int, tokens)
        new_entries = self._new_entries(new_tokens, log_probs, trainable)
        replay: dict[str, Any] = {}
        if meta_info is not None:
            replay = self._grown_replay(args, meta_info, new_tokens or [])
        elif new_tokens:
            replay = self._grown_top_p(None, len(new_tokens))
        self._check_lengths(len(new_tokens or ()), new_entries, replay)

        for name, (earlier, new) in new_entries.items():
            earlier.extend(new)
            setattr(self, name, earlier)
        self.__dict__.update(replay)
        self.response_length += len(new_tokens or ())
        if text:
            self.response += text
        reason = (meta_info or {}).get("finish_reason")
        if update_terminal_info and reason and meta_info is not None:
            self.status = _status_of_finish_reason(reason) or self.status
            if getattr(args, "sglang_speculative_algorithm", None):
                self.spec_info.add(meta_info)
            self.prefix_cache_info.add(meta_info)
            if meta_info.get("weight_version") is not None:
                self.weight_versions.append(meta_info["weight_version"])

    def _new_entries(
        self, tokens: list[int] | None, log_probs: Sequence[float] | None, trainable: bool
    ) -> dict[str, tuple[list[Any], list[Any]]]:
        num_new = len(tokens or ())
        if log_probs is not None and not trainable:
            raise ValueError("log_probs were given for tokens with trainable=False; only sampled tokens have them.")
        if log_probs is not None and len(log_probs) != num_new:
            raise ValueError(f"{len(log_probs)} log_probs were given for {num_new} tokens; give one for each.")
        if trainable and num_new and log_probs is None:
            raise ValueError(f"{num_new} trainable tokens came without log_probs; pass them, or trainable=False.")
        if tokens is None:
            return {}
        earlier_log_probs = self.rollout_log_probs
        if earlier_log_probs is None:
            if trainable and num_new and self.response_length:
                raise ValueError(
                    f"the response has {self.response_length} tokens without rollout_log_probs; "
                    "trainable tokens cannot follow them."
                )
            earlier_log_probs = [0.0] * self.response_length
        earlier_mask = [1] * self.response_length if self.loss_mask is None else self.loss_mask
        new_log_probs = [0.0] * num_new if log_probs is None else _list_of(float, log_probs)
        return {
            "tokens": (_as_list(self.tokens), tokens),
            "loss_mask": (_as_list(earlier_mask), [int(trainable)] * num_new),
            "rollout_log_probs": (_as_list(earlier_log_probs), new_log_probs),
        }

    def _grown_top_p(self, new_spans: Any, num_new: int) -> dict[str, Any]:
        spans = None
        if self.rollout_top_p_token_offsets is not None:
            spans = self.rollout_top_p_token_ids, self.rollout_top_p_token_offsets
        elif new_spans is not None and self.effective_response_length:
            raise ValueError("top-p spans came for a response whose earlier trained tokens have none.")
        grown = sglang_meta.extend_top_p_spans(spans, new_spans, num_earlier=self.response_length, num_new=num_new)
        if grown is None:
            return {}
        return {"rollout_top_p_token_ids": grown[0], "rollout_top_p_token_offsets": grown[1]}

    def _grown_replay(self, args: Namespace | None, meta: Mapping[str, Any], tokens: list[int]) -> dict[str, Any]:
        grown = self._grown_top_p(sglang_meta.read_top_p_spans(meta, len(tokens)), len(tokens))
        if meta.get(sglang_meta.ROUTED_EXPERTS_KEY) is not None:
            if args is None:
                raise ValueError("meta_info has routed_experts; pass args for their num_layers and moe_router_topk.")
            grown["rollout_routed_experts"] = sglang_meta.read_routed_experts(
                meta,
                num_tokens=len(self.tokens) + len(tokens),
                num_layers=args.num_layers,
                top_k=args.moe_router_topk,
                earlier=self.rollout_routed_experts,
            )
        return grown

    def _check_lengths(
        self, num_new: int, new_entries: Mapping[str, tuple[list[Any], list[Any]]], replay: Mapping[str, Any]
    ) -> None:
        length = self.response_length + num_new
        after = {name: len(earlier) + len(new) for name, (earlier, new) in new_entries.items()}
        for name, extra in (("loss_mask", 0), ("rollout_log_probs", 0), ("rollout_top_p_token_offsets", 1)):
            value = replay.get(name, getattr(self, name))
            num_entries = after.get(name, None if value is None else len(value))
            if num_entries is not None and num_entries != length + extra:
                raise ValueError(
                    f"{name} would have {num_entries} entries for a response of {length} tokens; "
                    f"{length + extra} are needed."
                )


def _status_of_finish_reason(reason: Any) -> SampleStatus | None:
    kind = str(reason.get("type") if isinstance(reason, Mapping) else reason)
    if kind not in STATUS_OF_FINISH_REASON:
        _warn_of_finish_reason(kind)
    return STATUS_OF_FINISH_REASON.get(kind)


@functools.cache
def _warn_of_finish_reason(kind: str) -> None:
    message = (
        "An engine ended a response with finish_reason type %r, not stop, length or abort; its status is unchanged."
    )
    logger.warning(message, kind)


def _as_list(values: Any) -> list[Any]:
    """Return a list itself, so that it grows in place; convert anything else to a list."""
    return values if isinstance(values, list) else list(values)


def _list_of(kind: type, values: Sequence[Any]) -> list[Any]:
    """Return the values as a list of ``kind``; a list that already is one is returned unchanged.

    The check is the type of the sum: it reveals scalars of other libraries, and is faster than testing each type.
    """
    if isinstance(values, list) and not values:
        return values
    if isinstance(values, list) and type(values[0]) is kind and type(sum(values)) is kind:
        return values
    return [kind(value) for value in values]


_SAMPLE_FIELDS = tuple(spec.name for spec in fields(Sample) if spec.init)


@dataclass(frozen=True)
class ParamInfo:
    """A parameter, as described by one trainer rank to the others."""

    name: str
    dtype: torch.dtype
    shape: torch.Size
    attrs: dict[str, Any]
    """Tensor-parallel attributes that the gather needs."""
    size: int
    """Bytes on this rank."""
    src_rank: int
    """Global rank that holds the parameter."""


class MultimodalType(NamedTuple):
    """A kind of non-text input, and the placeholder of one item in a prompt."""

    name: str
    placeholder: str


class MultimodalTypes:
    """The kinds of non-text input."""

    IMAGE = MultimodalType("image", "<image>")
    VIDEO = MultimodalType("video", "<video>")
    AUDIO = MultimodalType("audio", "<audio>")

    @classmethod
    def all(cls) -> list[MultimodalType]:
        return [cls.IMAGE, cls.VIDEO, cls.AUDIO]

    @classmethod
    def get(cls, name: str) -> MultimodalType | None:
        """Return the kind of that name (``image`` or ``images``), or None."""
        return next((kind for kind in cls.all() if name in (kind.name, kind.name + "s")), None)
