"""The server as an OpenAI client sees it: endpoints, options, streams, usage, log-probabilities."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise

import openai
import pytest
from live_server import Live, serving

from perflab.engine.llm import LLM
from perflab.models.tiny import tiny
from perflab.types import SamplingParams

TALK = [{"role": "user", "content": "hi"}]
LONG = {"ignore_eos": True}


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serving() as server:
        yield server
        server.assert_empty()


@pytest.fixture(scope="module")
def client(live: Live) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{live.url}/v1", api_key="any", max_retries=0)


@pytest.fixture(scope="module")
def expect():
    """What the engine answers to a prompt in this process, without a server."""
    llm = LLM(tiny("llama"))

    def answer(prompt, **params) -> tuple[str, str]:
        done = llm.generate([prompt], SamplingParams(**params))[0]
        return done.text, done.finish_reason

    yield answer
    llm.close()


def test_models(client: openai.OpenAI, live: Live) -> None:
    cards = client.models.list().data
    assert [card.id for card in cards] == [live.service.name]
    assert client.models.retrieve(live.service.name).max_model_len == 1024
    with pytest.raises(openai.NotFoundError, match="nobody"):
        client.models.retrieve("nobody")


def test_a_chat_is_what_the_engine_says(client, live, expect) -> None:
    prompt = tiny("llama").chat(TALK)
    answer = client.chat.completions.create(
        model=live.service.name, messages=TALK, max_completion_tokens=12, temperature=0, extra_body=LONG
    )
    text, _ = expect(prompt, max_tokens=12, ignore_eos=True)
    assert answer.choices[0].message.content == text
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == len(prompt) + 12


def stream_of(client: openai.OpenAI, **body):
    return list(client.chat.completions.create(messages=TALK, stream=True, **body))


def test_a_chat_streams_the_same_text(client, live, expect) -> None:
    chunks = stream_of(
        client,
        model=live.service.name,
        max_tokens=12,
        stream_options={"include_usage": True},
        extra_body=LONG,
    )
    *words, last = chunks
    text, _ = expect(tiny("llama").chat(TALK), max_tokens=12, ignore_eos=True)
    assert "".join(c.choices[0].delta.content for c in words) == text
    assert [c.choices[0].delta.role for c in words] == ["assistant"] + [None] * (len(words) - 1)
    assert [c.choices[0].finish_reason for c in words] == [None] * (len(words) - 1) + ["length"]
    assert last.choices == []
    assert last.usage.completion_tokens == 12
    assert len({c.id for c in chunks}) == 1
    plain = stream_of(client, model=live.service.name, max_tokens=3, extra_body=LONG)
    assert all(c.choices and c.usage is None for c in plain)


def test_usage_so_far_in_each_chunk(client, live) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {**LONG, "return_token_ids": True}
    chunks = stream_of(client, model=live.service.name, max_tokens=4, stream_options=options, extra_body=body)
    assert [c.usage.completion_tokens for c in chunks] == [1, 2, 3, 4, 4]


@pytest.mark.parametrize(
    "prompt", ["ab", "grüße", ["ab", "cd", "ab"], [97, 98], [[97, 98], [99, 100]], "  \n\t"]
)
@pytest.mark.parametrize("stream", [False, True])
def test_every_form_of_a_completions_prompt(client, live, expect, prompt, stream: bool) -> None:
    several = isinstance(prompt, list) and not isinstance(prompt[0], int)
    prompts = prompt if several else [prompt]
    wanted = [expect(p, max_tokens=6, ignore_eos=True)[0] for p in prompts]
    answer = client.completions.create(
        model=live.service.name, prompt=prompt, max_tokens=6, stream=stream, extra_body=LONG
    )
    found = dict.fromkeys(range(len(prompts)), "")
    for part in answer if stream else [answer]:
        for choice in part.choices:
            found[choice.index] += choice.text
    assert list(found.values()) == wanted


def test_a_completion_has_sixteen_tokens_unless_told_otherwise(client, live) -> None:
    answer = client.completions.create(model=live.service.name, prompt="ab", extra_body=LONG)
    assert answer.usage.completion_tokens == 16


@pytest.mark.parametrize("stream", [False, True])
def test_n_samples_of_one_prompt(client, live, stream: bool) -> None:
    answer = client.chat.completions.create(
        model=live.service.name,
        messages=TALK,
        n=3,
        seed=5,
        temperature=1.5,
        max_tokens=8,
        stream=stream,
        extra_body=LONG,
    )
    texts = ["", "", ""]
    reasons = [None] * 3
    for part in answer if stream else [answer]:
        for choice in part.choices:
            texts[choice.index] += (choice.delta if stream else choice.message).content
            reasons[choice.index] = choice.finish_reason
    assert len(set(texts)) == 3
    assert reasons == ["length"] * 3
    if not stream:
        assert answer.usage.completion_tokens == 24
        assert answer.usage.prompt_tokens == len(tiny("llama").chat(TALK))


def test_a_seed_repeats_an_answer(client, live) -> None:
    def ask(seed: int) -> str:
        answer = client.completions.create(
            model=live.service.name, prompt="ab", seed=seed, temperature=2, max_tokens=12, extra_body=LONG
        )
        return answer.choices[0].text

    assert ask(1) == ask(1) != ask(2)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.7, "seed": 3},
        {"temperature": 1.0, "top_p": 0.5, "seed": 3},
        {"temperature": 1.0, "top_k": 3, "seed": 3},
        {"temperature": 1.0, "min_p": 0.2, "seed": 3},
        {"presence_penalty": 1.5},
        {"frequency_penalty": -1.5},
        {"repetition_penalty": 1.7},
        {"logit_bias": {"65": 100}},
        {"logit_bias": {"65": -100}},
        {"min_tokens": 5},
        {"stop_token_ids": [92]},
        {"top_k": -1},
    ],
)
def test_every_sampling_option_reaches_the_engine(live, expect, options) -> None:
    answer = live.post(prompt="ab", max_tokens=10, **options).json()
    params = dict(options)
    params["logit_bias"] = {int(k): v for k, v in params.get("logit_bias", {}).items()}
    params["top_k"] = max(0, params.get("top_k", 0))
    assert answer["choices"][0]["text"] == expect("ab", max_tokens=10, **params)[0]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("several", [False, True])
def test_a_stop_string_ends_the_text_before_it(client, live, expect, stream: bool, several: bool) -> None:
    whole, _ = expect("ab", max_tokens=30, ignore_eos=True)
    stop = whole[4:6]
    answer = client.completions.create(
        model=live.service.name,
        prompt="ab",
        max_tokens=30,
        stop=[stop, "never seen"] if several else stop,
        stream=stream,
        extra_body=LONG,
    )
    parts = list(answer) if stream else [answer]
    assert "".join(part.choices[0].text for part in parts) == whole[: whole.index(stop)]
    assert parts[-1].choices[0].finish_reason == "stop"


def test_echo_gives_the_prompt_first(client, live, expect) -> None:
    text, _ = expect("ab", max_tokens=3, ignore_eos=True)
    body = {"model": live.service.name, "max_tokens": 3, "echo": True, "extra_body": LONG}
    assert client.completions.create(prompt="ab", **body).choices[0].text == "ab" + text
    parts = list(client.completions.create(prompt=[97, 98], stream=True, **body))
    assert "".join(part.choices[0].text for part in parts) == "ab" + text


def test_logprobs_of_a_completion(client, live) -> None:
    answer = client.completions.create(
        model=live.service.name, prompt="ab", max_tokens=3, logprobs=2, echo=True, extra_body=LONG
    )
    found = answer.choices[0].logprobs
    assert found.tokens[:2] == ["a", "b"]
    assert len(found.tokens) == 5
    assert found.token_logprobs[0] is None
    assert all(value < 0 for value in found.token_logprobs[1:])
    assert found.text_offset[:3] == [0, 1, 2]
    best = max(found.top_logprobs[2].values())
    assert found.token_logprobs[2] == best, "greedy takes the most likely token"


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_a_chat(client, live, stream: bool) -> None:
    answer = client.chat.completions.create(
        model=live.service.name,
        messages=TALK,
        max_tokens=4,
        logprobs=True,
        top_logprobs=3,
        stream=stream,
        extra_body=LONG,
    )
    content = [t for part in (answer if stream else [answer]) for t in part.choices[0].logprobs.content]
    assert len(content) == 4
    for token in content:
        assert len(token.top_logprobs) == 3
        assert token.logprob == max(top.logprob for top in token.top_logprobs)
        assert bytes(token.bytes).decode() == token.token


def test_token_ids_come_back_when_asked_for(live) -> None:
    model = tiny("llama")
    answer = live.post(prompt=[97, 98], max_tokens=6, return_token_ids=True, **LONG).json()["choices"][0]
    assert len(answer["token_ids"]) == 6
    assert model.decode(answer["token_ids"]) == answer["text"]


def test_messages_may_be_parts_and_developers_are_systems(live) -> None:
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    system = {"role": "developer", "content": "s"}
    one = live.post(
        "/v1/chat/completions", messages=[system, {"role": "user", "content": parts}], max_tokens=4
    ).json()
    other = live.post(
        "/v1/chat/completions",
        messages=[{"role": "system", "content": "s"}, {"role": "user", "content": "hi", "name": None}],
        max_tokens=4,
    ).json()
    assert one["choices"] == other["choices"]
    assert one["usage"]["prompt_tokens"] == other["usage"]["prompt_tokens"]


def test_without_a_limit_a_chat_goes_on_to_the_models(live) -> None:
    answer = live.post("/v1/chat/completions", messages=TALK, **LONG).json()
    assert answer["usage"]["total_tokens"] == 1024


def test_fields_that_change_nothing_and_nulls_are_let_through(live) -> None:
    body = {"user": "me", "metadata": {"a": "b"}, "store": False, "tools": None, "seed": None, "foo": None}
    body |= {"tool_choice": "none", "response_format": {"type": "text"}, "best_of": 1, "suffix": ""}
    assert live.post(prompt="ab", max_tokens=1, **body).status_code == 200


def test_spans_cover_the_servers_part_of_a_request(live) -> None:
    def read(answer: dict) -> tuple[dict, list]:
        return answer["perflab"], [s[0] for s in answer["perflab"]["spans"]]

    headers = {"X-Perflab-Spans": "1"}
    whole = live.http.post("/v1/completions", json={"prompt": "ab", "max_tokens": 4, **LONG}, headers=headers)
    extra, names = read(whole.json())
    assert names[:5] == ["receive", "parse", "tokenise", "hand_over", "queue"]
    assert names.count("prefill forward") == 1
    assert names.count("decode forward") == 3
    assert names[-2:] == ["hand_back", "serialise"]
    assert len(extra["step_indices"]) == 4
    timing = whole.headers["server-timing"]
    assert all(f"{name.replace(' ', '_')};dur=" in timing for name in names)

    streamed = live.http.post(
        "/v1/completions", json={"prompt": "ab", "max_tokens": 4, "stream": True, **LONG}, headers=headers
    )
    *_, last, done = [line for line in streamed.text.split("\n\n") if line]
    assert done == "data: [DONE]"
    extra, names = read(json.loads(last.removeprefix("data: ")))
    assert names[-3:] == ["hand_back", "serialise", "write"]
    spans = extra["spans"]
    assert all(start <= end for _, start, end in spans)
    assert all(a[2] <= b[1] for a, b in pairwise(spans)), "exclusive, in order"
    assert "perflab" not in live.post(prompt="ab", max_tokens=1).json()


def test_metrics_count_what_was_served(live) -> None:
    names = ("prompt_tokens_total", "generation_tokens_total", "iteration_tokens_total_count")
    names += ("time_to_first_token_seconds_count", "inter_token_latency_seconds_count")
    names += ("e2e_request_latency_seconds_count", "request_queue_time_seconds_count")
    names += ("time_per_output_token_seconds_count", "prefix_cache_queries_total")
    before = {name: live.metric(name) for name in names}
    hits = live.metric("prefix_cache_hits_total")
    prompt = [7] * 40
    for _ in range(2):
        live.post(prompt=prompt, max_tokens=6, **LONG)
    live.assert_empty()
    change = [live.metric(name) - before[name] for name in names]
    assert change == [80, 12, 12, 2, 10, 2, 2, 2, 80]
    assert live.metric("prefix_cache_hits_total") - hits == 32, "two full blocks of sixteen"
    assert live.metric("num_requests_running") == live.metric("num_requests_waiting") == 0
    assert live.metric("kv_cache_usage_perc") == 0
    reasons = live.samples("request_success_total")
    assert any('finished_reason="length"' in labels for labels in reasons)


def test_health_and_description(live) -> None:
    assert live.http.get("/health").status_code == 200
    assert live.http.get("/ready").status_code == 200
    paths = live.http.get("/openapi.json").json()["paths"]
    assert {"/v1/models", "/v1/completions", "/v1/chat/completions", "/health", "/ready", "/metrics"} <= set(
        paths
    )
