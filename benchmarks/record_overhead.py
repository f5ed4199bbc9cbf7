"""Cost of the record in a step: steps with and without it in alternation, in one process, on the real trainer.

    python benchmarks/record_overhead.py [--model small] [--layers 4] [--samples 16] [--tokens 256] [--pairs 20]

Every pair takes one step with the record and one without, in alternating order.  A step is the work of the rollout
manager and the trainer on finished samples: conversion, advantages, forward, backward, optimizer, and
with the record the samples, the spans and the weights digest.  Generation, which only records spans, is
excluded, so the share of a whole step is smaller.  Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.published_configs import PUBLISHED  # noqa: E402
from benchmarks.step_numbers import synchronize  # noqa: E402

NUM_WARM_UP = 2
SMALL = {
    "hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "vocab_size": 8192,
}  # fmt: skip
"""A model small enough for a CPU: a published one with these sizes."""


def make_samples(options: Namespace, vocab_size: int, seed: int) -> list[Any]:
    """Return random answers of equal length, two per prompt."""
    from slime.utils.types import Sample

    generator = torch.Generator().manual_seed(seed)
    samples = []
    for index in range(options.samples):
        ids = torch.randint(0, vocab_size, (options.tokens + 16,), generator=generator).tolist()
        log_probs = (-torch.rand(options.tokens, generator=generator) * 5).tolist()
        samples.append(
            Sample(
                index=index, group_index=index // 2, prompt="p" * 64, response="r" * 4 * options.tokens, tokens=ids,
                response_length=options.tokens, rollout_log_probs=log_probs, reward=float(index % 2),
                status=Sample.Status.COMPLETED,
            )
        )  # fmt: skip
    return samples


def write_model(folder: Path, options: Namespace) -> None:
    """Write a model with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = PUBLISHED["qwen3-0.6B" if options.model == "small" else options.model]
    config = dict(config) | (SMALL if options.model == "small" else {}) | {"num_hidden_layers": options.layers}
    config.pop("layer_types", None)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")


def trainer_args(options: Namespace, folder: str) -> Namespace:
    """Return complete args of a trainer of one rank; the model is in ``folder``."""
    from slime.compose import parse_args

    words = f"""--hf-checkpoint {folder} --ref-load {folder} --load {folder} --debug-train-only --num-rollout 1000
        --rollout-batch-size {options.samples // 2} --n-samples-per-prompt 2 --global-batch-size {options.samples}
        --disable-rollout-global-dataset --lr 1e-6 --use-dynamic-batch-size --actor-num-gpus-per-node 1
        --max-tokens-per-gpu {4 * (options.tokens + 16)} --save {folder}/run"""
    return parse_args(argv=words.split())


def start_worker(options: Namespace, folder: str) -> Any:
    """Return a trainer of one rank with random weights."""
    from slime.backends.megatron_utils.actor import MegatronTrainRayActor
    from slime.utils.net import find_available_port

    write_model(Path(folder), options)
    worker = MegatronTrainRayActor()
    worker.set_rendezvous(1, 0, "127.0.0.1", find_available_port(21000))
    worker.init(trainer_args(options, folder), "actor")
    return worker


def take_step(worker: Any, samples: list[Any], number: int, *, is_recorded: bool) -> dict[str, float]:
    """Take a step with finished samples; return its seconds, and the seconds until the record is written."""
    from slime.ext.record.run_record import RecordSink
    from slime.observability import telemetry
    from slime.ray.rollout_data import split_for_ranks, train_data_from_samples

    args = worker.args
    telemetry.start(args, "actor 0", (RecordSink,) if is_recorded else (), primary=True)
    synchronize()
    start, cpu = time.perf_counter(), time.process_time()
    data = train_data_from_samples(args, samples)
    telemetry.samples("rollout", rollout_id=number, samples=samples, rewards=data.rewards)
    (batch,) = split_for_ranks(args, data, worker.get_parallel_config())
    worker.train(number, batch)
    synchronize()
    wall_s = time.perf_counter() - start
    telemetry.flush()
    return {"wall": wall_s, "cpu": time.process_time() - cpu, "written": time.perf_counter() - start - wall_s}


def seconds_of_digest(worker: Any) -> float:
    """Return the median time of the weights digest in each recorded step."""
    from slime.backends.megatron_utils.parameters import weights_digest

    seconds = []
    for _ in range(10):
        synchronize()
        start = time.perf_counter()
        weights_digest(worker.model)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="small", help="of published_configs.py, or small")
    for name, default in (("layers", 4), ("samples", 16), ("tokens", 256), ("pairs", 20)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        worker = start_worker(options, folder)
        measured: dict[bool, list[dict[str, float]]] = {True: [], False: []}
        for number in range(2 * (NUM_WARM_UP + options.pairs)):
            pair, second = divmod(number, 2)
            is_recorded = bool(pair % 2) != bool(second)
            samples = make_samples(options, worker.args.vocab_size, pair)
            seconds = take_step(worker, samples, number, is_recorded=is_recorded)
            if pair >= NUM_WARM_UP:
                measured[is_recorded].append(seconds)
        digest_s = seconds_of_digest(worker)
        events = Path(folder, "run/events.jsonl").read_text().splitlines()
    costs = [one for one in map(json.loads, events) if one["event"] == "recorded"]
    recorded_bytes = sum(one["bytes"] for one in costs) / (NUM_WARM_UP + options.pairs)
    result: dict[str, Any] = {"pairs": options.pairs, "bytes a step": round(recorded_bytes)}
    for kind, what in (("wall", "seconds of a step"), ("cpu", "CPU seconds of a step, all threads")):
        on, off = ([one[kind] for one in measured[is_on]] for is_on in (True, False))
        shares = sorted((a - b) / b for a, b in zip(on, off, strict=True))
        result[what] = {
            "off, median": round(statistics.median(off), 4),
            "on - off in pairs, median %": round(100 * statistics.median(shares), 2),
            "quartiles %": [round(100 * shares[len(shares) * n // 4], 2) for n in (1, 3)],
        }
    result["CPU seconds of the writing thread, a step"] = round(
        sum(one["cpu_s"] for one in costs) / (NUM_WARM_UP + options.pairs), 4
    )
    result["seconds of a digest of the weights"] = round(digest_s, 4)
    result["seconds until written, after the step"] = round(
        statistics.median([one["written"] for one in measured[True]]), 4
    )
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
