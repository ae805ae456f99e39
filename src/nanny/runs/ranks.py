"""Replicas that should be alike and batches that should not, compared bit by bit from the files of their ranks; and whether a
reduction gave the sum of what they sent.

Each rank writes a checksum of its weights, and of its gradients as the optimizer gets them, at the steps that it traces; and a
sketch of its gradients before and after they are reduced. Nobody asks another rank for anything while training runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

import numpy as np

from ..core.finding import Finding, Severity
from ..core.limits import Limits
from ..core.registry import Pages, docstring_page
from ..diagnose.knowledge import remedy_of
from ..store import reader
from ..store.packing import BITS, REDUCTION, unpack_bits
from .source import Source

PAGES: Pages = {}
MOST_ASKED = 8  # ranks of a group, for their batches
KINDS = (("weight", "weights"), ("grad", "gradients after reduction"))  # of one step, in the order of time
BETWEEN_RANKS = ("RANKS_APART", "SAME_BATCH_AGAIN", "SUM_ROUNDED")  # what only the files of several ranks can tell
Checksums = Mapping[str, tuple[int, int]]  # parameter -> checksum, group


@dataclass(frozen=True)
class Moment:
    """One traced step as one rank has it; two ranks are at the same moment if step and updates before it are the same."""

    step: int
    updates: int
    kind: int  # position in KINDS
    sums: Checksums
    varied: frozenset[str] = frozenset()  # parameters that are no constant: two alike are copies of one


@dataclass(frozen=True)
class RankDifferences:
    """What the ranks of a job say about the parameters that they share."""

    parameters: int = 0  # that were compared last
    last_step: int | None = None  # at which they were
    findings: tuple[Finding, ...] = ()


def compare_ranks(sources: Sequence[Source]) -> RankDifferences:
    """Of a job, of which `open_job` gives the processes."""
    if len(sources) < 2:
        return RankDifferences()
    groups = {s.run.rank: [frozenset(ranks) for ranks in s.run.meta.get("replicas") or ()] for s in sources}
    by_rank = {source.run.rank: source for source in sources}
    named = dict.fromkeys(group for known in groups.values() for group in known)
    members = [{rank: by_rank[rank] for rank in sorted(group) if rank in by_rank} for group in named]
    same = (*_same_batches(members), *_rounded_sums(sources, groups), *_never_updated(members))
    by_moment: dict[tuple[int, int, int], dict[int, Moment]] = {}
    everyone = frozenset(source.run.rank for source in sources)
    varied: set[str] = set()
    for source in sources:
        for moment in moments(source):
            by_moment.setdefault((moment.step, moment.kind, moment.updates), {})[source.run.rank] = moment
            varied |= moment.varied if any(everyone <= group for known in groups.values() for group in known) else set()
    trained_alike = _Agreement(varied, _reduced_by_hand([held for held in by_moment.values() if held.keys() == everyone]))
    parameters, last = 0, None
    for (step, kind, _), held in sorted(by_moment.items()):
        ranks = {rank: moment.sums for rank, moment in held.items()}
        compared = 0
        bad: dict[str, dict[int, int]] = {}
        for name in dict.fromkeys(name for sums in ranks.values() for name in sums):
            for is_known, values in _replicas(name, ranks, groups):
                compared += 1
                if len(set(values.values())) == 1:
                    trained_alike.note(kind, name, next(iter(values.values())))
                elif is_known or trained_alike.knows(kind, name):
                    bad.setdefault(name, values)
        if bad:
            return RankDifferences(compared, step, (_finding(step, kind, bad, compared, last), *same))
        if compared:
            parameters, last = compared, step
    return RankDifferences(parameters, last, same)


def _same_batches(groups: Sequence[Mapping[int, Source]]) -> Iterator[Finding]:
    """Replicas that were given the same batch at the first look and at the last, and not the same one at both."""
    for members in groups:
        told = [source.evidence.facts for source in list(members.values())[:MOST_ASKED]]
        told = [f for f in told if f.first.setup is not None]
        looks = {(a.batch, b.batch, f.count("setup")) for f in told if (a := f.first.setup) and (b := f.latest.setup)}
        if len(told) > 1 and len(looks) == 1:
            first, last, _ = next(iter(looks))
            if first and last and first != last:
                yield Finding(
                    "SAME_BATCH_AGAIN",
                    Severity.WARNING,
                    f"{len(told)} ranks train on the same batches: bit for bit alike at the first look and at the last",
                    remedy_of("same_batch_again"),
                    site="data",
                    step=told[0].first_steps.get("setup"),
                    evidence={"ranks": list(members)[: len(told)]},
                )


def _never_updated(groups: Sequence[Mapping[int, Source]]) -> Iterator[Finding]:
    """Replicas whose optimizer never steps, and whose weights nobody moves, while that of others does."""
    enough = Limits().lost_steps
    for members in groups:
        rates = {rank: _steps_with(source, "lr") for rank, source in members.items()}
        idle = [rank for rank, source in members.items() if not rates[rank] and _trained_for_nothing(source, enough)]
        stepping = [rank for rank, steps in rates.items() if len(steps) >= enough]
        if idle and stepping:
            yield Finding(
                "RANKS_APART",
                Severity.ERROR,
                f"{_ranks(idle)} made no optimizer step, and {_ranks(stepping)} did: their weights part at the first",
                remedy_of("replicas_apart"),
                site="optimizer",
                step=rates[stepping[0]][0],
                evidence={"ranks": idle, "stepping": stepping, "of": "weight"},
            )


def _steps_with(source: Source, scalar: str) -> list[int]:
    found = reader.scalars(source.db, source.run.id, [scalar]).get(scalar)
    return [] if found is None else [int(step) for step in found[0]]


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _trained_for_nothing(source: Source, enough: float) -> bool:
    """Backward passes without a step: a rule has told, or there were losses and the weights are the same at both ends."""
    if source.evidence.finding("BACKWARD_WITHOUT_STEP") is not None:
        return True
    weights = [moment.sums for moment in moments(source) if KINDS[moment.kind][0] == "weight"]
    return len(_steps_with(source, "loss")) >= enough and len(weights) > 1 and weights[0] == weights[-1]


@dataclass(frozen=True)
class ReducedStep:
    """What a reduction did to the gradients of all ranks at one step."""

    step: int
    error: float  # norm of what the sum is off by, to that of the sum; only where it has the format of 16 bits
    worst: str  # the parameter with most of it
    format: str


FORMATS = {2: "bf16", 3: "fp16"}  # as nanny.measure.sketch numbers them
TOLD_AFTER = 2  # steps of those that were compared, one after the other


def reductions(sources: Sequence[Source], groups: Mapping[int, Sequence[frozenset[int]]]) -> Iterator[ReducedStep]:
    """At each step that all ranks traced. What the sum was multiplied by (an average, a loss scale) is found from the numbers.

    A sum in the format of 16 bits that the numbers added did not have, or that a sum of them would not have, was made in it.
    """
    world = sources[0].run.world_size
    if len(sources) < world or world < 2:
        return
    everyone = frozenset(range(world))
    shards = {name for name, copies in (sources[0].run.meta.get("shards") or {}).items() if copies == 1}
    alike = all(known == [everyone] for known in groups.values())
    read = [reader.statistics_of(s.db, s.run.id, "grad", REDUCTION) for s in sources]
    names = [[site.name for site in s.sites("grad")] for s in sources]
    if any(other != names[0] for other in names) or not len(names[0]):
        return
    steps = sorted(set.intersection(*(set(at.tolist()) for at, _ in read)))
    held = np.array([name in shards or alike for name in names[0]])
    whole = np.array([name in shards for name in names[0]])
    for step in steps:
        table = np.zeros((len(read), len(held), len(REDUCTION)))  # [rank, site, column]; sites met later hold 0
        for rank, (at, of) in enumerate(read):
            row = np.stack([of[name][np.searchsorted(at, step)] for name in REDUCTION], axis=1)
            table[rank, : len(row)] = row
        sums = (len(REDUCTION) - 1) // 2
        sent = table[:, :, :sums].sum(0)
        got = np.where(whole[:, None], table[:, :, sums:-1].sum(0), table[0, :, sums:-1])
        known = held & (sent != 0).any(1) & np.isfinite(sent).all(1) & np.isfinite(got).all(1)
        low = known & ~(table[:, :, -1] == 1).any(0)
        made_in = int(table[:, low, -1].max(initial=0))
        squares = float((got[known] ** 2).sum())
        if not squares or made_in not in FORMATS:  # what became 0 has no format of its own
            continue
        factor = float((got[known] * sent[known]).sum() / (sent[known] ** 2).sum())
        off = np.zeros_like(got)
        off[low] = got[low] - factor * sent[low]
        worst = int((off**2).sum(1).argmax())
        error = float(np.sqrt((off**2).sum() / squares))
        yield ReducedStep(step, error, names[0][worst], FORMATS[made_in])


@docstring_page(PAGES, "SUM_ROUNDED", Severity.WARNING)
def _rounded_sums(sources: Sequence[Source], groups: Mapping[int, Sequence[frozenset[int]]]) -> Iterator[Finding]:
    """The gradients of the ranks were added in 16 bits, and the sum is far from what they sent.

    Why: a sum that is small beside what is added keeps the rounding of the large: ranks whose gradients nearly cancel, or very
    many of them. Each rank is right, and the update is not.

    When not: with few ranks and gradients that point the same way the error of a bf16 sum is below one percent, and is not told.
    """
    limit = Limits().damage_consequence
    run: list[ReducedStep] = []
    for one in reductions(sources, groups):
        run = [*run, one] if one.error > limit else []
        if len(run) == TOLD_AFTER:
            first = run[0]
            yield Finding(
                "SUM_ROUNDED",
                Severity.WARNING,
                f"the gradients of {len(sources)} ranks were added in {first.format}: the sum is off by "
                f"{100 * first.error:.0f} % of its norm, most in `{first.worst}`",
                remedy_of("reduce_dtype_low_precision"),
                site=first.worst,
                step=first.step,
                value=first.error,
                limit=limit,
                evidence={"format": first.format, "ranks": len(sources)},
            )
            return


def whole_norms(sources: Sequence[Source]) -> tuple[np.ndarray, np.ndarray] | None:
    """Steps and norms of all gradients of a job whose ranks hold parts of the weights; None if they do not, or if one is missing.

    Squares of shards add up; what several ranks hold alike counts once.
    """
    if len(sources) < sources[0].run.world_size or not all(s.run.meta.get("shards") for s in sources):
        return None
    squares: dict[int, list[float]] = {}
    for source in sources:
        shards, db, run = source.run.meta["shards"], source.db, source.run.id
        steps, of = reader.statistics_of(db, run, "grad", ("norm", "count"))
        names = [site.name for site in reader.sites(db, run, "grad")][: of["norm"].shape[1]]
        share = np.array([1.0 / shards.get(name, len(sources)) for name in names])
        own = np.where(of["count"] > 0, of["norm"].astype(np.float64) ** 2, 0.0) @ share
        for step, value in zip(steps.tolist(), own.tolist()):
            squares.setdefault(step, []).append(value)
    known = sorted(step for step, parts in squares.items() if len(parts) == len(sources))
    return np.array(known, np.int64), np.sqrt([sum(squares[step]) for step in known])


def _reduced_by_hand(held: Sequence[Mapping[int, Moment]]) -> set[str]:
    """Parameters whose gradients a loop averages by hand: at two moments all that are no constant were alike on all ranks, bit by
    bit, and other ones than before."""
    seen: dict[str, set[int]] = {}
    for moments_of_ranks in held:
        first, *others = moments_of_ranks.values()
        if KINDS[first.kind][0] == "grad":
            told = {name: first.sums[name] for name in first.sums.keys() & first.varied}
            if all(other.sums.get(name) == value for other in others for name, value in told.items()):
                for name, (value, _) in told.items():
                    seen.setdefault(name, set()).add(value)
    return {name for name, values in seen.items() if len(values) > 1}


class _Agreement:
    """Weights that nobody called replicas are known as such once they have moved, and moved alike, and from the first on if their
    gradients are averaged; where all ranks are replicas in other parameters, once they were alike and no constant."""

    def __init__(self, varied: Set[str], reduced: Set[str]) -> None:
        self._seen: dict[tuple[int, str], set[int]] = {}
        self._varied, self._reduced_by_hand = varied, reduced

    def note(self, kind: int, name: str, value: int) -> None:
        self._seen.setdefault((kind, name), set()).add(value)

    def knows(self, kind: int, name: str) -> bool:
        moved = len(self._seen.get((kind, name), ())) > (name not in self._varied)
        return KINDS[kind][0] == "weight" and (moved or name in self._reduced_by_hand)


def _replicas(
    name: str, ranks: Mapping[int, Checksums], groups: Mapping[int, Sequence[frozenset[int]]]
) -> Iterator[tuple[bool, dict[int, int]]]:
    """Ranks that hold this parameter alike, with their checksums; and whether somebody said so."""
    sets: dict[frozenset[int], dict[int, int]] = {}
    for rank, sums in ranks.items():
        if name in sums:
            value, group = sums[name]
            alike = groups[rank][group - 1] if 0 < group <= len(groups[rank]) else frozenset()
            sets.setdefault(alike, {})[rank] = value
    yield from ((bool(alike), values) for alike, values in sets.items() if len(values) > 1)


def moments(source: Source) -> Iterator[Moment]:
    db, run = source.db, source.run.id
    before = {int(step): int(n) for step, n in zip(*reader.scalars(db, run, ["updates"]).get("updates", ((), ())))}
    for position, (kind, _) in enumerate(KINDS):
        steps, of = reader.statistics_of(db, run, kind, (*BITS, "min", "max"))
        names = [site.name for site in reader.sites(db, run, kind)]
        for i, step in enumerate(steps):
            if int(step) not in before:
                continue
            words, groups = unpack_bits(*(of[name][i] for name in BITS))
            finite = np.isfinite(of["min"][i]) & np.isfinite(of["max"][i])  # what is NaN has its own finding
            sums = {names[j]: (int(words[j]), int(groups[j])) for j in np.flatnonzero((groups >= 0) & finite)}
            if sums:
                varied = (names[j] for j in np.flatnonzero(of["min"][i] < of["max"][i]))
                yield Moment(int(step), before[int(step)], position, sums, frozenset(varied))


@docstring_page(PAGES, "RANKS_APART", Severity.ERROR)
def _finding(step: int, kind: int, bad: Mapping[str, Mapping[int, int]], compared: int, last: int | None) -> Finding:
    """Replicas that should be bit-identical are not: the ranks train different models.

    Why: data-parallel ranks apply the same update to the same weights. Once they differ, every further average mixes gradients
    of different models; nothing crashes, the loss is only worse than it should be, and the checkpoint is that of one rank.

    When not: weights that differ on purpose: shards (FSDP, tensor parallel), stages of a pipeline, updates inside `no_sync`.

    Fix: call the wrapper, not `model.module`; let every rank clip, skip and step alike; broadcast whatever one rank loads or
    initialises alone; compare the hardware of a rank that is alone in being different.
    """
    name, values = next(iter(bad.items()))
    usual = Counter(values.values()).most_common(1)[0]
    others = sorted(rank for rank, value in values.items() if value != usual[0])
    alike = usual[1] > 1
    who = f"rank {', '.join(map(str, others))}" if alike else f"ranks {' and '.join(map(str, sorted(values)))}"
    what = "differ" if not alike or len(others) > 1 else "differs"
    since = f"; all were alike at step {last}" if last is not None else ""
    return Finding(
        "RANKS_APART",
        Severity.ERROR,
        f"{who} {what} in the {KINDS[kind][1]} of `{name}` ({len(bad)} of {compared} parameters){since}",
        remedy_of("replicas_apart"),
        site=name,
        step=step,
        evidence={
            "ranks": others if alike else sorted(values),
            "parameters": list(bad)[:64],
            "of": KINDS[kind][0],
            "last_alike": last,
        },
    )
