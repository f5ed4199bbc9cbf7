"""Applies a model's chat template, with bounded memory and output, and checks the rendered text.

Templates are third-party programs: one that works on a row may use up all memory on the next.
"""

from __future__ import annotations

import json
import re
import reprlib
import resource
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slime.utils.errors import DataError
from slime.utils.files import parse_object

MEMORY_BYTES = 2 << 30
"""Maximum growth of this process while a template renders; a text of the maximum length takes a hundredth of it."""
MAX_RENDERED_CHARS = 8_000_000
"""Maximum length of a rendered text: twice the longest prompt."""
REMEDY = "Fix the row, or the template of --hf-checkpoint (chat_template.jinja)."
ROLES = ("system", "user", "assistant", "tool")
"""Roles that every chat template is expected to know."""
OTHER_ROLES = ("developer", "function", "observation", "ipython")
"""Roles specific to a family: gpt-oss, OpenAI's older form, GLM, Llama."""
_OBJECT = re.compile(
    r"<(?:[^<>\n]|<\w+>){1,200} at 0x[0-9a-f]+>|<class '[\w.]+'>"
    r"|<(?:Macro '|Namespace \{|LoopContext \d|TemplateReference )[^<>]*>"
)
"""Matches how Python or jinja print an object that is not text."""


class _Arguments(dict[str, Any]):
    """Arguments of a call: an object that acts as its JSON text if a template concatenates it, as DeepSeek's does."""

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __add__(self, other: str) -> str:
        return str(self) + other

    def __radd__(self, other: str) -> str:
        return other + str(self)


def call_arguments(arguments: Any) -> dict[str, Any]:
    """Return the arguments of a call as an object; accepts an object or OpenAI's JSON text.

    Raises:
        ValueError: they are neither.
    """
    if isinstance(arguments, str):
        try:
            arguments = parse_object(arguments) if arguments.strip() else {}
        except ValueError as error:
            raise ValueError(f"the arguments of a call are the text {arguments[:80]!r}: {error}") from error
    if not isinstance(arguments, Mapping | None):
        raise ValueError(f"the arguments of a call are {str(arguments)[:80]!r}; they must be an object")
    return _Arguments(arguments or {})


def template_messages(
    messages: Sequence[Mapping[str, Any]], change: Callable[[Any], Any] = call_arguments
) -> list[dict[str, Any]]:
    """Return messages in the form that every template accepts: call arguments are objects, converted by ``change``.

    Raises:
        ValueError: see ``call_arguments``.
    """

    def changed(call: Any) -> Any:
        if isinstance(call, Mapping) and "function" in call:
            return {**call, "function": changed(call["function"])}
        has_arguments = isinstance(call, Mapping) and "arguments" in call
        return {**call, "arguments": change(call["arguments"])} if has_arguments else call

    return [
        {**message, "tool_calls": [changed(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else dict(message)
        for message in messages
    ]


def apply_chat_template(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], where: str = "A conversation", **kwargs: Any
) -> str:
    """Render messages as text with the tokenizer's template.

    Raises:
        DataError: the template fails on the messages or takes too much memory; the text is too long or contains a
            printed object; or a message has a role that the template omits or that no template knows.
    """
    from jinja2 import TemplateError

    try:
        with bounded_memory(MEMORY_BYTES):
            text = str(tokenizer.apply_chat_template(template_messages(messages), tokenize=False, **kwargs))
    except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError, TemplateError) as error:
        raise refused(where, messages, str(error)) from error
    except MemoryError as error:
        raise refused(where, messages, f"it takes more than {MEMORY_BYTES >> 30} GiB") from error
    template = str(getattr(tokenizer, "chat_template", None))
    check_rendered(text, messages, kwargs, template, where)
    check_roles(template, messages, text, where)
    return text


def special_text(tokenizer: Any, token: int) -> str:
    """Return the text of a special token, such as one that ended a turn; "" for any other token."""
    added = tokenizer.added_tokens_decoder.get(token)
    is_special = token == tokenizer.eos_token_id or (added is not None and added.special)
    return str(tokenizer.decode([token], skip_special_tokens=False)) if is_special else ""


def special_texts(tokenizer: Any) -> list[str]:
    """Return the texts of all special tokens, longest first."""
    found = {str(added) for added in tokenizer.added_tokens_decoder.values() if added.special}
    return sorted(found | {tokenizer.eos_token or ""} - {""}, key=len, reverse=True)


def text_after_end(tokenizer: Any, rest: str, alone: str, end: str) -> str | None:
    """Return what a template writes after an assistant turn, without the turn's end if the model sampled it.

    The sampled token is kept, and the template's own end token is not added: a model that ends with ``<|eom_id|>``
    does not get the template's ``<|eot_id|>`` too.

    Args:
        rest: what the template writes after the assistant's words, including later messages.
        alone: the same without later messages; begins with a special token if the template ends turns.
        end: text of the sampled special token that ended the turn; "" if none did.

    Returns:
        None if the template does not end turns and the next turn does not begin with ``end``.
    """
    if not end:
        return rest
    ends = special_texts(tokenizer)
    for written in (end, *(ends if alone.lstrip().startswith((end, *ends)) else ())):
        if rest.lstrip().startswith(written):
            return rest.lstrip().removeprefix(written)
    return None


def refused(where: str, messages: Sequence[Mapping[str, Any]], reason: str) -> DataError:
    """Return the error for messages that a template cannot render."""
    shown = reprlib.repr(messages)[:80]
    return DataError(f"{where}: the chat template cannot render the prompt ({reason[:300]}): {shown}. {REMEDY}")


def check_rendered(text: str, messages: Any, kwargs: Any, template: str, where: str) -> None:
    """Check that a rendered text is not too long, and contains no printed objects except those quoted in messages.

    Raises:
        DataError: the text is too long or contains a printed object.
    """
    if len(text) > MAX_RENDERED_CHARS:
        raise refused(where, messages, f"its text has {len(text):,} characters; {MAX_RENDERED_CHARS:,} are allowed")
    for found in set(_OBJECT.findall(text)):
        if found not in template and not any(found in said for said in _texts([messages, kwargs])):
            raise refused(where, messages, f"it prints an object of the program, {found!r}")


def check_roles(template: str, messages: Sequence[Mapping[str, Any]], text: str, where: str) -> None:
    """Check that a rendered text includes messages whose roles not every template knows.

    Raises:
        DataError: a message is omitted, or neither this template nor another family knows its role.
    """
    for number, message in enumerate(messages):
        if message.get("role") not in ROLES:
            _check_role(template, message, text, f"{where}: message {number} of the prompt")


def _check_role(template: str, message: Mapping[str, Any], text: str, where: str) -> None:
    role, content = message.get("role"), message.get("content")
    is_left_out = isinstance(content, str) and content.strip()[:40] not in text
    is_named = f"'{role}'" in template or f'"{role}"' in template
    if is_left_out or (role not in OTHER_ROLES and not is_named):
        raise DataError(
            f"{where} has the role {role!r}, which the chat template "
            f"{'leaves out' if is_left_out else 'does not know'}: {reprlib.repr(message)[:80]}. Roles that templates "
            f"know are {', '.join(ROLES)}; change the role, or the template of --hf-checkpoint."
        )


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts of messages, tools and other arguments of a template."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _texts([*value, *value.values()])
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)


_limit = threading.Lock()
_outer: list[int] = []
"""The limit from before the first active block, once per active block."""


@contextmanager
def bounded_memory(num_bytes: int) -> Iterator[None]:
    """Limit the process's growth in the block to ``num_bytes``; beyond that, allocations fail on every thread."""
    used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    with _limit:
        now, hard = resource.getrlimit(resource.RLIMIT_AS)
        _outer.append(_outer[0] if _outer else now)
        limits = [limit for limit in (used + num_bytes, _outer[0], hard) if limit != resource.RLIM_INFINITY]
        resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard))
    try:
        yield
    finally:
        with _limit:
            outer = _outer.pop()
            if not _outer:
                resource.setrlimit(resource.RLIMIT_AS, (outer, hard))
