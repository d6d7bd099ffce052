"""The OpenAPI description against the server that it describes: whatever it allows, there is no 5xx."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from live_server import Live, serving
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import response_schema_conformance

from perflab.serve.parse import Limits

QUIET = (HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large)
PHASES = (Phase.explicit, Phase.generate)  # a failure is rare: no time for shrinking


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serving(limits=Limits(max_tokens=40)) as server:
        yield server
        server.assert_empty()


def check(live: Live, examples: int) -> None:
    """So many requests for each operation, sensible ones and others."""
    description = schemathesis.openapi.from_url(f"{live.url}/openapi.json")
    for found in description.get_all_operations():
        operation = found.ok()
        for mode in schemathesis.GenerationMode:
            if mode is schemathesis.GenerationMode.NEGATIVE and not operation.body:
                continue  # any text is a path

            @settings(max_examples=examples, deadline=None, suppress_health_check=QUIET, phases=PHASES)
            @given(case=operation.as_strategy(generation_mode=mode))
            def call(case: schemathesis.Case) -> None:
                response = case.call(timeout=30)
                case.validate_response(response, checks=[not_a_server_error, response_schema_conformance])
                if response.status_code >= 400:
                    assert set(response.json()["error"]) == {"message", "type", "param", "code"}

            call()


def test_whatever_is_described_gives_no_server_error(live: Live) -> None:
    check(live, 10)


@pytest.mark.verify
def test_whatever_is_described_gives_no_server_error_many_times(live: Live) -> None:
    check(live, 400)
