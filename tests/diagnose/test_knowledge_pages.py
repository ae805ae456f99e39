"""The knowledge base: every cause has a page in both languages, and what its programs show is true."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings

import pytest
import torch

from nanny.core.finding import NannyError
from nanny.diagnose.knowledge import LANGUAGES, SECTIONS, causes


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("name", sorted(causes()))
def test_a_page_has_all_its_sections_and_says_something_in_each(name, language):
    page = causes(language)[name]
    sections = page.sections()
    assert page.name == name
    assert tuple(sections) == SECTIONS[language]
    assert [title for title, text in sections.items() if len(text) < 20] == []
    assert page.title.endswith("." if language == "en" else "。")


@pytest.mark.parametrize("name", sorted(causes()))
def test_both_languages_say_the_same(name):
    english, chinese = causes("en")[name], causes("zh")[name]
    assert english.programs() == chinese.programs()
    assert english.family == chinese.family
    assert len(re.findall(r"[\u4e00-\u9fff]", chinese.text)) > 150


@pytest.mark.quick(25)
@pytest.mark.parametrize("name", sorted(causes()))
def test_the_programs_of_a_page_do_what_it_says(name):
    """Both end with an assert: the fault happens in the first, not in the second."""
    fails, repaired = causes()[name].programs()
    threads = torch.get_num_threads()
    for program in (fails, repaired):
        assert re.search(r"^assert ", program, re.MULTILINE)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exec(compile(program, f"{name}.md", "exec"), {"__name__": "page"})
    torch.set_num_threads(threads)


def test_there_is_a_page_for_every_cause_in_both_languages():
    assert set(causes("en")) == set(causes("zh"))


def test_another_language_is_refused():
    with pytest.raises(NannyError, match="use one of: en, zh"):
        causes("fr")


def test_reading_pages_does_not_load_torch():
    code = "import sys; from nanny.diagnose.knowledge import causes; assert causes('zh'); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
