"""A delta push over disk against a full push: bytes, and seconds on either side.

    python benchmarks/delta_push.py --gib 1 --lr 1e-6

The weights are normal random numbers of standard deviation 0.02 in bf16, and the change is realistic: Adam updates
fp32 master weights, and engines get their bf16 rounding.  One process writes and one host reads, on one disk, each
with --workers threads.  Reading the same bytes back from the page cache is faster than any network disk.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime.ext.fast_push.disk.delta import ENCODINGS, Bytes, DeltaBase  # noqa: E402
from slime.ext.fast_push.disk.local_copy import LocalCopy  # noqa: E402
from slime.ext.fast_push.disk.versions import (  # noqa: E402
    PartWriter,
    begin_version,
    finalize_version,
    version_folder,
    version_text,
)

SHAPE = (4096, 4096)
STD = 0.02


class Model:
    """Matrices with fp32 masters, trained on random gradients."""

    def __init__(self, num_matrices: int, lr: float) -> None:
        generator = torch.Generator().manual_seed(0)
        first = [torch.randn(SHAPE, generator=generator).mul_(STD).bfloat16() for _ in range(num_matrices)]
        self.names = [f"model.layers.{index}.weight" for index in range(num_matrices)]
        self._masters = [torch.nn.Parameter(weight.float()) for weight in first]
        self._optimizer = torch.optim.AdamW(self._masters, lr=lr, weight_decay=0.1, betas=(0.9, 0.98))

    def step(self) -> None:
        """One step of Adam on random gradients: the smallest change that training makes."""
        for master in self._masters:
            master.grad = torch.randn(SHAPE)
        self._optimizer.step()

    def weights(self) -> dict[str, torch.Tensor]:
        """The tensors that engines get."""
        return {name: master.detach().bfloat16() for name, master in zip(self.names, self._masters, strict=True)}


def as_bytes(weight: torch.Tensor) -> Bytes:
    return weight.view(-1).view(torch.uint8).numpy()


def write_whole(root: Path, number: int, weights: dict[str, torch.Tensor]) -> float:
    """Seconds to write and publish a full version."""
    start = time.perf_counter()
    final = version_folder(root, number)
    unfinished = begin_version(final)
    writer = PartWriter(unfinished, 0)
    for name, weight in weights.items():
        writer.add(name, weight)
    finalize_version(unfinished, final, [writer.flush()], {"chain": "benchmark"}, first=1)
    return time.perf_counter() - start


def write_changes(
    root: Path, number: int, base: DeltaBase, weights: dict[str, torch.Tensor], encoding: str, workers: int
) -> tuple[int, int, float]:
    """Changed bytes, bytes written, seconds."""
    start = time.perf_counter()
    final = version_folder(root, number)
    unfinished = begin_version(final)
    writer = PartWriter(unfinished, 0)
    changed = 0
    with ThreadPoolExecutor(workers) as pool:
        results = pool.map(lambda name: base.encode(name, as_bytes(weights[name])), weights)
        for name, encoded in zip(weights, results, strict=True):
            if encoded is not None:
                changed += encoded.num_changed
                blob = torch.frombuffer(bytearray(encoded.blob), dtype=torch.uint8)
                writer.add(name, blob, note=encoded.checksum)
    metadata = {
        "version": version_text(number), "base_version": version_text(number - 1), "chain": "benchmark",
        "delta_encoding": encoding, "compression_format": "zstd", "checksum_format": "xxh3-128",
    }  # fmt: skip
    size = finalize_version(unfinished, final, [writer.flush()], metadata, first=0)
    return changed, size, time.perf_counter() - start


def main() -> None:
    """Print one line for each encoding and step."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=1.0, help="bytes of the model")
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--steps", type=int, default=1, help="optimizer steps between two pushes")
    parser.add_argument("--pushes", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--folder", default=None, help="where to work; default: the system's folder for temporary files"
    )
    args = parser.parse_args()
    num_matrices = max(1, round(args.gib * 2**30 / (SHAPE[0] * SHAPE[1] * 2)))
    for encoding in ENCODINGS:
        work = Path(tempfile.mkdtemp(dir=args.folder))
        try:
            run(work, Model(num_matrices, args.lr), encoding, args)
        finally:
            shutil.rmtree(work)


def run(work: Path, model: Model, encoding: str, args: argparse.Namespace) -> None:
    """All pushes with one encoding."""
    root, folder = work / "shared", work / "model"
    folder.mkdir()
    weights = model.weights()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    base = DeltaBase(encoding=encoding, checksum="xxh3-128")
    for name, weight in weights.items():
        base.seed(name, as_bytes(weight.clone()))
    copy = LocalCopy(work / "local", source=root, model=folder, timeout_s=600, workers=args.workers)
    first_copy_s = copy.pull(0).elapsed_s
    total = sum(weight.numel() * 2 for weight in weights.values())
    whole_s = write_whole(work / "whole", 1, weights)
    whole = LocalCopy(work / "whole copy", source=work / "whole", model=folder, timeout_s=600, workers=args.workers)
    copy_s = whole.pull(1).elapsed_s
    print(
        f"{encoding}: model of {total / 2**30:.2f} GiB; whole: write {whole_s:.2f} s, copy {copy_s:.2f} s (first copy "
        f"{first_copy_s:.2f} s)"
    )
    shutil.rmtree(work / "whole")
    shutil.rmtree(work / "whole copy")
    for number in range(1, args.pushes + 1):
        for _ in range(args.steps):
            model.step()
        before, weights = weights, model.weights()
        elements = sum(int((weights[name] != before[name]).sum()) for name in weights)
        changed, size, write_s = write_changes(root, number, base, weights, encoding, args.workers)
        report = copy.pull(number)
        start = time.perf_counter()
        base.commit(args.workers)
        print(
            f"  push {number}: {100 * elements * 2 / total:.2f} % of elements, {100 * changed / total:.2f} % of bytes "
            f"changed; {size / 2**20:.1f} MiB, {total / max(size, 1):.1f} times less; write {write_s:.2f} s "
            f"({total / write_s / 2**30:.2f} GiB/s), apply {report.elapsed_s:.2f} s "
            f"({total / report.elapsed_s / 2**30:.2f} GiB/s), commit {time.perf_counter() - start:.2f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
