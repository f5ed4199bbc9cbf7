"""Checks that a real engine returns the experts it chose, and that they fit the trainer.  Prints the results.

    python -m tests.e2e.routed_experts

One SGLang server with a tiny Qwen3 MoE of random weights in fp32 (SGLang's has experts in every layer).  Answers are
generated through slime's rollout code: complete ones, one that continues a cached prefix, one that is aborted and
continued, one with a tool's text in between.  Their experts must be transformers' choices for the same tokens;
then a trainer replays them, and its log-probs must equal the engine's.  Exit code 1 if anything differs.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slime.backends.sglang_utils import cpu_shim

cpu_shim.install()

from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM  # noqa: E402 - after the shim

from slime.backends.megatron_utils.data import prepare_rollout_data  # noqa: E402
from slime.backends.sglang_utils.sglang_engine import SGLangEngine  # noqa: E402
from slime.train_data.convert import samples_to_train_data  # noqa: E402
from slime.train_data.routed_experts import RoutedShape  # noqa: E402
from slime.utils.net import get_free_port  # noqa: E402
from slime.utils.types import Sample  # noqa: E402
from tests.e2e import tiny_qwen3  # noqa: E402
from tests.e2e.engine_owner import engine_args  # noqa: E402
from tests.e2e.kinds_of_samples import collect  # noqa: E402
from tests.matrix import trainer  # noqa: E402
from tests.matrix.case import load_cases  # noqa: E402
from tests.matrix.parity import one_process_world  # noqa: E402
from tests.matrix.replay import old_log_probs, replay_of, replayed_backward  # noqa: E402

CONFIG = {
    **{"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 32},
    **{"num_hidden_layers": 3, "decoder_sparse_step": 1, "num_experts": 8, "num_experts_per_tok": 3},
    **{"norm_topk_prob": True, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
    **{"max_position_embeddings": 2048, "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1},
}
SHAPE = RoutedShape(num_layers=3, top_k=3, num_experts=8)
BOUND = 1e-4


def tiny_moe(seed: int) -> Qwen3MoeForCausalLM:
    torch.manual_seed(seed)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**CONFIG, initializer_range=0.2)).eval()


def choices(model: Any, tokens: list[int]) -> dict[int, Tensor]:
    """transformers' choices by layer for every token except the last: [L - 1, k], in ascending order."""
    seen: dict[int, Tensor] = {}
    hooks = [
        block.mlp.gate.register_forward_hook(lambda _, __, output, layer=layer: seen.update({layer: output[2]}))
        for layer, block in enumerate(model.model.layers)
        if hasattr(block.mlp, "gate")
    ]
    with torch.no_grad():
        model(torch.tensor([tokens]))
    for hook in hooks:
        hook.remove()
    return {layer: ids[:-1].sort(-1).values for layer, ids in seen.items()}


def check_choices_of(model: Any, samples: list[Sample]) -> float:
    """The largest share of positions, over samples and layers, at which engine and transformers differ."""
    worst = 0.0
    for sample in samples:
        rows = sample.rollout_routed_experts.sort(-1).values
        for layer, expected in choices(model, sample.tokens).items():
            differs = (rows[:, layer] != expected[: len(rows)]).any(-1).float().mean()
            worst = max(worst, float(differs))
        print(f"sample {sample.index}: {len(sample.tokens)} tokens, {len(rows)} rows, differing so far {worst:.4f}")
    return worst


def check_trainer(folder: Path, samples: list[Sample]) -> tuple[float, float]:
    """With the engine's experts: the largest difference between its log-probs and the trainer's, and the share of
    choices that the trainer would not have made.
    """
    case = load_cases(["qwen3_moe"])["qwen3_moe"]
    data = samples_to_train_data(samples, [0.0] * 4, [1.0, -1.0, 0.5, -0.5], routed=SHAPE)
    flags = ("--use-rollout-routing-replay", "--max-tokens-per-gpu", 4096, "--global-batch-size", 4)
    with one_process_world():
        from slime.backends.megatron_utils import initialize

        args = trainer.make_args(case, folder, *flags)
        initialize.init(args)
        model = trainer.load_model(args)
        rank_data = prepare_rollout_data(trainer.rank_data_of(args, data.to_dict()))
        replay = replay_of(args, model)
        replay.begin(rank_data)
        log_probs = old_log_probs(args, model, rank_data, replay)
        replayed_backward(args, model, rank_data, replay)
        changed = replay.take_metrics()["routing_replay_changed"]
        pairs = zip(log_probs, rank_data["rollout_log_probs"], rank_data["loss_masks"], strict=True)
        return max(float(((ours - theirs) * mask).abs().max()) for ours, theirs, mask in pairs), changed


def main() -> int:
    """Run everything; return 0 if all agrees."""
    tiny_qwen3.tiny_model = tiny_moe
    with tempfile.TemporaryDirectory(prefix="routed-") as root:
        folder = Path(root)
        model = tiny_qwen3.save_tiny_model(folder, 0)
        args = Namespace(
            **{**vars(engine_args(root)), "use_rollout_routing_replay": True},
            **{"num_layers": SHAPE.num_layers, "moe_router_topk": SHAPE.top_k, "sglang_server_concurrency": 8},
            rollout_num_gpus=1,
        )
        port = get_free_port(25600, consecutive=3)
        engine = SGLangEngine(args, rank=0)
        start = time.monotonic()
        try:
            engine.init(
                host="127.0.0.1",
                port=port,
                nccl_port=port + 1,
                dist_init_addr=f"127.0.0.1:{port + 2}",
                router_ip=None,
                router_port=None,
            )
            print(f"the engine is up after {time.monotonic() - start:.0f} s")
            samples = asyncio.run(collect(args, engine.get_url(), {"temperature": 1.0, "ignore_eos": True}))
        finally:
            engine.shutdown()
        share = check_choices_of(model, samples)
        error, changed = check_trainer(folder, samples)
    print(f"experts: {share:.4f} of the positions differ from transformers, {changed:.4f} from the trainer's choice")
    print(f"log-probs of engine and trainer: largest difference {error:.1e} (bound {BOUND})")
    return int(share > 0 or changed > 0 or error > BOUND)


if __name__ == "__main__":
    argparse.ArgumentParser(prog="python -m tests.e2e.routed_experts", description=__doc__).parse_args()
    sys.exit(main())
