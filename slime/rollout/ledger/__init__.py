"""The write-ahead ledger: nothing lost, nothing trained twice.

    engine ─▶ response ─▶ finished ─▶ filtered | returned | handed ─▶ trained ─▶ saved ─▶ published
                            each is a record in an append-only segment file

``ledger`` wraps the data source and is held by the rollout manager; ``journal`` writes records (``records``), samples
as bytes (``sample_codec``), into files (``segments``); ``recovery`` gives them to the next process.  The rollout
records what becomes of its groups in the journal of the run (``slime.rollout.run_state.RunState.journal``).
"""
