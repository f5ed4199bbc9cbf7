"""Converts the turns of an agent to token-exact samples.

A *turn* is one call of the engine: prompt ids in, drawn ids out.  A *chain* is a sequence of turns in which each
prompt continues the ids of the previous turn; one chain becomes one sample.  Tokens between two drawn spans (tool
output, user messages, template headers) are observations with loss mask 0.

Invariant: every trained token of a sample is preceded by exactly the ids that the engine saw when it drew the token.
If a new prompt does not repeat the ids of its chain (the template dropped old reasoning, the client rewrote history),
the chain is cut back to the common prefix and continues from there, provided that this removes at most
``fork_threshold_tokens`` drawn tokens from training.  Otherwise the prompt starts a new chain and nothing is lost.
"""

from __future__ import annotations

import functools
import itertools
import json
import logging
import threading
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any, NamedTuple

from slime.utils.chat_template import call_arguments
from slime.utils.errors import DataError
from slime.utils.mask_utils import common_length
from slime.utils.processing_utils import join_images
from slime.utils.sglang_meta import ROUTED_EXPERTS_KEY, TOP_P_IDS_KEYS, TOP_P_OFFSETS_KEYS
from slime.utils.types import Sample

__all__ = [
    "DEFAULT_FORK_THRESHOLD_TOKENS",
    "KnownPrefix",
    "Pictures",
    "TrajectoryManager",
    "TurnRecord",
    "message_key",
]

logger = logging.getLogger(__name__)

Message = dict[str, Any]

DEFAULT_FORK_THRESHOLD_TOKENS = 1024
REPLAY_KEYS = frozenset({ROUTED_EXPERTS_KEY, *TOP_P_IDS_KEYS, *TOP_P_OFFSETS_KEYS})
"""Keys of meta_info with per-token values."""
_NO_MESSAGE = ""
"""Placeholder key for a missing message; no message has this key."""


class Pictures(NamedTuple):
    """Images that were processed in one call."""

    images: list[Any]
    """Opened images, in prompt order."""
    train_inputs: dict[str, Any]
    """The processor's outputs for the trainer, such as ``pixel_values``."""


@dataclass
class TurnRecord:
    """One call of the engine, or several calls that continued an aborted turn.

    Invariant: ``len(output_log_probs) == len(output_ids)``, and the counts of ``weight_spans`` sum to the same.
    """

    prompt_ids: list[int]
    output_ids: list[int]
    """Drawn ids, including the stop token."""
    finish_reason: str = "stop"
    """``stop``, ``length`` or ``abort``."""
    output_log_probs: list[float] = field(default_factory=list)
    """In nats, under the weights that drew each token."""
    text: str = ""
    """Text of the drawn ids; if empty, the adapter decodes them."""
    weight_spans: list[tuple[str | None, int]] = field(default_factory=list)
    """(weight version, number of tokens) of each call of the engine."""
    meta_infos: list[dict[str, Any]] = field(default_factory=list)
    """The engine's meta_info of each call, without the log-probs."""
    began_s: float = 0.0
    """Monotonic time in seconds; 0 if unknown."""
    ended_s: float = 0.0
    pictures: list[Pictures] = field(default_factory=list)
    """Images of the prompt."""

    def __post_init__(self) -> None:
        by_position = self.finish_reason, self.output_log_probs
        if not isinstance(by_position[0], str):  # positional callers pass these two in either order
            self.finish_reason, self.output_log_probs = str(by_position[1] or "stop"), by_position[0]
        if len(self.output_log_probs) != len(self.output_ids):
            raise DataError(
                f"A turn has {len(self.output_log_probs)} log-probs for {len(self.output_ids)} sampled tokens; "
                "each token needs one. Ask the engine with return_logprob."
            )
        if not self.weight_spans:
            self.weight_spans = [(None, len(self.output_ids))]
        if sum(count for _, count in self.weight_spans) != len(self.output_ids):
            raise DataError(f"weight_spans {self.weight_spans} do not cover {len(self.output_ids)} sampled tokens.")


@dataclass(frozen=True, kw_only=True)
class KnownPrefix:
    """The longest prefix of a conversation whose ids were recorded."""

    messages: list[Message]
    """The messages when the ids were recorded, including reasoning that clients do not send back."""
    ids: list[int]
    finish_reason: str
    pictures: list[Pictures] = field(default_factory=list)


def message_key(message: Mapping[str, Any]) -> str:
    """Return a key that is equal for messages with the same role, text and tool calls.

    Ids, reasoning and surrounding white space are ignored.
    """
    content = message.get("content") or ""
    text = content if isinstance(content, str) else json.dumps(content, sort_keys=True)
    calls = []
    for call in message.get("tool_calls") or []:
        function = call.get("function", call)
        calls.append([function.get("name"), call_arguments(function.get("arguments"))])
    said = json.dumps([message.get("role"), text.strip(), calls], sort_keys=True)
    return blake2b(
        said.encode(), digest_size=16
    ).hexdigest()  # hashed, because a history of 100 turns is stored 100 times


def _tools_key(tools: Sequence[Mapping[str, Any]] | None) -> str:
    written = sorted(json.dumps(tool, sort_keys=True, default=str) for tool in tools or ())
    return blake2b(json.dumps(written).encode(), digest_size=16).hexdigest()


@dataclass(kw_only=True)
class _State:
    messages: list[Message]
    keys: list[str]
    tools: str
    """Key of the tools that the prompt offers to the model."""
    end: int
    """Number of the chain's ids after this turn: prompt and drawn ids."""
    finish_reason: str
    pictures: list[Pictures]


class _Chain:
    """A sequence of turns that continue each other, as one growing sample."""

    def __init__(self, turn: TurnRecord, args: Namespace | None = None) -> None:
        self._args = args
        self.prompt_length = len(turn.prompt_ids)
        self.sample = Sample(tokens=list(turn.prompt_ids), loss_mask=[], rollout_log_probs=[])
        self.versions: list[str | None] = []
        """Weight version of each response token; None for tokens that were not drawn."""
        self.turns: list[TurnRecord] = []
        self.states: list[_State] = []
        self.metadata: list[dict[str, Any]] = []
        self.tokens_cut = 0
        """Number of drawn tokens that rewritten histories removed from training."""
        self._append(turn)

    @property
    def ids(self) -> list[int]:
        return self.sample.tokens

    def _append(self, turn: TurnRecord) -> None:
        metas = turn.meta_infos if len(turn.meta_infos) == len(turn.weight_spans) else [{}] * len(turn.weight_spans)
        begin = 0
        for meta, (version, count) in zip(metas, turn.weight_spans, strict=True):
            end = begin + count
            self.sample.append_response_tokens(
                self._args,
                tokens=turn.output_ids[begin:end],
                log_probs=turn.output_log_probs[begin:end],
                meta_info=meta,
                update_terminal_info=False,
            )
            self.versions += [version] * count
            begin = end
        # Drop values that the sample already holds, so that its turns do not store them again.
        facts = [{key: value for key, value in meta.items() if key not in REPLAY_KEYS} for meta in turn.meta_infos]
        self.turns.append(replace(turn, prompt_ids=[], meta_infos=facts))

    def extend(self, turn: TurnRecord, fork_threshold_tokens: int) -> bool:
        """Append ``turn``; return False without changing anything if it needs a new chain."""
        shared = common_length(self.ids, turn.prompt_ids)
        kept = shared - self.prompt_length
        if shared < len(self.ids):
            drawn_lost = sum((self.sample.loss_mask or [])[kept:]) if kept >= 0 else 0
            if kept < 0 or fork_threshold_tokens <= 0 or drawn_lost > fork_threshold_tokens:
                return False
            self.tokens_cut += drawn_lost
            self.cut(kept)
            self.states = [state for state in self.states if state.end <= shared]
        observation = turn.prompt_ids[shared:]
        self.sample.append_response_tokens(tokens=observation, trainable=False)
        self.versions += [None] * len(observation)
        self._append(turn)
        return True

    def cut(self, length: int) -> None:
        """Keep only the first ``length`` response tokens and their per-token values."""
        sample, total = self.sample, self.prompt_length + length
        del sample.tokens[total:], self.versions[length:]
        sample.response_length = length
        sample.loss_mask = (sample.loss_mask or [])[:length]
        sample.rollout_log_probs = (sample.rollout_log_probs or [])[:length]
        if sample.rollout_top_p_token_offsets is not None:
            sample.rollout_top_p_token_offsets = sample.rollout_top_p_token_offsets[: length + 1]
            count = int(sample.rollout_top_p_token_offsets[-1])
            sample.rollout_top_p_token_ids = sample.rollout_top_p_token_ids[:count]
        if sample.rollout_routed_experts is not None:
            sample.rollout_routed_experts = sample.rollout_routed_experts[: total - 1]

    def weight_spans(self) -> list[tuple[str, int, int]]:
        """Return (weight version, begin, end) of the drawn spans; positions are relative to the response."""
        spans: list[tuple[str, int, int]] = []
        for position, version in enumerate(self.versions):
            if version is None:
                continue
            if spans and spans[-1][0] == version and spans[-1][2] == position:
                spans[-1] = (version, spans[-1][1], position + 1)
            else:
                spans.append((version, position, position + 1))
        return spans

    def waiting_s(self) -> float:
        """Return the seconds between turns, which tools and environments took."""
        gaps = (b.began_s - a.ended_s for a, b in itertools.pairwise(self.turns) if a.ended_s)
        return sum(gap for gap in gaps if gap > 0)


class TrajectoryManager:
    """Records the turns of agent sessions and converts them to samples.  Thread-safe.

    Args:
        fork_threshold_tokens: Drawn tokens that one rewritten prompt may remove from training; if it would remove
            more, it starts a new chain.  0: every rewritten prompt starts a new chain.
        args: The job's arguments, needed for routing replay: ``num_layers`` and ``moe_router_topk``.
    """

    def __init__(self, *, fork_threshold_tokens: int | None = None, args: Namespace | None = None) -> None:
        if fork_threshold_tokens is None:
            fork_threshold_tokens = DEFAULT_FORK_THRESHOLD_TOKENS
        self.fork_threshold_tokens = fork_threshold_tokens
        self._args = args
        self._chains: dict[str, list[_Chain]] = {}
        self._lock = threading.Lock()

    def record_turn(
        self,
        sid: str,
        *,
        turn: TurnRecord,
        prompt_messages: Sequence[Message],
        response_message: Message | None = None,
        metadata: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        """Record one turn.

        Args:
            response_message: Assistant message parsed from the drawn ids; None if there is none, and the next turn is
                then recognized by its ids only.
            metadata: Facts about the turn; ``use_tool``, ``ill_formed`` and ``truncated`` reach the sample.
        """
        messages = list(prompt_messages)
        keys = [message_key(message) for message in messages]
        if response_message is not None:
            messages.append(response_message)
        keys.append(_NO_MESSAGE if response_message is None else message_key(response_message))
        shown = _tools_key(tools)
        with self._lock:
            chains = self._chains.setdefault(sid, [])
            chain = self._chain_before(chains, turn, keys[:-1], shown)
            if chain is None or not chain.extend(turn, self.fork_threshold_tokens):
                chain = _Chain(turn, self._args)
                chains.append(chain)
            state = _State(
                messages=messages,
                keys=keys,
                tools=shown,
                end=len(chain.ids),
                finish_reason=turn.finish_reason,
                pictures=turn.pictures,
            )
            chain.states.append(state)
            chain.metadata.append(dict(metadata or {}))

    @staticmethod
    def _chain_before(chains: list[_Chain], turn: TurnRecord, keys: list[str], tools: str) -> _Chain | None:
        """Find the chain whose conversation the turn continues, by its messages or else by its exact ids."""
        said = [c for c in chains if keys[: len(c.states[-1].keys)] == c.states[-1].keys]
        # Prefer a chain with the same tools: its ids match.  A chain with other tools may be longer and would be cut.
        said = [c for c in said if c.states[-1].tools == tools] or said
        if said:
            # Two chains with equal messages (a request sent twice) differ in their ids.
            return max(said, key=lambda c: (len(c.states[-1].keys), common_length(c.ids, turn.prompt_ids)))
        same = [c for c in chains if turn.prompt_ids[: len(c.ids)] == c.ids]
        return max(same, key=lambda c: len(c.ids), default=None)

    def known_prefix(
        self, sid: str, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> KnownPrefix | None:
        """Return the longest prefix of ``messages`` that ends with a recorded turn of this session with the same
        ``tools``; None if there is none.
        """
        shown = _tools_key(tools)
        with self._lock:
            found = [pair for pair in self._states_before(sid, messages) if pair[1].tools == shown]
            if not found:
                return None
            chain, best = max(reversed(found), key=lambda pair: len(pair[1].keys))
            ids = chain.ids[: best.end]
            return KnownPrefix(
                messages=list(best.messages), ids=ids, finish_reason=best.finish_reason, pictures=best.pictures
            )

    def with_reasoning(
        self, sid: str, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[Message]:
        """Return ``messages`` with the reasoning of this session's turns restored, which clients do not send back.

        If two recorded turns match, the one with the same ``tools`` is used.
        """
        shown = _tools_key(tools)
        with self._lock:
            found = [state for _, state in self._states_before(sid, messages)]
        best = max(reversed(found), key=lambda state: (len(state.keys), state.tools == shown), default=None)
        known = [] if best is None else best.messages
        return [*known, *messages[len(known) :]]

    def _states_before(self, sid: str, messages: Sequence[Message]) -> list[tuple[_Chain, _State]]:
        keys = [message_key(message) for message in messages]
        states = [(chain, state) for chain in self._chains.get(sid, []) for state in chain.states]
        return [(chain, state) for chain, state in states if keys[: len(state.keys)] == state.keys]

    def get_trajectory(
        self,
        sid: str,
        *,
        base_sample: Sample,
        reward: float | dict[str, Any] = 0.0,
        extra_metadata: Mapping[str, Any] | None = None,
        max_sample_tokens: int = 0,
        mask_off_policy: bool = False,
    ) -> list[Sample]:
        """Remove the session and return its samples, one per chain, in the order in which the chains began.

        Samples without trained tokens are left out.  Each sample gets the full ``reward`` and the base sample's
        ``rollout_id``, so the trainer counts them as one execution.  Their status is COMPLETED;
        ``metadata["truncated"]`` is True if a limit ended them.

        Args:
            sid: Session id; an unknown session has no samples.
            base_sample: Source of index, group_index, prompt, label and the plug-ins of its data set.
            max_sample_tokens: Cut samples to this many tokens, including the prompt; 0: no limit.
            mask_off_policy: Train only tokens drawn under the newest weight version of their sample.
        """
        with self._lock:
            chains = self._chains.pop(sid, [])
            samples = [_sample_of(chain, base_sample, max_sample_tokens, mask_off_policy) for chain in chains]
            cut = sum(chain.tokens_cut for chain in chains)
        if cut:
            logger.info("Session %s: rewritten histories removed %d sampled tokens from training.", sid, cut)
        kept = [sample for sample in samples if sample.effective_response_length]
        for sample in kept:
            sample.reward = reward
            sample.metadata = {**(extra_metadata or {}), **sample.metadata}
        return kept

    def has_session(self, sid: str) -> bool:
        """Return True if a turn of ``sid`` was recorded."""
        return sid in self._chains

    def turn_count(self, sid: str) -> int:
        with self._lock:
            return sum(len(chain.turns) for chain in self._chains.get(sid, []))

    def drop_session(self, sid: str) -> None:
        with self._lock:
            self._chains.pop(sid, None)


def _sample_of(chain: _Chain, base: Sample, max_tokens: int, mask_off_policy: bool) -> Sample:
    sample, last = chain.sample, chain.turns[-1]
    is_cut = max_tokens > 0 and len(sample.tokens) > max_tokens
    if is_cut:
        chain.cut(max(0, max_tokens - chain.prompt_length))
    spans = chain.weight_spans()
    if mask_off_policy and spans:
        newest, mask = spans[-1][0], sample.loss_mask or []
        sample.loss_mask = [int(on and version == newest) for on, version in zip(mask, chain.versions, strict=True)]
    sample = replace(
        sample,
        group_index=base.group_index,
        index=base.index,
        rollout_id=base.index if base.rollout_id is None else base.rollout_id,
        prompt=base.prompt,
        label=base.label,
        response="".join(turn.text for turn in chain.turns),
        status=Sample.Status.COMPLETED,
        train_metadata=base.train_metadata,
        session_id=base.session_id,
        generate_function_path=base.generate_function_path,
        custom_rm_path=base.custom_rm_path,
        non_generation_time=chain.waiting_s(),
        metadata={
            "truncated": is_cut
            or last.finish_reason == "length"
            or any(facts.get("truncated") for facts in chain.metadata),
            "use_tool": any(facts.get("use_tool") for facts in chain.metadata),
            "ill_formed": any(facts.get("ill_formed") for facts in chain.metadata),
            "weight_spans": spans,
            "num_turns": len(chain.turns),
        },
    )
    if last.pictures:
        sample.multimodal_inputs = {"images": [image for part in last.pictures for image in part.images]}
        parts = (part.train_inputs for part in last.pictures)
        sample.multimodal_train_inputs = functools.reduce(join_images, parts)
    for turn in chain.turns:
        sample.weight_versions += [version for version, _ in turn.weight_spans if version is not None]
        for meta_info in turn.meta_infos:
            sample.prefix_cache_info.add(meta_info)
            sample.spec_info.add(meta_info)
    return sample
