"""A stand-alone service between generators of trajectories and the trainer.

* ``buffer``: the service; ``python -m slime_plugins.rollout_buffer.buffer`` listens at port 8889.
* ``generator``: programs that the service starts; each plays tasks against the engines and posts what comes out.
* ``rollout_buffer_example``: the rollout function that reads from the service.
"""
