"""The memory that block numbers stand for: keys and values of all layers.

Owns the tensors, [layer, block, kv_head, position, head_dim]. Knows nothing of requests. One more
block than the pool has is kept as zeros; padding points at it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from perflab.models.runner import KVShape


class KVTensors:
    """Keys and values for `num_blocks` blocks of `block_size` tokens; in int8, with fp32 scales
    [layer, block, kv_head, position] that only native kernels write and read.

    native: only native kernels will use it; where sizes allow it they then keep a block's values in an
    order of their own (`tiled`, see `kernels.h`), which they read in place.
    """

    key_scale: Tensor | None = None
    value_scale: Tensor | None = None

    def __init__(
        self,
        shape: KVShape,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        native: bool = False,
    ) -> None:
        self._native = native
        sizes = (block_size, shape.key_dim, shape.value_dim)
        self.tiled = native and dtype != torch.int8 and all(size % 16 == 0 for size in sizes)
        self.shape, self.block_size, self.null_block = shape, block_size, num_blocks
        size = (shape.layers, num_blocks + 1, shape.kv_heads, block_size)
        self.key = _zeros((*size, shape.key_dim), dtype, device)
        self.value = _zeros((*size, shape.value_dim), dtype, device)
        if dtype == torch.int8:
            self.key_scale = _zeros(size, torch.float32, device)
            self.value_scale = _zeros(size, torch.float32, device)
        self._heads = torch.arange(shape.kv_heads, device=device)

    def like(self, num_blocks: int) -> KVTensors:
        """Memory of its own for `num_blocks` blocks, of the same shape, type and order."""
        return KVTensors(
            self.shape, num_blocks, self.block_size, self.key.dtype, self.key.device, native=self._native
        )

    def slots(self, block: np.ndarray, offset: np.ndarray) -> Tensor:
        """Flat positions [kv_heads · T] of tokens at (block, offset), int64 [T] each, for `write`."""
        rows = block[None] * self.shape.kv_heads + np.arange(self.shape.kv_heads)[:, None]
        return torch.from_numpy((rows * self.block_size + offset[None]).reshape(-1)).to(self.key.device)

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """key, value: [kv_heads, T, dim]."""
        _rows(self.key[layer]).index_copy_(0, slots, key.reshape(-1, key.shape[-1]))
        _rows(self.value[layer]).index_copy_(0, slots, value.reshape(-1, value.shape[-1]))

    def table_index(self, table: Tensor) -> Tensor:
        """Flat block rows [B · kv_heads · n] of block tables [B, n], for `gather`."""
        return (table[:, None] * self.shape.kv_heads + self._heads[None, :, None]).flatten()

    def gather(self, layer: int, index: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """Keys and values of `rows` block tables, each [rows, kv_heads, positions, dim]."""
        heads = self.shape.kv_heads
        key = self.key[layer].flatten(0, 1).index_select(0, index)
        value = self.value[layer].flatten(0, 1).index_select(0, index)
        return (
            key.view(rows, heads, -1, self.shape.key_dim),
            value.view(rows, heads, -1, self.shape.value_dim),
        )

    def wipe(self, blocks: Sequence[int]) -> None:
        """Zero what a failed request wrote: masked positions must still be finite."""
        index = torch.tensor(blocks, device=self.key.device)
        self.key[:, index] = 0
        self.value[:, index] = 0


def _zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """On a CPU through numpy, whose zeros cost neither time nor memory until they are touched."""
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(size) * dtype.itemsize, np.uint8)).view(dtype).view(size)


def _rows(tensor: Tensor) -> Tensor:
    return tensor.view(-1, tensor.shape[-1])
