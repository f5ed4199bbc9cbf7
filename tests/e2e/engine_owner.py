"""Owns a router and one engine until it is killed: ``python engine_owner.py CHECKPOINT OUT.json [FLAGS]``.

FLAGS: more attributes of the engine's arguments, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from argparse import Namespace
from typing import Any

from slime.backends.sglang_utils.router_process import start_router
from slime.backends.sglang_utils.sglang_engine import SGLangEngine
from slime.utils.net import get_free_port


def engine_args(checkpoint: str, **more: Any) -> Namespace:
    """The flags that an engine reads, for one fp32 engine on the CPU."""
    flags = dict(
        hf_checkpoint=checkpoint,
        rollout_num_gpus_per_engine=1,
        num_gpus_per_node=8,
        seed=1,
        offload_rollout=True,
        sglang_pp_size=1,
        sglang_dp_size=1,
        sglang_ep_size=1,
        use_rollout_routing_replay=False,
        bf16=False,
        fp16=False,
        fp32=True,
        engine_start_timeout_s=600,
        rollout_health_check_timeout=30.0,
        weight_update_timeout_s=300,
        sglang_router_request_timeout_secs=600,
        job_secret="s3cret of the test",
        verify_checkpoint=True,
        engine_plugins=[],
        weight_loaders=[],
        engine_settings={},
    )
    return Namespace(**{**flags, **more})


def main(checkpoint: str, out: str, flags: str = "{}") -> None:
    """Start both, write their addresses to ``out``, and wait to be killed."""
    args = engine_args(checkpoint, **json.loads(flags))
    router = start_router(
        args,
        host="127.0.0.1",
        port=get_free_port(23000),
        prometheus_port=get_free_port(24000),
        secret=args.job_secret,
    )
    port = get_free_port(25000, consecutive=3)
    engine = SGLangEngine(args, rank=0)
    started = time.monotonic()
    engine.init(
        host="127.0.0.1",
        port=port,
        nccl_port=port + 1,
        dist_init_addr=f"127.0.0.1:{port + 2}",
        router_ip=router.host,
        router_port=router.port,
    )
    assert engine.process is not None and router.process is not None, "both were started here"
    facts = {
        "engine_url": engine.get_url(),
        "router_url": router.url,
        "router_metrics_url": router.metrics_url,
        "owner_pid": os.getpid(),
        "roots": [engine.process.pid, router.process.pid],
        "start_s": time.monotonic() - started,
    }
    with open(f"{out}.part", "w", encoding="utf-8") as file:
        json.dump(facts, file)
    os.rename(f"{out}.part", out)
    time.sleep(3600)


if __name__ == "__main__":
    main(*sys.argv[1:])
