"""Top-p below 1 with a real engine on the CPU: the returned nuclei, and the trainer that replays them.

The model is tiny, so every answer is checked by brute force: transformers' probabilities, a loop over the vocabulary.
"""

from __future__ import annotations

import asyncio
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.backends.sglang_utils import cpu_shim
from slime.backends.sglang_utils.child_process import ChildProcess
from slime.backends.sglang_utils.server_control import ServerControl
from slime.backends.sglang_utils.sglang_engine import start_server, wait_until_healthy
from slime.ext.external_engines.discovery import check_returns_nuclei
from slime.ext.nuclei.flags import PLUGIN
from slime.train_data.convert import samples_to_train_data
from slime.utils.net import get_free_port
from slime.utils.sglang_meta import read_top_p_spans
from tests.e2e.kinds_of_samples import collect
from tests.e2e.tiny_qwen3 import save_tiny_model

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(900),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU path; for a GPU there is test_nuclei_gpu.py"),
]

BOUND = 1e-5
KINDS: list[dict[str, float]] = [
    {"temperature": 0.8, "top_p": 0.7},
    {"temperature": 1.0, "top_p": 0.9, "top_k": 7},
    {"temperature": 0.0, "top_p": 0.5},
    {"temperature": 1.3, "top_p": 0.5, "min_p": 0.05},
    {"temperature": 1.0, "top_p": 1.0},
]


class Engine:
    """A server whose longest prefill is 16 tokens, and its model in fp32."""

    def __init__(self, folder: Path, **more: Any) -> None:
        self.folder = folder
        self.model = save_tiny_model(folder, 0)
        port = get_free_port(25700, consecutive=3)
        settings = {
            **{"model_path": str(folder), "host": "127.0.0.1", "port": port, "nccl_port": port + 1},
            **{"attention_backend": "torch_native", "disable_overlap_schedule": True, "device": "cpu"},
            **{"dtype": "float32", "mem_fraction_static": 0.1, "max_total_tokens": 65536, "random_seed": 1},
            **{"skip_server_warmup": True, "chunked_prefill_size": 16, "stream_interval": 3},
            **more,
        }
        self.process: ChildProcess = start_server(settings, name="the engine", plugins=[[PLUGIN]])
        self.control = ServerControl(f"http://127.0.0.1:{port}")

    def probabilities(self, tokens: list[int], num_prompt: int, temperature: float) -> torch.Tensor:
        with torch.no_grad():
            logits = self.model(torch.tensor([tokens])).logits[0, num_prompt - 1 : -1]
        return (logits / (temperature or 1.0)).softmax(-1)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    cpu_shim.install()
    made = Engine(tmp_path_factory.mktemp("nuclei"))
    try:
        wait_until_healthy(made.process, made.control, timeout_s=600)
        yield made
    finally:
        made.process.stop()


def by_loop(probs: torch.Tensor, sampling: dict[str, Any], rounding: float = 0.0) -> list[int]:
    """Return the nucleus, with both of its bounds moved outwards by ``rounding``."""
    kept, before = [], 0.0
    top_k = 1 if sampling["temperature"] == 0 else sampling.get("top_k", len(probs))
    smallest = float(probs.max()) * sampling.get("min_p", 0) * (1 - rounding)
    for rank, token in enumerate(probs.argsort(descending=True).tolist()):
        p = float(probs[token])
        if rank >= top_k or before > sampling["top_p"] + rounding or p < smallest:
            break
        kept.append(token)
        before += p
    return sorted(kept)


def assert_nucleus(found: list[int], probs: torch.Tensor, sampling: dict[str, Any], rounding: float) -> None:
    """Assert that ``found`` is the loop's nucleus, up to ``rounding`` (relative) in the probabilities at its border.

    An engine that batches differently rounds its logits differently.  Tokens of equal probability then
    swap places, and a sum that reaches top-p reaches it one token earlier or later.
    """
    for shift in (0.0, -rounding, rounding):
        kept = by_loop(probs, sampling, shift)
        border = float(probs[kept].min())
        others = probs[sorted(set(found) ^ set(kept))]
        # bf16 logits (no rounding allowed) are often equal, and each sampler keeps a different number of such tokens.
        if bool(((others - border).abs() <= rounding * border).all()) and (len(found) == len(kept) or not rounding):
            return
    raise AssertionError((sampling, border, float(probs[kept].sum()), sorted(set(found) ^ set(kept)), others))


def engine_probabilities(engine: Engine, meta: dict[str, Any]) -> torch.Tensor:
    """[response, vocabulary], the engine's reported distribution."""
    probs = torch.zeros(len(meta["output_top_logprobs"]), engine.model.config.vocab_size)
    for step, pairs in enumerate(meta["output_top_logprobs"]):
        log_probs, ids, _ = zip(*pairs, strict=True)
        probs[step, list(ids)] = torch.tensor(log_probs).exp()
    return probs


def error_of_answers(engine: Engine, *, kinds: Sequence[dict[str, float]] = KINDS, is_exact: bool = True) -> float:
    """Send 40 requests; return the largest log-prob error, after checking every nucleus.

    Requests of all ``kinds`` share the engine's batches, and one in seven requests no nuclei.  If the engine
    does not compute in fp32 (``is_exact`` false), its own probabilities replace transformers'.
    """

    def ask(number: int) -> tuple[list[int], dict[str, Any], bool, dict[str, Any]]:
        prompt = [5 + number % 3, *range(40 + number, 45 + number + number * 7 % 30)]
        sampling, asks = kinds[number % len(kinds)], number % 7 % 4 != 3
        params = {"max_new_tokens": 12, "ignore_eos": True, **sampling}
        params |= {"custom_params": {"return_top_p_token_ids": True}} if asks else {}
        payload = {"input_ids": prompt, "sampling_params": params, "return_logprob": True}
        payload |= {} if is_exact else {"top_logprobs_num": engine.model.config.vocab_size}
        return prompt, sampling, asks, engine.control.post("/generate", payload)["meta_info"]

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(ask, range(40)))
    worst, sizes = 0.0, []
    for prompt, sampling, asks, meta in answers:
        log_probs, ids, _ = zip(*meta["output_token_logprobs"], strict=True)
        spans = read_top_p_spans(meta, len(ids))
        assert (spans is not None) == asks
        if is_exact:
            drawn_from = engine.probabilities([*prompt, *ids], len(prompt), sampling["temperature"])
        else:
            drawn_from = engine_probabilities(engine, meta)
        for step, probs in enumerate(drawn_from):
            kept = list(range(len(probs)))
            if spans is not None:
                found = spans[0][spans[1][step] : spans[1][step + 1]].tolist()
                sizes.append(len(found))
                # The whole vocabulary is not sent: a token without a record keeps everything.
                if sampling["top_p"] == 1.0:
                    assert found == []
                else:
                    assert_nucleus(found, probs, sampling, BOUND if is_exact else 0.0)
                    kept = found
            worst = max(worst, abs(float((probs[ids[step]] / probs[kept].sum()).log()) - log_probs[step]))
    assert max(sizes) > 20 and 0 in sizes and 1 in sizes
    print(f"\nlargest difference {worst:.1e}, {sum(sizes) / len(sizes):.1f} ids a token", file=sys.stderr)
    return worst


def test_every_nucleus_and_log_prob_is_that_of_a_loop_over_the_vocabulary(engine: Engine) -> None:
    assert error_of_answers(engine) < BOUND


def test_the_start_up_check_passes(engine: Engine) -> None:
    check_returns_nuclei(engine.control, top_p=0.9)


ARGS = Namespace(
    use_rollout_routing_replay=False, sglang_speculative_algorithm=None, rollout_num_gpus=1,
    rollout_num_gpus_per_engine=1, sglang_server_concurrency=8,
)  # fmt: skip
SAMPLING = {"temperature": 0.8, "top_p": 0.7, "top_k": 40, "ignore_eos": True}
REPLAYED = {**SAMPLING, "custom_params": {"return_top_p_token_ids": True}}


def test_the_trainer_replays_whole_partial_and_several_turn_samples(engine: Engine) -> None:
    """Megatron's model with the engine's nuclei gives the engine's log-probs; without them it would not."""
    from slime.backends.megatron_utils import cpu_platform, initialize  # noqa: F401
    from tests.matrix import trainer
    from tests.matrix.case import load_cases
    from tests.matrix.parity import LOG_PROB_BOUND, one_process_world

    samples = asyncio.run(collect(ARGS, engine.control.url, REPLAYED))
    data = samples_to_train_data(samples, [0.0] * 4, [1.0, -1.0, 0.5, -0.5], rollout_top_p=SAMPLING["top_p"])
    flags = ("--max-tokens-per-gpu", 4096, "--global-batch-size", 4, "--rollout-temperature", SAMPLING["temperature"])
    case = load_cases(["qwen3"])["qwen3"]
    errors = {}
    with one_process_world():
        for top_p in (SAMPLING["top_p"], 1.0):
            args = trainer.make_args(case, engine.folder, *flags, "--rollout-top-p", top_p)
            if top_p == SAMPLING["top_p"]:
                initialize.init(args)
                model = trainer.load_model(args)
            rank_data = trainer.prepare(args, data.to_dict())
            rows = trainer.response_log_probs(args, model, rank_data)
            triples = zip(rows, rank_data["rollout_log_probs"], rank_data["loss_masks"], strict=True)
            errors[top_p] = max(float(((ours - theirs) * mask).abs().max()) for ours, theirs, mask in triples)
    print(f"\ntrainer against engine {errors}", file=sys.stderr)
    assert errors[SAMPLING["top_p"]] < LOG_PROB_BOUND
    assert errors[1.0] > 0.1


def test_a_stream_says_in_each_event_what_it_has_so_far(engine: Engine) -> None:
    import json

    import requests

    params = {"temperature": 1.0, "top_p": 0.6, "max_new_tokens": 20, "ignore_eos": True}
    params["custom_params"] = {"return_top_p_token_ids": True}
    payload = {"input_ids": [5, 6], "sampling_params": params, "return_logprob": True, "stream": True}
    lengths = []
    with requests.Session() as session:
        session.trust_env = False
        with session.post(f"{engine.control.url}/generate", json=payload, stream=True, timeout=300) as response:
            for line in response.iter_lines():
                if line.startswith(b"data: {"):
                    meta = json.loads(line[6:])["meta_info"]
                    lengths.append(len(meta["output_token_logprobs"]))
                    assert read_top_p_spans(meta, lengths[-1]) is not None
    assert len(lengths) > 2 and lengths[-1] == 20
