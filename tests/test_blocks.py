"""The block pool under random schedules, and hashes that cannot be confused."""

from __future__ import annotations

import random

import pytest

from perflab.engine.blocks import BlockPool
from perflab.engine.kv import PagedKV, block_hash, root_hash
from perflab.engine.sequence import Sequence
from perflab.types import Request, RequestRecord


@pytest.mark.parametrize("seed", range(5))
def test_ten_thousand_random_operations_keep_every_invariant(seed: int) -> None:
    rng = random.Random(seed)
    pool = BlockPool(24)
    held: list[list[int]] = []
    contents: dict[int, bytes] = {}
    names = iter(range(10**9))
    for step in range(10_000):
        action = rng.choice(("allocate", "share", "release", "register", "forget", "find"))
        if action == "allocate":
            count = rng.randint(0, 5)
            if count <= pool.num_free:
                blocks = pool.allocate(count)
                assert len(set(blocks)) == count
                assert not any(block in other for block in blocks for other in held)
                for block in blocks:
                    contents.pop(block, None)
                held.append(blocks)
        elif action == "share" and held:
            blocks = rng.choice(held)
            pool.acquire(blocks)
            held.append(list(blocks))
        elif action == "release" and held:
            pool.release(held.pop(rng.randrange(len(held))))
        elif action == "register" and held:
            blocks = rng.choice(held)
            if blocks:
                name = str(next(names)).encode()
                block = rng.choice(blocks)
                if block not in contents:
                    contents[block] = name
                    pool.register(block, name)
        elif action == "forget" and contents:
            block = rng.choice(list(contents))
            del contents[block]
            pool.forget(block)
        elif action == "find" and contents:
            block = rng.choice(list(contents))
            found = pool.find(contents[block])
            assert found == block, "a block is findable until it is allocated again or forgotten"
            pool.acquire([found])
            held.append([found])
        if step % 10 == 0:
            pool.check()
            assert pool.num_used == len({block for blocks in held for block in blocks})
    for blocks in held:
        pool.release(blocks)
    pool.check()
    assert pool.num_free == pool.num_blocks


def test_blank_blocks_go_before_cached_ones_and_the_tail_before_the_head() -> None:
    pool = BlockPool(6)
    blocks = pool.allocate(4)
    for index, block in enumerate(blocks):
        pool.register(block, bytes([index]))
    pool.release(blocks)
    assert pool.num_cached == 4
    assert set(pool.allocate(2)).isdisjoint(blocks)
    assert pool.allocate(3) == [blocks[3], blocks[2], blocks[1]]
    assert pool.find(bytes([0])) == blocks[0]
    assert pool.find(bytes([3])) is None


def test_a_block_released_twice_is_a_bug_that_shows() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(blocks)


def _sequence(tokens: list[int], keys: tuple[tuple[str, str], ...] = ()) -> Sequence:
    request = Request("r", tokens, cache_keys=keys)
    return Sequence(request, RequestRecord("r", 0, 0, len(tokens)), max_len=len(tokens) + 8)


def _cached_prefix(kv: PagedKV, tokens: list[int], keys: tuple[tuple[str, str], ...] = ()) -> int:
    """Run a sequence through the cache; how many blocks it found there."""
    seq = _sequence(tokens, keys)
    found = kv.find_prefix(seq)
    assert kv.admit(seq, found, len(tokens))
    seq.num_computed_tokens = len(tokens)
    kv.register(seq)
    kv.check([seq])
    kv.free(seq)
    return len(found)


def test_tokens_that_collide_under_a_polynomial_hash_are_told_apart() -> None:
    kv = PagedKV(32, 4)
    tokens = [10, 20, 30, 40, 1]
    collides = [10, 20 + 1, 30 - 31, 40, 1]
    assert _cached_prefix(kv, tokens) == 0
    assert _cached_prefix(kv, collides) == 0
    assert _cached_prefix(kv, tokens) == 1


def test_a_tag_is_part_of_a_key_so_an_adapter_never_meets_a_salt_of_its_name() -> None:
    kv = PagedKV(64, 4)
    tokens = list(range(9))
    kinds = [(), (("salt", "x"),), (("adapter", "x"),), (("tenant", "x"),), (("salt", "x"), ("adapter", "x"))]
    assert [_cached_prefix(kv, tokens, keys) for keys in kinds] == [0] * len(kinds)
    assert [_cached_prefix(kv, tokens, keys) for keys in kinds] == [2] * len(kinds)
    assert root_hash([("a", "bc")]) != root_hash([("ab", "c")])
    assert root_hash([("a", "b"), ("c", "d")]) == root_hash([("c", "d"), ("a", "b")])


def test_models_do_not_share_blocks() -> None:
    first, second = (PagedKV(8, 4, keys=(("model", name),)) for name in ("fp32", "int8"))
    seq = _sequence(list(range(9)))
    other = _sequence(list(range(9)))
    assert first._hash(seq, 0) != second._hash(other, 0)


def test_a_block_hash_depends_on_all_that_came_before() -> None:
    root = root_hash([])
    assert block_hash(block_hash(root, [1]), [2]) != block_hash(block_hash(root, [3]), [2])
    assert len(block_hash(root, [1])) == 16


def test_at_least_one_token_is_left_to_compute() -> None:
    kv = PagedKV(32, 4)
    tokens = list(range(8))
    assert _cached_prefix(kv, tokens) == 0
    assert _cached_prefix(kv, tokens) == 1, "8 tokens are two blocks, the last one is computed again"
    assert _cached_prefix(kv, [*tokens, 9]) == 2


def test_admission_is_all_or_nothing() -> None:
    kv = PagedKV(4, 4)
    assert _cached_prefix(kv, list(range(9))) == 0
    seq = _sequence([*range(8), *range(100, 112)])
    prefix = kv.find_prefix(seq)
    assert len(prefix) == 2
    assert not kv.admit(seq, prefix, 20)
    assert seq.block_table == []
    kv.pool.check()
    assert kv.pool.num_used == 0
