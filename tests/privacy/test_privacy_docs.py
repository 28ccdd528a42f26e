"""What docs/privacy.md says is so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fedpact import privacy
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
