"""What is derived from the one declaration of an engine's verbs."""

from __future__ import annotations

from typing import Any

import pytest

from slime.backends.sglang_utils.sglang_engine import SGLangEngine
from slime.backends.sglang_utils.weight_receiver import ReceivingRank
from slime.utils.errors import WeightSyncError
from slime.weights.push.verbs import VERBS, EngineProxy, EngineVerbs, Verb, handle_in_loader, post_endpoints


class Recorder(EngineProxy):
    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []

    def start(self, verb: Verb, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        self.asked.append((verb.name, arguments, keywords))


def test_every_public_method_of_the_declaration_is_a_verb_with_a_meaning() -> None:
    public = {name for name in vars(EngineVerbs) if not name.startswith("_")}
    assert set(VERBS) == public
    assert all(getattr(EngineVerbs, name).__doc__ for name in public)


def test_a_proxy_sends_each_verb_under_its_name_and_names_all_when_it_knows_none() -> None:
    engine = Recorder()
    engine.commit_weight_update("p", weight_version="3")
    assert engine.asked == [("commit_weight_update", ("p",), {"weight_version": "3"})]
    with pytest.raises(AttributeError, match="no verb 'update_weight'; it has pause_generation, continue_generation,"):
        engine.update_weight()


def test_only_pulling_concerns_every_node() -> None:
    assert [verb.name for verb in VERBS.values() if verb.on_all_nodes] == ["pull_weights"]


def test_a_verb_with_an_endpoint_posts_its_arguments_but_those_that_are_none() -> None:
    @post_endpoints
    class Actor(EngineVerbs):
        def __init__(self) -> None:
            self.posted: list[tuple[str, dict[str, Any]]] = []

        def post_verb(self, verb: Verb, payload: dict[str, Any]) -> None:
            self.posted.append((verb.endpoint, payload))

        def destroy_weights_update_group(self, group_name: str) -> None:
            """Its own."""

    actor = Actor()
    actor.update_weights_from_disk("/hf", weight_version="3")
    actor.post_process_weights(post_process_quantization=True)
    actor.destroy_weights_update_group("g")
    assert actor.posted == [
        ("/update_weights_from_disk", {"model_path": "/hf", "weight_version": "3"}),
        ("/post_process_weights", {"restore_weights_before_load": False, "post_process_quantization": True}),
    ]
    with pytest.raises(TypeError, match="missing a required argument: 'model_path'"):
        actor.update_weights_from_disk()


def test_the_engines_actor_and_our_loader_have_every_verb_that_is_theirs() -> None:
    left = [name for name in VERBS if getattr(SGLangEngine, name) is vars(EngineVerbs)[name]]
    assert left == []
    assert all(hasattr(ReceivingRank, verb.name) for verb in VERBS.values() if verb.in_loader)


def test_a_loader_refuses_what_it_does_not_know() -> None:
    with pytest.raises(WeightSyncError, match="no verb 'get_weight_version'; it knows begin_weight_update, "):
        handle_in_loader(ReceivingRank(), "get_weight_version")
