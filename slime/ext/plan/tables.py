"""A plan as tables in a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from slime.ext.plan.engines import EngineGpus
from slime.ext.plan.layout import RankPlace
from slime.ext.plan.plan import Plan
from slime.ext.plan.trainer_memory import GIB


def plan_tables(plan: Plan | None, problems: Sequence[str], notes: Sequence[str], *, all_ranks: bool = False) -> str:
    """Return the plan's tables, the problems first."""
    parts = []
    if problems:
        parts.append(_bullets(f"NOT LEGAL: {len(problems)} problem{'s' * (len(problems) > 1)}", problems))
    if plan is None:
        return "\n\n".join(parts)
    if plan.too_large:
        parts.append(_bullets("DOES NOT FIT", plan.too_large))
    parts += [
        _headline(plan),
        _stages(plan),
        _nodes(plan),
        *([_ranks(plan)] if all_ranks else []),
        _trainer_memory(plan),
        _phases(plan),
        _engines(plan),
        _host(plan),
        _work(plan),
        _push(plan),
    ]
    if notes:
        parts.append(_bullets("Notes", notes))
    return "\n\n".join(part for part in parts if part)


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Lay columns side by side, the first to the left, the others to the right."""
    cells = [list(map(str, header)), *(list(map(str, row)) for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]

    def line(row: list[str]) -> str:
        return "  ".join(
            text.ljust(width) if column == 0 else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()

    return "\n".join([line(cells[0]), "  ".join("-" * width for width in widths), *map(line, cells[1:])])


def gib(number: float | None) -> str:
    """Return GiB with one decimal place; a dash for nothing."""
    return "-" if number is None else f"{number / GIB:.1f}"


def runs(numbers: Iterable[int]) -> str:
    """Return ``0-3, 6``."""
    found: list[list[int]] = []
    for number in sorted(set(numbers)):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ", ".join(f"{first}-{last}" if last > first else f"{first}" for first, last in found)


def _bullets(title: str, lines: Iterable[str]) -> str:
    return "\n".join([title, *(f"  * {line}" for line in lines)])


def _headline(plan: Plan) -> str:
    sizes = plan.sizes
    parts = [f"TP {sizes.tensor}", f"PP {sizes.pipeline}", f"CP {sizes.context}", f"DP {sizes.data}"]
    if sizes.virtual > 1:
        parts.append(f"VPP {sizes.virtual}")
    if sizes.expert * sizes.expert_data > 1 and any(stage.parameters.expert for stage in plan.stages):
        parts += [f"EP {sizes.expert}", f"ETP {sizes.expert_tensor}", f"expert DP {sizes.expert_data}"]
    trainer = f"trainer: {len(plan.ranks)} ranks, {', '.join(parts)}" if plan.ranks else "no trainer"
    card = f"{plan.card.name}, {gib(plan.card.memory)} GiB"
    return "\n".join(
        [
            f"{plan.model}: {plan.num_parameters / 1e9:.2f} B parameters",
            f"GPUs: {plan.num_gpus} ({card}), nodes: {plan.num_nodes}; {trainer}",
        ]
    )


def _stages(plan: Plan) -> str:
    if not plan.ranks:
        return ""
    rows = [
        (
            stage.stage, " | ".join(stage.layers), stage.num_layers, f"{stage.parameters.total / 1e9:.3f}",
            f"{stage.parameters.expert / 1e9:.3f}", f"{stage.parameters.frozen / 1e9:.3f}",
        )
        for stage in plan.stages
    ]  # fmt: skip
    header = ("pipeline stage", "layers", "count", "parameters of a rank, B", "of experts", "frozen")
    return table(header, rows)


def _nodes(plan: Plan) -> str:
    rows: list[tuple[object, ...]] = []
    for node in range(plan.num_nodes):
        ranks = [place for place in plan.ranks if place.node == node]
        engines = [place for place in plan.engines if node in place.nodes]
        if node and rows and not ranks and not engines:
            continue
        rows.append((node, *_rank_columns(ranks), "; ".join(_engine_text(place, node) for place in engines) or "-"))
    return table(("node", "ranks", "TP", "CP", "DP", "PP", "EP", "engines (nnodes, node_rank)"), rows)


def _rank_columns(ranks: Sequence[RankPlace]) -> tuple[str, ...]:
    if not ranks:
        return ("-",) * 6
    columns = ("rank", "tensor", "context", "data", "pipeline", "expert")
    return tuple(runs(getattr(place, column) for place in ranks) for column in columns)


def _engine_text(place: EngineGpus, node: int) -> str:
    name = f"{place.model}/{place.worker_type} {place.index}"
    if len(place.nodes) > 1:
        return f"{name} ({len(place.nodes)}, {place.nodes.index(node)})"
    return f"{name}: GPUs {runs(range(place.first_gpu, place.first_gpu + place.num_gpus))}"


def _ranks(plan: Plan) -> str:
    rows = [
        (p.rank, p.node, p.gpu, p.tensor, p.context, p.data, p.pipeline, p.expert, p.expert_tensor, p.expert_data)
        for p in plan.ranks
    ]
    return table(("rank", "node", "GPU", "TP", "CP", "DP", "PP", "EP", "ETP", "expert DP"), rows)


def _trainer_memory(plan: Plan) -> str:
    if not plan.ranks:
        return ""
    rows = [
        (
            stage.stage, gib(m.weights), gib(m.gradients), gib(m.optimizer), gib(m.activations), gib(m.head),
            gib(m.work), gib(m.peak), gib(m.outside),
        )
        for stage in plan.stages
        for m in [stage.memory]
    ]  # fmt: skip
    header = (
        "GiB by stage", "weights", "gradients", "optimizer", "activations", "logits", "or work", "peak allocated",
        "outside torch",
    )  # fmt: skip
    title = f"Trainer, {plan.micro_batch_tokens} tokens a micro-batch and GPU"
    return f"{title}\n{table(header, rows)}"


def _phases(plan: Plan) -> str:
    phases = plan.phases
    rows = [
        ("training step", gib(phases.train)),
        ("log-probs", gib(phases.log_probs)),
        ("trainer asleep", gib(phases.asleep)),
        ("rollout", gib(phases.rollout)),
        ("weight push", gib(phases.push)),
    ]
    return table(("fullest card, GiB in use", plan.card.name), [row for row in rows if row[1] != "-"])


def _engines(plan: Plan) -> str:
    rows = [
        (
            f"{g.model}/{g.worker_type}", g.num_engines, g.num_gpus_per_engine, g.nnodes, g.shape.dp_size,
            g.shape.ep_size, gib(g.memory.weights + g.memory.adapters), gib(g.memory.kv_cache),
            f"{g.memory.kv_tokens:,}", gib(g.memory.reserve),
        )
        for g in plan.engine_groups
    ]  # fmt: skip
    header = (
        "engines", "count", "GPUs", "nnodes", "dp", "ep", "weights, GiB a GPU", "KV cache", "tokens of a replica",
        "left free",
    )  # fmt: skip
    return table(header, rows) if rows else ""


def _host(plan: Plan) -> str:
    host = plan.host
    if not host.total:
        return ""
    rows = [
        ("CPU Adam: master weights and moments", gib(host.optimizer)),
        ("CPU Adam: gradients, pinned", gib(host.gradients)),
        ("parked weights, pinned", gib(host.parked_weights)),
        ("what sleeps, pinned", gib(host.asleep)),
        ("a save in the background", gib(host.save)),
        ("copies of the ranks' state", gib(host.copies)),
        ("processes (estimate)", gib(host.processes)),
        ("together", gib(host.total)),
    ]
    return table(("host memory of the fullest node, GiB", plan.card.name), [row for row in rows if row[1] != "0.0"])


def _work(plan: Plan) -> str:
    work = plan.work
    if work is None:
        return ""
    counts = runs(work.num_microbatches)
    rows = [
        ("samples, tokens, longest", f"{work.num_samples}, {work.num_tokens:,}, {work.longest:,}"),
        ("optimizer steps; micro-batches of a rank in each", f"{len(work.num_microbatches)}; {counts}"),
        ("model FLOPs, forward and backward", f"{work.model_flops:.3g}"),
        (f"with {work.forward_passes} passes without gradients and recompute", f"{work.hardware_flops:.3g}"),
        *([("those of the vision tower", f"{work.tower_flops:.3g}")] if work.tower_flops else []),
        ("pipeline bubble", f"{work.bubble:.1%}"),
        ("rank with the most work, over the mean", f"{work.imbalance:.2f}"),
    ]
    if plan.train_seconds is not None:
        rows.append(("training of a rollout at the stated MFU, s", f"{plan.train_seconds:,.1f}"))
    return table(("one rollout", ""), rows)


def _push(plan: Plan) -> str:
    push = plan.push
    if push is None:
        return ""
    rows = [
        ("way", push.way),
        ("GiB to each engine", gib(push.bytes_per_engine)),
        ("GiB to all engines", gib(push.all_engines_bytes)),
        ("GiB from each source", gib(push.bytes_per_trainer_rank)),
        ("buckets of a source", push.num_buckets),
    ]
    return table(("a weight push", ""), rows)
