"""PyTorch's own dense attention on a CPU, for lists that keep every block: then it is the fastest."""

import torch
from torch import Tensor


def fits(q: Tensor, k: Tensor, row_counts: Tensor, spans: Tensor | None, gate: Tensor | None) -> bool:
    plain = gate is None and spans is None and q.shape[1] == k.shape[1] and q.dtype == torch.float32
    return plain and bool((row_counts == row_counts.shape[-1]).all())


def _rows(*tensors: Tensor) -> list[Tensor]:
    return [x if x.stride(-1) == 1 else x.contiguous() for x in tensors]


def forward(q: Tensor, k: Tensor, v: Tensor, row_counts: Tensor, row_index: Tensor, spans: None, gate: None,
            block_size: int, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    "Output like q, and the logarithm of the weights' sum (batch, heads, seq)."
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*_rows(q, k, v), 0.0, causal, scale=scale)
    return out, lse.contiguous()


def backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, row_counts: Tensor,
             row_index: Tensor, spans: None,
             gate: None, audit_counts: None, audit_index: None, block_size: int, causal: bool,
             scale: float) -> tuple[Tensor, Tensor, Tensor, None]:
    "Gradients of q, k and v."
    given = grad.contiguous(), *_rows(q, k, v, out), lse
    grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(*given, 0.0, causal, scale=scale)
    return *(x.contiguous() for x in grads), None
