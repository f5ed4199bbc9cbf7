"""The write-ahead ledger: nothing lost, nothing trained twice.

    engine ─▶ response ─▶ finished ─▶ filtered | returned | handed ─▶ trained ─▶ saved ─▶ published
                            each is a record in an append-only segment file

``ledger`` is the observer that the rollout manager holds; ``journal`` writes records (``records``), samples as bytes
(``sample_codec``), into files (``segments``); ``recovery`` gives them to the next process.
"""
