"""``python -m slime_plugins.rollout_buffer.run_generator FILE JSON``: one run of a generator, in its own process."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from slime_plugins.rollout_buffer.registry import load_module


def main() -> None:
    """Run ``run_rollout`` of FILE with the settings in JSON."""
    file, settings = sys.argv[1:3]
    load_module(Path(file)).run_rollout(json.loads(settings))


if __name__ == "__main__":
    main()
