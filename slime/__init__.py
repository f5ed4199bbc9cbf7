"""slime: reinforcement learning post-training with Megatron-core and SGLang on Ray.

prompts -> rollout -> reward -> filter -> buffer -> train data -> packed micro-batches -> loss -> weights -> engines

``slime.rollout`` generates samples, ``slime.train_data`` packs them, ``slime.algorithms`` holds the maths,
``slime.backends`` runs the trainer and the engines, ``slime.weights`` moves weights from trainer to engines, and
``slime.ray`` decides where and when each of these runs.
"""

__version__ = "0.1.0"
