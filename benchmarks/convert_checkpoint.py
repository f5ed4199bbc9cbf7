"""Conversion of a random Qwen3-MoE model to torch_dist and back: speed against a plain copy, memory against its size.

    python benchmarks/convert_checkpoint.py [--folder DIR] [--layers N] [--experts N]

Every conversion is the command-line tool in a separate process; its peak memory comes from the kernel's accounting,
minus what the same tool needs for a tiny model.  The result must equal the source bit for bit.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from slime.weights.hf_files import HfFolderWriter

REPO = Path(__file__).resolve().parents[1]
GIB, MIB = 2**30, 2**20
SHARD_BYTES = 256 * MIB
HIDDEN, HEADS, GROUPS, HEAD_DIM, EXPERT_FFN = 1024, 16, 4, 64, 512


def config_of(num_layers: int, num_experts: int, vocab_size: int) -> dict[str, object]:
    """The HF config of the model."""
    return {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_hidden_layers": num_layers,
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": GROUPS,
        "head_dim": HEAD_DIM,
        "intermediate_size": 4 * HIDDEN,
        "moe_intermediate_size": EXPERT_FFN,
        "num_experts": num_experts,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "vocab_size": vocab_size,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }


def flags_of(num_layers: int, num_experts: int, vocab_size: int) -> list[str]:
    """The Megatron flags of the model."""
    text = (
        f"--num-layers {num_layers} --hidden-size {HIDDEN} --ffn-hidden-size {4 * HIDDEN} "
        f"--num-attention-heads {HEADS} --group-query-attention --num-query-groups {GROUPS} --kv-channels {HEAD_DIM} "
        f"--qk-layernorm --vocab-size {vocab_size} --rotary-base 1000000 --norm-epsilon 1e-6 --swiglu "
        "--use-rotary-position-embeddings --disable-bias-linear --normalization RMSNorm "
        "--untie-embeddings-and-output-weights "
        f"--num-experts {num_experts} --moe-ffn-hidden-size {EXPERT_FFN} --moe-router-topk 4 --moe-grouped-gemm "
        "--moe-router-score-function softmax --bf16"
    )
    return text.split()


def write_model(folder: Path, num_layers: int, num_experts: int, vocab_size: int) -> None:
    """Random bf16 weights in shards of 256 MiB."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return (torch.randint(-127, 127, shape, generator=generator, dtype=torch.int8).bfloat16() / 512).contiguous()

    folder.mkdir(parents=True)
    with HfFolderWriter(folder, assets_from=None, shard_bytes=SHARD_BYTES) as writer:
        writer.add("model.embed_tokens.weight", random(vocab_size, HIDDEN))
        for layer in range(num_layers):
            prefix = f"model.layers.{layer}."
            rows = {"q": HEADS, "k": GROUPS, "v": GROUPS}
            for name, heads in rows.items():
                writer.add(f"{prefix}self_attn.{name}_proj.weight", random(heads * HEAD_DIM, HIDDEN))
            writer.add(f"{prefix}self_attn.o_proj.weight", random(HIDDEN, HEADS * HEAD_DIM))
            for name, size in (("q", HEAD_DIM), ("k", HEAD_DIM)):
                writer.add(f"{prefix}self_attn.{name}_norm.weight", random(size))
            for name in ("input_layernorm", "post_attention_layernorm"):
                writer.add(f"{prefix}{name}.weight", random(HIDDEN))
            writer.add(f"{prefix}mlp.gate.weight", random(num_experts, HIDDEN))
            for expert in range(num_experts):
                for name in ("gate", "up"):
                    writer.add(f"{prefix}mlp.experts.{expert}.{name}_proj.weight", random(EXPERT_FFN, HIDDEN))
                writer.add(f"{prefix}mlp.experts.{expert}.down_proj.weight", random(HIDDEN, EXPERT_FFN))
        writer.add("model.norm.weight", random(HIDDEN))
        writer.add("lm_head.weight", random(vocab_size, HIDDEN))
    (folder / "config.json").write_text(json.dumps(config_of(num_layers, num_experts, vocab_size)))


def copy_files(source: Path, target: Path) -> float:
    """Seconds of a plain copy, synced to disk."""
    start = time.monotonic()
    target.mkdir()
    for path in source.iterdir():
        shutil.copyfile(path, target / path.name)
        descriptor = os.open(target / path.name, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    return time.monotonic() - start


LAUNCHER = """
import resource, subprocess, sys
status = subprocess.call([sys.executable, *sys.argv[2:]])
usage = resource.getrusage(resource.RUSAGE_CHILDREN)
open(sys.argv[1], "w").write(f"{usage.ru_maxrss * 1024} {usage.ru_utime + usage.ru_stime}")
sys.exit(status)
"""
"""Starts the program from a small process, because a child's accounting begins with its parent's peak memory."""


def run(*command: object) -> tuple[str, float]:
    """Return the output of a Python process, and its peak memory in bytes."""
    text, peak, _ = run_measured(*command)
    return text, peak


def run_measured(*command: object) -> tuple[str, float, float]:
    """Return the output of a Python process, its peak memory in bytes, and its CPU seconds."""
    with tempfile.NamedTemporaryFile("r") as accounting:
        process = subprocess.run(
            [sys.executable, "-c", LAUNCHER, accounting.name, *map(str, command)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=REPO,
        )
        if process.returncode:
            raise SystemExit(f"{command[0]} failed:\n{process.stdout}")
        peak, cpu_s = map(float, accounting.read().split())
    return process.stdout, peak, cpu_s


def logged_seconds(text: str) -> float:
    """Seconds in the tool's last line."""
    return float(re.findall(r"in (\d+\.\d) s", text)[-1])


def check_equal(source: Path, result: Path) -> int:
    """Compare all tensors; return their number."""
    where = json.loads((result / "model.safetensors.index.json").read_text())["weight_map"]
    count = 0
    for path in sorted(source.glob("*.safetensors")):
        for name, tensor in load_file(path).items():
            with safe_open(result / where[name], "pt") as file:
                other = file.get_tensor(name)
            assert other.dtype == tensor.dtype and other.equal(tensor), name
            count += 1
    assert count == len(where)
    return count


def convert_there_and_back(source: Path, work: Path, *sizes: int) -> dict[str, tuple[float, float]]:
    """Return name of the work -> seconds and peak memory; the plain conversion back must give the source."""
    flags = (*flags_of(*sizes), "--hf-checkpoint", source, "--save", work / "dist")
    back = ("--input-dir", work / "dist/release", "--origin-hf-dir", source, "--chunk-size", SHARD_BYTES)
    threads = ("--load-max-workers", 2, "--save-max-workers", 2)
    commands = {
        "to torch_dist, one process, synced": ("tools/convert_hf_to_torch_dist.py", *flags),
        "to Hugging Face": ("tools/convert_torch_dist_to_hf.py", *back, "--output-dir", work / "plain"),
        "to Hugging Face, 2 readers, 2 writers": (
            *("tools/convert_torch_dist_to_hf_parallel.py", *back, "--output-dir", work / "threads", *threads),
        ),
    }
    measured = {}
    for label, command in commands.items():
        text, peak = run(*command)
        measured[label] = logged_seconds(text), peak
    count = check_equal(source, work / "plain")
    print(f"{count} tensors bit for bit after both ways")
    return measured


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """The flags of the folder and of the large model."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where to work; default: a temporary folder")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--experts", type=int, default=32)
    return parser


def measure(
    options: argparse.Namespace, convert: Callable[..., dict[str, Any]]
) -> tuple[int, float, dict[str, dict[str, Any]]]:
    """Return bytes of the large model, seconds of its copy, and what ``convert(source, work, *sizes)`` measured."""
    if options.folder is not None:
        options.folder.mkdir(parents=True, exist_ok=True)
    measured = {}
    for name, sizes in {"tiny": (1, 4, 97), "large": (options.layers, options.experts, 32001)}.items():
        with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
            work = Path(temporary)
            source = work / "hf"
            write_model(source, *sizes)
            size = sum(path.stat().st_size for path in source.glob("*.safetensors"))
            copy_s = copy_files(source, work / "copy")
            shutil.rmtree(work / "copy")
            measured[name] = convert(source, work, *sizes)
    return size, copy_s, measured


def main() -> None:
    """Generate, copy, convert, convert back, compare, print."""
    size, copy_s, measured = measure(make_parser(__doc__).parse_args(), convert_there_and_back)
    print(f"{size / GIB:.2f} GiB in shards of {SHARD_BYTES // MIB} MiB; memory above that of a tiny model")
    print("| what | s | GB/s | of the copy's | peak memory, MiB | of the model |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    print(f"| plain copy, synced | {copy_s:.1f} | {size / 1e9 / copy_s:.2f} | 100% | | |")
    for label, (seconds, peak) in measured["large"].items():
        peak -= measured["tiny"][label][1]
        rate = f"{seconds:.1f} | {size / 1e9 / seconds:.2f} | {copy_s / seconds:.0%}"
        print(f"| {label} | {rate} | {peak / MIB:.0f} | {peak / size:.0%} |")


if __name__ == "__main__":
    main()
