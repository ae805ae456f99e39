"""The picture of a run with the words of its verdict: what `nanny card`, the page and a notebook show."""

from __future__ import annotations

from ..core.command_line import LANGUAGES
from ..core.finding import Finding
from ..diagnose.knowledge import causes
from ..diagnose.records import Diagnosis
from ..diagnose.text import BLAME
from ..diagnose.verdict import certainty
from ..show.translation import translate, words_of
from ..show.wall import outlook, wall_svg
from .source import title_of
from .summary import Summary
from .wall import Wall, wall_of


def card_svg(summary: Summary, lang: str = "en") -> str:
    return _draw(summary, wall_of(summary), lang)


def cards(summary: Summary, wall: Wall) -> dict[str, str]:
    """By language: a page can be read in either."""
    return {lang: _draw(summary, wall, lang) for lang in LANGUAGES}


def outlook_texts(wall: Wall) -> dict[str, list[tuple[str, str]]]:
    """By language, what the picture foretells in words: the clearance of a healthy run, or when it would end."""
    return {lang: list(outlook(wall, words_of("wall", lang))) for lang in LANGUAGES}


def _draw(summary: Summary, wall: Wall, lang: str) -> str:
    verdict, source = summary.verdict, summary.culprit_rank.source
    one = None if verdict.diagnosis is None else verdict.diagnosis.in_language(lang)
    page = None if one is None else causes(lang).get(one.cause)
    noticed = verdict.first if one is None and verdict.healthy is False else None
    proof = () if one is None or one.source else one.evidence[:1]  # where there is no line to show, what proves it
    return wall_svg(
        wall,
        word=verdict.word,
        good=verdict.healthy is True,
        title=translate(verdict.reason, lang) if one is None else one.cause if page is None else page.title.rstrip(".。"),
        subtitle=_noticed_at(noticed, lang) if one is None else _place(one, verdict.rank, lang),
        source="" if one is None else one.source,
        seen="".join(proof if noticed is None else (translate(noticed.message, lang),)).replace("`", ""),
        change=(one.remedy if one is not None else translate(noticed.hint, lang) if noticed is not None else "").replace("`", ""),
        chain=() if one is None else tuple(link.replace("`", "") for link in one.chain),
        footer=f"nanny · {translate(title_of(source), lang)}",
        lang=lang,
    )


def _noticed_at(first: Finding | None, lang: str) -> str:
    if first is None:
        return ""
    when = "" if first.step is None else words_of("wall", lang)["impact"].format(step=first.step)
    return " · ".join(fact for fact in (first.site, when, "" if first.rank is None else f"rank {first.rank}", first.code) if fact)


def _place(one: Diagnosis, rank: int | None, lang: str) -> str:
    words = words_of("wall", lang)
    file = one.where.replace("\\", "/").rpartition("/")[2]
    when = "" if one.step is None else words["impact"].format(step=one.step)
    known = "" if one.precision_caused is None else translate(BLAME[one.precision_caused], lang)
    process = "" if rank is None else f"rank {rank}"
    sure = translate(certainty(one), lang)
    return " · ".join(fact for fact in (one.culprit, when, process, file, one.cause, sure, known) if fact)
