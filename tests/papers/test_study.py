"""A study keeps what it computed, as long as nothing that decides it has changed."""

from __future__ import annotations

import json
import shutil
from importlib.metadata import version
from pathlib import Path

import pytest

import fedpact
from fedpact import papers
from fedpact.core.errors import DataError, InvalidArgument
from fedpact.papers.study import DECIDING, Study, source_digest

PACKAGE = Path(fedpact.__file__).parent


def study(folder, source="a"):
    return Study(folder, folder / "cells.jsonl", True, source)


def counted(results):
    """A function to compute a cell with, and how often it was called."""
    calls = []

    def compute():
        calls.append(1)
        return results

    return compute, calls


def test_a_cell_is_computed_once_and_kept(tmp_path):
    compute, calls = counted({"cr": [3.0, 4.0]})
    one = study(tmp_path)
    assert one.cell(compute, "fig", m=50, scales=(0.3, 1.0)) == {"cr": [3.0, 4.0]}
    assert one.cell(compute, "fig", m=50, scales=(0.3, 1.0)) == {"cr": [3.0, 4.0]}
    assert study(tmp_path).cell(compute, "fig", m=50, scales=(0.3, 1.0)) == {"cr": [3.0, 4.0]}
    assert len(calls) == 1


def test_another_key_or_other_code_is_another_cell(tmp_path):
    compute, calls = counted(1)
    one = study(tmp_path)
    one.cell(compute, "fig", m=50, stop="GradientNorm(1e-6)")
    for key in ({"m": 51, "stop": "GradientNorm(1e-6)"}, {"m": 50, "stop": "GradientNorm(1e-7)"}, {"m": 50}):
        one.cell(compute, "fig", **key)
    one.cell(compute, "figure", m=50, stop="GradientNorm(1e-6)")
    study(tmp_path, "b").cell(compute, "fig", m=50, stop="GradientNorm(1e-6)")
    assert len(calls) == 6
    study(tmp_path, "a").cell(compute, "fig", m=50, stop="GradientNorm(1e-6)")
    assert len(calls) == 6


def test_what_was_interrupted_is_not_kept(tmp_path):
    def compute():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        study(tmp_path).cell(compute, "fig")
    assert study(tmp_path).cell(lambda: 7, "fig") == 7


def test_a_torn_last_line_is_dropped_and_a_damaged_one_named(tmp_path):
    study(tmp_path).cell(lambda: 1, "whole")
    with (tmp_path / "cells.jsonl").open("ab") as file:
        file.write(b'{"cell": "torn')
    assert study(tmp_path).cell(lambda: 2, "whole") == 1
    with (tmp_path / "cells.jsonl").open("ab") as file:
        file.write(b'{"cell": "damaged"}\n')
    with pytest.raises(DataError, match=r"must hold one result per line, got a damaged line 2\. Delete the line\.$"):
        study(tmp_path)


def test_the_digest_is_of_names_and_texts(tmp_path):
    (tmp_path / "core").mkdir()
    (tmp_path / "core" / "loop.py").write_text("a = 1\n")
    (tmp_path / "run.py").write_text("b = 1\n")
    (tmp_path / "cli.py").write_text("c = 1\n")
    parts = ("core", "run.py")
    first = source_digest(parts, tmp_path)
    assert len(first) == 12
    assert set(first) <= set("0123456789abcdef")
    assert source_digest(parts[::-1], tmp_path) == first
    (tmp_path / "cli.py").write_text("c = 2\n")
    (tmp_path / "core" / "loop.pyc").write_text("x")
    assert source_digest(parts, tmp_path) == first
    seen = {first}
    (tmp_path / "core" / "loop.py").write_text("a = 2\n")
    seen.add(source_digest(parts, tmp_path))
    (tmp_path / "run.py").write_text("b = 2\n")
    seen.add(source_digest(parts, tmp_path))
    (tmp_path / "core" / "loop.py").rename(tmp_path / "core" / "loops.py")
    seen.add(source_digest(parts, tmp_path))
    assert len(seen) == 4


@pytest.mark.parametrize("file", ["algorithms/fedepm.py", "engines/local.py", "problems/logistic.py", "core/loop.py"])
def test_an_edit_of_what_decides_a_number_changes_it(tmp_path, file):
    copy = Path(shutil.copytree(PACKAGE, tmp_path / "fedpact", ignore=shutil.ignore_patterns("__pycache__")))
    assert source_digest(DECIDING, copy) == source_digest(DECIDING)
    (copy / file).write_text((copy / file).read_text() + "\n")
    assert source_digest(DECIDING, copy) != source_digest(DECIDING)


@pytest.mark.parametrize("paper", papers.PAPERS)
def test_every_paper_has_its_cells(paper):
    assert (PACKAGE / "papers" / f"{paper}_cells.py").is_file()


def drawn(monkeypatch, figure):
    """Stand in for a figure's function; what it was called with."""
    seen = []
    monkeypatch.setitem(papers.PAPERS, "fedepm", {"fig": ("a figure", figure(seen))})
    return seen


def test_redraw_hands_on_the_trials_and_the_digest(tmp_path, monkeypatch):
    seen = drawn(monkeypatch, lambda seen: lambda study, count: seen.append((study, count)))
    papers.redraw("fedepm", "fig", 3, out=str(tmp_path), quiet=True)
    papers.redraw("fedepm", "fig", None, out=str(tmp_path), quiet=True)
    assert [count for _, count in seen] == [3, None]
    assert {study.source for study, _ in seen} == {source_digest([*DECIDING, "papers/fedepm_cells.py"])}
    with pytest.raises(InvalidArgument, match=r"^trials must be an integer of at least 2, got 1\.$"):
        papers.redraw("fedepm", "fig", 1, out=str(tmp_path), quiet=True)


@pytest.mark.parametrize("figure", ["fig2", "table1"])
def test_trials_are_refused_where_they_would_be_ignored(tmp_path, figure):
    said = rf"^trials must be left out for fedepm {figure}, got 5\. The number of its runs is fixed\.$"
    with pytest.raises(InvalidArgument, match=said):
        papers.redraw("fedepm", figure, 5, out=str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_figures_without_trials_are_called_without(tmp_path, monkeypatch):
    seen = drawn(monkeypatch, lambda seen: lambda study: seen.append(study))
    papers.redraw("fedepm", "fig", None, out=str(tmp_path), quiet=True)
    assert len(seen) == 1


def test_the_cells_are_lines_of_json(tmp_path):
    study(tmp_path).cell(lambda: [1.5], "fig", m=3)
    (line,) = (tmp_path / "cells.jsonl").read_text().splitlines()
    entry = json.loads(line)
    assert entry["result"] == [1.5]
    assert json.loads(entry["cell"]) == {"what": "fig", "m": 3, "source": "a", "version": version("fedpact")}
