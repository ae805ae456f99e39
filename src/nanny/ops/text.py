"""The log of the operation tools: search it for `[ERROR]` (differs from its reference) and `[WARNING]` (NaN or Inf was made)."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterator

from ..core.examination import Place
from ..core.numbers import counted, deviation, short
from ..show.term import DEFAULT_WIDTH
from .judge import reason_of
from .records import Element, Gap, OpFault, OpTally, Replay, TensorNote

RULE = "=" * 28


def op_line(op: str, place: Place, classes: str, said: str) -> str:
    """`Gpt/Block/Linear/torch.ops.aten.addmm(forward) [blocks.3.fc] said`."""
    path = f"{classes}/{op}" if classes else op
    site = f" [{place.site}]" if place.site else ""
    return f"{path}({place.phase}){site} {said}"


def step_header(step: int) -> str:
    return f"{time.strftime('%Y-%m-%d, %H:%M:%S')}\n{'-' * 25}  step = {step}  {'-' * 22}"


def source_line(place: Place) -> str:
    return f"{place.file}:{place.line}" if place.file and place.line else ""


def fault_lines(fault: OpFault) -> list[str]:
    """The whole block of one fault."""
    if fault.kind == "mismatch":
        return [RULE, *_mismatch(fault), RULE]
    return [RULE, *_nonfinite(fault), RULE]


def _mismatch(fault: OpFault) -> Iterator[str]:
    yield "[ERROR] " + op_line(fault.op, fault.place, fault.classes, "fails to pass CompareWithCPU test")
    yield from _place_lines(fault)
    yield from _tensors(fault)
    yield "...... compare with cpu ......."
    for gap in fault.gaps:
        yield from _gap(gap)
    yield from _dump(fault)


def _place_lines(fault: OpFault) -> Iterator[str]:
    line = source_line(fault.place)
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
    yield f"Tensor values are not close: {counted(gap.differing, 'element')} beyond tolerance{share}"
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
    said = {"nan": "makes NaN", "inf": "makes Inf out of finite numbers", "came_in": "reads NaN or Inf that came in from outside"}
    yield "[WARNING] " + op_line(fault.op, fault.place, fault.classes, said[fault.kind])
    yield from _place_lines(fault)
    yield from _tensors(fault)
    if fault.passed_on_count:
        shown = ", ".join(fault.passed_on)
        more = (
            f", and {fault.passed_on_count - len(fault.passed_on)} more" if fault.passed_on_count > len(fault.passed_on) else ""
        )
        yield from _wrapped(f"passed on by {counted(fault.passed_on_count, 'operation')}: {shown}{more}")
    reason = reason_of(fault)
    if reason.why:
        yield from _wrapped(f"why: {reason.why}")
        yield from _wrapped(f"fix: {reason.fix}")
    yield from _dump(fault)


def _dump(fault: OpFault) -> Iterator[str]:
    if fault.dump:
        yield f"inputs and outputs saved; run it again with: nanny replay {fault.dump}"


def tensor_text(note: TensorNote) -> str:
    size = f"size={note.size}"
    ends = f", min={short(note.minimum, 6)}, max={short(note.maximum, 6)}" if note.minimum is not None else ""
    return f"Tensor <shape={list(note.shape)}, dtype={note.dtype}, device={note.device}, {size}{ends}>"


def tally_line(tool: str, tally: OpTally, faults: int, where: str = "") -> str:
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
    return "\n".join(_wrapped(f"{tool}: {text}" + (f"; log: {where}" if where else "")))


def next_line(tool: str, fault: OpFault, script: str = "") -> str:
    """What to type after the last line; `script`: the command line that `nanny trace` was given."""
    if fault.dump:
        return f"next: nanny replay {fault.dump}"
    if fault.kind == "mismatch":
        return (
            f"next: nanny trace --compare --dump --op {fault.bare_op} {script}  # keeps its data for nanny replay"
            if script
            else f"next: {tool}(target_list=['{fault.op}'], dump_error_data=True) keeps its data for nanny replay"
        )
    if script:
        return f"next: nanny trace --sanitize --start-step {fault.step} {script}  # what FP32 gives, and the cause"
    return f"next: `with nanny.sanitize(model) as seen:` around step {fault.step}, then print(seen): the cause"


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, DEFAULT_WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def replay_lines(replay: Replay) -> list[str]:
    """What `nanny replay` prints."""
    line = source_line(replay.place)
    told = f"was dumped at step {replay.step} ({replay.kind})" + (f", {line}" if line else "")
    out = [op_line(replay.op, replay.place, replay.classes, told)]
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
