"""The maths of post-training: tensors in, tensors out.

Imports torch and ``slime.utils`` only.  Functions that reduce over ranks take a process group or a gather function as
argument; nothing here knows about parallel state, flags or batches.

From reward to gradient:

    group_baselines.py     baselines of rewards: group mean, group mean and standard deviation
    advantages/            ESTIMATORS: rewards, KL and values to an advantage per token; whitening
    policy_losses/         POLICY_LOSSES: ppo_clip, gspo, cispo; the sequence mask opsm
    off_policy/            TOKEN_CORRECTIONS: tis, icepop
    kl.py                  KL_KINDS: k1, k2, k3, low_var_kl
    value_loss.py          the critic's regression loss
    reduction.py           per-token values to one number per step

    log_probs.py           log-probability and entropy of tokens under sharded logits (log_probs_kernels.py on CUDA)
    discounted.py gae.py   sums over time
    registry.py            the table type of ESTIMATORS, KL_KINDS and the losses of --loss-type

Each algorithm has one file and a docstring with its equation and paper.  The trainer applies them to its batches in
``slime.backends.megatron_utils`` (``advantages.py``, ``loss.py``); the rollout applies ``group_baselines`` in
``slime.train_data.rewards``.
"""
