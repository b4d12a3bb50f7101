"""Matrix products: op.py implements torch's functions; each algorithm has a file of its own."""

from shardlib.ops.matmul import cannon, gathered_summa, matmul1d, matmul3d, ring, summa
from shardlib.ops.matmul.op import product, product_of

__all__ = [
    "cannon", "gathered_summa", "matmul1d", "matmul3d", "product", "product_of", "ring", "summa",
]  # fmt: skip
