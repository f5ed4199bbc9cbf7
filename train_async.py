"""Asynchronous training: the engines generate rollout k+1 while the trainer works on rollout k.

    ray job submit ... -- python3 train_async.py ARGUMENTS

The policy that generates is one update older than the one that trains.  Engines and trainer need separate GPUs
(no ``--colocate``).  Supervised fine-tuning runs here too, with ``--debug-train-only``.
"""

import sys
from argparse import Namespace

from slime.flags.first_look import first_look

if __name__ == "__main__":
    sys.argv[1:] = first_look(sys.argv[1:])  # first, because the imports below take seconds

from slime.compose import run, start_job  # noqa: E402
from slime.flags.cluster import check_loop  # noqa: E402


def train(args: Namespace) -> None:
    """Run every rollout from ``args.start_rollout_id``, where the checkpoint left off, to ``args.num_rollout``."""
    job = start_job(args)  # reserves GPUs, starts engines and trainers, does the first weight push

    ahead = job.start_generate(args.start_rollout_id) if args.start_rollout_id < args.num_rollout else None
    for rollout_id in range(args.start_rollout_id, args.num_rollout):
        assert ahead is not None
        rollout_data = job.finish_generate(ahead)
        has_next = rollout_id + 1 < args.num_rollout
        ahead = job.start_generate(rollout_id + 1) if has_next else None

        if rollout_data is not None:
            job.train(rollout_id, rollout_data)
            job.save_if_due(rollout_id)
            if (rollout_id + 1) % args.update_weights_interval == 0:
                if ahead is not None:
                    job.finish_generate(ahead)  # no request may be in flight while the weights change
                job.push_weights()

        job.evaluate_if_due(rollout_id)
        job.report(rollout_id)

    job.finish()


if __name__ == "__main__":
    run(train, lambda args: check_loop(args, "train_async.py"))
