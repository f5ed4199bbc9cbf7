"""The trainer's side of a weight push: ``gather`` makes whole tensors, ``plain_push`` sends them, ``updater`` decides
when and under which version.
"""
