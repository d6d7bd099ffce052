"""When requests are sent: by the timetable however slow the answers are, or by users who wait for them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import pairwise

import pytest
from virtual_loop import run

from perflab.clock import NS_PER_S
from perflab.errors import WorkloadError
from perflab.load.arrivals import Arrivals
from perflab.load.pacing import ClosedLoop, OpenLoop
from perflab.load.sessions import sessions
from perflab.load.workloads import synthetic


def paced(pacing, workload, service_s=1.0, stop_at=None, fails=()):
    """[(request id, intended, sent, ended)] in seconds, of a service that takes `service_s` seconds for
    each request, however many there are."""
    seen = []

    async def main():
        clock, stop = asyncio.get_running_loop(), asyncio.Event()
        start = clock.now()

        async def send(request, intended):
            row = [request.request_id, (intended - start) / NS_PER_S, (clock.now() - start) / NS_PER_S, None]
            seen.append(row)
            await asyncio.sleep(service_s)
            row[3] = (clock.now() - start) / NS_PER_S

        if stop_at is not None:
            clock.call_later(stop_at, stop.set)
        await pacing.run(workload, send, clock, start, stop)

    run(main())
    return seen


def timetable(n=5, rate=2.0, **more):
    return synthetic(requests=n, arrivals=Arrivals("constant", rate), **more)


def test_an_open_loop_sends_by_its_timetable_however_slow_the_server_is():
    for service_s in (0.01, 60.0):
        seen = paced(OpenLoop(), timetable(), service_s)
        assert [sent for _, _, sent, _ in seen] == pytest.approx([0.0, 0.5, 1.0, 1.5, 2.0], abs=1e-6)
        assert [intended for _, intended, _, _ in seen] == [0.0, 0.5, 1.0, 1.5, 2.0]
        assert all(ended == pytest.approx(sent + service_s, abs=1e-6) for *_, sent, ended in seen)


def test_a_closed_loop_never_has_more_in_flight_than_users():
    seen = paced(ClosedLoop(users=3), timetable(7))
    assert [sent for _, _, sent, _ in seen] == pytest.approx([0, 0, 0, 1, 1, 1, 2], abs=1e-6)
    assert len({name for name, *_ in seen}) == 7


def test_users_think_between_an_answer_and_the_next_question():
    seen = paced(ClosedLoop(users=1, think_s=0.5), timetable(3))
    assert [intended for _, intended, _, _ in seen] == pytest.approx([0.0, 1.5, 3.0], abs=1e-6)


def test_a_closed_loop_ends_by_number_and_repeats_under_new_names():
    load = ClosedLoop(users=2, requests=7)
    workload = timetable(3).salted("s")
    seen = [name for name, *_ in paced(load, workload)]
    assert len(seen) == load.planned(workload) == 7
    assert seen[3:] == [f"{name}~1" for name in seen[:3]] + [f"{seen[0]}~2"]
    assert {r.repeated(n).salt for r in workload.requests for n in (0, 1, 2)} == {"s", "s.1", "s.2"}


def test_a_closed_loop_ends_by_time_and_waits_for_its_last_answers():
    load = ClosedLoop(users=2, duration_s=4.5)
    seen = paced(load, timetable(3))
    assert load.planned(timetable(3)) is None
    assert len(seen) == 10
    assert max(ended for *_, ended in seen) == pytest.approx(5.0, abs=1e-6)


def test_turns_of_a_session_never_overlap_in_either_loop():
    talk = sessions(sessions=2, turns=3, think_s=2.0, arrivals=Arrivals("constant", 1.0))
    for pacing in (OpenLoop(), ClosedLoop(users=2)):
        seen = paced(pacing, talk)
        by_session = {
            s: [row for row in seen if row[0].startswith(s)] for s in ("sessions-000", "sessions-001")
        }
        for rows in by_session.values():
            assert [row[0][-1] for row in rows] == ["0", "1", "2"]
            for (*_, ended), (_, intended, _, _) in pairwise(rows):
                assert intended == pytest.approx(ended + 2.0, abs=1e-6)
    assert [rows[0][1] for rows in by_session.values()] == [0.0, 0.0]  # users start at once


def test_a_turn_waits_for_its_own_time_where_that_is_later():
    talk = sessions(sessions=1, turns=2, arrivals=Arrivals())
    later = replace(talk, requests=(talk.requests[0], replace(talk.requests[1], arrival_s=9.0)))
    assert paced(OpenLoop(), later)[1][1] == 9.0


@pytest.mark.parametrize("pacing", [OpenLoop(), ClosedLoop(users=1)])
def test_a_stop_sends_nothing_more_and_lets_what_runs_end(pacing):
    seen = paced(pacing, timetable(9, rate=1.0), stop_at=2.5)
    assert [sent for _, _, sent, _ in seen] == pytest.approx([0, 1, 2], abs=1e-6)
    assert seen[-1][3] == pytest.approx(3.0, abs=1e-6)


@pytest.mark.parametrize("pacing", [OpenLoop(), ClosedLoop(users=2)])
def test_a_cancelled_run_cancels_what_is_in_flight(pacing):
    open_ones = []

    async def main():
        async def send(request, intended):
            open_ones.append(request.request_id)
            try:
                await asyncio.sleep(100)
            finally:
                open_ones.remove(request.request_id)

        clock = asyncio.get_running_loop()
        task = asyncio.create_task(pacing.run(timetable(9), send, clock, clock.now(), asyncio.Event()))
        await asyncio.sleep(3)
        assert open_ones
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(main())
    assert open_ones == []


@pytest.mark.parametrize(
    "bad",
    [{"users": 0}, {"users": 1, "think_s": -1}, {"users": 1, "requests": 0}, {"users": 1, "duration_s": 0}],
)
def test_impossible_users_are_refused(bad):
    with pytest.raises(WorkloadError):
        ClosedLoop(**bad)
