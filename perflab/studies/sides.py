"""What a user writes for one side of a comparison, and what it becomes.

Owns the notation: an address, or switches of our engine such as `weights=int8-dynamic,max_num_seqs=8`.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import yaml

from perflab.config import EngineConfig
from perflab.errors import ConfigError
from perflab.studies.service_run import ServiceChoice

OF_SERVICE = ("model", "dtype", "device", "endpoint", "tokenizer")
"""What may stand among the switches and is the service's own."""


def service_of(text: str, base: ServiceChoice) -> ServiceChoice:
    """`base` with what `text` says: another address, or switches (`default` for none).

    Raises ConfigError for a switch that does not exist or a value that it cannot have.
    """
    if text.startswith(("http://", "https://")):
        return replace(base, url=text)
    known = {f.name for f in fields(EngineConfig)}
    switches: dict[str, Any] = {}
    own: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.removeprefix("default").split(","))):
        name, equals, value = part.partition("=")
        if not equals or name not in known | set(OF_SERVICE):
            raise ConfigError(
                f"{part!r}: give an address (http://…), a folder of runs, or switch=value with one of "
                f"{', '.join(sorted(known | set(OF_SERVICE)))}"
            )
        if name in OF_SERVICE:
            own[name] = value
        else:
            switches[name] = yaml.safe_load(value)
    return replace(base, **own, config=replace(base.config, **switches))  # type: ignore[arg-type]
