"""What the README says is so."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from fedpact.cli import parser

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def commands() -> set[str]:
    (group,) = [action for action in parser()._actions if hasattr(action, "choices") and action.choices]
    return set(group.choices)


def listed() -> list[list[str]]:
    """The words of every command in the list under 'The command', the alternatives after | included."""
    section = README.split("## The command", 1)[1].split("```", 2)[1]
    out = []
    for line in section.strip().splitlines():
        assert line.startswith("fedpact "), line
        usage = re.split(r"\s{2,}", line.removeprefix("fedpact "), maxsplit=1)[0]
        out += [words.split() for words in usage.split(" | ")]
    return out


def test_it_is_short():
    assert len(README.splitlines()) < 120


def test_it_opens_with_the_demo_and_the_tests():
    opening = blocks("")[0].splitlines()
    assert [line.split("#")[0].strip() for line in opening] == ["make demo", "make test"]
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {"demo", "test"} <= set(targets)
    assert README.index("make demo") < 600


def test_every_command_it_lists_exists_and_every_command_is_listed():
    assert {words[0] for words in listed()} == commands()


def test_every_option_it_lists_exists():
    (group,) = [action for action in parser()._actions if hasattr(action, "choices") and action.choices]
    for words in listed():
        known = dict(group.choices[words[0]]._option_string_actions)
        for action in group.choices[words[0]]._actions:  # of its own sub-commands
            if isinstance(action.choices, dict) and words[1] in action.choices:
                known |= action.choices[words[1]]._option_string_actions
        for word in words:
            assert not word.startswith("--") or word in known, words
    for command, option in re.findall(r"`fedpact (\w+)[^`]* (--\w+)", README):
        assert option in group.choices[command]._option_string_actions
    assert all("--json" in sub._option_string_actions for sub in group.choices.values()), "every command takes --json"


def test_every_file_it_names_exists():
    named = re.findall(r"\]\(([^)#]+)\)", README) + re.findall(r"\b(examples/\S+\.toml)", README)
    assert named
    missing = [name for name in named if "://" not in name and not (ROOT / name).exists()]
    assert missing == []


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.toml")), ids=lambda path: path.name)
def test_every_example_is_an_experiment(path, request, tmp_path):
    from fedpact.experiment import build, read

    source = tomllib.loads(path.read_text(encoding="utf-8"))["data"]
    if source.get("name") == "adult":
        request.getfixturevalue("adult_folder")
    if "csv" in source:  # made up by the script beside it
        subprocess.run([sys.executable, path.with_suffix(".py"), tmp_path], check=True, timeout=60)
        path = Path(shutil.copy(path, tmp_path))
    experiment, name = build(read(path))
    assert name
    assert experiment.rounds >= 1


def test_its_python_runs_as_printed(tmp_path):
    (code,) = blocks("python")
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300, env=dict(os.environ)
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    for name in ("FedEPM", "SFedAvg", "FedAvg"):
        assert name in done.stdout
    assert (tmp_path / "out" / "model.bin").is_file()
    assert (tmp_path / "out" / "readme" / "report.html").is_file()
    assert {path.suffix for path in (tmp_path / "out").glob("objective.*")} == {".png", ".svg"}
    name, auc, least = done.stdout.strip().splitlines()[-1].rsplit(" ", 2)
    assert name.startswith(("FedEPM", "SFedAvg", "FedAvg"))
    assert 0.9 < float(auc) <= 1
    assert 0 < float(least) < 0.2
