"""Loss masks of conversations: only tokens that the assistant would have generated are trained on.

``MultiTurnLossMaskGenerator(tokenizer, type).get_loss_mask(messages)`` returns token ids and a mask of equal length.
The types differ in how a conversation becomes text:

* ``qwen``: every message is rendered separately and the pieces are joined.
* ``qwen3``: the same, but next to a dummy user message, so that the template treats each assistant message as the
  newest and keeps its thinking (including an empty ``<think>`` block).
* ``qwen3_5``: the conversation is rendered once, and assistant turns are found in the text.
* ``distill_qwen``: the first message is the prompt, the last one the response.
* ``any``: the conversation is rendered once, with any family's template; a second rendering, with marks around the
  assistant's words, tells where its turns are.

In the first three, the end-of-turn token and the newline after it are trained on, but not the turn's header.  In the
last one, whatever ends a turn is trained on: the template's end token, else the token that begins the next turn, else
eos.
"""

from __future__ import annotations

import functools
import itertools
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from slime.utils.chat_template import apply_chat_template, special_texts, template_messages
from slime.utils.errors import ConfigError, DataError

logger = logging.getLogger(__name__)

Message = dict[str, Any]
TokensAndMask = tuple[list[int], list[int]]

TURN_BEGIN = "<|im_start|>assistant\n"
TURN_END = "<|im_end|>"
THINK_BEGIN = "<think>\n"
DISTILL_ASSISTANT_TOKEN = "<\uff5cAssistant\uff5c>"
_FITS_ALL = "--loss-mask-type any fits the template of every family."
_DUMMY: Message = {"role": "user", "content": "FOR TESTING ONLY"}


def get_response_lengths(loss_masks: Sequence[Sequence[int]]) -> list[int]:
    """Return, for each mask, the number of tokens from the first 1 to the end; 0 if there is no 1."""
    return [len(mask) - list(mask).index(1) if 1 in mask else 0 for mask in loss_masks]


class MultiTurnLossMaskGenerator:
    """Computes token ids and loss masks of conversations with one tokenizer and one type.

    Invariant: ids and mask have equal length; a mask is 1 only inside assistant turns whose ``step_loss_mask`` is
    absent or 1.
    """

    def __init__(
        self, tokenizer: Any, tokenizer_type: str = "qwen", *, template_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self.template_kwargs = dict(template_kwargs or {})
        self.tokenizer_type = tokenizer_type
        generators: dict[str, Callable[..., TokensAndMask]] = {
            "qwen": self.gen_multi_turn_loss_mask_qwen,
            "qwen3": self.gen_multi_turn_loss_mask_qwen3,
            "qwen3_5": self.gen_multi_turn_loss_mask_qwen3_5,
            "distill_qwen": self.gen_multi_turn_loss_mask_distill_qwen,
            "any": self.gen_multi_turn_loss_mask_any,
        }
        if tokenizer_type not in generators:
            raise ConfigError(f"--loss-mask-type is {tokenizer_type!r}; it must be one of {', '.join(generators)}.")
        if tokenizer_type == "qwen" and DISTILL_ASSISTANT_TOKEN in _added_tokens(tokenizer):
            tokenizer_type = "distill_qwen"
        self._generate = generators[tokenizer_type]
        self._is_any = tokenizer_type == "any"
        self._has_warned = False

    def get_loss_mask(self, messages: list[Message], tools: list[Any] | None = None) -> TokensAndMask:
        """Return ``(token_ids, loss_mask)`` of a conversation.

        Args:
            messages: chat messages; a ``step_loss_mask`` other than 1 masks that message.
            tools: tool descriptions for the template.

        Raises:
            DataError: the template's rendering cannot be split in the way that the type requires.
        """
        if not messages:
            raise DataError("A conversation without messages has no loss mask.")
        try:
            ids, mask = self._generate(messages, tools)
        except DataError as error:
            raise error if self._is_any else DataError(f"{error} {_FITS_ALL}") from error
        ends = (self.tokenizer.decode(ids[begin:end]).rstrip() for begin, end in _runs(mask))
        marks = tuple(special_texts(self.tokenizer))
        if not self._has_warned and not all(text.endswith(marks) for text in ends):
            self._has_warned = True
            logger.warning(
                "With --loss-mask-type %s the end of an answer is not trained on, so the model does not learn to "
                "stop: no special token ends an assistant turn. %s",
                self.tokenizer_type,
                _FITS_ALL,
            )
        return ids, mask

    def get_response_lengths(self, loss_masks: Sequence[Sequence[int]]) -> list[int]:
        return get_response_lengths(loss_masks)

    def get_text_from_loss_mask(self, token_ids: Sequence[int], loss_mask: Sequence[int]) -> list[str]:
        """Return the decoded texts of the trained spans."""
        return [self.tokenizer.decode(list(token_ids[begin:end])) for begin, end in _runs(loss_mask)]

    def get_loss_mask_with_multimodal_alignment(
        self, messages: list[Message], input_ids: Sequence[int], tools: list[Any] | None = None
    ) -> TokensAndMask:
        """Return ``(input_ids, loss_mask)`` for ``input_ids`` from a processor that expanded images into tokens.

        Assistant turns contain no images, so each is found in ``input_ids`` with its header, in order.
        """
        texts = [_text_only(message) for message in messages]
        text_ids, text_mask = self.get_loss_mask(texts, tools)
        steps = [message for message in messages if message["role"] == "assistant"]
        header_length = len(self._encode(self._generation_prompt()))
        ids = list(input_ids)
        if self._is_any and text_mask[-1:] == [1] and text_ids[-1] != ids[-1] == text_ids[-2]:
            ids.append(text_ids[-1])  # eos, if the template does not end turns
        mask = [0] * len(ids)
        cursor = 0
        for (begin, end), message in zip(_runs(text_mask), steps, strict=True):
            needle = text_ids[max(0, begin - header_length) : end]
            found = _find(ids, needle, cursor)
            if found < 0:
                raise DataError(f"The assistant's turn {self.tokenizer.decode(needle)!r} is not in the input ids.")
            cursor = found + len(needle)
            mask[cursor - (end - begin) : cursor] = [_step_mask(message)] * (end - begin)
        return ids, mask

    def gen_multi_turn_loss_mask_qwen(self, messages: list[Message], tools: list[Any] | None = None) -> TokensAndMask:
        """Render each message separately, without the implicit system block that the template prepends."""
        implied = self._implied_system_text()

        def text_of(unit: list[Message], is_first: bool) -> str:
            text = self.render(unit, tools if is_first else None)
            if is_first or unit[0]["role"] == "system":
                return text
            return _without_prefix(text, implied, unit)

        return self._join_units(messages, text_of)

    def gen_multi_turn_loss_mask_qwen3(self, messages: list[Message], tools: list[Any] | None = None) -> TokensAndMask:
        """Render each message as the newest: the first one before a dummy user message, the others after one."""
        dummy_text = self.render([_DUMMY])
        dummy_tail = _without_prefix(self.render([_DUMMY, _DUMMY]), dummy_text, [_DUMMY])

        def text_of(unit: list[Message], is_first: bool) -> str:
            if not is_first:
                return _without_prefix(self.render([_DUMMY, *unit]), dummy_text, unit)
            text = self.render([*unit, _DUMMY], tools)
            if not text.endswith(dummy_tail):
                raise DataError(f"The chat template renders {unit[0]['role']!r} messages that depend on later ones.")
            return text.removesuffix(dummy_tail)

        return self._join_units(messages, text_of)

    def gen_multi_turn_loss_mask_qwen3_5(
        self, messages: list[Message], tools: list[Any] | None = None
    ) -> TokensAndMask:
        """Render the conversation once; tokens entirely inside an assistant turn are trained on."""
        text = self.render(messages, tools)
        steps = [_step_mask(message) for message in messages if message["role"] == "assistant"]
        written = self._generation_prompt().removeprefix(TURN_BEGIN) if self.template_kwargs else THINK_BEGIN
        spans = _assistant_spans(text, written)
        if len(spans) != len(steps):
            raise DataError(
                f"The rendered conversation has {len(spans)} assistant turns for {len(steps)} assistant messages; "
                f"{TURN_BEGIN!r} must begin exactly those."
            )
        return self._mask_of_spans(text, [span for span, step in zip(spans, steps, strict=True) if step])

    def gen_multi_turn_loss_mask_any(self, messages: list[Message], tools: list[Any] | None = None) -> TokensAndMask:
        """Render the conversation, find assistant turns with a second rendering, and train on each with its end."""
        text = self.render(messages, tools)
        steps = [_step_mask(message) for message in messages if message["role"] == "assistant"]
        spans = _MarkedTurns(self, messages, tools).spans(text) if steps else []
        ids, mask = self._mask_of_spans(text, [span for span, step in zip(spans, steps, strict=True) if step])
        eos = self.tokenizer.eos_token_id
        if messages[-1]["role"] == "assistant" and eos is not None:
            if not text[slice(*spans[-1])].rstrip().endswith(tuple(special_texts(self.tokenizer))):
                return [*ids, eos], [*mask, steps[-1]]
        return ids, mask

    def _mask_of_spans(self, text: str, trained: list[tuple[int, int]]) -> TokensAndMask:
        if not getattr(self.tokenizer, "is_fast", False):
            return self._mask_without_offsets(text, trained)
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        mask = [0] * len(encoded["input_ids"])
        for index, (begin, end) in enumerate(encoded["offset_mapping"]):
            mask[index] = int(end > begin and any(first <= begin and end <= last for first, last in trained))
        return list(encoded["input_ids"]), mask

    def _mask_without_offsets(self, text: str, trained: list[tuple[int, int]]) -> TokensAndMask:
        """Find the tokens of character spans with a tokenizer that does not report offsets.

        The token prefix that the whole text shares with its characters before a position ends before that position;
        the token suffix that it shares with the characters after the position begins after it.
        """
        token_ids = self._encode(text)
        mask = [0] * len(token_ids)
        for first, last in trained:
            begin = len(token_ids) - common_length(token_ids[::-1], self._encode(text[first:])[::-1])
            end = common_length(token_ids, self._encode(text[:last]))
            mask[begin:end] = [1] * (end - begin)
        return token_ids, mask

    def gen_multi_turn_loss_mask_distill_qwen(
        self, messages: list[Message], tools: list[Any] | None = None
    ) -> TokensAndMask:
        """Render the first message with the generation prompt, masked, then the content of the last one."""
        prompt_ids = self._encode(self.render(messages[:1], tools, add_generation_prompt=True))
        response_ids = self._encode(messages[-1]["content"])
        trained = _step_mask(messages[-1]) if messages[-1]["role"] == "assistant" else 0
        return prompt_ids + response_ids, [0] * len(prompt_ids) + [trained] * len(response_ids)

    def _join_units(self, messages: list[Message], text_of: Callable[[list[Message], bool], str]) -> TokensAndMask:
        """Join the pieces' ids and masks; ChatML's turn marks guarantee token boundaries at the seams."""
        prompt_ids = self._encode(self._generation_prompt())
        token_ids: list[int] = []
        loss_mask: list[int] = []
        for number, unit in enumerate(_units(messages)):
            unit_ids = self._encode(text_of(unit, number == 0))
            token_ids += unit_ids
            if unit[0]["role"] == "assistant":
                header = common_length(prompt_ids, unit_ids) if number else _header_end(unit_ids, prompt_ids)
                loss_mask += [0] * header + [_step_mask(unit[0])] * (len(unit_ids) - header)
            else:
                loss_mask += [0] * len(unit_ids)
        return token_ids, loss_mask

    def _implied_system_text(self) -> str:
        """Return the text that the template prepends to a conversation without a system message."""
        one, two = self.render([_DUMMY]), self.render([_DUMMY, _DUMMY])
        return one[: 2 * len(one) - len(two)]

    def _generation_prompt(self) -> str:
        return _without_prefix(self.render([_DUMMY], add_generation_prompt=True), self.render([_DUMMY]), [_DUMMY])

    def render(
        self, messages: list[Message], tools: list[Any] | None = None, add_generation_prompt: bool = False
    ) -> str:
        shown = {"tools": tools, **self.template_kwargs, "add_generation_prompt": add_generation_prompt}
        return apply_chat_template(self.tokenizer, messages, **shown)

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])


class _MarkedTurns:
    """Finds a conversation's assistant turns by rendering it with marks in place of the assistant's words.

    The text between two marks occurs in both renderings: the end of a turn, the messages after it, and the header of
    the next turn.  End and header are determined from renderings of the conversation up to a turn.
    """

    def __init__(self, generator: MultiTurnLossMaskGenerator, messages: list[Message], tools: Any) -> None:
        self._render = functools.partial(generator.render, tools=tools)
        self._special = special_texts(generator.tokenizer)
        marks = "|".join(map(re.escape, self._special))
        self._piece = re.compile(rf"({marks}{'|' if marks else ''}<[^<>\n]*>|\n)")
        self._messages = [_marked(message, number) for number, message in enumerate(messages)]
        self._turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        self._known: dict[tuple[str, Any], Any] = {}

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Return ``[begin, end)`` characters of each turn in ``text``, the rendered conversation.

        Raises:
            DataError: the template omits a turn, or the text around turns depends on the turns' words.
        """
        other, between, position = self._render(self._messages), [], 0
        for turn in self._turns:
            mark = _mark(turn)
            if mark not in other:
                raise DataError(f"The chat template omits message {turn}, an assistant turn.")
            between.append(other[position : other.find(mark)])
            position = other.rfind(mark) + len(mark)
        between.append(other[position:])
        spans, begin = [], 0
        for number, shown in enumerate(between):
            end = self._end_of(self._turns[number - 1], shown) if number else (0, 0)
            is_last = number == len(self._turns)
            stop = len(shown) if is_last else self._header_end(self._turns[number], shown)
            around = shown[end[0] : stop]
            at = len(text) - len(around) if is_last else text.find(around, begin)
            if not text.startswith(around, at) or at < begin or (at and not number):
                raise DataError(f"The chat template renders {around!r} differently after other assistant words.")
            if number:
                spans.append((begin, at + end[1] - end[0]))
            begin = at + len(around)
        return spans

    def _header_end(self, turn: int, shown: str) -> int:
        """Return where a turn's header ends, in the text before the turn's words."""
        before = self._messages[:turn] or [_DUMMY]
        role = before[-1]["role"]
        if ("header", role) not in self._known:
            mark = _mark(turn - 1)
            asked = [*before[:-1], before[-1] if role == "assistant" else _ended_by(before[-1], mark)]
            header = self._render(asked, add_generation_prompt=True).rpartition(mark)[2]
            self._known["header", role] = [piece for piece in self._piece.split(header) if piece]
        pieces = self._known["header", role]
        for first, last in itertools.product(range(len(pieces)), range(len(pieces), 0, -1)):
            found = "".join(pieces[first:last])
            if found and found in shown:  # a prompt may open a thought that later renderings omit
                return shown.rfind(found) + len(found)
        return len(shown)

    def _end_of(self, turn: int, shown: str) -> tuple[int, int]:
        """Return ``[begin, end)`` of what ends a turn, in the text after its words; an empty range if nothing does."""
        message, mark = self._messages[turn], _mark(turn)
        key = "end", bool(message.get("tool_calls"))
        if key not in self._known:
            plain = [*self._messages[:turn], {"role": "assistant", "content": mark}]
            closed = [self._render(turns).rpartition(mark)[2] for turns in (plain, self._messages[: turn + 1])]
            self._known[key] = any(mark in closed[0] for mark in self._special), self._piece.split(closed[1])
        ends_turns, closing = self._known[key]
        pieces = self._piece.split(shown)
        same = [piece for piece, other in itertools.takewhile(lambda two: two[0] == two[1], zip(pieces, closing))]
        own = [number for number, piece in enumerate(same) if piece in self._special] if ends_turns else []
        found = own[-1:] or [n for n, piece in enumerate(pieces) if n >= len(same) and piece in self._special][:1]
        if not found:
            return len("".join(same)), len("".join(same))
        begin = len("".join(pieces[: found[0]]))
        return begin, begin + len(pieces[found[0]])


def _mark(turn: int) -> str:
    """Return a stand-in for a turn's words that no template changes and no conversation contains."""
    return f"\u2063{turn}\u2063"


def _marked(message: Message, number: int) -> Message:
    if message["role"] != "assistant":
        return message
    mark = _mark(number)
    [marked] = template_messages([message], lambda _: {mark: mark})
    if message.get("content") or not message.get("tool_calls"):
        marked["content"] = mark
    reasoning = (key for key in ("reasoning_content", "reasoning", "thinking") if message.get(key))
    return {**marked, **dict.fromkeys(reasoning, mark)}


def _ended_by(message: Message, mark: str) -> Message:
    content = message.get("content")
    if isinstance(content, list):
        return {**message, "content": [*content, {"type": "text", "text": mark}]}
    return {**message, "content": f"{content}{mark}" if isinstance(content, str) else mark}


def _units(messages: list[Message]) -> list[list[Message]]:
    """Group messages: adjacent tool messages together, because templates put them into one turn; others singly."""
    units: list[list[Message]] = []
    for message in messages:
        if units and message["role"] == "tool" and units[-1][0]["role"] == "tool":
            units[-1].append(message)
        else:
            units.append([message])
    return units


def _step_mask(message: Message) -> int:
    # None occurs in a parquet column that only other messages fill.
    return int(message.get("step_loss_mask") in (None, 1))


def _added_tokens(tokenizer: Any) -> Any:
    return tokenizer.get_added_vocab() if hasattr(tokenizer, "get_added_vocab") else {}


def _without_prefix(text: str, prefix: str, unit: list[Message]) -> str:
    if not text.startswith(prefix):
        raise DataError(
            f"The chat template renders a {unit[0]['role']!r} message differently after other messages; "
            "--loss-mask-type qwen3_5 renders the conversation as a whole."
        )
    return text[len(prefix) :]


def common_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the number of leading ids that two lists share."""
    low, high = 0, min(len(first), len(second))
    if first[:high] == second[:high]:
        return high
    while high - low > 1:  # invariant: the first ``low`` ids agree, the first ``high`` do not
        middle = (low + high) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle
    return low


def _header_end(ids: list[int], header: list[int]) -> int:
    """Return the end of the assistant's header in a conversation's first turn, which may follow a system block."""
    found = _find(ids, header, 0)
    return found + len(header) if found >= 0 else common_length(header, ids)


def _find(ids: list[int], needle: list[int], start: int) -> int:
    last = len(ids) - len(needle)
    return next((i for i in range(start, last + 1) if ids[i : i + len(needle)] == needle), -1)


def _runs(mask: Sequence[int]) -> list[tuple[int, int]]:
    edges = [i for i in range(len(mask) + 1) if (mask[i] if i < len(mask) else 0) != (mask[i - 1] if i else 0)]
    return list(zip(edges[::2], edges[1::2], strict=True))


def _assistant_spans(text: str, written: str) -> list[tuple[int, int]]:
    """Return ``[begin, end)`` characters of what the assistant generates in each turn.

    Args:
        written: what a prompt contains after a turn's header, such as an opened or empty thought.
    """
    spans = []
    header = text.find(TURN_BEGIN)
    while header >= 0:
        begin = header + len(TURN_BEGIN)
        opened = next((part for part in (written, THINK_BEGIN) if part and text.startswith(part, begin)), "")
        begin += len(opened)
        end = text.find(TURN_END, begin)
        if end < 0:
            raise DataError(f"An assistant turn has no {TURN_END!r}: {text[header : header + 80]!r}.")
        end += len(TURN_END)
        end += text.startswith("\n", end)
        spans.append((begin, end))
        header = text.find(TURN_BEGIN, end)
    return spans


def _text_only(message: Message) -> Message:
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(part if isinstance(part, str) else part.get("text", "") for part in content)
    return {**{key: value for key, value in message.items() if key != "step_loss_mask"}, "content": content}
