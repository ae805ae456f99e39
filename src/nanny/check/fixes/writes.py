"""Half values that are written into a float32 tensor by index: they take its format first."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from ...core.finding import Finding, Severity
from ..fixers import Change, fixer
from ..tree import Tree, argument, dotted_name


@fixer("NUM_INDEXED_WRITE")
def in_the_targets_format(tree: Tree, finding: Finding) -> Iterator[Change]:
    """What is written gets `.to(target.dtype)`; without it torch raises, so nothing that worked is changed."""
    target: cst.BaseExpression
    value: cst.BaseExpression | None
    written = tree.written_by(finding)
    if written is not None:
        target, value = written
    else:
        call = tree.at(finding, cst.Call)
        if call is None or tree.path(call.func) or not isinstance(call.func, cst.Attribute):
            return
        has_dimension = not call.func.attr.value.startswith(("index_put", "masked"))
        target, value = call.func.value, argument(call, 2 if has_dimension else 1, "src", "source", "tensor", "values")
    if value is not None and dotted_name(target):
        edits = tree.append_to(value, f".to({dotted_name(target)}.dtype)")
        yield Change(f"write it in the format of {dotted_name(target)}", tuple(edits), finding.severity >= Severity.WARNING)
