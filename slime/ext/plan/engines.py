"""Places of the engines, memory of their GPUs, and rules of SGLang and DeepEP that they may break.

Rules are those that an engine would meet only when it starts; they are reported as messages, nothing is raised.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from slime.backends.megatron_utils.flags.parallel import ParallelSizes
from slime.backends.sglang_utils.sglang_config import nearest_divisor
from slime.ext.plan.parameters import layer_matrices, layer_parameters, mtp_parameters
from slime.ext.plan.trainer_memory import CONTEXT_BYTES, GIB
from slime.train_data.model_dims import ModelDims

ENGINE_ASLEEP_BYTES = int(1.0 * GIB)
"""A released engine: context, communicators, what is never given back (measured, benchmarks/results)."""
DEFAULT_MEM_FRACTION = 0.86
"""About what SGLang takes by itself on 80 GB when ``--sglang-mem-fraction-static`` is not given."""
STATE_RATIO = 0.9
"""Memory for the states of linear attention over that of the cache (SGLang's ``mamba_full_memory_ratio``)."""
INDEX_KEY_BYTES = 132
"""Per token: the indexer's key in FP8 with its scale (128 + 4)."""
DEEPEP_MAX_RANKS = 160
"""DeepEP's table of dispatch settings ends here."""
DISPATCH_LIMIT = "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK"
DISPATCH_LIMIT_DEFAULT = 128


@dataclass(frozen=True, slots=True)
class EngineGpus:
    """One engine: its GPUs, and the processes of SGLang that make it up."""

    model: str
    worker_type: str
    index: int
    first_gpu: int
    """Among all GPUs of the job."""
    num_gpus: int
    nodes: tuple[int, ...]
    """``nnodes`` is their number, ``node_rank`` the position in this list."""
    shares_trainer_gpus: bool


def engine_places(
    groups: Sequence[tuple[str, str, int, int]], *, rollout_offset: int, gpus_per_node: int, trainer_gpus: int
) -> list[EngineGpus]:
    """Return the engines of all groups, in the order in which they take GPUs.

    Args:
        groups: (model, worker type, GPUs of the group, GPUs of an engine); a placeholder only takes GPUs.
        trainer_gpus: the first so many GPUs of the job are the trainer's.
    """
    places, gpu = [], rollout_offset
    for model, worker_type, num_gpus, per_engine in groups:
        for index in range(num_gpus // per_engine if worker_type != "placeholder" else 0):
            first = gpu + index * per_engine
            nodes = tuple(range(first // gpus_per_node, (first + per_engine - 1) // gpus_per_node + 1))
            places.append(EngineGpus(model, worker_type, index, first, per_engine, nodes, first < trainer_gpus))
        gpu += num_gpus
    return places


@dataclass(frozen=True, slots=True)
class AdapterSlots:
    """Room for adapters that an engine takes beside its weights (``--lora-push adapter``)."""

    modules: tuple[str, ...]
    """Last names of the modules with adapters."""
    rank: int
    """The largest that fits."""
    count: int
    """Adapters at a time, the model without one among them."""

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> AdapterSlots | None:
        """Return what engines with these fields of ServerArgs hold; None where no adapter is pushed alone."""
        if "enable_lora" not in settings:
            return None
        modules = tuple(settings["lora_target_modules"])
        return cls(modules, settings["max_lora_rank"], settings["max_loras_per_batch"])


_JOINED_MODULES = {"linear_qkv": "qkv_proj", "linear_fc1": "gate_up_proj"}
"""Last name of a matrix -> a module that holds all its parts in some families."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineShape:
    """The parallel sizes and dtypes of an engine; names as in SGLang's ServerArgs."""

    tp_size: int
    dp_size: int = 1
    ep_size: int = 1
    pp_size: int = 1
    enable_dp_attention: bool = False
    moe_dense_tp_size: int | None = None
    mem_fraction_static: float = DEFAULT_MEM_FRACTION
    weight_bytes: float = 2.0
    """Of a quantized matrix's element, scales included; 2 for bf16."""
    expert_bytes: float | None = None
    """Of an element of a routed expert, where it is quantized in another way."""
    kv_element_bytes: int = 2
    max_total_tokens: int | None = None
    """Most tokens of one replica's cache; the memory fraction alone decides without it."""
    redundant_experts: int = 0
    draft_layers: int = 0
    """Layers of the draft model of speculative decoding."""
    adapter_slots: AdapterSlots | None = None

    @property
    def attention_tp(self) -> int:
        """Ranks that share one attention replica."""
        return self.tp_size // (self.dp_size if self.enable_dp_attention else 1)

    def has_ranks(self, dims: ModelDims) -> bool:
        """Return False where there are more replicas, parts of experts or pipeline stages than GPUs."""
        return self.attention_tp > 0 and (not dims.num_experts or self.tp_size >= self.ep_size)

    @classmethod
    def from_flags(
        cls, flags: Mapping[str, Any], overrides: Mapping[str, Any], *, num_gpus: int, weight_bytes: float,
        mtp_layers: int, expert_bytes: float | None = None, adapter_slots: AdapterSlots | None = None,
    ) -> EngineShape:  # fmt: skip
        """Make the shape from ``--sglang-*`` values (without the prefix) and a group's overrides, which win."""
        given = {name: value for name, value in {**flags, **overrides}.items() if value is not None}
        same = {field.name: given[field.name] for field in fields(cls) if field.name in given}
        own = {
            "tp_size": overrides.get("tp_size", num_gpus // given.get("pp_size", 1)),
            "weight_bytes": weight_bytes,
            "expert_bytes": expert_bytes,
            "kv_element_bytes": 1 if "fp8" in str(given.get("kv_cache_dtype")) else 2,
            "redundant_experts": given.get("ep_num_redundant_experts", 0),
            "draft_layers": mtp_layers if given.get("speculative_algorithm") in ("EAGLE", "NEXTN") else 0,
            "adapter_slots": adapter_slots,
        }
        return cls(**same | own)


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """Bytes on one GPU of an engine."""

    weights: int
    """Slots of adapters included."""
    kv_cache: int
    """Left by the memory fraction; below 0 the engine does not start."""
    kv_tokens: int
    """Of one attention replica."""
    adapters: int
    """The last two that were pushed, which an engine of one GPU keeps beside its slots, on the trainer's card."""
    reserve: int
    """Kept free of all these for activations, graphs and communicators."""
    asleep: int = ENGINE_ASLEEP_BYTES


def engine_weights(dims: ModelDims, engine: EngineShape) -> int:
    """Return the bytes of the weights on one GPU of an engine: the stage of a pipeline with the most layers.

    Attention is cut over the ranks of one replica, experts over the expert-parallel ranks and within them, the dense
    MLPs over ``moe_dense_tp_size``.  Matrices of layers are stored quantized, the rest in bf16.
    """
    attention = ParallelSizes(world=engine.attention_tp, tensor=engine.attention_tp)
    mlp_tp = engine.moe_dense_tp_size or engine.tp_size
    layers = -(-dims.num_layers // engine.pp_size)
    per_layer = []
    for layer in range(dims.num_layers):
        count = layer_parameters(dims, attention, layer)
        if dims.is_moe[layer]:
            experts = -(-(dims.num_experts + engine.redundant_experts) // engine.ep_size)
            matrix = (dims.gate_factor + 1) * dims.expert_ffn * dims.hidden_size
            inside = engine.tp_size // engine.ep_size
            router = dims.num_experts * dims.hidden_size
            own = _replaced_shared(dims, count.dense + count.frozen - router, engine, mlp_tp)
            of_experts = experts * matrix // inside * (engine.expert_bytes or engine.weight_bytes)
            per_layer.append(own * engine.weight_bytes + of_experts + 2 * router)
        else:
            of_layer = dims.of_layer(layer)
            own_ffn = of_layer.ffn_hidden_size * of_layer.has_mlp
            mlp = (dims.gate_factor + 1) * own_ffn * dims.hidden_size
            own = count.dense + count.frozen - mlp // engine.attention_tp + mlp // mlp_tp
            per_layer.append(own * engine.weight_bytes)
    trunk = sum(sorted(per_layer, reverse=True)[:layers])
    vocab = 2 * dims.vocab_rows * dims.hidden_size // engine.attention_tp * (1 if dims.has_tied_embeddings else 2)
    draft = 0
    if engine.draft_layers:
        mtp = mtp_parameters(dims, attention)
        size = mtp.total / max(dims.num_mtp_layers, 1)
        draft = int(max(size * engine.weight_bytes, per_layer[-1]))
    return int(trunk + vocab + draft)


def adapter_slot_bytes(dims: ModelDims, engine: EngineShape) -> int:
    """Return the bytes of the slots for adapters on one GPU of an engine, as SGLang's memory pool makes them.

    A slot has an A [parts * rank, inputs] and a B [outputs, rank] of each adapted matrix, in bf16, and each expert's;
    cut as the weights are.  SGLang gives every layer the slots of experts, and one without shared experts no slots for
    the MLPs of its dense layers.
    """
    slots = engine.adapter_slots
    if slots is None:
        return 0
    sizes = ParallelSizes(
        world=engine.tp_size, tensor=engine.attention_tp, expert=engine.ep_size,
        expert_tensor=max(engine.tp_size // engine.ep_size, 1),
    )  # fmt: skip
    moe_layer = dims.is_moe.index(True) if dims.num_experts else 0
    elements = 0
    for layer in range(dims.num_layers):
        own = [one for one in layer_matrices(dims, sizes, layer) if not one.is_expert]
        if dims.num_experts:
            own = [one for one in own if dims.shared_ffn or not one.name.startswith("mlp.")]
            own += [one for one in layer_matrices(dims, sizes, moe_layer) if one.is_expert]
        for one in own:
            if {*one.parts, _JOINED_MODULES.get(one.name.rpartition(".")[2])} & set(slots.modules):
                elements += one.copies * (len(one.parts) * one.columns + one.rows)
    return 2 * slots.count * slots.rank * elements


def _replaced_shared(dims: ModelDims, own: int, engine: EngineShape, mlp_tp: int) -> int:
    shared = (dims.gate_factor + 1) * dims.shared_ffn * dims.hidden_size
    return own - shared // engine.attention_tp + shared // mlp_tp


def kv_bytes_per_token(dims: ModelDims, engine: EngineShape) -> int:
    """Return the KV cache bytes of one token on one GPU of its attention replica."""
    # Linear attention keeps a state for each request instead.
    layers = -(-(dims.num_kv_layers + engine.draft_layers) // engine.pp_size)
    if dims.attention == "grouped":
        kinds = [dims.of_layer(layer) for layer in range(dims.num_layers)]
        widths = [max(one.num_query_groups // engine.attention_tp, 1) * one.head_dim for one in kinds]
        # A layer without keys reads another's; one whose values are keys has them twice in the cache.
        widest = sorted((w for w, one in zip(widths, kinds, strict=True) if one.key_projections), reverse=True)
        return 2 * sum(widest[:layers]) * engine.kv_element_bytes
    index = INDEX_KEY_BYTES if dims.attention == "sparse" else 0
    return layers * ((dims.kv_lora + dims.rope_dim) * engine.kv_element_bytes + index)


def engine_memory(
    dims: ModelDims, engine: EngineShape, *, card_bytes: int, other_bytes: int, is_colocated: bool = False
) -> EngineMemory:
    """Return the memory of one GPU while its engine serves.

    SGLang gives weights and cache together ``mem_fraction_static`` of what is free when it starts, and the cache no
    more than ``max_total_tokens`` need.

    Args:
        other_bytes: what a sleeping trainer keeps there.
    """
    free = card_bytes - CONTEXT_BYTES - other_bytes
    slots, slot_bytes = engine.adapter_slots, adapter_slot_bytes(dims, engine)
    adapters = 2 * slot_bytes // slots.count if slots is not None and is_colocated and engine.tp_size == 1 else 0
    weights = engine_weights(dims, engine) + slot_bytes
    pool = int(free * engine.mem_fraction_static)
    cache, per_token = pool - weights, kv_bytes_per_token(dims, engine)
    if any(dims.is_linear):
        cache = int(cache / (1 + STATE_RATIO))
    if engine.max_total_tokens is not None:
        cache = min(cache, engine.max_total_tokens * per_token)
    reserve = free - weights - max(cache, 0) - adapters
    return EngineMemory(weights, cache, max(cache, 0) // per_token, adapters, reserve)


def quantized_bytes(hf_config: Mapping[str, Any]) -> float:
    """Return the bytes of an element of a layer's matrix as the engines store it."""
    quantization = hf_config.get("quantization_config") or {}
    method = str(quantization.get("quant_method", ""))
    if method == "fp8" or quantization.get("format") == "float-quantized":
        rows, columns = quantization.get("weight_block_size") or (1, 128)
        return 1 + 4 / (rows * columns)
    if method in ("compressed-tensors", "awq", "gptq"):
        return 0.5 + 2 / 32
    return 2.0


def quantized_expert_bytes(hf_config: Mapping[str, Any]) -> float:
    """Return the bytes of an element of a routed expert: DeepSeek-V4's are FP4 in an FP8 checkpoint.

    Two elements share a byte, and 32 of them a scale of one byte.
    """
    return 0.5 + 1 / 32 if hf_config.get("expert_dtype") == "fp4" else quantized_bytes(hf_config)


def engine_problems(
    dims: ModelDims, engine: EngineShape, flags: Mapping[str, Any], environment: Mapping[str, str], where: str
) -> Iterator[str]:
    """Yield the rules that the engines of one group break, beside those that its flags are checked by.

    Args:
        flags: ``--sglang-*`` values without the prefix, the group's overrides laid over them.
    """
    if not engine.has_ranks(dims):
        yield (
            f"{where}: tp_size {engine.tp_size}, dp_size {engine.dp_size} and ep_size {engine.ep_size} leave parts "
            "without a GPU; use larger engines (--rollout-num-gpus-per-engine), or make the sizes and pp_size smaller."
        )
        return
    heads = dims.num_attention_heads
    if heads % engine.attention_tp:
        yield (
            f"{where}: {heads} attention heads do not divide over {engine.attention_tp} tensor-parallel ranks; "
            f"change --rollout-num-gpus-per-engine to {nearest_divisor(heads, engine.attention_tp)}, or use "
            "--sglang-enable-dp-attention with a larger --sglang-dp-size."
        )
    if dims.num_experts:
        yield from _expert_problems(dims, engine, flags, where)
        yield from _dispatch_problems(engine, flags, environment, where)


def _expert_problems(dims: ModelDims, engine: EngineShape, flags: Mapping[str, Any], where: str) -> Iterator[str]:
    experts = dims.num_experts + engine.redundant_experts
    if experts % engine.ep_size:
        missing = -experts % engine.ep_size
        yield (
            f"{where}: {dims.num_experts} experts and {engine.redundant_experts} redundant ones do not divide over "
            f"{engine.ep_size} expert-parallel ranks; use --sglang-ep-num-redundant-experts "
            f"{engine.redundant_experts + missing}."
        )
    if flags.get("moe_a2a_backend") == "deepep" and engine.ep_size > DEEPEP_MAX_RANKS:
        yield (
            f"{where}: ep_size is {engine.ep_size}; DeepEP dispatches to at most {DEEPEP_MAX_RANKS} ranks; run "
            "several smaller engines (--rollout-num-gpus-per-engine, or num_gpus_per_engine in --sglang-config)."
        )


def _dispatch_problems(
    engine: EngineShape, flags: Mapping[str, Any], environment: Mapping[str, str], where: str
) -> Iterator[str]:
    """Yield a message where DeepEP's low-latency buffers do not take a rank's part of the largest decode batch.

    The batch is that of a CUDA graph of one attention replica, whose ranks share its tokens evenly.
    """
    is_low_latency = flags.get("deepep_mode") in ("low_latency", "auto", None)
    if flags.get("moe_a2a_backend") != "deepep" or not is_low_latency or flags.get("disaggregation") == "prefill":
        return
    batch = _largest_graph(flags)
    draft = flags.get("speculative_num_draft_tokens") if flags.get("speculative_algorithm") else None
    tokens, ranks = batch * (draft or 1), engine.attention_tp
    needed = -(-tokens // ranks)
    text = environment.get(DISPATCH_LIMIT) or str(DISPATCH_LIMIT_DEFAULT)
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        yield f"{where}: {DISPATCH_LIMIT} is {text[:80]!r}; it must be a whole number of tokens."
        return
    limit = int(text)
    if needed > limit:
        rounded = 1 << (needed - 1).bit_length()
        times = f" x {draft} draft tokens" if draft else ""
        over = f", {needed} on each of the {ranks} ranks of a replica" if ranks > 1 else ""
        yield (
            f"{where}: {DISPATCH_LIMIT} is {limit}; the largest decode batch is {batch} requests "
            f"(--sglang-cuda-graph-max-bs-decode){times} = {tokens} tokens{over}; set the variable to {rounded}, or "
            "lower --sglang-cuda-graph-max-bs-decode."
        )


def _largest_graph(flags: Mapping[str, Any]) -> int:
    """Return the requests of the largest CUDA graph for decoding; 0 when SGLang chooses.  Overrides may be older."""
    for suffix in ("", "_decode"):
        sizes = flags.get(f"cuda_graph_bs{suffix}") or [0]
        if largest := flags.get(f"cuda_graph_max_bs{suffix}") or max(sizes):
            return int(largest)
    return 0


def placement_problems(places: list[EngineGpus], gpus_per_node: int) -> Iterator[str]:
    """Yield a message for each engine over several nodes that does not begin at a node's first GPU."""
    for place in places:
        is_split = place.first_gpu % gpus_per_node + min(place.num_gpus, gpus_per_node) > gpus_per_node
        if is_split or (place.num_gpus > gpus_per_node and place.first_gpu % gpus_per_node):
            yield (
                f"Engine {place.index} ({place.worker_type}) of model {place.model} has GPUs {place.first_gpu} to "
                f"{place.first_gpu + place.num_gpus - 1}, which cuts a node of {gpus_per_node} in two; order the "
                "groups of --sglang-config by the size of their engines, or change --rollout-num-gpus-per-engine."
            )
