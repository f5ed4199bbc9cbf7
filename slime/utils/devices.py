"""GPUs by their number on the node, and by their place among those that a process can see."""

from __future__ import annotations

from slime.utils import env
from slime.utils.errors import ConfigError


def visible_index(physical_id: int) -> int:
    """Return the position of a GPU among those this process sees; torch and SGLang count like this.

    Raises:
        ConfigError: the GPU is hidden from this process.
    """
    visible = env.cuda_visible_devices()
    if visible is None:
        return physical_id
    if str(physical_id) not in visible:
        raise ConfigError(
            f"this process shall use GPU {physical_id}, but CUDA_VISIBLE_DEVICES is {','.join(visible)}; start Ray "
            "with the GPUs that the job may use"
        )
    return visible.index(str(physical_id))
