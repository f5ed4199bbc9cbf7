"""The service with the reference backend, in a thread of the test, and real clients of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tinker

from slime.ext.training_api.backend import Backend
from slime.ext.training_api.server import application
from slime.ext.training_api.service import TrainingService
from slime.ext.training_api.settings import ServiceSettings
from slime.ext.training_api.wire import TextLimits
from slime.utils.aiohttp_threaded import run_app_in_thread

KEY = "tml-a-key-of-the-tests"


@dataclass
class Served:
    """A running service."""

    url: str
    service: TrainingService

    @contextlib.contextmanager
    def client(self, key: str = KEY) -> Iterator[tinker.ServiceClient]:
        client = tinker.ServiceClient(base_url=self.url, api_key=key)
        yield client
        client.close("success").result(20)

    def rest(self, key: str = KEY) -> tinker.RestClient:
        return tinker.RestClient(base_url=self.url, api_key=key)


@contextlib.contextmanager
def serve(
    backend: Backend, model: Path, folder: Path, keys: tuple[str, ...] = (), **settings: Any
) -> Iterator[Served]:
    """Serve ``backend`` at a free port."""
    chosen = ServiceSettings(
        model_name=str(model), limits=TextLimits(512, 2048), folder=folder, max_rank=32, request_timeout_s=60.0
    )
    service = TrainingService(backend, replace(chosen, **settings))
    handle = run_app_in_thread(application(service, keys), host="127.0.0.1")
    try:
        yield Served(f"http://127.0.0.1:{handle.port}", service)
    finally:
        handle.stop(20)
