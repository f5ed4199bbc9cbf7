"""The write-ahead ledger: nothing lost, nothing trained twice.

    engine ─▶ response ─▶ finished ─▶ filtered | returned | handed ─▶ trained ─▶ saved ─▶ published
                            each is a record in an append-only segment file

``ledger`` is the rollout manager's observer.  ``journal`` writes records, with samples encoded by ``sample_codec``, to
files (``segments``); ``records`` and ``recovery`` restore them in the next process.
"""
