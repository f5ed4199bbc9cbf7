"""What follows from ``--prompt-data verifiers:NAME``; agents have no flag of their own."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator

from slime.flags.group import FlagGroup

PREFIXES = ("verifiers:", "verifiers-eval:")
"""Of an environment's rows for training, and of those held out."""
VERIFIERS = "slime.rollout.verifiers_env.generate"
"""Generate function of their rows."""


def derive_verifiers(args: Namespace) -> None:
    """Have environments of the package verifiers read and played."""
    args.prompt_readers = args.prompt_readers | dict.fromkeys(
        PREFIXES, "slime.ext.agent.verifiers_data.read_environment"
    )
    if str(args.prompt_data).startswith(PREFIXES) and args.custom_generate_function_path is None:
        args.custom_generate_function_path = VERIFIERS


def check_verifiers(args: Namespace) -> Iterator[str]:
    """Yield a message for environments in a mixture, whose rows nothing plays."""
    if args.custom_generate_function_path is not None or not args.runs_here:
        return
    environments = [source["path"] for source in args.prompt_sources if source["path"].startswith(PREFIXES)]
    if environments:
        yield (
            f"--prompt-data {args.prompt_data}: {environments[0]} is an environment, and nothing plays the rows of "
            "those in a mixture; where all data sets are environments, give --custom-generate-function-path "
            f"{VERIFIERS}."
        )


GROUP = FlagGroup(derive=(derive_verifiers,), check=(check_verifiers,))
