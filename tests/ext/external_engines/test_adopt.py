"""External engines with real Ray actors and a real router; the servers are scripted."""

from __future__ import annotations

from argparse import Namespace

import pytest
import ray

from slime.ext.external_engines.adopt import adopt_external_engines
from slime.ext.external_engines.flags import ask_external_engines
from tests.dist.test_server_layouts import gpus, listed, start  # noqa: F401 - fixtures among them
from tests.scripted_engine.server import ScriptedEngine

pytestmark = [pytest.mark.dist, pytest.mark.timeout(1800)]


def test_external_engines_are_adopted_behind_a_router_and_left_running(start):  # noqa: F811
    with ScriptedEngine() as first, ScriptedEngine() as second:
        given = {"rollout_external": True, "rollout_external_engine_addrs": [first.url, f"127.0.0.1:{second.port}"]}
        args = Namespace(**given, debug_train_only=False)
        ask_external_engines(args)
        assert (args.rollout_num_engines, args.rollout_num_gpus) == (2, 2)
        fleet = start(adopt_external_engines, **vars(args))
        assert set(listed(fleet.servers[0].router)) == {first.url, second.url}
        engines = fleet.weights.updatable()
        assert [(engine.num_gpus, engine.gpu_offset) for engine in engines.engines] == [(1, 1), (1, 2)]
        assert engines.num_new == 2
        assert [engine.is_colocated for engine in engines.engines] == [False, False]
        assert ray.get(engines.handles[0].get_weight_version.remote(), timeout=120) == first.weight_version
        fleet.stop()
        assert first.is_up and second.is_up
