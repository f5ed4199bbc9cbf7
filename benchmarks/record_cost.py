"""Cost of a run's record: bytes and CPU microseconds per token of the writing thread, and the wait of a step.

    .venv/bin/python benchmarks/record_cost.py [--samples 256] [--length 2048] [--rollouts 5]

Tokens are drawn like a large vocabulary's, with log-probs like a trained model's; nothing else runs.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from argparse import Namespace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime.ext.record.run_record import RecordSink  # noqa: E402
from slime.ext.record.writer import EVENTS_FILE  # noqa: E402
from slime.observability import telemetry  # noqa: E402
from slime.utils.types import Sample  # noqa: E402

VOCABULARY = 150_000


def make_samples(count: int, length: int, generator: torch.Generator) -> list[Sample]:
    """Return samples whose tokens follow Zipf's law, with eight answers to a prompt."""
    samples = []
    for index in range(count):
        ids = (VOCABULARY ** torch.rand(length, generator=generator)).long()
        log_probs = -torch.rand(length, generator=generator).pow(4) * 5
        text = " ".join(f"{one:x}" for one in ids.tolist())
        samples.append(
            Sample(
                index=index, group_index=index // 8, prompt="p" * 400, response=text, reward=float(index % 2),
                tokens=[1] * 100 + ids.tolist(), response_length=length, rollout_log_probs=log_probs.tolist(),
            )
        )  # fmt: skip
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("samples", 256), ("length", 2048), ("rollouts", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    samples = make_samples(options.samples, options.length, generator)
    trainer = [
        torch.tensor(one.rollout_log_probs) + 1e-3 * torch.randn(options.length, generator=generator)
        for one in samples
    ]
    columns = {"trainer_log_probs": trainer, "advantages": [torch.full((options.length,), 0.5)] * len(samples)}
    with tempfile.TemporaryDirectory() as folder:
        telemetry.start(Namespace(save=folder), "benchmark", (RecordSink,), primary=True)
        waited_s = 0.0
        for rollout_id in range(options.rollouts + 1):  # the first loads the library
            start = time.thread_time()
            telemetry.samples("rollout", rollout_id=rollout_id, samples=samples, rewards=[0.0] * len(samples))
            trained = {"positions": range(len(samples)), "columns": columns}
            telemetry.samples("trained", rollout_id=rollout_id, rank=0, **trained)
            waited_s += time.thread_time() - start
        telemetry.stop()
        lines = (Path(folder) / EVENTS_FILE).read_text().splitlines()
    costs = [one for one in map(json.loads, lines) if one["event"] == "recorded" and "_000000" not in one["file"]]
    tokens = sum(one["tokens"] for one in costs)
    print(
        json.dumps(
            {
                "tokens a rollout": tokens // options.rollouts,
                "bytes a token": round(sum(one["bytes"] for one in costs) / tokens, 2),
                "CPU us a token, the record's thread": round(1e6 * sum(one["cpu_s"] for one in costs) / tokens, 2),
                "CPU us a token, the step's own thread": round(1e6 * waited_s / tokens, 4),
            }
        )
    )


if __name__ == "__main__":
    main()
