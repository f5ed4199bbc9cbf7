"""Prefill and decode in two real engines on the CPU, behind the real router: keys and values travel between them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests
import torch

from slime.backends.sglang_utils import cpu_shim
from slime.backends.sglang_utils.router_process import RouterHandle, start_router
from slime.backends.sglang_utils.sglang_engine import SGLangEngine
from slime.utils.net import get_free_port

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU path"),
]


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Iterator[tuple[RouterHandle, torch.nn.Module]]:
    """A router in front of a prefill and a decode engine, and the model that both serve."""
    cpu_shim.install()
    from engine_owner import engine_args
    from tiny_qwen3 import save_tiny_model

    folder = tmp_path_factory.mktemp("model")
    model = save_tiny_model(folder, 0)
    args = engine_args(str(folder))
    router = start_router(
        args, host="127.0.0.1", port=get_free_port(23500), prometheus_port=get_free_port(24500), pd_disaggregation=True
    )
    engines: list[SGLangEngine] = []
    try:
        for rank, worker_type in enumerate(("prefill", "decode")):
            port = get_free_port(25500 + 100 * rank, consecutive=4)
            engine = SGLangEngine(args, rank=rank, worker_type=worker_type)
            engine.start_server(
                host="127.0.0.1",
                port=port,
                nccl_port=port + 1,
                dist_init_addr=f"127.0.0.1:{port + 2}",
                router_ip=router.host,
                router_port=router.port,
                disaggregation_bootstrap_port=port + 3 if worker_type == "prefill" else None,
            )
            engines.append(engine)
        for engine in engines:
            engine.wait_ready(args.engine_start_timeout_s)
        yield router, model
    finally:
        for engine in engines:
            engine.shutdown()
        router.stop()


@pytest.mark.parametrize("length", [1, 9, 700])
def test_the_decode_engine_goes_on_where_the_prefill_engine_ended(pair, length):
    router, model = pair
    prompt = [5 + i * 7 % 400 for i in range(length)]
    sampling = {"max_new_tokens": 24, "temperature": 0.0, "ignore_eos": True}
    with requests.Session() as session:
        session.trust_env = False
        payload = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
        response = session.post(f"{router.url}/generate", json=payload, timeout=300)
    response.raise_for_status()
    pairs = response.json()["meta_info"]["output_token_logprobs"]
    assert len(pairs) == 24
    tokens = torch.tensor([prompt + [token for _, token, *_ in pairs]])
    with torch.no_grad():
        log_probs = model(tokens).logits.float().log_softmax(-1)[0]
    expected = log_probs[range(length - 1, tokens.shape[1] - 1), tokens[0, length:]]
    assert (expected - torch.tensor([log_prob for log_prob, *_ in pairs])).abs().max() < 1e-4
