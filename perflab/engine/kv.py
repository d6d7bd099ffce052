"""Which blocks hold which request's keys and values, and which of them others may share.

Owns block tables and block hashes; takes blocks from a `BlockPool`. Knows no tensors and no order
of requests. `PagedKV` is the real one; `NoKV` keeps nothing, so every step recomputes everything.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Iterable

from perflab.config import EngineConfig
from perflab.engine.blocks import BlockPool
from perflab.engine.sequence import Sequence

NEVER = 1 << 62


def root_hash(keys: Iterable[tuple[str, str]]) -> bytes:
    """Start of a hash chain from tagged extra keys (model, adapter, salt, tenant, …).

    Tag and value are length-prefixed, so ("adapter", "x") and ("salt", "x") never meet.
    """
    digest = hashlib.blake2b(digest_size=16)
    for tag, value in sorted(keys):
        for part in (tag.encode(), value.encode()):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
    return digest.digest()


def block_hash(parent: bytes, token_ids: Iterable[int]) -> bytes:
    """128-bit BLAKE2b of the parent block's hash and this block's tokens."""
    return hashlib.blake2b(parent + array("q", token_ids).tobytes(), digest_size=16).digest()


class PagedKV:
    """Block tables over one pool. Allocation is all or nothing and comes before any change."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        prefix_cache: bool = True,
        keys: tuple[tuple[str, str], ...] = (),
    ) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self._keys = keys
        self._dirty: list[int] = []

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    @property
    def capacity_tokens(self) -> int:
        return self.pool.num_blocks * self.block_size

    def find_prefix(self, seq: Sequence) -> list[int]:
        """Blocks of the longest cached prefix; at least one token is left to compute."""
        if not self.prefix_cache or seq.scores_prompt:
            return []
        found = []
        for index in range((len(seq.tokens) - 1) // self.block_size):
            block = self.pool.find(self._hash(seq, index))
            if block is None:
                break
            found.append(block)
        return found

    def admit(self, seq: Sequence, prefix: list[int], num_tokens: int, reserve: int = 0) -> bool:
        """Give `seq` the cached `prefix` and room for `num_tokens`; False changes nothing.

        `reserve` blocks must stay free.
        """
        new = self.blocks_for(num_tokens) - len(prefix)
        if new + reserve > self.pool.num_free - self.pool.num_acquirable(prefix):
            return False
        self.pool.acquire(prefix)
        seq.block_table = [*prefix, *self.pool.allocate(new)]
        seq.capacity = len(seq.block_table) * self.block_size
        seq.num_computed_tokens = len(prefix) * self.block_size
        seq.num_registered = len(prefix)
        seq.next_boundary = (len(prefix) + 1) * self.block_size if self.prefix_cache else NEVER
        return True

    def fits_without(
        self, others: Iterable[Sequence], prefix: list[int], num_tokens: int, reserve: int = 0
    ) -> bool:
        """Whether `admit` would succeed if `others` gave their blocks back."""
        held = Counter(block for seq in others for block in seq.block_table)
        freed = {block for block, count in held.items() if self.pool.refs(block) == count}
        kept = self.pool.num_acquirable(prefix) + len(freed.intersection(prefix))
        new = self.blocks_for(num_tokens) - len(prefix)
        return new + reserve <= self.pool.num_free + len(freed) - kept

    def grow(self, seq: Sequence, num_tokens: int) -> bool:
        """Room for `num_tokens` in all; False changes nothing."""
        new = self.blocks_for(num_tokens) - len(seq.block_table)
        if new > self.pool.num_free:
            return False
        if new > 0:
            seq.block_table.extend(self.pool.allocate(new))
            seq.capacity = len(seq.block_table) * self.block_size
        return True

    def shrink(self, seq: Sequence, num_tokens: int) -> None:
        """Give back the blocks beyond those of `num_tokens`."""
        keep = self.blocks_for(num_tokens)
        if keep < len(seq.block_table):
            self.pool.release(seq.block_table[keep:])
            del seq.block_table[keep:]
            seq.capacity = keep * self.block_size

    def register(self, seq: Sequence) -> None:
        """Make the blocks that became full and computed findable."""
        full = seq.num_computed_tokens // self.block_size
        for index in range(seq.num_registered, full):
            self.pool.register(seq.block_table[index], self._hash(seq, index))
        seq.num_registered = full
        seq.next_boundary = (full + 1) * self.block_size

    def settle(self, seq: Sequence) -> None:
        """Called once a step for each computed row, after its counter moved."""
        if seq.num_computed_tokens >= seq.next_boundary:
            self.register(seq)

    def free(self, seq: Sequence, *, discard: bool = False) -> None:
        """Give all blocks back. `discard` also forgets what nobody else uses: it may be broken."""
        # Taken from the request first: an interrupt in here must not make a second call release twice.
        blocks, seq.block_table, seq.capacity = seq.block_table, [], 0
        if discard:
            own = [block for block in blocks if self.pool.refs(block) == 1]
            for block in own:
                self.pool.forget(block)
            self._dirty.extend(own)
        self.pool.release(blocks)

    def take_dirty(self) -> list[int]:
        """Blocks whose contents must be wiped before they are used again."""
        dirty, self._dirty = self._dirty, []
        return dirty

    def _hash(self, seq: Sequence, index: int) -> bytes:
        hashes = seq.block_hashes
        size = self.block_size
        while len(hashes) <= index:
            start = len(hashes) * size
            parent = hashes[-1] if hashes else root_hash((*self._keys, *seq.request.cache_keys))
            hashes.append(block_hash(parent, seq.tokens[start : start + size]))
        return hashes[index]

    def check(self, running: Iterable[Sequence] = ()) -> None:
        """Every reference belongs to a running sequence, every computed token has a block."""
        self.pool.check()
        count: dict[int, int] = {}
        for seq in running:
            assert seq.capacity == len(seq.block_table) * self.block_size
            assert seq.num_computed_tokens <= seq.capacity
            assert len(set(seq.block_table)) == len(seq.block_table)
            for block in seq.block_table:
                count[block] = count.get(block, 0) + 1
        for block in range(self.pool.num_blocks):
            assert self.pool.refs(block) == count.get(block, 0), f"block {block} leaked or shared wrongly"


class NoKV:
    """No cache: nothing is kept between steps, so nothing is allocated and nothing can run out."""

    block_size = 0
    capacity_tokens = NEVER

    def __init__(self) -> None:
        self.pool = BlockPool(0)

    def blocks_for(self, num_tokens: int) -> int:
        return 0

    def find_prefix(self, seq: Sequence) -> list[int]:
        return []

    def admit(self, seq: Sequence, prefix: list[int], num_tokens: int, reserve: int = 0) -> bool:
        seq.capacity = NEVER
        seq.next_boundary = 0
        return True

    def fits_without(
        self, others: Iterable[Sequence], prefix: list[int], num_tokens: int, reserve: int = 0
    ) -> bool:
        return True

    def grow(self, seq: Sequence, num_tokens: int) -> bool:
        return True

    def shrink(self, seq: Sequence, num_tokens: int) -> None:
        pass

    def settle(self, seq: Sequence) -> None:
        seq.num_computed_tokens = 0

    def free(self, seq: Sequence, *, discard: bool = False) -> None:
        seq.capacity = 0

    def take_dirty(self) -> list[int]:
        return []

    def check(self, running: Iterable[Sequence] = ()) -> None:
        assert all(seq.num_computed_tokens == 0 for seq in running)


def make_kv(config: EngineConfig, fingerprint: str) -> PagedKV | NoKV:
    """What a resolved configuration asks for. fingerprint: of the model, whose blocks no other may share."""
    if not config.kv_cache:
        return NoKV()
    assert config.num_blocks is not None, "the configuration is not resolved"
    return PagedKV(
        config.num_blocks,
        config.block_size,
        prefix_cache=config.prefix_cache,
        keys=(("model", fingerprint),),
    )
