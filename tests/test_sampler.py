"""The sampler draws from exactly the documented distribution, row by row, whoever shares the batch."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from perflab.engine.logits import adjust, check_params, top_ids, truncated
from perflab.engine.sampler import draw, prompt_logprobs, sample, uniform
from perflab.types import SamplingParams

INF = math.inf
PROMPT = [0, 1, 1, 2]
OUTPUT = [2, 3, 3, 3]


@dataclass
class Row:
    params: SamplingParams
    seed: int = 0
    tokens: tuple[int, ...] = (*PROMPT, *OUTPUT)
    num_prompt_tokens: int = len(PROMPT)
    stop_token_ids: tuple[int, ...] = ()


def exact(logits: list[float], row: Row, nudge: float = 0.0) -> dict[int, float]:
    """The documented distribution in the plainest way there is, over the tokens it can give.

    `nudge` is added to top_p: what float32 may get wrong where a cumulative probability all but equals it.
    """
    p = row.params
    x = list(logits)
    output = row.tokens[row.num_prompt_tokens :]
    for i in range(len(x)):
        x[i] += p.logit_bias.get(i, 0.0)
        if i in row.tokens:
            x[i] = x[i] / p.repetition_penalty if x[i] > 0 else x[i] * p.repetition_penalty
        if i in output:
            x[i] -= p.presence_penalty + p.frequency_penalty * output.count(i)
        if i in row.stop_token_ids and len(output) < p.min_tokens:
            x[i] = -INF
    ranked = sorted(range(len(x)), key=lambda i: (-x[i], i))
    if p.temperature == 0:
        return {ranked[0]: 1.0}
    kept = ranked[: p.top_k or len(x)]
    weight = {i: math.exp((x[i] - x[ranked[0]]) / p.temperature) for i in kept}
    total = math.fsum(weight.values())
    if p.top_p < 1:
        reached = list(itertools.accumulate(weight[i] / total for i in kept))
        kept = kept[: 1 + sum(share < p.top_p + nudge for share in reached)]
    kept = [i for i in kept if weight[i] >= p.min_p]
    total = math.fsum(weight[i] for i in kept)
    return {i: weight[i] / total for i in kept if weight[i] > 0}


def chi_square(counts: Counter[int], probabilities: dict[int, float]) -> float:
    """Pearson's statistic over its critical value at 1e-6 (Wilson and Hilferty 1931); above 1: rejected."""
    if set(counts) - set(probabilities):
        return INF
    draws = sum(counts.values())
    statistic = sum((counts[i] - draws * p) ** 2 / (draws * p) for i, p in probabilities.items())
    df = max(1, len(probabilities) - 1)
    return statistic / (df * (1 - 2 / (9 * df) + 4.753 * math.sqrt(2 / (9 * df))) ** 3)


def draws(logits: torch.Tensor, row: Row, count: int = 20_000) -> Counter[int]:
    """Tokens over many seeds, at each of several positions of the output."""
    counts: Counter[int] = Counter()
    for position in range(4):
        tokens = row.tokens[: row.num_prompt_tokens] + OUTPUT_OF_LENGTH[position]
        rows = [
            Row(row.params, seed, tokens, row.num_prompt_tokens, row.stop_token_ids)
            for seed in range(count // 4)
        ]
        result = sample(logits.expand(len(rows), -1), rows)
        assert result.bad_rows == []
        counts.update(result.token_ids)
    return counts


OUTPUT_OF_LENGTH = [(), (3,), (3, 3), (3, 3, 2)]
LOGITS = [1.2, 2.0, 0.3, -0.5, 1.9, -3.0, 0.0, 1.2, -1.0, 2.2]

OPTIONS = {
    "temperature": SamplingParams(temperature=1.0),
    "cold": SamplingParams(temperature=0.4),
    "hot": SamplingParams(temperature=3.0),
    "top_k": SamplingParams(temperature=1.0, top_k=4),
    "top_p": SamplingParams(temperature=1.0, top_p=0.7),
    "min_p": SamplingParams(temperature=1.0, min_p=0.3),
    "combined": SamplingParams(temperature=1.5, top_k=7, top_p=0.9, min_p=0.3),
    "logit_bias": SamplingParams(temperature=1.0, logit_bias={1: -INF, 5: 4.0, 9: -1.0}),
    "min_tokens": SamplingParams(temperature=1.0, min_tokens=9),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_draws_follow_the_exact_distribution(name: str) -> None:
    row = Row(OPTIONS[name], stop_token_ids=(9, 4))
    counts = draws(torch.tensor([LOGITS]), row)
    assert chi_square(counts, exact(LOGITS, row)) < 1


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("temperature", SamplingParams(temperature=1.1)),
        ("cold", SamplingParams(temperature=0.44)),
        ("hot", SamplingParams(temperature=2.5)),
        ("top_k", SamplingParams(temperature=1.0, top_k=5)),
        ("top_p", SamplingParams(temperature=1.0, top_p=0.8)),
        ("min_p", SamplingParams(temperature=1.0, min_p=0.4)),
        ("combined", SamplingParams(temperature=1.5, top_k=7, top_p=0.9)),
        ("logit_bias", SamplingParams(temperature=1.0, logit_bias={1: -INF, 5: 4.0})),
        ("min_tokens", SamplingParams(temperature=1.0)),
    ],
)
def test_draws_from_a_wrong_distribution_are_rejected(name: str, wrong: SamplingParams) -> None:
    counts = draws(torch.tensor([LOGITS]), Row(wrong, stop_token_ids=(9, 4)))
    assert chi_square(counts, exact(LOGITS, Row(OPTIONS[name], stop_token_ids=(9, 4)))) > 1


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0, repetition_penalty=1.5),
        SamplingParams(temperature=1.0, presence_penalty=1.0),
        SamplingParams(temperature=1.0, frequency_penalty=0.7),
        SamplingParams(
            temperature=0.8,
            repetition_penalty=1.3,
            presence_penalty=0.5,
            frequency_penalty=-0.4,
            logit_bias={0: -2.0, 3: 1.0},
            top_p=0.95,
        ),
    ],
)
def test_penalties_draw_the_exact_distribution_and_not_the_plain_one(params: SamplingParams) -> None:
    logits = torch.tensor([LOGITS])
    counts = Counter(
        sample(logits.expand(20_000, -1), [Row(params, seed) for seed in range(20_000)]).token_ids
    )
    assert chi_square(counts, exact(LOGITS, Row(params))) < 1
    assert chi_square(counts, exact(LOGITS, Row(SamplingParams(temperature=1.0)))) > 1


def test_draws_over_a_vocabulary_of_many_blocks() -> None:
    vocab = 5003  # no multiple of the block
    logits = torch.linspace(0, 6, vocab)
    logits[2000:2300] = -INF  # more than one whole block without weight
    counts = draws(logits[None], Row(SamplingParams(temperature=1.0)))
    weights = logits.double().exp()
    bins = torch.arange(vocab) // 100
    p = torch.zeros(51, dtype=torch.double).index_add_(0, bins, weights / weights.sum()).tolist()
    binned = Counter(token // 100 for token in counts.elements())
    assert chi_square(binned, {i: q for i, q in enumerate(p) if q > 0}) < 1


@pytest.mark.parametrize("count", [5, 2000])
def test_a_token_without_weight_is_never_drawn_even_at_the_ends(count: int) -> None:
    weights = np.zeros(count, dtype=np.float32)
    weights[2] = weights[3] = 1.0
    assert draw(None, weights, 0.0) == 2
    assert draw(None, weights, 1.0 - 2.0**-53) == 3
    assert draw(None, weights, 1.0) == 3  # rounding of u * total may reach the total
    assert draw(np.arange(count) * 7, weights, 0.0) == 14


@pytest.mark.parametrize("count", [40, 1024, 1025, 5003])
def test_a_draw_inverts_the_cumulative_distribution(count: int) -> None:
    rng = np.random.default_rng(count)
    weights = rng.integers(0, 4, count).astype(np.float32)  # sums that float32 holds exactly
    weights[count // 3 : count // 2] = 0
    ends = np.cumsum(weights, dtype=np.float64)
    for u in rng.random(300):
        assert draw(None, weights, u) == np.searchsorted(ends, u * ends[-1], side="right")


# Random numbers


def test_uniform_takes_any_integers_and_tells_them_apart() -> None:
    seeds = [0, 1, -1, 2**63, 2**64 - 1, 2**64, 2**64 + 1, -(2**64), 2**300, 10**5000]
    keys = list(itertools.product(seeds, [0, 1, 2, 2**40], [0, 1]))
    values = [uniform(*key) for key in keys]
    assert all(0.0 <= value < 1.0 for value in values)
    assert len(set(values)) == len(keys)
    assert values == [uniform(*key) for key in reversed(keys)][::-1]
    assert uniform(np.int64(7), np.int32(3)) == uniform(7, 3)  # type: ignore[arg-type]


def test_uniform_is_the_same_everywhere() -> None:
    """A stored seed has to give the same text in every version and on every machine."""
    assert [uniform(0, 0), uniform(42, 7), uniform(-1, 0, 1)] == pytest.approx(
        [0.9941808189160931, 0.40722456314449473, 0.8255294194031582], abs=1e-15
    )


@pytest.mark.parametrize("axis", ["seed", "position", "stream"])
def test_uniform_is_uniform_and_uncorrelated_along_each_argument(axis: str) -> None:
    values = [uniform(**({"seed": 5, "position": 3} | {axis: i})) for i in range(20_000)]
    counts = Counter(int(value * 20) for value in values)
    assert chi_square(counts, dict.fromkeys(range(20), 1 / 20)) < 1
    pairs = Counter((int(a * 5), int(b * 5)) for a, b in itertools.pairwise(values))
    keys = list(itertools.product(range(5), range(5)))
    assert (
        chi_square(Counter({keys.index(k): n for k, n in pairs.items()}), dict.fromkeys(range(25), 1 / 25))
        < 1
    )


# Each step against the plain reference


@st.composite
def random_params(draw_: st.DrawFn, vocab: int) -> SamplingParams:
    return SamplingParams(
        temperature=draw_(st.sampled_from([0.0, 1e-40, 1e-6, 0.3, 1.0, 2.5, 1e6])),
        top_k=draw_(st.sampled_from([0, 1, 2, 5, vocab // 2, vocab, vocab + 7])),
        top_p=draw_(st.sampled_from([1.0, 1e-9, 0.1, 0.5, 0.9, 0.999, 1 - 1e-12])),
        min_p=draw_(st.sampled_from([0.0, 1e-4, 0.1, 0.9, 1.0])),
        repetition_penalty=draw_(st.sampled_from([1.0, 0.5, 2.0])),
        presence_penalty=draw_(st.sampled_from([0.0, 0.5, -2.0])),
        frequency_penalty=draw_(st.sampled_from([0.0, 0.25, -1.0])),
        logit_bias=draw_(
            st.dictionaries(st.integers(0, vocab - 1), st.sampled_from([-INF, -2.0, 3.0]), max_size=3)
        ),
        min_tokens=draw_(st.sampled_from([0, 4, 9])),
        logprobs=draw_(st.sampled_from([None, 0, 3])),
    )


@settings(max_examples=150, deadline=None)
@given(data=st.data(), vocab=st.sampled_from([4, 9, 300, 3001]), seed=st.integers(0, 10**6))
def test_the_kept_tokens_are_those_of_the_plain_reference(data: st.DataObject, vocab: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    # multiples of 1/4 and few of them: ties everywhere, and sums that float32 holds exactly
    x = (rng.integers(-12, 13, vocab) / 4).astype(np.float32)
    row = Row(data.draw(random_params(vocab)), seed, stop_token_ids=(1, 2, vocab + 5, -1))
    adjusted = adjust(x, row)
    if not np.isfinite(adjusted.max()) or row.params.temperature == 0:
        return
    ids, weights = truncated(adjusted, row.params)
    ids = np.arange(vocab) if ids is None else ids
    assert (np.diff(ids) > 0).all()
    total = float(weights.sum(dtype=np.float64))
    got = {int(i): float(w) / total for i, w in zip(ids, weights, strict=True) if w > 1e-20 * total}
    want, fewest, most = (
        {i: p for i, p in exact(x.tolist(), row, nudge).items() if p > 1e-20} for nudge in (0.0, -1e-5, 1e-5)
    )
    assert fewest.keys() <= got.keys() <= most.keys()
    if got.keys() == want.keys():
        assert got == pytest.approx(want, rel=1e-4)


def test_a_nucleus_ends_where_its_share_is_reached_and_prefers_lower_ids_among_equals() -> None:
    x = np.zeros(10, dtype=np.float32)
    for share, kept in ((0.05, 1), (0.1, 1), (0.3, 3), (0.31, 4), (0.9, 9), (0.95, 10)):
        ids, weights = truncated(x, SamplingParams(temperature=1.0, top_p=share))
        assert ids is not None
        assert ids.tolist() == list(range(kept))
        assert weights.tolist() == [1.0] * kept
    ids, _ = truncated(x, SamplingParams(temperature=1.0, top_k=3))
    assert ids is not None
    assert ids.tolist() == [0, 1, 2]


@pytest.mark.parametrize("vocab", [7, 1024, 2049, 5000, 49_152])
@pytest.mark.parametrize("k", [1, 5, 20, 700, 10**6])
def test_top_ids_equal_a_stable_sort(vocab: int, k: int) -> None:
    rng = np.random.default_rng(vocab + k)
    for spread in (1000, 3, 1):
        x = (rng.integers(0, spread, vocab) / 8).astype(np.float32)
        x[rng.integers(0, vocab, vocab // 4)] = -INF
        assert top_ids(x, k).tolist() == np.argsort(-x, kind="stable")[:k].tolist()


def test_operations_come_in_the_documented_order() -> None:
    # Bias first: it makes the logit positive, so the repetition penalty divides it. min_tokens comes
    # after bias: no bias brings a masked end token back.
    row = Row(
        SamplingParams(
            logit_bias={0: 3.0, 1: 100.0}, repetition_penalty=2.0, presence_penalty=0.5, min_tokens=9
        ),
        tokens=(2, 0),
        num_prompt_tokens=1,
        stop_token_ids=(1,),
    )
    raw = np.array([-1.0, 0.0, -1.0, 0.25], dtype=np.float32)
    assert adjust(raw, row).tolist() == [0.5, -INF, -2.0, 0.25]
    assert raw.tolist() == [-1.0, 0.0, -1.0, 0.25]


def test_penalties_read_prompt_and_output_as_documented() -> None:
    x = np.ones(5, dtype=np.float32)
    assert adjust(x, Row(SamplingParams(repetition_penalty=2.0))).tolist() == [0.5, 0.5, 0.5, 0.5, 1.0]
    assert adjust(x, Row(SamplingParams(presence_penalty=0.25))).tolist() == [1.0, 1.0, 0.75, 0.75, 1.0]
    assert adjust(x, Row(SamplingParams(frequency_penalty=0.25))).tolist() == [1.0, 1.0, 0.75, 0.25, 1.0]
    fresh = Row(SamplingParams(frequency_penalty=2.0), tokens=(1, 2), num_prompt_tokens=2)
    assert adjust(x, fresh).tolist() == x.tolist()


# Greedy, and the fast path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_greedy_takes_the_first_of_the_most_likely_tokens(dtype: torch.dtype) -> None:
    logits = (torch.randn(9, 1000, generator=torch.Generator().manual_seed(0)) * 2).to(dtype)
    logits[3, 700] = logits[3, 31] = 50.0
    before = logits.clone()
    # a logprob sends every second row the long way
    rows = [Row(SamplingParams(logprobs=0 if i % 2 else None)) for i in range(9)]
    assert sample(logits, rows).token_ids == [int(r.float().numpy().argmax()) for r in logits]
    assert sample(logits, rows).token_ids[3] == 31
    assert torch.equal(before, logits)


def test_a_temperature_near_zero_is_greedy_and_does_not_overflow() -> None:
    logits = torch.tensor([[1e30, -1e30, 3e30, -INF], [0.0, -1.0, 1e-3, 1e-3 - 1e-6]])
    for temperature in (1e-9, 1e-40, 5e-324):
        result = sample(logits, [Row(SamplingParams(temperature=temperature), seed) for seed in (1, 2)])
        assert result.token_ids == [2, 2]
        assert result.bad_rows == []


def test_an_infinite_temperature_is_uniform_over_what_is_not_masked() -> None:
    row = Row(SamplingParams(temperature=INF, logit_bias={2: -INF}))
    counts = draws(torch.tensor([[5.0, -5.0, 9.0, 0.0]]), row, 4000)
    assert chi_square(counts, {0: 1 / 3, 1: 1 / 3, 3: 1 / 3}) < 1


def test_an_end_token_waits_for_min_tokens() -> None:
    logits = torch.tensor([[0.0, 5.0, 4.0, 3.0]])
    params = SamplingParams(min_tokens=2)
    for output, want in (((), 3), ((0,), 3), ((0, 0), 1)):
        row = Row(params, tokens=(0, *output), num_prompt_tokens=1, stop_token_ids=(1, 2, 99, -1))
        assert sample(logits, [row]).token_ids == [want]


def test_no_rows() -> None:
    assert sample(torch.empty(0, 5), []) == ([], [], [])


# Rows that cannot be sampled

BAD = {
    "nan": [0.0, math.nan, 1.0],
    "inf": [0.0, INF, 1.0],
    "all masked": [-INF, -INF, -INF],
    "all nan": [math.nan] * 3,
    "nan and inf": [INF, math.nan, -INF],
}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(logprobs=2),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=1.0, top_k=2, top_p=0.5, min_p=0.1, logprobs=1),
        SamplingParams(repetition_penalty=1.5, presence_penalty=1.0, logit_bias={0: 1.0}),
    ],
)
def test_a_bad_row_is_named_and_its_mates_are_untouched(bad: str, params: SamplingParams) -> None:
    good = [[1.0, 2.0, 3.0], [3.0, 2.0, -INF]]
    rows = [Row(params, seed, tokens=(0, 1), num_prompt_tokens=1) for seed in (1, 2, 3)]
    mixed = sample(torch.tensor([good[0], BAD[bad], good[1]]), rows)
    alone = sample(torch.tensor(good), [rows[0], rows[2]])
    assert mixed.bad_rows == [1]
    assert alone.bad_rows == []
    assert [mixed.token_ids[0], mixed.token_ids[2]] == alone.token_ids
    assert [mixed.logprobs[0], mixed.logprobs[2]] == alone.logprobs
    assert mixed.logprobs[1] is None


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_whose_every_token_is_masked_by_its_own_parameters_is_bad(temperature: float) -> None:
    banned = SamplingParams(temperature=temperature, logit_bias=dict.fromkeys(range(4), -INF), logprobs=1)
    waiting = SamplingParams(temperature=temperature, min_tokens=200)
    rows = [
        Row(banned),
        Row(waiting, stop_token_ids=(0, 1, 2, 3)),
        Row(SamplingParams(temperature=temperature)),
    ]
    assert sample(torch.zeros(3, 4), rows).bad_rows == [0, 1]


# Batch mates


@settings(max_examples=60, deadline=None)
@given(data=st.data(), vocab=st.sampled_from([11, 2003, 4099]), seed=st.integers(0, 10**6))
def test_a_row_does_not_depend_on_its_mates_or_its_place(data: st.DataObject, vocab: int, seed: int) -> None:
    count = 6
    logits = torch.randn(count, vocab, generator=torch.Generator().manual_seed(seed)) * 3
    rows = [
        Row(data.draw(random_params(vocab)), data.draw(st.integers(-(2**70), 2**70)), stop_token_ids=(1,))
        for _ in range(count)
    ]
    together = sample(logits, rows)
    order = list(range(count))
    random.Random(seed).shuffle(order)
    shuffled = sample(logits[order], [rows[i] for i in order])
    for place, i in enumerate(order):
        alone = sample(logits[i : i + 1].clone(), [rows[i]])
        assert (i in together.bad_rows) == bool(alone.bad_rows) == (place in shuffled.bad_rows)
        if not alone.bad_rows:
            assert together.token_ids[i] == alone.token_ids[0] == shuffled.token_ids[place]
            assert together.logprobs[i] == alone.logprobs[0] == shuffled.logprobs[place]


def test_a_seeded_row_beside_its_twin_and_beside_greedy_mates() -> None:
    logits = torch.zeros(1, 3000).expand(4, -1)
    seeded, other = Row(SamplingParams(temperature=1.0), 7), Row(SamplingParams(temperature=1.0), 8)
    tokens = sample(logits, [seeded, Row(SamplingParams()), seeded, other]).token_ids
    assert tokens[0] == tokens[2] == sample(logits[:1], [seeded]).token_ids[0]
    assert tokens[3] != tokens[0]
    assert tokens[1] == 0


def test_a_draw_depends_on_seed_and_position_and_not_on_what_came_before() -> None:
    logits = torch.zeros(1, 3000).expand(3, -1)
    params = SamplingParams(temperature=1.0)
    rows = [Row(params, 3, (1, 2, 3, 4), 2), Row(params, 3, (9, 8, 7), 1), Row(params, 3, (1, 2, 3, 4), 3)]
    tokens = sample(logits, rows).token_ids
    assert tokens[0] == tokens[1] != tokens[2]
    seeds = [0, 3, -3, 2**64 + 3, 3 - 2**64]
    tokens = sample(logits[:1].expand(5, -1), [Row(params, seed) for seed in seeds]).token_ids
    assert len(set(tokens)) == 5


# Log-probabilities


def test_logprobs_are_those_of_the_raw_distribution() -> None:
    logits = torch.randn(4, 5000, generator=torch.Generator().manual_seed(1)) * 4
    params = SamplingParams(
        temperature=0.7, top_k=50, repetition_penalty=1.3, logit_bias={5: 30.0}, logprobs=5
    )
    result = sample(logits, [Row(params, seed) for seed in range(4)])
    want = torch.log_softmax(logits.double(), dim=-1)
    for i, (token, logprob) in enumerate(zip(result.token_ids, result.logprobs, strict=True)):
        assert logprob is not None
        assert logprob.token_id == token == 5
        assert logprob.logprob == pytest.approx(want[i, token].item(), abs=1e-5)
        assert logprob.rank == 1 + int((logits[i] > logits[i, token]).sum())
        values, ids = want[i].topk(5)
        assert [t for t, _ in logprob.top] == ids.tolist()
        assert [p for _, p in logprob.top] == pytest.approx(values.tolist(), abs=1e-5)


def test_logprobs_are_given_only_where_asked_and_only_as_many() -> None:
    rows = [Row(SamplingParams(logprobs=n)) for n in (None, 0, 1, 20)]
    result = sample(torch.zeros(4, 6), rows)
    assert result.logprobs[0] is None
    assert [len(entry.top) for entry in result.logprobs[1:] if entry] == [0, 1, 6]
    assert [entry.rank for entry in result.logprobs[1:] if entry] == [1, 1, 1]
    assert [t for t, _ in result.logprobs[3].top] == [0, 1, 2, 3, 4, 5]  # type: ignore[union-attr]


def test_prompt_logprobs_agree_with_log_softmax_whatever_the_chunk() -> None:
    length = 300  # more than one chunk to the host
    logits = torch.randn(length, 40, generator=torch.Generator().manual_seed(2)).bfloat16()
    tokens = torch.randint(0, 40, (length,), generator=torch.Generator().manual_seed(3)).tolist()
    got = prompt_logprobs(logits, tokens, 2)
    want = torch.log_softmax(logits.double(), dim=-1)
    assert [entry.token_id for entry in got] == tokens
    assert [entry.logprob for entry in got] == pytest.approx(want[range(length), tokens].tolist(), abs=1e-5)
    assert all(len(entry.top) == 2 and entry.top[0][1] >= entry.top[1][1] for entry in got)
    assert all((entry.rank == 1) == (entry.logprob >= entry.top[0][1]) for entry in got)
    assert (
        prompt_logprobs(logits[:120], tokens[:120], 2) + prompt_logprobs(logits[120:], tokens[120:], 2) == got
    )
    assert prompt_logprobs(logits[:0], [], 2) == []


# Parameters


def test_a_bias_that_cannot_be_honoured_is_refused_by_name() -> None:
    check_params(SamplingParams(logit_bias={0: 1.0, 99: -INF}), 100)
    for token_id in (100, -1, "5"):
        with pytest.raises(ValueError, match=rf"{token_id!r}.*100 tokens"):
            check_params(SamplingParams(logit_bias={token_id: 1.0}), 100)  # type: ignore[dict-item]
    for bias in (math.nan, INF):
        with pytest.raises(ValueError, match=r"logit_bias\[3\]="):
            check_params(SamplingParams(logit_bias={3: bias}), 100)
