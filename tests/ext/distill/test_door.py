"""Who may use a teacher's server."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from slime.ext.distill.server import MegatronServer
from tests.contracts.test_http_door import aiohttp_server, check_kind, check_own_programs, check_pages


@pytest.mark.parametrize("path", ["/generate", "/update_weights_from_disk"])
def test_programs_of_this_machine_come_in_and_pages_do_not(path: str, tmp_path: Path) -> None:
    config = Namespace(megatron_server_update_timeout_s=30.0)
    server = MegatronServer(None, config, vocab_size=8, max_length=4, has_top=True, secret=None, info={})
    door = (lambda folder: aiohttp_server(server.application()), "POST", path, {"a": 1}, 400)
    with door[0](tmp_path) as port:
        check_own_programs(door, port)
        check_pages(door, port)
        check_kind(door, port)
