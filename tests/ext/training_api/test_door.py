"""Who may use the training service."""

from __future__ import annotations

from pathlib import Path

from slime.ext.training_api.server import application
from slime.ext.training_api.service import TrainingService
from slime.ext.training_api.settings import ServiceSettings
from slime.ext.training_api.wire import TextLimits
from tests.contracts.test_http_door import aiohttp_server, check_kind, check_own_programs, check_pages
from tests.ext.training_api.reference_backend import ReferenceBackend


def test_programs_of_this_machine_come_in_and_pages_do_not(tiny_model: Path, tmp_path: Path) -> None:
    settings = ServiceSettings(model_name="m", limits=TextLimits(512, 64), folder=tmp_path, max_rank=4)
    service = TrainingService(ReferenceBackend(tiny_model), settings)
    door = (lambda folder: aiohttp_server(application(service)), "POST", "/api/v1/create_session", {"a": 1}, 400)
    with door[0](tmp_path) as port:
        check_own_programs(door, port)
        check_pages(door, port)
        check_kind(door, port)
