"""DeepSeek sparse attention: GLM-5, GLM-5.2 and DeepSeek-V3.2.

glm5.py               the layers: our decoder block with its self-attention replaced
attention.py          latent attention over selected keys, in every parallel layout
indexer.py            selects the keys
sparse_attention.py   attention to the selected keys in plain torch
sparse_kernels.py     the same in Triton, and the indexer's scores
"""
