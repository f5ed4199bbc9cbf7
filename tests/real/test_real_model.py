"""The checks with random weights, repeated on a pretrained model, SmolLM2-135M-Instruct: ``make real-checks``.

The trainer's log-probs are compared for every model of ``MODELS`` whose folder exists.  Text and perplexity are over
a README of an installed package.  Each test prints its measurements.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
from torch import Tensor

from slime.backends.sglang_utils import cpu_shim

cpu_shim.install()
from slime.backends.megatron_utils import cpu_platform  # noqa: E402, F401

# isort: split
from transformers import AutoTokenizer  # noqa: E402

from slime.backends.megatron_utils import initialize  # noqa: E402
from slime.backends.megatron_utils.hf_checkpoint_saver import save_hf_model_to_path  # noqa: E402
from tests.matrix import trainer  # noqa: E402
from tests.matrix.batch import make_train_data, reference_log_probs, samples_of  # noqa: E402
from tests.matrix.case import load_cases, load_with_transformers, read_config, read_tensors  # noqa: E402
from tests.matrix.parity import FamilyRun, one_process_world  # noqa: E402
from tools import (  # noqa: E402
    convert_hf_to_fp8,
    convert_hf_to_int4_direct,
    convert_k2_thinking_int4_to_bf16,
    fp8_cast_bf16,
)

REPO = Path(__file__).resolve().parents[2]
FOLDER = REPO / "runs/real_model/hf-float32"
MODELS = {
    "SmolLM2-135M": ("llama3", FOLDER),
    "Qwen2.5-Coder-0.5B": ("qwen2.5", REPO / "runs/real_model/qwen/hf-float32"),
    "Gemma-3-270M": ("gemma3", REPO / "runs/real_model/gemma/hf-float32"),
}
"""Name -> case of the matrix, folder of tools/convert_gguf_to_hf.py."""
LONG = 1300
"""Tokens of the longest sample: more than Gemma's window."""
pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not FOLDER.exists(), reason="UNTIL=task scripts/demo_real.sh makes the folder"),
]
LOG_PROB_BOUND = 2e-4
"""In fp32, over 30 layers; the small random models meet 1e-5."""
TEXT_OF = "accelerate"
WINDOW, WINDOWS = 256, 4


@pytest.fixture(scope="module")
def text_ids() -> list[int]:
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    return tokenizer(str(metadata(TEXT_OF).get_payload()), add_special_tokens=False).input_ids


class RealRun(FamilyRun):
    """The matrix's checks over the pretrained folder, on real text."""

    def __init__(self, work: Path, ids: list[int], name: str = "SmolLM2-135M", first: int | None = None) -> None:
        case_name, self.folder = MODELS[name]
        self.work = work
        case = load_cases([case_name])[case_name]
        self.case = replace(case, name=name, config=read_config(self.folder), flags=lambda folder: [])
        self.data = make_train_data(self.case.vocab_size)
        if first is not None:  # tokens of the first sample
            long = {"tokens": [0] * first, "loss_masks": [1] * (first - 1), "rollout_log_probs": [-1.0] * (first - 1)}
            for column, value in (long | {"response_lengths": first - 1}).items():
                self.data[column][0] = value
        for tokens in self.data["tokens"]:
            tokens[:], ids = ids[: len(tokens)], ids[len(tokens) :]

    def trainer_log_probs(self, args: Any, model: Any) -> Tensor:
        data = trainer.prepare(args, self.data)
        mine = dict(zip(data["partition"], trainer.response_log_probs(args, model, data), strict=True))
        return torch.cat([mine[index] for index in range(len(mine))])

    @torch.no_grad()
    def transformers_log_probs(self, folder: Path) -> Tensor:
        return torch.cat(reference_log_probs(load_with_transformers(folder).eval(), samples_of(self.data)))


@pytest.fixture
def run(tmp_path: Path, text_ids: list[int]) -> RealRun:
    return RealRun(tmp_path, text_ids)


def largest(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


@pytest.mark.parametrize("name", [name for name, (_, folder) in MODELS.items() if folder.exists()])
def test_the_trainers_log_probs_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    folder = MODELS[name][1]
    ids = AutoTokenizer.from_pretrained(folder)(str(metadata(TEXT_OF).get_payload())).input_ids
    run = RealRun(tmp_path, ids, name, LONG)
    expected = run.transformers_log_probs(folder)
    with run.model() as (args, model):
        error = largest(run.trainer_log_probs(args, model), expected)
    print(f"\n{name}: |dlogp| at most {error:.2g} over {len(expected)} tokens of mean {float(expected.mean()):.2f}")
    assert error < LOG_PROB_BOUND


def test_the_checkpoint_survives_torch_dist_and_the_push(run: RealRun) -> None:
    for check in (run.round_trip(FOLDER), run.live_export(FOLDER)):
        print("\nexport:", check)
        assert check[0] == 0, check


def test_a_merged_push_of_adapters_is_the_model_with_adapters(run: RealRun, tmp_path: Path) -> None:
    with one_process_world():
        args = trainer.make_args(
            run.case, FOLDER, "--lora-rank", 8, "--lora-alpha", 16, "--lora-target-modules", "all-linear"
        )
        initialize.init(args)
        model = trainer.load_model(args)
        plain = run.trainer_log_probs(args, model)
        trainer.draw_adapters(model)
        with torch.no_grad():  # drawn for small models; here they would dominate the weights
            for chunk in model:
                for name, parameter in chunk.named_parameters():
                    if ".lora.b" in name:
                        parameter.mul_(0.1)
        adapted = run.trainer_log_probs(args, model)
        save_hf_model_to_path(args, tmp_path / "merged", model)
    error, moved = largest(adapted, run.transformers_log_probs(tmp_path / "merged")), largest(adapted, plain)
    print(f"\nLoRA: merged against adapters {error:.2g}; the adapters moved log-probs by {moved:.2g}")
    assert moved > 0.1
    assert error < 5 * LOG_PROB_BOUND


@torch.no_grad()
def perplexity(folder: Path, ids: list[int]) -> float:
    """Perplexity of the text, in windows that do not overlap."""
    model = load_with_transformers(folder).eval()
    windows = torch.tensor(ids[: WINDOW * WINDOWS]).view(WINDOWS, WINDOW)
    log_probs = model(windows).logits[:, :-1].log_softmax(-1)
    return float(torch.exp(-log_probs.gather(-1, windows[:, 1:, None]).mean()))


def test_what_fp8_and_int4_cost_in_perplexity(
    tmp_path: Path, text_ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def command(tool: Any, *words: object) -> None:
        monkeypatch.setattr(sys, "argv", [tool.__name__, *map(str, words)])
        tool.main()

    found = {"as it is": perplexity(FOLDER, text_ids)}
    command(convert_hf_to_fp8, "--model-dir", FOLDER, "--save-dir", tmp_path / "fp8")
    command(fp8_cast_bf16, "--input-fp8-hf-path", tmp_path / "fp8", "--output-bf16-hf-path", tmp_path / "fp8_back")
    found["fp8, blocks of 128 x 128"] = perplexity(tmp_path / "fp8_back", text_ids)
    for group in (32, 64):
        packed, back = tmp_path / f"int4_{group}", tmp_path / f"int4_{group}_back"
        command(convert_hf_to_int4_direct, "--model-dir", FOLDER, "--save-dir", packed, "--group-size", group)
        command(convert_k2_thinking_int4_to_bf16, "--model-dir", packed, "--output-dir", back)
        found[f"int4, groups of {group}"] = perplexity(back, text_ids)
        assert read_tensors(back).keys() == read_tensors(FOLDER).keys()
    print("\nperplexity:", json.dumps({name: round(value, 3) for name, value in found.items()}))
    base = found["as it is"]
    assert 2 < base < 60  # a trained model; a random one has the size of the vocabulary
    assert found["fp8, blocks of 128 x 128"] < 1.1 * base
    assert base < found["int4, groups of 32"] < 2 * base


@pytest.fixture(scope="module")
def router_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One engine behind a router, with the pretrained weights."""
    folder = tmp_path_factory.mktemp("engine")
    owner_file = REPO / "tests/e2e/engine_owner.py"
    environment = dict(os.environ) | {"PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "2"}
    with (folder / "log").open("wb") as log:
        owner = subprocess.Popen(
            [sys.executable, str(owner_file), str(FOLDER), str(folder / "out.json")],
            stdout=log, stderr=subprocess.STDOUT, env=environment,
        )  # fmt: skip
        try:
            while not (folder / "out.json").exists():
                assert owner.poll() is None, (folder / "log").read_text()[-4000:]
                time.sleep(0.5)
            yield json.loads((folder / "out.json").read_text())["router_url"]
        finally:
            owner.kill()
            owner.wait(timeout=60)


def test_the_engines_log_probs_are_those_of_transformers(router_url: str, text_ids: list[int]) -> None:
    prompt, sampling = text_ids[:64], {"max_new_tokens": 24, "temperature": 1.0, "ignore_eos": True}
    with requests.Session() as session:
        session.trust_env = False
        payload = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
        response = session.post(f"{router_url}/generate", json=payload, timeout=600)
    response.raise_for_status()
    pairs = response.json()["meta_info"]["output_token_logprobs"]
    tokens = torch.tensor([[*prompt, *(token for _, token, *_ in pairs)]])
    with torch.no_grad():
        log_probs = load_with_transformers(FOLDER).eval()(tokens).logits[0].log_softmax(-1)
    expected = log_probs[len(prompt) - 1 : -1].gather(-1, tokens[0, len(prompt) :, None])[:, 0]
    error = largest(expected, torch.tensor([log_prob for log_prob, *_ in pairs]))
    print(f"\nengine: |dlogp| at most {error:.2g} over {len(pairs)} sampled tokens")
    assert error < LOG_PROB_BOUND
