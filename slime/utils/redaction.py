"""Redacts keys, tokens and passwords, recognized by the names of their fields and by their own form.

Everything that describes a job passes through here first: logs, the record, checkpoints, Weights & Biases.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import functools
import json
import re
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence, Sized
from enum import Enum
from pathlib import PurePath
from typing import Any

REDACTED = "(secret)"

_NAME_WORD = re.compile(r"[\w.-]{1,200}")
_WORD_ENDS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|[^A-Za-z0-9]+")
_SECRET_NAME = re.compile(
    r"(api_?keys?|secrets?|passwords?|passwd|passphrase|credentials?"
    r"|(^|_)(access|private|secret|wandb|ssh|signing|encryption|master|account|storage|service|subscription)_?keys?"
    r"|(^|_)(access|api|auth|bearer|refresh|session)_?tokens|_pwd|(^|_)authorization|(^|_)cookies?"
    r"|connection_string|postgres_db_url|redis_url|oracle_connect_descriptor|amz_signature|sas)_?\d*$"
)
"""Matches names in lower case with ``_`` between words."""
_TOKEN_NAME = re.compile(r"(?:^|_)(?:([a-z0-9]+)_)?token_?\d*$")
_OF_TEXT = set(
    "added audio begin bos cls decoder di end eod eoi eol eos eot first forced frame im image input label last "
    "loss mask max middle min new newline next num output pad per prefix prompt response sep single sot special start "
    "stop suffix think tool unk video vision word".split()
)
"""Words before ``token`` in names of a piece of text, such as pad_token."""
_PIECE_OF_TEXT = re.compile(r"[<\[].*[>\]]", re.DOTALL)
_SHOWN_END = "\x1f\n"
_OF_QUERIES = ("key", "sig", "signature")

_QUERY = re.compile(r"(?<=[?&;])([\w.~%-]+)=([^&\s\"'<>#;]+)")
_NAME = re.compile(
    r"(?<![\w.-])(?:(?P<flag>--[\w-]+)\s+(?!-)|(?P<name>-{0,2}[A-Za-z_][\w.-]*)(?:"
    r"(?P<quote>\\*[\"'])?[ \t]*(?P<sign>[=:])(?!=)[ \t\x1f]*(?:\n[ \t]*(?=- ))?"
    r"|(?P<comma>\\*[\"']\s*,\s*)(?P<key>\\*[\"']value\\*[\"']\s*:\s*)?(?=\\*[\"'])))"
)
"""A name before its value: ``--name value``, ``name=value``, ``name: value``, or as in a printed Python list."""
_VALUE = re.compile(
    r"(?P<quote>\\*[\"'])(?P<inner>.*?)(?<!\\)(?P=quote)|\[[^\]]*\]|\{[^}]*\}|[|>][+-]?\x1f?\n[ \t]+[^\n\x1f]+"
    r"|(?:-[ \t]+\S+(?:\s*\n[ \t]*(?=- ))?)+|\\*[\"']?(?:\(secret\)|[^\s\"',;&<>)\]}\\])+",
    re.DOTALL,
)
_FORMS = tuple(
    (re.compile(pattern, re.DOTALL), shown)
    for pattern, shown in (
        (r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(-----END [A-Z ]*PRIVATE KEY-----|\Z)", REDACTED),
        (r"(:/{1,2})[^/\s?#\"'<>]+(?=@)", rf"\1{REDACTED}"),
        (
            r"(?<![\w-])((?i:(?:proxy-)?authorization|(?:set-)?cookie)\\*[\"']?\s*[:=]\s*\\*[\"']?)[^\"'\\\n\r]+",
            rf"\1{REDACTED}",
        ),
        (r"\b((?i:bearer)\s+)(?=[\w.~+/=-]*[\dA-Z_=]|\w{20})[\w.~+/=-]{8,}", rf"\1{REDACTED}"),
        (r"(?<![\w-])eyJ[\w-]{8,}\.[\w-]+\.[\w-]*", REDACTED),
        (r"(?<!\w)hf_[A-Za-z\d]{20,}", REDACTED),
        (r"(?<![\w/.-])hf_(?=[A-Za-z]*\d)(?=[a-z\d]*[A-Z])[A-Za-z\d]{10,}", REDACTED),
        (r"(?<![\w/.-])sk-(?=[\w-]*[\dA-Z])[\w-]{8,}", REDACTED),
        (r"(?<![\w/.-])(sk_|gsk_|npm_|nvapi-|pypi-|tvly-|glpat-|xox[a-z]-)(?=[\w-]*[\dA-Z])[\w-]{16,}", REDACTED),
        (r"(?<!\w)(gh[opsur]_|github_pat_)\w{8,}", REDACTED),
        (r"(?<!\w)(AKIA|ASIA)[A-Z\d]{12,}", REDACTED),
        (r"(?<!\w)AIza[\w-]{20,}", REDACTED),
        (r"(?<=hooks\.slack\.com/services/)[\w/]+", REDACTED),
    )
)
"""(pattern of a self-identifying secret, replacement)."""
_BASIC = re.compile(r"\b((?i:basic)\s+)([A-Za-z\d+/]{4,}={0,2})")
_SHORTEST_KNOWN = 6


class _Known:
    """The secrets in this process's settings, which are redacted wherever they occur."""

    pattern: re.Pattern[str] | None = None


def is_secret(name: str) -> bool:
    """Return True if the flag, attribute, key or environment variable ``name`` holds a secret."""
    return _is_always_secret(name) or _is_token(name)


@functools.lru_cache(4096)
def _is_always_secret(name: str) -> bool:
    return bool(_SECRET_NAME.search(_plain_name(name)))


@functools.lru_cache(4096)
def _is_token(name: str) -> bool:
    found = _TOKEN_NAME.search(_plain_name(name))
    return found is not None and found[1] not in _OF_TEXT


def _plain_name(name: str) -> str:
    return _WORD_ENDS.sub("_", name).strip("_").lower() if _NAME_WORD.fullmatch(name) else ""


def _hides(name: str, value: Any) -> bool:
    if value is None or isinstance(value, bool) or (isinstance(value, Sized) and not len(value)):
        return False
    if _is_always_secret(name):
        return True
    return _is_token(name) and isinstance(value, str | bytes) and not _PIECE_OF_TEXT.fullmatch(str(value))


def redacted(value: Any, name: str = "") -> Any:
    """Return a copy of ``value`` with each secret, however deep, replaced by ``(secret)``; dataclasses become dicts.

    Args:
        value: a setting's value; containers are traversed, texts searched, and objects whose text has a secret are
            replaced by the redacted text.
        name: the setting's name, which may mark the whole value as a secret.
    """
    if name and _hides(name, value):
        return REDACTED
    if value is None or isinstance(value, bool | int | float | Enum):
        return value
    if isinstance(value, str):
        return redacted_text(value)
    if isinstance(value, bytes | bytearray):
        text = bytes(value).decode(errors="replace")
        hidden = redacted_text(text)
        return value if hidden == text else hidden.encode()
    if isinstance(value, Namespace):
        return Namespace(**_redacted_map(vars(value)))
    if isinstance(value, Mapping):
        return _redacted_map(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _redacted_map({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    if isinstance(value, list | tuple):
        items = list(_redacted_items(value))
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, set | frozenset):
        items = [redacted(item) for item in value]
        return value if items == list(value) else items
    if isinstance(value, PurePath):
        hidden = redacted_text(str(value))
        return value if hidden == str(value) else hidden
    if hasattr(value, "tolist"):  # an array: of texts, or of numbers
        is_text = getattr(getattr(value, "dtype", None), "kind", "") in ("O", "U", "S")
        return redacted(value.tolist()) if is_text else value
    texts = ((text, redacted_text(text)) for text in (str(value), repr(value)))
    return next((hidden for text, hidden in texts if hidden != text), value)


def _redacted_map(values: Mapping[Any, Any]) -> dict[Any, Any]:
    shown = {redacted(key): redacted(value, str(key)) for key, value in values.items()}
    name = next((values[key] for key in ("name", "key", "header") if isinstance(values.get(key), str)), "")
    if "value" in values and _hides(name, values["value"]):
        shown["value"] = REDACTED
    return shown


def _redacted_items(items: Sequence[Any]) -> Iterator[Any]:
    """Yield redacted list items; items may be command-line words, or a pair of a name and its value."""
    flag = ""
    for index, item in enumerate(items):
        if not isinstance(item, str):
            yield redacted(item)
        elif item.startswith("--"):
            flag, equals, value = item.partition("=")
            yield redacted_text(flag) + equals + redacted(value, flag)
        else:
            is_pair = index == 1 and len(items) == 2 and isinstance(items[0], str)
            yield redacted(item, items[0] if is_pair else flag)


def redacted_words(words: Sequence[str]) -> list[str]:
    """Return a command line with secrets redacted."""
    return [str(word) for word in redacted(list(words))]


def redacted_text(text: str) -> str:
    """Redact secrets in a text's URLs, headers, JSON, YAML, flags and variables, and tokens of well-known forms."""
    if _Known.pattern is not None:
        text = _Known.pattern.sub(REDACTED, text)
    if text.lstrip()[:1] in ("{", "["):
        with contextlib.suppress(ValueError, RecursionError):  # not JSON: treated like other texts
            value = json.loads(text)
            if (hidden := redacted(value)) != value:
                return json.dumps(hidden, ensure_ascii=False)
    for pattern, shown in _FORMS:
        text = pattern.sub(shown, text)
    text = _QUERY.sub(_redacted_parameter, _BASIC.sub(_redacted_basic, text))
    lines = text.replace("\\n", _SHOWN_END)  # escaped line ends, from a text quoted within a text
    return "".join(_without_named(lines)).replace(_SHOWN_END, "\\n")


def _redacted_basic(found: re.Match[str]) -> str:
    """Redact the base64 form of ``user:password``."""
    try:
        is_hidden = b":" in base64.b64decode(found[2], validate=True)
    except ValueError:
        is_hidden = False
    return f"{found[1]}{REDACTED}" if is_hidden else found[0]


def _redacted_parameter(found: re.Match[str]) -> str:
    is_hidden = found[1].lower() in _OF_QUERIES or is_secret(found[1])
    return f"{found[1]}={REDACTED}" if is_hidden else found[0]


def _without_named(text: str) -> Iterator[str]:
    """Yield the pieces of a text, with values after a secret's name replaced by ``(secret)``."""
    done = 0
    for found in _NAME.finditer(text):
        name = found["flag"] or found["name"]
        if found.start() < done or not is_secret(name) or text.startswith(REDACTED, found.end()):
            continue
        value = _VALUE.match(text, found.end())
        if value is None or not _is_value(found, value[0] if value["quote"] is None else value["inner"]):
            continue
        quote = value["quote"] or ""
        yield text[done : value.start()] + quote + REDACTED + quote
        done = value.end()
    yield text[done:]


def _is_value(found: re.Match[str], value: str) -> bool:
    name = found["flag"] or found["name"]
    before = found.string[max(0, found.start() - 20) : found.start()].rstrip(" \t")
    if found["comma"] and not (found["key"] or name.startswith("--") or before[:-1].endswith(("(", "["))):
        return False  # the next item in a list of names
    if value in ("", "None", "null", "True", "False", "true", "false", "[]", "{}"):
        return False
    is_key = found["sign"] != ":" or found["quote"] is not None or before[-1:] in ("", "\n", "{", ",", "[")
    if _is_always_secret(name):
        is_in_sentence = not is_key or (name.startswith("--") and found["sign"] == ":")
        return not (is_in_sentence and value.isalpha()) and not name.startswith("--no-")
    return is_key and not value.isdecimal() and not _PIECE_OF_TEXT.fullmatch(value)  # else a word of a sentence


def hide_values(settings: Namespace) -> None:
    """From now on, redact the secrets of ``settings`` in every text of this process, whatever surrounds them."""
    secrets = sorted(set(_secret_texts(vars(settings))), key=len, reverse=True)
    words = "|".join(map(re.escape, secrets))
    _Known.pattern = re.compile(rf"(?<!\w)(?:{words})(?!\w)") if secrets else None


def _secret_texts(value: Any, name: str = "") -> Iterator[str]:
    if isinstance(value, Namespace):
        value = vars(value)
    if isinstance(value, str):
        if len(value) >= _SHORTEST_KNOWN and _hides(name, value):
            yield value
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from _secret_texts(one, name if name and _hides(name, value) else str(key))
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _secret_texts(one, name)
