"""Linear layers that read packed weights on a CPU.

Owns the packing and where it applies; the arithmetic is oneDNN's. A packed layer computes what the
`nn.Linear` it replaces computes, to the rounding of its dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

PACKED_DTYPES = (torch.bfloat16, torch.float32)
ROWS_HINT = 16  # oneDNN picks a blocked layout by row count; this one measured best from 1 to 256 rows


class PackedLinear(nn.Module):
    """y = x Wᵀ + b with W reordered once into oneDNN's blocked layout. x: [..., in], y: [..., out]."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = linear.weight  # the unpacked one, for whoever reads shapes or dtypes
        self.bias = linear.bias
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), ROWS_HINT)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


def can_pack(module: nn.Module) -> bool:
    """Whether packing is possible here: a CPU model in a dtype that oneDNN is built for."""
    weight = next(module.parameters())
    return (
        weight.device.type == "cpu"
        and weight.dtype in PACKED_DTYPES
        and torch.backends.mkldnn.is_available()
        and (weight.dtype != torch.bfloat16 or torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def pack_linears(module: nn.Module) -> int:
    """Replace every plain `nn.Linear` inside `module` by a packed one; returns how many."""
    count = 0
    for parent in module.modules():
        for name, child in parent.named_children():
            if type(child) is nn.Linear:
                setattr(parent, name, PackedLinear(child))
                count += 1
    return count
