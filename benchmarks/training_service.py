"""Tokens per second of the training service's trainer with 1, 4 and 16 clients, against the step of a local run.

    python benchmarks/training_service.py --model qwen3-4B --rank 32
    python benchmarks/training_service.py --model qwen3-0.6B --layers 2 --tokens 512 --clients 1 4    # on a CPU

One rank, random weights.  In a round every client sends a request of ``--client-tokens`` tokens and takes an Adam
step; all requests go to the trainer in one call.  The local run is ``train.py``'s step over the same
micro-batches with one adapter (its own optimizer; no log-prob pass).  HTTP and Ray are not included.  The service runs

    one by one     each client's request in separate micro-batches, adapters on the host in between
    on the GPU     the same, with --training-api-gpu-adapters
    packed         the same, with --training-api-pack-clients

A swap is the loading of an adapter into the model; the latency of a step is the time of its round.  With several
clients each row says whether the first client's log-probs and gradient are bitwise equal to those when it is alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.published_configs import PUBLISHED  # noqa: E402
from benchmarks.train_mfu import Trained, run_step, sequence_lengths, start_trainer  # noqa: E402

NUM_WARM_UP = 1


def parse_options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", default="qwen3-0.6B", choices=sorted(PUBLISHED), metavar="NAME", help="of published_configs.py"
    )
    parser.add_argument("--layers", type=int, metavar="N", help="only its first N layers")
    parser.add_argument("--rank", type=int, default=32, help="of the adapters")
    parser.add_argument("--tokens", type=int, default=16384, help="tokens of one packed micro-batch")
    parser.add_argument("--longest", type=int, default=4096, help="longest sequence")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16], help="numbers of clients")
    parser.add_argument(
        "--client-tokens",
        type=int,
        nargs="+",
        metavar="N",
        help="tokens of a request. Default: --tokens, / 4, / 16",
    )
    parser.add_argument("--rounds", type=int, default=3, help="measured, behind one that warms up")
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON of the numbers")
    return parser.parse_args()


def median_s(work: Callable[[int], Any], rounds: int) -> float:
    """Return the median seconds of a call, including the device's work, after warm-up calls."""
    seconds = []
    for number in range(NUM_WARM_UP + rounds):
        begin = time.perf_counter()
        work(number)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[NUM_WARM_UP:])


def make_request(args: Namespace, model_id: str, num_tokens: int, longest: int, seed: int) -> Any:
    """Return a pass over this many random tokens, with a policy-gradient loss."""
    from slime.ext.training_api.backend import Datum, PassRequest

    draw, data = np.random.default_rng(seed), []
    for length in sequence_lengths(num_tokens, min(longest, num_tokens), seed, shortest=1):
        inputs = {
            "target_tokens": draw.integers(0, args.vocab_size, length),
            "logprobs": np.full(length, -10, np.float32),
            "advantages": draw.normal(size=length).astype(np.float32),
        }
        data.append(Datum(draw.integers(0, args.vocab_size, length).tolist(), inputs))
    return PassRequest(model_id, data, "importance_sampling")


def local_rate(args: Namespace, options: argparse.Namespace, trained: Trained, num_microbatches: int) -> float:
    """Return tokens per second of ``train.py``'s step over this many micro-batches."""
    asked = Namespace(tokens=options.tokens, longest=options.longest, microbatches=num_microbatches, reference=False)
    steps = [run_step(trained, asked, number, None, 16) for number in range(NUM_WARM_UP + options.rounds)]
    step_s = statistics.median(step.seconds["step"] for step in steps[NUM_WARM_UP:])
    return options.tokens * num_microbatches / step_s


def is_exact(trainer: Any, requests: list[Any]) -> bool:
    """Return whether other clients leave the first one's log-probs and gradient bitwise unchanged."""
    found = []
    for together in (requests, requests[:1]):
        for request in together:
            trainer.drop_gradient(request.model_id)
        outputs = trainer.run(together)[0]
        found.append([torch.from_numpy(outputs[index]["logprobs"]) for index in sorted(outputs)])
        found[-1].append(trainer._states[requests[0].model_id].gradient.clone())
    return all(map(torch.equal, *found))


def measure(args: Namespace, options: argparse.Namespace, trainer: Any, clients: int, client_tokens: int) -> dict:
    """Return the numbers of rounds with this many clients; creates missing ones."""
    from slime.ext.training_api.backend import AdamParams, LoraSpec

    names = [f"client {number}" for number in range(clients)]
    for number, name in enumerate(names):
        if name not in trainer._states:
            trainer.add(name, LoraSpec(options.rank, seed=number))
    requests = [make_request(args, name, client_tokens, options.longest, seed) for seed, name in enumerate(names)]
    passes_s = median_s(lambda _: trainer.run(requests), options.rounds)
    steps_s = median_s(
        lambda _: [trainer.step(name, AdamParams(learning_rate=1e-5)) for name in names], options.rounds
    )
    states = list(trainer._states.values())[:1]
    return {
        "clients": clients,
        "client_tokens": client_tokens,
        "tokens_per_s": clients * client_tokens / (passes_s + steps_s),
        "round_s": passes_s + steps_s,
        "adam_s": steps_s / clients,
        "swap_s": median_s(lambda _: trainer._hold(states, [args.max_tokens_per_gpu]), options.rounds),
        "exact": is_exact(trainer, requests) if clients > 1 else None,
    }


WAYS: dict[str, dict[str, Any]] = {
    "one by one": {},
    "on the GPU": {"num_on_device": 1000},
    "packed": {"num_on_device": 1000, "packs_clients": True},
}


def run(options: argparse.Namespace, folder: str) -> None:
    """Measure the local run, then the service with each number of clients, and print a line for each."""
    from slime.backends.megatron_utils.model import setup_model_and_optimizer
    from slime.backends.megatron_utils.policies import ModelSwitch
    from slime.compose import parts
    from slime.ext.training_api.adapter_trainer import AdapterTrainer
    from slime.ray.parts import load_all

    args = start_trainer(options, ["--lora-rank", str(options.rank)], folder)
    model, optimizer, scheduler = setup_model_and_optimizer(args, transforms=load_all(parts(args).transforms))
    trained = Trained(args, model, optimizer, scheduler, ModelSwitch(model), None)
    local = local_rate(args, options, trained, max(options.clients))
    print(f"local run: {local:,.0f} tokens/s", flush=True)
    rows = []
    for way, parameters in WAYS.items():
        trainer = AdapterTrainer(args, model, **parameters)
        for client_tokens in options.client_tokens or [options.tokens // part for part in (1, 4, 16)]:
            for clients in options.clients:
                row = {"way": way, **measure(args, options, trainer, clients, client_tokens)}
                row["of_local"] = row["tokens_per_s"] / local
                rows.append(row)
                print(
                    f"{way}, {clients:2d} clients of {client_tokens} tokens: {row['tokens_per_s']:,.0f} tokens/s "
                    f"({row['of_local']:.0%} of the local run), a round {row['round_s']:.2f} s, Adam "
                    f"{row['adam_s'] * 1e3:.1f} ms and a swap {row['swap_s'] * 1e3:.1f} ms a client, "
                    f"exact: {row['exact']}",
                    flush=True,
                )
                if options.out is not None:
                    found = {"model": options.model, "local_tokens_per_s": local, "rows": rows}
                    options.out.write_text(json.dumps(found, indent=1))
    torch.distributed.destroy_process_group()


def main() -> None:
    options = parse_options()
    with tempfile.TemporaryDirectory() as folder:
        run(options, folder)


if __name__ == "__main__":
    main()
