"""The front page of `nanny ui`: the runs below a folder with their verdicts, as HTML that works without script, too."""

from __future__ import annotations

import html
import re
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..core.numbers import shorten
from ..core.plain_json import finding_object
from ..diagnose.verdict import finding_of
from ..runs.text.runs import store_folder
from ..show.html import asset, script_element
from ..show.term import whole_shares
from ..show.translation import translate, words_of
from .runlist import Job, Rank

REFRESH_SECONDS = 10
RANKS_SHOWN = 256
_UNITS = (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1))  # as coarse as they may be
Address = Callable[[Path, int], str]
_ASK_AGAIN = f"""setInterval(async () => {{
  if (document.hidden || document.querySelector("input:checked, input:focus, select:focus")) return;
  const answer = await fetch(location.href).catch(() => null);
  if (answer?.redirected) location.href = answer.url; // the first run has come
  else if (answer?.ok) {{
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
    document.querySelector("main").replaceWith(fresh.querySelector("main"));
  }}
}}, {1000 * REFRESH_SECONDS});"""


def list_page(
    jobs: Sequence[Job],
    notes: Sequence[str],
    top: Path,
    address: Address,
    lang: str,
    nonce: str,
    sort: str = "",
    wanted: str = "",
) -> str:
    """Sorting, filtering and comparing are forms; the script only brings what is new, and takes no tick away."""
    words = words_of("runs", lang)
    columns = ("tick", "run", "verdict", "status", "loss", "step", "dtype", "started", "command")
    heads = "".join(f'<th scope="col">{words[key]}</th>' for key in columns)
    rows = [_row(job, top, address, lang) for job in sorted(jobs, key=_ORDERS.get(sort, _ORDERS[""]))]
    rows = [row for row in rows if wanted.lower() in html.unescape(re.sub("<[^>]*>", "", row)).lower()]
    table = (
        f'<div class="scroll"><table class="cards"><thead><tr>{heads}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
    )
    button = f'<p><button type="submit">{words["ticked"]}</button></p>' if len(rows) > 1 else ""
    body = f'{_filters(words, sort, wanted)}<form action="/compare">{table}{button}</form>'
    if not rows:
        body = f"{_filters(words, sort, wanted)}<p>{html.escape(words['match'].format(wanted))}</p>"
    if not jobs:
        body = f"<p>{words['none']}</p>"
    unread = "".join(f'<p class="warning">{words["unread"]}: {html.escape(note)}</p>' for note in notes)
    head = f'<h1>{words["title"]} <small class="quiet">{html.escape(words["in"].format(top))}</small></h1>'
    alive = not jobs or any(not job.is_over for job in jobs)
    return _page(words["title"], f"<section>{head}{unread}{body}</section>", lang, nonce if alive else "")


_ORDERS: dict[str, Callable[[Job], Any]] = {
    "": lambda job: -job.first.run.started,
    "verdict": lambda job: (
        {False: 0, None: 1, True: 2}[job.verdict.healthy],
        job.verdict.word == "SUSPECT",
        -job.first.run.started,
    ),
    "step": lambda job: -(job.last_step or 0),
}


def _filters(words: Mapping[str, str], sort: str, wanted: str) -> str:
    names = {"": words["sort"], "verdict": words["sort.verdict"], "step": words["sort.step"]}
    options = "".join(f'<option value="{k}"{" selected" if k == sort else ""}>{text}</option>' for k, text in names.items())
    search = f'name="q" value="{html.escape(wanted)}" placeholder="{words["filter"]}" aria-label="{words["filter"]}"'
    pick = f'<select name="sort" aria-label="{words["sort"]}">{options}</select><button type="submit">{words["show"]}</button>'
    return f'<form class="bar" action="/"><input type="hidden" name="all" value="1"><input type="search" {search}>{pick}</form>'


def message_page(text: str, lang: str = "en") -> str:
    return _page(
        "nanny", f'<section><h1>nanny</h1><p>{html.escape(translate(text, lang))}</p><p><a href="/">/</a></p></section>', lang
    )


def job_object(job: Job, address: str) -> dict[str, Any]:
    """The same for programs."""
    run = job.first.run
    return {
        "address": address, "file": str(job.first.store), "run": run.id, "started": run.started, "status": run.status,
        "amp_dtype": run.amp_dtype, "argv": list(run.argv), "last_step": job.last_step, "verdict": job.verdict.text,
        "healthy": job.verdict.healthy, "culprit": None if job.verdict.first is None else finding_object(job.verdict.first),
        "diagnosis": None if job.verdict.diagnosis is None else job.verdict.diagnosis.to_json(),
        "ranks": [{"rank": r.run.rank, "errors": r.errors, "warnings": r.warnings} for r in job.ranks],
    }  # fmt: skip


def _row(job: Job, top: Path, address: Address, lang: str) -> str:
    run = job.first.run
    words = words_of("runs", lang)
    word = job.verdict.word
    told = words_of("verdict", lang).get(word, word)
    style = {True: "good", False: "error" if word == "NOT HEALTHY" else "warning", None: "warning"}[job.verdict.healthy]
    store = job.first.store
    name = f"{_folder(store, top)}\xa0·\xa0{run.id}" if _folder(store, top) else str(run.id)
    here = html.escape(address(store, run.id))
    box = f'<input type="checkbox" name="run" value="{here}" aria-label="{words["tick"]} {html.escape(name)}">'
    ago = _ago(time.time() - run.started, words)
    heads = [words[key] for key in ("tick", "run", "verdict", "status", "loss", "step", "dtype", "started", "command")]
    cells = [
        box,
        f'<a class="parts" href="{here}">{_parts(name)}</a>{_ranks(job, address, words)}',
        f'<span class="strong {style}">{html.escape(told)}</span> {_reason(job, words, lang)}',
        html.escape(words_of("page", lang).get(f"status.{run.status}", run.status)),
        f'<span class="site spark">{job.loss}</span>',
        "" if job.last_step is None else str(job.last_step),
        html.escape(run.amp_dtype or words["autocast"]),
        f'{time.strftime("%Y-%m-%d %H:%M", time.localtime(run.started))}<br><span class="quiet">{ago}</span>',
        f'<span class="site parts">{_parts(shorten(shlex.join(run.argv), 80))}</span>',
    ]
    broken = (1, 2, 8)  # names, reasons and commands may break anywhere, words and dates may not
    kinds = [' class="parts"' if i in broken else ' class="whole"' for i in range(len(cells))]
    shown = [f'<td{kind} data-head="{head}">{cell}</td>' for kind, head, cell in zip(kinds, heads, cells)]
    return f"<tr>{''.join(shown)}</tr>"


def _ago(seconds: float, words: Mapping[str, str]) -> str:
    unit, size = next((one for one in _UNITS if seconds >= one[1]), _UNITS[-1])
    return words[f"ago.{unit}"].format(int(max(seconds, 0) // size))


def _parts(name: str) -> str:
    """A path may end a line behind a separator, and not inside a word or a number."""
    return re.sub(r"([/_]|(?<!\d)\.|(?<=\w)-(?!\d))", r"\1<wbr>", html.escape(name).replace("&#x27;", "'"))


def _reason(job: Job, words: Mapping[str, str], lang: str) -> str:
    """The cause, or the first culprit, in a line; else what the verdict says."""
    culprit = finding_of(job.verdict) or job.verdict.first
    if culprit is None:
        return html.escape(translate(job.verdict.reason, lang))
    place = html.escape(shorten(culprit.site, 60))
    at = f" {words['at'].format(culprit.step)}" if culprit.step is not None else ""
    at += "" if job.verdict.rank is None else f", {words['rank'].format(job.verdict.rank)}"
    message = re.sub("`([^`]*)`", r"<code>\1</code>", html.escape(shorten(whole_shares(translate(culprit.message, lang)), 500)))
    return f'{_parts(culprit.code)}{at} <span class="site">{place}</span><span class="quiet two-lines">{message}</span>'


def _ranks(job: Job, address: Address, words: Mapping[str, str]) -> str:
    if len(job.ranks) == 1:
        return ""
    sick = [rank for rank in job.ranks if rank.errors or rank.warnings]
    shown = sorted(job.ranks, key=lambda rank: (-rank.errors, -rank.warnings, rank.run.rank))[:RANKS_SHOWN]
    items = "".join(f"<li>{_rank(rank, address, words)}</li>" for rank in shown)
    head = words["ranks"].format(len(job.ranks)) + (f", {words['sick'].format(len(sick))}" if sick else "")
    return f"<details><summary>{head}</summary><ul>{items}</ul></details>"


def _rank(rank: Rank, address: Address, words: Mapping[str, str]) -> str:
    found = words["found"].format(rank.errors, rank.warnings) if rank.errors or rank.warnings else words["clean"]
    return f'<a href="{html.escape(address(rank.store, rank.run.id))}">{words["rank"].format(rank.run.rank)}</a> {found}'


def _folder(store: Path, top: Path) -> str:
    """Where the store lies below the folder that is served; empty where there is only one place."""
    if top.is_file() or store.parent == top:
        return "" if store.name == "metrics.db" or top.is_file() else store.name
    return store_folder(store.relative_to(top))


def _page(title: str, body: str, lang: str, nonce: str = "") -> str:
    """`nonce`: of the script that asks again; who runs none has the page loaded anew."""
    plain = f'<noscript><meta http-equiv="refresh" content="{REFRESH_SECONDS}"></noscript>'
    again = plain + script_element(_ASK_AGAIN, nonce) if nonce else ""
    return (
        f'<!doctype html><html lang="{lang}"><head><meta charset="utf-8">{again}'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>{html.escape(title)}</title><style>{asset('page.css')}</style></head>"
        f"<body><header><b>nanny</b></header><main>{body}</main></body></html>"
    )
