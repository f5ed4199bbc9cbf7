"""Cost of the client side of a rollout, beside a bare aiohttp loop that only posts and parses, in the same run.

    python benchmarks/rollout_client.py                         2,048 samples of 64, 1,024 and 32,768 tokens
    python benchmarks/rollout_client.py --lengths 64 --repeats 5

A scripted engine (``tests/scripted_engine``) in a process of its own holds all requests until the last one is there,
so that all are in flight at once, and answers with tokens and log-probs.  Two clients, each in a fresh process:

* bare: one task for each request, ``session.post(json=...)`` and ``json.loads``, what was parsed is thrown away,
* slime: ``generate_rollout`` with the default data source, traces, a sample hook, a reward, a filter, and the ledger
  on disk (``--no-ledger`` leaves it out), until the train data of the rollout is in it.

Both send a few requests before the clock starts.  Printed for each: processor seconds of the client (user and system),
per sample and per token; peak memory of the process and how much of it is not there before the rollout begins; the
longest time that the event loop did not turn.  Medians over ``--repeats`` pairs.
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
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

GROUP_SIZE = 8
PROMPT_TOKENS = 64
WARM_UP_GROUPS = 4
BEAT_S = 0.002
CHILD_TIMEOUT_S = 900


class Heartbeat:
    """Wakes every ``BEAT_S`` seconds; ``longest_s`` is how much later than that it ever came."""

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
    """Let ``VmHWM`` begin again at the present size."""
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


# The bare client.


async def bare_client(url: str, num_samples: int, length: int) -> dict[str, float]:
    """One task a request; nothing is done with the answers."""
    import aiohttp

    params = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": length, "skip_special_tokens": False}

    async def ask(session: aiohttp.ClientSession, number: int) -> None:
        ids = [ord(character) for character in prompt_text(number // GROUP_SIZE)]
        payload = {"input_ids": ids, "sampling_params": params, "return_logprob": True}
        async with session.post(f"{url}/generate", json=payload) as response:
            json.loads(await response.text())

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as session:
        await asyncio.gather(*(ask(session, number) for number in range(WARM_UP_GROUPS * GROUP_SIZE)))
        await rewrite_script(session, url, num_samples, length)
        heartbeat = Heartbeat()
        beating = asyncio.create_task(heartbeat.beat())
        with Meter() as meter:
            await asyncio.gather(*(ask(session, number) for number in range(num_samples)))
        await asyncio.sleep(2 * BEAT_S)
        beating.cancel()
    return meter.result(heartbeat)


async def rewrite_script(session: Any, url: str, gather: int, length: int) -> None:
    """From now on ``gather`` requests are answered together, with ``length`` tokens."""
    async with session.post(f"{url}/script", json={"gather": gather, "length": length}) as response:
        response.raise_for_status()


# Ours.


def see_sample(args: Namespace, sample: Any, rollout_id: int | None = None) -> None:
    """``--rollout-sample-hook-path``."""
    assert sample.response_length > 0


async def reward(args: Namespace, sample: Any, **kwargs: Any) -> float:
    """``--custom-rm-path``: not the same for all samples of a group."""
    return float(sample.index % 2)


def client_args(url: str, folder: Path, num_groups: int, length: int, *, has_ledger: bool) -> Namespace:
    """The arguments of a rollout of ``num_groups`` groups."""
    from tests.unit.rollout.fake_cluster import make_args

    prompts = folder / "prompts.jsonl"
    rows = (json.dumps({"prompt": prompt_text(number), "label": ""}) for number in range(num_groups))
    prompts.write_text("\n".join(rows) + "\n")
    return make_args(
        int(url.rsplit(":", 1)[1]),
        hf_checkpoint=str(folder),
        prompt_data=str(prompts),
        sglang_server_concurrency=num_groups * GROUP_SIZE,
        rollout_batch_size=num_groups,
        over_sampling_batch_size=num_groups,
        n_samples_per_prompt=GROUP_SIZE,
        rollout_max_response_len=length,
        save=str(folder) if has_ledger else None,
        rollout_timeout_s=CHILD_TIMEOUT_S,
        rollout_sample_hook_path=[f"{__name__}.see_sample"],
        custom_rm_path=f"{__name__}.reward",
        dynamic_sampling_filter_path="slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std",
    )


def byte_tokenizer(folder: Path) -> None:
    """A fast tokenizer, one token for each byte."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {symbol: number for number, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def slime_client(url: str, num_samples: int, length: int, *, has_ledger: bool = True) -> dict[str, float]:
    """``generate_rollout``, called as the rollout manager calls it: from a thread that is not the event loop's."""
    import aiohttp

    from slime.rollout.data_source import RolloutDataSourceWithBuffer
    from slime.rollout.ledger.ledger import open_ledger
    from slime.rollout.sglang_rollout import generate_rollout
    from slime.utils.async_utils import get_async_loop, run
    from slime.utils.http_utils import close_http_client, init_http_client

    async def rewrite() -> None:
        async with aiohttp.ClientSession() as session:
            await rewrite_script(session, url, num_samples, length)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        byte_tokenizer(folder)
        args = client_args(url, folder, num_samples // GROUP_SIZE, length, has_ledger=has_ledger)
        init_http_client(args)
        ledger = open_ledger(args, RolloutDataSourceWithBuffer(args))
        ledger.start(0)
        args.rollout_batch_size = args.over_sampling_batch_size = WARM_UP_GROUPS
        ledger.make_samples(0, lambda: generate_rollout(args, 0, ledger.data_source))
        args.rollout_batch_size = args.over_sampling_batch_size = num_samples // GROUP_SIZE
        run(rewrite(), 30)
        heartbeat = Heartbeat()
        beating = asyncio.run_coroutine_threadsafe(heartbeat.beat(), get_async_loop().loop)
        with Meter() as meter:
            output = ledger.make_samples(1, lambda: generate_rollout(args, 1, ledger.data_source))
        beating.cancel()
        ledger.close()
        run(close_http_client(), 30)
        leaves = [sample for group in output.samples for sample in group]
        assert len(leaves) == num_samples and all(sample.response_length == length for sample in leaves)
        assert all(sample.trace["events"] for sample in leaves)
    return meter.result(heartbeat)


# The run.


def start_server(num_samples: int) -> tuple[subprocess.Popen[str], str]:
    """A scripted engine in a process of its own, and its URL."""
    command = [sys.executable, "-m", "tests.scripted_engine", "--length", "64"]
    command += ["--cached-bodies", str(4 * num_samples // GROUP_SIZE)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPO)
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def run_child(role: str, url: str, num_samples: int, length: int, *, has_ledger: bool) -> dict[str, float]:
    """One client in a fresh process."""
    command = [sys.executable, "-m", "benchmarks.rollout_client", "--role", role, "--url", url]
    command += ["--samples", str(num_samples), "--lengths", str(length)]
    command += [] if has_ledger else ["--no-ledger"]
    done = subprocess.run(
        command,
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=2048, help=f"in flight at once; a multiple of {GROUP_SIZE}")
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 1024, 32768], help="response tokens")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-ledger", action="store_true", help="leave the ledger out")
    parser.add_argument("--role", choices=["bare", "slime"], help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role == "bare":
        print(json.dumps(asyncio.run(bare_client(options.url, options.samples, options.lengths[0]))))
        return
    if options.role == "slime":
        has_ledger = not options.no_ledger
        print(json.dumps(slime_client(options.url, options.samples, options.lengths[0], has_ledger=has_ledger)))
        return
    print("| tokens | client | CPU s | ratio | us/sample | us/token | peak MiB | grown MiB | longest block ms |")
    print("| ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for length in options.lengths:
        server, url = start_server(options.samples)
        try:
            pairs: dict[str, list[dict[str, float]]] = {"bare": [], "slime": []}
            for _ in range(options.repeats):
                for role, runs in pairs.items():
                    runs.append(run_child(role, url, options.samples, length, has_ledger=not options.no_ledger))
            report(length, options.samples, pairs)
        finally:
            server.kill()
            server.wait()


if __name__ == "__main__":
    main()
