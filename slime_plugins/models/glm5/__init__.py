"""DeepSeek sparse attention: GLM-5, GLM-5.2 and DeepSeek-V3.2.

glm5.py               the layers: our decoder block with its self-attention replaced
attention.py          latent attention over chosen keys, in every parallel layout
indexer.py            choosing the keys
sparse_attention.py   attention to the chosen keys: plain torch
sparse_kernels.py     the same in Triton, and the indexer's scores
"""
