"""``--fit``: the layout of a run, chosen by the plan: what fits, and is fastest by the model of this file.

Only flags that the command does not give are chosen.  The model adds to the plan's FLOPs what a layout costs beside
them: collectives, launches, CPU Adam; and for engines the bytes that a decoding step reads.  Its constants are
measured ones (benchmarks/results: train_mfu_gpu, train_mfu_h100, train_mfu_h200, train_mfu_images_h200,
recipes_true_size_h200), and tests hold its seconds and its order against those runs.
"""

from __future__ import annotations

import subprocess
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product
from pathlib import Path
from typing import Any

from slime.backends.megatron_utils.flags.model_dims import model_dims
from slime.ext.plan.command import complete_run
from slime.ext.plan.engines import kv_bytes_per_token
from slime.ext.plan.make_plan import make_plan
from slime.ext.plan.plan import CARDS, Plan, PlanOptions
from slime.ext.plan.prompts import image_patches, longest_sample, prompt_lengths, with_image_tokens
from slime.ext.plan.run_flags import RunFlags
from slime.ext.plan.trainer_memory import GIB
from slime.flags.group import FlagGroup, flag_of
from slime.flags.parse import GROUPS
from slime.flags.words import is_flag
from slime.train_data.model_dims import ModelDims
from slime.utils import env
from slime.utils.errors import ConfigError, SlimeError

FIT_MFU = 0.5
"""Of one GPU without collectives, gradient sums and Adam (Qwen3-4B on an H200: 47.5 % with them)."""
ADAPTER_SHARE = 0.86
"""Seconds of a step whose base weights have no gradient, of one in which they have (Qwen3-4B: 1.60 of 1.89 on an H200,
0.60 of 0.70 on an H100)."""
TOWER_MFU = 0.27
"""Of a vision tower (Qwen3-VL-8B's on an H200, one or four images of a megapixel, frozen or trained: 23 to 30 %)."""
WIRE_BYTES_PER_S = 150e9
"""Of NVLink as tensor parallelism uses it, not hidden behind products (Qwen3-4B: 47.0 % alone, 40.3 % with TP 2)."""
ALL_REDUCE_BYTES_PER_S = 323e9
"""Of NVLink in collectives of whole gradients (two H100)."""
ADAM_ELEMENTS_PER_S = 0.7e9
"""Of a rank's Adam on the host, its copies included."""
LAUNCHES_S = 1e-3
"""Of one layer, forward and backward, whatever its size."""
DECODE_S, ALL_REDUCE_S = 3e-3, 12e-6
"""Of a decoding step beside what it reads, and of one of its sums over tensor-parallel ranks."""
READ_SHARE = 0.6
"""Of the card's bandwidth, in decoding and in what touches every parameter."""
SUM_BYTES, ADAM_BYTES = 12, 30
"""Of a trained parameter, read and written: by a micro-batch's gradient (bf16, fp32), and by Adam's step on the card.
Of six layers of Qwen3-30B-A3B, whose experts' parameters few tokens use, 8 and 4 % of a step on an H200."""
FULLEST = 0.93
"""Part of a card that a plan may fill: torch reserves more than it has allocated."""
SIZES = (1, 2, 4, 8)
FULL = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
OFFLOAD = ("--optimizer-cpu-offload", "--overlap-cpu-optimizer-d2h-h2d", "--use-precision-aware-optimizer")


@dataclass(frozen=True, slots=True)
class Choice:
    """One layout: its flags, what is planned of it, and the seconds of a step."""

    words: tuple[str, ...]
    plan: Plan
    train_s: float
    rollout_s: float

    @property
    def seconds(self) -> float:
        """Of a rollout and the training on it, one after the other."""
        return self.train_s + self.rollout_s


def fitted(
    words: Sequence[str], options: PlanOptions, num_gpus: int, groups: Sequence[FlagGroup] = GROUPS
) -> tuple[list[str], str]:
    """Return the command with the flags that were chosen, and a table of the choice and the two next best.

    Args:
        num_gpus: of this machine, for a command that does not say how many to use.
    """
    words = [word for word in words if word != "--fit"]
    given = {word.split("=", 1)[0] for word in words if is_flag(word)}
    options = replace(options, mfu=FIT_MFU)
    fixed = _on_this_machine(given, num_gpus)
    some = [] if "--max-tokens-per-gpu" in given else ["--max-tokens-per-gpu", "8192"]
    with tempfile.TemporaryDirectory(prefix="slime-fit-") as folder:
        run = complete_run([*words, *fixed, *some], Path(folder), groups)
        if run.args is None:
            raise ConfigError("\n".join(run.problems))
        options = replace(options, prompts=prompt_lengths(run.args, run.checkpoint))
        ranked = choices(run.args, run.hf_config, options, given)
        legal = (
            one for one in ranked if not complete_run([*words, *fixed, *one.words], Path(folder), groups).problems
        )
        best = list(islice(legal, 3))
    if not best:
        why = run.problems or [f"no layout of {run.args.world_size} x {options.card.name} fits; use more GPUs."]
        raise ConfigError("--fit: " + "\n".join(why))
    return [*words, *fixed, *best[0].words], fit_table(best, fixed)


def fitted_here(words: Sequence[str], groups: Sequence[FlagGroup]) -> list[str]:
    """Return the command of ``train.py ... --fit`` for the GPUs of this machine, and print the choice."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(
            f"--fit finds no GPU here ({error}); tools/plan.py --gpu CARD ... --fit needs none."
        ) from error
    gpus = [line.rsplit(",", 1) for line in answer.splitlines() if "," in line]
    if not gpus:
        raise ConfigError("--fit finds no GPU here; tools/plan.py --gpu CARD ... --fit needs none.")
    name = next((card for card in CARDS if card in gpus[0][0]), "H100")
    card = replace(CARDS[name], memory=int(float(gpus[0][1]) * 2**20))
    visible = env.cuda_visible_devices()
    chosen, table = fitted(words, PlanOptions(card=card, environment=env.copy()), len(visible or gpus), groups)
    print(table, flush=True)
    return chosen


def _on_this_machine(given: set[str], num_gpus: int) -> list[str]:
    words = []
    if "--actor-num-gpus-per-node" not in given:
        words += ["--actor-num-gpus-per-node", str(num_gpus)]
    if "--num-gpus-per-node" not in given:
        words += ["--num-gpus-per-node", str(num_gpus)]
    if not given & {"--colocate", "--rollout-num-gpus", "--debug-train-only", "--sglang-config"}:
        words.append("--colocate")
    if not given & {"--use-dynamic-batch-size", "--micro-batch-size"}:
        words += ["--use-dynamic-batch-size"]
    return words


def choices(args: Namespace, hf_config: Mapping[str, Any], options: PlanOptions, given: set[str]) -> list[Choice]:
    """Return the layouts that fit, the fastest first: those of the trainer, each with its best engines.

    Args:
        given: flags that are not to be chosen.
    """
    dims = model_dims(args, hf_config)
    run = RunFlags.of(args)
    limit = FULLEST * options.card.memory
    seen = with_image_tokens(dims, options, image_patches(dims, options))
    trainers = []
    for cut in _cuts(args, dims, given):
        for layout in _variants(run, cut, seen, given):
            candidate, plan = _planned(args, layout, hf_config, options)
            if plan is None:
                break
            fits = max(plan.phases.train or 0, plan.phases.log_probs or 0) <= limit
            if fits and plan.host.total <= options.card.host_memory:
                trainers.append((train_seconds(RunFlags.of(candidate), plan, dims), layout))
                break  # what comes after is slower
    found = []
    for train_s, layout in sorted(trainers, key=lambda one: one[0])[:8]:
        best: Choice | None = None
        for engines in _engine_layouts(args, given):
            _, plan = _planned(args, layout | engines, hf_config, options)
            if plan is None or plan.too_large or max(plan.phases.rollout or 0, plan.phases.push or 0) > limit:
                continue
            rollout_s = rollout_seconds(run, plan, dims, options)
            choice = Choice(words_of(layout | engines, given), plan, train_s, rollout_s)
            best = choice if best is None or choice.seconds < best.seconds else best
        if best is not None:
            found.append(best)
    return sorted(found, key=lambda choice: choice.seconds)


def _cuts(args: Namespace, dims: ModelDims, given: set[str]) -> Iterator[dict[str, Any]]:
    """Yield the parallel sizes that the model's sizes allow, as attributes of args."""
    names = ("tensor", "pipeline", "context", "expert")
    attributes = [f"{name}_model_parallel_size" if name != "context" else "context_parallel_size" for name in names]
    values: list[Sequence[int]] = [SIZES, SIZES, SIZES, SIZES if dims.num_experts else (1,)]
    for index, attribute in enumerate(attributes):
        if flag_of(attribute) in given:
            values[index] = (vars(args)[attribute],)
    expert_tensor = (args.expert_tensor_parallel_size or 1) if dims.num_experts else None
    for tensor, pipeline, context, expert in product(*values):
        data, rest = divmod(args.world_size, tensor * pipeline * context)
        heads = (dims.num_attention_heads, dims.num_query_groups if dims.attention == "grouped" else tensor)
        uneven = [size % tensor for size in (*heads, dims.ffn_hidden_size or tensor)]
        if rest or any(uneven) or dims.num_layers % pipeline or tensor > args.actor_num_gpus_per_node:
            continue
        if args.world_size % ((expert_tensor or 1) * expert * pipeline) or dims.num_experts % expert:
            continue
        if (args.global_batch_size or data) >= data:
            cut = dict(zip(attributes, (tensor, pipeline, context, expert), strict=True))
            yield {**cut, "sequence_parallel": tensor > 1, "expert_tensor_parallel_size": expert_tensor}


def _variants(
    run: RunFlags, cut: Mapping[str, Any], options: PlanOptions, given: set[str]
) -> Iterator[dict[str, Any]]:
    """Yield a cut with larger and smaller micro-batches, without and with recompute and offload, the fastest first."""
    longest = max(longest_sample(run, options.prompts), *(options.lengths or (1,)))
    least = -(-longest // cut["context_parallel_size"] // 1024) * 1024
    is_packed = run.use_dynamic_batch_size and "--max-tokens-per-gpu" not in given
    for offload, granularity, times in product(
        (run.optimizer_cpu_offload,) if "--optimizer-cpu-offload" in given else (False, True),
        (run.recompute_granularity,) if "--recompute-granularity" in given else (None, "full"),
        (4, 2, 1) if is_packed else (0,),
    ):
        layout: dict[str, Any] = {**cut, "recompute_granularity": granularity, "optimizer_cpu_offload": offload}
        yield {**layout, "max_tokens_per_gpu": times * least} if times else layout


def _engine_layouts(args: Namespace, given: set[str]) -> Iterator[dict[str, Any]]:
    """Yield the engines' sizes and shares of memory, as attributes of args; one empty layout without engines."""
    if args.debug_train_only or args.rollout_external or args.sglang_config is not None:
        yield {}
        return
    sizes: Sequence[int] = [size for size in SIZES if not args.rollout_num_gpus % size]
    shares: Sequence[float] = (0.85, 0.75, 0.65, 0.55)
    if "--rollout-num-gpus-per-engine" in given:
        sizes = (args.rollout_num_gpus_per_engine,)
    if "--sglang-mem-fraction-static" in given:
        shares = (args.sglang_mem_fraction_static,)
    for size, share in product(sizes, shares):
        yield {"rollout_num_gpus_per_engine": size, "sglang_mem_fraction_static": share}


def _planned(
    args: Namespace, layout: Mapping[str, Any], hf_config: Mapping[str, Any], options: PlanOptions
) -> tuple[Namespace, Plan | None]:
    candidate = Namespace(**{**vars(args), **layout})
    model_size = (
        candidate.tensor_model_parallel_size * candidate.pipeline_model_parallel_size * candidate.context_parallel_size
    )
    candidate.data_parallel_size = candidate.world_size // model_size
    candidate.microbatch_group_size_per_vp_stage = candidate.pipeline_model_parallel_size
    if candidate.recompute_granularity == "full" and args.recompute_method is None:
        candidate.recompute_method, candidate.recompute_num_layers = "uniform", 1
    try:
        plan = make_plan(candidate, hf_config, options)
    except SlimeError:
        return candidate, None
    return candidate, None if plan.problems else plan


def train_seconds(run: RunFlags, plan: Plan, dims: ModelDims) -> float:
    """Return the seconds of the trainer's passes over a rollout: FLOPs, collectives, launches, gradients, Adam.

    A tower's FLOPs, which each tensor-parallel rank does and other stages wait for, are slower than the others.
    """
    if plan.work is None or plan.train_seconds is None:
        return 0.0
    work, sizes = plan.work, plan.sizes
    layers = dims.num_layers / sizes.pipeline
    tokens = work.num_tokens / (sizes.data * sizes.context)
    passes = 2 + (run.recompute_granularity == "full") + work.forward_passes
    hidden = 2 * dims.hidden_size
    per_layer = 4 * hidden * (1 - 1 / sizes.tensor)
    if dims.attention == "grouped":
        per_layer += 4 * dims.key_width / sizes.tensor * (sizes.context - 1)
    else:
        per_layer += 2 * (dims.kv_lora + dims.rope_dim) * (sizes.context - 1)
    moe_share = sum(dims.is_moe) / dims.num_layers
    per_layer += moe_share * 2 * dims.topk * hidden / sizes.tensor * (1 - 1 / sizes.expert)
    wire = tokens * layers * passes * per_layer / WIRE_BYTES_PER_S
    steps, trained = len(work.num_microbatches), max(stage.parameters.trained for stage in plan.stages)
    sharers = sizes.data * sizes.context
    wire += steps * 6 * trained * (1 - 1 / sharers) / ALL_REDUCE_BYTES_PER_S
    offload = run.optimizer_offload_fraction if run.optimizer_cpu_offload else 0.0
    adam = steps * offload * trained / sharers / ADAM_ELEMENTS_PER_S
    touched = trained * (SUM_BYTES * sum(work.num_microbatches) + ADAM_BYTES * steps * (1 - offload) / sharers)
    launches = LAUNCHES_S * layers * sum(work.num_microbatches) * passes / 2
    tower = work.tower_flops * sizes.tower_copies
    share = tower / (work.hardware_flops - work.tower_flops + tower)
    spared = 1.0 if run.lora_rank is None else ADAPTER_SHARE
    flops = plan.train_seconds * (spared * (1 - share) + share * FIT_MFU / TOWER_MFU)
    return flops + wire + adam + touched / (READ_SHARE * plan.card.bandwidth) + launches


def rollout_seconds(run: RunFlags, plan: Plan, dims: ModelDims, options: PlanOptions) -> float:
    """Return the seconds of generating a rollout: FLOPs of each prompt, its images included, once; then steps that
    read the weights and the cache of what is running.
    """
    if not plan.engine_groups or plan.work is None:
        return 0.0
    group, work = plan.engine_groups[0], plan.work
    mean, images = work.num_tokens / work.num_samples, image_patches(dims, options)
    prompts = with_image_tokens(dims, options, images).prompts if options.lengths is None else ()
    prompt = min(sum(prompts) / max(len(prompts), 1), mean - 1)
    waiting = work.num_samples / group.num_engines
    running = max(min(waiting, group.memory.kv_tokens / mean), 1)
    steps = max(min(work.longest, run.rollout_max_response_len or work.longest), waiting * (mean - prompt) / running)
    read = group.memory.weights + running * (mean + prompt) / 2 * kv_bytes_per_token(dims, group.shape)
    sums = 2 * dims.num_layers * ALL_REDUCE_S * (group.num_gpus_per_engine > 1)
    rate = FIT_MFU * plan.card.bf16_flops * group.num_gpus_per_engine * group.num_engines
    tower = dims.tower_flops(images) * FIT_MFU / TOWER_MFU
    prefill = work.num_samples / run.n_samples_per_prompt * (dims.forward_flops(int(prompt)) + tower) / rate
    return prefill + steps * (read / (READ_SHARE * plan.card.bandwidth) + sums + DECODE_S)


def words_of(layout: Mapping[str, Any], given: set[str]) -> tuple[str, ...]:
    """Return a layout as a command line has it, without the flags that are given already."""
    words: list[str] = []
    for name, value in layout.items():
        flag = flag_of(name)
        if flag in given:
            continue
        if name == "recompute_granularity":
            words += FULL if value == "full" else ()
        elif name == "optimizer_cpu_offload":
            words += OFFLOAD if value else ()
        elif isinstance(value, bool):
            words += [flag] if value else []
        elif value is not None and (value != 1 or name == "expert_tensor_parallel_size"):
            words += [flag, str(value)]
    return tuple(words)


def fit_table(best: Sequence[Choice], fixed: Sequence[str]) -> str:
    """Return what was chosen and the two next best, a line of numbers and the flags that differ from the first's; then
    what the plan leaves out.
    """
    lines = [f"--fit, by the plan for {best[0].plan.num_gpus} x {best[0].plan.card.name}:"]
    for number, choice in enumerate(best):
        title = "chosen" if number == 0 else f"next {number}"
        memory = max(filter(None, (choice.plan.phases.train, choice.plan.phases.log_probs)), default=0) / GIB
        lines.append(
            f"  {title}: {choice.seconds:.1f} s a step (training {choice.train_s:.1f}, generation "
            f"{choice.rollout_s:.1f}), training takes {memory:.0f} GiB of a card"
        )
        lines.append("    " + " ".join((*fixed, *choice.words) if number == 0 else choice.words))
    lines += [f"  {note}" for note in best[0].plan.notes]
    return "\n".join(lines)
