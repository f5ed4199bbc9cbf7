"""SGLang's own model classes on the CPU, in this process, without a server: one tensor-parallel rank.

:meth:`LoadedRank.answer` replaces everything between an HTTP request and the model in SGLang (tokenizer manager,
scheduler, model runner); the model, its layers, their weight loaders and the parallel groups are SGLang's.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from slime.backends.sglang_utils import cpu_shim
from slime.ext.fast_push.repacked_layers import watch_repacking
from slime.utils import env
from slime.weights.push.wire import FLATTENED_BUCKET

BLOCK_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
"""``quantization_config`` of a checkpoint in block-wise FP8."""

MODELS = {
    "deepseek_nextn",
    "deepseek_v2",
    "deepseek_v4",
    "gemma3_causal",
    "gemma4_causal",
    "gemma4_mm",
    "glm4",
    "glm4_moe",
    "glm4_moe_lite",
    "glm4_moe_lite_nextn",
    "glm4_moe_nextn",
    "glm4v",
    "glm4v_moe",
    "gpt_oss",
    "kimi_k25",
    "llama",
    "llava",
    "mimo",
    "minimax_m2",
    "mistral",
    "mixtral",
    "nemotron_h",
    "olmo2",
    "pixtral",
    "qwen2",
    "qwen2_5_vl",
    "qwen2_moe",
    "qwen3",
    "qwen3_5",
    "qwen3_5_mtp",
    "qwen3_moe",
    "qwen3_next",
    "qwen3_next_mtp",
    "qwen3_vl",
    "qwen3_vl_moe",
}
"""Modules of SGLang's models that can be loaded here."""
_DEEPSEEK = {"moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
_MINIMAX = {"use_qk_norm": True, "use_routing_bias": True, "scoring_func": "sigmoid"}
_QWEN3_NEXT = {"full_attention_interval": 3}
UNWRITTEN = {
    "glm4_moe_lite": _DEEPSEEK | {"first_k_dense_replace": 1},
    **{"deepseek_v3": _DEEPSEEK, "kimi_k2": _DEEPSEEK, "minimax_m2": _MINIMAX},
    "qwen3_next": _QWEN3_NEXT,  # of the tiny models here; transformers writes a list of types instead
}
"""By ``model_type``: settings of the published configs that transformers omits, and SGLang reads."""
WITHOUT_KERNELS = {"SGLANG_DSV4_MHC_PREWARM": "0", "SGLANG_OPT_FP8_WO_A_GEMM": "0"}
"""SGLang's DeepSeek-V4 compiles kernels after loading, and needs an FP8 output projection, unless these are set."""
ATTENTION_BACKENDS = {"gpt_oss": "intel_amx"}
"""By ``model_type``: where SGLang refuses ``torch_native``, which has no sinks.  Nothing is attended to here."""


class LoadedRank:
    """One rank of a model with random weights.

    Args:
        folder: HF checkpoint folder; only its config.json is read, including ``quantization_config``.
        store: path at which the ranks meet.
        dtype: dtype of the parameters.
        quantization: replaces the config's ``quantization_config``.
        device: "cpu", or "cuda" for a rank on a GPU, if there is one.
    """

    draft: torch.nn.Module | None = None
    """The model of the checkpoint's MTP layers, after :meth:`add_draft`."""

    def __init__(
        self,
        folder: str | Path,
        *,
        tp_rank: int = 0,
        tp_size: int = 1,
        store: str,
        dtype: str = "bfloat16",
        quantization: dict[str, Any] | None = None,
        device: str = "cpu",
    ) -> None:
        if device == "cpu":
            cpu_shim.install()
        _leave_out_other_models()
        _apply_hooks()
        self.tp_rank, self.tp_size, self._store, self._device = tp_rank, tp_size, store, device
        self.swap(folder, dtype, quantization)

    def swap(
        self,
        folder: str | Path,
        dtype: str,
        quantization: dict[str, Any] | None,
        has_weights: bool = False,
    ) -> None:
        """Replace the model by a new one, with the folder's weights or random ones."""
        self.model = self.draft = None  # type: ignore[assignment]
        gc.collect()  # models are in reference cycles
        self.weight_version = "default"
        with _config_folder(folder, quantization) as configured:
            server_args, model_config = _describe(configured, self.tp_size, dtype, self._device)
        _enter_world(server_args, model_config, self.tp_rank, self.tp_size, self._store)
        self.model = _build(model_config, self._device, weights=Path(folder) if has_weights else None)
        self.loaders = tuple(server_args.custom_weight_loader)

    def add_draft(self, folder: str, dtype: str) -> None:
        """Add the EAGLE draft, which shares embedding and output layer with the model, as SGLang's worker does."""
        with _config_folder(folder, None) as configured:
            _, model_config = _describe(configured, self.tp_size, dtype, self._device, is_draft=True)
        self.draft = _build(model_config, self._device, is_draft=True)
        share = getattr(self.draft, "set_embed_and_head", None)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "synchronize", lambda: None)  # useless on a CPU
            if share is not None:
                share(*self.model.get_embed_and_head())

    def answer(self, method: str, path: str, payload: Any) -> Any:
        """The server's answer; every rank must get the same request."""
        if path == "/update_weights_from_tensor":
            self._update(payload)
        elif path == "/get_weights_by_name":
            return self.model.get_weights_by_name(payload["name"], payload.get("truncate_size", 100), tp_size=1)
        elif path == "/update_weight_version":
            self.weight_version = payload["new_version"]
        elif path == "/model_info":
            return {"weight_version": self.weight_version}
        elif path not in ("/pause_generation", "/continue_generation", "/flush_cache"):
            raise ValueError(f"the loaded model knows no {method} {path}")
        return None

    def _update(self, payload: dict[str, Any]) -> None:
        """Like ``ModelRunner.update_weights_from_tensor``."""
        from sglang.srt.utils import MultiprocessingSerializer, dynamic_import

        named_tensors = MultiprocessingSerializer.deserialize(payload["serialized_named_tensors"][self.tp_rank])
        load_format = payload.get("load_format")
        if load_format == FLATTENED_BUCKET:
            from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

            flat, metadata = named_tensors["flattened_tensor"], named_tensors["metadata"]
            named_tensors = FlattenedTensorBucket(flattened_tensor=flat, metadata=metadata).reconstruct_tensors()
            load_format = None
        for model in [model for model in (self.draft, self.model) if model is not None]:
            if load_format is None:
                model.load_weights(named_tensors)
            elif load_format in self.loaders:
                dynamic_import(load_format)(model, [(name, tensor.to("cpu")) for name, tensor in named_tensors])
            else:
                raise ValueError(f"the loaded model knows no load_format {load_format!r}")
        if "weight_version" in payload:
            self.weight_version = payload["weight_version"]

    def parameters(self) -> dict[str, torch.Tensor]:
        """The current parameters of this rank under the engine's own names."""
        return {name: parameter.data for name, parameter in self.model.named_parameters()}


def _apply_hooks() -> None:
    """Change SGLang as slime's plug-in does in a server."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    from slime.backends.sglang_utils import sglang_plugin

    sglang_plugin.register()
    HookRegistry.apply_hooks()


def _leave_out_other_models() -> None:
    """Importing all of SGLang's models would take most of a test's time."""
    spec = importlib.util.find_spec("sglang")
    assert spec is not None and spec.submodule_search_locations
    files = (Path(spec.submodule_search_locations[0]) / "srt" / "models").glob("*.py")
    others = sorted(file.stem for file in files if file.stem not in MODELS)
    env.export({"SGLANG_DISABLED_MODEL_ARCHS": ",".join(others), **WITHOUT_KERNELS})


@contextmanager
def _config_folder(folder: str | Path, quantization: dict[str, Any] | None) -> Iterator[str]:
    """A folder with the config.json of ``folder`` in its published form, with the requested quantization.

    SGLang reads the dtype of DeepSeek-V4's experts from the headers of the files beside it.
    """
    config = json.loads((Path(folder) / "config.json").read_text())
    config = UNWRITTEN.get(config["model_type"], {}) | config
    if quantization is not None:
        config["quantization_config"] = quantization
    with tempfile.TemporaryDirectory() as changed:
        (Path(changed) / "config.json").write_text(json.dumps(config))
        for file in Path(folder).glob("*.safetensors"):
            (Path(changed) / file.name).symlink_to(file.resolve())
        yield changed


def _describe(folder: str | Path, tp_size: int, dtype: str, device: str, *, is_draft: bool = False) -> tuple[Any, Any]:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

    from slime.ext.fast_push.loaders import WEIGHT_LOADERS

    model_type = json.loads((Path(folder) / "config.json").read_text())["model_type"]
    server_args = ServerArgs(
        model_path=str(folder),
        device=device,
        attention_backend=ATTENTION_BACKENDS.get(model_type, "torch_native"),
        dtype=dtype,
        tp_size=tp_size,
        skip_tokenizer_init=True,
        disable_overlap_schedule=True,
        custom_weight_loader=[*WEIGHT_LOADERS],
    )
    set_global_server_args_for_scheduler(server_args)
    model_config = ModelConfig.from_server_args(server_args, is_draft_model=is_draft)
    for key in ("linear_num_key_heads", "linear_num_value_heads"):
        if hasattr(model_config.hf_text_config, key):
            # On a CPU, SGLang's server stores the number with padding here.
            setattr(model_config.hf_text_config, f"{key}_cpu", getattr(model_config.hf_text_config, key))
    return server_args, model_config


def _enter_world(server_args: Any, model_config: Any, tp_rank: int, tp_size: int, store: str) -> None:
    """SGLang's parallel state; once per process, for all models of the same size."""
    from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
    from sglang.srt.distributed.parallel_state import model_parallel_is_initialized
    from sglang.srt.layers.dp_attention import initialize_dp_attention

    if not model_parallel_is_initialized():
        init_distributed_environment(
            backend="gloo" if server_args.device == "cpu" else "nccl",
            world_size=tp_size,
            rank=tp_rank,
            local_rank=tp_rank,
            distributed_init_method=f"file://{store}",
        )
        initialize_model_parallel(tensor_model_parallel_size=tp_size)
    initialize_dp_attention(server_args=server_args, model_config=model_config)


def _build(model_config: Any, device: str, *, is_draft: bool = False, weights: Path | None = None) -> torch.nn.Module:
    """Like ``DummyModelLoader``, which fills the model with random numbers, or ``DefaultModelLoader``.

    On a CPU without AMX, SGLang refuses to *run* block FP8 when it prepares weights for its kernels;
    that step is skipped.  On a GPU without UE8M0 scales it changes nothing that a loader sees.  Tensor FP8 is
    prepared as for an H100.
    """
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.layers.quantization.fp8 import Fp8LinearMethod
    from sglang.srt.model_loader.loader import (
        _get_quantization_config,
        _initialize_model,
        _post_load_weights,
        initialize_dummy_weights,
    )
    from sglang.srt.model_loader.utils import set_default_torch_dtype

    load_config = LoadConfig(load_format="dummy")
    with set_default_torch_dtype(model_config.dtype):
        with torch.device(device):
            model = _initialize_model(model_config, load_config, _get_quantization_config(model_config, load_config))
        initialize_dummy_weights(model)
        if not is_draft:  # it fails for drafts that inherit the target's; they get their weights right away
            _post_load_weights(model)
        if weights is not None:
            model.load_weights(
                one for file in sorted(weights.glob("*.safetensors")) for one in load_file(file).items()
            )
        watch_repacking(model)
        for module in model.modules():
            method = getattr(module, "quant_method", None)
            if isinstance(method, Fp8LinearMethod):
                method.cutlass_fp8_supported = True
            if method is not None and not getattr(method, "block_quant", False):
                method.process_weights_after_loading(module)
    return model.eval()
