"""The errors a user can meet. Each message names the value at fault and the remedy.

Owns the hierarchy and nothing else. `ValueError` stays the kind for bad arguments; these are
the kinds that a caller may want to catch apart.
"""

from __future__ import annotations


class PerflabError(Exception):
    """Base of every error perflab raises on purpose."""


class ConfigError(PerflabError, ValueError):
    """A configuration value is out of range, or two values contradict each other."""


class ModelError(PerflabError):
    """A model cannot be found, read or run here; the message says what to install or change."""


class NotNative(ModelError):
    """The native path cannot run this model here; torch's can."""


class WorkloadError(PerflabError, ValueError):
    """A workload, prompt file or study file cannot be read or makes no sense."""


class ServiceError(PerflabError):
    """A server cannot be reached, or does not speak the API that was asked of it."""


class StoreError(PerflabError):
    """A run directory is missing, incomplete or written by an incompatible version."""


class Rejected(PerflabError):
    """Admission refused a request that could never run; nothing was computed for it."""


class DeadlineExceeded(PerflabError):
    """A request ran past its deadline; what it produced so far stays in its record."""


class StepFailed(PerflabError):
    """A request's row failed inside an engine step (NaN logits, exception, out of memory)."""


class EngineStopped(PerflabError):
    """The engine was closed while the request was waiting or running."""
