"""The words of a command line: which ones are flags, and error messages for unknown ones."""

from __future__ import annotations

import argparse
import difflib
import logging
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from slime.utils.errors import ConfigError
from slime.utils.redaction import redacted

if TYPE_CHECKING:
    from slime.flags.parser import Parser

logger = logging.getLogger(__name__)

ENGINE_PREFIXES = ("--sglang-", "--router-")
"""Flags of the engines and of their router; other code may not use these prefixes."""
ENGINE_FLAGS = ("--prefill-num-servers",)
"""Flags of the engines without the prefix."""

NO_MODEL = "--hf-checkpoint is not given: name the model's Hugging Face folder (config and tokenizer)."
NO_BATCH = "--rollout-batch-size is not given: say how many prompts one rollout has."
NO_LENGTH = "Neither --num-rollout nor --num-epoch is given: say how long to train."
_NEEDED = {("hf_checkpoint",): NO_MODEL, ("rollout_batch_size",): NO_BATCH, ("num_rollout", "num_epoch"): NO_LENGTH}

PEERS_FLAGS = {
    **dict.fromkeys(("--learning-rate", "--actor-learning-rate"), "--lr"),
    **dict.fromkeys(("--num-gpus", "--n-gpus", "--gpus"), "--actor-num-gpus-per-node"),
    **dict.fromkeys(("--num-nodes", "--nnodes"), "--actor-num-nodes"),
    **dict.fromkeys(("--algorithm", "--algo", "--adv-estimator"), "--advantage-estimator"),
    **dict.fromkeys(("--model", "--model-path", "--model-name-or-path"), "--hf-checkpoint"),
    **dict.fromkeys(("--pretrain", "--actor-model-path"), "--hf-checkpoint"),
    **dict.fromkeys(("--ref-model", "--reference-model"), "--ref-load"),
    **dict.fromkeys(("--dataset", "--dataset-name", "--train-data", "--train-files"), "--prompt-data"),
    **dict.fromkeys(("--eval-dataset", "--val-files", "--eval-data"), "--eval-prompt-data"),
    **dict.fromkeys(("--num-generations", "--group-size", "--rollout-n"), "--n-samples-per-prompt"),
    **dict.fromkeys(("--max-completion-length", "--max-new-tokens"), "--rollout-max-response-len"),
    **dict.fromkeys(("--max-response-length", "--generate-max-len"), "--rollout-max-response-len"),
    **dict.fromkeys(("--max-prompt-length", "--prompt-max-len"), "--rollout-max-prompt-len"),
    **dict.fromkeys(("--train-batch-size", "--ppo-mini-batch-size"), "--global-batch-size"),
    **dict.fromkeys(("--temperature", "--sampling-temperature"), "--rollout-temperature"),
    **dict.fromkeys(("--max-steps", "--num-steps", "--total-steps"), "--num-rollout"),
    **dict.fromkeys(("--epochs", "--num-epochs", "--num-train-epochs", "--total-epochs"), "--num-epoch"),
    **dict.fromkeys(("--output-dir", "--save-path", "--ckpt-path"), "--save"),
    **dict.fromkeys(("--save-steps", "--save-freq"), "--save-interval"),
    **dict.fromkeys(("--eval-steps", "--test-freq"), "--eval-interval"),
    **dict.fromkeys(("--reward-fn", "--reward-function", "--reward-funcs"), "--custom-rm-path"),
    **dict.fromkeys(("--beta", "--kl-beta", "--init-kl-coef"), "--kl-loss-coef"),
    **dict.fromkeys(("--clip-ratio", "--cliprange"), "--eps-clip"),
    **dict.fromkeys(("--tp", "--tp-size", "--tensor-parallel-size"), "--tensor-model-parallel-size"),
    **dict.fromkeys(("--gradient-checkpointing", "--activation-checkpointing"), "--recompute-granularity"),
    **dict.fromkeys(("--lora-r", "--lora-dim"), "--lora-rank"),
    "--report-to": "--use-wandb",
}
"""A flag of other trainers -> our flag."""
PEERS_VALUES = {
    "dapo": "DAPO is grpo with other flags: docs/howto/dapo.md",
    "dr_grpo": "Dr. GRPO is grpo with --disable-grpo-std-normalization and examples/DrGRPO/custom_reducer.py",
    "rloo": "RLOO is an estimator by its import path: examples.custom_estimator.rloo.rloo",
    "reinforce": "it is called reinforce_plus_plus",
}
"""A value of --advantage-estimator in other trainers -> what to use here."""

_DASH = re.compile(r"[\u2010-\u2015\u2212\ufe58\ufe63\uff0d]-?|-[\u2010-\u2015\u2212]")
"""Dashes that text processors put in place of one or two hyphens."""


def missing_flags(given: Mapping[str, Any]) -> list[str]:
    """Return a message for each required flag whose attribute is not among those given."""
    return [message for names, message in _NEEDED.items() if all(given.get(name) is None for name in names)]


def engine_flags_are_idle(argv: Sequence[str]) -> bool:
    """Return True if the command starts no engine, so that the engines' flags need not be parsed."""
    names = {token.split("=", 1)[0] for token in argv}
    return bool(names & {"--debug-train-only", "--load-debug-rollout-data"})


def split_engine_flags(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return ``argv`` without the engines' flags and their values, and the names of those flags."""
    kept: list[str] = []
    left_out: list[str] = []
    skipping = False
    for token in argv:
        if is_flag(token):
            name = token.split("=", 1)[0]
            skipping = name.startswith(ENGINE_PREFIXES) or name in ENGINE_FLAGS
            if skipping:
                left_out.append(name)
        if not skipping:
            kept.append(token)
    return kept, left_out


def is_flag(token: str) -> bool:
    """Return True for ``--name`` and ``-n``, False for values, negative numbers included."""
    return bool(re.match(r"--?[A-Za-z]", token))


def nearest(name: str, known: Iterable[str], count: int = 3) -> list[str]:
    """Return the known names most similar to ``name``, best first; empty if none is similar."""
    candidates = [option for option in known if option.startswith("--")]
    name = name.replace("_", "-").lower()
    # The most likely mistake is an engine's flag without the prefix.
    prefixed = [option for prefix in ("--sglang", "--router") if (option := prefix + name[1:]) in candidates]
    return (prefixed + difflib.get_close_matches(name, candidates, n=count, cutoff=0.72))[:count]


def refuse_unknown(parser: Parser, argv: Sequence[str], leftover: Sequence[str]) -> None:
    """Reject the words that ``parse_known_args`` left over, naming the most similar flags.

    Raises:
        ConfigError: one line per unknown flag, and one per value that belongs to no flag.
    """
    if not leftover:
        return
    unknown = list(dict.fromkeys(token.split("=", 1)[0] for token in leftover if is_flag(token)))
    dashed = list(dict.fromkeys(token for token in leftover if _is_dashed(token)))
    lines = [_unknown_flag_line(name, parser) for name in unknown]
    lines += [_dashed_line(token, parser._option_string_actions) for token in dashed]
    lines += [
        f"{value!r} belongs to no flag: {flag} takes no more values. Quote values that contain spaces."
        for flag, value in _stray_values(argv, leftover, {*unknown, *dashed})
    ]
    raise ConfigError("\n".join(lines))


def note_repeated(parser: argparse.ArgumentParser, argv: Sequence[str]) -> None:
    """Log one line per flag that is given several times with different values; argparse uses the last."""
    found: dict[str, list[tuple[str, ...]]] = {}
    for flag, words in flags_with_values(argv):
        action = parser._option_string_actions.get(flag)
        if action is not None and not isinstance(action, argparse._AppendAction):  # whose values add up
            # --x and --no-x are two values of one flag.
            said = (flag,) if isinstance(action, argparse.BooleanOptionalAction) else tuple(words)
            found.setdefault(action.option_strings[0], []).append(said)
    for name, values in found.items():
        if len(set(values)) > 1:
            shown = redacted(", then ".join(" ".join(value) or "nothing" for value in values), name)
            logger.info("%s is given %d times (%s); the last one counts.", name, len(values), shown)


def flags_with_values(argv: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield each flag with the words up to the next flag."""
    flag: str | None = None
    values: list[str] = []
    for token in argv:
        if is_flag(token):
            if flag is not None:
                yield flag, values
            flag, equals, value = token.partition("=")
            values = [value] if equals else []
        else:
            values.append(token)
    if flag is not None:
        yield flag, values


def _unknown_flag_line(name: str, parser: Parser) -> str:
    if (reason := parser.no_flags.get(name)) is not None:
        return f"{name} is not a flag: {reason}. Leave it out."
    ours = PEERS_FLAGS.get(name.replace("_", "-").lower())
    similar = [ours] if ours is not None else nearest(name, parser._option_string_actions)
    if similar:
        return f"{name} is not a flag. Did you mean {' or '.join(similar)}?"
    return f"{name} is not a flag, and none is like it. See docs/flags.md, or train.py --help."


def _is_dashed(token: str) -> bool:
    return bool(_DASH.match(token)) and any(letter.isalpha() for letter in token)


def _dashed_line(token: str, known: Iterable[str]) -> str:
    name = "--" + _DASH.sub("", token, count=1).split("=", 1)[0]
    meant = name if name in known else (nearest(name, known, 1) or [name])[0]
    dash = next(letter for letter in token if letter != "-")
    return (
        f"{token!r} begins with a dash that is no hyphen ({unicodedata.name(dash).lower()}, U+{ord(dash):04X}), as "
        f"documents print it; type two hyphens: {meant}."
    )


def _stray_values(argv: Sequence[str], leftover: Sequence[str], unknown: set[str]) -> list[tuple[str, str]]:
    """Return pairs of (flag before it, value) for leftover values that do not follow an unknown flag."""
    strays = Counter(token for token in leftover if not is_flag(token) and token not in unknown)
    followed: list[tuple[str, str]] = []
    flag = "the command"
    for token in argv:
        if is_flag(token):
            flag = token.split("=", 1)[0]
        elif token in unknown:
            flag = token
        elif flag in unknown:
            strays[token] -= 1
        else:
            followed.append((flag, token))
    # If a value occurs twice, the last one is stray: the first belongs to its flag.
    found = []
    for flag, token in reversed(followed):
        if strays[token] > 0:
            strays[token] -= 1
            found.append((flag, token))
    return found[::-1]
