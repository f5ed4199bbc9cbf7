"""The plugin of prefill and decode engines, called like slime's engines and SGLang's entry points call it."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
from slime.backends.sglang_utils import cpu_shim
cpu_shim.install()
from sglang.srt.plugins.hook_registry import HookRegistry
from slime.ext.prefill_decode import request_halves, sglang_plugin
sglang_plugin.register(7.5)
sglang_plugin.register()
print(sglang_plugin.Patience.seconds, {len(hooks) for hooks in HookRegistry._hooks.values()})
print(len(HookRegistry._hooks) - len(request_halves.HOOKS))
from mooncake.engine import TransferEngine
print(TransferEngine.__module__)
"""


def test_its_hooks_are_registered_once_with_the_patience_of_the_job() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-3:] == ["7.5 {1}", "1", "slime.ext.prefill_decode.transfer_engine"]
