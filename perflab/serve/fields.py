"""The fields of a request: what each may hold, which are refused by name, which mean nothing here.

Owns the JSON schemas. The check and the OpenAPI description both read them, so they cannot disagree.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from perflab.serve.errors import ApiError

Schema = Mapping[str, Any]

_BOOL: Schema = {"type": "boolean"}
_TEXT: Schema = {"type": "string"}
_INT64 = 2**63 - 1
_TOKEN: Schema = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
_TOKENS: Schema = {"type": "array", "items": _TOKEN, "minItems": 1}
_WORDS: Schema = {"type": "string", "minLength": 1, "maxLength": 256}


def _whole(low: int, high: int) -> Schema:
    return {"type": "integer", "minimum": low, "maximum": high}


def _number(low: float, high: float) -> Schema:
    return {"type": "number", "minimum": low, "maximum": high}


COMMON: Mapping[str, Schema] = MappingProxyType(
    {
        "model": _TEXT,
        "stream": _BOOL,
        "stream_options": {
            "type": "object",
            "properties": {"include_usage": _BOOL, "continuous_usage_stats": _BOOL},
            "additionalProperties": False,
        },
        "n": _whole(1, 128),
        "stop": {"anyOf": [_WORDS, {"type": "array", "items": _WORDS, "maxItems": 16}]},
        "seed": _whole(-_INT64, _INT64),
        "temperature": _number(0, 1000),
        "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        "top_k": _whole(-1, _INT64),
        "min_p": _number(0, 1),
        "presence_penalty": _number(-2, 2),
        "frequency_penalty": _number(-2, 2),
        "repetition_penalty": _number(0.01, 100),
        "logit_bias": {
            "type": "object",
            "additionalProperties": _number(-100, 100),
            "propertyNames": {"pattern": "^[0-9]{1,9}$"},
            "maxProperties": 1024,
        },
        "max_tokens": _whole(1, _INT64),
        "min_tokens": _whole(0, _INT64),
        "ignore_eos": _BOOL,
        "stop_token_ids": {"type": "array", "items": _TOKEN, "maxItems": 1024},
        "return_token_ids": _BOOL,
        "priority": _whole(-1_000_000, 1_000_000),
        "deadline_s": {"type": "number", "exclusiveMinimum": 0, "maximum": 1e6},
        "cache_salt": {"type": "string", "maxLength": 256},
    }
)
_PART: Schema = {
    "type": "object",
    "properties": {"type": {"type": "string", "enum": ["text"]}, "text": _TEXT},
    "required": ["type", "text"],
}
_MESSAGE: Schema = {
    "type": "object",
    "properties": {
        "role": {"type": "string", "enum": ["system", "developer", "user", "assistant"]},
        "content": {"anyOf": [_TEXT, {"type": "array", "items": _PART, "minItems": 1}]},
        "name": _TEXT,
    },
    "required": ["role", "content"],
}
CHAT: Mapping[str, Schema] = MappingProxyType(
    {
        "messages": {"type": "array", "items": _MESSAGE, "minItems": 1},
        **COMMON,
        "max_completion_tokens": _whole(1, _INT64),
        "logprobs": _BOOL,
        "top_logprobs": _whole(0, 20),
    }
)
_PROMPTS: tuple[Schema, ...] = (
    _TEXT,
    {"type": "array", "items": _TEXT, "minItems": 1},
    _TOKENS,
    {"type": "array", "items": _TOKENS, "minItems": 1},
)
COMPLETION: Mapping[str, Schema] = MappingProxyType(
    {"prompt": {"anyOf": _PROMPTS}, **COMMON, "echo": _BOOL, "logprobs": _whole(0, 20)}
)

HARMLESS = frozenset(
    (
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "verbosity",
        "request_id",
    )
)
"""Fields that change no answer here: accepted and ignored."""

NOT_SUPPORTED: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "parallel_tool_calls": (True, False),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "response_format": ({"type": "text"},),
        "guided_json": (),
        "guided_regex": (),
        "guided_choice": (),
        "guided_grammar": (),
        "structured_outputs": (),
        "audio": (),
        "modalities": (["text"],),
        "prediction": (),
        "reasoning_effort": (),
        "web_search_options": (),
        "chat_template": (),
        "chat_template_kwargs": ({},),
        "suffix": ("",),
        "best_of": (1,),
        "use_beam_search": (False,),
        "prompt_logprobs": (),
    }
)
"""Known fields that are not supported, with the values that ask for nothing and are let through."""


def check_fields(body: Any, fields: Mapping[str, Schema]) -> dict[str, Any]:
    """The fields that are set, as the schemas want them. Raises ApiError naming the first that isn't."""
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_body")
    found = {}
    for name, value in body.items():
        if value is None or name in HARMLESS:
            continue
        if name in fields:
            found[name] = _checked(value, fields[name], name)
        elif name not in NOT_SUPPORTED:
            raise ApiError(400, f"unknown field {name[:100]!r}", name[:100], "unknown_parameter")
        elif value not in NOT_SUPPORTED[name]:
            raise ApiError(400, f"{name} is not supported by this server", name, "unsupported_parameter")
    return found


def _checked(value: Any, schema: Schema, path: str) -> Any:
    if "anyOf" in schema:
        return _any_of(value, schema["anyOf"], path)
    match schema["type"]:
        case "boolean":
            _require(isinstance(value, bool), path, "true or false")
        case "integer":
            return _in_range(_integer(value, path), schema, path)
        case "number":
            _require(isinstance(value, int | float) and not isinstance(value, bool), path, "a number")
            _require(math.isfinite(value), path, "a finite number")
            return _in_range(value, schema, path)
        case "string":
            _text(value, schema, path)
        case "array":
            return _array(value, schema, path)
        case "object":
            return _object(value, schema, path)
    return value


def _any_of(value: Any, choices: tuple[Schema, ...], path: str) -> Any:
    """By the first choice of the right kind: a list's first item says which kind of list it is."""
    for schema in choices:
        if isinstance(value, str) and schema["type"] == "string":
            return _checked(value, schema, path)
        if isinstance(value, list) and schema["type"] == "array":
            kind = schema["items"]["type"]
            first = value[0] if value else None
            if (kind == "string") == isinstance(first, str) and (kind == "array") == isinstance(first, list):
                return _checked(value, schema, path)
    allowed = "text or a list" if len(choices) == 2 else "text, a list of texts, token ids, or lists of them"
    raise ApiError(400, f"{path} must be {allowed}", path, "invalid_type")


def _require(ok: bool, path: str, allowed: str) -> None:
    if not ok:
        raise ApiError(400, f"{path} must be {allowed}", path, "invalid_value")


def _integer(value: Any, path: str) -> int:
    whole = isinstance(value, int) and not isinstance(value, bool)
    _require(whole or (isinstance(value, float) and value.is_integer()), path, "a whole number")
    return int(value)


def _in_range(value: Any, schema: Schema, path: str) -> Any:
    low, high = schema.get("minimum"), schema["maximum"]
    if low is None:
        _require(schema["exclusiveMinimum"] < value <= high, path, f"above 0 and at most {high}")
    else:
        _require(low <= value <= high, path, f"from {low} to {high}")
    return value


def _text(value: Any, schema: Schema, path: str) -> None:
    _require(isinstance(value, str), path, "text")
    if "enum" in schema and value not in schema["enum"]:
        raise ApiError(
            400,
            f"{path}={value[:100]!r} is not supported: only {', '.join(schema['enum'])}",
            path,
            "unsupported_value",
        )
    longest = schema.get("maxLength")
    _require(len(value) >= schema.get("minLength", 0), path, "not empty")
    _require(longest is None or len(value) <= longest, path, f"at most {longest} characters long")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ApiError(400, f"{path} holds half of a surrogate pair", path, "invalid_unicode") from None


def _array(value: Any, schema: Schema, path: str) -> list[Any]:
    _require(isinstance(value, list), path, "a list")
    most = schema.get("maxItems")
    _require(len(value) >= schema.get("minItems", 0), path, "not empty")
    _require(most is None or len(value) <= most, path, f"at most {most} items long")
    items = schema["items"]
    if items is _TOKEN and all(type(item) is int and 0 <= item < 2**31 for item in value):
        return value  # thousands of ids: one pass is enough
    return [_checked(item, items, f"{path}[{index}]") for index, item in enumerate(value)]


def _object(value: Any, schema: Schema, path: str) -> dict[str, Any]:
    _require(isinstance(value, dict), path, "an object")
    known = schema.get("properties", {})
    if "maxProperties" in schema:
        _require(len(value) <= schema["maxProperties"], path, f"at most {schema['maxProperties']} entries")
        others = schema["additionalProperties"]
        for name in value:
            digits = name.isascii() and name.isdigit() and len(name) < 10
            _require(digits, path, "an object from token ids to numbers")
        return {name: _checked(item, others, f"{path}.{name}") for name, item in value.items()}
    given = {name: item for name, item in value.items() if item is not None}
    found = {name: _checked(given[name], known[name], f"{path}.{name}") for name in known if name in given}
    if others := [name for name in given if name not in known]:
        where = f"{path}.{others[0][:100]}"
        raise ApiError(400, f"{where} is not supported by this server", where, "unsupported_parameter")
    for name in schema.get("required", ()):
        if name not in found:
            raise ApiError(400, f"{path}.{name} is missing", f"{path}.{name}", "missing_parameter")
    return found


def openapi_body(fields: Mapping[str, Schema], required: str) -> dict[str, Any]:
    """The request body for an OpenAPI description; every field that isn't required may be null."""
    properties = {
        name: schema if name == required else {"anyOf": [schema, {"type": "null"}]}
        for name, schema in fields.items()
    }
    schema = {"type": "object", "properties": properties, "required": [required]}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
