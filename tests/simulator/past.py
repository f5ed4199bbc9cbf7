"""Schedules, shrunk, that ended a run which could have continued: each is a past mistake."""

from __future__ import annotations

from tests.simulator.faults import FULLY_ASYNC, Fault, Setup

PAST: dict[str, tuple[int, Setup, list[Fault]]] = {
    "a router dies again while its engines are registered": (
        10023811,
        Setup(num_rollout=2, engines=1),
        [Fault("kill", at_s=21.142, target="router"), Fault("kill", "http router POST /generate", 7)],
    ),
    "a request to a router that has just started is lost": (
        10007574,
        Setup(num_rollout=2),
        [
            Fault("lose", "http router GET /workers", 12),
            Fault("hang", "answer engine1.commit_weight_update", 2, target="router", amount=4000.0),
        ],
    ),
    "an engine becomes slow and its late answer is broken": (
        20002482,
        Setup(num_rollout=2, colocate=True),
        [
            Fault("garbage", "http server1 POST /generate", 4),
            Fault("slow", at_s=21.812, target="server1", amount=50.0),
        ],
    ),
    "a trainer dies while a new engine gets its weights": (
        10035859,
        Setup(is_async=True, num_rollout=1, engines=1),
        [Fault("kill", "call trainer0.excluded_engines", 2), Fault("kill", at_s=10.622, target="engine0")],
    ),
    "an engine hangs while it starts again": (
        10046336,
        Setup(num_rollout=1, engines=1),
        [Fault("kill", "call engine0.describe_exit", 6), Fault("hang", at_s=19.435, target="engine0", amount=400.0)],
    ),
    "a trainer hangs while it starts again": (
        10002115,
        Setup(num_rollout=4, engines=3, trainer_ranks=2),
        [Fault("hang", "call trainer.stay_alive", 3, amount=4000.0), Fault("kill", "answer trainer1.train_boxed", 4)],
    ),
    "a new trainer gives its weights to an engine before any push": (
        20065833,
        Setup(is_async=True, num_rollout=2, engines=1, seconds_per_token=1.0),
        [
            Fault("kill", "call engine0.check_health", 4),
            Fault("after", "file trainer0 replaced latest_checkpointed_iteration.txt", 1),
        ],
    ),
    "a trainer dies while the only engine starts again on its GPU": (
        20019957,
        Setup(num_rollout=2, engines=1, colocate=True),
        [
            Fault("kill", at_s=22.844, target="trainer0"),
            Fault("kill", "call trainer0.excluded_engines", 2, target="server0"),
        ],
    ),
    "a server outlives its engine, which dies as a push begins": (
        20053979,
        Setup(num_rollout=3, seconds_per_token=0.05, save_interval=2),
        [Fault("kill", "answer engine0.describe_exit", 8)],
    ),
    "probes of a slow engine are given up one after the other": (
        20015375,
        Setup(rollout_function=FULLY_ASYNC, num_rollout=4, engines=1),
        [Fault("slow", at_s=7.62, target="server0", amount=50.0)],
    ),
    "a router dies with requests that engines still answer": (
        20026724,
        Setup(rollout_function=FULLY_ASYNC, num_rollout=3, engines=1, seconds_per_token=1.0),
        [Fault("kill", at_s=8.792, target="router")],
    ),
    "a trainer dies with the only engine while another model's engine has its GPU too": (
        1,
        Setup(num_rollout=2, engines=1, trainer_ranks=2, colocate=True, judge=True),
        [
            Fault("kill", "http router POST /generate", 5, target="server0"),
            Fault("kill", "http router POST /generate", 5, target="trainer0"),
        ],
    ),
    "a trainer dies with the only engine that decodes while one that prefills has its GPU too": (
        1,
        Setup(num_rollout=2, trainer_ranks=2, colocate=True, prefill=True),
        [
            Fault("kill", "http router POST /generate", 5, target="server1"),
            Fault("kill", "http router POST /generate", 5, target="trainer0"),
        ],
    ),
    "a router answers a look at its engines with JSON of another shape": (
        30001931,
        Setup(is_async=True, num_rollout=3, over_sampling=1, engines=1, update_interval=2, seconds_per_token=1.0),
        [Fault("nonsense", "http router GET /workers", 8)],
    ),
    "SIGTERM to a rank while it trains": (
        1,
        Setup(trainer_ranks=2, save_interval=4, grace_s=20.0),
        [Fault("term", "train 1", 1)],
    ),
    "SIGTERM to a rank while the next rollout is generated and the last checkpoint is written": (
        1,
        Setup(is_async=True, trainer_ranks=2, save_interval=2, async_save=True, grace_s=20.0),
        [Fault("term", "http router POST /generate", 14, target="trainer1")],
    ),
    "a trainer dies as it asks engines to join the group of a push": (
        50000972,
        Setup(num_rollout=1, engines=3, broadcast=True),
        [Fault("kill", "call engine2.join_weight_group", 1, target="trainer0")],
    ),
    "a router dies as it is told that the only engine of a model that is not trained has died": (
        50022491,
        Setup(judge=True),
        [
            Fault("kill", "http router1 DELETE /workers/w1", 1),
            Fault("kill", "http server1 POST /abort_request", 4, target="server2"),
        ],
    ),
    "an engine hangs between two ports that it names as it starts again": (
        50000005,
        Setup(num_rollout=1, engines=1),
        [
            Fault("kill", "http server0 POST /get_weights_by_name", 3, target="server0"),
            Fault("hang", "answer engine0._get_current_node_ip_and_free_port", 5, amount=4000.0),
        ],
    ),
    "a trainer hangs before it gives weights to a new engine, the only one": (
        50060967,
        Setup(is_async=True, num_rollout=2, over_sampling=1, engines=1),
        [
            Fault("kill", "http server0 GET /v1/loads", 1),
            Fault("hang", "http router POST /generate", 29, target="trainer0", amount=400.0),
        ],
    ),
    "the only engine hangs as it starts again, while requests wait for it": (
        50052545,
        Setup(num_rollout=1, engines=1, seconds_per_token=1.0),
        [
            Fault("kill", "http server0 GET /health_generate", 3),
            Fault("hang", "answer engine0._get_current_node_ip_and_free_port", 8, amount=4000.0),
        ],
    ),
    "an engine is given up before a push, and the trainer hangs in it": (
        70039637,
        Setup(num_rollout=3, over_sampling=2, fault_tolerance=False, seconds_per_token=1.0, judge=True),
        [
            Fault("hang", "call engine0.get_weight_version", 3, target="trainer0", amount=4000.0),
            Fault("cut", at_s=40.929, target="server1", amount=90.0),
        ],
    ),
    "a rank of the trainer dies while a new manager starts on its GPUs": (
        1,
        Setup(trainer_ranks=2, save_interval=2, colocate=True),
        [
            Fault("kill", "http router POST /generate", 14, target="manager"),
            Fault("kill", "call manager.wait_ready", 4, target="trainer1"),
        ],
    ),
    "a manager dies again while the engines of its start come up": (
        1,
        Setup(trainer_ranks=2, save_interval=2),
        [
            Fault("kill", "http router POST /generate", 14, target="manager"),
            Fault("kill", "http router POST /workers", 3, target="manager"),
        ],
    ),
}
"""By what happens in it: the seed, the job, and the faults."""
