"""Small programs that show how code is laid out in the field: each folder gives what it says, in every style of writing."""

from __future__ import annotations

from pathlib import Path

import pytest

from nanny.check.files import check_paths
from nanny.core.finding import Severity

LAYOUTS = Path(__file__).parent / "layouts"
SAVES = ("dictcall", "ifexp", "lars", "plain", "tail", "unknown")
CLIP, SAVED = "SCALER_CLIP_BEFORE_UNSCALE", "SCALER_NOT_SAVED"


def told(folder: str) -> set[tuple[str, int | None, str]]:
    """(file, line, code) of what is worth a warning, and of some remarks: no run goes on from a checkpoint, a scale of 1."""
    found = check_paths([str(LAYOUTS / folder)], jobs=1).findings
    kept = [f for f in found if f.severity > Severity.INFO or f.code in (SAVED, "SCALER_SETTINGS", "SCALER_WITHOUT_AUTOCAST")]
    return {(Path(f.file).relative_to(LAYOUTS / folder).as_posix(), f.line, f.code) for f in kept}


EXPECTED: dict[str, set[tuple[str, int, str]]] = {
    "imported_entry": {("train.py", 17, CLIP)},
    "module_branch": {
        (f"t{number}.py", line, code)
        for number, clip in enumerate((14, 10, 13, 15, 15, 13), 1)
        for line, code in ((clip, CLIP), (clip + 3, SAVED))
    },
    "leak": set(),
    "leak_within": set(),
    "attr": {("tr2.py", 14, SAVED), ("train.py", 14, "SCALER_SETTINGS")},
    "data_parallel": {("train_plain.py", 12, "SCALER_WITHOUT_AUTOCAST")},
    "notebook": {("cont.ipynb", 9, CLIP), ("indent.ipynb", 8, CLIP), ("magics.ipynb", 7, CLIP)},
    "clean": set(),
    "own_optimizer": {
        (f"o_{what}_{whose}.py", line + (whose == "ext"), code)
        for what, line, code in (
            ("bypass", 23, "SCALER_STEP_BYPASSED"),
            ("clip", 23, CLIP),
            ("halfparam", 17, "HALF_CALL"),
            ("missing", 21, "SCALER_MISSING"),
        )
        for whose in ("sgd", "lars", "ext")
    }
    | {(f"s_{name}.py", 31 if name == "lars" else 19, SAVED) for name in SAVES},
}


@pytest.mark.parametrize("folder", sorted(EXPECTED))
def test_a_layout_gives_what_it_says(folder: str):
    assert told(folder) == EXPECTED[folder]


def test_clipping_before_unscale_is_found_in_every_style_of_writing_a_loop():
    by_style: dict[str, list[str]] = {}
    for file, _, code in sorted(told("protocol_styles")):
        by_style.setdefault(file.partition("/")[0].removesuffix(".py"), []).append(code)
    assert by_style.keys() == {path.stem for path in (LAYOUTS / "protocol_styles").iterdir() if path.name != "__pycache__"}
    others = {style: codes for style, codes in by_style.items() if codes != [CLIP]}
    assert others == {"clip_foreach": ["SCALER_GRADS_STILL_SCALED"]}  # it clamps `.grad` by hand


def test_what_could_be_right_is_only_possible():
    found = check_paths([str(LAYOUTS / "protocol_styles")], jobs=1).findings
    doubtful = {Path(f.file).stem: f for f in found if f.message.startswith("possible: ")}
    assert doubtful.keys() == {"else_unscale", "other_opt"}
    assert all(f.severity == Severity.WARNING for f in doubtful.values())
    assert all(f.severity == Severity.ERROR for f in found if f.code == CLIP and f not in doubtful.values())
    assert "`x.dim() > 3`" in doubtful["else_unscale"].message
    assert "line 11" in doubtful["other_opt"].message


def test_a_cell_that_ipython_dedents_keeps_its_columns():
    (finding,) = check_paths([str(LAYOUTS / "notebook" / "indent.ipynb")], jobs=1).findings
    assert (finding.cell, finding.column) == (2, 6)
    assert [(link.cell, link.line) for link in finding.chain] == [(2, 7), (2, 8)]
