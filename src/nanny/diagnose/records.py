"""What a diagnosis says: the root cause, with its evidence, its chain to the symptom and what to change."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

from ..core.examination import Trial
from ..show.notebook import Shown
from .trials import trial_in_words


@dataclass(frozen=True)
class Diagnosis(Shown):
    """One root cause, as plain data."""

    looks: ClassVar[str] = "nanny.diagnose.text:render_cause"

    cause: str = ""  # a page of the knowledge base: `nanny rule CAUSE`
    family: str = ""
    culprit: str = ""  # module or parameter path, op:<name>, optimizer[.field], scaler[.field], data[:what], loop:<what>
    step: int | None = None
    where: str = ""  # file:line if known
    source: str = ""  # the line itself, with carets under the operation in a second line if known
    confidence: float = 0.0  # one of registry.LEVELS
    precision_caused: bool | None = None  # None: unknown
    format: str = ""  # the low one that the run uses: fp16, bf16; "" in FP32
    evidence: tuple[str, ...] = ()  # facts with their numbers
    chain: tuple[str, ...] = ()  # producer -> ... -> symptom
    remedy: str = ""
    confirm: str = ""  # the one command or experiment that would prove it
    early: bool = False  # a trend that foresees failure; nothing is lost yet
    expected_step: int | None = None  # when, if the trend is clear
    tried: tuple[Trial, ...] = ()  # its remedies, on the step itself

    @property
    def summary(self) -> str:
        """One line: what, where, when."""
        place = f"step {self.step}, {self.culprit}" if self.step is not None else self.culprit
        return f"{place}: {self.cause}" + (f" ({self.where})" if self.where else "")

    @property
    def is_bare_operation(self) -> bool:
        """No module, parameter or part of the loop is named, only what was computed."""
        return self.culprit.partition(":")[0] == "op"

    @property
    def remedy_failed(self) -> bool:
        """All that was tried was in vain."""
        return bool(self.tried) and all(trial.helped is False for trial in self.tried)

    def in_language(self, language: str) -> Diagnosis:
        """With the remedy and the proof as the page of the cause has them in that language, the facts by the catalogue."""
        from ..show.translation import translate
        from .knowledge import confirm_of, remedy_of

        return replace(
            self,
            remedy="" if self.remedy_failed else remedy_of(self.cause, language),
            confirm=confirm_of(self.cause, language) or self.confirm,
            evidence=tuple(translate(fact, language) for fact in self.evidence),
            chain=tuple(translate(link, language) for link in self.chain),
        )

    def to_json(self) -> dict[str, Any]:
        """All fields, plain, as diagnose --format json prints them."""
        plain = {key: list(v) if isinstance(v, tuple) else v for key, v in asdict(self).items()}
        told = [{"helped": t.helped, "text": trial_in_words(t), **asdict(t)} for t in self.tried]
        return {**plain, "tried": told}
