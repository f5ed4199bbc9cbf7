"""The prompt of an agent's next turn, token-exact.

A chat template knows text only: encoding a rendered conversation again may split the model's own words differently
from how they were drawn.  So where a conversation goes on from ids that were written down, those ids stay, and only
what the template puts after them is encoded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from slime.agent.trajectory import KnownPrefix, Message

_PROBE = "\u2063probe\u2063"
"""Content that no template changes and no conversation has."""


def render(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None,
    *,
    add_generation_prompt: bool,
    template_kwargs: Mapping[str, Any] | None = None,
) -> str:
    """Render the conversation with the tokenizer's chat template."""
    return tokenizer.apply_chat_template(
        list(messages),
        tools=list(tools) if tools else None,
        tokenize=False,
        add_generation_prompt=add_generation_prompt,
        **(template_kwargs or {}),
    )


def build_prompt_ids(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None,
    known: KnownPrefix | None = None,
    *,
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """Return the ids to send to the engine.

    Args:
        tokenizer: with a chat template.
        messages: the whole conversation.
        tools: tools that the template shows to the model.
        known: a beginning of the conversation whose ids are known.
        template_kwargs: further arguments of the template.
    """
    if known is not None:
        # The stored messages have the reasoning that clients do not send back; the template decides about it.
        messages = [*known.messages, *messages[len(known.messages) :]]
    text = render(tokenizer, messages, tools, add_generation_prompt=True, template_kwargs=template_kwargs)
    rest = None if known is None else _text_after(tokenizer, text, tools, known, template_kwargs)
    if known is None or rest is None:
        return list(tokenizer.encode(text, add_special_tokens=False))
    return known.ids + list(tokenizer.encode(rest, add_special_tokens=False))


def _text_after(
    tokenizer: Any,
    text: str,
    tools: Sequence[Mapping[str, Any]] | None,
    known: KnownPrefix,
    template_kwargs: Mapping[str, Any] | None,
) -> str | None:
    """Return the text after the drawn tokens of ``known``; None when the template now renders them differently."""

    def before(messages: Sequence[Message]) -> str:
        return render(tokenizer, messages, tools, add_generation_prompt=False, template_kwargs=template_kwargs)

    head = before(known.messages)
    if not text.startswith(head):
        return None
    last = {"role": known.messages[-1]["role"], "content": _PROBE}
    _, found, closure = before([*known.messages[:-1], last]).rpartition(_PROBE)
    if not found:
        return None
    rest = closure + text[len(head) :]
    if known.finish_reason != "stop" or not known.ids:
        return rest
    # The stop token was drawn already.  In most templates it closes the turn, in some it opens the next one.
    stop_text = tokenizer.decode([known.ids[-1]], skip_special_tokens=False)
    if rest.startswith(stop_text):
        return rest.removeprefix(stop_text)
    # A turn that ended at a stop string has no stop token; one that ended at another token is rendered anew.
    return rest if known.ids[-1] not in set(tokenizer.all_special_ids) else None
