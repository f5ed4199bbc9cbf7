"""What holds for every process of an engine before SGLang is imported."""

import subprocess
import sys

PROGRAM = """
import runpy
runpy.run_module("slime.backends.sglang_utils.server_main", run_name="__mp_main__")
try:
    import megatron.core
except ImportError:
    print("no megatron")
"""


def test_an_engine_does_not_import_megatron_core() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "no megatron"
