"""Start the SGLang router of a model, or adopt one that the user runs."""

from __future__ import annotations

import random
from argparse import Namespace

from slime.arguments import record_runtime
from slime.backends.sglang_utils.router_process import RouterHandle, adopt_router, start_router
from slime.backends.sglang_utils.sglang_config import ModelConfig
from slime.utils.http_utils import find_available_port
from slime.utils.net import get_current_node_ip


def restart_model_router(args: Namespace, model: ModelConfig, old: RouterHandle) -> RouterHandle:
    """A new router at the address of one that has ended; every URL that was handed out stays valid."""
    old.stop()
    return start_router(
        args,
        host=old.host.strip("[]"),
        port=old.port,
        prometheus_port=find_available_port(random.randint(4000, 5000)),
        pd_disaggregation=model.has_prefill_decode,
    )


def start_model_router(args: Namespace, model: ModelConfig, *, is_first: bool) -> RouterHandle:
    """The router of ``model``; the first model's address becomes ``args.sglang_router_ip/port``.

    Every model's address is recorded in ``args.sglang_model_routers`` under the model's name.
    """
    if is_first and args.sglang_router_ip and args.sglang_router_port:
        router = adopt_router(args.sglang_router_ip, args.sglang_router_port)
    else:
        wanted = args.sglang_router_port if is_first else None
        router = start_router(
            args,
            host=get_current_node_ip(),
            port=wanted or find_available_port(random.randint(3000, 4000)),
            prometheus_port=find_available_port(random.randint(4000, 5000)),
            pd_disaggregation=model.has_prefill_decode,
        )
    routers = dict(args.sglang_model_routers or {})
    routers[model.name] = (router.host, router.port)
    record_runtime(args, sglang_model_routers=routers)
    if is_first:
        record_runtime(args, sglang_router_ip=router.host, sglang_router_port=router.port)
    return router
