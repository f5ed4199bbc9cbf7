"""Rewards: the grader of responses, and the handling of its failures."""

from __future__ import annotations

import argparse
import importlib.util
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass

from slime.flags.config import FlagConfig
from slime.flags.group import FlagGroup
from slime.flags.kinds import http_url, non_negative_int, wait_s
from slime.utils.errors import did_you_mean

BOXED_PREFIX = "boxed_"
"""Prefix of a grader's name that makes it grade the boxed answer."""
RM_TYPES = ("remote_rm", "gym", "deepscaler", "dapo", "math", "f1", "gpqa", "ifbench", "random", "math_verify")
"""Values of ``--rm-type``, each also with the prefix ``boxed_``; ``slime.rollout.rm_hub`` has the graders."""
INSTALL_MATH_VERIFY = "--rm-type math_verify needs the package math-verify: pip install -e '.[math]'"
GRADERS_WITH_LABEL = ("deepscaler", "dapo", "math", "f1", "math_verify")
"""Built-in graders that need the row's label."""
GRADERS_WITH_LABELS = ("deepscaler",)
"""Built-in graders that accept a list of labels, any of which is correct."""
DICT_REWARDS = ("dapo",)
"""Built-in graders whose reward is a dict; --reward-key selects the entry to train on."""
NUMBER_REWARDS = tuple(name for name in RM_TYPES if name not in (*DICT_REWARDS, "remote_rm"))
"""Built-in graders whose reward is a number."""
FAILURE_POLICIES = ("failed", "zero", "raise")
"""Values of ``--rm-failure-policy``."""


def is_math_verify_installed() -> bool:
    """Return True if math-verify is installed."""
    return importlib.util.find_spec("math_verify") is not None


def add_reward_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the reward group to ``parser``."""
    group = parser.add_argument_group("reward", "Graders of responses.")
    group.add_argument(
        "--rm-type",
        help="Built-in grader: math_verify (for mathematics), math, deepscaler, dapo, f1, gpqa, ifbench, random or "
        "remote_rm; with the prefix boxed_ it grades the boxed answer. A row's metadata may override it.",
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
        help="Seconds that grading one response may take, including retries of the remote grader.",
    )
    group.add_argument(
        "--rm-failure-policy",
        choices=FAILURE_POLICIES,
        default="failed",
        help="Handling of a response whose grader hangs, raises or returns an invalid reward. failed: it gets the "
        "status FAILED and does not count in training, the rewards of its group or metrics; zero: it is trained on "
        "with reward 0, like a wrong answer; raise: the run ends.",
    )
    group.add_argument(
        "--rm-max-failures",
        type=non_negative_int,
        default=64,
        help="End the run after this many consecutive failed gradings, or a rollout in which all failed; 0: never.",
    )


@dataclass(frozen=True, kw_only=True)
class RewardConfig(FlagConfig, flags=(add_reward_arguments,)):
    """Settings for grading responses."""

    rm_type: str | None
    rm_url: str | None
    reward_key: str | None
    eval_reward_key: str | None
    rm_timeout_s: float
    rm_failure_policy: str
    rm_max_failures: int
    hf_checkpoint: str | None = None
    """Model folder, whose tokenizer has the end tokens that are removed before grading."""
    custom_rm_path: str | None = None
    custom_reward_post_process_path: str | None = None
    custom_convert_samples_to_train_data_path: str | None = None
    rollout_sample_hook_path: list[str] | None = None

    @property
    def takes_any_reward(self) -> bool:
        """Whether a plug-in sees the rewards before they must be numbers."""
        later = (self.custom_convert_samples_to_train_data_path, self.rollout_sample_hook_path)
        return bool(self.custom_reward_post_process_path or any(later))

    @property
    def eval_key(self) -> str | None:
        """Entry of a dict reward that evaluations report; None if rewards are numbers."""
        return self.eval_reward_key or self.reward_key


def derive_reward(args: Namespace) -> None:
    """Derive the entry of a dict reward that evaluations report."""
    if args.eval_reward_key is None:
        args.eval_reward_key = args.reward_key


def check_rewards(args: Namespace) -> Iterator[str]:
    """Yield one message per grader that does not exist or conflicts with other flags."""
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
        yield (
            f"{where} {rm_type} is no grader.{did_you_mean(name, RM_TYPES)} There are "
            f"{', '.join(RM_TYPES)}, each also with the prefix {BOXED_PREFIX}; your own goes into --custom-rm-path."
        )
    if name == "math_verify" and not is_math_verify_installed():
        yield f"{where} {rm_type}: {INSTALL_MATH_VERIFY}"


GROUP = FlagGroup(add_reward_arguments, derive=(derive_reward,), check=(check_rewards,))
