"""The verbs of an engine that concern weights, each declared once, with its types and its meaning.

Three things are derived from :class:`EngineVerbs` through the table :data:`VERBS`:

    trainer   ``EngineProxy``       a verb becomes a request; ``slime.ray`` sends it to the engine's actor
    actor     ``post_endpoints``    a verb with an ``endpoint`` becomes a POST of its arguments to SGLang's server
    engine    ``handle_in_loader``  a verb with ``in_loader`` is handled by our weight loader inside the engine

The weight loaders that run inside the engine are named here too, because both sides must know their import paths.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, Protocol, TypeVar

from slime.utils.errors import WeightSyncError

RECEIVER = "slime.backends.sglang_utils.weight_receiver.receive"
"""``load_format`` of our loader, which takes the verbs of a two-phase push; see ``--custom-weight-loader``."""
COMPARE = "slime.backends.sglang_utils.weight_check.compare_weights"
"""Loader that compares what it is sent with what the engine holds."""
FILL_WITH_NAN = "slime.backends.sglang_utils.weight_check.fill_with_nan"
FIND_NAN = "slime.backends.sglang_utils.weight_check.find_nan"
"""Loader that reports what was not written since :data:`FILL_WITH_NAN`."""
SNAPSHOT = "slime.backends.sglang_utils.weight_check.snapshot_weights"
COMPARE_SNAPSHOT = "slime.backends.sglang_utils.weight_check.compare_with_snapshot"
WEIGHT_CHECKS = (COMPARE, FILL_WITH_NAN, FIND_NAN, SNAPSHOT, COMPARE_SNAPSHOT)
"""Loaders that compare or overwrite what an engine holds, and report problems."""
WEIGHT_LOADERS = (*WEIGHT_CHECKS, RECEIVER)
"""Import paths that an update request may name as its ``load_format``."""

Class = TypeVar("Class", bound=type)


@dataclass(frozen=True)
class Verb:
    """One method of :class:`EngineVerbs`."""

    name: str
    signature: inspect.Signature
    """Without ``self``."""
    endpoint: str = ""
    """Path of SGLang's server that takes the arguments as they are; those that are None stay away."""
    loads: bool = False
    """Weights come without a two-phase push: the engine may serve them at once."""
    on_all_nodes: bool = False
    """Each node of the engine has work to do; the other verbs are answered by the first."""
    in_loader: bool = False
    """The message of the same name is handled by our loader inside the engine."""

    def payload(self, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> dict[str, Any]:
        """Return all arguments by name, defaults included, but for those that are None."""
        bound = self.signature.bind(*arguments, **keywords)
        bound.apply_defaults()
        return {name: value for name, value in bound.arguments.items() if value is not None}


def verb(
    *, endpoint: str = "", loads: bool = False, on_all_nodes: bool = False, in_loader: bool = False
) -> Callable[[Callable[..., Any]], Any]:
    """Mark a method of :class:`EngineVerbs`, which has no body; the arguments mean what they mean in :class:`Verb`."""

    def mark(method: Callable[..., Any]) -> Any:
        @wraps(method)
        def declared(*_: Any, **__: Any) -> Any:
            raise NotImplementedError(f"this engine does not implement {method.__name__}")

        vars(declared)["options"] = {
            "endpoint": endpoint, "loads": loads, "on_all_nodes": on_all_nodes, "in_loader": in_loader,
        }  # fmt: skip
        return declared

    return mark


class EngineVerbs(Protocol):
    """Declaration of the verbs; the engine's actor implements them and blocks until the engine has answered.

    A push in two phases is ``begin_weight_update``, ``receive_*``, ``acknowledge_weight_update``,
    ``commit_weight_update``.  ``push_id`` names one attempt at a push; what belongs to another attempt is refused.
    Between begin and commit the engine holds neither the old nor the new weights and must not serve.
    """

    # Generation

    @verb()
    def pause_generation(self) -> None:
        """Abort running requests and accept no step until ``continue_generation``."""

    @verb()
    def continue_generation(self) -> None:
        """Serve again; refused while a push was begun and not committed."""

    @verb()
    def flush_cache(self) -> None:
        """Drop the prefix cache, which new weights make stale."""

    # A push in two phases, through our loader inside the engine

    @verb(in_loader=True)
    def begin_weight_update(
        self, manifest_id: str, push_id: str, manifest_json: str | None = None
    ) -> list[str] | None:
        """Prepare for the buckets of a ``Manifest`` and forget any unfinished push.

        The engine checks that it can place every tensor of the manifest and that these fill all its parameters.

        Args:
            manifest_id: its ``id``.
            push_id: of this attempt.
            manifest_json: the manifest itself, for an engine that does not know it.

        Returns:
            As ``buckets`` of ``acknowledge_weight_update``: digests of the constant buckets where the engine's memory
            still holds them from an earlier push, "" for all others; they need not be sent.  None where it must be
            asked again with the manifest itself, which it does not know.

        Raises:
            WeightSyncError: its model has no place for a tensor, or a place that no tensor fills.
        """

    @verb(in_loader=True)
    def receive_weight_bucket(self, push_id: str, bucket_index: int, group_name: str) -> None:
        """Load one flat bucket, which rank 0 of a weight group broadcasts.

        Problems with it are told by ``acknowledge_weight_update``; one that was loaded before does no harm.

        Args:
            push_id: of the push begun last.
            bucket_index: position in the manifest's buckets.
            group_name: see ``join_weight_group``.

        Raises:
            WeightSyncError: another push was begun since, or none.
        """

    @verb(in_loader=True)
    def receive_weight_buckets(self, push_id: str, payloads: dict[int, list[str]]) -> None:
        """Load flat buckets in memory that the engine can map; otherwise as ``receive_weight_bucket``.

        GPU ``k`` begins with the ``k``-th of them, so that not all read the memory of one GPU.

        Args:
            push_id: of the push begun last.
            payloads: position in the manifest's buckets -> handles to the flat buffer, one for each of the engine's
                GPUs; they stay open until the push is acknowledged.

        Raises:
            WeightSyncError: another push was begun since, or none.
        """

    @verb(in_loader=True)
    def receive_weight_folder(self, push_id: str, folder: str) -> None:
        """Load all buckets of the push from the safetensors files in ``folder``, as the engine's hosts see it."""

    @verb(in_loader=True)
    def acknowledge_weight_update(self, push_id: str) -> dict[str, Any]:
        """Return ``{"push_id", "buckets", "problems", "seconds"}`` for what the engine would serve.

        ``buckets``: digest of each bucket of the manifest as 16 hexadecimal digits (``slime.weights.digest``:
        ``combine`` over the digests of its slices, in the manifest's order), "" for one that did not arrive.
        ``problems``: what keeps the engine from serving these weights, one sentence each, over all its ranks.
        ``seconds``: of its slowest rank's device, by part: "copy" from other GPUs, "digest", "place".
        """

    @verb(in_loader=True)
    def commit_weight_update(self, push_id: str, weight_version: str) -> None:
        """Call the weights of a complete and acknowledged push ``weight_version``.

        The loader repacks what SGLang repacks after a load.

        Raises:
            WeightSyncError: it is not complete and acknowledged, or cannot be repacked; the version stays what it was.
        """

    @verb(in_loader=True)
    def join_weight_group(
        self, master_address: str, master_port: int, rank_offset: int, world_size: int, group_name: str, backend: str
    ) -> None:
        """Join a ``slime.weights.channel.WeightChannel`` as ranks ``rank_offset ...``; blocks until all have joined.

        Raises:
            WeightSyncError: not all joined within ``--weight-update-timeout-s``.
        """

    @verb(in_loader=True)
    def leave_weight_group(self, group_name: str) -> None:
        """Leave the group; one that the engine does not know is no error."""

    @verb(on_all_nodes=True)
    def pull_weights(self, target_version: int, rebuild: bool = False) -> str:
        """Bring this host's copy of the checkpoint to ``target_version`` and return its folder.

        What the engine serves does not change.

        Args:
            target_version: a version in ``--update-weight-disk-dir``; 0 is ``--hf-checkpoint`` itself.
            rebuild: make the copy anew, however good it looks.

        Raises:
            WeightSyncError: the version cannot be reached, or its bytes are not what their checksums say.
        """

    # SGLang's own endpoints

    @verb()
    def load_adapter(self, weight_version: str, config: dict[str, Any], tensors: str, is_handle: bool) -> None:
        """Run requests that begin from now on with an adapter; the one before goes when its requests have ended.

        Args:
            weight_version: names it.
            config: the content of PEFT's adapter_config.json.
            tensors: by PEFT's names.
            is_handle: they lie in one buffer of shared memory instead, as :data:`IN_ONE_BUFFER` says.
        """

    @verb(endpoint="/init_weights_update_group")
    def init_weights_update_group(
        self, master_address: str, master_port: int, rank_offset: int, world_size: int, group_name: str, backend: str
    ) -> None:
        """Join a process group as ranks ``rank_offset ...``; rank 0 is the trainer that sends."""

    @verb(endpoint="/destroy_weights_update_group")
    def destroy_weights_update_group(self, group_name: str) -> None:
        """Leave the group; one that the server does not know (it may have been restarted) is no error."""

    @verb(endpoint="/update_weights_from_tensor", loads=True)
    def update_weights_from_tensor(
        self,
        serialized_named_tensors: list[str],
        load_format: str | None = None,
        weight_version: str | None = None,
        flush_cache: bool = False,
    ) -> None:
        """Load tensors from memory that the engine can map: one serialised payload for each of its GPUs.

        With ``load_format`` one of :data:`WEIGHT_CHECKS` the weights are checked instead.

        Raises:
            WeightSyncError: the check found problems; the message has them.
        """

    @verb(endpoint="/update_weights_from_distributed", loads=True)
    def update_weights_from_distributed(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        group_name: str,
        weight_version: str | None = None,
        load_format: str | None = None,
        flush_cache: bool = False,
    ) -> None:
        """Load tensors that rank 0 of ``group_name`` broadcasts next, in this order."""

    @verb(endpoint="/update_weights_from_disk", loads=True)
    def update_weights_from_disk(
        self, model_path: str, weight_version: str | None = None, load_format: str | None = None
    ) -> None:
        """Load an HF checkpoint folder that the engine's node can read."""

    @verb(endpoint="/post_process_weights")
    def post_process_weights(
        self, restore_weights_before_load: bool = False, post_process_quantization: bool = False
    ) -> None:
        """Undo or redo the engine's own repacking of quantised weights; our loader needs no such endpoint.

        Stock SGLang does not have it.
        """

    @verb()
    def get_weight_version(self) -> str | None:
        """Return the version of the weights that the engine holds; ``"default"`` before the first update."""

    @verb()
    def check_weights(self, action: str) -> None:
        """Take a ``snapshot`` of the weights, overwrite them (``reset_tensors``), or ``compare`` them with it.

        Raises:
            WeightSyncError: ``compare`` found differences.
        """


def verbs_of(declaration: type) -> dict[str, Verb]:
    """Return the marked methods of a class by name."""
    found = {}
    for name, method in vars(declaration).items():
        if (options := getattr(method, "options", None)) is not None:
            signature = inspect.signature(method)
            found[name] = Verb(name, signature.replace(parameters=list(signature.parameters.values())[1:]), **options)
    return found


VERBS = verbs_of(EngineVerbs)


class Pending(Protocol):
    """A request on its way.  The caller that starts one must wait for it, with a deadline."""

    def wait(self, timeout_s: float) -> Any:
        """Return the engine's answer.

        Raises:
            ProcessError: the engine refused, died, or did not answer within ``timeout_s`` seconds.
        """


@dataclass(kw_only=True, eq=False)
class EngineProxy(ABC):
    """One engine, which may span several GPUs, as a push sees it: every verb returns a ``Pending`` at once."""

    index: int
    """Position among the engines that get weights; the name of the engine in messages."""
    num_gpus: int
    """GPUs of the engine, the ranks that take part in a distributed update."""
    gpu_offset: int
    """First of them, counted from the start of the rollout slice."""
    is_colocated: bool
    """The engine shares its GPUs with trainer ranks ``gpu_offset .. gpu_offset + num_gpus - 1``."""
    acknowledges: bool
    """Our loader runs in the engine: it takes the verbs of a two-phase push.  Without it, only stock SGLang's."""
    dtype: str = ""
    """The dtype in which it computes, as SGLang calls it; "" for the trainer's."""

    @abstractmethod
    def start(self, verb: Verb, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Pending:
        """Send one request."""

    def __getattr__(self, name: str) -> Callable[..., Pending]:
        if name not in VERBS:
            raise AttributeError(f"an engine has no verb {name!r}; it has {', '.join(VERBS)}")
        return lambda *arguments, **keywords: self.start(VERBS[name], arguments, keywords)


def post_endpoints(actor: Class) -> Class:
    """Give a class the verbs that name an endpoint and that it does not have: each POSTs its arguments.

    The class has ``post_verb(verb, payload)``.
    """
    for known in VERBS.values():
        if known.endpoint and known.name not in vars(actor):
            setattr(actor, known.name, _posting(known))
    return actor


def _posting(known: Verb) -> Callable[..., Any]:
    @wraps(vars(EngineVerbs)[known.name])
    def post(self: Any, *arguments: Any, **keywords: Any) -> Any:
        return self.post_verb(known, known.payload(arguments, keywords))

    return post


def handle_in_loader(loader: object, name: str, *arguments: Any) -> Any:
    """Call the loader's method for a verb.

    Raises:
        WeightSyncError: the name is none of a verb that loaders handle; trainer and engine run different versions.
    """
    known = [known.name for known in VERBS.values() if known.in_loader]
    if name not in known:
        raise WeightSyncError(f"the weight loader knows no verb {name!r}; it knows {', '.join(known)}")
    return getattr(loader, name)(*arguments)
