"""Every layout against one process: the same loss, gradients and training, through the real trainer.

A cell runs the whole path on every rank: train data, schedule, packing, the pipeline schedule, loss, the end of the
backward pass, two optimizer steps, log-probs before and after.  Numbers are those of fp32 on gloo.
"""

from __future__ import annotations

import dataclasses
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.matrix import layout_rank
from tests.matrix.case import FamilyCase
from tests.matrix.pool import RankError, RankPool
from tests.matrix.report import Cell

BOUND = 1e-5
"""Largest relative difference of a gradient, a metric or a log-prob, in fp32."""
BF16: tuple[str, ...] = ("--bf16",)
BF16_BOUND = 2e-2
"""The same in bf16, whose kernels round differently for every input shape."""

Flags = tuple[object, ...]


@dataclass(frozen=True)
class Layout:
    """Ranks, and the flags that arrange them."""

    world_size: int
    flags: Flags
    num_layers: int | None = None
    """Layers of the model, if the case's own cannot be divided into the stages."""
    loss_flags: Flags = ()
    """Flags that change the numbers, also given to the single process."""
    tensor: int = 1
    """Tensor-parallel size, which a family's sizes must allow."""
    needs_experts: bool = False
    is_basic: bool = False
    """True if every family runs in this layout; the others are for FULL_FAMILIES."""


def _tp(size: int = 2, *, sequence: bool = True) -> Flags:
    return ("--tensor-model-parallel-size", size, *(("--sequence-parallel",) if sequence else ()))


def _pp(size: int = 2) -> Flags:
    return ("--pipeline-model-parallel-size", size)


def _cp(size: int = 2) -> Flags:
    return ("--context-parallel-size", size)


def _ep(size: int = 2, tensor: int = 1) -> Flags:
    return ("--expert-model-parallel-size", size, "--expert-tensor-parallel-size", tensor)


LAST_1: Flags = ("--decoder-last-pipeline-num-layers", 1)
FIRST_1: Flags = ("--decoder-first-pipeline-num-layers", 1)
OVERLAP: Flags = ("--overlap-grad-reduce", "--overlap-param-gather")
SMALL_BUCKETS: Flags = ("--ddp-bucket-size", 20000)
PER_TOKEN: Flags = ("--calculate-per-token-loss",)
RECOMPUTE: Flags = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", 1)
SELECTIVE: Flags = ("--recompute-granularity", "selective")
VPP2: Flags = ("--num-virtual-stages-per-pipeline-rank", 2)
BIAS_UPDATE: Flags = ("--moe-router-bias-update-rate", 0.01)
"""The router's bias changes from step to step, by the counts of all ranks (if the model has such a bias)."""
SEVERAL_MICROBATCHES: Flags = ("--max-tokens-per-gpu", 24)

LAYOUTS: dict[str, Layout] = {
    # two ranks
    "DP2": Layout(2, ()),
    "DP2 overlap": Layout(2, (*OVERLAP, *SMALL_BUCKETS)),
    "DP2 per-token": Layout(2, (), loss_flags=PER_TOKEN),
    "TP2": Layout(2, _tp(sequence=False), tensor=2),
    "TP2 SP": Layout(2, _tp(), tensor=2, is_basic=True),
    "TP2 SP recompute": Layout(2, (*_tp(), *RECOMPUTE), tensor=2),
    "PP2": Layout(2, _pp(), num_layers=4),
    "PP2 uneven": Layout(2, (*_pp(), *LAST_1), is_basic=True),
    "PP2 first 1": Layout(2, (*_pp(), *FIRST_1), loss_flags=PER_TOKEN),
    "PP2 recompute": Layout(2, (*_pp(), *LAST_1, *RECOMPUTE)),
    "PP2 VPP2": Layout(2, (*_pp(), *VPP2), num_layers=4),
    "PP2 VPP2 flush": Layout(
        2,
        (*_pp(), *VPP2, "--overlap-p2p-comm-warmup-flush", *SEVERAL_MICROBATCHES),
        num_layers=4,
        loss_flags=PER_TOKEN,
    ),
    "PP2 VPP2 group 3": Layout(
        2, (*_pp(), *VPP2, "--microbatch-group-size-per-virtual-pipeline-stage", 3), num_layers=4
    ),
    "PP2 layout": Layout(2, (*_pp(), "--pipeline-model-parallel-layout", "Et|tttL"), num_layers=4),
    "PP2 VPP2 by layout": Layout(2, (*_pp(), "--pipeline-model-parallel-layout", "Et|t|tt|L"), num_layers=4),
    "PP2 VPP2 no overlap": Layout(2, (*_pp(), *VPP2, "--no-overlap-p2p-communication"), num_layers=4),
    "CP2": Layout(2, _cp(), is_basic=True),
    "CP2 per-token": Layout(2, _cp(), loss_flags=PER_TOKEN),
    "CP2 recompute": Layout(2, (*_cp(), *RECOMPUTE)),
    "EP2": Layout(2, _ep(), needs_experts=True, is_basic=True),
    "EP2 overlap": Layout(2, (*_ep(), *OVERLAP, *SMALL_BUCKETS), needs_experts=True),
    "EP2 recompute": Layout(2, (*_ep(), *RECOMPUTE), loss_flags=BIAS_UPDATE, needs_experts=True),
    "EP2 selective": Layout(2, (*_ep(), *SELECTIVE, "--recompute-modules", "moe"), needs_experts=True),
    "TP2 EP2 SP": Layout(2, (*_tp(), *_ep()), tensor=2, needs_experts=True),
    "TP2 ETP1 SP": Layout(2, (*_tp(), *_ep(1)), tensor=2, needs_experts=True),
    "TP2 ETP2 SP": Layout(2, (*_tp(), *_ep(1, 2)), tensor=2, needs_experts=True),
    "CP2 EP2": Layout(2, (*_cp(), *_ep()), needs_experts=True),
    "PP2 EP1 ETP1": Layout(2, (*_pp(), *LAST_1), needs_experts=True),
    # four
    "DP4 overlap": Layout(4, (*OVERLAP, *SMALL_BUCKETS)),
    "TP2 DP2": Layout(4, _tp(), tensor=2),
    "TP2 PP2": Layout(4, (*_tp(), *_pp(), *LAST_1), tensor=2),
    "TP2 CP2": Layout(4, (*_tp(), *_cp()), tensor=2),
    "PP4": Layout(4, _pp(4), num_layers=4),
    "PP4 VPP2": Layout(4, (*_pp(4), *VPP2), num_layers=8),
    "PP2 CP2": Layout(4, (*_pp(), *LAST_1, *_cp()), loss_flags=PER_TOKEN),
    "PP2 DP2 VPP2 overlap": Layout(4, (*_pp(), *VPP2, *OVERLAP, *SMALL_BUCKETS), num_layers=4),
    "CP4": Layout(4, _cp(4)),
    "EP4": Layout(4, _ep(4), needs_experts=True),
    "TP2 EP2 ETP1 DP2": Layout(4, (*_tp(), *_ep()), tensor=2, needs_experts=True),
    "TP2 EP2 ETP2 DP2": Layout(4, (*_tp(), *_ep(2, 2)), tensor=2, needs_experts=True),
    "PP2 EP2": Layout(4, (*_pp(), *LAST_1, *_ep()), needs_experts=True),
    "PP2 EP2 recompute overlap": Layout(
        4,
        (*_pp(), *LAST_1, *_ep(), *RECOMPUTE, *OVERLAP, *SMALL_BUCKETS),
        loss_flags=BIAS_UPDATE,
        needs_experts=True,
    ),
    # eight
    "TP2 PP2 DP2": Layout(8, (*_tp(), *_pp(), *LAST_1, *OVERLAP), tensor=2),
    "TP2 PP2 CP2": Layout(8, (*_tp(), *_pp(), *LAST_1, *_cp()), tensor=2, loss_flags=PER_TOKEN),
    "TP2 PP2 VPP2 EP2 DP2": Layout(8, (*_tp(), *_pp(), *VPP2, *_ep()), num_layers=4, tensor=2, needs_experts=True),
    "PP2 CP2 EP4": Layout(8, (*_pp(), *LAST_1, *_cp(), *_ep(4)), needs_experts=True),
}
"""By column of the matrix."""

FULL_FAMILIES = ("qwen3", "qwen3_moe", "glm4_moe", "deepseek_v3")
"""Families that run in every layout: a dense one, two with experts, one with latent attention."""
FAST_LAYOUTS = ("TP2 SP", "TP2 EP2 SP", "PP2 uneven", "PP2 VPP2", "CP2", "EP2")
"""What the suite runs; see :func:`fast_layouts_of`."""
OWN_ATTENTION = (
    *FULL_FAMILIES,
    "deepseek_v32",
    "deepseek_v4",
    "gemma3",
    "gemma4",
    "gemma4-moe",
    "gemma4-small",
    "glm5",
    "gpt_oss",
    "minimax_m2",
    "nemotron_h",
    "olmo3",
    "qwen3_5_moe",
    "qwen3_next",
    "qwen3_vl",
)
"""Only attention depends on how sequences are split; the other families have the attention of one of these."""


def layouts_of(case: FamilyCase, names: Sequence[str] | None = None) -> dict[str, Layout]:
    """The layouts in which the case runs, or those of the given names that it supports.

    Raises:
        ValueError: there is no layout of that name.
    """
    unknown = [name for name in names or () if name not in LAYOUTS]
    if unknown:
        raise ValueError(f"no layout {', '.join(unknown)}; there are {', '.join(LAYOUTS)}")
    return {
        name: layout
        for name, layout in LAYOUTS.items()
        if (name in names if names else layout.is_basic or case.name in FULL_FAMILIES)
        and (case.has_experts or not layout.needs_experts)
        and (case.has_stages or "--pipeline-model-parallel-size" not in layout.flags)
        and layout.tensor <= case.max_tp
    }


STAGES_OF_ANOTHER = ("glm4-32b", "glm4_moe-groups", "kimi_k2", "llama3", "mistral", "moonlight", "phi3", "qwen2.5")
"""Another family has the same modules around the layers, so that stages are split alike."""


OF_OTHERS = (
    "deepseek_v4-fp4",
    "glm4_moe-groups",
    "glm5",
    "kimi_k2",
    "llama3-plain",
    "mimo",
    "mistral",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_5_vl",
)
"""Families whose code, weight rules and kinds of layers all occur in others: `make test-dist` runs them, the
suite does not."""
CUT_IN_SUITE = ("deepseek_v3", "qwen3_next", "qwen3_vl", "gpt_oss")
"""Families that the suite runs on two ranks: latent attention with experts and MTP; delta nets; a vision tower; sinks
and biases.  tests/dist/test_train_step_layouts.py splits dense layers; `make test-dist` and `make matrix` split
all."""


def fast_layouts_of(case: FamilyCase) -> list[str]:
    """The suite's layouts of the case: other numbers of layers, context parallelism and stages only where they add.

    Tensors and experts are split in one layout, except for the families that run in every layout.
    """
    if case.name in FULL_FAMILIES:
        return [name for name in layouts_of(case, FAST_LAYOUTS) if name != "TP2 EP2 SP"]
    cuts = "TP2 EP2 SP" if case.has_experts else "TP2 SP"
    names = [cuts, *(["PP2 uneven"] if case.name not in STAGES_OF_ANOTHER else [])]
    return list(layouts_of(case, [*names, *(["CP2"] if case.name in OWN_ATTENTION else [])]))


def run_layouts(
    cases: Sequence[FamilyCase],
    names: Sequence[str] | None = None,
    *,
    in_bf16: bool = False,
    loss_flags: Flags = (),
    on_cell: Callable[[Cell], None] = lambda cell: None,
) -> list[Cell]:
    """The layout cells of these cases; on machines with GPUs over NCCL, with one GPU per rank.

    Args:
        cases: families to try.
        names: only these layouts; None for all that the family supports.
        in_bf16: instead of fp32, also for the single process.
        loss_flags: flags in addition to those of the layouts.
        on_cell: called with each cell as it is done.
    """
    cells = []
    with RankPool() as pool:
        for case in cases:
            more = (*loss_flags, *(BF16 if in_bf16 else ()))
            layouts = {
                name: dataclasses.replace(layout, loss_flags=(*layout.loss_flags, *more))
                for name, layout in layouts_of(case, names).items()
            }
            for cell in _run_case(pool, case, layouts):
                on_cell(cell)
                cells.append(cell)
    return cells


def _run_case(pool: RankPool, case: FamilyCase, layouts: dict[str, Layout]) -> Iterator[Cell]:
    with tempfile.TemporaryDirectory(prefix=f"layouts-{case.name}-") as root:
        references = References(pool, case, Path(root))
        for name, layout in layouts.items():
            yield _run_cell(pool, case, name, layout, references)


class References:
    """The checkpoint of a case, and a single process's results on it; per number of layers, created on demand."""

    def __init__(self, pool: RankPool, case: FamilyCase, root: Path) -> None:
        self.pool, self.case, self.root = pool, case, root
        self._done: set[tuple[int | None, Flags]] = set()

    def folder(self, layout: Layout) -> tuple[FamilyCase, str]:
        """The case with the layout's number of layers, and the folder with its checkpoint and reference."""
        case = with_layers(self.case, layout.num_layers)
        folder = self.root / f"layers-{layout.num_layers or 'own'}"
        if not folder.exists():
            self.pool.run(write_checkpoint, 1, case.name, case.config, str(folder / "hf"))
        if (layout.num_layers, layout.loss_flags) not in self._done:
            self.pool.run(one_process, 1, case.name, case.config, str(folder), layout.loss_flags)
            self._done.add((layout.num_layers, layout.loss_flags))
        return case, str(folder)


def with_layers(case: FamilyCase, num_layers: int | None) -> FamilyCase:
    """The case with another number of layers."""
    if num_layers is None:
        return case
    return dataclasses.replace(case, config={**case.config, "num_hidden_layers": num_layers})


def _run_cell(pool: RankPool, case: FamilyCase, name: str, layout: Layout, references: References) -> Cell:
    start = time.monotonic()
    try:
        deep_case, folder = references.folder(layout)
        start = time.monotonic()
        ranks = pool.run(
            compare,
            layout.world_size,
            *(deep_case.name, deep_case.config, folder, layout.flags, layout.loss_flags),
            timeout_s=120 + 30 * layout.world_size,
        )
        measured, detail = max(
            (error, f"{what} of {where} on rank {rank}")
            for rank, worst in enumerate(ranks)
            for what, (error, where) in worst.items()
        )
    except RankError as error:
        measured, detail = math.nan, " ".join(str(error).split()[-40:])
    bound = BF16_BOUND if layout.loss_flags[-1:] == BF16 else BOUND
    return Cell(case.name, name, measured, bound, detail, time.monotonic() - start, kind="layout")


# On the ranks: a case is looked up by name there, because its functions cannot be pickled


def write_checkpoint(name: str, config: dict[str, object], folder: str) -> None:
    _case(name, config).write_checkpoint(Path(folder))


def one_process(name: str, config: dict[str, object], folder: str, loss_flags: Flags) -> None:
    layout_rank.one_process(_case(name, config), folder, loss_flags)


def compare(
    name: str, config: dict[str, object], folder: str, flags: Flags, loss_flags: Flags
) -> dict[str, tuple[float, str]]:
    return layout_rank.compare(_case(name, config), folder, flags, loss_flags)


def _case(name: str, config: dict[str, object]) -> FamilyCase:
    from tests.matrix.case import load_cases

    return dataclasses.replace(load_cases([name])[name], config=config)
