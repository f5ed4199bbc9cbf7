"""Trains on the behavior of agents: programs that call a model over HTTP, whose turns become samples.

* ``adapters``: servers with the OpenAI and Anthropic APIs in front of SGLang, which record every token.
* ``trajectory``: converts turns to token-exact samples.
* ``parsing``: splits the model's text into reasoning, text and tool calls.
* ``sandbox``, ``harness``: run an agent program in isolation; install and start it there.
* ``aiohttp_threaded``: runs an aiohttp application in its own thread.

docs/agent.md shows how to build a generate function from these parts.
"""
