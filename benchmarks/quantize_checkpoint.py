"""FP8 and int4 conversion of a random Qwen3-MoE folder and back: speed against a plain copy, and memory.

    python benchmarks/quantize_checkpoint.py [--folder DIR] [--layers N] [--experts N] [--max-workers N]

Every conversion is the command-line tool in a separate process.  The naive way, in the same run, loads a shard,
quantizes its tensors one after the other and saves it; its files must hold the same bytes.  Peak memory comes from the
kernel's accounting, minus what the same program needs for a tiny model.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from safetensors.torch import load_file

from benchmarks.convert_checkpoint import GIB, MIB, logged_seconds, make_parser, measure, run_measured

NAIVE = """
import os, sys, time
from pathlib import Path
from safetensors.torch import load_file, save_file
from slime.backends.megatron_utils.models import find_weight_map
from slime.weights.quantize.block_fp8 import quantize_block
from slime.weights.quantize.formats import is_quantized_offline

source, target = map(Path, sys.argv[1:])
target.mkdir()
plain = find_weight_map("qwen3_moe").plain
start = time.monotonic()
for path in sorted(source.glob("*.safetensors")):
    result = {}
    for name, tensor in load_file(path).items():
        if is_quantized_offline(name, tensor.shape, plain):
            result[name], result[name + "_scale_inv"] = quantize_block(tensor)
        else:
            result[name] = tensor
    save_file(result, target / path.name)
    with open(target / path.name) as file:
        os.fsync(file.fileno())
print(f"in {time.monotonic() - start:.1f} s")
"""


def read_all(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a folder."""
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def check_equal(one: Path, other: Path) -> None:
    """Exit if two folders differ in any byte of any tensor."""
    a, b = read_all(one), read_all(other)
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert tensor.view(torch.uint8).equal(b[name].view(torch.uint8)), name


def convert_all(source: Path, work: Path, workers: int) -> dict[str, tuple[float, float, float]]:
    """Return name of the work -> its seconds, peak memory and CPU seconds, including the start of Python."""
    to_fp8 = ("tools/convert_hf_to_fp8.py", "--model-dir", source)
    to_int4 = ("tools/convert_hf_to_int4_direct.py", "--model-dir", source)
    back = ("tools/fp8_cast_bf16.py", "--input-fp8-hf-path", work / "fp8")
    many = ("--max-workers", workers)
    naive = work / "naive.py"
    naive.write_text(f"import sys; sys.path.insert(0, {str(Path.cwd())!r})\n{NAIVE}")
    commands = {
        "to FP8, naive": (naive, source, work / "naive"),
        "to FP8": (*to_fp8, "--save-dir", work / "fp8"),
        f"to FP8, {workers} workers": (*to_fp8, "--save-dir", work / "fp8-many", *many),
        f"to int4, {workers} workers": (*to_int4, "--save-dir", work / "int4", *many),
        f"FP8 to bf16, {workers} workers": (*back, "--output-bf16-hf-path", work / "bf16", *many),
    }
    measured = {}
    for label, command in commands.items():
        text, *resources = run_measured(*command)
        measured[label] = (logged_seconds(text), *resources)
    check_equal(work / "naive", work / "fp8")
    check_equal(work / "fp8", work / "fp8-many")
    return measured


def main() -> None:
    """Generate, copy, convert, compare, print."""
    parser = make_parser(__doc__)
    parser.add_argument("--max-workers", type=int, default=2)
    options = parser.parse_args()
    size, copy_s, measured = measure(options, lambda source, work, *_: convert_all(source, work, options.max_workers))
    print(f"{size / GIB:.2f} GiB; GB/s of the bf16 model; memory above that of a tiny model")
    print("| what | s | GB/s | of the copy's | CPU s above a tiny model's | peak memory, MiB | of the model |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    print(f"| plain copy, synced | {copy_s:.1f} | {size / 1e9 / copy_s:.2f} | 100% | | | |")
    for label, (seconds, peak, cpu_s) in measured["large"].items():
        peak -= measured["tiny"][label][1]
        cpu_s -= measured["tiny"][label][2]
        rate = f"{seconds:.1f} | {size / 1e9 / seconds:.2f} | {copy_s / seconds:.0%} | {cpu_s:.1f}"
        print(f"| {label} | {rate} | {peak / MIB:.0f} | {peak / size:.0%} |")


if __name__ == "__main__":
    main()
