"""Findings, the verdict and the numbers of each step, told to the experiment tracker that the program itself has open.

W&B, TensorBoard, MLflow, trackio, Aim, and the providers of OpenTelemetry. A run of theirs is never begun, ended or renumbered; a
tracker that the program has not imported is not imported; one that fails is told once, and left alone from then on.
"""

from __future__ import annotations

import gc
import math
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ..core.finding import Finding, Severity
from ..diagnose.verdict import Verdict
from ..watch.optimizers import with_subclasses

_LIBRARIES = (
    "wandb",
    "torch.utils.tensorboard",
    "tensorboardX",
    "mlflow",
    "trackio.context_vars",
    "aim",
    "opentelemetry.metrics",
)


class Trackers:
    """Asks at every step which trackers are open: they may come later than the nanny, and go earlier."""

    def __init__(self, warn: Callable[[str], None], when_first_seen: Callable[[], Any] | None = None) -> None:
        self._warn, self._when_first_seen = warn, when_first_seen
        self._steps = 0
        self._step = 0
        self._left: set[str] = set()
        self._writers: dict[str, weakref.ref[Any]] = {}
        self._looked: dict[str, int] = {}
        self._gauges: dict[str, Any] = {}
        self._defined: weakref.WeakSet[Any] = weakref.WeakSet()
        self.verdict_is_due = False

    def tell_step(self, step: int, scalars: Mapping[str, float]) -> None:
        self._steps += 1
        self._step = step
        self.verdict_is_due |= self._steps & (self._steps - 1) == 0  # also of a program that ends its tracker before us
        if not _any_imported():
            return
        numbers = {f"nanny/{name}": value for name, value in scalars.items()}
        self._tell(
            wandb=lambda run: run.log({**numbers, "nanny/step": step}, commit=False),  # the program's next log carries it
            tensorboard=lambda writer: [writer.add_scalar(name, value, step) for name, value in numbers.items()],
            mlflow=lambda mlflow: mlflow.log_metrics(numbers, step=step, synchronous=False),
            trackio=lambda run: _log_to_trackio(run, numbers, step),
            aim=lambda run: [run.track(value, name=name, step=step) for name, value in numbers.items()],
            otel=lambda api: [self._gauge(api, name).set(value) for name, value in scalars.items() if math.isfinite(value)],
        )

    def tell_finding(self, finding: Finding) -> None:
        self.verdict_is_due |= finding.severity > Severity.INFO
        title = f"{finding.code} {finding.site}".strip()
        text = f"step {finding.step}: {finding.message}" + (f"; {finding.hint}" if finding.hint else "")
        key = f"nanny/finding/{finding.code}/{finding.site}".rstrip("/")
        self._tell(
            wandb=lambda run: run.summary.update({key: text}),
            tensorboard=lambda writer: writer.add_text("nanny/findings", f"{title}: {text}", finding.step),
            mlflow=lambda mlflow: mlflow.set_tag(_plain(key), text, synchronous=False),
            trackio=lambda run: _log_to_trackio(run, {"nanny/finding": f"{title}: {text}"}, self._step),
            aim=lambda run: run.__setitem__(_plain(key), text),
            otel=lambda api: _emit(
                "nanny.finding",
                finding.message,
                {
                    "code": finding.code,
                    "site": finding.site,
                    "severity": finding.severity.name,
                    "step": -1 if finding.step is None else finding.step,
                    "hint": finding.hint,
                },
            ),
        )

    def tell_verdict(self, verdict: Verdict) -> None:
        self.verdict_is_due = False
        self._tell(
            wandb=lambda run: run.summary.update({"nanny/verdict": verdict.text}),
            tensorboard=lambda writer: writer.add_text("nanny/verdict", verdict.text, self._step),
            mlflow=lambda mlflow: mlflow.set_tag("nanny.verdict", verdict.text, synchronous=False),
            trackio=lambda run: _log_to_trackio(run, {"nanny/verdict": verdict.text}, self._step),
            aim=lambda run: run.__setitem__("nanny.verdict", verdict.text),
            otel=lambda api: _emit("nanny.verdict", verdict.text, {"word": verdict.word, "step": self._step}),
        )

    @property
    def any_open(self) -> bool:
        return _any_imported() and next(self._open(), None) is not None

    def _tell(self, **say: Callable[[Any], Any]) -> None:
        for name, tracker in self._open():
            if self._when_first_seen is not None:
                self._when_first_seen()
                self._when_first_seen = None
            try:
                say[name](tracker)
            except Exception as error:  # noqa: BLE001 - the tracker is the program's, and so is its trouble
                self._leave(name, error)

    def _leave(self, name: str, error: Exception) -> None:
        self._left.add(name)
        self._warn(f"{name} did not take what the nanny had to tell ({type(error).__name__}: {error}); it is told nothing more")

    def _open(self) -> Iterator[tuple[str, Any]]:
        for name, find in (
            ("wandb", self._wandb),
            ("tensorboard", self._tensorboard),
            ("mlflow", _mlflow),
            ("trackio", _trackio),
            ("aim", self._aim),
            ("otel", _otel),
        ):
            if name not in self._left:
                try:
                    found = find()
                except Exception as error:  # noqa: BLE001
                    self._leave(name, error)
                    continue
                if found is not None:
                    yield name, found

    def _wandb(self) -> Any:
        run = getattr(sys.modules.get("wandb"), "run", None)
        if run is not None and run not in self._defined:
            run.define_metric("nanny/*", step_metric="nanny/step")
            self._defined.add(run)
        return run

    def _tensorboard(self) -> Any:
        kinds = [getattr(sys.modules.get(name), "SummaryWriter", None) for name in ("torch.utils.tensorboard", "tensorboardX")]
        writer = self._find_writer("tensorboard", tuple(kind for kind in kinds if isinstance(kind, type)))
        return writer if getattr(writer, "file_writer", None) is not None else None  # a closed one would open itself again

    def _aim(self) -> Any:
        kind = getattr(sys.modules.get("aim"), "Run", None)
        run = self._find_writer("aim", (kind,) if isinstance(kind, type) else ())
        return run if getattr(run, "_resources", None) is not None else None

    def _find_writer(self, name: str, kinds: tuple[type, ...]) -> Any:
        """The program's own, of a library that has no active one; looked for at steps 1, 2, 4, 8 ..., each time once."""
        known = self._writers.get(name)
        found = None if known is None else known()
        if found is None and kinds and self._steps & (self._steps - 1) == 0 and self._looked.get(name) != self._steps:
            self._looked[name] = self._steps
            every = [kind for known in kinds for kind in with_subclasses(known)]
            found = next((one for one in gc.get_referrers(*every) if isinstance(one, kinds)), None)
            if found is not None:
                self._writers[name] = weakref.ref(found)
        return found

    def _gauge(self, api: Any, name: str) -> Any:
        if name not in self._gauges:
            self._gauges[name] = api.get_meter("nanny").create_gauge(f"nanny.{name}")
        return self._gauges[name]


def _any_imported() -> bool:
    return any(map(sys.modules.__contains__, _LIBRARIES))


def _mlflow() -> Any:
    mlflow = sys.modules.get("mlflow")
    active = getattr(mlflow, "active_run", None)
    return mlflow if active is not None and active() is not None else None


def _trackio() -> Any:
    current = getattr(sys.modules.get("trackio.context_vars"), "current_run", None)
    return None if current is None else current.get()


def _otel() -> Any:
    """The metrics API, if the program has given it a provider: the one it begins with keeps nothing."""
    api, sdk = sys.modules.get("opentelemetry.metrics"), sys.modules.get("opentelemetry.sdk.metrics")
    if api is None or sdk is None:
        return None
    return api if isinstance(api.get_meter_provider(), sdk.MeterProvider) else None


def _emit(name: str, body: str, attributes: Mapping[str, Any]) -> None:
    """As an event of the program's logs, and of the span in which it happens."""
    named = {f"nanny.{key}": value for key, value in attributes.items()}
    logs, trace = sys.modules.get("opentelemetry._logs"), sys.modules.get("opentelemetry.trace")
    if logs is not None:
        logs.get_logger("nanny").emit(logs.LogRecord(event_name=name, body=body, attributes=named))
    if trace is not None:
        trace.get_current_span().add_event(name, {**named, "nanny.message": body})


def _log_to_trackio(run: Any, values: Mapping[str, float | str], step: int) -> None:
    following = run._next_step  # the program's own logs go on counting where they were
    run.log(dict(values), step=step)
    run._next_step = following


def _plain(key: str) -> str:
    """A key that a store of files takes too."""
    return "".join(c if c.isalnum() or c in "_-./ " else "_" for c in key).replace("/", ".")
