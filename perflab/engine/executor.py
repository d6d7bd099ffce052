"""Runs a plan on this process's device: batch tensors, the model, sampling.

Owns the runner and the KV tensors. A failure is traced to the rows that cause it: a NaN by its row,
an exception by running halves. Knows nothing of queues; the scheduler decides what a failed or
deferred row means.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from perflab.clock import Clock
from perflab.config import Attention, EngineConfig
from perflab.engine.attention import StepAttention
from perflab.engine.batch import Batch, build_batch
from perflab.engine.kv_tensors import KVTensors
from perflab.engine.native import NativeAttention, NativeForward
from perflab.engine.plan import Plan, StepResult
from perflab.engine.sampler import prompt_logprobs
from perflab.engine.verify import verify
from perflab.errors import NotNative, StepFailed
from perflab.models.kernels import MAX_HEAD_DIM, MAX_SHARED, Team
from perflab.models.native import NativeRunner
from perflab.models.runner import Attend, HFRunner, RunnerOutput
from perflab.models.runners import Runner

SCORED_TOKENS = 256
"""Tokens of one step of `score`: bounds its logits to that many rows at a time."""

Forward = Callable[[Batch, KVTensors | None], RunnerOutput]


class Executor(Protocol):
    vocab_size: int | None
    wants_features: bool  # whether each row's features go into the results

    def run(self, plan: Plan) -> StepResult: ...

    def wipe(self, blocks: list[int]) -> None:
        """Clear blocks that a failed request may have left with NaN in them."""
        ...

    def self_test(self) -> None:
        """Raises what stops the model from running at all."""
        ...


class LocalExecutor:
    """One process, CPU or CUDA."""

    def __init__(
        self,
        runner: Runner,
        kv: KVTensors | None,
        forward: Forward,
        clock: Clock,
        *,
        can_defer: bool,
        forced_acceptance: float | None = None,
    ) -> None:
        self.runner, self.kv = runner, kv
        self._forward = forward
        self._clock = clock
        self._can_defer = can_defer
        self._forced_acceptance = forced_acceptance
        self.wants_features = False
        self._every_row = isinstance(runner, HFRunner)  # the other one says by itself what is finite
        self.vocab_size: int | None = runner.vocab_size

    @classmethod
    def for_config(cls, runner: Runner, config: EngineConfig, clock: Clock) -> LocalExecutor:
        """`config` is resolved."""
        kv = None
        if config.kv_dtype == "int8" and isinstance(runner, HFRunner) and config.attention != "native":
            raise NotNative("kv_dtype='int8' without the native runner needs attention='native'")
        if config.kv_cache:
            assert config.num_blocks is not None
            dtype = torch.int8 if config.kv_dtype == "int8" else runner.dtype
            native = isinstance(runner, NativeRunner) or config.attention == "native"
            kv = KVTensors(
                runner.kv_shape, config.num_blocks, config.block_size, dtype, runner.device, native=native
            )
        forward: Forward
        if isinstance(runner, NativeRunner):
            forward = NativeForward(runner)
        else:
            forward = TorchForward(runner, config.attention, config.num_threads)
        return cls(
            runner,
            kv,
            forward,
            clock,
            can_defer=config.chunked_prefill,
            forced_acceptance=config.forced_acceptance,
        )

    def run(self, plan: Plan) -> StepResult:
        result = StepResult(token_ids=[[] for _ in plan.seqs])
        self._run(plan, 0, len(plan.seqs), result)
        if not result.sampled_ns:  # nothing got that far
            result.sampled_ns = self._clock.now()
            result.batched_ns = result.batched_ns or result.sampled_ns
            result.forwarded_ns = result.forwarded_ns or result.sampled_ns
        return result

    def _run(self, plan: Plan, start: int, end: int, result: StepResult) -> None:
        """Rows [start, end); on an exception each half again, so one bad row costs about 2 log2 runs."""
        whole = end - start == len(plan.seqs)
        failure: StepFailed | None = None
        no_memory = False
        try:
            self._compute(plan if whole else plan.part(start, end), start, result)
        except Exception as error:
            no_memory = is_out_of_memory(error)
            failure = StepFailed(f"{plan.seqs[start].request_id}: {type(error).__name__}: {error}")
        if failure is None:
            return
        # Out here the failed try's tensors are gone, so that the next one finds their memory.
        result.out_of_memory |= no_memory
        if end - start > 1:
            middle = (start + end) // 2
            self._run(plan, start, middle, result)
            self._run(plan, middle, end, result)
        elif no_memory and self._can_defer and plan.counts[start] > 1:
            result.deferred.add(start)
        else:
            result.errors[start] = failure

    def _compute(self, plan: Plan, first_row: int, result: StepResult) -> None:
        now = self._clock.now
        batch = build_batch(plan, every_row=self._every_row)
        batch.features = self.wants_features
        result.batched_ns = result.batched_ns or now()
        output = self._forward(batch, self.kv)
        if output.logits.device.type == "cuda":
            torch.cuda.synchronize(output.logits.device)
        result.forwarded_ns = now()
        self._sample(plan, batch, output, first_row, result)
        result.sampled_ns = now()

    def _sample(
        self, plan: Plan, batch: Batch, output: RunnerOutput, first_row: int, result: StepResult
    ) -> None:
        logits = output.logits
        last = [end - 1 for end in batch.sample_start[1:]]
        rows = [row for row, samples in enumerate(plan.samples) if samples]
        seqs = [plan.seqs[row] for row in rows]
        starts = [last[row] - len(seq.draft) for row, seq in zip(rows, seqs, strict=True)]
        found = verify(logits, seqs, starts, output.best, self._forced_acceptance)
        bad = {rows[index] for index in found.bad_rows}
        partial = [row for row, samples in enumerate(plan.samples) if not samples]
        if partial:
            if output.finite is not None:
                finite = [output.finite[row] for row in partial]
            else:
                finite = torch.isfinite(logits[[last[row] for row in partial]].amax(-1)).tolist()
            bad.update(row for row, ok in zip(partial, finite, strict=True) if not ok)
        for index, row in enumerate(rows):
            if row not in bad:
                result.token_ids[first_row + row] = found.token_ids[index]
                if found.logprobs[index]:
                    result.logprobs[first_row + row] = found.logprobs[index]
                if seqs[index].draft:
                    result.accepted[first_row + row] = found.accepted[index]
        for row in bad:
            result.errors[first_row + row] = StepFailed(
                f"{plan.seqs[row].request_id}: its logits are not finite, or no token is left to choose; "
                "check logit_bias, try dtype fp32 or another prompt"
            )
        if output.features is not None:
            for row, (start, end) in enumerate(pairwise(batch.query_start)):
                result.features[first_row + row] = output.features[start:end]
        self._score_prompts(plan, batch, logits, first_row, result)

    def _score_prompts(
        self, plan: Plan, batch: Batch, logits: Tensor, first_row: int, result: StepResult
    ) -> None:
        for row, (seq, count) in enumerate(zip(plan.seqs, plan.counts, strict=True)):
            top = seq.params.prompt_logprobs
            if top is None or not seq.scores_prompt:
                continue
            # Position p's logits score the token at p + 1.
            first = seq.num_computed_tokens + 1
            targets = seq.tokens[first : min(first + count, seq.num_prompt_tokens)]
            if targets:
                start = batch.sample_start[row]
                scored = prompt_logprobs(logits[start : start + len(targets)], targets, top)
                result.prompt_logprobs[first_row + row] = (first, scored)

    def wipe(self, blocks: list[int]) -> None:
        if self.kv is not None and blocks:
            self.kv.wipe(blocks)

    def self_test(self) -> None:
        self.score([0])

    def score(self, token_ids: list[int]) -> Tensor:
        """Next-token logits at every position, fp32 [len(token_ids), vocabulary].

        By steps of `SCORED_TOKENS` over keys and values kept as the engine keeps them, so a narrow
        `kv_dtype` shows; in memory of its own, so requests that run are left alone.
        """
        return torch.cat([out.logits.float().clone() for out in self._alone(token_ids)])

    def states(self, token_ids: list[int]) -> Tensor:
        """What goes into the head at every position, fp32 [len(token_ids), hidden], likewise."""
        found = [out.hidden for out in self._alone(token_ids)]
        assert all(hidden is not None for hidden in found), "the model has no head of its own"
        return torch.cat([hidden.float() for hidden in found if hidden is not None])

    def _alone(self, token_ids: list[int]) -> Iterator[RunnerOutput]:
        """One sequence in steps, all of whose rows are sampled; a step's logits end with the next one."""
        length, step, kv, table = len(token_ids), SCORED_TOKENS, None, []
        if self.kv is None:
            step = length  # nothing is kept from step to step
        else:
            table = list(range(-(-length // self.kv.block_size)))
            kv = self.kv.like(len(table))
        for start in range(0, length, step):
            end = min(start + step, length)
            count = end - start
            batch = Batch(
                token_ids=np.array(token_ids[start:end], np.int64),
                positions=np.arange(start, end),
                query_start=[0, count],
                query_len=[count],
                kv_len=[end],
                block_tables=[table],
                sample_rows=list(range(count)),
                sample_start=[0, count],
            )
            yield self._forward(batch, kv)


class TorchForward:
    """A step through `HFRunner`, with one of the engine's attentions."""

    def __init__(self, runner: HFRunner, attention: Attention, threads: int | None) -> None:
        self._runner = runner
        self._kind: Attention = attention
        self._team: Team | None = None
        if attention == "native":
            if runner.device.type != "cpu" or runner.dtype not in (torch.float32, torch.bfloat16):
                raise NotNative(
                    f"attention='native' runs fp32 and bf16 on a CPU, not {runner.dtype} on {runner.device}"
                )
            heads, shape = runner.query_heads, runner.kv_shape
            if max(shape.key_dim, shape.value_dim) > MAX_HEAD_DIM or heads > MAX_SHARED * shape.kv_heads:
                raise NotNative(
                    f"attention='native' takes heads of up to {MAX_HEAD_DIM} dimensions, {MAX_SHARED} for "
                    f"each key head, not {heads} of {shape.key_dim} for {shape.kv_heads}: "
                    "use attention='batched'"
                )
            self._team = Team(threads or torch.get_num_threads())

    def __call__(self, batch: Batch, kv: KVTensors | None) -> RunnerOutput:
        attend: Attend
        if self._team is not None:
            attend = NativeAttention(batch, kv, self._team)
        else:
            attend = StepAttention(batch, kv, self._kind)
        device = self._runner.device
        return self._runner.forward(
            torch.from_numpy(batch.token_ids)[None].to(device),
            torch.from_numpy(batch.positions)[None].to(device),
            attend,
            torch.tensor(batch.sample_rows, device=device),
            features=batch.features,
        )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether this is the device's or the host's way of saying that memory ran out."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
