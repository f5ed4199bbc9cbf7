"""What an engine spends on a push besides moving bytes: its model's own loader against the load plan.

    python -m benchmarks.weight_load                  # tensors as many as Qwen3-30B-A3B has, each of them tiny
    python -m benchmarks.weight_load --layers 4 --experts 16

SGLang's Qwen3-MoE on the CPU, without a server.  Tensors are so small that the time is that of Python and torch's
dispatch, which a push on a GPU pays as well.  With a GPU the copies of a bucket are one launch; on a CPU they are a
loop, so the time without it (the table replaced by nothing) is given too.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from slime.backends.sglang_utils import model_load
from slime.backends.sglang_utils.model_load import ModelLoad
from slime.weights.kernels.copy_table import CopyTable
from tests.loaded_model.buckets import fill, whole_buckets
from tests.loaded_model.rank import LoadedRank


def config(layers: int, experts: int) -> dict[str, object]:
    """Qwen3-30B-A3B with sizes that cost nothing."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 512, "hidden_size": 32,
        "intermediate_size": 64, "moe_intermediate_size": 16, "num_experts": experts, "num_experts_per_tok": 2,
        "num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "tie_word_embeddings": False, "max_position_embeddings": 128, "mlp_only_layers": [], "decoder_sparse_step": 1,
        "norm_topk_prob": True, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    }  # fmt: skip


def tensors_of(settings: dict[str, object]) -> dict[str, torch.Tensor]:
    """A checkpoint under Hugging Face's names."""
    hidden, inter, vocab = 32, 16, 512
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(int(str(settings["num_hidden_layers"]))):
        prefix = f"model.layers.{layer}."
        shapes |= {f"{prefix}self_attn.{name}_proj.weight": (32 if name == "q" else 16, hidden) for name in "qkv"}
        shapes[f"{prefix}self_attn.o_proj.weight"] = (hidden, 32)
        shapes |= {f"{prefix}self_attn.{name}_norm.weight": (8,) for name in "qk"}
        shapes |= {f"{prefix}{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
        shapes[f"{prefix}mlp.gate.weight"] = (int(str(settings["num_experts"])), hidden)
        for expert in range(int(str(settings["num_experts"]))):
            part = f"{prefix}mlp.experts.{expert}."
            shapes |= {f"{part}{name}_proj.weight": (inter, hidden) for name in ("gate", "up")}
            shapes[f"{part}down_proj.weight"] = (hidden, inter)
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}
    return {name: torch.rand(shape).bfloat16() for name, shape in shapes.items()}


def seconds(action: Callable[[], object]) -> float:
    """CPU time of one call."""
    start = time.process_time()
    action()
    return time.process_time() - start


def main() -> None:
    """Print one line for each way."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--buckets", type=int, default=64, help="30B parameters in bf16, 1 GiB each")
    args = parser.parse_args()
    torch.set_num_threads(1)
    settings = config(args.layers, args.experts)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(settings))
        rank = LoadedRank(folder, store=f"{folder}/store")
        tensors = tensors_of(settings)
        manifest = whole_buckets(tensors, args.buckets)
        flats = fill(manifest, tensors)
        named = [[(p.name, tensors[p.name]) for p in bucket.pieces] for bucket in manifest.buckets]
        stock_s = seconds(lambda: [rank.model.load_weights(part) for part in named])  # type: ignore[operator]

        load = ModelLoad(rank.model)

        def push() -> None:
            load.begin(manifest)
            for index, flat in enumerate(flats):
                load.load(index, flat)
            load.finish()
            assert not load.problems, load.problems[:3]

        trace_s = seconds(lambda: load.begin(manifest))
        first_s = seconds(push)
        second_s, push_s = seconds(push), seconds(push)
        model_load.CopyTable = NoTable  # type: ignore[misc, assignment]
        load._tables = {index: (NoTable(table.items), planned) for index, (table, planned) in load._tables.items()}
        bare_s = seconds(push)
    print(f"{len(tensors)} tensors in {len(flats)} buckets, CPU seconds of one engine rank")
    print(f"stock load_weights, bucket by bucket   {stock_s:8.3f}")
    print(f"trace of the plan, once                {trace_s:8.3f}")
    print(f"first push: stock, and proof of plan   {first_s:8.3f}")
    print(f"second push: tables are made           {second_s:8.3f}")
    print(f"later push, copies and check in torch  {push_s:8.3f}   {stock_s / push_s:8.1f} times less than stock")
    print(f"later push, without the device's work  {bare_s:8.3f}   {stock_s / bare_s:8.1f} times less than stock")


class NoTable(CopyTable):
    """Stands for a launch that costs the host nothing."""

    def copy(self, flat: torch.Tensor) -> None:
        """Nothing."""

    def count_differences(self, flat: torch.Tensor) -> torch.Tensor:
        """No differences."""
        return torch.zeros(len(self.items), dtype=torch.int64)


if __name__ == "__main__":
    main()
