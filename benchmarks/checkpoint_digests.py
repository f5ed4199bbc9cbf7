"""Cost of digests in saves and loads, and of the job's secret in a request, with and without in alternation.

    python benchmarks/checkpoint_digests.py [--mib 512] [--rounds 5] [--folder DIR] [--json FILE]

One process writes and reads bf16 matrices as a ``torch_dist`` checkpoint, writes them as a Hugging Face folder, loads
a Qwen3 of that size from such a folder into the trainer's model, and asks two servers on loopback for an answer of 64
tokens; one of them is behind an engine's guard and gets the secret.
"Without" replaces only the digest's arithmetic.  For each it prints:

* the median of the ratios of consecutive runs, in wall-clock and in the process's CPU seconds, with the
  quartiles of those ratios, which include other load of the machine,
* for digests, the seconds in which a reading or writing thread waits for one, hands one over or computes it itself,
  beside the total seconds.  Other digest work overlaps with copying or waiting for the disk.

The page cache holds the written data, so that loads are as fast, and digests relatively as costly, as possible.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime.backends.megatron_utils import cpu_platform  # noqa: F401

# isort: split
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import uvicorn

from slime.backends.megatron_utils.checkpoints.checkpoint_reader import CheckpointReader
from slime.backends.megatron_utils.checkpoints.checkpoint_writer import WRITER_THREADS, _FileWriter
from slime.backends.megatron_utils.hf_to_megatron import load_hf_weights
from slime.backends.megatron_utils.hf_to_megatron.tensors import HfTensors
from slime.backends.megatron_utils.model_provider import get_model_provider
from slime.backends.sglang_utils.server_guard import ServerGuard
from slime.utils import http_utils
from slime.utils.net import get_free_port
from slime.weights import file_digests
from slime.weights.hf_files import HfFolderWriter
from tests.unit.backends.megatron_utils.megatron_case import hf_flags, parse, start_parallel, write_hf_model

ROWS = 4096
"""Rows of a matrix; with as many columns it has 32 MiB."""
REQUESTS = 300
"""Requests in a run of one server."""
SECRET = "0123456789abcdef" * 4

Times = tuple[float, float]
"""Wall-clock seconds, and CPU seconds of all threads."""


class NoHash:
    """Replaces a digest that is being computed."""

    def update(self, data: Any) -> None:
        """Do nothing with the bytes."""

    def reset(self) -> None:
        """Do nothing."""

    def hexdigest(self) -> str:
        """Return a value that no reader compares."""
        return "0" * 16


class Exposed:
    """Measures the seconds for which threads are blocked by digests, by thread.

    While it is installed, threads of pools named "digest" compute in the background; it counts the time to
    hand work to them, to wait for it, and to digest small pieces directly.
    """

    def __init__(self) -> None:
        self.seconds: Counter[int] = Counter()
        submit, exposed = ThreadPoolExecutor.submit, self

        def timed_submit(pool: Any, act: Any, *args: Any, **keywords: Any) -> Future[Any]:
            if pool._thread_name_prefix != "digest":
                return submit(pool, act, *args, **keywords)
            future = exposed.timed(lambda: submit(pool, act, *args, **keywords))
            result = future.result
            future.result = lambda timeout=None: exposed.timed(lambda: result(timeout))  # type: ignore[method-assign]
            return future

        class TimedHash:
            def __init__(self) -> None:
                self._hash = real()
                self.reset, self.hexdigest = self._hash.reset, self._hash.hexdigest

            def update(self, data: Any) -> None:
                exposed.timed(lambda: self._hash.update(data))

        real = file_digests.xxhash.xxh3_64
        ThreadPoolExecutor.submit = timed_submit  # type: ignore[method-assign, assignment]
        file_digests.xxhash.xxh3_64 = TimedHash

    def timed(self, act: Callable[[], Any]) -> Any:
        """Run a function; its time counts for this thread, unless the thread computes for others."""
        start = time.perf_counter()
        try:
            return act()
        finally:
            if not threading.current_thread().name.startswith("digest"):
                self.seconds[threading.get_ident()] += time.perf_counter() - start

    def take(self) -> float:
        """Return the seconds of the thread that was blocked longest, and reset."""
        seconds = max(self.seconds.values(), default=0.0)
        self.seconds.clear()
        return seconds


def timed(act: Callable[[], Any]) -> Times:
    """Return the seconds that a function takes."""
    start, cpu = time.perf_counter(), time.process_time()
    act()
    return time.perf_counter() - start, time.process_time() - cpu


def save(tensors: dict[str, torch.Tensor], folder: Path, *, digests: bool) -> Times:
    """Write a ``torch_dist`` checkpoint."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    kept = file_digests.xxhash.xxh3_64
    file_digests.xxhash.xxh3_64 = kept if digests else NoHash
    size = file_digests.OVERLAP_BYTES
    file_digests.OVERLAP_BYTES = size if digests else 1 << 60
    try:
        return timed(lambda: dcp.save(tensors, storage_writer=_FileWriter(folder, b"common", WRITER_THREADS)))
    finally:
        file_digests.xxhash.xxh3_64, file_digests.OVERLAP_BYTES = kept, size


def load(tensors: dict[str, torch.Tensor], folder: Path, *, digests: bool) -> Times:
    """Read it into ``tensors``."""
    return timed(lambda: dcp.load(tensors, storage_reader=CheckpointReader(folder, verify=digests)))


def save_hf(tensors: dict[str, torch.Tensor], folder: Path, *, digests: bool) -> Times:
    """Write a Hugging Face folder, in shards of 256 MiB."""
    shutil.rmtree(folder, ignore_errors=True)

    def write() -> None:
        with HfFolderWriter(folder, assets_from=None, shard_bytes=1 << 28) as writer:
            writer.add_all(tensors.items())

    kept = file_digests.digest_of
    file_digests.digest_of = kept if digests else lambda data: "0" * 16
    try:
        return timed(write)
    finally:
        file_digests.digest_of = kept


def model_loads(root: Path, mib: int) -> tuple[Callable[..., Times], int]:
    """Return a function that loads a model as the trainer does, and the model's size in MiB."""
    sizes = dict(hidden_size=1024, intermediate_size=3072, num_attention_heads=16, num_key_value_heads=8, head_dim=128)
    write_hf_model(root / "fp32", "qwen3", num_hidden_layers=max(1, mib // 30), vocab_size=32000, **sizes)
    with (
        HfTensors(root / "fp32") as stored,
        HfFolderWriter(root / "bf16", assets_from=root / "fp32", shard_bytes=1 << 28) as writer,
    ):
        writer.add_all((name, stored.get(name).bfloat16()) for name in sorted(stored.names()))
    args = parse(*hf_flags(root / "bf16"), "--bf16")
    start_parallel(args)
    model = get_model_provider(args)()

    def load_hf(*, digests: bool) -> Times:
        args.verify_checkpoint = digests
        return timed(lambda: load_hf_weights(args, [model], root / "bf16"))

    return load_hf, writer.total_bytes >> 20


async def answer(scope: Any, receive: Any, send: Any) -> None:
    """Answer as an engine does, with 64 tokens and their log-probs."""
    if scope["type"] != "http":
        return
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
    await send({"type": "http.response.body", "body": ANSWER})


ANSWER = json.dumps({"meta_info": {"output_token_logprobs": [[-0.123456789, 12345, None]] * 64}}).encode()
PAYLOAD = {"input_ids": list(range(512)), "sampling_params": {"max_new_tokens": 64}}


def start_server(app: Any) -> str:
    """Serve in a thread; return the URL."""
    port = get_free_port(30500)
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning", lifespan="off", access_log=False))
    threading.Thread(target=server.run, daemon=True).start()
    while not server.started:
        time.sleep(0.01)
    return f"http://127.0.0.1:{port}/generate"


def request_runs() -> Callable[..., Times]:
    """Return functions that query the guarded or the other server :data:`REQUESTS` times; client and server both
    count."""
    urls = {True: start_server(ServerGuard(answer, secret=SECRET, is_local=False)), False: start_server(answer)}
    http_utils.add_job_servers(urls[True])
    http_utils._CLIENT.secret = SECRET
    loop = asyncio.new_event_loop()

    async def ask(url: str) -> None:
        for _ in range(REQUESTS):
            await http_utils.post(url, PAYLOAD)

    return lambda *, digests: timed(lambda: loop.run_until_complete(ask(urls[digests])))


def compare(run: Callable[..., Times], rounds: int, exposed: Exposed | None) -> dict[str, Any]:
    """Run with and without in alternation; return the ratios and the exposed share."""
    pairs, shares = [], []
    run(digests=True), run(digests=False)
    for index in range(rounds):
        times: dict[bool, Times] = {}
        for digests in (index % 2 == 0, index % 2 == 1):
            if exposed is not None:
                exposed.take()
            times[digests] = run(digests=digests)
            if digests and exposed is not None:
                shares.append(exposed.take() / times[True][0])
        pairs.append((times[True], times[False]))
    found: dict[str, Any] = {"seconds": statistics.median(with_[0] for with_, _ in pairs)}
    for clock, which in (("wall", 0), ("cpu", 1)):
        found[clock] = statistics.quantiles([with_[which] / without[which] for with_, without in pairs], n=4)
    found["extra_cpu_us"] = statistics.median(with_[1] - without[1] for with_, without in pairs) * 1e6
    if shares:
        found["exposed_share"] = statistics.median(shares)
    return found


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=512, help="size of the checkpoint")
    parser.add_argument("--rounds", type=int, default=15, help="pairs that are measured of each")
    parser.add_argument("--folder", type=Path, help="where to write; default: a temporary folder")
    parser.add_argument("--json", type=Path, help="file for the numbers")
    options = parser.parse_args()
    root = Path(tempfile.mkdtemp(dir=options.folder))
    dist.init_process_group("gloo", init_method=f"file://{root}/store", world_size=1, rank=0)
    size = ROWS * ROWS * 2
    tensors = {
        f"layers.{index}.weight": torch.randn(ROWS, ROWS).bfloat16()
        for index in range(max(1, options.mib * 2**20 // size))
    }
    data = b"x" * (size * len(tensors))
    results: dict[str, Any] = {"mib": len(data) >> 20}
    results["digest_gb_per_s"] = len(data) / 1e9 / timed(lambda: file_digests.digest_of(data))[0]
    print(f"digest alone: {results['digest_gb_per_s']:.1f} GB/s")
    results["request"] = compare(request_runs(), options.rounds, None)
    exposed = Exposed()
    for name, run, folder in (
        ("save", save, root / "a"),
        ("load", load, root / "a"),
        ("save_hf", save_hf, root / "b"),
    ):
        if name == "load":
            save(tensors, folder, digests=True)
        results[name] = compare(
            lambda *, digests, run=run, folder=folder: run(tensors, folder, digests=digests), options.rounds, exposed
        )
    load_hf, results["mib_of_model"] = model_loads(root, options.mib)
    results["load_hf"] = compare(load_hf, options.rounds, exposed)
    for name, found in results.items():
        if isinstance(found, dict):
            wall, cpu = ("{1:.3f} ({0:.3f}-{2:.3f})".format(*found[clock]) for clock in ("wall", "cpu"))
            share = f", exposed {found['exposed_share']:.2%}" if "exposed_share" in found else ""
            share = share or f", {found['extra_cpu_us'] / REQUESTS:.1f} us of the CPU a request"
            print(f"{name}: {found['seconds']:.3f} s; ratio of the clock {wall}, of the CPU {cpu}{share}")
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    dist.destroy_process_group()
    shutil.rmtree(root)


if __name__ == "__main__":
    main()
