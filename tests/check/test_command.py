"""`nanny check` as a user types it: exit codes, formats, suppression, settings, baseline. Real processes only."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import jsonschema
import pytest
from commands import run_command

# Three findings: two of severity INFO on lines 3 and 8, one ERROR on line 11.
TRAIN = """\
import torch

scaler = torch.cuda.amp.GradScaler()


def train(model, optimizer, data):
    for x, y in data:
        with torch.cuda.amp.autocast():
            loss = torch.nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
"""
SECOND = TRAIN[TRAIN.index("\n\ndef") :].replace("train(", "train_again(")
CLIP, OLD = "SCALER_CLIP_BEFORE_UNSCALE", "REGION_DEPRECATED"
BOTH = '{"train_batch_size": 8, "fp16": {"enabled": true}, "bf16": {"enabled": true}}'
SCHEMA = Path(__file__).parents[1] / "data" / "sarif-2.1.0-rtm.4.json"


def nanny(*args: object, cwd: Path, stdin: str | bytes = b"", **env: str) -> subprocess.CompletedProcess[str]:
    data = stdin.encode() if isinstance(stdin, str) else stdin
    done = run_command("nanny.check", *map(str, args), cwd=cwd, stdin=data, environment={"NO_COLOR": "1", **env})
    assert b"Traceback" not in done.stderr, done.stderr.decode()
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


def found(*args: object, cwd: Path, stdin: str | bytes = b"") -> list[dict]:
    done = nanny(*args, "--output-format", "json", cwd=cwd, stdin=stdin)
    assert done.returncode in (0, 1), done.stderr
    return json.loads(done.stdout)


def codes(*args: object, cwd: Path, stdin: str | bytes = b"") -> list[str]:
    return [row["code"] for row in found(*args, cwd=cwd, stdin=stdin)]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


def test_text_shows_the_place_the_code_and_a_caret_under_the_call(project):
    done = nanny("train.py", cwd=project)
    assert done.returncode == 1
    assert f"train.py:11:9: ERROR {CLIP}" in done.stdout
    lines = done.stdout.splitlines()
    at = next(i for i, line in enumerate(lines) if "11 |" in line)
    assert lines[at + 1].index("^") == lines[at].index("torch.nn.utils")
    assert lines[at + 1].count("^") == len("torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)")
    assert "fix: " in done.stdout
    summary, fixable, following = lines[-3:]
    assert (summary, following) == ("Found 1 error and 2 remarks in 1 file.", f"Next: nanny rule {CLIP}")
    assert fixable.startswith("[*] up to 3 fixable with --fix")
    assert "\x1b[" not in done.stdout


def test_colour_is_used_when_it_is_asked_for(project):
    assert "\x1b[" in nanny("train.py", cwd=project, NO_COLOR="", FORCE_COLOR="1").stdout


def test_concise_gives_one_line_for_each_finding_errors_first(project):
    (project / "plain.py").write_text(TRAIN.replace("        torch.nn.utils", "        optimizer.step()\n        torch.nn.utils"))
    lines = nanny(".", "--output-format", "concise", "--exclude", "*.json", cwd=project).stdout.splitlines()
    assert all(re.match(r"\w+\.py:\d+:\d+: (INFO|WARNING|ERROR) [A-Z_]+ \S", line) for line in lines[:-1])
    severities = [line.split()[1] for line in lines[:-1]]
    assert severities == sorted(severities, key=("ERROR", "WARNING", "INFO").index)
    assert "ERROR" in severities


def test_deprecated_names_are_one_line_for_each_file(project):
    lines = nanny("train.py", "--output-format", "concise", cwd=project).stdout.splitlines()
    assert [OLD in line for line in lines] == [False, True, False]
    assert "and 1 place more in this file" in lines[1]
    assert lines[2] == "Found 1 error and 2 remarks in 1 file."


def test_the_chain_of_an_error_is_shown_in_every_form(project):
    text = nanny("train.py", cwd=project).stdout
    assert "chain: line 10 backward of the scaled loss > line 11 they are clipped" in text
    explained = nanny("train.py", "--explain", cwd=project).stdout
    assert "1. line 10: backward of the scaled loss\n       scaler.scale(loss).backward()" in explained
    assert "why: scaled gradients" in explained
    clip = next(row for row in found("train.py", cwd=project) if row["code"] == CLIP)
    assert [(link["filename"], link["location"]["row"]) for link in clip["chain"]] == [("train.py", 10), ("train.py", 11)]
    log = json.loads(nanny("train.py", "--output-format", "sarif", cwd=project).stdout)
    result = next(r for r in log["runs"][0]["results"] if r["ruleId"] == CLIP)
    rows = [place["physicalLocation"]["region"]["startLine"] for place in result["relatedLocations"]]
    assert rows == [10, 11]
    assert nanny("train.py", "--explain", "--output-format", "json", cwd=project).returncode == 2


def test_json_objects_have_exactly_the_promised_keys(project):
    rows = found("train.py", cwd=project)
    keys = {"code", "severity", "message", "filename", "location", "end_location", "cell", "hint", "url", "chain"}
    assert [set(row) for row in rows] == [keys] * 3
    clip = next(row for row in rows if row["code"] == CLIP)
    assert clip["location"] == {"row": 11, "column": 9}
    assert clip["end_location"]["row"] == 11
    assert (clip["filename"], clip["severity"], clip["cell"]) == ("train.py", "ERROR", None)


def test_jsonl_has_one_object_on_each_line(project):
    lines = nanny("train.py", "--output-format", "jsonl", cwd=project).stdout.splitlines()
    assert [json.loads(line)["location"]["row"] for line in lines] == [3, 8, 11]


def test_sarif_is_valid_against_the_published_schema(project):
    (project / "a b,ü.json").write_text(BOTH)
    done = nanny(".", "--output-format", "sarif", cwd=project)
    log = json.loads(done.stdout)
    jsonschema.Draft4Validator(json.loads(SCHEMA.read_text())).validate(log)
    run = log["runs"][0]
    rules = run["tool"]["driver"]["rules"]
    assert all(rules[result["ruleIndex"]]["id"] == result["ruleId"] for result in run["results"])
    uris = {r["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] for r in run["results"]}
    assert uris == {"train.py", "a%20b%2C%C3%BC.json"}
    levels = {result["ruleId"]: result["level"] for result in run["results"]}
    assert (levels[CLIP], levels[OLD]) == ("error", "note")


def test_the_schema_test_can_fail(project):
    log = json.loads(nanny(".", "--output-format", "sarif", cwd=project).stdout)
    log["runs"][0]["results"][0]["locations"][0]["physicalLocation"]["region"]["startLine"] = 0
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft4Validator(json.loads(SCHEMA.read_text())).validate(log)


def test_sarif_without_findings_is_valid_too(tmp_path):
    (tmp_path / "fine.py").write_text("x = 1\n")
    log = json.loads(nanny(".", "--output-format", "sarif", cwd=tmp_path).stdout)
    jsonschema.Draft4Validator(json.loads(SCHEMA.read_text())).validate(log)
    assert log["runs"][0]["results"] == []


def test_github_annotations_are_escaped(tmp_path):
    folder = tmp_path / "a,b:c%"
    folder.mkdir()
    (folder / "ds.json").write_text(BOTH)
    line = nanny(".", "--output-format", "github", cwd=tmp_path).stdout.strip()
    options, _, message = line.removeprefix("::warning ").partition("::")
    assert "file=a%2Cb%3Ac%25/ds.json" in options.split(",")
    assert {"line=1", "title=CONFIG_FP16_AND_BF16"} <= set(options.split(","))
    assert "\n" not in line
    assert "%0AFix: " in message


def test_github_calls_an_info_a_notice(project):
    lines = nanny("train.py", "--select", OLD, "--output-format", "github", cwd=project).stdout.splitlines()
    assert all(line.startswith("::notice file=train.py,line=") for line in lines)


def test_gitlab_fingerprints_are_unique_and_survive_a_line_shift(project):
    def marks() -> list[str]:
        rows = json.loads(nanny("train.py", "--output-format", "gitlab", cwd=project).stdout)
        assert {"description", "check_name", "fingerprint", "severity", "location"} == set(rows[0])
        return sorted(row["fingerprint"] for row in rows)

    before = marks()
    assert len(set(before)) == 3
    (project / "train.py").write_text("# a new first line\n" + TRAIN)
    assert marks() == before


def test_junit_is_xml_with_a_failure_for_each_finding(project):
    root = ElementTree.fromstring(nanny("train.py", "--output-format", "junit", cwd=project).stdout)
    assert [case.get("name") for case in root.iter("testcase")] == [OLD, OLD, CLIP]
    assert len(list(root.iter("failure"))) == 3


def test_junit_of_a_clean_file_is_one_case_that_passes(tmp_path):
    (tmp_path / "fine.py").write_text("x = 1\n")
    root = ElementTree.fromstring(nanny("fine.py", "--output-format", "junit", cwd=tmp_path).stdout)
    assert len(list(root.iter("testcase"))) == 1
    assert not list(root.iter("failure"))


def test_output_file_takes_the_findings_and_the_terminal_stays_quiet(project):
    done = nanny("train.py", "--output-format", "json", "--output-file", "out.json", cwd=project)
    assert (done.returncode, done.stdout) == (1, "")
    assert len(json.loads((project / "out.json").read_text())) == 3
    assert nanny("train.py", "--output-file", "no/such/folder", cwd=project).returncode == 2


def test_statistics_count_by_code(project):
    assert nanny("train.py", "--statistics", cwd=project).stdout.split()[:2] == ["2", OLD]
    rows = json.loads(nanny("train.py", "--statistics", "--output-format", "json", cwd=project).stdout)
    assert {"code": CLIP, "severity": "ERROR", "count": 1} in rows
    assert nanny("train.py", "--statistics", "--output-format", "sarif", cwd=project).returncode == 2


@pytest.mark.parametrize(
    ("args", "code"),
    [
        ((), 1),
        (("--exit-zero",), 0),
        (("--fail-on", "error"), 1),
        (("--ignore", CLIP), 0),
        (("--ignore", CLIP, "--fail-on", "info"), 1),
        (("--select", "REGION"), 0),
        (("--select", "NUM"), 0),
        (("--select", "scaler_clip"), 1),
    ],
)
def test_exit_code_says_whether_there_is_something_as_bad_as_asked_for(project, args, code):
    assert nanny("train.py", *args, cwd=project).returncode == code


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("gone.py",), "no such file"),
        (("train.py", "--select", "SCALER_CLIP_BEFOR_UNSCALE"), f"did you mean '{CLIP}'"),
        (("train.py", "--device", "tpu"), "invalid choice"),
        (("train.py", "--amp-dtype", "fp32"), "amp-dtype must be one of"),
        (("train.py", "--baseline", "gone.json"), "no such baseline"),
        (("train.py", "--baseline", "train.py"), "not a baseline"),
        (("train.py", "--jobs", "0"), "at least one process"),
        (("-", "--watch"), "read only once"),
        ((), "PATH"),
    ],
)
def test_wrong_usage_is_said_in_one_sentence_and_exits_with_two(project, args, words):
    done = nanny(*args, cwd=project)
    assert done.returncode == 2
    assert words in done.stderr
    assert done.stdout == ""


def test_noqa_silences_only_its_line_and_only_its_codes(project):
    marked = TRAIN.replace("1.0)\n", f"1.0)  # noqa: E501, {CLIP} the norm is checked elsewhere\n")
    (project / "train.py").write_text(marked)
    assert codes(".", cwd=project) == [OLD, OLD]
    (project / "train.py").write_text(TRAIN.replace("1.0)\n", "1.0)  # noqa: NUM\n"))
    assert CLIP in codes(".", cwd=project)
    (project / "train.py").write_text(TRAIN.replace("1.0)\n", "1.0)  # noqa\n"))
    assert codes(".", cwd=project) == [OLD, OLD]
    (project / "train.py").write_text(TRAIN.replace("1.0)\n", "1.0)  # noqa: SCALER\n"))
    assert codes(".", cwd=project) == [OLD, OLD]


def test_noqa_in_a_string_silences_nothing(project):
    (project / "train.py").write_text(TRAIN.replace("x, y in data:", 'x, y in data["# nanny: noqa"]:'))
    assert CLIP in codes(".", cwd=project)


def test_a_comment_silences_the_whole_file(project):
    (project / "train.py").write_text(f"# nanny: noqa: REGION\n{TRAIN}")
    assert codes(".", cwd=project) == [CLIP]
    (project / "train.py").write_text(f"{TRAIN}\n# nanny: noqa\n")
    assert codes(".", cwd=project) == []


def test_pyproject_above_the_checked_path_is_found_and_obeyed(project):
    (project / "pyproject.toml").write_text(
        '[tool.nanny]\nignore = ["REGION"]\nexclude = ["old"]\n[tool.nanny.per-file-ignores]\n"tests/*" = ["SCALER"]\n'
    )
    for folder in ("src/deep", "tests", "old"):
        (project / folder).mkdir(parents=True)
        (project / folder / "t.py").write_text(TRAIN)
    rows = found(".", cwd=project)
    assert {(row["filename"], row["code"]) for row in rows} == {("src/deep/t.py", CLIP), ("train.py", CLIP)}
    assert codes("deep/t.py", cwd=project / "src") == [CLIP]
    assert codes(".", "--select", "REGION", cwd=project / "src") == []
    assert codes(project, cwd=project / "src") == [CLIP, CLIP]


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ("selct = []", "unknown key 'selct'"),
        ('select = "NUM"', "must be a list of strings"),
        ('select = ["NUMM"]', "no rule is called 'NUMM'"),
        ('device = "gpu"', 'one of "cuda", "cpu"'),
        ('amp-dtype = "fp8"', "amp-dtype must be one of"),
        ("per-file-ignores = 3", "per-file-ignores must be a table"),
        ("x = ", "not valid TOML"),
    ],
)
def test_a_mistake_in_pyproject_is_said_in_one_sentence(project, table, words):
    (project / "pyproject.toml").write_text(f"[tool.nanny]\n{table}\n")
    done = nanny("train.py", cwd=project)
    assert done.returncode == 2
    assert words in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_another_tools_pyproject_is_no_obstacle(project):
    (project / "pyproject.toml").write_text("[tool.ruff\nbroken")
    assert nanny("train.py", cwd=project).returncode == 1


def test_baseline_hides_old_findings_and_shows_new_ones_after_lines_moved(project):
    done = nanny(".", "--write-baseline", "known.json", cwd=project)
    assert done.returncode == 0
    assert codes(".", "--baseline", "known.json", cwd=project) == []
    moved = "import os\n\n\n" + TRAIN
    (project / "train.py").write_text(moved)
    assert codes(".", "--baseline", "known.json", cwd=project) == []
    second = SECOND.replace("clip_grad_norm_", "clip_grad_value_")
    (project / "train.py").write_text(moved + second)
    rows = found(".", "--baseline", "known.json", cwd=project)
    assert [(row["code"], row["location"]["row"]) for row in rows] == [(OLD, 22), (CLIP, 25)]


def test_a_second_copy_of_a_known_line_is_new(project):
    nanny(".", "--write-baseline", "known.json", cwd=project)
    (project / "train.py").write_text(TRAIN + SECOND)
    assert codes(".", "--baseline", "known.json", cwd=project) == [OLD, CLIP]


def test_two_consequences_of_one_mistake_are_told_once(project):
    clip = next(line for line in TRAIN.splitlines(keepends=True) if "clip" in line)
    (project / "train.py").write_text(TRAIN.replace(clip, clip + clip))
    assert codes("train.py", cwd=project).count(CLIP) == 1


def test_baseline_tells_when_its_findings_are_gone(project):
    nanny(".", "--write-baseline", "known.json", cwd=project)
    (project / "train.py").write_text("x = 1\n")
    assert "3 of its findings are gone" in nanny(".", "--baseline", "known.json", cwd=project).stderr


def test_standard_input_is_checked_under_the_name_it_is_given(project):
    assert codes("-", cwd=project, stdin=TRAIN) == [OLD, OLD, CLIP]
    rows = found("-", "--stdin-filename", "tests/x.py", cwd=project, stdin=TRAIN)
    assert {row["filename"] for row in rows} == {"tests/x.py"}
    assert codes("-", "--stdin-filename", "ds.json", cwd=project, stdin=BOTH) == ["CONFIG_FP16_AND_BF16"]


def test_options_of_the_user_reach_the_rules(tmp_path):
    loss = "    y = torch.nn.functional.binary_cross_entropy(x @ x, x)\n"
    (tmp_path / "a.py").write_text(f"import torch\nx = torch.zeros(3)\nwith torch.autocast(DEVICE):\n{loss}")
    assert "REGION_BCE" in codes("a.py", "--device", "cuda", cwd=tmp_path)
    assert "REGION_BCE" not in codes("a.py", "--device", "cpu", cwd=tmp_path)


def test_many_files_in_several_processes_give_the_same_findings_as_one(tmp_path):
    for n in range(60):
        (tmp_path / f"f{n:02}.py").write_text(TRAIN if n % 5 == 0 else "x = 1\n")
    rows = found(".", "--jobs", "2", cwd=tmp_path)
    assert len(rows) == 36
    assert rows == found(".", "--jobs", "1", cwd=tmp_path)


def test_a_file_named_twice_is_checked_once(project):
    assert len(found("train.py", ".", project / "train.py", cwd=project)) == 3


def test_nothing_to_check_is_said(tmp_path):
    done = nanny(".", cwd=tmp_path)
    assert done.returncode == 0
    assert "no Python file, notebook or settings file" in done.stderr


def test_torch_and_numpy_are_never_imported(project):
    program = (
        "import sys; from nanny.cli import main; code = main(['check', 'train.py', '--exit-zero']);"
        "sys.exit(code or any(name in sys.modules for name in ('torch', 'numpy', 'yaml')))"
    )
    assert subprocess.run([sys.executable, "-c", program], cwd=project, stdout=subprocess.DEVNULL, check=False).returncode == 0


def test_watch_checks_again_when_a_file_changes(project):
    watching = subprocess.Popen(
        [sys.executable, "-m", "nanny.check", ".", "--watch", "--output-format", "concise"],
        cwd=project, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, bufsize=1,
    )  # fmt: skip
    try:
        first = [watching.stdout.readline() for _ in range(3)]
        assert CLIP in first[0]
        (project / "train.py").write_text("import torch\n")
        assert watching.stdout.readline().strip() == "No findings in 1 file."
    finally:
        watching.send_signal(signal.SIGINT)
    assert watching.wait(timeout=60) == 0
