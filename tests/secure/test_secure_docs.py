"""What docs/secure.md says is so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fedpact import secure
from fedpact.secure import Lattice, masks

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "secure.md").read_text(encoding="utf-8")


def test_the_example_runs_as_printed(capsys):
    pytest.importorskip("cryptography")
    (block,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    exec(compile(block, "docs/secure.md", "exec", dont_inherit=True), {})
    assert capsys.readouterr().out.splitlines() == re.findall(r"# → (.+)$", block, re.MULTILINE)


def test_the_steps_are_those_of_the_code():
    rows = re.findall(r"^\| (\d) `(\w+)` \|.*\| `(\w+)\(\)` \|", PAGE, re.MULTILINE)
    assert tuple(step for _, step, _ in rows) == masks.STEPS
    for _, step, close in rows:
        assert callable(getattr(masks.Client, step))
        assert callable(getattr(masks.Server, close))


def test_the_step_of_the_example_lattice():
    (said,) = re.findall(r"for a bound of 10⁴ and 100 clients ([\d.e-]+)\.", PAGE)
    assert f"{Lattice(1e4, 100).step:.1e}" == said


@pytest.mark.parametrize("name", secure.__all__)
def test_every_public_name_is_explained(name):
    assert (getattr(secure, name).__doc__ or "").strip()
    assert not getattr(secure, name).__doc__.startswith(f"{name}(")
