"""A request while the engine works on it: its tokens, how far they are computed, where its KV lies.

Owns one request's mutable state; the scheduler is the only one who changes it. There are no
phases: the pending work is `len(tokens) + len(draft) - num_computed_tokens`, and chunks of a
prompt, prefix hits, resumption after preemption and rejected drafts all follow from that counter.
"""

from __future__ import annotations

from typing import Any

from perflab.types import Request, RequestRecord, TokenLogprob


class Sequence:
    """One request, or one of its `n` samples."""

    __slots__ = (
        "block_hashes",
        "block_table",
        "capacity",
        "draft",
        "index",
        "key",
        "leader",
        "max_len",
        "min_len",
        "next_boundary",
        "num_computed_tokens",
        "num_prompt_tokens",
        "num_registered",
        "params",
        "prompt_logprobs",
        "queued_ns",
        "record",
        "request",
        "seed",
        "stop_set",
        "stop_token_ids",
        "text",
        "tokens",
    )

    def __init__(
        self,
        request: Request,
        record: RequestRecord,
        *,
        max_len: int,
        eos_token_ids: tuple[int, ...] = (),
        index: int = 0,
        leader: Sequence | None = None,
    ) -> None:
        params = request.params
        self.request = request
        self.params = params
        self.record = record
        self.index = index  # which of the n samples
        self.leader = leader  # the first of the n samples, whose prompt the others share
        self.seed = record.seed or 0
        self.tokens: list[int] = list(request.prompt_token_ids)
        self.num_prompt_tokens = len(self.tokens)
        self.draft: list[int] = []
        self.num_computed_tokens = 0
        self.max_len = max_len  # prompt and output together
        self.min_len = self.num_prompt_tokens + params.min_tokens
        eos = () if params.ignore_eos else eos_token_ids
        self.stop_token_ids = tuple(dict.fromkeys((*eos, *params.stop_token_ids)))
        self.stop_set = frozenset(self.stop_token_ids)
        self.block_table: list[int] = []
        self.capacity = 0  # tokens that the block table has room for
        self.block_hashes: list[bytes] = []  # of the full blocks of `tokens`, chained
        self.num_registered = 0  # leading blocks that the prefix cache knows
        self.next_boundary = 0  # computed tokens at which the next block can be registered
        self.key: tuple[float, ...] = ()  # place in the queue, lower is served first
        self.queued_ns = 0
        self.text: Any = None  # the detokenizer's stream
        self.prompt_logprobs: list[TokenLogprob | None] | None = None

    @property
    def request_id(self) -> str:
        return self.record.request_id

    @property
    def num_pending_tokens(self) -> int:
        return len(self.tokens) + len(self.draft) - self.num_computed_tokens

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.tokens[self.num_prompt_tokens :]

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of the prompt are still owed: they come once, with the first token."""
        return self.params.prompt_logprobs is not None and len(self.tokens) == self.num_prompt_tokens

    @property
    def is_finished(self) -> bool:
        return self.record.outcome is not None

    def keep_prompt_logprobs(self, first: int, scored: list[TokenLogprob]) -> None:
        """Log-probabilities of the prompt tokens from position `first` on; a chunk may come twice."""
        if self.prompt_logprobs is None:
            self.prompt_logprobs = [None]  # nothing precedes the first token
        del self.prompt_logprobs[first:]
        assert len(self.prompt_logprobs) == first
        self.prompt_logprobs.extend(scored)

    def reset_computed(self) -> None:
        """Everything is to be computed again; tokens and hashes stay."""
        self.num_computed_tokens = 0
        self.num_registered = 0
        self.draft = []

    def __repr__(self) -> str:
        return f"Sequence({self.request_id}, {self.num_computed_tokens}/{len(self.tokens)} computed)"


def check_tokens(request: Request, vocab_size: int) -> None:
    for position, token in enumerate(request.prompt_token_ids):
        if not 0 <= token < vocab_size:
            raise ValueError(
                f"{request.request_id}: token id {token} at position {position} is outside the vocabulary "
                f"of {vocab_size}; was the prompt encoded with another tokenizer?"
            )
