"""Print the table of routing replay: every family with experts, in many layouts, against one process.

    python -m tests.matrix.replay_table                                  # all of it
    python -m tests.matrix.replay_table --family glm5 --layout CP2       # one cell

Each cell is two steps over ragged samples: with an engine's experts (random ones), and with experts recorded in a pass
before the routers were inverted.  The number is the worst relative difference of a gradient or a
log-prob; the exit code is 1 if one is too large.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.matrix import replay
from tests.matrix.case import load_cases
from tests.matrix.layouts import BOUND, FULL_FAMILIES, LAYOUTS
from tests.matrix.pool import RankPool

TABLE = (
    *("TP2 SP recompute", "PP2 uneven", "PP2 VPP2", "PP2 recompute", "CP2", "CP2 recompute", "EP2", "EP2 recompute"),
    *("EP2 selective", "TP2 EP2 SP", "CP2 EP2", "PP2 EP2", "TP2 EP2 ETP1 DP2", "PP2 CP2"),
)
"""Layouts of the table."""


@dataclass
class References:
    """Checkpoints, and a single process's results on them; created on demand."""

    pool: RankPool
    root: Path
    done: dict[tuple[str, int], tuple[Path, dict[str, float]]] = field(default_factory=dict)

    def get(self, family: str, config: dict[str, Any]) -> tuple[Path, dict[str, float]]:
        """The folder, and the shares of changed choices."""
        key = (family, config["num_hidden_layers"])
        if key not in self.done:
            folder = self.root / f"{key[0]}-{key[1]}"
            folder.mkdir()
            (metrics,) = self.pool.run(replay.write_reference, 1, family, config, str(folder))
            self.done[key] = folder, metrics
        return self.done[key]


@dataclass(frozen=True)
class Outcome:
    """The result of one cell over all its ranks."""

    error: float
    worst: str
    """The tensor with that error."""
    metrics: dict[str, float]
    """Share of choices that the router would change, with an engine's experts and with recorded ones."""
    expected_metrics: dict[str, float]


def run_cell(references: References, family: str, layout: str) -> Outcome:
    """One family in one layout."""
    cell = LAYOUTS[layout]
    own = load_cases([family])[family].config
    config = {**own, "num_hidden_layers": cell.num_layers or own["num_hidden_layers"]}
    folder, expected = references.get(family, config)
    ranks = references.pool.run(
        replay.compare, cell.world_size, family, config, str(folder), cell.flags, timeout_s=180 * cell.world_size
    )
    error, worst, metrics = max(ranks, key=lambda rank: rank[0])
    return Outcome(error, worst, metrics, expected)


def main(argv: list[str] | None = None) -> int:
    """Print the cells as they finish."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    families = [name for name, case in load_cases().items() if case.has_experts]
    parser.add_argument("--family", nargs="+", choices=families, default=families)
    parser.add_argument("--layout", nargs="+", choices=list(LAYOUTS), default=TABLE)
    wanted = parser.parse_args(argv)
    is_bad = False
    with RankPool() as pool, tempfile.TemporaryDirectory(prefix="replay-") as root:
        references = References(pool, Path(root))
        for family in wanted.family:
            for layout in wanted.layout:
                if LAYOUTS[layout].num_layers and family not in FULL_FAMILIES:
                    continue  # its config has per-layer lists
                start = time.monotonic()
                outcome = run_cell(references, family, layout)
                is_bad |= not outcome.error < BOUND
                shares = " ".join(f"{kind} {share:.3f}" for kind, share in outcome.metrics.items())
                seconds = time.monotonic() - start
                print(f"{family:16} {layout:28} {outcome.error:.1e}  changed: {shares}  {seconds:.0f} s", flush=True)
    return int(is_bad)


if __name__ == "__main__":
    sys.exit(main())
