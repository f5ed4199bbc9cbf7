"""``python -m tests.mutations``: put known bugs back and report which test catches each.

python -m tests.mutations                 all mutations
python -m tests.mutations --quick         without the slow ones
python -m tests.mutations --only whiten   those with the word in the bug or target
python -m tests.mutations --json FILE     also write the verdicts as JSON
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from tests.mutations.runner import Outcome, as_plain, run_mutations
from tests.mutations.table import MUTATIONS


def report(outcomes: list[Outcome]) -> str:
    """Return one line for each bug, with the checks that missed it."""
    lines = []
    for outcome in outcomes:
        lines.append(f"{'caught' if outcome.is_caught else 'MISSED'}  {outcome.mutation.bug}")
        for verdict in outcome.verdicts:
            state = "" if verdict.is_sound else "FAILS WITHOUT THE BUG  "
            lines.append(f"        {state}{verdict.check}: {verdict.reason or 'PASSES'}")
    missed = [outcome for outcome in outcomes if not outcome.is_caught]
    lines.append(f"{len(outcomes) - len(missed)} of {len(outcomes)} bugs caught")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description="Put known bugs back.")
    parser.add_argument("--quick", action="store_true", help="leave out the mutations that take seconds each")
    parser.add_argument("--only", default="", help="a word of the bug or the target")
    parser.add_argument("--json", type=Path, help="write the verdicts there")
    options = parser.parse_args()
    chosen = [
        mutation
        for mutation in MUTATIONS
        if options.only in f"{mutation.bug} {mutation.target}" and not (options.quick and mutation.is_slow)
    ]
    outcomes = run_mutations(chosen)
    print(report(outcomes))
    if options.json is not None:
        options.json.write_text(json.dumps(as_plain(outcomes), indent=1))
    return 0 if chosen and all(outcome.is_caught for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
