"""Train on what an agent does: a program that talks to a model over HTTP plays, and its turns become samples.

* ``adapters``: servers that speak OpenAI's or Anthropic's protocol in front of SGLang and write down every token.
* ``trajectory``: turns -> token-exact samples.
* ``parsing``: the model's text -> reasoning, text, tool calls.
* ``sandbox``, ``harness``: where an agent program runs, and how it is installed and started there.
* ``aiohttp_threaded``: an aiohttp application in its own thread.

docs/agent.md shows how the pieces make a generate function.
"""
