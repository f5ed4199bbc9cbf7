"""The setup of every engine process before SGLang is imported, and the engine's metrics page."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import runpy
names = runpy.run_module("slime.backends.sglang_utils.server_main", run_name="__mp_main__")
try:
    import megatron.core
except ImportError:
    print("no megatron")
from sglang.srt.plugins.hook_registry import HookRegistry
print("sglang.srt.managers.tokenizer_manager.TokenizerManager.pause_generation" in HookRegistry._hooks)

from fastapi import APIRouter, FastAPI
from fastapi.testclient import TestClient
from sglang.srt.utils.common import add_prometheus_middleware, add_prometheus_track_response_middleware

router = APIRouter()
router.get("/v1/loads")(lambda: {"loads": 3})
app = FastAPI()
app.include_router(router)
app.get("/health")(lambda: "ok")
names["name_included_routes"](app)
add_prometheus_track_response_middleware(app)
add_prometheus_middleware(app)
client = TestClient(app)
print(client.get("/v1/loads").json(), client.get("/health").status_code)
page = client.get("/metrics")
print(page.status_code)
print(*sorted(line for line in page.text.splitlines() if line.startswith("sglang:http_requests_total{")), sep="\\n")
"""


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The last lines that one such process prints."""
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path_factory.mktemp("metrics"))}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=200, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()[-7:]


def test_a_process_of_an_engine_imports_no_megatron_core_and_has_slimes_hooks(printed: list[str]) -> None:
    assert printed[:2] == ["no megatron", "True"]


def test_the_servers_routes_answer_and_are_counted_with_metrics(printed: list[str]) -> None:
    assert printed[2:] == [
        "{'loads': 3} 200",
        "200",
        'sglang:http_requests_total{endpoint="/health",method="GET"} 1.0',
        'sglang:http_requests_total{endpoint="/metrics",method="GET"} 1.0',
        'sglang:http_requests_total{endpoint="/v1/loads",method="GET"} 1.0',
    ]
