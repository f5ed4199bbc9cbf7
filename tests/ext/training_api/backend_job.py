"""A service's backend in a real job: passes, samples, an engine that dies and is replaced, a rank that dies.

    backend_job.py FOLDER work|deaths [flags]

writes its observations to FOLDER/seen.json; run by ``test_backend_job``.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from slime.compose import parts, run
from slime.ext.training_api.backend import (
    AdamParams,
    Backend,
    BackendDied,
    Datum,
    LoraSpec,
    PassRequest,
    RequestRefused,
    SamplingParams,
)
from slime.ext.training_api.flags import SERVICE_FLAGS
from slime.ext.training_api.megatron_backend import start_backend
from slime.utils.errors import EngineError

TAG = "SLIME_TEST_JOB"
REPLACED_S = 400
"""Seconds until another engine serves in place of a dead one, on a machine with a load of ten."""


def datum(seed: int, length: int = 12) -> Datum:
    tokens = np.random.default_rng(seed).integers(3, 300, length + 1)
    return Datum(tokens[:-1].tolist(), {"target_tokens": tokens[1:]})


def kill(pattern: str) -> None:
    """SIGKILL the processes of this job with such a name."""
    for process in psutil.process_iter(["cmdline"]):
        try:
            if process.environ().get(TAG) == os.environ[TAG] and pattern in " ".join(process.info["cmdline"] or ()):
                process.send_signal(signal.SIGKILL)
        except psutil.Error:
            continue


async def log_probs(backend: Backend, model_id: str) -> np.ndarray:
    (result,) = await backend.passes([PassRequest(model_id, [datum(0)], "cross_entropy", backward=False)])
    assert not isinstance(result, Exception)
    return result.outputs[0]["logprobs"]


async def prompt_log_probs(backend: Backend, name: str | None) -> list[float]:
    one = datum(0)
    prompt = [*one.tokens, int(one.inputs["target_tokens"][-1])]
    result = await backend.sample(name, prompt, SamplingParams(max_tokens=4), 2, True, 3)
    assert result.prompt_logprobs is not None
    assert result.topk_prompt_logprobs is not None
    best = [row[0][1] for row in result.topk_prompt_logprobs[1:] if row is not None]
    assert all(first >= one for first, one in zip(best, result.prompt_logprobs[1:], strict=True))
    assert [len(one.tokens) for one in result.sequences] == [4, 4] or result.sequences[0].stop_reason == "stop"
    return [float(value) for value in result.prompt_logprobs[1:]]


async def refusal(call: Any) -> str:
    try:
        await call
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


async def errors(backend: Backend) -> list[float]:
    """Largest difference between the engine's and the trainer's log-probs, for each sampler of ``work``."""
    pairs = (("saved a", "a"), ("snapshot of b", "b"))
    return [
        float(np.abs(await prompt_log_probs(backend, name) - await log_probs(backend, model_id)).max())
        for name, model_id in pairs
    ]


async def work(backend: Backend, folder: Path) -> dict[str, Any]:
    """Two clients train, publish and sample."""
    seen: dict[str, Any] = {}
    await backend.add_model("a", LoraSpec(8, seed=1))
    await backend.add_model("b", LoraSpec(3, seed=2))
    seen["rank"] = await refusal(backend.add_model("c", LoraSpec(9)))
    losses = []
    for _ in range(4):
        asked = [
            PassRequest("a", [datum(0), datum(1)], "cross_entropy"),
            PassRequest("b", [datum(2)], "cross_entropy"),
        ]
        results = await backend.passes([*asked, PassRequest("gone", [datum(0)], "cross_entropy")])
        losses.append([one.metrics["loss:sum"] for one in results[:2] if not isinstance(one, Exception)])
        assert isinstance(results[2], RequestRefused)
        for model_id in ("a", "b"):
            await backend.optim_step(model_id, AdamParams(learning_rate=1e-2))
    seen["losses"] = losses
    await backend.save_state("a", folder / "a", with_optimizer=True)
    await backend.publish_sampler(folder / "a", "saved a")
    await backend.publish_sampler("b", "snapshot of b")
    seen["errors"] = await errors(backend)
    seen["base"] = await prompt_log_probs(backend, None)
    greedy = await backend.sample("saved a", [5, 6, 7], SamplingParams(max_tokens=6, temperature=0, stop=[]))
    (first, *_) = greedy.sequences[0].tokens
    stopped = await backend.sample("saved a", [5, 6, 7], SamplingParams(max_tokens=6, temperature=0, stop=[first]))
    seen["stopped"] = [stopped.sequences[0].tokens == [first], stopped.sequences[0].stop_reason]
    seen["seed"] = await refusal(backend.sample(None, [5, 6, 7], SamplingParams(max_tokens=2, seed=1)))
    return seen


async def deaths(backend: Backend, folder: Path) -> dict[str, Any]:
    """An engine is killed and replaced; then a rank."""
    seen = await work(backend, folder)
    kill("sglang::scheduler")
    began = time.monotonic()
    while True:
        try:
            seen["errors of the next engine"] = await errors(backend)
            break
        except EngineError:
            assert time.monotonic() - began < REPLACED_S
            await asyncio.sleep(2)
    await backend.drop_sampler("snapshot of b")
    seen["dropped"] = await refusal(prompt_log_probs(backend, "snapshot of b"))
    many = [PassRequest("a", [datum(seed) for seed in range(30)], "cross_entropy")] * 100
    open_passes = asyncio.create_task(backend.passes(many))
    await asyncio.sleep(1)
    kill("ServiceRank")
    seen["open passes"] = await refusal(open_passes)
    seen["next step"] = await refusal(backend.optim_step("a", AdamParams()))
    seen["next sample"] = await refusal(prompt_log_probs(backend, None))
    assert seen["next step"].startswith(BackendDied.__name__)
    return seen


async def serve(args: Namespace, folder: Path, scenario: str) -> None:
    backend = start_backend(args, parts(args))
    try:
        seen = await {"work": work, "deaths": deaths}[scenario](backend, folder)
        (folder / "seen.json").write_text(json.dumps(seen))
    finally:
        await backend.close()


if __name__ == "__main__":
    output, scenario = Path(sys.argv[1]), sys.argv[2]
    sys.argv[1:] = [*SERVICE_FLAGS, *sys.argv[3:]]
    run(lambda args: asyncio.run(serve(args, output, scenario)))
