"""The maths of post-training: tensors in, tensors out.

Imports torch and ``slime.utils`` only.  Where a number must be summed over ranks, the process group or a gather is
passed in; nothing here knows about parallel state, flags or batches.

In the order in which a reward becomes a gradient:

    group_baselines.py     what a reward is measured against: group mean, group mean and deviation
    advantages/            ESTIMATORS: rewards, KL and values to an advantage per token; whitening
    policy_losses/         POLICY_LOSSES: ppo_clip, gspo, cispo; the sequence mask opsm
    off_policy/            TOKEN_CORRECTIONS: tis, icepop
    kl.py                  KL_KINDS: k1, k2, k3, low_var_kl
    value_loss.py          the critic's regression
    reduction.py           from a value per token to one number per step

    log_probs.py           log-probability and entropy of tokens under sharded logits (log_probs_kernels.py on CUDA)
    discounted.py gae.py   sums over time
    registry.py            the table type of ESTIMATORS, KL_KINDS and the losses of --loss-type

One algorithm, one file, one docstring with the equation and its paper.  The trainer binds them to its batches in
``slime.backends.megatron_utils``, ``advantages.py`` and ``loss.py``; the rollout side in
``slime.train_data.rewards``.
"""
