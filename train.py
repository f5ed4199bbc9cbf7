"""Synchronous training: generate a rollout, train on it, push the weights, generate the next one with them.

    ray job submit ... -- python3 train.py ARGUMENTS

The steps are those of ``slime.ray.train_loop``; ``train_async.py`` puts them in another order.
"""

import sys
from argparse import Namespace

from slime.flags.first_look import first_look

if __name__ == "__main__":
    sys.argv[1:] = first_look(sys.argv[1:])  # before the imports below take their seconds

from slime.compose import run, start_job  # noqa: E402
from slime.flags.cluster import check_loop  # noqa: E402


def train(args: Namespace) -> None:
    """Run every rollout of ``args`` from the one that the checkpoint says."""
    job = start_job(args)  # reserves GPUs, starts engines and trainers, pushes the weights for the first time

    if args.num_rollout == 0 and args.eval_interval is not None:
        job.evaluate(0)
        job.report(0)

    for rollout_id in range(args.start_rollout_id, args.num_rollout):
        if args.eval_interval is not None and rollout_id == 0 and not args.skip_eval_before_train:
            job.evaluate(rollout_id)

        rollout_data = job.generate(rollout_id)
        if rollout_data is not None:
            job.train(rollout_id, rollout_data)
            job.save_if_due(rollout_id)
            job.push_weights()

        job.evaluate_if_due(rollout_id)
        job.report(rollout_id)

    job.finish()


if __name__ == "__main__":
    run(train, lambda args: check_loop(args, "train.py"))
