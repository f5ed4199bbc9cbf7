"""The trainer's use of SGLang: its wire format of tensors and its process group, for engines without our loader.

SGLang is imported on first use: the import takes seconds, and a trainer that pushes nothing (SFT) does not need it.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing import reductions

from slime.utils.errors import ConfigError
from slime.utils.net import format_host_port
from slime.weights.named_tensors import NamedTensors


def _sglang() -> tuple[Any, Any, Any]:
    try:
        from sglang.srt.utils import MultiprocessingSerializer, init_custom_process_group
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket
    except (ImportError, RuntimeError) as error:
        raise ConfigError(
            f"the trainer cannot import SGLang, whose wire format it needs to push weights: {error}; on a machine "
            "without CUDA, start the job from a recipe that puts slime/backends/sglang_utils/cpu_shim on PYTHONPATH"
        ) from error
    return MultiprocessingSerializer, init_custom_process_group, FlattenedTensorBucket


def prepare() -> None:
    """Set this process up to share tensors with an engine; call before a push."""
    if torch.cuda.is_available():
        _sglang()
        from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

        monkey_patch_torch_reductions()
        share_host_tensors()
    else:
        # The default strategy passes file descriptors over a socket, which works only between related processes.
        torch.multiprocessing.set_sharing_strategy("file_system")


def share_host_tensors() -> None:
    """Pickle handles of host tensors as torch does.  SGLang's patch, which adds the GPU's id to a handle, raises an
    IndexError for host tensors (0.5.15).
    """
    patched, stock = reductions.reduce_tensor, vars(reductions)["_reduce_tensor_original"]
    if patched.__module__ == __name__:
        return

    def reduce_tensor(tensor: torch.Tensor) -> Any:
        return (stock if tensor.is_cpu else patched)(tensor)

    reductions.reduce_tensor = reduce_tensor
    reductions.init_reductions()


def wants_ue8m0_scales(block: tuple[int, int]) -> bool:
    """Return True if engines on this kind of GPU use power-of-two scales (UE8M0) for FP8 blocks: Blackwell."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] < 10:
        return False
    from sglang.srt.model_loader.utils import should_deepgemm_weight_requant_ue8m0

    return bool(should_deepgemm_weight_requant_ue8m0(list(block)))


def serialize_bucket(bucket: NamedTensors) -> tuple[str, torch.Tensor]:
    """Copy the bucket into a new flat buffer; return a serialized handle to its shared or CUDA memory, and the buffer.

    The caller must keep the buffer until the engine has answered.
    """
    serializer, _, flattened_bucket = _sglang()
    flat = flattened_bucket(named_tensors=bucket)
    buffer = flat.get_flattened_tensor()
    payload = {"flattened_tensor": buffer, "metadata": flat.get_metadata()}
    return serializer.serialize(payload, output_str=True), buffer


def flatten(bucket: NamedTensors) -> torch.Tensor:
    """Return the flat buffer that a ``flattened_bucket`` broadcast sends."""
    _, _, flattened_bucket = _sglang()
    return flattened_bucket(named_tensors=bucket).get_flattened_tensor()


def join_update_group(
    *, backend: str, master_address: str, master_port: int, world_size: int, group_name: str, timeout_s: float
) -> dist.ProcessGroup:
    """Join, as rank 0, the process group that broadcasts an update; blocks until all engines have joined."""
    _, init_custom_process_group, _ = _sglang()
    return init_custom_process_group(
        backend=backend,
        init_method=f"tcp://{format_host_port(master_address, master_port)}",
        world_size=world_size,
        rank=0,
        group_name=group_name,
        timeout=timedelta(seconds=timeout_s),
    )
