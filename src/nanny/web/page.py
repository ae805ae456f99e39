"""The page on a run as one HTML text.

render(data, live=False, lang=None)              the report: data and plotly.js embedded
render(None, live=True, lang=None, nonce=...)    the live page: its script fetches api/... and plotly.js from the server
"""

from __future__ import annotations

import html
import secrets
from collections.abc import Mapping
from typing import Any

from ..core.command_line import LANGUAGES
from ..show.html import (
    asset,
    check_language,
    fill_template,
    json_element,
    json_for_script,
    packed_element,
    plotly_element,
    policy_element,
    script_element,
)
from ..show.translation import words_of
from .arrays import CODES
from .figures import LEVELS

SCRIPTS = ("arrays.js", "views.js", "histogram.js", "tree.js", "words.js", "page.js")


def render(data: Mapping[str, Any] | None, *, live: bool, lang: str | None, nonce: str | None = None) -> str:
    """The page on a run. `lang` is `en`, `zh`, or None for the browser's language."""
    nonce = nonce or secrets.token_urlsafe(16)
    config = {"live": live, "lang": check_language(lang), "strings": page_words(), "codes": CODES, "levels": LEVELS}
    parts = {
        "lang": lang or "en",
        "policy": "" if live else policy_element(nonce),
        "title": html.escape(_title(data)),
        "style": asset("page.css"),
        "config": json_element("config", config, nonce),
        "data": "" if data is None else packed_element("data", json_for_script(data)),
        "script": script_element(scripts(), nonce),
        "plotly": "" if live else plotly_element(),
    }
    return fill_template(asset("page.html", "nanny.web"), parts)


def page_words() -> dict[str, dict[str, str]]:
    """All that the page says of itself, by language and name."""
    return {lang: {**words_of("verdict", lang), **words_of("page", lang)} for lang in LANGUAGES}


def scripts() -> str:
    """What runs on the page."""
    return "\n".join([asset("loader.js"), *(asset(name, "nanny.web") for name in SCRIPTS)])


def _title(data: Mapping[str, Any] | None) -> str:
    return "nanny" if data is None else f"nanny: {data['verdict']['word'].lower()}, run {data['run']['id']}"
