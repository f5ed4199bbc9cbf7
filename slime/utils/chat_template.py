"""A model's chat template at work: bounded in memory and output, and its text looked at.

Templates are programs that somebody else wrote.  One that is quiet on a row may take all memory on the next.
"""

from __future__ import annotations

import re
import reprlib
import resource
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slime.utils.errors import DataError

MEMORY_BYTES = 2 << 30
"""That this process may grow by while a template renders; a text of the longest allowed takes a hundredth."""
MAX_RENDERED_CHARS = 8_000_000
"""Twice the longest prompt."""
REMEDY = "Mend the row, or the template of --hf-checkpoint (chat_template.jinja)."
_OBJECT = re.compile(
    r"<(?:[^<>\n]|<\w+>){1,200} at 0x[0-9a-f]+>|<class '[\w.]+'>"
    r"|<(?:Macro '|Namespace \{|LoopContext \d|TemplateReference )[^<>]*>"
)
"""What Python or jinja show of an object that is no text."""


def apply_chat_template(
    tokenizer: Any, messages: list[dict[str, Any]], where: str = "A conversation", **kwargs: Any
) -> str:
    """Return messages as text, by the template of ``tokenizer``.

    Args:
        tokenizer: of transformers.
        messages: of a conversation.
        where: names the messages in errors.
        kwargs: of the tokenizer's ``apply_chat_template``.

    Raises:
        DataError: the template refuses the messages or takes too much memory, or its text is too long or shows an
            object.
    """
    from jinja2 import TemplateError

    try:
        with bounded_memory(MEMORY_BYTES):
            text = str(tokenizer.apply_chat_template(messages, tokenize=False, **kwargs))
    except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError, TemplateError) as error:
        raise refused(where, messages, str(error)) from error
    except MemoryError as error:
        raise refused(where, messages, f"it takes more than {MEMORY_BYTES >> 30} GiB") from error
    check_rendered(text, messages, kwargs, str(getattr(tokenizer, "chat_template", "")), where)
    return text


def refused(where: str, messages: Sequence[Mapping[str, Any]], reason: str) -> DataError:
    """Return the error for messages that a template does not render."""
    shown = reprlib.repr(messages)[:80]
    return DataError(f"{where}: the chat template cannot render the prompt ({reason[:300]}): {shown}. {REMEDY}")


def check_rendered(text: str, messages: Any, kwargs: Any, template: str, where: str) -> None:
    """Check that a rendered text is not too long, and shows no object but those that a message has written out.

    Raises:
        DataError: it does.
    """
    if len(text) > MAX_RENDERED_CHARS:
        raise refused(where, messages, f"its text has {len(text):,} characters; {MAX_RENDERED_CHARS:,} are allowed")
    for found in set(_OBJECT.findall(text)):
        if found not in template and not any(found in said for said in _texts([messages, kwargs])):
            raise refused(where, messages, f"it prints an object of the program, {found!r}")


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
"""The limit before the first of the blocks under way, once for each of them."""


@contextmanager
def bounded_memory(num_bytes: int) -> Iterator[None]:
    """Let the process grow by ``num_bytes`` at most in the block: beyond that allocations fail, on every thread."""
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
