"""Cost of the client side of a rollout, against a bare aiohttp loop that only posts and parses, in the same run.

    python benchmarks/rollout_client.py                         2,048 samples of 64, 1,024 and 32,768 tokens
    python benchmarks/rollout_client.py --lengths 64 --repeats 5
    python benchmarks/rollout_client.py --model qwen3-4B --samples 512 --repeats 2       seconds with a real engine

A scripted engine (``tests/scripted_engine``) in a separate process holds all requests until the last one arrives,
so that all are in flight at once, and answers with tokens and log-probs.  Two clients, each in a fresh process:

* bare: one task per request, ``session.post(json=...)`` and ``json.loads``; the result is discarded,
* slime: ``generate_rollout`` with the default data source, traces, a sample hook, a reward, a filter, and the ledger
  on disk (``--no-ledger`` omits it), until it contains the rollout's train data.

Both send a few requests before the clock starts.  Prints for each: processor seconds of the client (user and system),
per sample and per token; peak memory of the process, and its growth during the rollout; the
longest time that the event loop was blocked.  Medians over ``--repeats`` pairs.

With ``--model`` the engine is real, with random weights of that shape, started as in a job, behind the job's
router, which the bare client bypasses.  Both clients request the same responses, whose lengths are a seeded trace
(log-normal, ``--median``, ``--sigma``, ``--cap``) and forced; prints the seconds until the last one arrives.  Flags
after ``--`` are train.py's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

from benchmarks.asynchrony import command, response_length, write_model  # noqa: E402

GROUP_SIZE = 8
PROMPT_TOKENS = 64
WARM_UP_GROUPS = 4
FIRST = WARM_UP_GROUPS * GROUP_SIZE
"""Number of the first measured sample."""
BEAT_S = 0.002
CHILD_TIMEOUT_S = 900


class Heartbeat:
    """Wakes up every ``BEAT_S`` seconds; ``longest_s`` is the longest delay."""

    def __init__(self) -> None:
        self.longest_s = 0.0

    async def beat(self) -> None:
        last = time.perf_counter()
        while True:
            await asyncio.sleep(BEAT_S)
            now = time.perf_counter()
            self.longest_s = max(self.longest_s, now - last - BEAT_S)
            last = now


def memory_mib(name: str) -> float:
    """``VmRSS`` or ``VmHWM`` of this process."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) / 1024 for line in file if line.startswith(name + ":"))


def reset_peak() -> None:
    """Reset ``VmHWM`` to the current size."""
    Path("/proc/self/clear_refs").write_text("5")


class Meter:
    """Processor time and memory of a piece of work in this process."""

    def __enter__(self) -> Meter:
        self.before_mib = memory_mib("VmRSS")
        reset_peak()
        self._wall_s = time.perf_counter()
        self._used = resource.getrusage(resource.RUSAGE_SELF)
        return self

    def __exit__(self, *exc: object) -> None:
        used = resource.getrusage(resource.RUSAGE_SELF)
        self.user_s = used.ru_utime - self._used.ru_utime
        self.system_s = used.ru_stime - self._used.ru_stime
        self.wall_s = time.perf_counter() - self._wall_s
        self.peak_mib = memory_mib("VmHWM")

    def result(self, heartbeat: Heartbeat) -> dict[str, float]:
        return {
            "cpu_s": self.user_s + self.system_s,
            "user_s": self.user_s,
            "wall_s": self.wall_s,
            "peak_mib": self.peak_mib,
            "grown_mib": self.peak_mib - self.before_mib,
            "block_s": heartbeat.longest_s,
        }


def prompt_text(number: int) -> str:
    """A prompt of ``PROMPT_TOKENS`` one-byte tokens."""
    return f"{number:08d}".ljust(PROMPT_TOKENS, "?")


@dataclass(frozen=True)
class Work:
    """The work of a client."""

    url: str
    num_samples: int
    length: int
    """Tokens per response; the longest if there is a trace."""
    trace: dict[str, float] | None
    """Trace of a real engine's response lengths; see ``asynchrony.response_length``."""

    def params(self, number: int) -> dict[str, Any]:
        """The sampling parameters that fix the length of a response."""
        if self.trace is None:
            return {"max_new_tokens": self.length}
        length = response_length(number, self.trace) if number >= FIRST else 16
        return {"max_new_tokens": length, "ignore_eos": True}


# The bare client.


async def bare_client(work: Work) -> dict[str, float]:
    """One task per request; the answers are discarded."""
    import aiohttp

    params = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "skip_special_tokens": False}

    async def ask(session: aiohttp.ClientSession, number: int) -> None:
        # The ids of byte_tokenizer, whose first byte is "!".
        ids = [ord(character) - ord("!") for character in prompt_text(number // GROUP_SIZE)]
        payload = {"input_ids": ids, "sampling_params": params | work.params(number), "return_logprob": True}
        async with session.post(f"{work.url}/generate", json=payload) as response:
            response.raise_for_status()
            json.loads(await response.text())

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as session:
        await asyncio.gather(*(ask(session, number) for number in range(FIRST)))
        await rewrite_script(session, work)
        heartbeat = Heartbeat()
        beating = asyncio.create_task(heartbeat.beat())
        with Meter() as meter:
            await asyncio.gather(*(ask(session, FIRST + number) for number in range(work.num_samples)))
        await asyncio.sleep(2 * BEAT_S)
        beating.cancel()
    return meter.result(heartbeat)


async def rewrite_script(session: Any, work: Work) -> None:
    """Answer all requests together from now on, with the work's tokens; a real engine has no script."""
    if work.trace is None:
        script = {"gather": work.num_samples, "length": work.length}
        async with session.post(f"{work.url}/script", json=script) as response:
            response.raise_for_status()


# Ours.


def see_sample(args: Namespace, sample: Any, rollout_id: int | None = None) -> None:
    """``--rollout-sample-hook-path``."""
    assert sample.response_length > 0


async def reward(args: Namespace, sample: Any, **kwargs: Any) -> float:
    """``--custom-rm-path``: differs between samples of a group."""
    return float(sample.index % 2)


async def generate(args: Namespace, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """``--custom-generate-function-path``, if there is a trace."""
    from slime.rollout import sglang_rollout

    return await sglang_rollout.generate(args, sample, sampling_params | args.work.params(sample.index))


def client_args(work: Work, folder: Path, *, has_ledger: bool) -> Namespace:
    """The arguments of a rollout of all samples."""
    from tests.unit.rollout.fake_cluster import make_args

    num_groups = work.num_samples // GROUP_SIZE
    prompts = folder / "prompts.jsonl"
    numbers = range(WARM_UP_GROUPS + num_groups)
    prompts.write_text("".join(json.dumps({"prompt": prompt_text(n), "label": ""}) + "\n" for n in numbers))
    return make_args(
        int(work.url.rsplit(":", 1)[1]),
        work=work,
        custom_generate_function_path=None if work.trace is None else f"{__name__}.generate",
        hf_checkpoint=str(folder),
        prompt_data=str(prompts),
        sglang_server_concurrency=num_groups * GROUP_SIZE,
        rollout_batch_size=num_groups,
        over_sampling_batch_size=num_groups,
        n_samples_per_prompt=GROUP_SIZE,
        rollout_max_response_len=work.length,
        save=str(folder) if has_ledger else None,
        rollout_timeout_s=CHILD_TIMEOUT_S,
        rollout_sample_hook_path=[f"{__name__}.see_sample"],
        custom_rm_path=f"{__name__}.reward",
        dynamic_sampling_filter_path="slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std",
    )


def byte_tokenizer(folder: Path) -> None:
    """A fast tokenizer, one token per byte."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {symbol: number for number, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def slime_client(work: Work, *, has_ledger: bool = True) -> dict[str, float]:
    """Call ``generate_rollout`` as the rollout manager does, from a thread other than the event loop's."""
    import aiohttp

    from slime.ext.ledger.ledger import Ledger
    from slime.rollout.data_source import RolloutDataSourceWithBuffer
    from slime.rollout.run_state import GroupObserver, RunState, use_run
    from slime.rollout.sglang_rollout import generate_rollout
    from slime.utils.async_utils import get_async_loop, run
    from slime.utils.http_utils import close_http_client, init_http_client

    async def rewrite() -> None:
        async with aiohttp.ClientSession() as session:
            await rewrite_script(session, work)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        byte_tokenizer(folder)
        args = client_args(work, folder, has_ledger=has_ledger)
        init_http_client(args)
        source = RolloutDataSourceWithBuffer(args)
        observer = Ledger(args, source) if has_ledger else GroupObserver()
        use_run(RunState((observer,)))
        observer.start(0)
        args.rollout_batch_size = args.over_sampling_batch_size = WARM_UP_GROUPS
        observer.make_samples(0, lambda: generate_rollout(args, 0, source))
        args.rollout_batch_size = args.over_sampling_batch_size = work.num_samples // GROUP_SIZE
        run(rewrite(), 30)
        heartbeat = Heartbeat()
        beating = asyncio.run_coroutine_threadsafe(heartbeat.beat(), get_async_loop().loop)
        with Meter() as meter:
            output = observer.make_samples(1, lambda: generate_rollout(args, 1, source))
        beating.cancel()
        observer.close()
        run(close_http_client(), 30)
        leaves = [sample for group in output.samples for sample in group]
        assert len(leaves) == work.num_samples and min(sample.index for sample in leaves) == FIRST
        assert all(s.response_length == work.params(s.index)["max_new_tokens"] for s in leaves)
        assert all(sample.trace["events"] for sample in leaves)
    return meter.result(heartbeat)


# The run.


def start_server(num_samples: int) -> tuple[subprocess.Popen[str], str]:
    """A scripted engine in a separate process, and its URL."""
    command = [sys.executable, "-m", "tests.scripted_engine", "--length", "64"]
    command += ["--cached-bodies", str(4 * num_samples // GROUP_SIZE)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPO)
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def run_child(role: str, work: Work, *, has_ledger: bool) -> dict[str, float]:
    """One client in a fresh process."""
    words: list[Any] = [sys.executable, "-m", "benchmarks.rollout_client", "--role", role, "--url", work.url]
    words += ["--samples", work.num_samples, "--lengths", work.length]
    words += [] if has_ledger else ["--no-ledger"]
    if work.trace is not None:
        words += ["--model", "any", *(word for key, value in work.trace.items() for word in (f"--{key}", value))]
    done = subprocess.run(
        [str(word) for word in words],
        cwd=REPO,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=CHILD_TIMEOUT_S,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def median_of(runs: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def report(length: int, num_samples: int, pairs: dict[str, list[dict[str, float]]]) -> None:
    """Two rows and their ratio."""
    ratios = [ours["cpu_s"] / bare["cpu_s"] for ours, bare in zip(pairs["slime"], pairs["bare"], strict=True)]
    for role, runs in pairs.items():
        middle = median_of(runs)
        per_sample = middle["cpu_s"] / num_samples * 1e6
        ratio = f"{statistics.median(ratios):.2f}" if role == "slime" else ""
        print(
            f"| {length:,} | {role} | {middle['cpu_s']:.2f} | {ratio} | {per_sample:,.0f} | {per_sample / length:.3f} "
            f"| {middle['peak_mib']:.0f} | {middle['grown_mib']:.0f} | {middle['block_s'] * 1e3:.0f} |",
            flush=True,
        )


def engine_args(folder: Path, options: argparse.Namespace, extra: list[str]) -> Namespace:
    """The arguments of a job whose engine has random weights, and accepts clients without a secret."""
    from slime.compose import parse_args

    write_model(folder / "task", options.model, has_weights=False)
    job = Namespace(out=folder, prompts=options.samples // GROUP_SIZE, rollouts=1, cap=options.cap, tokens=8192)
    args = parse_args(argv=[*command("synchronous", job, extra)[2:], "--no-job-secret"])
    args.sglang_load_format = "dummy"
    return args


def run_model(options: argparse.Namespace, extra: list[str], trace: dict[str, float]) -> None:
    """Run both clients in turn with a real engine behind a router, as a job starts them; return their seconds."""
    from benchmarks.demo_step import start_engine

    tokens = sum(response_length(FIRST + number, trace) for number in range(options.samples))
    runs: dict[str, list[dict[str, float]]] = {"bare": [], "slime": []}
    with ExitStack() as undo:
        began_s = time.monotonic()
        args = engine_args(Path(undo.enter_context(tempfile.TemporaryDirectory())), options, extra)
        engine = start_engine(args, undo)
        urls = (engine.server.url, f"http://{args.sglang_router_ip}:{args.sglang_router_port}")
        print(f"engine up after {time.monotonic() - began_s:.0f} s; {options.samples} requests, {tokens:,} tokens")
        works = {role: Work(url, options.samples, options.cap, trace) for role, url in zip(runs, urls, strict=True)}
        # Kernels for batches of this size are compiled on first use.
        run_child("bare", Work(urls[0], options.samples, 16, trace | {"cap": 16}), has_ledger=False)
        for _ in range(options.repeats):
            for role, work in works.items():
                engine.flush_cache()
                runs[role].append(run_child(role, work, has_ledger=not options.no_ledger))
                print(f"{role}: {runs[role][-1]['wall_s']:.2f} s, {time.monotonic() - began_s:.0f} s", flush=True)
    print(json.dumps(runs))
    bare_s, slime_s = (statistics.median(run["wall_s"] for run in done) for done in runs.values())
    print(
        f"slime / bare: {slime_s / bare_s:.3f}; tokens/s: {tokens / bare_s:,.0f} bare, {tokens / slime_s:,.0f} slime"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=2048, help=f"in flight at once; a multiple of {GROUP_SIZE}")
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 1024, 32768], help="response tokens")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-ledger", action="store_true", help="leave the ledger out")
    parser.add_argument("--model", metavar="NAME", help="a real engine with random weights of this shape")
    parser.add_argument("--median", type=float, default=300, help="of the real engine's response lengths, tokens")
    parser.add_argument("--sigma", type=float, default=1.0, help="of their logarithm")
    parser.add_argument("--cap", type=int, default=2048, help="the longest of them")
    parser.add_argument("--role", choices=["bare", "slime"], help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    own, extra = sys.argv[1:], []
    if "--" in own:
        own, extra = own[: own.index("--")], own[own.index("--") + 1 :]
    options = parser.parse_args(own)
    trace = {"median": options.median, "sigma": options.sigma, "cap": options.cap} if options.model else None
    if options.role:
        work = Work(options.url, options.samples, options.lengths[0], trace)
        is_bare, has_ledger = options.role == "bare", not options.no_ledger
        print(json.dumps(asyncio.run(bare_client(work)) if is_bare else slime_client(work, has_ledger=has_ledger)))
        return
    if trace is not None:
        run_model(options, extra, trace)
        return
    print("| tokens | client | CPU s | ratio | us/sample | us/token | peak MiB | grown MiB | longest block ms |")
    print("| ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for length in options.lengths:
        server, url = start_server(options.samples)
        work = Work(url, options.samples, length, None)
        try:
            pairs: dict[str, list[dict[str, float]]] = {"bare": [], "slime": []}
            for _ in range(options.repeats):
                for role, runs in pairs.items():
                    runs.append(run_child(role, work, has_ledger=not options.no_ledger))
            report(length, options.samples, pairs)
        finally:
            server.kill()
            server.wait()


if __name__ == "__main__":
    main()
