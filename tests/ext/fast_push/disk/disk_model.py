"""A small model on disk, and pushes of it, for tests of disk pushes."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from slime.ext.fast_push.disk.delta import Bytes, DeltaBase
from slime.ext.fast_push.disk.versions import PartWriter, begin_version, finalize_version, version_folder, version_text
from slime.weights.hf_files import INDEX_FILE
from slime.weights.stored_tensors import read_bytes, read_layout

SIZES = {"a.weight": (64, 33), "b.weight": (1000,), "empty": (0, 4), "c.bias": (7,), "never.pushed": (5,)}
CHAIN = "run"


def write_model(folder: Path) -> None:
    """Two files with an index, a config and a tokenizer; and things that no copy should include."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(3)
    tensors = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in SIZES.items()}
    names = list(tensors)
    files = {"model-1.safetensors": names[:2], "model-2.safetensors": names[2:]}
    for file, inside in files.items():
        save_file({name: tensors[name] for name in inside}, folder / file, metadata={"format": "pt"})
    weight_map = {name: file for file, inside in files.items() for name in inside}
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text("{}")
    (folder / "pytorch_model.bin").write_text("an older form of the same weights")
    (folder / "subfolder").mkdir()


def read_model(folder: Path) -> dict[str, bytes]:
    """Bytes by name."""
    return {name: read_bytes(stored).tobytes() for name, stored in read_layout(folder).items()}


@dataclass
class Pusher:
    """Does in one process what trainer ranks do together: writes versions of a changing model."""

    model: Path
    root: Path
    encoding: str = "xor"
    chain: str = CHAIN
    number: int = 0
    base_number: int = 0
    current: dict[str, Bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        layout = read_layout(self.model)
        self.current = {name: read_bytes(stored) for name, stored in layout.items() if name != "never.pushed"}
        self.base = DeltaBase(encoding=self.encoding, checksum="xxh3-128")
        for name, data in self.current.items():
            self.base.seed(name, data.copy())
        self.random = np.random.default_rng(11)

    def change(self) -> None:
        """A training step: changes a few bytes of some tensors."""
        for name in ("a.weight", "c.bias"):
            data = self.current[name]
            data[self.random.random(data.size) < 0.1] += 1

    def push(self, *, commit: bool = True) -> Path:
        """Write the next version as a delta."""
        self.number += 1
        final = version_folder(self.root, self.number)
        unfinished = begin_version(final)
        writers = [PartWriter(unfinished, rank, shard_bytes=2000) for rank in range(2)]
        turn = 0
        for name, data in self.current.items():
            encoded = self.base.encode(name, data)
            if encoded is not None:
                blob = torch.frombuffer(bytearray(encoded.blob), dtype=torch.uint8)
                writers[turn % 2].add(name, blob, note=encoded.checksum)
                turn += 1
        metadata = {
            "version": version_text(self.number), "base_version": version_text(self.base_number), "chain": self.chain,
            "delta_encoding": self.encoding, "compression_format": "zstd", "checksum_format": "xxh3-128",
        }  # fmt: skip
        finalize_version(unfinished, final, [writer.flush() for writer in writers], metadata, first=0)
        if commit:
            self.base.commit()
            self.base_number = self.number
        else:
            self.base.discard()
        return final

    def push_whole(self, *, number: int | None = None) -> Path:
        """Write the current weights in full: as a new version, or beside the delta of ``number``."""
        final = version_folder(self.root, number or self.number + 1, whole=number is not None)
        if number is None:
            self.number += 1
            self.base_number = self.number
            for name, data in self.current.items():
                self.base.encode(name, data)
            self.base.commit()
        unfinished = begin_version(final)
        writer = PartWriter(unfinished, 0)
        layout = read_layout(self.model)
        for name, stored in layout.items():
            data = self.current.get(name, read_bytes(stored))
            writer.add(name, torch.from_numpy(data.copy().view(np.int16)).view(torch.bfloat16).view(stored.shape))
        (unfinished / "config.json").write_text("{}")
        finalize_version(unfinished, final, [writer.flush()], {"chain": self.chain}, first=1)
        return final

    def expected(self) -> dict[str, bytes]:
        """The expected content of a copy."""
        return read_model(self.model) | {name: data.tobytes() for name, data in self.current.items()}
