"""Numbers that do not exist in half: mask constants that overflow, eps that rounds to 0, counts that lose their ones."""

from __future__ import annotations

from collections.abc import Iterator

from ...core.finding import Severity
from ...core.formats import BF16, FP16, Format
from ...core.ops import FILLING_FUNCTIONS, LOG_FUNCTIONS, RANGE_FUNCTIONS, SAME_VALUES, SHAPE, WRITTEN_NUMBERS
from ..chains import half_links, link, node_link, unknown_link
from ..interpreter.trace import Event, FileView
from ..interpreter.values import HALF, Value, ancestors, constant
from ..registry import Hit, rule
from .half import is_position, origins_of, stored_key

_NORMALIZE_EPS = 1e-12  # the default of F.normalize
_FORMATS: dict[str, Format] = {"fp16": FP16, "bf16": BF16}


@rule(
    "NUM_MASK_CONSTANT",
    Severity.ERROR,
    "masked_fill",
    "masked_fill_",
    "where",
    "setitem",
    "add",
    "mul",
    "full",
    "full_like",
    "fill_",
    "new_full",
)
def mask_constant(event: Event, view: FileView) -> Iterator[Hit]:
    """A mask constant lies outside the range of the half tensor it is put into.

    Why: fp16 ends at 65504, so -1e9 raises in masked_fill and becomes -inf in arithmetic; a row that is masked whole then
    gives NaN in softmax. float32's own minimum overflows bf16 as well.

    Example:
        scores = scores.masked_fill(mask, -1e9)

    Use instead:
        scores = scores.masked_fill(mask, torch.finfo(scores.dtype).min)

    When not: the tensor is float32 at this point.
    """
    tensor, number = _fill_of(event)
    if tensor is None or number is None or tensor.dtype not in _FORMATS or not number.is_number:
        return
    kind = _FORMATS[tensor.dtype]
    if not kind.overflow_at <= abs(number.const) < float("inf"):
        return
    yield Hit(
        event.node,
        f"{number.const:.4g} does not fit {tensor.dtype} (largest {kind.max:.5g}): {tensor.why}",
        "use torch.finfo(tensor.dtype).min, or mask in float32",
        chain=(*half_links(tensor, event.file), link(event, f"{number.const:.4g} is put into it")),
        unknown=unknown_link(tensor, event.file),
        is_proven=event.op in FILLING_FUNCTIONS,  # torch raises
    )


def _fill_of(event: Event) -> tuple[Value | None, Value | None]:
    """The tensor and the number that is put into it."""
    if event.op in ("masked_fill", "masked_fill_"):
        return event.arg(0), event.arg(2, "value")
    if event.op == "where":
        sides = [event.arg(1), event.arg(2)]
        numbers = [
            v
            for v in sides
            if v.is_number or (v.op in ("tensor", "full") and v.inputs and v.inputs[-1].is_number and not v.dtype)
        ]
        tensors = [v for v in sides if v.kind == "tensor"]
        return (tensors[0], numbers[0]) if len(numbers) == 1 and len(tensors) == 1 else (None, None)
    if event.op == "setitem":
        return event.arg(0), event.arg(2)
    if event.op in ("full", "full_like", "new_full"):
        position = 0 if event.op == "full" else 1
        return event.out, event.arg(position + (1 if event.op == "full" else 0), "fill_value")
    if event.op == "fill_":
        return event.arg(0), event.arg(1)
    left, right = event.arg(0), event.arg(1)
    if left.is_number == right.is_number:
        return None, None
    return (right, left) if left.is_number else (left, right)


@rule(
    "NUM_EPS_UNDERFLOW",
    Severity.WARNING,
    "add",
    "clamp",
    "clamp_",
    "clamp_min",
    "maximum",
    "normalize",
    "add_",
    "cosine_similarity",
)
def eps_underflow(event: Event, view: FileView) -> Iterator[Hit]:
    """An eps that keeps a division or logarithm away from 0 is itself 0 in fp16.

    Why: 1e-8 rounds to 0 in fp16 (the smallest value above 0 is 6e-8), so x / (std + 1e-8) divides by 0 and gives inf or
    NaN.

    Example:
        y = x / (x.std() + 1e-8)

    Use instead:
        y = x / (x.float().std() + 1e-8)

    When not: the sum is float32: sum, norm, pow, exp and log are promoted under CUDA autocast; mean, var, std, sqrt and
    sigmoid are not.
    """
    tensor, eps = event.arg(0), event.arg(1)
    if event.op == "add" and tensor.is_number:
        tensor, eps = eps, tensor
    elif event.op in ("clamp", "clamp_", "clamp_min"):
        eps = event.arg(1, "min")
    elif event.op in ("normalize", "cosine_similarity"):
        if event.out.dtype != "fp16":
            return
        eps = event.kwargs.get("eps") or event.arg(3) if event.op == "normalize" else event.kwargs.get("eps", Value())
        if event.op == "normalize" and not eps.is_number and "eps" not in event.kwargs and len(event.args) < 4:
            eps = constant(_NORMALIZE_EPS)
    if tensor.dtype != "fp16" or not eps.is_number or not 0 < abs(eps.const) <= FP16.flush_at:
        return
    if _feeds_log(event, view):
        return
    yield Hit(
        event.node,
        f"{eps.const:g} is 0 in fp16: {tensor.why}",
        "compute this in float32 (x.float()), or use an eps of at least 1e-4 here",
        unknown=unknown_link(tensor, event.file),
    )


def _feeds_log(event: Event, view: FileView) -> bool:
    """Whether log(sigmoid(x) + eps) or its like is reported already."""
    first = event.arg(0) if event.arg(0).kind == "tensor" else event.arg(1)
    if not any(v.op in ("sigmoid", "softmax") for v in _steps(first)):
        return False
    return id(event.out) in view.once("steps_to_log", lambda: {id(v) for e in view.of(*LOG_FUNCTIONS) for v in _steps(e.arg(0))})


def _steps(value: Value) -> Iterator[Value]:
    current = value
    for _ in range(8):
        yield current
        nexts = [v for v in current.inputs if v.kind == "tensor"]
        if not nexts:
            return
        current = nexts[0]


_COUNTING = (*RANGE_FUNCTIONS, "cast", "einsum", "matmul", "outer", "tensor", "as_tensor", "div")
_INDEX = {"embedding": (0, "input"), "one_hot": (0, "tensor"), "gather": (2, "index"), "index_select": (2, "index")}


@rule("NUM_POSITIONS", Severity.WARNING, *_COUNTING, *_INDEX)
def positions_in_half(event: Event, view: FileView) -> Iterator[Hit]:
    """Positions, time steps, ids or counts are put into half.

    Why: fp16 counts exactly to 2048 and bf16 to 256; beyond, neighbouring positions become equal, and embeddings or ids are
    wrong. Above 65504 fp16 is infinite: 16-bit images do not fit. An embedding refuses ids that are not whole numbers.

    Example:
        t = torch.arange(8192, dtype=torch.bfloat16)

    Use instead:
        t = torch.arange(8192, dtype=torch.float32)

    When not: the largest value is small.
    """
    if event.op in ("einsum", "matmul", "outer"):
        yield from _positions_in_product(event)
        return
    if event.op in _INDEX:
        yield from _half_index(event)
        return
    if event.op == "div":
        yield from _beyond_the_range(event)
        return
    kind = event.out.dtype
    if kind not in HALF or not event.out.sure:
        return
    limit = 256 if kind == "bf16" else 2048
    if event.op in RANGE_FUNCTIONS:
        counted: Value | None = event.out
    elif event.op in ("tensor", "as_tensor"):
        counted = event.out if _is_clock(event.out) or _has_inexact_integers(event.arg(0), _FORMATS.get(kind)) else None
    elif _is_clock(event.arg(0)) or (_is_listed(event.arg(0)) and (_largest(event.arg(0)) or 0) > limit):
        counted = event.arg(0)
    else:
        counts = _largest(event.arg(0)) is not None or any(v.op == "arange" for v in ancestors(event.arg(0), 6))
        counted = event.arg(0) if is_position(event.arg(0)) and (counts or _is_explicit(event)) else None
    if counted is None and not _becomes_integer(event.out, view):
        yield from _possible_key(event, kind, limit)
        return
    largest = _largest(event.out if event.op != "cast" else event.arg(0))
    if (largest is None and event.op == "linspace") or (largest is not None and largest <= limit) or _is_share(event, view):
        return
    if largest is None and _is_averaged(event, view):
        return
    yield Hit(
        event.node,
        f"whole numbers are put into {kind}, which counts exactly only to {limit}",
        "keep them integer or float32 and cast the result of the computation",
        chain=(link(event, f"{kind} from here on"),),
        is_proven=counted is not None and (largest is not None or _is_clock(counted)),  # the code says that they go too far
    )


def _half_index(event: Event) -> Iterator[Hit]:
    """Ids that were cast together with the rest of a batch: a lookup takes whole numbers only."""
    index = event.arg(*_INDEX[event.op])
    made = _source(index, SAME_VALUES)
    if index.dtype not in HALF or made.op != "cast" or made.node is None:
        return
    cast = node_link(made.node, event.file, f"the ids are cast to {index.dtype}")
    where = f"line {cast.line}" if cast.file == event.file else f"{cast.file}:{cast.line}"
    yield Hit(
        event.node,
        f"{event.op} is asked for ids that are {index.dtype} since the cast at {where}: this raises RuntimeError",
        "cast the floating-point tensors of a batch only, and leave ids integer",
        chain=(cast, link(event, f"{event.op} takes whole numbers only")),
        unknown=unknown_link(index, event.file),
        is_proven=True,
    )


_RANGES = frozenset(2**bits - off for bits in (16, 24, 31, 32) for off in (0, 1))  # of the integers that files hold


def _beyond_the_range(event: Event) -> Iterator[Hit]:
    """`depth.half() / 65535`: what is divided by its largest number was cast to a format that does not reach it."""
    scaled, most = _source(event.arg(0), SAME_VALUES), event.arg(1)
    kind = _FORMATS.get(scaled.dtype)
    if kind is None or scaled.op != "cast" or scaled.node is None or scaled.inputs[0].is_half or not scaled.sure:
        return
    if most.is_number and most.const in _RANGES and most.const >= kind.overflow_at:
        cast = node_link(scaled.node, event.file, f"the numbers are cast to {scaled.dtype}")
        yield Hit(
            event.node,
            f"numbers up to {most.const:.6g} are divided in {scaled.dtype}, which ends at {kind.max:.5g}: the largest are inf "
            "since the cast",
            "divide in float32 first, then cast",
            chain=(cast, link(event, "they are divided by their largest")),
            is_proven=True,
        )


def _is_share(event: Event, view: FileView) -> bool:
    """Whether a count, shifted perhaps, is divided by its own length: the shares lie between 0 and 1."""
    trace = view.trace_of(event) if event.op in ("arange", "range") else None
    if trace is None:
        return False
    length = {id(v) for a in event.args for v in ancestors(a, 8) if v.kind != "const"}
    shifted = {id(event.out), *(id(e.out) for e in trace.of("add", "sub") if e.arg(0) is event.out and e.arg(1).is_number)}
    divided = (e for e in trace.of("div", "div_", "augassign") if id(e.arg(0)) in shifted)
    return any(id(v) in length for e in divided if e.op != "augassign" or e.arg(2).const == "Div" for v in ancestors(e.arg(1), 8))


def _is_averaged(event: Event, view: FileView) -> bool:
    """Whether a count is only weighted and summed up again: the mean of a distribution over bins or steps."""
    trace = view.trace_of(event)
    sums = trace.of("sum", "mean") if trace is not None else []
    factors = (v for e in sums if e.arg(0).op == "mul" for v in e.arg(0).inputs)
    return any(_source(v) is _source(event.out) for v in factors)


def _becomes_integer(value: Value, view: FileView) -> bool:
    """Whether the program later takes the half values for whole numbers again: they are ids, positions or counts."""
    return id(value) in view.once(
        "taken for integers", lambda: {id(v) for e in view.of("cast") if e.out.dtype == "int" for v in _taken_from(e.arg(0))}
    )


def _taken_from(value: Value) -> Iterator[Value]:
    """What a value was taken from by reshaping and indexing; the first column of a concatenation is its first part."""
    stack, left = [value], 40
    while stack and left:
        left -= 1
        current = stack.pop()
        yield current
        if current.op == "getitem" and len(current.inputs) == 2:
            origin, index = current.inputs
            while origin.op in SHAPE and origin.inputs:
                origin = origin.inputs[0]
            last = index.inputs[-1] if index.kind == "tuple" and index.inputs else index
            if origin.op == "cat" and origin.inputs and origin.inputs[0].inputs and last.const == 0:
                stack.append(origin.inputs[0].inputs[0])
        elif current.op in SAME_VALUES | {"cast"} and current.inputs:
            stack.append(current.inputs[0])


_KEY_WORDS = frozenset({"id", "ids", "timestamp", "timestamps", "position", "positions"})


def _possible_key(event: Event, kind: str, limit: int) -> Iterator[Hit]:
    """A column that is called an id or a time stamp may well hold large numbers; its name alone is no proof."""
    key = stored_key(event.arg(0))
    if _KEY_WORDS.isdisjoint(key.lower().split("_")[-1:]) or (event.op == "cast" and not _is_explicit(event)):
        return
    yield Hit(
        event.node,
        f"if the column `{key}` holds whole numbers above {limit}, {kind} does not keep them apart",
        "keep ids and times integer, or subtract their start first",
    )


def _is_explicit(event: Event) -> bool:
    return any(v.kind == "dtype" and v.op != "dtype" for v in (*event.args[1:], *event.kwargs.values())) or getattr(
        getattr(event.node, "func", None), "attr", ""
    ) in ("half", "bfloat16")


_CLOCKS = ("call:time.time", "call:time.time_ns", "call:time.monotonic_ns", "call:timestamp")


def _is_clock(value: Value) -> bool:
    """Whether a value is the time since 1970 as it was read, not a difference of two."""
    return any(v.op in _CLOCKS for v in origins_of(value))


def _is_listed(value: Value) -> bool:
    """Whether a value is a tensor of whole numbers that the code writes down."""
    return value.dtype == "int" and any(v.op in WRITTEN_NUMBERS for v in origins_of(value))


def _has_inexact_integers(content: Value, kind: Format | None) -> bool:
    """Whether a list of whole numbers holds one that the format has not: ids or counts, rather than one setting."""
    if content.kind not in ("list", "tuple") or kind is None or len(content.inputs) < 2:
        return False
    numbers = [v.const for v in content.inputs if isinstance(v.const, int) and not isinstance(v.const, bool)]
    return len(numbers) == len(content.inputs) and any(n > 0 and n % kind.spacing(n) for n in numbers)


def _largest(value: Value) -> float | None:
    """The largest number an arange or linspace can hold, if the code says."""
    for made in ancestors(value, 20):
        if made.op in RANGE_FUNCTIONS:
            numbers = [v for v in made.inputs if v.kind == "const" or v.is_number]
            bound = made.inputs[0] if len(made.inputs) == 1 else (made.inputs[1] if len(made.inputs) > 1 else None)
            if bound is not None and bound.is_number and numbers:
                return float(bound.const)
            return None
        if made.op == "randint" and len(made.inputs) > 1:
            bound = made.inputs[1] if made.inputs[1].is_number else made.inputs[0]
            return float(bound.const) if bound.is_number else None
        if made.op in WRITTEN_NUMBERS and made.inputs:
            content = made.inputs[1 if made.op == "full" and len(made.inputs) > 1 else 0]
            numbers = [v for v in (content.inputs if content.kind in ("list", "tuple") else (content,)) if v.is_number]
            return float(max(v.const for v in numbers)) if numbers else None
        if made.op in ("compare",) or made.dtype == "bool":
            return 1.0
        if made.op == "one_hot":
            return 1.0
    return None


def _positions_in_product(event: Event) -> Iterator[Hit]:
    """Rotary angles: a product of positions and frequencies that autocast runs in half."""
    region = event.at.region
    if region is None or event.out.dtype not in HALF:
        return
    values = [_source(v) for a in event.args for v in (a.inputs if a.kind in ("list", "tuple") else (a,))]
    if any(value.op == "softmax" for value in values):  # the mean of a distribution over bins: a few small numbers
        return
    for made in values:
        if made.op == "arange" and (_largest(made) or 1e9) > (256 if event.out.dtype == "bf16" else 2048):
            yield Hit(
                event.node,
                f"positions go through {event.op}, which {region.label_in(event.file)} runs in {event.out.dtype}",
                "compute the angles in a block with autocast off, in float32, or by multiplication",
            )
            return


def _source(value: Value, moves: frozenset[str] = SAME_VALUES | {"cast"}) -> Value:
    """What a value is but for its shape, place and dtype."""
    for _ in range(6):
        if value.op in moves and value.inputs:
            value = value.inputs[0]
    return value
