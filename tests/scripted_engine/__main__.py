"""``python -m tests.scripted_engine --length 64``: one engine in this process; its URL is the first line printed."""

from __future__ import annotations

import argparse
import asyncio

from tests.scripted_engine.script import Script
from tests.scripted_engine.server import ScriptedEngine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--length", type=int, default=64, help="tokens of every response")
    parser.add_argument("--gather", type=int, default=0, help="hold the first so many requests until all are here")
    parser.add_argument("--seconds-per-token", type=float, default=0.0)
    parser.add_argument("--cached-bodies", type=int, default=0, help="render so many answers once only")
    options = parser.parse_args()
    script = Script(length=options.length, gather=options.gather, seconds_per_token=options.seconds_per_token)
    engine = ScriptedEngine(script, port=options.port, record=False, cached_bodies=options.cached_bodies)
    print(engine.start(), flush=True)
    try:
        asyncio.run(asyncio.Event().wait())  # type: ignore[arg-type]
    except KeyboardInterrupt:
        engine.stop()


if __name__ == "__main__":
    main()
