"""The log of the operation tools: search it for `[ERROR]` (differs from its reference) and `[WARNING]` (NaN or Inf was made)."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from ..core.examination import Place
from ..core.numbers import amount, deviation, short
from ..show.term import DEFAULT_WIDTH, wrap
from ..show.translation import translate
from .judge import IN_WORDS, reason_of
from .records import Element, Gap, OpFault, OpTally, Replay, TensorNote

RULE = "=" * 28
WRAPPED = ("passed on by", "why: ", "fix: ")  # prose; numbers and tensors stay on their line


def op_line(op: str, place: Place, classes: str, said: str, lang: str = "en") -> str:
    """`Gpt/Block/Linear/torch.ops.aten.addmm(forward) [blocks.3.fc] said`."""
    path = f"{classes}/{op}" if classes else op
    site = f" [{place.site}]" if place.site else ""
    return f"{path}({place.phase}){site} {translate(said, lang)}"


def step_header(step: int) -> str:
    return f"{time.strftime('%Y-%m-%d, %H:%M:%S')}\n{'-' * 25}  step = {step}  {'-' * 22}"


def fault_lines(fault: OpFault, lang: str = "en") -> list[str]:
    """The whole block of one fault."""
    wrong = fault.kind == "mismatch"
    mark, said = ("[ERROR]", "fails to pass CompareWithCPU test") if wrong else ("[WARNING]", IN_WORDS[fault.kind])
    head = f"{mark} {op_line(fault.op, fault.place, fault.classes, said, lang)}"
    lines = _mismatch(fault) if wrong else _nonfinite(fault)
    return [RULE, head, *(translate(line, lang) for line in _place_lines(fault)), *_in_language(lines, lang), RULE]


def _in_language(lines: Iterable[str], lang: str) -> Iterator[str]:
    for line in lines:
        text = translate(line, lang)
        yield from wrap(text, DEFAULT_WIDTH, 2) if line.startswith(WRAPPED) else [text]


def _mismatch(fault: OpFault) -> Iterator[str]:
    yield from _tensors(fault)
    yield "...... compare with cpu ......."
    for gap in fault.gaps:
        yield from _gap(gap)
    yield from _dump(fault)


def _place_lines(fault: OpFault) -> Iterator[str]:
    line = fault.place.where
    rank = f", rank {fault.rank}" if fault.rank else ""
    yield f"step {fault.step}{rank}" + (f", {line}" if line else "")


def _tensors(fault: OpFault) -> Iterator[str]:
    yield "....... input ........."
    for note in fault.inputs:
        yield f"{note.label}: {tensor_text(note)}"
    yield "...... output ........"
    for note in fault.outputs:
        yield tensor_text(note)


def _gap(gap: Gap) -> Iterator[str]:
    share = f" ({100 * gap.differing / max(1, gap.output.size):.3g} % of {gap.output.size})"
    yield f"Tensor values are not close: {amount(gap.differing, 'element')} beyond tolerance{share}"
    yield f"tolerance: {gap.limit}"
    if gap.rel_l2 is not None:
        yield f"relative L2 error {deviation(gap.rel_l2)}"
    if gap.why:
        yield f"why: {gap.why}"
    if gap.differing > len(gap.elements):
        yield f"Too many indices (total {gap.differing}) to print, the first {len(gap.elements)}:"
    for element in gap.elements:
        yield _element(element, gap)
    if gap.worst is not None and gap.differing > 1:
        yield "worst: " + _element(gap.worst, gap)
    yield tensor_text(gap.output)
    yield tensor_text(gap.reference)


def _element(element: Element, gap: Gap) -> str:
    index = "(" + ", ".join(map(str, element.index)) + ("," if len(element.index) == 1 else "") + ")"
    return (
        f"Element at index {index} is not close: {element.value!r}({gap.output.device}) "
        f"vs {element.reference!r}({gap.reference.device}, {gap.reference.dtype})"
    )


def _nonfinite(fault: OpFault) -> Iterator[str]:
    yield from _tensors(fault)
    if fault.passed_on_count:
        shown = ", ".join(fault.passed_on)
        rest = fault.passed_on_count - len(fault.passed_on)
        more = f", and {rest} more" if rest > 0 else ""
        yield f"passed on by {amount(fault.passed_on_count, 'operation')}: {shown}{more}"
    reason = reason_of(fault)
    if reason.why:
        yield f"why: {reason.why}"
        yield f"fix: {reason.fix}"
    yield from _dump(fault)


def _dump(fault: OpFault) -> Iterator[str]:
    if fault.dump:
        yield f"inputs and outputs saved; run it again with: nanny replay {fault.dump}"


def tensor_text(note: TensorNote) -> str:
    size = f"size={note.size}"
    ends = f", min={short(note.minimum, 6)}, max={short(note.maximum, 6)}" if note.minimum is not None else ""
    return f"Tensor <shape={list(note.shape)}, dtype={note.dtype}, device={note.device}, {size}{ends}>"


def tally_line(tool: str, tally: OpTally, faults: int, where: str = "", lang: str = "en") -> str:
    """The last line: what was looked at, what was not and why."""
    if tool == "CompareWithCPU":
        left = ", ".join(f"{reason} {count}" for reason, count in tally.left_out.items())
        made = max(0, faults - tally.faults)
        text = (
            f"{tally.operations} operations, {tally.compared} compared, {tally.faults} differ"
            + (f", {made} made NaN or Inf" if made else "")
            + (f"; not compared: {left}" if left else "")
        )
    else:
        text = f"{tally.operations} operations, {faults} made NaN or Inf"
    return "\n".join(wrap(translate(f"{tool}: {text}" + (f"; log: {where}" if where else ""), lang), DEFAULT_WIDTH, 2))


def next_line(tool: str, fault: OpFault, script: str = "", lang: str = "en") -> str:
    """What to type after the last line; `script`: the command line that `nanny trace` was given."""
    command, why = _next(tool, fault, script)
    return f"{translate('next', lang)}: {command}" + (f"  # {translate(why, lang)}" if why else "")


def _next(tool: str, fault: OpFault, script: str) -> tuple[str, str]:
    if fault.dump:
        return f"nanny replay {fault.dump}", ""
    if fault.kind == "mismatch":
        if not script:
            return f"{tool}(target_list=['{fault.op}'], dump_error_data=True)", "keeps its data for nanny replay"
        return f"nanny trace --compare --dump --op {fault.bare_op} {script}", "keeps its data for nanny replay"
    if script:
        return f"nanny trace --sanitize --start-step {fault.step} {script}", "what FP32 gives, and the cause"
    return "with nanny.sanitize(model) as seen: ...; print(seen)", f"around step {fault.step}: the cause"


def replay_lines(replay: Replay, lang: str = "en") -> list[str]:
    """What `nanny replay` prints."""
    line = replay.place.where
    told = f"was dumped at step {replay.step} ({replay.kind})" + (f", {line}" if line else "")
    out = [op_line(replay.op, replay.place, replay.classes, told, lang)]
    return out + [translate(line, lang) for line in _compared_again(replay)]


def _compared_again(replay: Replay) -> list[str]:
    out = []
    if replay.recorded_with != replay.here:
        out.append(f"recorded with torch {replay.recorded_with}, this is {replay.here}")
    for name, gaps, bad in (
        ("stored result", replay.then, replay.nonfinite_then),
        ("run again here", replay.now, replay.nonfinite_now),
    ):
        said = "differs from the reference" if gaps else "agrees" if replay.compared else "not compared: there is nothing wider"
        out.append(f"{name}: {said}" + (", holds NaN or Inf" if bad else ""))
        for gap in gaps:
            out += ["  " + text for text in _gap(gap)]
    if replay.then and not replay.now:
        out.append("the fault does not come back on this machine: another device, another kernel, or changed data")
    return out
