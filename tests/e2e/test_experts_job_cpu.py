"""A real job on two CPU cores: adapters that experts share, on loopback and on one metrics page, until its router
dies."""

from __future__ import annotations

import re
import shutil
import stat
import sys
import time
from pathlib import Path

import pytest
import requests
import torch
from safetensors.torch import load_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from slime.utils.net import get_free_port, is_loopback
from tests.e2e.job import GONE_S, STEP_S, Job, grpo_flags, records
from tests.e2e.routed_experts import CONFIG

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU path"),
]

RANK_NUMBERS = ("step_s", "tok_per_s", "peak_memory_gib")


def write_small_experts(folder: Path, task: Path) -> None:
    """Write a random Qwen3 MoE with the tokenizer of the tiny task."""
    shutil.copytree(task / "task/hf", folder)
    (folder / "model.safetensors").unlink()
    torch.manual_seed(3)
    config = Qwen3MoeConfig(**CONFIG | {"vocab_size": 128, "eos_token_id": 2}, initializer_range=0.2)
    Qwen3MoeForCausalLM(config).save_pretrained(folder)


def check_page(url: str) -> None:
    """Every part of the job is on its page: driver, manager, trainer ranks, experts, engines and router.

    Checked between two steps: an engine does not serve during a push, and a busy manager may miss a scrape.
    """
    names = (
        "perf_time_step_s", "rollout_raw_reward", "rollout_groups_kept_total", 'engines{state="serving"}',
        "train_loss", "perf_weight_push_s",
        *(f'train_expert_load_max_over_mean{{layer="{layer}"}}' for layer in (1, 2, 3)),
        *(f'perf_rank_{name}{{rank="{rank}"}}' for name in RANK_NUMBERS for rank in (0, 1)),
    )  # fmt: skip
    deadline = time.monotonic() + GONE_S
    while True:
        page = requests.get(url, timeout=60).text
        numbers = {name: re.search(rf"^slime_{re.escape(name)} (.*)$", page, re.MULTILINE) for name in names}
        missing = [name for name, found in numbers.items() if found is None]
        successes = set(re.findall(r"^slime_scrape_success{.*} (.*)$", page, re.MULTILINE))
        if (missing == [] and successes == {"1.0"}) or time.monotonic() > deadline:
            break
        time.sleep(0.2)
    assert (missing, successes) == ([], {"1.0"}), page[:4000]
    per_rank = {name: float(found[1]) for name, found in numbers.items() if found is not None and "rank=" in name}
    assert all(value > 0 for value in per_rank.values()), per_rank
    assert re.search(r'^sglang:num_running_reqs{.*engine="0"', page, re.MULTILINE)
    assert re.search(r'^smg_.*router="default"', page, re.MULTILINE)


def check_loopback(job: Job, page_port: int) -> None:
    """Nobody outside this host reaches the job, whose parts read its secret from a file."""
    sockets = job.listening()
    ours = {each for each in sockets if "slime.backends.sglang_utils" in each[2] or each[1] == page_port}
    assert len(ours) >= 4  # engine, router, its metrics, page
    assert [each for each in sockets if not is_loopback(each[0].removeprefix("::ffff:"))] == []
    environments = [(Path("/proc") / str(pid) / "environ").read_bytes() for pid in job.pids()]
    assert any(b"RAY_AUTH_TOKEN_PATH=" in each for each in environments)
    assert not any(b"RAY_AUTH_TOKEN=" in each for each in environments)
    token = Path(re.search(rb"RAY_AUTH_TOKEN_PATH=([^\0]*)", b"".join(environments))[1].decode())
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    line = re.search(r"router default (http://127\.0\.0\.1:\d+)", job.text())
    assert line is not None
    answer = requests.post(f"{line[1]}/generate", json={"text": "1+1=", "sampling_params": {}}, timeout=60)
    assert answer.ok, answer.text  # a plug-in with its own client
    engine = re.search(r"engine 0 .*?(http://127\.0\.0\.1:\d+)", job.text())
    assert engine is not None
    for path in ("/flush_cache", "/abort_request", "/update_weights_from_tensor", "/load_lora_adapter_from_tensors"):
        assert requests.post(engine[1] + path, json={}, timeout=60).status_code == 401


def check_adapters(folder: Path) -> None:
    """The engine had each rollout's adapter, which is the same for all experts of a layer."""
    differences = [row["train/train_rollout_logprob_abs_diff"] for row in records(folder / "run", "train/step")][:3]
    print(f"\ntrainer against engine, mean of each rollout: {differences}", file=sys.stderr)
    assert len(differences) == 3 and max(differences) < 1e-5
    saved = load_file(folder / "peft/2/adapter_model.safetensors")
    ups = [value for name, value in saved.items() if ".layers.1.mlp.experts." in name and "up_proj.lora_B" in name]
    assert len(ups) == CONFIG["num_experts"] and all(value.equal(ups[0]) for value in ups)
    assert ups[0].abs().max() > 1e-3  # trained: it began at zero


def test_a_job_of_one_node_trains_adapters_of_experts_on_two_ranks_on_loopback_and_ends_with_its_router(
    task: Path, tmp_path: Path
) -> None:
    model, page_port = tmp_path / "hf", get_free_port(29600)
    write_small_experts(model, task)
    flags = grpo_flags(
        task, tmp_path / "run", *f"--hf-checkpoint {model} --ref-load {model} --over-sampling-batch-size 4".split(),
        *"--actor-num-gpus-per-node 2 --rollout-num-gpus 1 --expert-model-parallel-size 2 --num-rollout 200".split(),
        *"--expert-tensor-parallel-size 1 --global-batch-size 16 --lr 1e-2 --lora-rank 4".split(),
        *f"--lora-experts shared --lora-push adapter --lora-save {tmp_path}/peft/{{rollout_id}}".split(),
        *("--prometheus-port", str(page_port)),
    )  # fmt: skip
    # Every answer has one version, so the comparison below is of one adapter with itself.
    job = Job("train.py", [flag for flag in flags if flag != "--partial-rollout"], tmp_path / "log.txt")
    job.wait_until(lambda: "step 1/200" in job.text(), "first step", STEP_S)
    check_loopback(job, page_port)
    check_page(f"http://127.0.0.1:{page_port}/metrics")
    job.wait_until(lambda: "step 4/200" in job.text(), "fourth step", STEP_S)
    job.strike("slime.backends.sglang_utils.router_main", r"EngineDiedError: the router http.* has ended")
    check_adapters(tmp_path)
