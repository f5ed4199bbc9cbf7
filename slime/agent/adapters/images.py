"""Images of a conversation: out of the messages of both protocols, into the prompts of engine and trainer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from slime.agent.adapters.messages import flatten_content
from slime.agent.adapters.sessions import AdapterError
from slime.agent.trajectory import Message, Pictures
from slime.utils.processing_utils import process_text, process_vision_info


def translate_content(content: Any, *, shows_images: bool) -> str | list[dict[str, Any]]:
    """Return a message's content as chat templates take it: text, or a list of parts where there are images.

    Args:
        content: in the form of either protocol.
        shows_images: the model sees images; for one that does not, each becomes a mark in the text.

    Raises:
        AdapterError: an image is neither inline nor at a web address.
    """
    parts = _parts(content) if shows_images else []
    return parts if any(part["type"] == "image" for part in parts) else flatten_content(content)


def _parts(content: Any) -> list[dict[str, Any]]:
    """Return the parts of a content, each a text or an image; those of tools' results too."""
    found = []
    for part in [content] if isinstance(content, str | Mapping) else content or ():
        if not isinstance(part, str) and part.get("type") == "tool_result":
            found += _parts(part.get("content"))
        elif not isinstance(part, str) and part.get("type") in ("image", "image_url"):
            found.append({"type": "image", "image": _source(part)})
        elif text := flatten_content(part):
            found.append({"type": "text", "text": text})
    return found


def _source(part: Mapping[str, Any]) -> str:
    if part["type"] == "image_url":
        holder = part.get("image_url")
        source = holder.get("url") if isinstance(holder, Mapping) else holder
    else:
        holder = part.get("source") or {}
        inline = f"data:{holder.get('media_type', 'image/png')};base64,{holder.get('data')}"
        source = holder.get("url") if holder.get("type") == "url" else inline
    # A path would be one of this machine's files.
    if not isinstance(source, str) or not source.startswith(("data:", "http://", "https://")):
        raise AdapterError(400, f"An image is {str(source)[:80]!r}; it must be a data: or a web address.")
    return source


def text_of(messages: Sequence[Message], tools: Any) -> str:
    """Return the messages and tools as JSON, each image as a mark."""

    def unseen(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: "" if key == "image" else unseen(item) for key, item in value.items()}
        return [unseen(item) for item in value] if isinstance(value, list) else value

    return json.dumps([unseen(list(messages)), tools], ensure_ascii=False, default=str)


class PromptEncoder:
    """Encode texts that messages were rendered as; ``pictures`` are those of the last prompt.

    Args:
        tokenizer: of the model.
        processor: of a model that sees images, else None.
        known: the pictures of messages whose ids are known.
    """

    def __init__(self, tokenizer: Any, processor: Any, known: Sequence[Pictures] = ()) -> None:
        self._tokenizer, self._processor = tokenizer, processor
        self._known = list(known)
        self.pictures: list[Pictures] = []

    def __call__(self, text: str, messages: Sequence[Message], *, continues: bool = False) -> list[int]:
        """Return the ids of ``text``, which shows ``messages``; with ``continues`` after those that are known."""
        self.pictures = list(self._known) if continues else []
        media = None if self._processor is None else process_vision_info(messages, self._processor)
        if media is None or not media["images"]:
            return list(self._tokenizer.encode(text, add_special_tokens=False))
        ids, train_inputs = process_text(text, media, self._processor)
        self.pictures.append(Pictures(media["images"], train_inputs))
        return ids
