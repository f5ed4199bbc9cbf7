"""Settings derived from the address of an MCP server; the package is not needed."""

from __future__ import annotations

import asyncio
from argparse import Namespace

import pytest

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


@pytest.mark.parametrize(
    ("server", "keys"),
    [
        ("https://h.example/mcp?k=ab%2Bcd1234567890%3D%3D", ["ab%2Bcd1234567890%3D%3D", "ab+cd1234567890=="]),
        ("https://h.example/mcp?k=ab+cd1234567890wxyz", ["ab+cd1234567890wxyz"]),
        ("npx -y mcp-remote https://h.example/mcp?k=abcdef0123456789 --header x", ["abcdef0123456789"]),
        ("npx mcp-remote 'https://h.example/mcp?token=hush77' \"", ["hush77"]),
    ],
)
def test_keys_are_hidden_as_they_stand_in_an_address_of_a_command_too(server: str, keys: list[str]):
    args = Namespace(rollout_tools=[f"mcp:{server}"], tool_readers={})
    derive_servers(args)
    hide_values(args)
    try:
        shown = [redacted_text(f"cannot reach {server}"), *(redacted_text(f"401 for <{key}>") for key in keys)]
    finally:
        hide_values(Namespace())
    assert "h.example" in shown[0]
    assert not [key for key in keys for text in shown if key in text]
