"""Phases of a step of the tiny demo job, and the share of slime's own code beside the engine and the trainer.

    python benchmarks/step_phases.py                            five repetitions of 32 prompts x 8 samples
    python benchmarks/step_phases.py --repeats 1 --prompts 4    a quick look
    python benchmarks/step_phases.py -- --sglang-sleep-on-idle  further flags of train.py, added to the demo's

One process without Ray runs the parts of a step one after the other, as the job does, with the real SGLang server
behind the real router, and one real Megatron rank.  Where possible, each part runs beside its *bare* baseline, the
least that the same work costs, in the same run and in alternating order:

* rollout: ``generate_rollout`` (prompts, tokenizer, router, samples, abort, ...) against the same requests posted all
  at once, directly to the engine, discarding their answers.  All responses have the same fixed length.
* train: ``actor.train`` (packing, reference log-probs, advantages, GRPO loss, metrics, ...) against one forward pass,
  and one forward and backward pass with a plain next-token loss and an optimizer step, over prepacked micro-batches,
  through the same model.
* push: ``update_weights`` (pause, flush, begin, names, bucket, digests, commit, ...) against one POST of a
  serialized bucket.

A ratio of 1.00 would mean that slime costs nothing; 1.10 means ten per cent more than engine and trainer need
anyway.  Phases without a bare time are entirely ours, and count against us in the ratio of the whole step.  A ratio
is the median of the repetitions' own ratios, so slow moments of the machine, which hit both sides, cancel.
The table excludes what the job adds around a step: calls between Ray actors, the transfer of train data through Ray's
object store, evaluations and checkpoints.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
import sys
import time
import warnings
from argparse import Namespace
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import torch

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

from benchmarks.demo_step import (  # noqa: E402
    RESPONSE_TOKENS,
    InProcessEngine,
    demo_args,
    start_engine,
    start_trainer,
    temporary_folder,
    timed,
    worked_samples,
)
from benchmarks.phase_table import Row, Stopwatch, format_table  # noqa: E402
from examples.tiny_arithmetic import make_task  # noqa: E402
from slime.backends.megatron_utils import sglang as wire  # noqa: E402
from slime.backends.megatron_utils.actor import MegatronTrainRayActor  # noqa: E402
from slime.backends.megatron_utils.cp_utils import packing_of  # noqa: E402
from slime.backends.megatron_utils.data import (  # noqa: E402
    forward_arguments,
    get_batch,
    get_data_iterator,
    prepare_rollout_data,
)
from slime.backends.megatron_utils.flags.model_dims import schedule_config  # noqa: E402
from slime.backends.sglang_utils import cpu_shim  # noqa: E402
from slime.backends.sglang_utils.server_control import ServerControl  # noqa: E402
from slime.backends.sglang_utils.sglang_engine import SGLangEngine  # noqa: E402
from slime.ext.fast_push import engine_verbs  # noqa: E402
from slime.observability.logging_utils import configure_logger, finish_tracking  # noqa: E402
from slime.observability.rollout_metrics import log_rollout  # noqa: E402
from slime.ray.rollout_data import check_fan_out, train_data_from_samples  # noqa: E402
from slime.rollout.base_types import leaf_samples  # noqa: E402
from slime.rollout.data_source import RolloutDataSourceWithBuffer  # noqa: E402
from slime.rollout.rm_hub import async_rm  # noqa: E402
from slime.rollout.sglang_rollout import GenerateState, abort, generate_rollout  # noqa: E402
from slime.train_data.columns import RankBatch  # noqa: E402
from slime.train_data.schedule import build_dp_schedule  # noqa: E402
from slime.train_data.split import split_by_rank  # noqa: E402
from slime.utils.async_utils import run  # noqa: E402
from slime.utils.http_utils import close_http_client, init_http_client  # noqa: E402
from slime.weights.push.wire import FLATTENED_BUCKET  # noqa: E402

TIMEOUT_S = 600.0

VERBS = [
    verb.__name__
    for verb in (
        engine_verbs.begin_weight_update,
        engine_verbs.receive_weight_buckets,
        engine_verbs.acknowledge_weight_update,
        engine_verbs.commit_weight_update,
    )
]
"""Requests of a push, by the names of their rows."""
ROWS = [
    Row("rollout", "rollout", "direct", "requests straight to the engine"),
    Row("the same requests, through the router", "routed", "direct", "requests straight to the engine", depth=1),
    Row("abort at its end, nothing pending", "abort", depth=1),
    Row("reward of worked answers, 60 % right", "reward"),
    Row("convert", "convert"),
    Row("schedule", "schedule"),
    Row("split", "split"),
    Row("rollout metrics", "log_rollout"),
    Row("engine gives its memory and takes it back", "hand_over"),
    Row("release, which flushes the cache", "release", depth=1),
    Row("resume, in two requests", "resume", depth=1),
    Row("train", "train", "bare_train", "the two passes below"),
    Row("preprocess", "data_preprocess", depth=1),
    Row("reference log-probs", "ref_log_probs", "bare_forward", "forward pass", depth=1),
    Row("advantages", "advantages", depth=1),
    Row("loss, gradients, optimizer", "actor_train", "bare_step", "same, next-token loss", depth=1),
    Row("metrics, logging, the rest", "train_rest", depth=1),
    Row("push weights", "push", "bare_push", "one POST of the same bytes"),
    Row("pause and continue", "pause", depth=1),
    Row("flush the cache", "flush_cache", depth=1),
    Row("begin: the manifest, checked by the engine", "begin_weight_update", depth=1),
    Row("load, as the engine's verb", "receive_weight_buckets", "bare_push", "one POST of the same bytes", depth=1),
    Row("acknowledge: digests of what was loaded", "acknowledge_weight_update", depth=1),
    Row("commit", "commit_weight_update", depth=1),
    Row("names, bucket, the rest", "push_rest", depth=1),
]


def say(text: str) -> None:
    """A progress line."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


# The parts of a step, each beside its bare baseline


class RolloutSide:
    """The same prompts repeatedly, as plain requests and as a rollout."""

    def __init__(self, args: Namespace, engine: SGLangEngine, watch: Stopwatch) -> None:
        self.args, self.engine, self.watch = args, engine, watch
        init_http_client(args)
        state = GenerateState(args)
        state.sampling_params["ignore_eos"] = True  # every response gets its full length, in all variants
        self._source = RolloutDataSourceWithBuffer(args)
        self._start = self._source.state_dict()
        prompts = [sample.prompt for group in self._source.get_samples(args.rollout_batch_size) for sample in group]
        self._payloads = [
            {
                "input_ids": state.tokenizer.encode(prompt, add_special_tokens=False),
                "sampling_params": state.sampling_params,
                "return_logprob": True,
            }
            for prompt in prompts
        ]
        self.num_tokens = len(prompts) * RESPONSE_TOKENS
        self._urls = {
            "direct": f"{engine.get_url()}/generate",
            "routed": f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate",
        }

    def measure(self, repeat: int) -> list[Any]:
        """Run every variant once, in rotating order; return the groups of slime's rollout."""
        groups: list[Any] = []
        for variant in _rotated(["direct", "routed", "rollout"], repeat):
            self.engine.flush_cache()
            if variant == "rollout":
                self._source.load_state_dict(self._start)
                with self.watch.time("rollout"):
                    groups = generate_rollout(self.args, repeat, self._source).samples
            else:
                with self.watch.time(variant):
                    run(self._post_all(self._urls[variant]), TIMEOUT_S)
        generated = sum(sample.response_length for sample in leaf_samples(groups))
        assert generated == self.num_tokens, (generated, self.num_tokens)
        with self.watch.time("abort"):
            run(abort(self.args, repeat, timeout_s=TIMEOUT_S), TIMEOUT_S)
        GenerateState(self.args).reset()
        return groups

    async def _post_all(self, url: str) -> None:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), trust_env=False) as session:

            async def post(payload: dict[str, Any]) -> None:
                async with session.post(url, json=payload) as response:
                    response.raise_for_status()
                    await response.read()

            await asyncio.gather(*map(post, self._payloads))


def measure_between(args: Namespace, actor: Any, watch: Stopwatch, repeat: int, groups: list[Any]) -> dict[str, Any]:
    """Reward, conversion, split and metrics: the rollout manager's own work; return the rank's data."""

    async def reward_all() -> None:
        await asyncio.gather(*(async_rm(args, sample) for sample in worked))

    worked = worked_samples(args.global_batch_size)
    parallel = actor.get_parallel_config()
    with watch.time("reward"):
        run(reward_all(), TIMEOUT_S)
    with watch.time("convert"):
        check_fan_out(groups)
        samples = list(leaf_samples(groups))
        train_data = train_data_from_samples(args, samples)
    with watch.time("schedule"):
        schedule = build_dp_schedule(
            schedule_config(args, parallel),
            [len(tokens) for tokens in train_data.tokens],
            global_batch_size=args.global_batch_size,
            rollout_indices=train_data.rollout_ids,
        )
    with watch.time("split"):
        rank_data = split_by_rank(train_data, schedule)[0]
    with watch.time("log_rollout"):
        log_rollout(args, repeat, samples, None, watch.spans["rollout"][-1])
    return rank_data


class TrainSide:
    """The actor's own training, and the same passes with nothing around them."""

    def __init__(self, args: Namespace, actor: MegatronTrainRayActor, watch: Stopwatch) -> None:
        self.args, self.actor, self.watch = args, actor, watch
        self.num_tokens = 0

    def measure(self, repeat: int, rank_data: RankBatch) -> None:
        """Run both variants once, in alternating order."""
        batches = self._pack(rank_data)
        for variant in _rotated([self._train, self._bare], repeat):
            variant(repeat, rank_data, batches)

    def _pack(self, rank_data: RankBatch) -> list[dict[str, Any]]:
        data = prepare_rollout_data(rank_data)
        self.num_tokens = sum(data["total_lengths"])
        iterator = get_data_iterator(data, 1)[0]
        packed = [get_batch(iterator, [], packing_of(self.args)) for _ in iterator.micro_batch_indices]
        return [forward_arguments(self.actor.model[0], batch) for batch in packed]

    def _train(self, repeat: int, rank_data: RankBatch, batches: list[dict[str, Any]]) -> None:
        with self.watch.time("train"):
            metrics = self.actor.train(repeat, rank_data)
        assert metrics is not None, "this is the main rank"
        rest_s = self.watch.spans["train"][-1]
        for name in ("data_preprocess", "ref_log_probs", "advantages", "actor_train"):
            elapsed_s = metrics[f"perf/{name}_time"]
            self.watch.add(name, elapsed_s)
            rest_s -= elapsed_s
        self.watch.add("train_rest", rest_s)

    def _bare(self, repeat: int, rank_data: RankBatch, batches: list[dict[str, Any]]) -> None:
        model, optimizer = self.actor.model[0], self.actor.optimizer
        assert optimizer is not None, "--num-rollout is above 0"
        with self.watch.time("bare_train"):
            with self.watch.time("bare_forward"), torch.no_grad():
                model.eval()
                for batch in batches:
                    model(**batch)
            with self.watch.time("bare_step"):
                model.train()
                model.zero_grad_buffer()
                for batch in batches:
                    logits = model(**batch)[0, :-1]
                    loss = torch.nn.functional.cross_entropy(logits, batch["input_ids"][0, 1:])
                    (loss / len(batches)).backward()
                model.finish_grad_sync()
                optimizer.step()


class PushSide:
    """The actor's own push, and one POST of prepared weights."""

    def __init__(self, args: Namespace, actor: Any, engine: SGLangEngine, watch: Stopwatch, undo: ExitStack) -> None:
        from safetensors.torch import load_file

        self.actor, self.watch = actor, watch
        self._server = ServerControl(engine.get_url() or "")
        self._tensors = sorted(load_file(Path(args.hf_checkpoint) / "model.safetensors").items())
        pool = undo.enter_context(ThreadPoolExecutor(4))
        actor.connect_rollout_engines([InProcessEngine(engine, pool, watch)], 1)

    def measure(self, repeat: int) -> None:
        """Run both variants once, in alternating order."""
        for variant in _rotated([self._push, self._bare], repeat):
            variant()

    def _push(self) -> None:
        with self.watch.time("push"):
            self.actor.update_weights()
        spans = self.watch.spans
        self.watch.add("pause", spans["pause_generation"][-1] + spans["continue_generation"][-1])
        self.watch.add(
            "push_rest", spans["push"][-1] - sum(spans[name][-1] for name in ("pause", "flush_cache", *VERBS))
        )

    def _bare(self) -> None:
        handle, buffer = wire.serialize_bucket(self._tensors)
        payload = {"serialized_named_tensors": [handle], "load_format": FLATTENED_BUCKET, "flush_cache": False}
        with self.watch.time("bare_push"):
            self._server.post("/update_weights_from_tensor", payload, timeout_s=TIMEOUT_S)
        del buffer  # the engine has read it


def _rotated(variants: list[Any], repeat: int) -> list[Any]:
    start = repeat % len(variants)
    return variants[start:] + variants[:start]


# The run


def measure(options: argparse.Namespace, folder: Path, undo: ExitStack) -> tuple[Stopwatch, dict[str, float]]:
    """Run all repetitions after one warm-up; return the seconds, and facts for the lines below the table."""
    watch = Stopwatch()
    make_task.make_task(folder / "task", seed=2026)
    args = demo_args(folder, options.prompts, options.samples, options.train_flags)
    undo.callback(finish_tracking, args)
    say("starting the engine and its router")
    started = time.perf_counter()
    engine = start_engine(args, undo)
    say(f"engine ready after {time.perf_counter() - started:.0f} s; loading the trainer")
    actor = start_trainer(args, undo)
    rollouts = RolloutSide(args, engine, watch)
    undo.callback(lambda: run(close_http_client(), 10))
    trainer = TrainSide(args, actor, watch)
    pushes = PushSide(args, actor, engine, watch, undo)
    for repeat in range(options.repeats + 1):
        started = time.perf_counter()
        groups = rollouts.measure(repeat)
        rank_data = measure_between(args, actor, watch, repeat, groups)
        release_s = timed(engine.release_memory_occupation)
        trainer.measure(repeat, rank_data)
        resume_s = timed(engine.resume_memory_occupation, ["weights"])
        pushes.measure(repeat)
        resume_s += timed(engine.resume_memory_occupation, ["kv_cache", "cuda_graph"])
        watch.add("release", release_s)
        watch.add("resume", resume_s)
        watch.add("hand_over", release_s + resume_s)
        what = f"repetition {repeat} of {options.repeats}" if repeat else "warm-up"
        say(f"{what}: {time.perf_counter() - started:.1f} s")
        if repeat == 0:
            watch.clear()
    return watch, {"generated": rollouts.num_tokens, "trained": trainer.num_tokens}


def rates(watch: Stopwatch, facts: dict[str, float]) -> str:
    """Tokens per second of both sides, with slime and bare."""
    lines = []
    for label, tokens, names in (
        ("generated", facts["generated"], ("rollout", "routed", "direct")),
        ("trained on", facts["trained"], ("train", "bare_train")),
    ):
        parts = [f"{name} {tokens / median(watch.spans[name]):,.0f}" for name in names]
        lines.append(f"tokens/s {label} ({tokens:,.0f} tokens): {', '.join(parts)}")
    return "\n".join(lines)


def parse_options(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line; arguments after ``--`` are flags of train.py."""
    split = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="repetitions that count; one more warms up")
    parser.add_argument("--prompts", type=int, default=32, help="prompts of a rollout")
    parser.add_argument("--samples", type=int, default=8, help="responses to each prompt")
    parser.add_argument("--json", type=Path, help="also write the seconds of every repetition to this file")
    options = parser.parse_args(argv[:split])
    options.train_flags = list(argv[split + 1 :])
    return options


def main() -> None:
    """Measure and print."""
    options = parse_options(sys.argv[1:])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that started processes are ended
    configure_logger(level=logging.WARNING)
    warnings.simplefilter("ignore")  # warnings of torch, Megatron and SGLang about each other
    cpu_shim.install()
    load = [os.getloadavg()[0]]
    with temporary_folder() as folder, ExitStack() as undo:
        watch, facts = measure(options, folder, undo)
    load.append(os.getloadavg()[0])
    print(
        f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, load {load[0]:.1f} at the start, {load[1]:.1f} at "
        f"the end (its own included); {options.prompts} prompts x {options.samples} samples of {RESPONSE_TOKENS} "
        f"tokens; medians of {options.repeats} repetitions\n"
    )
    print(format_table(ROWS, watch.spans))
    print("\n" + rates(watch, facts))
    if options.json is not None:
        options.json.write_text(json.dumps(watch.spans, indent=2) + "\n")


if __name__ == "__main__":
    main()
