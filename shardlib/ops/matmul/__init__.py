"""Matrix products: op.py implements torch's functions; each algorithm has a file of its own."""

from shardlib.ops.matmul import cannon, matmul1d, matmul3d, ring, streamed, summa
from shardlib.ops.matmul.op import product, product_of

__all__ = ["cannon", "matmul1d", "matmul3d", "product", "product_of", "ring", "streamed", "summa"]
