"""Serve the log-probs of a Megatron model: a distillation teacher of any layout, on its own GPUs.

    torchrun --nproc-per-node 8 tools/serve_teacher.py --hf-checkpoint MODEL --load TEACHER \\
        --tensor-model-parallel-size 8 --max-tokens-per-gpu 16384 --teacher-port 7999

Students give its address: --use-opd --opd-type sglang --rm-url http://HOST:7999/generate.  --load is a Megatron
checkpoint or a Hugging Face folder; default: --hf-checkpoint.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import signal
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch.distributed as dist
from aiohttp import web

from slime.ext.distill.flags import TeacherServerConfig
from slime.flags.security import secret_of_file
from slime.utils.aiohttp_threaded import door, run_app_in_thread
from slime.utils.files import language_config, read_model_config
from tools.cli import logged_run
from tools.convert_hf_to_torch_dist import join_world, parse_training_flags, with_layout

HOST = "0.0.0.0"
"""Students run on other machines."""


def serve(args: Namespace) -> None:
    """Load the model on all ranks, warm up, and answer until SIGTERM or Ctrl-C."""
    from slime.compose import parts
    from slime.ext.distill.scorer import Scorer
    from slime.ext.distill.server import MegatronServer
    from slime.ray.parts import load_all

    config = TeacherServerConfig.of(args)
    args = join_world(with_layout(args))
    has_secret = args.job_secret_file and dist.get_rank() == 0
    secret = secret_of_file(Path(args.job_secret_file), "--job-secret-file") if has_secret else None
    # Until the first request, nothing else ends a collective that hangs.
    faulthandler.dump_traceback_later(config.teacher_warmup_timeout_s, exit=True)
    with _answer_unready(config.teacher_warmup_port if dist.get_rank() == 0 else None):
        scorer = Scorer(args, load_all(parts(args).transforms))
        if dist.get_rank() != 0:
            faulthandler.cancel_dump_traceback_later()
            scorer.follow()
            return
        server = MegatronServer(
            scorer,
            config,
            vocab_size=args.vocab_size,
            max_length=config.megatron_server_max_length or _longest(args.hf_checkpoint),
            has_top=not args.allgather_cp,
            secret=secret,
            info={"model_path": args.load or args.hf_checkpoint, "world_size": dist.get_world_size()},
        )
        if config.megatron_server_warmup:
            server.warm_up()
    faulthandler.cancel_dump_traceback_later()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: server.stop())
    server.serve(HOST, config.teacher_port)


@contextlib.contextmanager
def _answer_unready(port: int | None) -> Iterator[None]:
    """Answer 503 at ``/healthz`` of ``port`` within the block."""
    if port is None:
        yield
        return

    async def not_yet(request: web.Request) -> web.Response:
        return web.json_response({"status": "warming up"}, status=503)

    app = web.Application(middlewares=[door()])
    app.add_routes([web.get("/healthz", not_yet)])
    handle = run_app_in_thread(app, host=HOST, port=port, thread_name="warm-up")
    try:
        yield
    finally:
        handle.stop()


def _longest(hf_checkpoint: str) -> int:
    return int(language_config(read_model_config(hf_checkpoint))["max_position_embeddings"])


def parse(argv: Sequence[str]) -> Namespace:
    """Return the server's arguments: every model and layout flag of training, and its own."""
    return parse_training_flags(argv, needed=("hf_checkpoint",), description=__doc__)


def main() -> None:
    """Run the command line."""
    with logged_run():
        logging.getLogger("megatron").setLevel(logging.WARNING)
        serve(parse(sys.argv[1:]))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
