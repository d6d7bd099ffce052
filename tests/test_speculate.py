"""Speculation changes when tokens come and nothing else: not one token, under any option or schedule."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fake_model import assert_empty, drain

from perflab.clock import WallClock
from perflab.config import EngineConfig
from perflab.engine import verify as verification
from perflab.engine.engine import Engine
from perflab.engine.plan import Plan, StepResult
from perflab.engine.sampler import uniform
from perflab.errors import ConfigError
from perflab.models.tiny import tiny
from perflab.serve.metrics import Metrics
from perflab.speculate.adaptive import Adaptive
from perflab.speculate.make import make_engine
from perflab.speculate.ngram import NgramDrafter
from perflab.studies.session import EngineMaker
from perflab.types import Request, SamplingParams

VOCAB = 8  # of the toy distribution
DRAWS = 20_000
CHI_SQUARE = 24.3  # of 7 degrees of freedom, exceeded by chance once in 1,000


class Guesser:
    """Guesses with the answers at hand, `right` of them rightly; the others are wrong on purpose."""

    wants_features = False
    num_kinds, costly_kind = 1, None

    def __init__(self, answers: dict[str, list[int]], right: float, seed: int = 0) -> None:
        self.answers, self.right, self.rng = answers, right, random.Random(seed)
        self.forgotten: set[str] = set()

    def propose(self, seqs, limits, few=None):
        self.kinds = [0] * len(seqs)
        drafts = []
        for seq, limit in zip(seqs, limits, strict=True):
            rest = self.answers[seq.request_id][seq.num_output_tokens :][: self.rng.randint(0, limit)]
            drafts.append([t if self.rng.random() < self.right else (t + 1) % 200 for t in rest])
        return drafts

    def observe(self, plan: Plan, result: StepResult) -> None:
        for row, accepted in result.accepted.items():
            assert 0 <= accepted <= len(plan.seqs[row].draft)
            assert len(result.token_ids[row]) == accepted + 1

    def forget(self, request_id: str) -> None:
        self.forgotten.add(request_id)


OPTIONS = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 1.3, "seed": 5},
    "top_k": {"temperature": 1.0, "top_k": 7, "seed": 6},
    "top_p": {"temperature": 1.0, "top_p": 0.8, "seed": 7},
    "min_p": {"temperature": 1.0, "min_p": 0.05, "seed": 8},
    "penalties": {"temperature": 0.7, "repetition_penalty": 1.3, "presence_penalty": 0.5, "seed": 9},
    "frequency": {"temperature": 0.0, "frequency_penalty": 0.9, "min_tokens": 5},
    "logprobs": {"temperature": 0.9, "logprobs": 3, "seed": 10},
    "bias": {"temperature": 0.0, "logit_bias": {3: 4.0, 9: -3.0}},
}
SCHEDULES = {
    "roomy": {},
    "chunks": {"max_num_batched_tokens": 16},
    "preempting": {"num_blocks": 14, "prefix_cache": False},
    "one seat": {"max_num_seqs": 1},
    "blocks of 3": {"block_size": 3, "num_blocks": 80},
}


def requests() -> list[Request]:
    """One of each kind, half of them with a common prefix, so that batches are mixed in every way."""
    rng = random.Random(1)
    prefix = [rng.randrange(1, 200) for _ in range(20)]
    made = []
    for index, (name, options) in enumerate(OPTIONS.items()):
        prompt = [*prefix[: 20 * (index % 2)], *(rng.randrange(1, 200) for _ in range(3 + 5 * index))]
        made.append(Request(name, prompt, SamplingParams(max_tokens=24, **options)))
    return made


def run(engine: Engine) -> tuple[dict[str, list[int]], dict[str, list]]:
    logprobs: dict[str, list] = {}
    tokens: dict[str, list[int]] = {}
    for one in requests():
        engine.submit(one)
    while engine.has_work:
        for event in engine.step():
            tokens.setdefault(event.request_id, []).extend(event.token_ids)
            logprobs.setdefault(event.request_id, []).extend(event.logprobs or ())
        engine.scheduler.check()
    return tokens, logprobs


def config(**more) -> EngineConfig:
    return EngineConfig(runner="torch", packed_linears=False, **{"num_blocks": 60, **more})


@pytest.fixture(scope="module")
def plain():
    model = tiny("llama")
    return model, *run(Engine(model, config()))


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize("right", [0.0, 0.7, 1.0])
def test_every_option_gives_the_tokens_of_the_run_without_drafts(plain, schedule, right) -> None:
    model, tokens, logprobs = plain
    guesser = Guesser(tokens, right)
    engine = Engine(model, config(**schedule), drafter=guesser)
    drafted, drafted_logprobs = run(engine)
    assert drafted == tokens
    for name, found in drafted_logprobs.items():
        assert [one.token_id for one in found] == [one.token_id for one in logprobs[name]]
        assert [one.logprob for one in found] == pytest.approx([o.logprob for o in logprobs[name]], abs=1e-4)
    proposed = sum(step.draft_tokens for step in engine.steps)
    accepted = sum(step.accepted_tokens for step in engine.steps)
    assert proposed > 0
    assert accepted == {0.0: 0, 1.0: proposed}.get(right, accepted)
    assert sum(sum(record.draft_proposed) for record in engine.records) == proposed
    assert sum(sum(record.draft_accepted) for record in engine.records) == accepted
    assert all(record.outcome == "completed" for record in engine.records)
    if schedule.get("num_blocks") == 14:
        assert any(record.preemptions for record in engine.records)
    assert guesser.forgotten == set(tokens), "who ended is forgotten"
    assert_empty(engine)


def test_right_guesses_save_steps(plain) -> None:
    model, tokens, _ = plain
    engines = [Engine(model, config(max_num_seqs=1), drafter=d) for d in (None, Guesser(tokens, 1.0))]
    steps = []
    for engine in engines:
        run(engine)
        steps.append(len(engine.steps))
    assert steps[1] < 0.5 * steps[0]


def test_ends_inside_an_accepted_draft_end_there(plain) -> None:
    """A stop token and a length limit in the middle of what was accepted cut it as without drafts."""
    model, tokens, _ = plain
    stop = tokens["greedy"][7]
    for params in (
        SamplingParams(max_tokens=24, temperature=0.0, stop_token_ids=(stop,)),
        SamplingParams(max_tokens=6, temperature=0.0),
    ):
        engine = Engine(model, config(), drafter=Guesser(tokens, 1.0))
        one = replace(requests()[0], params=params)
        engine.submit(one)
        alone = Engine(model, config())
        alone.submit(one)
        assert drain(engine) == drain(alone)
        assert engine.records[0].finish_reason == alone.records[0].finish_reason


def test_a_drafter_that_raises_is_let_go_and_nobody_notices(plain) -> None:
    model, tokens, _ = plain

    class Broken(Guesser):
        def propose(self, seqs, limits, few=None):
            raise RuntimeError("no idea")

    engine = Engine(model, config(), drafter=Broken(tokens, 1.0))
    with pytest.warns(UserWarning, match="no idea"):
        assert run(engine)[0] == tokens


# The distribution of what is emitted, over draws with different seeds.


def toy_logits(depth: int) -> torch.Tensor:
    return torch.tensor(
        [[np.sin(3.1 * place + 1.7 * t) * 1.5 for t in range(VOCAB)] for place in range(depth)]
    )


def emitted(params: SamplingParams, draft: list[int], draws: int) -> np.ndarray:
    """Counts of pairs (first token, second token where one came, else VOCAB) [VOCAB, VOCAB + 1]."""
    logits = toy_logits(len(draft) + 1)
    counts = np.zeros((VOCAB, VOCAB + 1), int)
    for seed in range(draws):
        seq = SimpleNamespace(
            params=params, seed=seed, tokens=[1, 2], num_prompt_tokens=2, num_output_tokens=0,
            stop_token_ids=(), draft=draft,
        )  # fmt: skip
        found = verification.verify(logits, [seq], [0], None).token_ids[0]
        counts[found[0], found[1] if len(found) > 1 else VOCAB] += 1
    return counts


def expected(params: SamplingParams, draws: int) -> np.ndarray:
    """Shares of each token at the first place, from drawing without drafts at other seeds."""
    logits = toy_logits(1)
    counts = np.zeros(VOCAB)
    for seed in range(draws):
        seq = SimpleNamespace(
            params=params, seed=10_000_000 + seed, tokens=[1, 2], num_prompt_tokens=2, num_output_tokens=0,
            stop_token_ids=(), draft=[],
        )  # fmt: skip
        counts[verification.verify(logits, [seq], [0], None).token_ids[0][0]] += 1
    return counts


SAMPLED = {
    "temperature": SamplingParams(temperature=1.2),
    "top_k": SamplingParams(temperature=1.0, top_k=4),
    "top_p": SamplingParams(temperature=1.0, top_p=0.85),
    "min_p": SamplingParams(temperature=1.0, min_p=0.15),
    "penalties": SamplingParams(temperature=1.0, repetition_penalty=1.4, presence_penalty=0.3),
    "bias": SamplingParams(temperature=1.0, logit_bias={2: 1.0}),
}


def chi_square(params: SamplingParams, draft: list[int], draws: int = DRAWS) -> float:
    """Pearson's statistic of both samples of the first token having one distribution."""
    table = np.stack([emitted(params, draft, draws).sum(1), expected(params, draws)])
    table = table[:, table.sum(0) > 0]
    mean = table.sum(0) / 2
    return float(((table - mean) ** 2 / mean).sum())


@pytest.mark.verify
@pytest.mark.parametrize("params", SAMPLED.values(), ids=SAMPLED)
def test_the_distribution_is_that_of_the_sampler(params) -> None:
    likely = int(toy_logits(1).argmax())
    assert chi_square(params, [likely, 3]) < CHI_SQUARE


@pytest.mark.verify
def test_a_wrong_acceptance_rule_is_found(monkeypatch) -> None:
    """One in ten of the guesses that should fail is let through."""

    def generous(logits, seqs, starts, best, forced=None):
        found = verify(logits, seqs, starts, best, forced)
        for i, seq in enumerate(seqs):
            if seq.draft and found.token_ids[i][0] != seq.draft[0] and uniform(seq.seed, 0, 9) < 0.1:
                found.token_ids[i][:] = [seq.draft[0]]
        return found

    verify = verification.verify
    monkeypatch.setattr(verification, "verify", generous)
    likely = int(toy_logits(1).argmax())
    assert chi_square(SAMPLED["temperature"], [likely, 3]) > 2 * CHI_SQUARE


# Drafters, and how long drafts are.


def told(tokens: list[int], name: str = "r"):
    return SimpleNamespace(request_id=name, tokens=tokens, num_output_tokens=0)


def brute(tokens: list[int], limit: int) -> list[int]:
    """The longest suffix that occurred before, most recent first, by looking everywhere."""
    best, place = 1, -1
    for end in range(len(tokens) - 2, 0, -1):
        length = 0
        while length < 24 and end - length >= 0 and tokens[end - length] == tokens[-1 - length]:
            length += 1
        if length > best:
            best, place = length, end
    draft: list[int] = []
    while place >= 0 and len(draft) < limit:
        draft.append([*tokens, *draft][place + 1 + len(draft)])
    return draft


def test_lookup_finds_what_looking_everywhere_finds() -> None:
    rng = random.Random(3)
    for round_ in range(60):
        tokens = [rng.randrange(2 + round_ % 5) for _ in range(rng.randrange(2, 30))]
        drafter = NgramDrafter()
        for _ in range(20):
            tokens.append(rng.randrange(2 + round_ % 5))
            assert drafter.propose([told(list(tokens))], [5])[0] == brute(tokens, 5)


def test_lookup_refuses_to_match_one_token() -> None:
    with pytest.raises(ValueError, match="shortest=1"):
        NgramDrafter(1)


@pytest.mark.parametrize("adaptive", [True, False])
def test_an_engine_with_lookup_gives_the_same_tokens(plain, adaptive) -> None:
    model, tokens, _ = plain
    engine = make_engine(model, config(drafter="ngram", adaptive_draft=adaptive))
    assert run(engine)[0] == tokens
    assert adaptive or any(step.draft_tokens for step in engine.steps)


def test_a_model_that_drafts_for_itself_is_always_right(plain) -> None:
    """Also where it samples: it draws with the request's own numbers."""
    from perflab.speculate.draft_model import ModelDrafter

    model, tokens, _ = plain
    own = config()
    engine = Engine(model, own, drafter=ModelDrafter(model, model, own, WallClock()))
    assert run(engine)[0] == tokens
    proposed = sum(step.draft_tokens for step in engine.steps)
    assert sum(step.accepted_tokens for step in engine.steps) > 0.95 * proposed > 0


def test_studies_and_servers_speculate_where_their_configuration_says_so(plain) -> None:
    model, tokens, _ = plain
    engine = EngineMaker()(model, config(drafter="ngram", adaptive_draft=False))
    metrics = Metrics(engine, "tiny")
    assert run(engine)[0] == tokens
    said = metrics.text().decode()
    for name, value in (
        ("draft", sum(step.draft_tokens for step in engine.steps)),
        ("accepted", sum(step.accepted_tokens for step in engine.steps)),
    ):
        assert f'perflab:spec_decode_num_{name}_tokens_total{{model_name="tiny"}} {float(value)}' in said


def test_forced_acceptance_takes_its_share(plain) -> None:
    model = plain[0]
    for share in (0.0, 0.5, 1.0):
        engine = make_engine(model, config(drafter="ngram", adaptive_draft=False, forced_acceptance=share))
        run(engine)
        reached = sum(sum(record.draft_reached) for record in engine.records)
        accepted = sum(sum(record.draft_accepted) for record in engine.records)
        assert abs(accepted / reached - share) < 0.15
        assert share in (0.0, 1.0) or 0 < accepted < reached
        assert all(record.forced_acceptance == share for record in engine.records)


class Hand:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.ns = 1_000_000

    def now(self) -> int:
        return self.ns


def adaptive_length(chance: float, widening: float, rows: int = 1) -> float:
    """Mean draft length in the last steps where guesses hold with `chance` and each token adds `widening`
    of a step's time."""
    rng, clock = random.Random(2), Hand()
    seqs = [told([1, 2, 3], f"r{i}") for i in range(rows)]
    guesser = Guesser({seq.request_id: [5] * 99 for seq in seqs}, 1.0)
    guesser.rng = SimpleNamespace(randint=lambda low, high: high, random=lambda: 0.0)  # all it may
    adaptive = Adaptive(guesser, 4, clock)
    lengths = []
    for _ in range(600):
        drafts = adaptive.propose(seqs, [4] * rows)
        guesses = sum(map(len, drafts))
        clock.ns += int(1_000_000 * (1 + widening * guesses))
        plan = Plan(seqs, [1 + len(d) for d in drafts], [True] * rows, drafts=guesses)
        result = StepResult([[] for _ in seqs], sampled_ns=clock.ns)
        for row, (seq, draft) in enumerate(zip(seqs, drafts, strict=True)):
            seq.draft = draft
            held = next((i for i in range(len(draft)) if rng.random() >= chance), len(draft))
            result.token_ids[row] = [5] * (held + 1)
            if draft:
                result.accepted[row] = held
        adaptive.observe(plan, result)
        lengths.append(guesses / rows)
    return float(np.mean(lengths[-200:]))


def test_drafts_are_as_long_as_they_pay() -> None:
    assert adaptive_length(0.95, 0.02) > 3.5, "nearly free and nearly always right"
    assert adaptive_length(0.05, 0.3) < 0.2, "dear and nearly always wrong"
    assert adaptive_length(0.5, 0.9) < 0.2, "a guess costs more than it brings"
    assert 0.5 < adaptive_length(0.6, 0.2) < 3.5, "the first guesses pay, the last ones do not"


def test_an_unknown_drafter_is_named() -> None:
    with pytest.raises(ConfigError, match="drafter='nonsense'"):
        EngineConfig(drafter="nonsense")
    with pytest.raises(ConfigError, match="forced_acceptance=2"):
        EngineConfig(forced_acceptance=2.0)
