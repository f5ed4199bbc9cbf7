"""Which cells the push matrix has, how they run, and the table of their results."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from slime.backends.megatron_utils.models import find_weight_map
from slime.ext.low_precision.folders.run import rewrite_folder
from slime.ext.low_precision.folders.to_quantized import ToQuantized, _fp8_config
from slime.weights.quantize.formats import BlockFp8, PlainWeights, is_quantized_offline
from tests.matrix.case import FamilyCase, write_bf16_copy
from tests.matrix.layouts import LAYOUTS as TRAINER_LAYOUTS
from tests.matrix.layouts import Layout, write_checkpoint
from tests.matrix.pool import RankError, RankPool
from tests.push_matrix.engines import Client, serve_engines
from tests.push_matrix.on_rank import Job, Result, push_on_rank

MODES = ("plain", "colocated", "distributed", "mixed", "disk", "delta")
QUANTIZATIONS = ("bf16", "fp8", "published")
"""The last is the published form of a family, if no converter makes it."""
ENGINE_SIZES = (1, 2)
LAYOUTS: dict[str, Layout] = {
    "one": Layout(1, ()),
    "DP2": TRAINER_LAYOUTS["DP2"],
    **{name: TRAINER_LAYOUTS[name] for name in ("TP2 SP", "PP2 uneven", "CP2", "EP2", "TP2 EP2 SP", "PP2 EP2")},
}
FAMILIES = ("qwen3", "qwen3_moe", "deepseek_v3")
"""Dense, with experts, with latent attention."""
SERVED = (
    "qwen2.5",
    "qwen2_5_vl",
    "qwen3",
    "qwen2_moe",
    "qwen3_moe",
    "glm4",
    "glm4_moe",
    "glm4v",
    "glm4v_moe",
    "deepseek_v3",
    "deepseek_v4-128",
    "deepseek_v4-fp4",
    "kimi_k2",
    "kimi_k25",
    "minimax_m2",
    "mistral3",
    "mixtral",
    "nemotron_h",
    "seed_oss",
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_5_vl",
    "qwen3_5_vl_moe",
    "qwen3_vl",
    "qwen3_vl_moe",
    "gemma3",
    "gemma4",
    "gemma4-moe",
    "gemma4-small",
    "gpt_oss",
    "olmo3",
)
"""All that the installed SGLang can build on a CPU."""
FAST: dict[str, Any] = {
    "families": ("qwen3_moe",),
    "chosen": {"layouts": ("TP2 EP2 SP", "PP2 EP2"), "sizes": (1,), "quantizations": QUANTIZATIONS},
}
FP8_BLOCK = (4, 4)
"""Divides the tiny models' sizes, even halved, as 128 divides those of real ones."""
ROUNDED_SIZES = (
    *("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"),
    "moe_shared_expert_intermediate_size",
    *("q_lora_rank", "kv_lora_rank", "v_head_dim"),
)
"""Sizes of a case's config that become multiples of 32: engines hold only whole fp8 blocks, on each of two ranks."""
CELL_TIMEOUT_S = 120


@dataclass(frozen=True)
class Cell:
    """One family, trainer layout, mode, quantization and engine size."""

    family: str
    layout: str
    mode: str
    quantization: str
    engine_tp: int
    digest: str
    """Digest of the first engine's parameters."""
    problem: str = ""

    def describe(self) -> str:
        """One line with all that is needed to investigate it."""
        verdict = "FAIL" if self.problem else "OK  "
        where = f"{self.family} / {self.layout} / {self.mode} / {self.quantization} / engine TP{self.engine_tp}"
        return f"{verdict} {where}: {self.problem or self.digest}"


def as_engines_have_it(case: FamilyCase) -> FamilyCase:
    """The case with sizes that engines can hold in fp8; SGLang's Qwen models with experts have no dense layers."""
    settings = {name: -(-case.config[name] // 32) * 32 for name in ROUNDED_SIZES if case.config.get(name)}
    if {"mlp_only_layers", "decoder_sparse_step"} & case.config.keys():
        settings |= {"mlp_only_layers": [], "decoder_sparse_step": 1}
    return dataclasses.replace(case, config={**case.config, **settings})


def run_cells(
    cases: Sequence[FamilyCase],
    *,
    modes: Sequence[str],
    quantizations: Sequence[str],
    layouts: Sequence[str],
    sizes: Sequence[int],
    on_cell: Callable[[Cell], None] = lambda cell: None,
) -> list[Cell]:
    """The cells of these families, each layout's on one set of ranks."""
    cells: list[Cell] = []
    # Size 1 twice: two engines inside or outside, or the one outside of a mixed job.
    with serve_engines([1, 1, *(size for size in sizes if size > 1)]) as addresses, RankPool() as pool:
        for case in map(as_engines_have_it, cases):
            with tempfile.TemporaryDirectory(prefix=f"push-{case.name}-") as root:
                for cell in _run_case(pool, case, Path(root), addresses, modes, quantizations, layouts, sizes):
                    on_cell(cell)
                    cells.append(cell)
    return cells


def _run_case(
    pool: RankPool,
    case: FamilyCase,
    root: Path,
    addresses: Mapping[int, Sequence[str]],
    modes: Sequence[str],
    quantizations: Sequence[str],
    layouts: Sequence[str],
    sizes: Sequence[int],
) -> Iterator[Cell]:
    forms = {"bf16": True, "fp8": case.has_quantized_form, "published": case.publish is not None}
    quantizations = [one for one in quantizations if forms[one]]
    plain = root / "plain"
    pool.run(write_checkpoint, 1, case.name, dict(case.config), str(plain))
    folders = {one: root / one for one in QUANTIZATIONS}
    write_bf16_copy(plain, folders["bf16"])
    if "fp8" in quantizations:
        rewrite_folder(
            to_small_blocks(find_weight_map(case.config["model_type"]).plain), folders["bf16"], folders["fp8"]
        )
    if "published" in quantizations and case.publish:
        case.publish(folders["bf16"], folders["published"])
    expected = {
        (quantization, size): _expected(addresses[size][0], str(folders[quantization]))
        for quantization in quantizations
        for size in {1, *sizes}
    }
    for name in layouts:
        layout = LAYOUTS[name]
        if (layout.needs_experts and not case.has_experts) or layout.tensor > case.max_tp:
            continue
        places = [
            (mode, quantization, size)
            for quantization in quantizations
            for size in sizes
            for mode in modes
            if size <= layout.world_size or mode not in ("plain", "colocated", "mixed")
        ]
        jobs = [
            _job(mode, str(folders[quantization]), size, layout.world_size, addresses, expected, quantization, root)
            for mode, quantization, size in places
        ]
        try:
            results = pool.run(
                push_on_rank,
                layout.world_size,
                *(case.name, dict(case.config), str(plain), layout.flags, jobs),
                timeout_s=CELL_TIMEOUT_S + 30 * len(jobs),
            )[0]
        except RankError as error:
            results = [Result(problem=" ".join(str(error).split()[-60:]))] * len(jobs)
        for (mode, quantization, size), result in zip(places, results, strict=True):
            digest = result.digests[0] if result.digests else ""
            yield Cell(case.name, name, mode, quantization, size, digest, result.problem)


def to_small_blocks(plain: PlainWeights | None = None) -> ToQuantized:
    """The converter's recipe with smaller blocks than the tool allows, because real models' sizes divide by 128."""
    return ToQuantized(
        BlockFp8(FP8_BLOCK),
        FP8_BLOCK[0],
        partial(is_quantized_offline, plain=plain),
        lambda names: _fp8_config(names, plain, weight_block_size=list(FP8_BLOCK)),
        {"to": "fp8", "strategy": "block"},
    )


def _expected(address: str, folder: str) -> str:
    """The result of SGLang's own loader for a checkpoint."""
    engine = Client(address, index=0, num_gpus=1, gpu_offset=0, is_colocated=False)
    engine.now("become", folder, "bfloat16", {})
    engine.now("load_stock", folder)
    digest = engine.now("digest")
    engine.close()
    return digest


def _job(
    mode: str,
    folder: str,
    size: int,
    world_size: int,
    addresses: Mapping[int, Sequence[str]],
    expected: Mapping[tuple[str, int], str],
    quantization: str,
    root: Path,
) -> Job:
    """The placement of a cell's engines."""
    first, second = addresses[size][0], addresses[1][1]
    if mode in ("plain", "colocated"):
        engines = [(first, 0, size)] + ([(second, 1, 1)] if size == 1 and world_size > 1 else [])
    elif mode == "mixed":
        engines = [(first, 0, size), (second, world_size, 1)]
    else:
        engines = [(first, world_size, size)]
        if mode == "distributed":
            engines.append((second, world_size + size, 1))
    digests = tuple(expected[quantization, count] for _, _, count in engines)
    disk = tempfile.mkdtemp(prefix="disk-", dir=root)
    return Job(mode, folder, tuple(engines), disk, digests)


def table(cells: Sequence[Cell]) -> str:
    """One row for each family, quantization and engine size; a cell counts the trainer layouts."""
    modes = [mode for mode in MODES if any(cell.mode == mode for cell in cells)]
    lines = [["family", "engine", "digest of its weights", *modes], ["---"] * (3 + len(modes))]
    rows: dict[tuple[str, str, int], list[Cell]] = {}
    for cell in cells:
        rows.setdefault((cell.family, cell.quantization, cell.engine_tp), []).append(cell)
    for (family, quantization, size), members in rows.items():
        digests = sorted({cell.digest for cell in members if cell.digest and not cell.problem}) or ["-"]
        verdicts = [_verdict([cell for cell in members if cell.mode == mode]) for mode in modes]
        lines.append([family, f"{quantization}, TP{size}", " ".join(f"`{digest}`" for digest in digests), *verdicts])
    names = list(dict.fromkeys(cell.layout for cell in cells))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + f"\n\nTrainer layouts: {', '.join(names)}.\n"


def _verdict(cells: Sequence[Cell]) -> str:
    if not cells:
        return "-"
    failed = [cell.layout for cell in cells if cell.problem]
    return f"**FAIL** in {', '.join(failed)}" if failed else f"OK in {len(cells)}"
