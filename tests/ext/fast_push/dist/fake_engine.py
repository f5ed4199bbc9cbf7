"""An engine in a process of its own: a transformers model behind the verbs of an engine.

Every trainer rank may talk to it, each over its own connection; it answers one request at a time.
"""

from __future__ import annotations

import base64
import os
import pickle
import re
import tempfile
import threading
import time
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

import torch

from slime.ext.fast_push.messages import COMPARE, FILL_WITH_NAN, FIND_NAN, RECEIVER
from slime.utils.errors import EngineError, WeightSyncError
from slime.weights.manifest import Manifest
from tests.ext.fast_push.dist.fault_engine import HoldingEngine
from tests.matrix.pool import fork_context

ANSWER_TIMEOUT_S = 60
OURS = (RECEIVER,)
"""The loaders of an engine that takes verified pushes."""
_EXPERT = re.compile(r"^(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight$")


class _Answer:
    """Waits for one answer of the engine's process; answers come in the order of the requests."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine

    def wait(self, timeout_s: float) -> Any:
        if not self.engine.pipe.poll(min(timeout_s, ANSWER_TIMEOUT_S)):
            raise EngineError("the fake engine did not answer")
        value, error = self.engine.pipe.recv()
        if error is not None:
            raise error
        return value


class FakeEngine:
    """Every method of the protocol becomes a message to the process.

    Args:
        folder: the HF model; None reaches the engine that another rank starts at ``address``.
        address: path of the engine's socket; the engine has it to itself when None.
    """

    index = 0
    gpu_offset = 0
    dtype = ""

    def __init__(
        self,
        folder: str | None,
        *,
        num_gpus: int,
        is_colocated: bool,
        loaders: tuple[str, ...] = OURS,
        address: str | None = None,
    ) -> None:
        self.num_gpus, self.is_colocated, self.loaders = num_gpus, is_colocated, loaders
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.fault = ""
        address = address or f"{tempfile.mkdtemp()}/engine"
        self.process: Any = None
        if folder is not None:
            self.process = fork_context().Process(target=_serve, args=(address, folder), daemon=True)
            self.process.start()
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        while not os.path.exists(address) and time.monotonic() < deadline:
            time.sleep(0.1)
        self.pipe = Client(address)

    def run(self, function: Any, /, *arguments: Any, on_all_nodes: bool = False) -> Any:
        """Ask for what a function of an extension does, by its name."""
        return getattr(self, function.__name__)(*arguments)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)

        def call(*positional: Any, **keyword: Any) -> _Answer:
            details = {k: v for k, v in keyword.items() if k != "serialized_named_tensors"}
            self.calls.append((name, details | {"arguments": positional}))
            self.pipe.send((name, positional, keyword, self.fault, self.num_gpus))
            return _Answer(self)

        return call

    def log_probs(self, tokens: list[list[int]], response_lengths: list[int]) -> list[torch.Tensor]:
        """Log-prob of every response token under the engine's weights."""
        answer = self.compute(tokens, response_lengths).wait(ANSWER_TIMEOUT_S)
        return [torch.tensor(values) for values in answer]

    def close(self) -> None:
        self.pipe.close()
        if self.process is not None:
            self.process.kill()
            self.process.join(5)


class NoEngine:
    """What the other ranks are given: they must not talk to it."""

    index = 0
    gpu_offset = 0
    dtype = ""
    fault = ""
    loaders = OURS

    def __init__(self, folder: str, *, num_gpus: int, is_colocated: bool) -> None:
        self.num_gpus, self.is_colocated = num_gpus, is_colocated
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def close(self) -> None:
        pass


class _Server(HoldingEngine):
    """The engine's side: what arrives is laid into the model's parameters, and read back from there."""

    def __init__(self, folder: str) -> None:
        import transformers

        super().__init__({}, 0, "0", "")
        self.num_gpus = 0
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.parameters = dict(self.model.named_parameters())
        for parameter in self.parameters.values():
            parameter.data.fill_(float("nan"))
        self.groups: dict[str, Any] = {}

    def begin_weight_update(
        self, manifest_id: str, push_id: str, manifest_json: str | None = None, loader: str = RECEIVER
    ) -> Any:
        """One model stands for those of all of the engine's GPUs."""
        if manifest_json is not None:
            names = [tensor.name for tensor in Manifest.from_json(manifest_json).tensors]
            self.held = [{name: self.place_of(name) for name in names}] * self.num_gpus
        return super().begin_weight_update(manifest_id, push_id, manifest_json)

    def init_weights_update_group(
        self, master_address: str, master_port: int, rank_offset: int, world_size: int, group_name: str, backend: str
    ) -> None:
        from sglang.srt.utils import init_custom_process_group

        self.groups[group_name] = init_custom_process_group(
            backend=backend,
            init_method=f"tcp://{master_address}:{master_port}",
            world_size=world_size,
            rank=rank_offset,
            group_name=group_name,
        )

    def destroy_weights_update_group(self, group_name: str) -> None:
        torch.distributed.destroy_process_group(self.groups.pop(group_name))

    def update_weights_from_tensor(
        self, serialized_named_tensors: list[str], load_format: str, weight_version: str | None = None
    ) -> None:
        from sglang.srt.utils import MultiprocessingSerializer
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

        assert (len(serialized_named_tensors), load_format) == (self.num_gpus, "flattened_bucket")
        for text in serialized_named_tensors:
            payload = MultiprocessingSerializer.deserialize(text)
            bucket = FlattenedTensorBucket(flattened_tensor=payload["flattened_tensor"], metadata=payload["metadata"])
            self.load_named(bucket.reconstruct_tensors(), str(weight_version))

    def run_weight_check(self, loader: str, text: str) -> None:
        if loader == FILL_WITH_NAN:
            for parameter in self.parameters.values():
                parameter.data.fill_(torch.nan)
        elif loader == FIND_NAN:
            if self.fault == "loses a tensor":
                self.parameters["model.norm.weight"].data.fill_(torch.nan)
            left = [name for name, parameter in self.parameters.items() if parameter.isnan().any()]
            if left:
                raise WeightSyncError(f"never pushed: {left}")
        else:
            assert loader == COMPARE
            self.compare(pickle.loads(base64.b64decode(text)))

    def update_weights_from_distributed(
        self,
        names: list[str],
        dtypes: list[str],
        shapes: list[list[int]],
        group_name: str,
        weight_version: str,
        load_format: str,
    ) -> None:
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

        empty = [
            (name, torch.empty(shape, dtype=getattr(torch, dtype)))
            for name, dtype, shape in zip(names, dtypes, shapes, strict=True)
        ]
        bucket = FlattenedTensorBucket(named_tensors=empty)
        torch.distributed.broadcast(bucket.get_flattened_tensor(), 0, group=self.groups[group_name])
        self.load_named(bucket.reconstruct_tensors(), weight_version)

    def load_named(self, named_tensors: list[tuple[str, torch.Tensor]], version: str) -> None:
        self.at("load:before")
        for name, tensor in named_tensors:
            self.place_of(name).copy_(tensor)
        self.version, self.push_id = version, None

    def place_of(self, name: str) -> torch.Tensor:
        """Where the tensor of a checkpoint lies; transformers stacks experts, and gate on up."""
        match = _EXPERT.match(name)
        if match is None or name in self.parameters:
            return self.parameters[name].data
        experts, index, matrix = match[1], int(match[2]), match[3]
        if matrix == "down":
            return self.parameters[f"{experts}.down_proj"].data[index]
        return self.parameters[f"{experts}.gate_up_proj"].data[index].chunk(2)[matrix == "up"]

    def compare(self, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
        if self.fault == "differs":
            self.parameters["model.norm.weight"].data[0] += 1
        different = [n for n, tensor in named_tensors if not torch.equal(self.place_of(n), tensor)]
        if different:
            raise WeightSyncError(f"differing tensors: {different}")

    @torch.no_grad()
    def compute(self, tokens: list[list[int]], response_lengths: list[int]) -> list[list[float]]:
        result = []
        for sequence, length in zip(tokens, response_lengths, strict=True):
            logits = self.model(torch.tensor([sequence])).logits[0].log_softmax(-1)
            picked = logits[:-1].gather(1, torch.tensor(sequence[1:])[:, None]).squeeze(1)
            result.append(picked[-length:].tolist())
        return result


def _serve(address: str, folder: str) -> None:
    from slime.backends.sglang_utils import cpu_shim

    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    cpu_shim.install()
    server, turn = _Server(folder), threading.Lock()
    with Listener(address) as listener:
        while True:
            connection = listener.accept()
            threading.Thread(target=_answer, args=(connection, server, turn), daemon=True).start()


def _answer(pipe: Connection, server: _Server, turn: threading.Lock) -> None:
    """Request after request of one rank, until it hangs up."""
    while True:
        try:
            name, positional, keyword, fault, num_gpus = pipe.recv()
        except (EOFError, OSError):
            return
        with turn, torch.no_grad():
            server.fault, server.num_gpus = fault, num_gpus
            try:
                answer = (getattr(server, name)(*positional, **keyword), None)
            except Exception as error:  # the edge of the engine's process: the sender hears of it
                answer = (None, error if isinstance(error, WeightSyncError) else EngineError(repr(error)))
        pipe.send(answer)
