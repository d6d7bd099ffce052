"""The engine on tiny real models: parity with transformers, sampling, faults, text."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from fake_model import advance, assert_empty, drain, take
from test_scheduler import script

from benchmarks.parity import generate_alone
from perflab.config import EngineConfig
from perflab.engine.attention import StepAttention
from perflab.engine.batch import Batch
from perflab.engine.engine import Engine
from perflab.engine.kv_tensors import KVTensors
from perflab.engine.llm import LLM
from perflab.engine.native import NativeAttention
from perflab.errors import NotNative, Rejected, StepFailed
from perflab.models import kernels
from perflab.models.kernels import Team
from perflab.models.loaded import LoadedModel
from perflab.models.runner import KVShape
from perflab.models.tiny import ARCHITECTURES, tiny
from perflab.types import Request, SamplingParams

ONE_THREAD = pytest.mark.usefixtures("one_thread")
pytestmark = ONE_THREAD

NATIVE = kernels.library() is not None
NEEDS_KERNELS = pytest.mark.skipif(not NATIVE, reason=kernels.why_missing())
LLAMA_SHAPED = ("llama", "mistral", "qwen2", "qwen3")
RUNNERS = ("torch", pytest.param("native", marks=NEEDS_KERNELS))

CONFIGURATIONS = {
    "defaults": {},
    "chunks and preemption": {"max_num_batched_tokens": 16, "num_blocks": 14},
    "static": {"batching": "static", "max_num_seqs": 2},
    "dynamic": {"batching": "dynamic", "max_num_seqs": 3, "batch_timeout_s": 0.001},
    "no prefix cache": {"prefix_cache": False, "max_num_batched_tokens": 8},
    "no chunks": {"chunked_prefill": False},
    "no cache": {"kv_cache": False},
}
TORCH_ONLY = {
    "eager": {"attention": "eager"},
    "sdpa": {"attention": "sdpa"},
    "packed": {"packed_linears": True},
}
PATHS = {"torch": {"runner": "torch"}, "native": {"runner": "native"}}
PATHS["native attention"] = {"runner": "torch", "attention": "native"}


def parity_cases():
    """Every configuration by each path that an architecture has: modules of transformers, the same with
    native attention, and for Llama's shape the native runner."""
    for arch in ARCHITECTURES:
        for path, switches in PATHS.items():
            if path == "native" and arch not in LLAMA_SHAPED:
                continue
            for name, options in {**CONFIGURATIONS, **(TORCH_ONLY if path == "torch" else {})}.items():
                marks = () if path == "torch" else NEEDS_KERNELS
                yield pytest.param(arch, {**switches, **options}, id=f"{arch}-{path}-{name}", marks=marks)


@pytest.fixture(autouse=True)
def one_thread():
    """Tiny matrices: two threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def engine_for(model: LoadedModel, **options) -> Engine:
    return Engine(model, EngineConfig(**{"max_num_seqs": 6, "packed_linears": False, **options}))


def run(engine: Engine, requests: list[Request]) -> dict[str, list[int]]:
    for one in requests:
        engine.submit(one)
    return drain(engine)


@cache
def tiny_model(arch: str) -> LoadedModel:
    return tiny(arch)


@cache
def prompts_and_answers(arch: str) -> tuple[list[list[int]], list[list[int]]]:
    rng = random.Random(arch)
    prefix = [rng.randrange(256) for _ in range(20)]
    prompts = [[rng.randrange(256) for _ in range(length)] for length in (1, 5, 17, 70)]
    prompts += [[*prefix, *(rng.randrange(256) for _ in range(length))] for length in (3, 14)]
    return prompts, [generate_alone(tiny_model(arch), prompt, 16) for prompt in prompts]


def greedy(count: int, **more) -> SamplingParams:
    """`count` tokens, with the end tokens masked as `min_new_tokens` masks them."""
    return SamplingParams(max_tokens=count, min_tokens=count, **more)


# -- parity ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("arch", "options"), [*parity_cases()])
def test_greedy_tokens_are_those_of_generate(arch: str, options: dict) -> None:
    prompts, answers = prompts_and_answers(arch)
    engine = engine_for(tiny_model(arch), **options)
    tokens = run(engine, [Request(str(i), prompt, greedy(16)) for i, prompt in enumerate(prompts)])
    assert [tokens[str(i)] for i in range(len(prompts))] == answers


def test_one_model_serves_engines_of_different_kinds_at_once_and_stays_as_it_was() -> None:
    model = tiny_model("llama")
    before = {name: type(child) for name, child in model.module.named_modules()}
    prompts, answers = prompts_and_answers("llama")
    kinds = [{"runner": "torch", "packed_linears": packed} for packed in (True, False)]
    engines = [engine_for(model, **kind) for kind in (*kinds, {"runner": "auto"}, {"runner": "auto"})]
    for engine in engines:
        for index, prompt in enumerate(prompts):
            engine.submit(Request(str(index), prompt, greedy(16)))
    tokens: list[dict[str, list[int]]] = [{} for _ in engines]
    while any(engine.has_work for engine in engines):
        for engine, got in zip(engines, tokens, strict=True):
            take(got, advance(engine))
    assert all([got[str(i)] for i in range(len(prompts))] == answers for got in tokens)
    assert {name: type(child) for name, child in model.module.named_modules()} == before
    assert generate_alone(model, prompts[2], 16) == answers[2]


@pytest.mark.parametrize("seed", range(8))
def test_random_request_scripts_on_real_models(seed: int) -> None:
    real_script(seed)


@pytest.mark.verify
@pytest.mark.parametrize("seed", range(8, 58))
def test_many_random_request_scripts_on_real_models(seed: int) -> None:
    real_script(seed)


def real_script(seed: int) -> None:
    model = tiny_model(("llama", "mistral", "gemma2", "qwen3", "mixtral")[seed % 5])

    def build(options: dict):
        engine = engine_for(model, **options)

        def answer(prompt: list[int], sampling: SamplingParams) -> list[int]:
            reference = engine_for(model, runner="torch", attention="eager", prefix_cache=False)
            return run(
                reference,
                [
                    Request(
                        "alone",
                        prompt,
                        SamplingParams(max_tokens=sampling.max_tokens, ignore_eos=sampling.ignore_eos),
                    )
                ],
            )["alone"]

        return engine, engine.clock, answer

    script(seed, build)


# -- batch shapes: no padding, no NaN, masked rows ----------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        *(
            pytest.param(dtype, {"runner": "torch", "attention": kind}, id=f"{dtype}-{kind}")
            for dtype in (torch.float32, torch.bfloat16, torch.float16)
            for kind in ("eager", "sdpa", "batched")
        ),
        *(
            pytest.param(dtype, options, id=f"{dtype}-{name}", marks=NEEDS_KERNELS)
            for dtype in (torch.float32, torch.bfloat16)
            for name, options in {
                "native": {"runner": "native"},
                "native attention": {"runner": "torch", "attention": "native"},
                "int8": {"weights": "int8"},
                "int8-dynamic": {"weights": "int8-dynamic"},
                "int4": {"weights": "int4"},
                "int8 KV": {"kv_dtype": "int8", "runner": "native"},
            }.items()
        ),
    ],
)
def test_a_short_row_beside_a_long_one_has_the_logits_it_has_alone(dtype, options) -> None:
    """Rows share a step, not positions or padding; nothing is NaN, not even over never written blocks."""
    model = in_dtype(tiny_model("llama"), dtype)
    short, long = (
        list(b"Short prompt"),
        list(b"A much longer prompt, of sixty bytes or so, to stand beside it."),
    )

    def logits_of_first(requests: list[Request]) -> list[torch.Tensor]:
        engine = engine_for(model, **options)
        forward, seen = engine.executor._forward, []

        def spy(batch, kv):
            output = forward(batch, kv)
            assert torch.isfinite(output.logits).all()
            seen.append(output.logits[batch.sample_start[0]].float().clone())
            return output

        engine.executor._forward = spy
        run(engine, requests)
        return seen

    alone = logits_of_first([Request("short", short, greedy(30))])
    beside = logits_of_first([Request("short", short, greedy(30)), Request("long", long, greedy(30))])
    tolerance = {torch.float32: 1e-4, torch.bfloat16: 0.25, torch.float16: 0.03}[dtype]
    pairs = list(zip(alone, beside, strict=True))
    same = next((i for i, (a, b) in enumerate(pairs) if a.argmax() != b.argmax()), 30)
    for a, b in pairs[: same + 1]:
        assert (a - b).abs().max() <= tolerance
    assert same == 30 or dtype is not torch.float32


def in_dtype(model: LoadedModel, dtype: torch.dtype) -> LoadedModel:
    module = copy.deepcopy(model.module).to(dtype)
    return replace(model, module=module, dtype=dtype, fingerprint=f"{model.fingerprint}-{dtype}")


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("sinks", [False, True])
def test_other_attention_equals_the_written_out_one(window, softcap, sinks) -> None:
    """Decode rows, draft-like rows, chunks and whole prompts in one step, over a scattered pool."""
    rng = torch.Generator().manual_seed(0)
    heads, kv_heads, dim, size = 6, 2, 8, 4
    rows = [(1, 9), (1, 30), (1, 3), (4, 12), (4, 5), (7, 7), (20, 33), (1, 1)]
    free = torch.randperm(200, generator=rng).tolist()
    tables = [[free.pop() for _ in range(-(-kv // size))] for _, kv in rows]
    total = sum(q for q, _ in rows)
    positions = [p for q, kv in rows for p in range(kv - q, kv)]
    starts = [sum(q for q, _ in rows[:i]) for i in range(len(rows) + 1)]
    batch = Batch(
        token_ids=np.zeros(total, np.int64),
        positions=np.array(positions),
        query_start=starts,
        query_len=[q for q, _ in rows],
        kv_len=[kv for _, kv in rows],
        block_tables=tables,
        sample_rows=list(range(total)),
        sample_start=starts,
    )
    query, key, value = (torch.randn(1, n, total, dim, generator=rng) for n in (heads, kv_heads, kv_heads))
    past = torch.randn(2, 1, 201, kv_heads, size, dim, generator=rng)
    outputs = []
    for kind in ("eager", "sdpa", "batched", *(["native"] if NATIVE else [])):
        kv = KVTensors(KVShape(1, kv_heads, dim, dim), 200, size, torch.float32, torch.device("cpu"))
        kv.key.copy_(past[0])
        kv.value.copy_(past[1])
        sink = torch.linspace(-1, 1, heads) if sinks else None
        step = NativeAttention(batch, kv, Team(2)) if kind == "native" else StepAttention(batch, kv, kind)
        outputs.append(
            step.attend(0, query, key, value, scaling=0.4, sliding_window=window, softcap=softcap, sinks=sink)
        )
    assert torch.isfinite(outputs[0]).all()
    for output in outputs[1:]:
        torch.testing.assert_close(output, outputs[0], atol=2e-6, rtol=1e-5)


# -- where native kernels do not go ---------------------------------------------------------------


@NEEDS_KERNELS
@pytest.mark.parametrize(
    ("arch", "dtype", "options", "message"),
    [
        ("llama", torch.float16, {"runner": "native"}, "fp32 and bf16 on a CPU, not torch.float16"),
        ("llama", torch.float16, {"weights": "int8-dynamic"}, "fp32 and bf16 on a CPU, not torch.float16"),
        ("gemma2", torch.float32, {"runner": "native"}, "Gemma2ForCausalLM is not of Llama's shape"),
        ("mixtral", torch.bfloat16, {"weights": "int4"}, "MixtralForCausalLM is not of Llama's shape"),
        ("gemma2", torch.float32, {"kv_dtype": "int8"}, "needs attention='native'"),
        ("llama", torch.float16, {"runner": "torch", "attention": "native"}, "attention='native' runs fp32"),
    ],
)
def test_what_native_kernels_cannot_run_is_refused_by_name(arch, dtype, options, message) -> None:
    with pytest.raises(NotNative, match=message) as refused:
        engine_for(in_dtype(tiny_model(arch), dtype), **options)
    if "runner" in options or "weights" in options:
        assert "torch" in str(refused.value), "the remedy"


@NEEDS_KERNELS
@pytest.mark.parametrize(
    "sizes",
    [
        {"hidden_size": 98, "num_attention_heads": 49, "num_key_value_heads": 1, "head_dim": 8},
        {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 258},
    ],
)
def test_heads_that_native_attention_has_no_room_for_are_refused_when_the_engine_is_made(sizes) -> None:
    model = tiny("llama", **sizes)
    with pytest.raises(
        NotNative, match="attention='native' takes heads of up to 256 dimensions, 48 for each"
    ):
        Engine(model, EngineConfig(runner="torch", attention="native"))
    with pytest.raises(NotNative, match="heads of"):
        Engine(model, EngineConfig(runner="native"))


@pytest.mark.parametrize("arch", ["llama", "gemma2"])
def test_auto_takes_torch_where_native_cannot(arch, monkeypatch) -> None:
    monkeypatch.setattr(kernels, "library", lambda: None)
    monkeypatch.setattr(kernels, "why_missing", lambda: "not built; install a compiler")
    model, (prompts, answers) = tiny_model(arch), prompts_and_answers(arch)
    engine = engine_for(model)
    assert run(engine, [Request("0", prompts[2], greedy(16))])["0"] == answers[2]
    with pytest.raises(NotNative, match="install a compiler"):
        engine_for(model, runner="native")


# -- prefix cache, chunks and log-probabilities ------------------------------------------------


@pytest.mark.parametrize("length", [31, 32, 33, 48])
@pytest.mark.parametrize("budget", [8, 512])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_outputs_and_logprobs_are_the_same_with_cache_and_chunks(length, budget, prefix_cache) -> None:
    model = tiny_model("llama")
    prompt = [(7 * i) % 251 for i in range(length)]
    asked = greedy(6, logprobs=2, prompt_logprobs=3)
    plain = LLM(model, EngineConfig(packed_linears=False, prefix_cache=False)).generate([prompt], asked)[0]
    llm = LLM(
        model,
        EngineConfig(
            packed_linears=False, prefix_cache=prefix_cache, max_num_batched_tokens=budget, max_num_seqs=4
        ),
    )
    llm.generate([prompt], greedy(6))
    again = llm.generate([prompt, prompt], [asked, greedy(6)])
    assert [one.token_ids for one in again] == [plain.token_ids] * 2
    cached = (length - 1) // 16 * 16 if prefix_cache else 0
    assert again[1].record.cached_tokens == cached
    assert again[1].record.chunk_tokens == [1] * 6, "a chunk of a prompt brings no token"
    for ours, theirs in (
        (again[0].prompt_logprobs, plain.prompt_logprobs),
        (again[0].logprobs, plain.logprobs),
    ):
        assert len(ours) == len(theirs)
        for a, b in zip(ours, theirs, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                assert a.token_id == b.token_id
                assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
    assert again[0].prompt_logprobs[0] is None
    assert [entry.token_id for entry in again[0].prompt_logprobs[1:]] == prompt[1:]


def test_prompt_logprobs_are_those_of_the_model() -> None:
    model = tiny_model("qwen2")
    prompt = [(11 * i) % 251 for i in range(20)]
    got = LLM(model).generate([prompt], greedy(1, prompt_logprobs=0))[0].prompt_logprobs
    with torch.inference_mode():
        expected = model.module(torch.tensor([prompt])).logits[0].log_softmax(-1)
    for position, entry in enumerate(got[1:], 1):
        assert entry.logprob == pytest.approx(expected[position - 1, prompt[position]].item(), abs=1e-4)


@pytest.mark.parametrize("keys", [(("salt", "x"),), (("adapter", "x"),), ()])
def test_a_salt_keeps_prompts_apart_and_never_changes_an_answer(keys) -> None:
    prompt = list(range(40))
    engine = engine_for(tiny_model("llama"))
    first = run(engine, [Request("a", prompt, greedy(4), cache_keys=(("salt", "other"),))])["a"]
    assert run(engine, [Request("b", prompt, greedy(4), cache_keys=keys)])["b"] == first
    assert engine.records[-1].cached_tokens == 0
    assert run(engine, [Request("c", prompt, greedy(4), cache_keys=keys)])["c"] == first
    assert engine.records[-1].cached_tokens == 32


def test_a_forced_hash_collision_is_what_the_strong_hash_prevents(monkeypatch) -> None:
    """With a weak hash in its place two prompts share KV and the answer is wrong: the test can fail."""
    import perflab.engine.kv as kv

    prompt = [3, 5, *range(30)]
    collides = [3 + 1, 5 - 31, *range(30)]
    collides = [token + 40 for token in collides]
    prompt = [token + 40 for token in prompt]
    expected = run(engine_for(tiny_model("llama")), [Request("b", collides, greedy(8))])["b"]
    engine = engine_for(tiny_model("llama"))
    run(engine, [Request("a", prompt, greedy(8))])
    assert run(engine, [Request("b", collides, greedy(8))])["b"] == expected

    def polynomial(parent: bytes, token_ids) -> bytes:
        value = 0
        for token in token_ids:
            value = value * 31 + token
        return parent + value.to_bytes(16, "little", signed=True)

    monkeypatch.setattr(kv, "block_hash", polynomial)
    engine = engine_for(tiny_model("llama"))
    run(engine, [Request("a", prompt, greedy(8))])
    run(engine, [Request("b", collides, greedy(8))])
    assert engine.records[-1].cached_tokens > 0


# -- seeds ----------------------------------------------------------------------------------


def sampled(seed: int | None) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=seed, max_tokens=12, min_tokens=12)


def test_a_seeded_stream_depends_on_nothing_but_its_seed_and_logits() -> None:
    model, prompt = tiny_model("llama"), list(b"the same prompt")
    alone = run(engine_for(model), [Request("s", prompt, sampled(7))])["s"]
    mates = [Request(f"m{i}", [*b"another one entirely", i], sampled(None)) for i in range(3)]
    for position in range(4):
        requests = [*mates[:position], Request("s", prompt, sampled(7)), *mates[position:]]
        assert run(engine_for(model), requests)["s"] == alone
    both = run(engine_for(model), [Request("s", prompt, sampled(7)), Request("t", prompt, sampled(7))])
    assert both == {"s": alone, "t": alone}
    assert run(engine_for(model), [Request("s", prompt, sampled(8))])["s"] != alone
    tight = engine_for(model, num_blocks=7, max_num_batched_tokens=8)
    assert run(tight, [*mates, Request("s", prompt, sampled(7))])["s"] == alone


def test_an_unseeded_request_can_be_repeated_from_its_record() -> None:
    model, prompt = tiny_model("llama"), list(b"free")
    engine = engine_for(model)
    first = run(engine, [Request("a", prompt, sampled(None))])["a"]
    assert run(engine, [Request("b", prompt, sampled(None))])["b"] != first
    assert run(engine, [Request("c", prompt, sampled(engine.records[0].seed))])["c"] == first


def test_the_n_samples_differ_and_the_first_is_the_lone_one() -> None:
    model = tiny_model("llama")
    one = LLM(model).generate(["abc"], sampled(5))[0]
    several = LLM(model).generate(
        ["abc"], SamplingParams(temperature=1.0, seed=5, n=3, max_tokens=12, min_tokens=12)
    )
    assert several[0].token_ids == one.token_ids
    assert len({tuple(sample.token_ids) for sample in several}) == 3


# -- a step that fails ------------------------------------------------------------------------


def fail_on(engine: Engine, token: int, error: Exception, rows: int | None = None) -> list[int]:
    """Make the model raise wherever `token` is among the inputs, or with more rows; returns batch sizes."""
    forward, sizes = engine.executor._forward, []

    def faulty(batch, kv):
        sizes.append(len(batch.query_len))
        if token in batch.token_ids if rows is None else len(batch.query_len) > rows:
            raise error
        return forward(batch, kv)

    engine.executor._forward = faulty
    return sizes


def poisoned(model: LoadedModel, token: int) -> LoadedModel:
    """The same model, but `token` comes out as NaN."""
    module = copy.deepcopy(model.module)
    with torch.no_grad():
        module.get_input_embeddings().weight[token] = float("nan")
    return replace(model, module=module, fingerprint=f"{model.fingerprint}-poisoned-{token}")


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 8}], ids=["whole", "chunks"])
@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("error", [None, RuntimeError("broken kernel"), ZeroDivisionError("x")])
def test_a_failing_request_goes_down_alone(error, runner, options) -> None:
    model = poisoned(tiny_model("llama"), 255) if error is None else tiny_model("llama")
    prompts = [[i + 1] * 9 for i in range(5)]
    poison = [255] * 20
    good = run(
        engine_for(model, runner=runner), [Request(str(i), p, greedy(6)) for i, p in enumerate(prompts)]
    )
    engine = engine_for(model, runner=runner, **options)
    sizes = fail_on(engine, 255, error) if error is not None else []
    requests = [Request(str(i), p, greedy(6)) for i, p in enumerate(prompts)]
    tokens = run(engine, [*requests[:3], Request("poison", poison, greedy(6)), *requests[3:]])
    assert {name: tokens[name] for name in good} == good
    record = next(record for record in engine.records if record.request_id == "poison")
    assert record.outcome == "failed"
    assert "not finite" in record.error or "broken kernel" in record.error or "ZeroDivision" in record.error
    assert engine.health.ready
    if sizes and not options:
        assert sizes[0] == 6
        assert len(sizes[: sizes.index(1)]) <= 4, "halves: about log2 of the rows"
    assert [event.subject for event in engine.events if event.kind == "request_failed"] == ["poison"]
    fresh = run(engine, [Request("again", prompts[0], greedy(6))])["again"]
    assert fresh == good["0"], "blocks that held NaN were wiped"


@NEEDS_KERNELS
@pytest.mark.parametrize(
    "options", [{"weights": "int8"}, {"weights": "int8-dynamic"}, {"kv_dtype": "int8"}, {"weights": "int4"}]
)
def test_nan_stays_with_its_row_through_8_and_4_bits(options) -> None:
    model = poisoned(in_dtype(tiny_model("llama"), torch.bfloat16), 255)
    engine = engine_for(model, **options)
    good = run(engine, [Request("good", [1] * 9, greedy(6))])["good"]
    tokens = run(engine, [Request("poison", [255] * 20, greedy(6)), Request("again", [1] * 9, greedy(6))])
    assert tokens["again"] == good
    assert [record.outcome for record in engine.records] == ["completed", "failed", "completed"]
    assert run(engine, [Request("fresh", [1] * 40, greedy(6))])["fresh"]


def test_running_out_of_memory_shrinks_the_batch_and_loses_nobody() -> None:
    model = tiny_model("llama")
    prompts = [[i + 1] * 40 for i in range(6)]
    good = run(engine_for(model), [Request(str(i), p, greedy(8)) for i, p in enumerate(prompts)])
    engine = engine_for(model)
    fail_on(engine, -1, torch.OutOfMemoryError("no memory"), rows=2)
    assert run(engine, [Request(str(i), p, greedy(8)) for i, p in enumerate(prompts)]) == good
    shrunk = [event.detail for event in engine.events if event.kind == "batch_limited"]
    assert shrunk[0]["rows"] < 6
    assert all(record.outcome == "completed" for record in engine.records)


def test_a_chunk_too_large_for_memory_is_computed_in_smaller_ones() -> None:
    model, prompt = tiny_model("llama"), [3] * 100
    good = run(engine_for(model), [Request("a", prompt, greedy(4))])
    engine = engine_for(model)
    forward = engine.executor._forward

    def small_memory(batch, kv):
        if len(batch.token_ids) > 30:
            raise MemoryError("no memory")
        return forward(batch, kv)

    engine.executor._forward = small_memory
    assert run(engine, [Request("a", prompt, greedy(4))]) == good


def test_a_broken_engine_says_so_fails_who_waits_and_comes_back() -> None:
    model = tiny_model("llama")
    engine = engine_for(model, max_num_seqs=2)
    run_step, broken = engine.executor._forward, [True]

    def faulty(batch, kv):
        if broken[0]:
            raise RuntimeError("device lost")
        return run_step(batch, kv)

    engine.executor._forward = faulty
    for index in range(5):
        engine.submit(Request(str(index), [index + 1] * 5, greedy(4)))
    for _ in range(20):
        if not engine.has_work:
            break
        engine.step()
        engine.check()
    assert not engine.health.ready
    assert "device lost" in engine.health.reason
    assert {record.outcome for record in engine.records} == {"failed"}
    assert engine.scheduler.kv.pool.num_used == 0
    with pytest.raises(Rejected, match="device lost"):
        engine.submit(Request("while broken", [1], greedy(1)))
    broken[0] = False
    engine.clock.sleep_until(engine.next_wake_ns())
    engine.step()
    assert engine.health.ready
    assert run(engine, [Request("after", [1] * 5, greedy(4))])["after"]
    recovered = [event for event in engine.events if event.kind == "recovered"]
    assert recovered[0].detail["after_ns"] > 0


def test_an_impossible_bias_fails_the_request_with_a_typed_error() -> None:
    llm = LLM(tiny_model("llama"))
    bias = {token: float("-inf") for token in range(320)}
    bad, good = llm.generate(["a", "b"], [SamplingParams(logit_bias=bias, max_tokens=3), greedy(3)])
    assert isinstance(bad.error, StepFailed)
    assert len(good.token_ids) == 3


# -- text and ends --------------------------------------------------------------------------


def test_streamed_text_equals_the_whole_and_stops_before_a_stop_string() -> None:
    model = tiny_model("llama")
    free = LLM(model).generate(["stop here"], greedy(40))[0]
    assert len(free.text) > 8
    for start in (3, len(free.text) // 2):
        stop = free.text[start : start + 3]
        cut = free.text[: free.text.index(stop)]
        llm = LLM(model)
        events = list(llm.stream("stop here", SamplingParams(max_tokens=40, stop=(stop, stop + "never"))))
        assert "".join(event.text for event in events) == cut
        assert events[-1].finish_reason == "stop"
        record = llm.engine.records[-1]
        assert record.finish_reason == "stop"
        assert record.output_tokens == sum(len(event.token_ids) for event in events)
        assert_empty(llm.engine)


def test_min_tokens_masks_ends_and_ignore_eos_goes_past_them() -> None:
    model, prompt = tiny_model("llama"), list(b"where it ends")
    free = run(engine_for(model), [Request("a", prompt, greedy(30))])["a"]
    stop = free[10]
    first = free.index(stop)
    stopped = run(
        engine_for(model), [Request("a", prompt, SamplingParams(max_tokens=30, stop_token_ids=(stop,)))]
    )
    assert stopped["a"] == free[: first + 1]
    longer = run(
        engine_for(model),
        [Request("a", prompt, SamplingParams(max_tokens=30, min_tokens=first + 2, stop_token_ids=(stop,)))],
    )
    assert longer["a"][:first] == free[:first]
    assert len(longer["a"]) >= first + 2
    assert stop not in longer["a"][: first + 1]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"params": SamplingParams(logit_bias={5000: 1.0})}, "5000"),
        ({"prompt_token_ids": [1, 999]}, "999 at position 1"),
        ({"prompt_token_ids": [1, -1]}, "-1 at position 1"),
    ],
)
def test_bad_requests_are_named(fields, message) -> None:
    engine = engine_for(tiny_model("llama"))
    with pytest.raises(ValueError, match=message):
        engine.submit(Request(**{"request_id": "r", "prompt_token_ids": [1], **fields}))
    assert engine.records == []


def test_a_request_id_in_use_is_refused_and_free_again_afterwards() -> None:
    engine = engine_for(tiny_model("llama"))
    engine.submit(Request("r", [1], greedy(2)))
    with pytest.raises(ValueError, match="in use"):
        engine.submit(Request("r", [1], greedy(2)))
    drain(engine)
    engine.submit(Request("r", [1], greedy(2)))
    drain(engine)


def test_closing_a_stream_early_cancels_it_and_frees_its_blocks() -> None:
    llm = LLM(tiny_model("llama"))
    stream = llm.stream("some prompt", greedy(200))
    next(stream)
    stream.close()
    assert llm.engine.records[-1].outcome == "cancelled"
    assert_empty(llm.engine)


def test_a_stream_and_a_generate_inside_it_both_get_all_their_tokens() -> None:
    llm = LLM(tiny_model("llama"))
    outer = [event.token_ids for event in LLM(tiny_model("llama")).stream("outer", greedy(6))]
    seen = []
    for number, event in enumerate(llm.stream("outer", greedy(6))):
        seen.append(event.token_ids)
        if number < 2:
            assert len(llm.generate(["inner"], greedy(3))[0].token_ids) == 3
    assert seen == outer
    assert_empty(llm.engine)


def test_a_tokenizer_that_raises_fails_its_request_alone() -> None:
    engine = engine_for(tiny_model("llama"))
    stream = engine._detokenizer.stream

    def faulty(stop=(), skip_special_tokens=True):
        text = stream(stop, skip_special_tokens)
        if len(engine.records) == 1:
            text.push = lambda *_, **__: 1 / 0
        return text

    engine._detokenizer.stream = faulty
    tokens = run(engine, [Request("bad", [1], greedy(3)), Request("good", [2], greedy(3))])
    assert len(tokens["good"]) == 3
    assert [record.outcome for record in engine.records] == ["failed", "completed"]


def test_one_bad_request_does_not_make_the_engine_refuse_the_next() -> None:
    engine = engine_for(tiny_model("llama"))
    bias = {token: float("-inf") for token in range(320)}
    engine.submit(Request("bad", [1], SamplingParams(logit_bias=bias, max_tokens=3)))
    engine.step()
    engine.submit(Request("next", [2], greedy(3)))
    assert len(drain(engine)["next"]) == 3


def test_seeds_of_samples_fit_a_signed_64_bit_column() -> None:
    engine = engine_for(tiny_model("llama"))
    run(engine, [Request("r", [1], SamplingParams(n=4, seed=1, max_tokens=1))])
    assert all(0 <= record.seed < 2**63 for record in engine.records)
    assert engine.records[0].seed == 1


def test_records_are_bounded() -> None:
    engine = engine_for(tiny_model("llama"), keep_records=3)
    run(engine, [Request(str(i), [1, 2], greedy(4)) for i in range(5)])
    assert [record.request_id for record in engine.records] == ["2", "3", "4"]
    assert len(engine.steps) == 3
