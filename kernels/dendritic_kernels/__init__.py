"Block-sparse attention for CPUs and NVIDIA GPUs."

from .attention import block_sparse_attention
from .lists import BlockLists

__all__ = ["BlockLists", "block_sparse_attention"]
