"""What docs/privacy.md and docs/privacy_modes.md say is so."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

import fedpact as fp
from fedpact import privacy
from fedpact.algorithms import ALGORITHMS
from fedpact.audit import KINDS, cases
from fedpact.cli import main
from fedpact.privacy import ADVERSARIES, MECHANISMS, PLACES, RELATIONS, SAMPLINGS, UNITS

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "privacy.md").read_text(encoding="utf-8")


def test_the_example_in_python_runs_as_printed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    exec(compile(block, "docs/privacy.md", "exec", dont_inherit=True), {})
    said = re.findall(r"# → (.+)$", block, re.MULTILINE)
    assert len(said) == 3
    assert capsys.readouterr().out.splitlines() == said


@pytest.mark.parametrize("line", re.findall(r"^fedpact (privacy plan .+)$", PAGE, re.MULTILINE))
def test_the_plans_print_what_the_page_says(line, capsys):
    arguments, said = re.split(r"\s{2,}", line)
    assert main(arguments.split()) == 0
    assert capsys.readouterr().out.splitlines()[0] == said


def test_every_name_of_the_tables_is_on_the_page():
    for name in [*RELATIONS, *SAMPLINGS, *UNITS, *ADVERSARIES, *PLACES]:
        assert f"`{name}`" in PAGE, name
    for name in MECHANISMS:
        assert name.replace("_", " ") in PAGE.lower(), name


@pytest.mark.parametrize("name", privacy.__all__)
def test_every_public_name_is_explained(name):
    thing = getattr(privacy, name)
    if callable(thing):
        assert "__doc__" in vars(thing) if isinstance(thing, type) else True
        assert (thing.__doc__ or "").strip()
        assert not thing.__doc__.startswith(f"{name}(")


MODES = (Path(__file__).resolve().parents[2] / "docs" / "privacy_modes.md").read_text(encoding="utf-8")


def test_the_private_run_is_as_printed(capsys):
    (block,) = re.findall(r"^```python\n(.*?)^```$", MODES, re.MULTILINE | re.DOTALL)
    exec(compile(block, "docs/privacy_modes.md", "exec", dont_inherit=True), {})
    assert capsys.readouterr().out.strip() == re.findall(r"^# → (.*)$", block, re.MULTILINE)[0].strip()


def test_the_table_of_ways_is_that_of_the_algorithms():
    header, *rows = re.findall(r"^\| way \|.*$|^\| `(?:once|steps|convex|client)` \|.*$", MODES, re.MULTILINE)
    names = [[name.strip() for name in cell.split(",")] for cell in header.strip("| ").split("|")[2:]]
    shown: dict[str, set[str]] = {}
    for row in rows:
        way, _, *marks = (cell.strip() for cell in row.strip("|").split("|"))
        for cells, mark in zip(names, marks, strict=True):
            for name in cells if mark else ():
                shown.setdefault(name, set()).add(way.strip("`"))
    assert shown == {name: set(cls.ways) for name, cls in ALGORITHMS.items() if cls.ways}


@pytest.mark.parametrize("setting", [field.name for field in dataclasses.fields(fp.Private)])
def test_every_setting_of_private_is_on_the_page(setting):
    table = MODES.split("| setting of `Private` |")[1].split("\n\n")[0]
    assert f"`{setting}`" in table


def test_the_audit_s_table_names_its_cases():
    told = re.findall(r"^\| (.+?) \| [\d.]+ \| [\d.]+ \| (stands|refuted) \|$", MODES, re.MULTILINE)
    assert [name for name, _ in told] == [case.name for _, case in cases()]
    assert all((verdict == "stands") == KINDS[kind][1] for (kind, _), (_, verdict) in zip(cases(), told, strict=True))
