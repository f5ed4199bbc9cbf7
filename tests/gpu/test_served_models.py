"""Real SGLang servers on a GPU: after a push they serve the same as a server that started from those weights.

Beyond the digests: log-probs of an FP8 server, and the number of draft tokens that a speculating server accepts, which
depends on every weight of its draft model.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
from safetensors.torch import load_file, save_file

from slime.backends.sglang_utils.sglang_engine import SGLangEngine
from slime.ext.low_precision.folders.run import rewrite_folder
from slime.ext.low_precision.folders.to_quantized import to_fp8
from slime.utils import env
from slime.utils.net import get_free_port
from tests.e2e.engine_owner import engine_args
from tests.loaded_model.buckets import digests, fill, whole_buckets
from tests.matrix.case import FamilyCase, reference_logits
from tests.matrix.families import mimo, minimax_m2, olmo3, qwen3

pytestmark = [pytest.mark.gpu(1), pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

VOCAB = 131
PROMPT = [(7 * position + 3) % VOCAB for position in range(100)]
SIZES = {"hidden_size": 256, "head_dim": 64, "num_attention_heads": 4, "intermediate_size": 512, "vocab_size": VOCAB}
MINIMAX = {"intermediate_size": 128, "rotary_dim": 32, "num_local_experts": 8, "num_experts_per_tok": 3}
FP8_FLAGS = {"fp8_gemm_runner_backend": "triton"}
DRAFT_FLAGS = {
    "speculative_algorithm": "EAGLE",
    "speculative_num_steps": 2,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 3,
}
START_S = 300
NUM_TOKENS = 380


def server_args(folder: Path, **flags: Any) -> Namespace:
    args = engine_args(str(folder))
    plain = {"attention_backend": "triton", "sampling_backend": "pytorch", "skip_tokenizer_init": True}
    plain |= {"mem_fraction_static": 0.2, "max_total_tokens": 8192, "context_length": 512, "disable_cuda_graph": True}
    for name, value in (plain | flags).items():
        setattr(args, f"sglang_{name}", value)
    args.fp32, args.bf16, args.offload_rollout, args.engine_start_timeout_s = False, True, False, START_S
    return args


def first_gpu() -> int:
    """The GPU's number as Ray gives it: among the machine's GPUs, not among those visible to this process."""
    return int(env.copy().get("CUDA_VISIBLE_DEVICES", "0").split(",")[0])


@contextmanager
def servers(*folders_and_flags: tuple[Path, dict[str, Any]]) -> Iterator[list[SGLangEngine]]:
    """Several servers on one GPU, started together."""
    engines, starts = [], []
    for rank, (folder, flags) in enumerate(folders_and_flags):
        port = get_free_port(27000 + 20 * rank, consecutive=3)
        engine = SGLangEngine(server_args(folder, **flags), rank=rank, base_gpu_id=first_gpu(), num_gpus_per_engine=1)
        engines.append(engine)
        starts.append({"port": port, "nccl_port": port + 1, "dist_init_addr": f"127.0.0.1:{port + 2}"})
    try:
        with ThreadPoolExecutor(len(engines)) as pool:
            list(pool.map(lambda pair: pair[0].init(host="127.0.0.1", **pair[1]), zip(engines, starts, strict=True)))
        yield engines
    finally:
        for engine in engines:
            engine.shutdown()


def generate(
    engine: SGLangEngine, num_tokens: int, *, prompt: Sequence[int] = PROMPT, prompt_log_probs: bool = False
) -> dict[str, Any]:
    payload = {
        "input_ids": list(prompt),
        "sampling_params": {"max_new_tokens": num_tokens, "temperature": 0.0, "ignore_eos": True},
        "return_logprob": True,
        "logprob_start_len": 0 if prompt_log_probs else -1,
    }
    response = requests.post(f"{engine.get_url()}/generate", json=payload, timeout=120)
    response.raise_for_status()
    return response.json()["meta_info"]


def prompt_log_probs(engine: SGLangEngine) -> torch.Tensor:
    pairs = generate(engine, 1, prompt_log_probs=True)["input_token_logprobs"]
    return torch.tensor([log_prob for log_prob, *_ in pairs[1:]])


def push(engine: SGLangEngine, folder: Path, version: str) -> None:
    """Both phases of a push of the tensors in ``folder``, in three buckets through CUDA IPC."""
    from sglang.srt.utils import MultiprocessingSerializer

    tensors = {}
    for path in folder.glob("*.safetensors"):
        tensors |= load_file(path, device="cuda")
    manifest = whole_buckets(tensors, 3)
    flats = [flat.cuda() for flat in fill(manifest, tensors)]
    engine.pause_generation()
    engine.flush_cache()
    engine.begin_weight_update(manifest.id, version, manifest.to_json())
    for index, flat in enumerate(flats):
        handle = MultiprocessingSerializer.serialize(flat, output_str=True)
        engine.receive_weight_buckets(version, {index: [handle]})
    answer = engine.acknowledge_weight_update(version)
    assert answer["problems"] == [] and answer["buckets"] == digests(manifest, flats)
    engine.commit_weight_update(version, version)
    engine.continue_generation()
    assert engine.get_weight_version() == version


def checkpoints(folder: Path, case: FamilyCase) -> list[Path]:
    """Two bf16 checkpoints of one shape with different weights."""
    folders = [folder / f"seed{seed}" for seed in (0, 1)]
    for seed, path in enumerate(folders):
        path.mkdir()
        case.write_checkpoint(path, seed)
        for file in path.glob("*.safetensors"):
            bf16 = {name: tensor.bfloat16() for name, tensor in load_file(file).items()}
            save_file(bf16, file, metadata={"format": "pt"})
        config = json.loads((path / "config.json").read_text()) | {"torch_dtype": "bfloat16", "dtype": "bfloat16"}
        if config["model_type"] == "mimo":
            config["model_type"] = "qwen2"  # its own type needs its repository's code; the architecture decides
        (path / "config.json").write_text(json.dumps(config))
    return folders


def test_an_fp8_server_serves_the_bf16_model_and_after_a_push_just_the_offline_conversion(tmp_path: Path) -> None:
    case = replace(qwen3.CASE, config={**qwen3.CASE.config, **SIZES})
    plain = checkpoints(tmp_path, case)
    converted = [tmp_path / f"fp8-{path.name}" for path in plain]
    for source, target in zip(plain, converted, strict=True):
        rewrite_folder(to_fp8(), source, target)
    with servers((plain[0], {}), (converted[0], FP8_FLAGS), (converted[1], FP8_FLAGS)) as (bf16, fp8, other):
        expected, served, offline = prompt_log_probs(bf16), prompt_log_probs(fp8), prompt_log_probs(other)
        noise = (served - expected).abs().mean().item()
        apart = (offline - expected).abs().mean().item()
        print(f"\nFP8 against bf16: mean difference {noise:.4f}; another model: {apart:.4f}")
        assert noise < apart / 5  # weights this large are served with 0.27 of noise on an H200
        push(fp8, converted[1], "7")
        assert torch.equal(prompt_log_probs(fp8), offline)
        push(fp8, converted[0], "8")
        assert torch.equal(prompt_log_probs(fp8), served)


def reference_log_probs(case: FamilyCase, folder: Path) -> torch.Tensor:
    """transformers' result in fp32, on the host."""
    tokens = torch.tensor(PROMPT)
    with torch.no_grad():
        log_probs = reference_logits(case.load_reference(folder), tokens).log_softmax(dim=-1)
    return log_probs[:-1].gather(1, tokens[1:, None]).squeeze(1)


def test_minimax_m2_is_served_as_transformers_has_it_and_pushed_into_in_fp8(tmp_path: Path) -> None:
    """The engine reads the rotated part of a head, and what is normed, from names that transformers does not know."""
    case = replace(minimax_m2.CASE, config={**minimax_m2.CASE.config, **SIZES, **MINIMAX})
    plain = checkpoints(tmp_path, case)
    converted = [tmp_path / f"fp8-{path.name}" for path in plain]
    for source, target in zip(plain, converted, strict=True):
        rewrite_folder(to_fp8(), source, target)
    expected, another = (reference_log_probs(case, folder) for folder in plain)
    with servers((plain[0], {}), (converted[0], FP8_FLAGS), (converted[1], FP8_FLAGS)) as (bf16, fp8, other):
        noise = (prompt_log_probs(bf16) - expected).abs().mean().item()
        apart = (another - expected).abs().mean().item()
        print(f"\nbf16 against transformers: mean difference {noise:.4f}; another model: {apart:.4f}")
        assert noise < apart / 5
        push(fp8, converted[1], "7")
        assert torch.equal(prompt_log_probs(fp8), prompt_log_probs(other))


def test_a_decoded_token_sees_the_window_of_a_prompt(tmp_path: Path) -> None:
    """Windows of five tokens in four of five layers: one key fewer moves log-probs by .5."""
    case = replace(olmo3.CASE, config={**olmo3.CASE.config, **SIZES})
    folder, _ = checkpoints(tmp_path, case)
    with servers((folder, {})) as (engine,):
        decoded = [(token, log_prob) for log_prob, token, *_ in generate(engine, 64)["output_token_logprobs"]]
        tokens = [*PROMPT, *(token for token, _ in decoded)]
        engine.flush_cache()
        again = generate(engine, 1, prompt=tokens, prompt_log_probs=True)["input_token_logprobs"][len(PROMPT) :]
    apart = [abs(log_prob - as_prompt) for (_, log_prob), (as_prompt, *_) in zip(decoded, again, strict=True)]
    print(f"\ndecoded against prompt: mean difference {sum(apart) / len(apart):.4f}")
    assert sum(apart) / len(apart) < 0.1


def test_a_draft_model_follows_a_push(tmp_path: Path) -> None:
    config = {**mimo.CASE.config, **SIZES, "num_nextn_predict_layers": 1, "num_hidden_layers": 2}
    case = replace(mimo.CASE, config=config)
    folders = checkpoints(tmp_path, case)

    def accepted(engine: SGLangEngine) -> tuple[list[int], int]:
        meta = generate(engine, NUM_TOKENS)
        return [token for _, token, *_ in meta["output_token_logprobs"]], meta["spec_verify_ct"]

    with servers((folders[0], DRAFT_FLAGS), (folders[1], DRAFT_FLAGS)) as (engine, fresh):
        before, wanted = accepted(engine), accepted(fresh)
        assert before != wanted
        push(engine, folders[1], "7")
        after = accepted(engine)
        print(f"\nsteps for {NUM_TOKENS} tokens: seed 0 {before[1]}, seed 1 {wanted[1]}, after the push {after[1]}")
        assert after == wanted
        push(engine, folders[0], "8")
        assert accepted(engine) == before
