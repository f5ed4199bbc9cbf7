"""Synchronous training: generate a rollout, train on it, push the weights, generate the next with the new weights.

    ray job submit ... -- python3 train.py ARGUMENTS

``slime.ray.train_loop`` implements the steps; ``train_async.py`` runs the same steps in another order.
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

    if args.num_rollout == 0 and args.eval_interval is not None:
        job.evaluate()

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
