"""Rewards: the grader of a response, and what happens when it fails."""

from __future__ import annotations

import argparse
import difflib
import importlib.util
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from slime.flags.config import read_config
from slime.flags.group import FlagGroup
from slime.flags.kinds import http_url, non_negative_int, wait_s

BOXED_PREFIX = "boxed_"
"""Of a grader's name: the boxed answer is graded."""
RM_TYPES = ("remote_rm", "gym", "deepscaler", "dapo", "math", "f1", "gpqa", "ifbench", "random", "math_verify")
"""Values of ``--rm-type``, each also with the prefix ``boxed_``; ``slime.rollout.rm_hub`` has the graders."""
INSTALL_MATH_VERIFY = "--rm-type math_verify needs the package math-verify: pip install -e '.[math]'"
GRADERS_WITH_LABEL = ("deepscaler", "dapo", "math", "f1", "math_verify")
"""Built-in graders that can say nothing without the row's label."""
GRADERS_WITH_LABELS = ("deepscaler",)
"""Those that take a list of labels, any of which is right."""
DICT_REWARDS = ("dapo",)
"""Built-in graders whose reward is a dict, so that a key must say which entry is trained on."""
NUMBER_REWARDS = tuple(name for name in RM_TYPES if name not in (*DICT_REWARDS, "remote_rm"))
"""Those whose reward is a number."""
FAILURE_POLICIES = ("failed", "zero", "raise")
"""Of ``--rm-failure-policy``."""


def is_math_verify_installed() -> bool:
    """Return True when math-verify can be imported."""
    return importlib.util.find_spec("math_verify") is not None


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """Settings of the grading of responses."""

    rm_type: str | None
    rm_url: str | None
    reward_key: str | None
    eval_reward_key: str | None
    rm_timeout_s: float
    rm_failure_policy: str
    rm_max_failures: int
    hf_checkpoint: str | None = None
    """Its tokenizer knows the end tokens, which graders do not read."""
    custom_rm_path: str | None = None
    custom_reward_post_process_path: str | None = None

    @property
    def eval_key(self) -> str | None:
        """Entry of a dict reward that eval reports; None where rewards are numbers."""
        return self.eval_reward_key or self.reward_key


def reward_config(args: Any) -> RewardConfig:
    """Return how ``args``, complete or not, says that responses are graded."""
    return read_config(RewardConfig, args, add_reward_arguments)


def add_reward_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the reward group to ``parser``."""
    group = parser.add_argument_group("reward", "Graders of responses.")
    group.add_argument(
        "--rm-type",
        help="Built-in grader: math_verify (for mathematics), math, deepscaler, dapo, f1, gpqa, ifbench, random or "
        "remote_rm; with the prefix boxed_ it grades the boxed answer. A row's metadata may name another.",
    )
    group.add_argument("--rm-url", type=http_url, help="Address of the remote grader or teacher.")
    group.add_argument("--reward-key", help="Entry of a dict reward to train on.")
    group.add_argument(
        "--eval-reward-key", help="Entry of a dict reward that evaluations report. Default: --reward-key."
    )
    group.add_argument("--group-rm", action="store_true", help="Grade all responses to a prompt in one call.")
    group.add_argument(
        "--rm-timeout-s",
        type=wait_s,
        default=600.0,
        help="Seconds that grading one response may take, retries of the remote grader included.",
    )
    group.add_argument(
        "--rm-failure-policy",
        choices=FAILURE_POLICIES,
        default="failed",
        help="What happens to a response whose grader hangs, raises or returns nonsense. failed: it gets the status "
        "FAILED and counts nowhere, neither in training nor among the rewards of its group nor in metrics; zero: it "
        "trains with reward 0, as a wrong answer does; raise: the run ends.",
    )
    group.add_argument(
        "--rm-max-failures",
        type=non_negative_int,
        default=64,
        help="End the run after so many failed gradings in a row; 0: never.",
    )


def derive_reward(args: Namespace) -> None:
    """Fill in the entry of a dict reward that eval reports."""
    if args.eval_reward_key is None:
        args.eval_reward_key = args.reward_key


def check_rewards(args: Namespace) -> Iterator[str]:
    """Yield one message for each grader that does not exist or does not fit the other flags."""
    asked = [("--rm-type", args)] + [(f"rm_type of eval data set {one.name}:", one) for one in args.eval_datasets]
    for where, flags in asked:
        if flags.rm_type is not None:
            yield from _grader(flags.rm_type, where)
            is_remote = flags.rm_type.removeprefix(BOXED_PREFIX) == "remote_rm"
            if is_remote and flags.custom_rm_path is None and args.rm_url is None:
                yield f"{where} remote_rm needs --rm-url, the address of the grader."
    if args.rm_type is None or args.custom_rm_path is not None:
        return
    name = args.rm_type.removeprefix(BOXED_PREFIX)
    if name in DICT_REWARDS and args.reward_key is None:
        yield f"--rm-type {args.rm_type} gives a dict; say which entry is the reward: --reward-key score."
    if name in NUMBER_REWARDS and args.reward_key is not None and args.custom_generate_function_path is None:
        yield (
            f"--reward-key {args.reward_key} chooses an entry of a dict, but --rm-type {args.rm_type} gives a number. "
            "Drop --reward-key, or use a grader that gives a dict (dapo, remote_rm, --custom-rm-path)."
        )


def _grader(rm_type: str, where: str) -> Iterator[str]:
    name = rm_type.removeprefix(BOXED_PREFIX)
    if name not in RM_TYPES:
        similar = difflib.get_close_matches(name, RM_TYPES, n=1)
        hint = f"Did you mean {similar[0]}? " if similar else ""
        yield (
            f"{where} {rm_type} is no grader. {hint}There are {', '.join(RM_TYPES)}, each also with the prefix "
            f"{BOXED_PREFIX}; your own goes into --custom-rm-path."
        )
    if name == "math_verify" and not is_math_verify_installed():
        yield f"{where} {rm_type}: {INSTALL_MATH_VERIFY}"


GROUP = FlagGroup(add_reward_arguments, derive=(derive_reward,), check=(check_rewards,))
