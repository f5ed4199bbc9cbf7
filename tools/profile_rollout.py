"""Start or stop the profiler of every engine behind a router.

    python tools/profile_rollout.py --router-url http://127.0.0.1:30000 --action start --output-dir /tmp/profile

The engines write torch profiler traces to --output-dir, on their own machines, after --num-steps forward passes;
``tools/analyze_profile.py`` sums them up.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import aiohttp

from slime.flags.kinds import http_url, positive_int
from slime.flags.security import secret_of_file
from slime.utils.errors import EngineError
from tools.cli import clean_exit
from tools.terminal import say

TIMEOUT_S = 120.0


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--router-url", type=http_url, required=True, help="For example http://127.0.0.1:30000.")
    parser.add_argument("--action", choices=("start", "stop"), required=True)
    parser.add_argument("--output-dir", default=None, help="Folder of the traces, on the engines' machines.")
    parser.add_argument("--num-steps", type=positive_int, default=3, help="Forward passes to profile.")
    parser.add_argument(
        "--activities", nargs="+", default=None, help="Activities to record: CPU, GPU, MEM, CUDA_PROFILER."
    )
    parser.add_argument("--profile-by-stage", action="store_true", help="Profile prefill and decode separately.")
    parser.add_argument("--with-stack", action="store_true", help="Record Python stacks.")
    parser.add_argument("--record-shapes", action="store_true", help="Record the shapes of operands.")
    parser.add_argument("--job-secret-file", type=Path, default=None, help="The job's; engines refuse others.")
    args = parser.parse_args(argv)
    with clean_exit():
        secret = None
        if args.job_secret_file is not None:
            secret = secret_of_file(args.job_secret_file, "--job-secret-file", make=False)
        router_url = args.router_url.rstrip("/")
        for url, answer in asyncio.run(tell_workers(router_url, args.action, request_of(args), secret)):
            say(f"{url}: {answer}")


def request_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the body of ``/start_profile``; nothing for ``/stop_profile``."""
    if args.action == "stop":
        return {}
    body = {
        "output_dir": args.output_dir,
        "num_steps": args.num_steps,
        "activities": args.activities,
        "profile_by_stage": args.profile_by_stage,
        "with_stack": args.with_stack,
        "record_shapes": args.record_shapes,
    }
    return {name: value for name, value in body.items() if value is not None}


async def tell_workers(
    router_url: str, action: str, body: dict[str, Any], secret: str | None = None
) -> list[tuple[str, str]]:
    """POST ``/{action}_profile`` with the job's secret to every worker at once; returns (worker, response) pairs.

    Raises:
        EngineError: the router names no workers, or one of them fails the request.
    """
    headers = {} if secret is None else {"Authorization": f"Bearer {secret}"}
    async with aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)) as session:
        try:
            async with session.get(f"{router_url}/workers") as response:
                response.raise_for_status()
                urls = [worker["url"] for worker in (await response.json())["workers"]]
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError) as error:
            raise EngineError(f"{router_url}/workers does not list workers: {error}. Check --router-url.") from error
        if not urls:
            raise EngineError(f"The router {router_url} has no workers.")

        async def tell(url: str) -> tuple[str, str]:
            try:
                async with session.post(f"{url}/{action}_profile", json=body or None) as response:
                    text = (await response.text()).strip()
                    response.raise_for_status()
                    return url, text or "done"
            except (aiohttp.ClientError, TimeoutError) as error:
                raise EngineError(
                    f"{url}/{action}_profile failed: {error!r}. Look at the log of the engine."
                ) from error

        return list(await asyncio.gather(*map(tell, urls)))


if __name__ == "__main__":
    main()
