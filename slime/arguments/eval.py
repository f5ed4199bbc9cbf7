"""Flags of evaluation. What is not given here is taken from the rollout's own flags."""

from __future__ import annotations

import argparse

from slime.arguments.kinds import non_negative_float, non_negative_int, number_in, positive_int, top_k


def add_eval_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the evaluation group to ``parser``."""
    group = parser.add_argument_group("evaluation", "Held-out data, and how it is sampled.")
    group.add_argument("--eval-interval", type=positive_int, default=None, help="Rollouts from one eval to the next.")
    group.add_argument(
        "--eval-prompt-data",
        nargs="+",
        default=None,
        metavar="NAME PATH",
        help="Pairs of name and file. A single value is the file of a data set named aime.",
    )
    group.add_argument(
        "--eval-config",
        default=None,
        metavar="YAML",
        help="Data sets with settings of their own: `eval: {defaults: {...}, datasets: [{name, path, ...}]}`.",
    )
    group.add_argument(
        "--skip-eval-before-train", action="store_true", help="No eval of the weights that training starts from."
    )
    group.add_argument("--eval-input-key", default=None, help="Column of the prompt, for eval.")
    group.add_argument("--eval-label-key", default=None, help="Column of the label, for eval.")
    group.add_argument("--eval-tool-key", default=None, help="Column of the tools, for eval.")
    group.add_argument("--n-samples-per-eval-prompt", type=positive_int, default=1, help="Responses to each prompt.")
    group.add_argument(
        "--eval-temperature", type=non_negative_float, default=None, help="Temperature, for eval; 0 is greedy."
    )
    group.add_argument(
        "--eval-top-p", type=number_in(0.0, 1.0, low_open=True), default=None, help="Nucleus, for eval, in (0, 1]."
    )
    group.add_argument("--eval-top-k", type=top_k, default=None, help="Tokens to draw from, for eval; -1 means all.")
    group.add_argument(
        "--eval-max-response-len", type=positive_int, default=None, help="Tokens a response may have, for eval."
    )
    group.add_argument(
        "--eval-max-prompt-len", type=positive_int, default=None, help="Longer eval prompts (tokens) are left out."
    )
    group.add_argument(
        "--eval-min-new-tokens",
        type=non_negative_int,
        default=None,
        help="Tokens a response must have at least, for eval.",
    )
    group.add_argument(
        "--eval-max-context-len",
        type=positive_int,
        default=None,
        help="Tokens of prompt and response together, for eval. Default: --rollout-max-context-len.",
    )
