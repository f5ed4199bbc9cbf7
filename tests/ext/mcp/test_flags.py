"""What follows from the address of an MCP server; the package is not needed."""

from __future__ import annotations

import asyncio
from argparse import Namespace

from slime.ext.mcp.flags import derive_servers
from slime.rollout.tools import Toolbox
from slime.utils.redaction import hide_values, redacted, redacted_text


def test_keys_in_an_address_are_in_no_text_and_in_no_answer_to_the_policy():
    keys = ["a1b2c3d4e5f6a7b8c9", "0123456789abcdef", "hush77"]
    where = "https://h.example/s/{}/mcp?profile=mine&k={}&apiKey={}".format(*keys)
    args = Namespace(rollout_tools=[f"mcp:{where}"], tool_readers={})
    derive_servers(args)
    assert set(args.rollout_tool_secrets) == set(keys)

    async def refuse() -> str:
        raise RuntimeError(f"401 for {where}")

    hide_values(args)
    try:
        answer = asyncio.run(Toolbox({"refuse": refuse}, []).call("refuse", {}, timeout_s=20))
        shown = [answer, redacted_text(f"POST {where}"), str(redacted(args))]
    finally:
        hide_values(Namespace())
    assert all("h.example" in text and "profile=mine" in text for text in shown)
    assert not [key for key in keys for text in shown if key in text]
