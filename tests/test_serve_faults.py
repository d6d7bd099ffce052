"""What goes wrong around a server: bad requests, too many, clients that leave, an engine that breaks."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator

import httpx
import openai
import pytest
from live_server import Live, eventually, serving

from perflab.engine.engine import Engine
from perflab.engine.plan import Plan
from perflab.serve.parse import Limits

LONG = {"max_tokens": 900, "ignore_eos": True}
TALK = {"messages": [{"role": "user", "content": "hi"}]}
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    limits = Limits(
        max_body_bytes=10_000, max_prompt_tokens=100, max_tokens=950, max_samples=12, max_waiting=6
    )
    with serving(limits=limits, max_num_seqs=4) as server:
        yield server


class Gate:
    """Holds each step of an engine back until it is opened, or for `pace_s`."""

    def __init__(self, pace_s: float = 0.0) -> None:
        self.open = threading.Event()
        self.open.set()
        self.pace_s = pace_s

    def __call__(self, engine: Engine) -> None:
        run = engine.executor.run

        def gated(plan: Plan):
            self.open.wait(20)
            time.sleep(self.pace_s)
            return run(plan)

        engine.executor.run = gated


def refused(response: httpx.Response, status: int, param: str | None = None, code: str | None = None) -> str:
    """The message of an error, whose shape is checked on the way."""
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert response.status_code == status, error
    assert error["param"] == param
    assert code in (None, error["code"])
    return error["message"]


class Asking:
    """Clients in a loop of their own, so that a test can let them leave all at once."""

    def __init__(self, live: Live, bodies: list[dict]) -> None:
        self._live, self._bodies = live, bodies
        self.tokens = 0  # events that came
        self.statuses: list[int] = []
        self.bodies: list[str] = []

    def __enter__(self) -> Asking:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._tasks = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()
        return self

    async def _start(self) -> list[asyncio.Task]:
        return [asyncio.create_task(self._one(body)) for body in self._bodies]

    async def _one(self, body: dict) -> None:
        async with (
            httpx.AsyncClient(base_url=self._live.url, timeout=30) as client,
            client.stream("POST", "/v1/completions", json=body) as response,
        ):
            self.statuses.append(response.status_code)
            text = ""
            async for line in response.aiter_lines():
                text += line + "\n"
                self.tokens += bool(line)
            self.bodies.append(text)

    def leave(self) -> None:
        asyncio.run_coroutine_threadsafe(self._cancel(), self._loop).result()

    async def _cancel(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def finish(self) -> None:
        async def wait() -> None:
            await asyncio.gather(*self._tasks)

        asyncio.run_coroutine_threadsafe(wait(), self._loop).result(30)

    def __exit__(self, *_: object) -> None:
        self.leave()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


# -- bad requests ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [""]}, "prompt"),
        ({"prompt": ["a", 5]}, "prompt[1]"),
        ({"prompt": [5, "a"]}, "prompt[1]"),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"prompt": [[1], []]}, "prompt[1]"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"prompt": "a" * 101}, "prompt"),
        ({"prompt": "a", "n": 0}, "n"),
        ({"prompt": "a", "n": 13}, "n"),
        ({"prompt": "a", "n": 1.5}, "n"),
        ({"prompt": "a", "n": True}, "n"),
        ({"prompt": ["a"] * 13}, "prompt"),
        ({"prompt": "a", "temperature": -1}, "temperature"),
        ({"prompt": "a", "temperature": "hot"}, "temperature"),
        ({"prompt": "a", "top_p": 0}, "top_p"),
        ({"prompt": "a", "top_p": 1.1}, "top_p"),
        ({"prompt": "a", "min_p": 2}, "min_p"),
        ({"prompt": "a", "presence_penalty": 3}, "presence_penalty"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "max_tokens": 951}, "max_tokens"),
        ({"prompt": "a", "max_tokens": 2, "min_tokens": 3}, "min_tokens"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({"prompt": "a", "logprobs": True}, "logprobs"),
        ({"prompt": "a", "stop": ""}, "stop"),
        ({"prompt": "a", "stop": ["a"] * 17}, "stop"),
        ({"prompt": "a", "stop": "a" * 257}, "stop"),
        ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"),
        ({"prompt": "a", "logit_bias": {"5": 101}}, "logit_bias.5"),
        ({"prompt": "a", "logit_bias": {"99999": 1}}, "logit_bias"),
        ({"prompt": "a", "stream": "yes"}, "stream"),
        ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
        ({"prompt": "a", "stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
        ({"prompt": "a", "deadline_s": 0}, "deadline_s"),
        ({"prompt": "a", "priority": "high"}, "priority"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "best_of": 2}, "best_of"),
        ({"prompt": "a", "guided_json": {}}, "guided_json"),
        ({"prompt": "a", "messages": []}, "messages"),
        ({"prompt": "a", "frobnicate": 1}, "frobnicate"),
    ],
)
def test_a_completion_that_makes_no_sense_names_its_field(live, body, param) -> None:
    refused(live.http.post("/v1/completions", content=json.dumps(body)), 400, param)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "tool", "content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0].type",
        ),
        ({"messages": [{"role": "user", "content": "hi", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
        ({**TALK, "tools": [{"type": "function"}]}, "tools"),
        ({**TALK, "tool_choice": "required"}, "tool_choice"),
        ({**TALK, "functions": [{}]}, "functions"),
        ({**TALK, "response_format": {"type": "json_object"}}, "response_format"),
        ({**TALK, "modalities": ["audio"]}, "modalities"),
        ({**TALK, "audio": {"voice": "x"}}, "audio"),
        ({**TALK, "top_logprobs": 2}, "top_logprobs"),
        ({**TALK, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({**TALK, "max_completion_tokens": 951}, "max_completion_tokens"),
        ({**TALK, "prompt": "x"}, "prompt"),
        ({"messages": [{"role": "user", "content": "a" * 100}]}, "messages"),
    ],
)
def test_a_chat_that_makes_no_sense_names_its_field(live, body, param) -> None:
    refused(live.post(CHAT, **body), 400, param)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"5", b'{"prompt": NaN}', b"\xff", b"[" * 5000, b'{"n": ' + b"9" * 5000 + b"}"]
)
def test_a_body_that_is_no_json_object(live, body: bytes) -> None:
    refused(live.http.post("/v1/completions", content=body), 400)


def test_a_prompt_and_answer_longer_than_the_model_state_need_and_limit(live) -> None:
    with serving(num_blocks=8) as small:
        message = refused(small.post(prompt="a" * 90, max_tokens=100), 400, None, "context_length_exceeded")
        assert "190" in message or "189" in message
        assert small.post(prompt="a", max_tokens=5).status_code == 200


def test_paths_methods_and_models_that_are_not_there(live) -> None:
    refused(live.http.get("/v1/embeddings"), 404)
    refused(live.http.get("/v1/completions"), 405)
    refused(live.post(prompt="a", model="gpt-4"), 404, "model", "model_not_found")


def test_a_body_too_long_is_refused_before_it_is_read(live) -> None:
    refused(live.post(prompt="a" * 20_000), 413, None, "body_too_large")

    def parts() -> Iterator[bytes]:
        yield b'{"prompt": "'
        for _ in range(20):
            yield b"a" * 1000

    refused(live.http.post("/v1/completions", content=parts()), 413, None, "body_too_large")


def test_an_answer_left_open_ends_at_the_servers_cap() -> None:
    with serving(limits=Limits(max_tokens=7)) as capped:
        answer = capped.post(CHAT, **TALK, ignore_eos=True).json()
        assert answer["usage"]["completion_tokens"] == 7


def test_a_key_is_asked_for_where_one_is_set() -> None:
    with serving(api_key="sécret") as guarded:
        for value in (None, "", "Bearer", "Bearer wrong", "Basic sécret", "sécret"):
            headers = {} if value is None else {"Authorization": value.encode()}
            response = guarded.http.post("/v1/completions", json={"prompt": "a"}, headers=headers)
            refused(response, 401, None, "invalid_api_key")
            assert guarded.http.get("/v1/models", headers=headers).status_code == 401
        good = {"Authorization": "Bearer sécret".encode()}
        assert guarded.http.post("/v1/completions", json={"prompt": "a"}, headers=good).status_code == 200
        assert guarded.http.get("/health").status_code == guarded.http.get("/metrics").status_code == 200


# -- too much --------------------------------------------------------------------------------


def test_a_full_queue_refuses_and_then_takes_again() -> None:
    """Four run, two wait, the seventh is told to come back."""
    gate = Gate()
    with serving(limits=Limits(max_waiting=2), max_num_seqs=4, prepare=gate) as live:
        gate.open.clear()
        with Asking(live, [{"prompt": "a", **LONG, "stream": True}] * 6) as clients:
            eventually(lambda: live.service.samples == 6)
            response = live.post(prompt="a")
            refused(response, 429, None, "queue_full")
            assert response.headers["retry-after"] == "1"
            refused(live.post(prompt="a", n=2), 429, None, "queue_full")
            clients.leave()
            gate.open.set()
            live.assert_empty()
        assert live.post(prompt="a").status_code == 200
        assert live.metric("request_refused_total") == 2


def test_a_request_that_waits_too_long_in_the_queue_never_runs() -> None:
    with serving(limits=Limits(queue_timeout_s=0.05), max_num_seqs=1, prepare=Gate(0.005)) as live:
        with Asking(live, [{"prompt": "first", **LONG, "stream": True}]) as clients:
            eventually(lambda: live.engine.scheduler.running)
            response = live.post(prompt="second", max_tokens=3)
            refused(response, 503, None, "queue_timeout")
            assert response.headers["retry-after"] == "1"
            clients.leave()
            live.assert_empty()
        second = next(r for r in live.engine.records if r.prompt_tokens == len("second"))
        assert second.admitted_ns is None
        assert second.outcome == "cancelled"


def test_a_slow_first_token_is_not_a_long_queue() -> None:
    gate = Gate()
    with serving(limits=Limits(queue_timeout_s=0.05), prepare=gate) as live:
        gate.open.clear()
        threading.Timer(0.2, gate.open.set).start()
        assert live.post(prompt="a", max_tokens=3).status_code == 200


def test_a_deadline_that_passes_before_a_token_is_an_error_afterwards_an_event(live) -> None:
    for stream in (False, True):
        response = live.post(prompt="a", deadline_s=1e-6, stream=stream, **LONG)
        refused(response, 408, "deadline_s", "deadline_exceeded")
    gate = Gate()
    with (
        serving(prepare=gate) as slow,
        slow.http.stream(
            "POST", "/v1/completions", json={"prompt": "a", "deadline_s": 0.3, "stream": True, **LONG}
        ) as response,
    ):
        lines = response.iter_lines()
        assert "choices" in next(lines)
        gate.open.clear()
        threading.Timer(0.4, gate.open.set).start()
        events = [line.removeprefix("data: ") for line in lines if line]
        assert json.loads(events[-2])["error"]["code"] == "deadline_exceeded"
        assert events[-1] == "[DONE]"
        slow.assert_empty()
        assert slow.engine.records[-1].outcome == "timed_out"


def test_priorities_reach_the_queue() -> None:
    with serving(max_num_seqs=1, policy="priority", prepare=Gate(0.005)) as live:
        bodies = [{"prompt": "a" * size, "max_tokens": 2, "priority": p} for size, p in ((2, 5), (3, 0))]
        with Asking(live, [{"prompt": "a", **LONG, "priority": -9}]) as first:
            eventually(lambda: live.engine.scheduler.running)
            with Asking(live, bodies) as others:
                eventually(lambda: len(live.engine.scheduler.waiting) == 2)
                first.leave()
                others.finish()
        admitted = {r.prompt_tokens: r.admitted_ns for r in live.engine.records if r.prompt_tokens in (2, 3)}
        assert admitted[3] < admitted[2]


# -- clients that leave ----------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("stream", [True, False])
def test_clients_that_leave_take_their_requests_with_them(live, n: int, stream: bool) -> None:
    """Ten samples: four run, the others wait; all of their clients go."""
    seen = {id(record) for record in live.engine.records}
    bodies = [{"prompt": "a", "stream": stream, "n": n, **LONG}] * (10 // n)
    with Asking(live, bodies) as clients:
        eventually(lambda: live.service.samples == 10 and len(live.engine.scheduler.waiting) == 6)
        if stream:
            eventually(lambda: clients.tokens >= 3)
        clients.leave()
        live.assert_empty()
    records = [record for record in live.engine.records if id(record) not in seen]
    assert len(records) == 10
    assert {record.outcome for record in records} == {"cancelled"}


def test_waiting_requests_whose_clients_are_gone_do_not_run() -> None:
    with serving(max_num_seqs=1, prepare=Gate(0.005)) as live:
        with Asking(live, [{"prompt": "stays", **LONG, "stream": True}]) as stays:
            eventually(lambda: live.engine.scheduler.running)
            with Asking(live, [{"prompt": "goes", "max_tokens": 3}] * 5) as go:
                eventually(lambda: len(live.engine.scheduler.waiting) == 5)
                go.leave()
            eventually(lambda: not len(live.engine.scheduler.waiting))
            assert live.service.samples == 1
            stays.leave()
        live.assert_empty()
        gone = [r for r in live.engine.records if r.prompt_tokens == len("goes")]
        assert [r.outcome for r in gone] == ["cancelled"] * 5
        assert all(r.admitted_ns is None for r in gone)


# -- an engine that breaks -------------------------------------------------------------------


def test_an_offender_fails_and_the_others_finish() -> None:
    """Five run and five wait; the step fails for one of them only."""
    with serving(max_num_seqs=5, prepare=_broken_row(13)) as live:
        bodies = [{"prompt": "a" * (10 + i), "max_tokens": 5, "ignore_eos": True} for i in range(10)]
        with Asking(live, bodies) as clients:
            clients.finish()
        assert sorted(clients.statuses) == [200] * 9 + [500]
        failed = next(json.loads(body)["error"] for body in clients.bodies if "error" in body)
        assert failed["code"] == "engine_error"
        assert failed["type"] == "server_error"
        assert "an injected fault" in failed["message"]
        assert live.ready(), "one bad request does not break a service"
        live.assert_empty()


def _broken_row(prompt_tokens: int):
    """The executor's own bisection finds the row: the forward pass raises while it is in the batch."""

    def prepare(engine: Engine) -> None:
        forward = engine.executor._forward

        def faulty(batch, kv):
            if prompt_tokens in batch.kv_len and prompt_tokens in batch.query_len:
                raise RuntimeError("an injected fault")
            return forward(batch, kv)

        engine.executor._forward = faulty

    return prepare


def test_a_broken_engine_is_unready_says_so_and_comes_back() -> None:
    broken = threading.Event()

    def prepare(engine: Engine) -> None:
        forward = engine.executor._forward

        def faulty(batch, kv):
            if broken.is_set():
                raise RuntimeError("an injected fault")
            return forward(batch, kv)

        engine.executor._forward = faulty

    with serving(max_num_seqs=5, prepare=prepare) as live:
        with Asking(live, [{"prompt": "a", "stream": True, **LONG}] * 5) as clients:
            eventually(lambda: clients.tokens > 5)
            broken.set()
            clients.finish()
            assert all("engine_" in body for body in clients.bodies), "each stream ends with an error event"
        for path in ("/health", "/ready"):
            response = live.http.get(path)
            assert "an injected fault" in refused(response, 503, None, "engine_broken")
        response = live.post(prompt="a")
        refused(response, 503, None, "engine_broken")
        assert response.headers["retry-after"] == "1"
        broken.clear()
        eventually(live.ready)
        assert live.http.get("/health").status_code == 200
        assert live.post(prompt="a").status_code == 200
        live.assert_empty()
        kinds = [event.kind for event in live.engine.events]
        assert kinds.index("broken") < kinds.index("recovered")


def test_a_step_that_never_ends_is_not_healthy(monkeypatch) -> None:
    monkeypatch.setattr("perflab.serve.service.STUCK_NS", 50_000_000)
    gate = Gate()
    with serving(prepare=gate) as live, Asking(live, [{"prompt": "a"}]) as clients:
        gate.open.clear()
        with Asking(live, [{"prompt": "a"}]) as more:
            eventually(lambda: live.http.get("/health").status_code == 503)
            refused(live.http.get("/ready"), 503, None, "engine_stuck")
            gate.open.set()
            eventually(live.ready)
            more.finish()
        clients.finish()


def test_it_is_healthy_but_not_ready_until_it_is_warm() -> None:
    gate = Gate()
    gate.open.clear()
    with serving(prepare=gate, wait=False) as live:
        assert live.http.get("/health").status_code == 200
        refused(live.http.get("/ready"), 503, None, "warming_up")
        refused(live.post(prompt="a"), 503, None, "warming_up")
        gate.open.set()
        eventually(live.ready)
        assert live.metric("iteration_tokens_total_count") == 0, "the warm-up is not counted"
        assert live.post(prompt="a").status_code == 200
        assert live.engine.records[-1].cached_tokens == 0


def test_what_runs_may_finish_when_it_stops() -> None:
    with serving(prepare=Gate(0.01)) as live, Asking(live, [{"prompt": "a", "max_tokens": 30}]) as clients:
        eventually(lambda: live.engine.scheduler.running)
        live.stop()
        clients.finish()
        assert clients.statuses == [200]
        assert json.loads(clients.bodies[0])["usage"]["completion_tokens"] == 30
    assert live.service.engine.stuck_ns() is None


def test_it_stops_in_bounded_time_with_streams_running() -> None:
    gate = Gate()
    with serving(prepare=gate) as live:
        client = openai.OpenAI(base_url=f"{live.url}/v1", api_key="any", max_retries=0)
        stream = client.completions.create(
            model=live.service.name, prompt="a", stream=True, max_tokens=900, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        gate.open.clear()
        threading.Timer(1.5, gate.open.set).start()  # a second is what running requests get
    assert live.service.engine.stuck_ns() is None, "the engine's thread has ended"
    assert not live.engine._live
    assert live.engine.scheduler.kv.pool.num_used == 0
    with pytest.raises(httpx.ConnectError):
        httpx.get(live.url + "/health")
