"""The pool of KV blocks: who is free, who is shared, who may be found again by its hash.

Owns reference counts, the order of eviction and the hash index. Knows nothing of requests or
tensors; a block is a number.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class BlockPool:
    """`num_blocks` blocks, numbered from 0. A block is either referenced or in the free order.

    A free block that carries a hash still holds its contents and can be taken again by `acquire`;
    it is evicted only when no blank block is left, least recently released first.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._refs = [0] * num_blocks
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._by_hash: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self.num_cached = 0  # free blocks that still hold a findable prefix

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can hand out, those of the prefix cache included."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def refs(self, block: int) -> int:
        return self._refs[block]

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one reference each; the caller has made sure that they are free."""
        assert count <= len(self._free), (count, len(self._free))
        free, refs = self._free, self._refs
        blocks = []
        for _ in range(count):
            block, _ = free.popitem(last=False)
            block_hash = self._hash_of[block]
            if block_hash is not None:
                del self._by_hash[block_hash]
                self._hash_of[block] = None
                self.num_cached -= 1
            refs[block] = 1
            blocks.append(block)
        return blocks

    def find(self, block_hash: bytes) -> int | None:
        """The block that holds this content, referenced or free."""
        return self._by_hash.get(block_hash)

    def acquire(self, blocks: Iterable[int]) -> None:
        """One more reference each; free ones leave the order of eviction."""
        for block in blocks:
            if self._refs[block] == 0:
                del self._free[block]
                self.num_cached -= self._hash_of[block] is not None
            self._refs[block] += 1

    def num_acquirable(self, blocks: Iterable[int]) -> int:
        """How many of these are free now, so that acquiring them lowers `num_free`."""
        return sum(1 for block in blocks if self._refs[block] == 0)

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference each. The tail of a sequence goes first, so it is evicted first."""
        for block in reversed(blocks):
            self._refs[block] -= 1
            assert self._refs[block] >= 0, f"block {block} released twice"
            if self._refs[block] == 0:
                self._free[block] = None
                if self._hash_of[block] is None:
                    self._free.move_to_end(block, last=False)
                else:
                    self.num_cached += 1

    def register(self, block: int, block_hash: bytes) -> None:
        """Make a referenced block findable. Of two blocks with one content the first is kept."""
        assert self._refs[block] > 0, f"block {block} is free"
        if block_hash not in self._by_hash and self._hash_of[block] is None:
            self._by_hash[block_hash] = block
            self._hash_of[block] = block_hash

    def forget(self, block: int) -> None:
        """Take the block out of the index; it keeps its references."""
        block_hash = self._hash_of[block]
        if block_hash is not None:
            del self._by_hash[block_hash]
            self._hash_of[block] = None
            if self._refs[block] == 0:
                self._free.move_to_end(block, last=False)
                self.num_cached -= 1

    def clear_index(self) -> None:
        """Forget every prefix."""
        for block in list(self._by_hash.values()):
            self.forget(block)

    def check(self) -> None:
        """free + used = total, each block in exactly one state, the index one to one."""
        used = sum(1 for refs in self._refs if refs > 0)
        assert used + len(self._free) == self.num_blocks
        assert all(self._refs[block] == 0 for block in self._free)
        assert all(self._hash_of[block] == key for key, block in self._by_hash.items())
        assert len(self._by_hash) == sum(1 for key in self._hash_of if key is not None)
        assert self.num_cached == sum(1 for block in self._free if self._hash_of[block] is not None)
        blank = [self._hash_of[block] is None for block in self._free]
        assert blank == sorted(blank, reverse=True), "blank blocks are used before cached ones"
