"""The child process of ``tokenizer_trial``: the first run of a model's tokenizer and chat template.

A regular expression in tokenizer.json or a loop in a template may never end, or use all memory.  Here it can only kill
this process, which has an alarm and a memory limit.  It prints one JSON line for each step it begins and each result.

Run as a script.  For a fast start, it imports torch only if the model's own code may run.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2]))  # where slime is, if it is not installed

from slime.utils.chat_template import template_messages  # noqa: E402

MEMORY_BYTES = 4 << 30
PROBES = (
    "The quick brown fox, 1,234.5 times!\n\t-- isn't it? \u00e9\u4e2d\U0001f600",
    *(
        piece * (2000 // len(piece)) + "!"
        for piece in [*"aA1 \n._-'=/,\u4e2d", "ab", "a ", "a1", "aA", ".\n", "word "]
    ),
)
"""Texts that make a regular expression with catastrophic backtracking run forever."""


def main(folder: str, has_template: bool, trusts_code: bool, limit_s: int, max_chars: int) -> None:
    """Try the tokenizer of ``folder``, then render the rows on standard input; each step has ``limit_s`` seconds."""
    say(begins="import")
    if has_template:
        if not trusts_code:
            sys.modules["torch"] = None  # type: ignore[assignment]  # transformers then works without it
        from transformers import AutoTokenizer
    else:
        from tokenizers import Tokenizer
    with open("/proc/self/statm", encoding="ascii") as file:
        limit = int(file.read().split()[0]) * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.alarm(limit_s)
    say(begins="tokenizer")
    try:
        if has_template:
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trusts_code)
        else:
            tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
    except Exception as error:  # transformers may raise anything; the parent process reports it
        if isinstance(error, MemoryError):
            raise
        say(cannot_load=True)
        return
    for probe in PROBES:
        tokenizer.encode(probe, add_special_tokens=False)
    say(template=str(getattr(tokenizer, "chat_template", "")) if has_template else "")
    signal.alarm(0)
    rows = json.loads(sys.stdin.read() or "[]")
    for facts in answers(tokenizer, rows, max_chars):
        signal.alarm(limit_s)
        say(**facts)


def answers(tokenizer: Any, rows: Sequence[Sequence[Any]], max_chars: int) -> Iterator[dict[str, Any]]:
    """Yield progress and result of each row ``[where, messages or text, arguments]``.

    A result is the rendered text with its number of tokens, or the reason why there is none.
    """
    for where, prompt, kwargs in rows:
        yield {"begins": where}
        try:
            text = prompt
            if not isinstance(prompt, str):
                text = str(tokenizer.apply_chat_template(template_messages(prompt), tokenize=False, **kwargs))
        except MemoryError:
            yield {"reason": f"it takes more than {MEMORY_BYTES >> 30} GiB"}
        except Exception as error:  # a template may raise anything
            yield {"reason": str(error)[:1000]}
        else:
            num_tokens = 0
            if len(text) <= max_chars:
                yield {"begins": "tokenizer"}
                num_tokens = len(tokenizer.encode(text, add_special_tokens=False))
            yield {"text": text[: max_chars + 1], "tokens": num_tokens}


def say(**facts: Any) -> None:
    """Write a line to the parent process."""
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    try:
        main(**json.loads(sys.argv[1]))
    except BaseException as failure:  # a Rust panic in tokenizers is not an Exception
        say(broke=f"{type(failure).__name__}: {failure}"[:300])
        sys.exit(1)
