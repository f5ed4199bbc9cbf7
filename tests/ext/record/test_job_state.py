"""The manager's report on its engines and routers."""

from __future__ import annotations

from slime.backends.sglang_utils.router_process import RouterHandle
from slime.ext.record.job_state import job_state
from tests.unit.ray.engines.test_lifecycle import EVENT, REFUSAL, STATE, at_once, make_fleet, push  # noqa: F401


def test_the_metrics_page_learns_of_engines_that_serve_and_of_evictions():
    fleet, group = make_fleet(3, "refill")
    group.urls[:] = ["http://a:1", "http://b:1", "http://c:1"]
    fleet.servers[0].router = RouterHandle("r", 2, None, 9)
    push(fleet, REFUSAL)
    group.report(2, EVENT.DIED, "it is gone")
    group.states[2] = STATE.RESTARTING  # as long as it takes
    state = job_state(fleet)
    assert [(page.url, dict(page.labels)) for page in state.pages] == [
        ("http://127.0.0.1:9/metrics", {"router": "m"}),
        ("http://a:1/metrics", {"engine": "0", "worker_type": "regular", "slime_model": "m"}),
        ("http://b:1/metrics", {"engine": "1", "worker_type": "regular", "slime_model": "m"}),
    ]
    assert (state.engine_states, state.num_evictions) == ({"serving": 1, "updating": 1, "restarting": 1}, 2)
