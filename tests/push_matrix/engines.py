"""Real SGLang models for trainer ranks in other processes: each behind a socket, as a push needs it."""

from __future__ import annotations

import re
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from slime.backends.megatron_utils.models import find_weight_map
from slime.weights.digest import combine, digest_tensor
from slime.weights.push.wire import by_value
from tests.ext.fast_push.dist.fault_engine import FaultyEngine, serve
from tests.loaded_model.engine import LoadedModel
from tests.matrix.case import Tensors, read_config, read_tensors


class MatrixEngine(LoadedModel):
    """A loaded model that changes with the cells."""

    fault = ""

    def become(self, folder: str, dtype: str, flags: dict[str, Any]) -> None:
        """A new engine of the checkpoint in ``folder``; ``flags`` go to args.

        Pushes send random numbers; the tower, which they do not send, comes from the checkpoint.
        """
        vars(self.args).update(flags, hf_checkpoint=folder)
        self.is_paused = False
        self.swap(folder, dtype=dtype)
        self._load_tensors({name: t for name, t in read_tensors(Path(folder)).items() if _untrained(folder)(name)})

    def load_stock(self, folder: str) -> None:
        """Let SGLang's own loader read the checkpoint."""
        self._load_tensors(read_tensors(Path(folder)))

    def _load_tensors(self, tensors: Tensors) -> None:
        if tensors:
            self.update_weights_from_tensor([by_value(list(tensors.items()))] * self.tp_size)

    def digest(self) -> str:
        """One number for everything that the engine holds, on all its ranks, under its own names."""
        ranks = [combine(digest_tensor(tensor) for _, tensor in sorted(held.items())) for held in self.parameters()]
        return f"{combine(ranks):016x}"


def _untrained(folder: str) -> Callable[[str], bool]:
    weight_map = find_weight_map(read_config(Path(folder))["model_type"])
    spare = [re.compile(pattern) for pattern in weight_map.spare]
    return lambda name: weight_map.is_untrained(name) or any(pattern.fullmatch(name) for pattern in spare)


@contextmanager
def serve_engines(sizes: Iterable[int]) -> Iterator[dict[int, list[str]]]:
    """Start engines with these tensor-parallel sizes; return their addresses by size."""
    addresses: dict[int, list[str]] = {}
    with ExitStack() as stack:
        folder = tempfile.mkdtemp(prefix="engines-")  # the listeners remove their sockets when Python ends
        for position, size in enumerate(sizes):
            engine = stack.enter_context(MatrixEngine(_any_config(folder), tp_size=size))
            address = f"{folder}/engine-{position}"
            threading.Thread(target=serve, args=(address, engine), daemon=True).start()
            addresses.setdefault(size, []).append(address)
        yield addresses


def _any_config(folder: str) -> str:
    """The engines' model until the first cell: the smallest there is."""
    from tests.matrix.case import load_cases

    target = Path(folder) / "first"
    if not target.exists():
        load_cases(["qwen3"])["qwen3"].write_checkpoint(target)
    return str(target)


class Client(FaultyEngine):
    """An engine as a rank sees it."""

    def now(self, name: str, *arguments: Any, timeout_s: float = 120) -> Any:
        """Call and wait."""
        return getattr(self, name)(*arguments).wait(timeout_s)
