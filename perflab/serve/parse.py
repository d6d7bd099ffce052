"""From the bytes of a request to what the engine is asked: prompts, sampling, how the answer is sent.

Owns that translation and the caps on tokens and samples. Nothing of a body is evaluated or kept.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from perflab.config import check_types
from perflab.errors import ConfigError
from perflab.serve.errors import ApiError
from perflab.serve.fields import CHAT, COMPLETION, check_fields
from perflab.types import SamplingParams

Prompt = str | list[int] | list[dict[str, str]]
COMPLETION_TOKENS = 16  # OpenAI's default of /v1/completions; a chat goes on to the model's limit

_AS_THEY_ARE = (
    "n",
    "seed",
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
)


@dataclass(frozen=True, slots=True)
class Limits:
    """What one client may ask for, and how many may wait.

    max_tokens and max_prompt_tokens: of one sample; None leaves it to the model's limit.
    max_samples: answers of one request, prompts × n.
    max_waiting: samples beyond those that can run at once; more get status 429.
    queue_timeout_s: a request that has not started by then gets status 503.
    """

    max_body_bytes: int = 4 << 20
    max_prompt_tokens: int | None = None
    max_tokens: int | None = None
    max_samples: int = 128
    max_waiting: int = 1024
    queue_timeout_s: float | None = None

    def __post_init__(self) -> None:
        check_types(self, ConfigError)
        for name in self.__slots__:
            value = getattr(self, name)
            lowest = 0 if name == "max_waiting" else 1
            if value is not None and name != "queue_timeout_s" and value < lowest:
                raise ConfigError(f"{name}={value}: must be {lowest} or more")
        if self.queue_timeout_s is not None and self.queue_timeout_s <= 0:
            raise ConfigError(f"queue_timeout_s={self.queue_timeout_s}: must be above 0")


@dataclass(frozen=True, slots=True)
class Asked:
    """One HTTP request, checked. `params` hold for each of the prompts."""

    prompts: list[Prompt]
    params: SamplingParams
    model: str | None
    stream: bool
    usage: bool  # a last chunk with usage
    usage_in_chunks: bool  # usage so far in each chunk
    echo: bool
    token_ids: bool
    priority: int
    deadline_s: float | None
    salt: str | None

    @property
    def samples(self) -> int:
        return len(self.prompts) * self.params.n


def parse(body: bytes, chat: bool, defaults: SamplingParams, limits: Limits) -> Asked:
    """Check a body and fill in `defaults`, the model's own. Raises ApiError that names the field."""
    given = check_fields(_json(body), CHAT if chat else COMPLETION)
    prompts: list[Prompt]
    if chat:
        prompts = [_messages(_required(given, "messages"))]
    else:
        prompt = _required(given, "prompt")
        several = isinstance(prompt, list) and not isinstance(prompt[0], int)
        prompts = prompt if several else [prompt]
    options = given.get("stream_options", {})
    if options and not given.get("stream"):
        raise ApiError(400, "stream_options needs stream=true", "stream_options", "invalid_value")
    asked = Asked(
        prompts,
        _params(given, chat, defaults, limits),
        given.get("model"),
        given.get("stream", False),
        options.get("include_usage", False),
        options.get("continuous_usage_stats", False),
        given.get("echo", False),
        given.get("return_token_ids", False),
        given.get("priority", 0),
        given.get("deadline_s"),
        given.get("cache_salt"),
    )
    if asked.samples > limits.max_samples:
        what = "n" if len(prompts) == 1 else "prompt"
        raise ApiError(
            400,
            f"{asked.samples} answers asked for; one request may have {limits.max_samples}",
            what,
            "too_many_samples",
        )
    return asked


def _json(body: bytes) -> Any:
    def refuse(word: str) -> None:
        raise ValueError(f"{word} is not JSON")

    try:
        return json.loads(body, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None


def _required(given: Mapping[str, Any], name: str) -> Any:
    if name not in given:
        raise ApiError(400, f"{name} is missing", name, "missing_parameter")
    return given[name]


def _messages(messages: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Roles and texts, parts of text joined; the newer name of `system` is what templates don't know."""
    found = []
    for message in messages:
        content = message["content"]
        text = content if isinstance(content, str) else "".join(part["text"] for part in content)
        role = "system" if message["role"] == "developer" else message["role"]
        found.append({"role": role, "content": text})
    return found


def _params(given: Mapping[str, Any], chat: bool, defaults: SamplingParams, limits: Limits) -> SamplingParams:
    fields = {name: given[name] for name in _AS_THEY_ARE if name in given}
    if "top_k" in given:
        fields["top_k"] = max(0, given["top_k"])  # -1 is a common word for off
    stop = given.get("stop", ())
    fields["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    fields["stop_token_ids"] = tuple(given.get("stop_token_ids", ()))
    fields["logit_bias"] = {int(token): bias for token, bias in given.get("logit_bias", {}).items()}
    name = "max_completion_tokens" if "max_completion_tokens" in given else "max_tokens"
    fields["max_tokens"] = given.get(name, None if chat else COMPLETION_TOKENS)
    if limits.max_tokens is not None and (fields["max_tokens"] or 0) > limits.max_tokens:
        raise ApiError(
            400,
            f"{name}={fields['max_tokens']} is above this server's cap of {limits.max_tokens}",
            name,
            "max_tokens_too_large",
        )
    fields["logprobs"] = _logprobs(given) if chat else given.get("logprobs")
    if given.get("echo") and fields["logprobs"] is not None:
        fields["prompt_logprobs"] = fields["logprobs"]
    try:
        return replace(defaults, **fields)
    except ValueError as error:
        raise from_value_error(error) from None


def _logprobs(given: Mapping[str, Any]) -> int | None:
    if given.get("logprobs"):
        return given.get("top_logprobs", 0)
    if given.get("top_logprobs"):
        raise ApiError(400, "top_logprobs needs logprobs=true", "top_logprobs", "invalid_value")
    return None


def from_value_error(error: ValueError) -> ApiError:
    """`top_p=2: must be …` names its field at the beginning."""
    named = re.match(r"(\w+)(?:=|\[| names)", str(error))
    return ApiError(400, str(error), named and named.group(1), "invalid_value")
