"""The samples that the page of a run shows: the facts of all, and the texts of a selection, token by token."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from slime.ext.record.run_reader import Run, read_samples
from slime.ext.record.sample_pictures import MAX_PICTURES, picture_url
from slime.utils.processing_utils import load_tokenizer
from tools.report_samples import Rollout
from tools.terminal import say

MAX_TEXT = 20_000
"""Characters of a prompt, and tokens of a response, that the page shows."""
MAX_FACTS = 300_000
"""Samples whose facts the page has."""
MAX_TEXT_FILES = 200
_MARKER = re.compile(r"<\|\w{1,40}\|>|<(?:start|end)_of_turn>")
"""What chat templates write around a message."""


def samples_of(rollouts: Sequence[Rollout], pieces: Pieces, *, budget: int) -> dict[str, Any]:
    """Return the facts of all samples, and the texts of an even selection of at most ``budget`` bytes.

    Args:
        rollouts: and evaluations, in the order in which they are shown.
        pieces: takes the tokens that are shown.
        budget: bytes.
    """
    num_all = sum(len(one.facts["tokens"]) for one in rollouts)
    most = max(1, MAX_FACTS * len(rollouts) // max(1, num_all))
    shown = [rollouts[i] for i in sorted(_spread(len(rollouts))[:most])]
    statuses = sorted({str(one) for rollout in shown for one in rollout.facts["status"]})
    prompts = {digest: i for i, digest in enumerate(dict.fromkeys(d for one in shown for d in one.facts["prompt"]))}
    of_text = {digest: "" for digest in prompts}
    with_texts = [shown[i] for i in sorted(_spread(len(shown))[:MAX_TEXT_FILES])]
    texts: list[dict[str, Any]] = []
    pictures = Pictures()
    used = begin = 0
    begins = {}
    for one in shown:
        begins[id(one)] = begin
        begin += len(one.facts["tokens"])
    for position, one in enumerate(with_texts):
        rows, spent = _texts_of(one, pieces, pictures, of_text, (budget - used) // (len(with_texts) - position))
        used += spent
        texts += [row | {"k": row["k"] + begins[id(one)]} for row in rows]
    return {
        "all": num_all,
        "rollouts": [
            {
                "r": one.number + 1,
                "f": one.path.name,
                "g": _deltas(one.facts["group"]),
                "i": _deltas(one.facts["index"]),
                "p": _deltas(np.array([prompts[digest] for digest in one.facts["prompt"]], np.int64)),
                "n": one.facts["tokens"].tolist(),
                "w": [_short(value) for value in one.facts["reward"].tolist()],
                "s": [statuses.index(str(status)) for status in one.facts["status"]],
            }
            for one in shown
        ],
        "statuses": statuses,
        "prompts": list(of_text.values()),
        "texts": texts,
        "pieces": pieces.texts,
        "pictures": list(pictures.places),
    }


def _spread(count: int) -> list[int]:
    """Return the numbers below ``count`` in an order of which every beginning is spread over all of them evenly."""
    return np.argsort((np.arange(count) * 0.6180339887) % 1, kind="stable").tolist()


def _deltas(values: np.ndarray) -> list[int]:
    return np.diff(values, prepend=0).tolist()


def _short(value: float) -> float | int | None:
    if not math.isfinite(value):
        return None
    short = float(f"{value:.4g}")
    return int(short) if short == int(short) else short


def _texts_of(
    rollout: Rollout, pieces: Pieces, pictures: Pictures, prompts: dict[int, str], budget: int
) -> tuple[list[dict[str, Any]], int]:
    """Return rows of whole groups, spread over the rollout, and the bytes that they take, about."""
    groups, spent, found = rollout.facts["group"], 0, []
    table = read_samples(rollout.path, trained=None if rollout.evaluation is None else ())
    if table is not None and rollout.evaluation is not None:
        table = table.filter(pc.equal(table["evaluation"], rollout.evaluation))
    if table is None or table.num_rows != len(groups):
        return [], 0
    copies = copies_in(table)
    members = np.split(np.argsort(groups, kind="stable"), np.flatnonzero(np.diff(np.sort(groups))) + 1)
    for place in _spread(len(members)):
        if spent >= budget:
            break
        for k, row in zip(members[place].tolist(), table.take(members[place]).to_pylist()):
            shown = _text(row, pieces) | {"k": k}
            size = pictures.size
            if places := pictures.of(row.get("picture_ids") or (), copies):
                shown["im"] = places
            spent += pictures.size - size
            digest, prompt = rollout.facts["prompt"][k], row["prompt"][:MAX_TEXT]
            if not prompts[digest]:
                prompts[digest] = prompt
                spent += len(prompt)
            spent += sum(7 * len(one) if isinstance(one, list) else 10 + len(str(one)) for one in shown.values())
            found.append(shown)
    return sorted(found, key=lambda one: one["k"]), spent


def _text(row: dict[str, Any], pieces: Pieces) -> dict[str, Any]:
    length = row["response_length"] or 0
    ids = row["tokens"][len(row["tokens"]) - length :][:MAX_TEXT] if length else []
    engine, trainer = row.get("engine_log_probs"), row.get("trainer_log_probs")
    is_both = engine and trainer and len(engine) == len(trainer)
    tokens = pieces.of(ids)
    # A letter of several tokens is in none of them.
    is_whole = pieces.has_tokenizer and not any("\ufffd" in pieces.texts[one] for one in set(tokens))
    shown = {
        "t": tokens,
        "x": None if is_whole else (row["response"] or "")[:MAX_TEXT],
        "l": row["label"],
        "q": row["position"],
        "tr": None if row["train_reward"] is None else _short(row["train_reward"]),
        "j": (row.get("reward_json") or "")[:1000] or None,
        "lp": _rounded(engine),
        "d": _rounded([t - e for t, e in zip(trainer, engine)] if is_both else None, 5),
        "a": _rounded(row.get("advantages")),
        "m": row["loss_mask"][:MAX_TEXT] if row["loss_mask"] and not all(row["loss_mask"]) else None,
        "c": [int(one) for one in clipped[:MAX_TEXT]] if (clipped := row.get("clipped")) and any(clipped) else None,
        "v": list(zip(row["weight_versions"] or [], row["call_tokens"] or [])) or None,
        "e": ", ".join(dict.fromkeys(one for one in row.get("engines") or [] if one)) or None,
    }
    return {name: value for name, value in shown.items() if value is not None}


def _rounded(values: Sequence[float] | None, digits: int = 3) -> list[float | None] | float | None:
    """Return numbers of few digits; one for all when they are equal."""
    if not values:
        return None
    short = np.asarray(values[:MAX_TEXT], np.float64).round(digits) + 0.0  # no -0.0
    if not np.isfinite(short).all():
        return [value if math.isfinite(value) else None for value in short.tolist()]
    return float(short[0]) if (short == short[0]).all() else short.tolist()


def copies_in(table: pa.Table) -> dict[str, bytes]:
    """Return the pictures of a file of samples by their ids."""
    if not {"picture_ids", "pictures"} <= set(table.column_names):
        return {}
    rows = zip(table["picture_ids"].to_pylist(), table["pictures"].to_pylist())
    pairs = (pair for ids, copies in rows for pair in zip(ids or (), copies or ()))
    return {name: data for name, data in pairs if name and data}


class Pictures:
    """Pictures of samples as ``data:`` URLs; the page has each once."""

    def __init__(self) -> None:
        self.places: dict[str, int] = {}
        """By URL, its place."""
        self.size = 0
        """Bytes of all of them."""

    def of(self, ids: Sequence[str], copies: Mapping[str, bytes]) -> list[int]:
        """Return the places of those pictures, at most ``MAX_PICTURES``, that may be shown."""
        urls = [picture_url(copies[name]) for name in ids[:MAX_PICTURES] if name in copies]
        for url in urls:
            if url is not None and url not in self.places:
                self.places[url] = len(self.places)
                self.size += len(url)
        return [self.places[url] for url in urls if url is not None]


class Pieces:
    """Texts of tokens, by the run's tokenizer where it can be read; the page has each once."""

    def __init__(self, run: Run) -> None:
        self.texts: list[str] = []
        self._known: dict[int, int] = {}
        self._tokenizer: Any = None
        path = str(run.value("hf_checkpoint", ""))
        if path and Path(path).is_dir() and not run.value("trust_remote_code", False):
            # A page of somebody's run runs no code of theirs.
            try:
                self._tokenizer = load_tokenizer(path)
            except Exception as error:  # the edge of another library: the page does without
                say(f"{path}: no tokenizer ({type(error).__name__}: {error}); tokens are shown as numbers")

    @property
    def has_tokenizer(self) -> bool:
        """Whether tokens have texts."""
        return self._tokenizer is not None

    def of(self, ids: Sequence[int]) -> list[int]:
        """Return the place in ``texts`` of each token."""
        for one in ids:
            if one not in self._known:
                self._known[one] = len(self.texts)
                self.texts.append(self._text(one))
        return [self._known[one] for one in ids]

    def _text(self, token: int) -> str:
        if self._tokenizer is None:
            return f"{token} "
        # Alone, a token loses the space before it.
        alone, twice = self._tokenizer.decode([token]), self._tokenizer.decode([token, token])
        return twice[len(alone) :] if twice.startswith(alone) else alone

    def foreign_markers(self, run: Run) -> list[str]:
        """Return the marks of a chat template in the first prompts that are no token of the model."""
        files = run.sample_files()
        if self._tokenizer is None or not files:
            return []
        table = read_samples(files[0], ["prompt"])
        prompts = table["prompt"].slice(0, 50).to_pylist() if table is not None else []
        found = dict.fromkeys(mark for prompt in prompts for mark in _MARKER.findall(prompt[:MAX_TEXT]))
        return [mark for mark in found if mark not in self._tokenizer.get_vocab()]
