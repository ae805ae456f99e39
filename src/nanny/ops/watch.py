"""Single operations under watch: `CompareWithCPU`, `NanInfTracker`, `open_module_tracker`.

with CompareWithCPU(verbose=True):          # every operation beside FP32 or FP64 on the CPU
    train(model)
with NanInfTracker() as tracker:            # who made the first NaN
    for batch in data:
        train_step(batch)
        tracker.step()
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor, nn

from ..core.finding import Finding, NannyError, warn
from ..core.numbers import join_names
from ..core.terminal import say, tell
from ..watch import events
from ..watch.dump import MOST_BYTES, Dump, save_dump
from ..watch.nonfinite import NonfiniteOrigins, Origin
from ..watch.op_facts import long_name
from ..watch.op_stream import Stopped, join, leave
from ..watch.places import Places, Spot
from ..watch.ranks import has_group
from ..watch.tensors import is_recorded, short_dtype
from .compare import OpComparison
from .gap import Tolerance
from .judge import IN_WORDS, finding_of
from .records import OpFault, OpTally, TensorNote
from .reference import Call, call_before, check_reference, results_of
from .selection import Selection, op_patterns
from .text import fault_lines, next_line, op_line, step_header, tally_line

_MOST_BLOCKS = 50  # faults that are told in full; further ones get a line each, and all are counted
_MOST_LINES = 1000
MOST_DUMPS = 20  # of one run


@dataclass(frozen=True)
class ModuleInfo:
    """The module whose operations now run, by the tracker that is open."""

    name: str = ""
    classes: str = ""  # Gpt/Block/Linear
    phase: str = "loop"

    @staticmethod
    def current() -> ModuleInfo:
        if not _trackers:
            return ModuleInfo()
        spot = _trackers[-1].places.spot()
        return ModuleInfo(spot.place.site, spot.classes, spot.place.phase)


class ModuleTracker:
    """Keeps the names of a model's modules for the tools, until closed. A second one for the same model changes nothing."""

    def __init__(self, model: nn.Module) -> None:
        if not isinstance(model, nn.Module):
            raise NannyError(f"open_module_tracker needs a torch.nn.Module, not {type(model).__name__}")
        self.model = model
        self.places = Places(model)
        self.places.open()
        _trackers.append(self)

    def close(self) -> None:
        self.places.close()
        with suppress(ValueError):
            _trackers.remove(self)

    def __enter__(self) -> ModuleTracker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_trackers: list[ModuleTracker] = []


def open_module_tracker(model: nn.Module) -> ModuleTracker:
    """Names operations by this model's modules. Close it with `.close()`, or use it in a `with`."""
    return next((t for t in _trackers if t.model is model), None) or ModuleTracker(model)


class _Watch:
    """What both tools share: when they are on, where they write, what they found."""

    tool: str
    script = ""  # the command line that `nanny trace` watches
    lang = "en"  # of the log
    _make_consumer: Callable[[Places], Any]
    _tally = OpTally()
    _paused = False
    _failed = False

    def __init__(
        self,
        enabled: bool = True,
        target_list: Iterable[Any] | None = None,
        white_list: Iterable[Any] | None = None,
        dump_error_data: bool = False,
        verbose: bool = False,
        enable_ranks: Sequence[int] | None = None,
        should_log_to_file: bool = False,
        output_dir: str | os.PathLike[str] = "nanny_logs/ops",
        start_step: int = 0,
        end_step: int | None = None,
        *,
        target_op: Iterable[Any] | None = None,
        modules: Iterable[str] | str | None = None,
        stop_on_error: bool | None = None,
        strict: bool = False,
    ) -> None:
        if target_list is not None and target_op is not None:
            raise NannyError("target_list and target_op are two names of one thing; give one of them")
        if start_step < 0:
            raise NannyError(f"start_step={start_step}: steps are counted from 0")
        if isinstance(enable_ranks, int):
            raise NannyError(f"enable_ranks is a list of ranks: enable_ranks=[{enable_ranks}]")
        if end_step is not None and end_step <= start_step:
            raise NannyError(f"end_step={end_step} is not after start_step={start_step}: nothing would be watched")
        self.enabled = bool(enabled)
        self.start_step, self.end_step, self.step_cnt = start_step, end_step, 0
        self.findings: list[Finding] = []
        self.faults: list[OpFault] = []
        sites = (modules,) if isinstance(modules, str) else tuple(modules or ())
        self._selection = Selection(
            op_patterns(target_list if target_list is not None else target_op, "target_list"),
            op_patterns(white_list, "white_list"),
            sites,
        )
        self._verbose, self._strict = verbose, strict
        self._dump = dump_error_data
        self._stop = dump_error_data if stop_on_error is None else stop_on_error
        self._ranks = None if enable_ranks is None else frozenset(enable_ranks)
        self._to_file, self._folder = should_log_to_file, Path(output_dir)
        self._seen: dict[tuple[str, str, str, str], int] = {}
        self._dumps = self._lines = 0
        self._stream: TextIO | None = None
        self._consumer: Any = None
        self._places: Places | None = None
        self._header = -1
        self.rank = 0

    def __enter__(self) -> Any:
        if self._consumer is not None:
            raise NannyError(f"this {self.tool} is already entered; make another one")
        self.rank = _rank()
        if not self.enabled or (self._ranks is not None and self.rank not in self._ranks):
            return self
        if self._to_file or self._dump:
            self._make_folder()
        tracked = [(t.model, "") for t in _trackers]
        self._places = Places(tracked or None, on_trouble=None if self._strict else self._switch_off).open()
        self._consumer = self._make_consumer(self._places)
        self._consumer.active = self._in_window()
        join(self._consumer)
        return self

    def __exit__(self, *exc: Any) -> None:
        if self._consumer is None or self._places is None:
            return
        leave(self._consumer)
        self._places.close()
        try:
            self._finish()
        finally:
            unknown = self._unknown_modules(self._places.sites())
            if unknown:
                self._say(unknown)
            where = str(self.log_path) if self._to_file else ""
            last = tally_line(self.tool, self.tally, len(self.faults), where, self.lang)
            if self.faults:
                last += "\n" + next_line(self.tool, self.faults[0], self.script, self.lang)
            self._say(last)
            if self._stream is not None:
                tell(last)
                with suppress(OSError):
                    self._stream.close()
            self._tally, self._consumer, self._stream = self.tally, None, None

    def _unknown_modules(self, sites: list[str]) -> str:
        """Says so if nothing was watched because no module has such a name."""
        if any(map(self._selection.wants_site, sites)) or not self._selection.modules:
            return ""
        asked = ", ".join(map(repr, self._selection.modules))
        return f"[WARNING] no module is named like {asked}; there are: {join_names(sites, 8) or 'none'}"

    def _make_folder(self) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            if self._to_file:
                self._stream = self.log_path.open("a", encoding="utf-8")
        except OSError as error:
            raise NannyError(f"cannot write output_dir {str(self._folder)!r} ({error.strerror}); name another folder") from None

    def _finish(self) -> None:
        """Before the last line."""

    @property
    def tally(self) -> OpTally:
        """How many operations ran, were compared, differed; and why others were left out."""
        return self._tally if self._consumer is None else self._consumer.tally

    @property
    def log_path(self) -> Path:
        return self._folder / f"{self.tool}.rank{self.rank}.log"

    def step(self) -> None:
        """Tells that a training step is over. Operations are watched while `start_step <= step_cnt < end_step`."""
        if is_recorded():
            return
        if self._consumer is not None:
            self._finish()
        self.step_cnt += 1
        if self._consumer is not None:
            self._consumer.active = self._in_window()

    def pause(self, paused: bool = True) -> None:
        """While another tool examines the step: its operations are not the program's."""
        self._paused = paused
        if self._consumer is not None:
            if paused:
                self._finish()
            self._consumer.active = self._in_window()

    def _in_window(self) -> bool:
        if self._paused or self._failed:
            return False
        return self.start_step <= self.step_cnt and (self.end_step is None or self.step_cnt < self.end_step)

    def _say(self, text: str) -> None:
        if self._stream is None:
            tell(text)
            return
        with suppress(Exception):  # a disk that is full, or a stream that the program has closed
            say(text, self._stream)

    def _log_op(self, op: str, spot: Spot, said: str) -> None:
        self._log_step_header()
        self._say(op_line(op, spot.place, spot.classes, said))

    def _log_step_header(self) -> None:
        if self._header != self.step_cnt:
            self._header = self.step_cnt
            self._say(step_header(self.step_cnt))

    def _add_fault(self, call: Call | None, out: Any, fault: OpFault) -> None:
        fault = replace(fault, step=self.step_cnt, rank=self.rank)
        if self._dump and call is not None and self._dumps < MOST_DUMPS:
            path = save_call(self._folder, call, results_of(call, out), fault)
            self._dumps += 1
            fault = replace(fault, dump=str(path) if path is not None else "")
            if path is None:
                self._say(f"{fault.op}: not saved, its tensors are too large")
        # one optimizer step does the same to every parameter: told once in full
        site = "" if fault.place.phase == "optimizer" else fault.place.site
        key = (fault.op, site, fault.place.phase, fault.kind)
        self._seen[key] = self._seen.get(key, 0) + 1
        if self._seen[key] == 1:
            self.findings.append(finding_of(fault))
        if len(self.faults) < _MOST_LINES:
            self.faults.append(fault)
        self._log_fault(fault, self._seen[key])
        if self._stop:
            raise Stopped(
                f"{fault.op} at {fault.culprit} {IN_WORDS[fault.kind]}; stopped because the data of the first fault was asked for"
                + (f". Run it again with: nanny replay {fault.dump}" if fault.dump else "")
            )

    def _log_fault(self, fault: OpFault, times: int) -> None:
        self._lines += 1
        if self._lines > _MOST_LINES:
            return
        self._log_step_header()
        if times == 1 and len(self._seen) <= _MOST_BLOCKS:
            self._say("\n".join(fault_lines(fault, self.lang)))
        else:
            mark = "[ERROR]" if fault.kind == "mismatch" else "[WARNING]"
            said = f"{IN_WORDS[fault.kind]}, seen {times} times now"
            self._say(f"{mark} {op_line(fault.op, fault.place, fault.classes, said, self.lang)}")

    def _switch_off(self, error: BaseException) -> None:
        if self._failed:
            return
        self._failed = True
        if self._consumer is not None:
            self._consumer.active = False
        warn(f"{self.tool} could not do its work and is off now ({type(error).__name__}: {error})")


class CompareWithCPU(_Watch):
    """Compares every operation with FP32 or FP64 on the CPU while entered; the program's own results are not touched.

    `atol` and `rtol` are taken literally: `|result - reference| <= atol + rtol * |reference|`. Without them the tolerance follows
    the dtype and the operation's conditioning. `reference="cpu_same_dtype"` compares with the CPU kernel of the same dtype
    instead.
    """

    tool = "CompareWithCPU"

    def __init__(
        self,
        enabled: bool = True,
        atol: float | None = None,
        rtol: float | None = None,
        target_list: Iterable[Any] | None = None,
        white_list: Iterable[Any] | None = None,
        dump_error_data: bool = False,
        verbose: bool = False,
        enable_ranks: Sequence[int] | None = None,
        should_log_to_file: bool = False,
        output_dir: str | os.PathLike[str] = "nanny_logs/ops",
        start_step: int = 0,
        end_step: int | None = None,
        *,
        target_op: Iterable[Any] | None = None,
        modules: Iterable[str] | str | None = None,
        stop_on_error: bool | None = None,
        reference: str = "wide",
        strict: bool = False,
    ) -> None:
        where = (should_log_to_file, output_dir, start_step, end_step)
        asked: dict[str, Any] = {"target_op": target_op, "modules": modules, "stop_on_error": stop_on_error, "strict": strict}
        super().__init__(enabled, target_list, white_list, dump_error_data, verbose, enable_ranks, *where, **asked)
        for name, value in (("atol", atol), ("rtol", rtol)):
            if value is not None and not (isinstance(value, (int, float)) and value >= 0):
                raise NannyError(f"{name}={value!r} is no tolerance; write a number such as {name}=1e-3, or leave it out")
        self._tolerance = Tolerance(atol, rtol)
        self._reference = check_reference(reference)

    def _make_consumer(self, places: Places) -> OpComparison:
        return OpComparison(
            places,
            self._selection,
            self._tolerance,
            self._reference,
            on_fault=self._add_fault,
            on_op=self._log_op if self._verbose else None,
            on_trouble=None if self._strict else self._switch_off,
        )


class _AfterSteps(events.PartListener):
    def __init__(self, after: Callable[[], None]) -> None:
        self._after = after

    def after_optimizer_step(self, optimizer: Any) -> None:
        self._after()

    def failed(self, error: Exception) -> None:
        raise error  # asked for: it stops at the first fault, or is strict


class NanInfTracker(_Watch):
    """Names the operation that made the first NaN or Inf while entered; looks once per step, so that training goes on at speed.

    With `dump_error_data` it looks after each operation, keeps its inputs and stops at the first fault.
    """

    tool = "NanInfTracker"
    _updates: _AfterSteps | None = None
    _found_count = 0

    def __enter__(self) -> NanInfTracker:
        super().__enter__()
        if self._consumer is not None:
            self._updates = _AfterSteps(self._finish)
            events.listen(self._updates)
        return self

    def __exit__(self, *exc: Any) -> None:
        if self._updates is not None:
            events.leave(self._updates)
            self._updates = None
        super().__exit__(*exc)

    def _make_consumer(self, places: Places) -> NonfiniteOrigins:
        return NonfiniteOrigins(
            places,
            on_origin=self._add_origin,
            on_op=(lambda op, spot: self._log_op(long_name(op.func), spot, "runs")) if self._verbose else None,
            on_trouble=None if self._strict else self._switch_off,
            keep=(lambda op: call_before(op.func, op.args, op.kwargs)) if self._dump else None,
        )

    @property
    def tally(self) -> OpTally:
        if self._consumer is None:
            return self._tally
        return OpTally(operations=self._consumer.operations, faults=self._found_count)

    def _add_origin(self, origin: Origin) -> None:
        wanted = origin.func is None or self._selection.wants(origin.func)
        if wanted and self._selection.wants_site(origin.spot.place.site):
            self._found_count += 1
            call, out = origin.kept or (None, None)
            self._add_fault(call, out, fault_of(origin))

    def _finish(self) -> None:
        if self._consumer is not None and self._consumer.active:
            self._consumer.deliver()


def save_call(folder: Path, call: Call, results: list[Tensor], fault: OpFault) -> Path | None:
    """The path of the inputs; None if they would be too large."""
    args, kwargs = call.inputs
    name = long_name(call.func)
    where: dict[str, Any] = {"place": fault.place, "classes": fault.classes, "step": fault.step, "rank": fault.rank}
    dump = Dump(name, call.func._overloadname, args, kwargs, outputs=tuple(results), kind=fault.kind, **where)
    return save_dump(folder, name + (f".rank{fault.rank}" if fault.rank else ""), dump, MOST_BYTES)


def fault_of(origin: Origin) -> OpFault:
    """A producer of non-finite values as the log tells it."""
    place = origin.spot.resolve()
    own = TensorNote(tuple(origin.shape), short_dtype(origin.dtype), str(origin.device), origin.low, origin.high)
    told: dict[str, Any] = {"passed_on": origin.passed_on, "passed_on_count": origin.passed_on_count}
    if origin.func is None:
        if origin.name and not origin.arrived:
            place = replace(place, site=origin.name, module="Parameter")
        op = f"{origin.name} (from another rank)" if origin.arrived else origin.name or "data"
        return OpFault(op, "came_in", place, origin.spot.classes, inputs=(own,), **told)
    if origin.storage:
        place = replace(place, site=origin.name)
    notes = [
        TensorNote(tuple(shape), short_dtype(dtype), str(i.device), i.low, i.high, str(at))
        for at, (i, shape, dtype) in enumerate(origin.inputs)
    ]
    kind = "nan" if origin.nan else "inf"
    return OpFault(long_name(origin.func), kind, place, origin.spot.classes, inputs=tuple(notes), outputs=(own,), **told)


def _rank() -> int:
    if has_group():
        return torch.distributed.get_rank()
    return int(os.environ.get("RANK", "0") or 0)
