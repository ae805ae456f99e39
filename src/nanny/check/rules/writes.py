"""Half values that go where only another dtype fits: into float32 tensors by index, to NumPy."""

from __future__ import annotations

from collections.abc import Iterator

from ...core.finding import Severity
from ...core.ops import WRITING_FUNCTIONS, autocast_list
from ..chains import half_links, link, node_link, unknown_link
from ..interpreter.trace import Event, FileView
from ..interpreter.values import HALF, Value, ancestors
from ..registry import Hit, rule


@rule("NUM_INDEXED_WRITE", Severity.ERROR, "setitem", *WRITING_FUNCTIONS)
def indexed_write(event: Event, view: FileView) -> Iterator[Hit]:
    """Half values are written by index into a float32 tensor.

    Why: index_put, index_add_, index_copy_, scatter_ and masked_scatter_ want one dtype on both sides and raise; in-place
    operations are not autocast.

    Example:
        out = torch.zeros(n, d, device="cuda")
        with torch.autocast("cuda"):
            out[rows] = expert(x[rows])

    Use instead:
        out[rows] = expert(x[rows]).to(out.dtype)

    When not: the index is a slice or a plain integer: that is a copy, and copies convert.
    """
    target = event.arg(0)
    if event.op == "setitem":
        value = event.arg(2)
        if not _is_tensor_index(event.arg(1)):
            return
    else:
        value = event.kwargs.get("src") or event.kwargs.get("source") or event.arg(WRITING_FUNCTIONS[event.op], "tensor")
    if target.kind != "tensor" or target.dtype not in ("fp32", "fp64") or value.kind != "tensor" or value.dtype not in HALF:
        return
    if not event.op.endswith("_") and event.op != "setitem" and event.at.region is not None and event.op == "index_put":
        return
    made = (node_link(target.node, event.file, f"the tensor is {target.dtype}"),) if target.node is not None else ()
    yield Hit(
        event.node,
        f"{value.dtype} values are written into a {target.dtype} tensor, which raises RuntimeError: {value.why}",
        "cast the values with .to(target.dtype)",
        chain=(*made, *half_links(value, event.file), link(event, "they are written by index")),
        unknown=unknown_link(value, event.file),
        is_proven=True,
    )


def _is_tensor_index(index: Value) -> bool:
    """Whether indexing goes through index_put: the index is a tensor or a list, not a slice or a number."""
    if index.kind == "tuple":
        return any(_is_tensor_index(i) for i in index.inputs)
    if index.kind in ("slice", "const") or index.op == "loop_index":
        return False
    if index.kind in ("tensor", "list"):
        return True
    return any(v.op in ("compare", "nonzero", "argsort", "topk") for v in ancestors(index, 5))


@rule("NUM_NUMPY_BF16", Severity.ERROR, "numpy")
def numpy_of_bf16(event: Event, view: FileView) -> Iterator[Hit]:
    """A bf16 tensor is handed to NumPy.

    Why: NumPy has no bfloat16: `.numpy()` raises TypeError, often in the evaluation after the first epoch.

    Example:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            scores = model(x)
        scores.cpu().numpy()

    Use instead:
        scores.float().cpu().numpy()

    When not: the tensor is float32 or fp16 at this point.
    """
    value = event.arg(0)
    if value.kind != "tensor" or value.dtype != "bf16":
        return
    yield Hit(
        event.node,
        f"numpy() of a bf16 tensor raises TypeError: {value.why}",
        "call .float() first",
        chain=(*half_links(value, event.file), link(event, "it is handed to NumPy")),
        unknown=unknown_link(value, event.file) or _doubt_of_region(value, event, view),
        is_proven=True,
    )


def _doubt_of_region(value: Value, event: Event, view: FileView) -> str:
    """What is open where nobody in sight calls the function, and autocast would have made float32 on the way."""
    trace = view.trace_of(event)
    is_called = trace is None or trace.name == "<module>" or event.at.regions
    if is_called or not any(autocast_list(v.op, "cuda") == "float32" for v in ancestors(value, 12)):
        return ""
    return "whether autocast is on around it"
