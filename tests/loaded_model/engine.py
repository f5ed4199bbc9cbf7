"""An engine without a server: SGLang's model in one CPU process per rank, behind the weight verbs.

For example::

    with LoadedModel(folder, tp_size=2) as model:
        model.begin_weight_update(manifest.id, "push 1", manifest.to_json())  # as SGLangEngine: it blocks
        model.parameters()[0]["model.norm.weight"]                   # rank 0, the engine's own names
"""

from __future__ import annotations

import functools
import os
import tempfile
import traceback
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from slime.backends.sglang_utils.weight_verbs import WeightVerbs
from slime.ext.fast_push import engine_verbs
from slime.ext.fast_push.disk import local_copy
from slime.utils.errors import EngineError, ProcessError

START_TIMEOUT_S = 180


class VerbsOfExtensions(WeightVerbs):
    """An actor whose methods include the requests of extensions."""

    def __getattr__(self, name: str) -> Any:
        for module in (engine_verbs, local_copy):
            if name in vars(module) and not name.startswith("_"):
                return functools.partial(vars(module)[name], self)
        raise AttributeError(name)


class LoadedModel(VerbsOfExtensions):
    """The blocking weight methods of ``SGLangEngine``, on real models.

    Args:
        folder: HF checkpoint folder, of which only config.json is read.  The weights are initially random.
        tp_size: number of processes.
        quantization: a ``quantization_config`` for the model instead of the folder's (``rank.BLOCK_FP8``).
        dtype: dtype of unquantized parameters, like SGLang's ``--dtype``.
        timeout_s: deadline of every request, and ``--weight-update-timeout-s``.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        tp_size: int = 1,
        quantization: dict[str, Any] | None = None,
        dtype: str = "bfloat16",
        timeout_s: float = 60.0,
        rank: int = 0,
    ) -> None:
        self.args = Namespace(weight_update_timeout_s=timeout_s)
        self.rank, self.node_rank, self.tp_size = rank, 0, tp_size
        self.is_paused = False
        self.asked: list[str] = []
        self._folder = tempfile.TemporaryDirectory()
        context = mp.get_context("spawn")
        self._pipes, self._processes = [], []
        for tp_rank in range(tp_size):
            here, there = context.Pipe()
            settings = {
                "folder": str(folder),
                "tp_rank": tp_rank,
                "tp_size": tp_size,
                "store": f"{self._folder.name}/store",
                "dtype": dtype,
                "quantization": quantization,
            }
            process = context.Process(target=_serve, args=(there, settings), daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)
        try:
            self._collect(START_TIMEOUT_S)
        except ProcessError:
            self.close()
            raise

    def __enter__(self) -> LoadedModel:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.join(10)
        for pipe in self._pipes:
            pipe.close()
        self._folder.cleanup()

    def swap(
        self,
        folder: str | Path,
        *,
        quantization: dict[str, Any] | None = None,
        dtype: str = "bfloat16",
        has_weights: bool = False,
    ) -> None:
        """Become a new engine of another model in the same processes, which saves their start (10 s)."""
        self.unfinished_push = None
        self._ask("swap", str(folder), dtype, quantization, has_weights)

    def pause_generation(self) -> None:
        self.is_paused = True

    def continue_generation(self) -> None:
        self.refuse_unfinished_push()
        self.is_paused = False

    def flush_cache(self) -> None:
        """Do nothing: there is no cache."""

    def parameters(self) -> list[dict[str, torch.Tensor]]:
        """Copies of every rank's current parameters, under the engine's own names."""
        return self._ask("parameters")

    def call(self, function: Any, *arguments: Any) -> list[Any]:
        """Run ``function(loaded_rank, *arguments)`` on every rank; it must be importable by name."""
        return self._ask("call", function, *arguments)

    def _request(self, method: str, path: str, payload: Any = None, *, timeout_s: float | None = None) -> Any:
        self.asked.append(path)
        return self._ask("answer", method, path, payload, timeout_s=timeout_s)[0]

    def _ask(self, what: str, *arguments: Any, timeout_s: float | None = None) -> list[Any]:
        for pipe in self._pipes:
            pipe.send((what, arguments))
        return self._collect((timeout_s or self.args.weight_update_timeout_s) + 5)

    def _collect(self, timeout_s: float) -> list[Any]:
        answers = []
        for rank, pipe in enumerate(self._pipes):
            try:
                if not pipe.poll(timeout_s):
                    raise EngineError(f"rank {rank} of the loaded model did not answer within {timeout_s:g} s")
                value, error = pipe.recv()
            except (EOFError, OSError) as gone:
                raise EngineError(f"rank {rank} of the loaded model ended") from gone
            if error is not None:
                raise EngineError(f"rank {rank} of the loaded model failed:\n{error}")
            answers.append(value)
        return answers


def _serve(pipe: Any, settings: dict[str, Any]) -> None:
    os.environ |= {"OMP_NUM_THREADS": "1", "SLIME_CACHE_DIR": os.path.dirname(settings["store"])}
    torch.set_num_threads(1)
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        from tests.loaded_model.rank import LoadedRank

        rank = LoadedRank(**settings)
    except BaseException:
        pipe.send((None, traceback.format_exc()))
        return
    pipe.send((None, None))
    while True:
        try:
            what, arguments = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            with torch.no_grad():
                if what == "call":
                    value = arguments[0](rank, *arguments[1:])
                else:
                    value = getattr(rank, what)(*arguments)
                if what == "parameters":
                    value = {name: tensor.clone() for name, tensor in value.items()}
            pipe.send((value, None))
        except Exception:  # the edge of this process: the caller gets the error
            pipe.send((None, traceback.format_exc()))
