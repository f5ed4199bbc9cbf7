"""The Megatron teacher server: log-probs against transformers in every layout, and the program as students use it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slime.rollout.on_policy_distillation import post_process_rewards, reward_func
from slime.utils.errors import DataError
from slime.utils.http_utils import close_http_client
from slime.utils.net import get_free_port
from slime.utils.types import Sample
from tests.contracts.source_tree import REPO
from tests.matrix.pool import run_ranks
from tests.unit.backends.megatron_utils.megatron_case import hf_flags, write_hf_model

pytestmark = pytest.mark.dist
LENGTHS = (19, 7, 2, 31, 12)
STARTS = (0, 3, 0, 11, 11)
TOP = (4, 0, 7, 2, 1)


def token_rows(vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(vocab_size, (length,), generator=generator).tolist() for length in LENGTHS]


def scorer_on_rank(flags: list[str]) -> Any:
    import torch.distributed as dist

    from slime.backends.megatron_utils.initialize import init
    from slime.ext.distill.scorer import Scorer
    from tests.unit.backends.megatron_utils.megatron_case import build_parser

    args = build_parser().parse_args(flags)
    args.actor_num_gpus_per_node = dist.get_world_size()
    from slime.backends.megatron_utils.arguments import validate_megatron_arguments

    validate_megatron_arguments(args)
    init(args)
    return Scorer(args)


def scores_on_rank(flags: list[str], rows: list[list[int]]) -> list[Any]:
    """The scores of all rows, on rank 0."""
    import torch.distributed as dist

    from slime.ext.distill.scorer import ScoreRequest

    scorer = scorer_on_rank(flags)
    if dist.get_rank() != 0:
        scorer.follow()
        return []
    scorer.keep_alive()
    requests = [ScoreRequest(*entry) for entry in zip(rows, STARTS, TOP, strict=True)]
    scores = scorer.score(requests)
    scorer.stop()
    return [(one.log_probs, one.top_ids, one.top_log_probs) for one in scores]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.nn.Module]:
    folder = tmp_path_factory.mktemp("teacher") / "hf"
    return folder, write_hf_model(folder, "qwen3_moe")


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [
        (1, ""),
        (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
        (2, "--pipeline-model-parallel-size 2 --decoder-last-pipeline-num-layers 1"),
        (2, "--context-parallel-size 2"),
        (2, "--expert-model-parallel-size 2"),
    ],
)
def test_scores_are_those_of_transformers(teacher, world_size: int, layout: str) -> None:
    folder, reference = teacher
    rows = token_rows(reference.config.vocab_size)
    flags = [*hf_flags(folder), *layout.split(), "--max-tokens-per-gpu", "20", "--use-dynamic-batch-size"]
    scores = run_ranks(scores_on_rank, world_size, flags, rows)[0]
    for row, start, top, (log_probs, top_ids, top_log_probs) in zip(rows, STARTS, TOP, scores, strict=True):
        with torch.no_grad():
            expected = reference(torch.tensor([row])).logits[0, start:-1].float().log_softmax(-1)
        drawn = expected.gather(1, torch.tensor(row[start + 1 :])[:, None]).flatten()
        assert torch.tensor(log_probs) == pytest.approx(drawn, abs=2e-5)
        assert len(top_ids) == (len(row) - 1 - start if top else 0)
        for ids, values, position in zip(top_ids, top_log_probs, expected, strict=False):
            assert values == pytest.approx(position.topk(top).values.tolist(), abs=2e-5)
            assert position[ids].tolist() == pytest.approx(values, abs=2e-5)


def load_on_rank(flags: list[str], folder: str) -> str:
    """The error of loading other weights, on rank 0."""
    import torch.distributed as dist

    scorer = scorer_on_rank(flags)
    if dist.get_rank() != 0:
        scorer.follow()
        return ""
    try:
        scorer.load(folder)
    except DataError as error:
        return str(error)
    finally:
        scorer.stop()
    return ""


def test_weights_that_only_another_rank_could_not_load_are_not_loaded(teacher, tmp_path: Path) -> None:
    folder, _ = teacher
    broken = shutil.copytree(folder, tmp_path / "broken")
    (file,) = broken.glob("*.safetensors")
    tensors = load_file(file)
    save_file({**tensors, "model.norm.weight": tensors["model.norm.weight"].fill_(float("nan"))}, file)
    layout = "--pipeline-model-parallel-size 2 --decoder-last-pipeline-num-layers 1"  # the norm is on the last stage
    errors = run_ranks(load_on_rank, 2, [*hf_flags(folder), *layout.split()], str(broken))
    assert "model.norm.weight" in errors[0]


def ask(port: int, path: str, body: Any = None, secret: str = "") -> tuple[int, Any]:
    data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {secret}"} if secret else {})
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data=data, headers=headers)
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60) as response:
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


@contextlib.contextmanager
def program(folder: Path, log: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[bytes], int, int]]:
    """Start tools/serve_teacher.py; return the process, its port and its warm-up port."""
    port, unready = get_free_port(21000), get_free_port(21500)
    command = [sys.executable, str(REPO / "tools" / "serve_teacher.py"), *hf_flags(folder), *flags]
    command += ["--teacher-port", str(port), "--teacher-warmup-port", str(unready), "--max-tokens-per-gpu", "64"]
    outside = {"MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK"}
    with log.open("wb") as output:
        environment = {name: value for name, value in os.environ.items() if name not in outside}
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
    try:
        yield process, port, unready
    finally:
        process.kill()
        process.wait(30)


def wait_until(port: int, status: int, process: subprocess.Popen[bytes], log: Path, timeout_s: float = 240) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()
        with contextlib.suppress(OSError):
            if ask(port, "/healthz")[0] == status:
                return
        time.sleep(0.02)  # a fast machine loads the weights within 0.2 s
    raise AssertionError(f"no status {status} within {timeout_s} s: {log.read_text()}")


@pytest.mark.timeout(600)
def test_students_get_their_teachers_log_probs_from_the_program(teacher, tmp_path: Path) -> None:
    folder, reference = teacher
    other = write_hf_model(tmp_path / "other", "qwen3_moe", seed=3)
    rows = token_rows(reference.config.vocab_size)
    log = tmp_path / "log"
    key = tmp_path / "key"
    flags = ("--megatron-server-max-length", "40", "--job-secret-file", str(key))
    with program(folder, log, *flags) as (process, port, unready):
        wait_until(unready, 503, process, log)
        wait_until(port, 200, process, log)
        url = f"http://127.0.0.1:{port}/generate"
        args = Namespace(rm_url=url, rollout_temperature=0.7, opd_type="sglang", opd_top_k=3)

        async def all_samples() -> list[Sample]:
            samples = [Sample(index=i, tokens=row, response_length=len(row) // 2) for i, row in enumerate(rows)]
            for sample, answer in zip(samples, await reward_func(args, samples), strict=True):
                sample.reward = answer
            await close_http_client()
            return samples

        samples = asyncio.run(all_samples())
        post_process_rewards(args, samples)
        check_against(reference, samples)

        assert ask(port, "/detect") == (200, {"backend": "megatron"})
        status, info = ask(port, "/info")
        assert (status, info["max_length"], info["weight_version"]) == (200, 40, "0")
        assert ask(port, "/get_loads")[1]["loads"][0]["num_waiting_reqs"] == 0
        for body, words in REFUSED.items():
            status, answer = ask(port, "/generate", body.encode())
            assert status == 400 and words in answer["error"]["message"]

        secret = key.read_text().strip()
        assert ask(port, "/update_weights_from_disk", {"model_path": str(tmp_path / "other")})[0] == 401
        assert ask(port, "/update_weights_from_disk", {"model_path": str(tmp_path / "other")}, "wrong")[0] == 401
        status, answer = ask(port, "/update_weights_from_disk", {"model_path": str(tmp_path / "nothing")}, secret)
        assert (status, answer["success"]) == (400, False) and "is not a folder" in answer["message"]
        assert ask(port, "/healthz")[0] == 503  # the model's weights are undefined now
        assert ask(port, "/generate", {"input_ids": [1, 2]})[0] == 503
        status, answer = ask(port, "/update_weights_from_disk", {"model_path": str(tmp_path / "other")}, secret)
        assert (status, answer["success"]) == (200, True)
        assert ask(port, "/info")[1]["weight_version"] == "1"
        samples = asyncio.run(all_samples())
        post_process_rewards(args, samples)
        check_against(other, samples)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, log.read_text()


REFUSED = {
    "{": "no JSON",
    "[]": "must be a JSON object",
    "[" * 100_000: "no JSON",
    '{"input_ids": [1, 2], "sampling_params": "x"}': "sampling_params has 'x'",
    "{}": "input_ids is missing",
    '{"text": "a"}': "input_ids is missing",
    '{"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 1}}': "max_new_tokens is 1",
    '{"input_ids": [1, 99999]}': "99999",
    '{"input_ids": [1, true]}': "True",
    '{"input_ids": [1, 2], "logprob_start_len": 2}': "logprob_start_len is 2",
    '{"input_ids": [[1, 2], [3]], "logprob_start_len": [0]}': "1 values is given for 2",
    '{"input_ids": [1, 2], "top_logprobs_num": 1000000}': "top_logprobs_num",
    '{"input_ids": [1, 2], "image_data": "x"}': "image_data",
    json.dumps({"input_ids": [1] * 41}): "--megatron-server-max-length",
}


def check_against(reference: torch.nn.Module, samples: list[Sample]) -> None:
    for sample in samples:
        count = sample.response_length
        with torch.no_grad():
            logits = reference(torch.tensor([sample.tokens])).logits[0, -count - 1 : -1]
        expected = logits.float().log_softmax(-1)
        drawn = expected.gather(1, torch.tensor(sample.tokens[-count:])[:, None]).flatten()
        assert sample.teacher_log_probs == pytest.approx(drawn.tolist(), abs=2e-5)
        for (ids, values), position in zip(sample.metadata["teacher_top"], expected, strict=True):
            assert values == pytest.approx(position.topk(3).values.tolist(), abs=2e-5)
            assert position[ids].tolist() == pytest.approx(values, abs=2e-5)
