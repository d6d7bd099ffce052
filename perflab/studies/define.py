"""What a study is: a model, a workload and variants to compare, as a value or a YAML file.

Owns the declaration and its checks. Runs nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from perflab.config import EngineConfig, check_types
from perflab.errors import ConfigError, WorkloadError
from perflab.load.build import build
from perflab.load.workloads import Workload
from perflab.measure.metrics import SLO

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class Variant:
    """One configuration to measure. `config` overrides the study's own engine configuration.

    relative_cost: a guess of its run's time relative to the first variant's, for the first estimate
    of the study's length only; the first measured run replaces it.
    """

    name: str
    config: Mapping[str, Any] = field(default_factory=dict)
    dtype: str = "float32"
    description: str = ""
    relative_cost: float = 1.0

    def __post_init__(self) -> None:
        check_types(self, WorkloadError)
        if not isinstance(self.config, Mapping):
            raise WorkloadError(f"{self.name}: config={self.config!r}: must be switches of EngineConfig")


@dataclass(frozen=True, slots=True)
class Study:
    """Variants of one model under one workload, run interleaved; each is compared with the one
    before it and with the first.

    repeats: most runs of a variant; min_repeats: fewest, if the time budget allows them.
    time_budget_s: everything in all, loading and quality too. reference_dtype: dtype of the quality
    reference; None leaves quality out. keep_texts: store prompts and outputs with the runs.
    trust_remote_code: run code that comes with the model.

    Raises WorkloadError or ConfigError naming what is wrong.
    """

    name: str
    model: str
    workload: Workload
    variants: tuple[Variant, ...]
    config: Mapping[str, Any] = field(default_factory=dict)
    slo: SLO = field(default_factory=SLO)
    repeats: int = 5
    min_repeats: int = 3
    seed: int = 0
    time_budget_s: float = 300.0
    reference_dtype: str | None = "float32"
    quality_texts: int = 6
    keep_texts: bool = False
    device: str = "auto"
    trust_remote_code: bool = False
    description: str = ""
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_types(self, WorkloadError)
        if not self.name or not self.model:
            raise WorkloadError(f"name={self.name!r}, model={self.model!r}: neither may be empty")
        if self.reference_dtype not in (None, *DTYPES):
            raise WorkloadError(
                f"reference_dtype={self.reference_dtype!r}: choose one of {', '.join(DTYPES)}, or nothing"
            )
        if not isinstance(self.config, Mapping):
            raise WorkloadError(f"config={self.config!r}: must be switches of EngineConfig")
        names = [v.name for v in self.variants]
        if not names or len(set(names)) != len(names):
            raise WorkloadError(f"study {self.name!r}: give one variant or more, each with its own name")
        if not self.workload.requests:
            raise WorkloadError(f"study {self.name!r}: its workload holds no request")
        if not 1 <= self.min_repeats <= self.repeats:
            raise WorkloadError(
                f"{self.name!r}: min_repeats={self.min_repeats} must be from 1 to repeats={self.repeats}"
            )
        if self.time_budget_s <= 0:
            raise WorkloadError(f"study {self.name!r}: time_budget_s={self.time_budget_s} must be above 0")
        for variant in self.variants:
            if variant.dtype not in DTYPES:
                raise ConfigError(
                    f"{variant.name}: dtype={variant.dtype!r}: choose one of {', '.join(DTYPES)}"
                )
            self.engine_config(variant)

    def engine_config(self, variant: Variant) -> EngineConfig:
        """The variant's engine configuration. Raises ConfigError for an unknown or illegal switch."""
        merged = {"seed": self.seed, **self.config, **variant.config}
        known = {f.name for f in fields(EngineConfig)}
        if unknown := sorted(set(merged) - known):
            raise ConfigError(
                f"{variant.name}: EngineConfig has no {', '.join(unknown)}; it has {', '.join(sorted(known))}"
            )
        return EngineConfig(**merged)

    def declaration(self) -> dict[str, Any]:
        """What identifies the study, as JSON: a directory is resumed only by the same declaration."""
        return {
            "name": self.name,
            "model": self.model,
            "device": self.device,
            "description": self.description,
            "workload": {
                "name": self.workload.name,
                "description": self.workload.description,
                "requests": len(self.workload.requests),
                "fingerprint": self.workload.fingerprint,
            },
            "variants": [
                {"name": v.name, "dtype": v.dtype, "description": v.description, "config": dict(v.config)}
                for v in self.variants
            ],
            "config": dict(self.config),
            "slo": {f.name: getattr(self.slo, f.name) for f in fields(SLO)},
            "seed": self.seed,
            "reference_dtype": self.reference_dtype,
            "quality_texts": self.quality_texts,
            "notes": list(self.notes),
        }

    @property
    def fingerprint(self) -> str:
        """A hash of the declaration without its prose."""
        facts = self.declaration()
        for prose in ("description", "notes"):
            facts.pop(prose)
        for variant in facts["variants"]:
            variant.pop("description")
        return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def load_study_file(path: Path) -> Study:
    """A study from YAML. Keys are the fields of `Study`; `variants` is a list of fields of `Variant`.

    ```yaml
    name: kv-cache
    model: smollm2-135m
    workload: {kind: synthetic, requests: 12, input_tokens: 64, output_tokens: [24]}
    config: {max_num_seqs: 6}
    variants:
      - {name: without, config: {kv_cache: false}}
      - {name: with, config: {kv_cache: true}}
    slo: {ttft_s: 2.0, tpot_s: 0.2}
    ```

    Paths in it are relative to the file. Raises WorkloadError naming the key at fault.
    """
    path = Path(path)
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise WorkloadError(f"{path}: cannot be read ({error}); check the path") from None
    except yaml.YAMLError as error:
        raise WorkloadError(f"{path}: not YAML: {error}") from None
    try:
        given = _keys(raw, Study, "a study file")
        if not isinstance(given["workload"], Mapping):
            raise WorkloadError(
                f"workload: {given['workload']!r}: must be keys and values, `kind` among them"
            )
        if not isinstance(given["variants"], list):
            raise WorkloadError(
                f"variants: {given['variants']!r}: must be a list, each with a name and a config"
            )
        if not isinstance(notes := given.get("notes") or [], list):
            raise WorkloadError(f"notes: {notes!r}: must be a list of sentences")
        values = {
            **given,
            "workload": build(given["workload"], path.parent),
            "variants": tuple(Variant(**_keys(v, Variant, "a variant")) for v in given["variants"]),
            "slo": SLO(**_keys(given.get("slo") or {}, SLO, "slo")),
            "notes": tuple(notes),
        }
        return Study(**values)
    except (TypeError, ValueError) as error:
        if isinstance(error, WorkloadError | ConfigError) and str(path) in str(error):
            raise
        raise WorkloadError(f"{path}: {error}") from None


def _keys(given: Any, kind: type, what: str) -> dict[str, Any]:
    """A mapping of a file, with no key that `kind` lacks and none missing that it needs."""
    known = {f.name: f.default is MISSING and f.default_factory is MISSING for f in fields(kind)}
    if not isinstance(given, Mapping):
        raise WorkloadError(f"{what}: {given!r}: must be keys and values; its keys are {', '.join(known)}")
    if unknown := sorted(set(map(str, given)) - set(known)):
        raise WorkloadError(f"{what}: unknown keys {', '.join(unknown)}; known are {', '.join(known)}")
    if missing := [name for name, needed in known.items() if needed and name not in given]:
        raise WorkloadError(f"{what}: the keys {', '.join(missing)} are missing")
    return dict(given)
