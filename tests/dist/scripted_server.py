"""A scripted engine as an engine's process: ``python -m tests.dist.scripted_server OWNER_PID``, settings on stdin.

``POST /script {"is_garbled": true}`` makes it return nonsense from then on.
"""

from __future__ import annotations

import asyncio
import os
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray

from slime.backends.sglang_utils.child_process import ChildProcess, end_with_family, owner_pid, read_settings
from slime.backends.sglang_utils.server_control import ServerControl
from slime.ray.engines.actor import EngineActor
from slime.ray.gpus import GpuSlice, _reserve
from slime.utils.net import format_host_port
from tests.flag_values import args_with
from tests.scripted_engine.script import Fault, Request, Script
from tests.scripted_engine.server import ScriptedEngine


def engine_flags(**given: Any) -> Namespace:
    """The flags of engines with two GPUs per node; deadlines are for a machine with a load of ten."""
    base = {
        "num_gpus_per_node": 2, "offload_rollout": False, "bf16": True, "fp16": False, "sglang_dtype": None,
        "sglang_dp_size": 1, "engine_start_timeout_s": 300.0, "weight_update_timeout_s": 30.0,
        "sglang_router_request_timeout_secs": 60, "router_policy": "round_robin", "router_log_level": "warn",
    }  # fmt: skip
    return args_with(**base | given)


@contextmanager
def logical_gpus(num_gpus: int) -> Iterator[GpuSlice]:
    """A private Ray with this many logical GPUs, all of them reserved."""
    ray.init(
        address="local", num_cpus=20, num_gpus=num_gpus, include_dashboard=False, log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": os.getcwd()}},
    )  # fmt: skip
    yield _reserve(num_gpus, 300)[0]
    ray.shutdown()


class GarblingScript(Script):
    """Returns nonsense once it is told to."""

    is_garbled = False

    def fault_of(self, request: Request) -> Fault | None:
        return Fault("garbage") if self.is_garbled else super().fault_of(request)


class ScriptedEngineActor(EngineActor):
    """A real engine actor whose server generates nothing; everything around the server is real."""

    def start_server(self, *, host, port, router_ip=None, router_port=None, dist_init_addr=None, **ignored) -> None:
        self.address = {"dist_init_addr": dist_init_addr, "port": port, **ignored}
        self.server = ServerControl(f"http://{format_host_port(host, port)}", name=f"engine {self.rank}")
        if router_ip and router_port:
            self.router = ServerControl(f"http://{format_host_port(router_ip, router_port)}", name="the router")
        self.process = ChildProcess(
            "tests.dist.scripted_server",
            {"host": host, "port": port},
            name=f"engine {self.rank} {port}",
            extra_environment={},
        )

    def facts(self) -> dict:
        """The actor's settings."""
        return {
            "rank": self.rank,
            "node_rank": self.node_rank,
            "base_gpu_id": self.base_gpu_id,
            "overrides": self.overrides,
            "pid": self.process.pid if self.process else None,
            **self.address,
        }


if __name__ == "__main__":
    end_with_family(owner_pid())
    settings = read_settings()
    ScriptedEngine(GarblingScript(length=4), host=settings["host"], port=settings["port"]).start()
    asyncio.run(asyncio.Event().wait())  # type: ignore[arg-type]
