"""The causes: each is one generator in `causes/` that takes the signs of a run and yields what it can prove, as a `Diagnosis`.

A cause is the mechanism, not the symptom. It gives culprit, confidence, evidence and chain; name, family and remedy are added
by `choose`, which also decides between several that fit.
"""

from __future__ import annotations

from ..core.registry import Entry, Registry

# how sure: proved at the operation or by the order of calls; fits and nothing contradicts; fits, as other things might
CERTAIN, LIKELY, POSSIBLE = 0.95, 0.8, 0.6
LEVELS = (CERTAIN, LIKELY, POSSIBLE)

_causes = Registry("nanny.diagnose.causes")
cause = _causes.enter  # `@cause("dead_relu", family="not_precision", precision=False)`


def all_causes() -> dict[str, Entry]:
    """Every cause by name."""
    return _causes.entries()


def less_sure(confidence: float) -> float:
    """One level down."""
    return LEVELS[min(LEVELS.index(confidence) + 1, len(LEVELS) - 1)]
