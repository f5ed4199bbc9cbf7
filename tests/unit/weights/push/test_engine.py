"""Each method of the engine's client is a method of its actor with the same parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from slime.backends.sglang_utils.sglang_engine import SGLangEngine
from slime.backends.sglang_utils.weight_verbs import WeightVerbs
from slime.utils.errors import ProcessError
from slime.weights.push.engine import EngineProxy

ARGUMENTS: dict[str, Any] = {
    "init_weights_update_group": (["10.0.0.1", 20000, 1, 3, "g", "gloo"], {}),
    "destroy_weights_update_group": (["g"], {}),
    "update_weights_from_tensor": ([["handle"]], {"load_format": "flattened_bucket", "weight_version": "3"}),
    "update_weights_from_distributed": (
        [["a"], ["bfloat16"], [[2, 3]]],
        {"group_name": "g", "weight_version": "3", "load_format": "flattened_bucket"},
    ),
    "update_weights_from_disk": (["/hf", "3"], {}),
    "post_process_weights": ([], {"post_process_quantization": True}),
}
NO_REQUESTS = {"start", "run", "__init__", "__repr__"}
METHODS = sorted({name for name, _ in inspect.getmembers(EngineProxy, inspect.isfunction)} - NO_REQUESTS)


class Actor(WeightVerbs):
    rank = node_rank = 0

    def __init__(self) -> None:
        self.posted: list[tuple[str, Any]] = []

    def post(self, path: str, payload: Any) -> Any:
        self.posted.append((path, payload))


class Direct(EngineProxy):
    """Calls the actor directly."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    def start(self, method: str, /, *arguments: Any, **keywords: Any) -> Any:
        return getattr(self.actor, method)(*arguments, **keywords)

    def run(self, function: Callable[..., Any], /, *arguments: Any, on_all_nodes: bool = False) -> Any:
        return self.actor.run(function, *arguments)


@pytest.mark.parametrize("name", METHODS)
def test_the_actor_takes_what_the_client_sends(name: str) -> None:
    class Signatures:
        def __getattr__(self, method: str) -> Any:
            assert method == name
            own = inspect.signature(getattr(SGLangEngine, method))
            return lambda *arguments, **keywords: own.bind(None, *arguments, **keywords)

    arguments, keywords = ARGUMENTS.get(name, ([], {}))
    assert getattr(Direct(Signatures()), name)(*arguments, **keywords) is not None


def test_arguments_that_are_none_stay_away_from_the_server() -> None:
    actor = Actor()
    engine = Direct(actor)
    engine.update_weights_from_disk("/hf", "3")
    engine.post_process_weights(post_process_quantization=True)
    engine.update_weights_from_tensor(["handle"], load_format="flattened_bucket")
    assert actor.posted == [
        ("/update_weights_from_disk", {"model_path": "/hf", "weight_version": "3"}),
        ("/post_process_weights", {"restore_weights_before_load": False, "post_process_quantization": True}),
        (
            "/update_weights_from_tensor",
            {"serialized_named_tensors": ["handle"], "load_format": "flattened_bucket", "flush_cache": False},
        ),
    ]


def test_a_group_that_the_server_does_not_know_is_no_error() -> None:
    class Restarted(Actor):
        def post(self, path: str, payload: Any) -> Any:
            raise ProcessError("400: no such group")

    Direct(Restarted()).destroy_weights_update_group("g")


def test_an_extension_runs_its_own_requests_on_the_actor() -> None:
    actor = Actor()
    assert Direct(actor).run(lambda engine, number: (engine, number), 5) == (actor, 5)
