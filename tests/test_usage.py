"""Names and options on the command line that do not exist."""

from __future__ import annotations

import pytest
from helpers_refused import refused


def test_names_on_the_command_line(command):
    refused(command("show", "fedemp"), "algorithm must be one of ", "got 'fedemp'. Did you mean 'fedepm'?")
    refused(command("paper", "fedemp", "fig3"), "paper must be one of ", "got 'fedemp'. Did you mean 'fedepm'?")
    refused(command("paper", "fedepm", "fig99"), "figure of fedepm must be one of ", "got 'fig99'.")
    refused(command("paper", "fedepm"), "figure of fedepm must be one of ", "got None.")


USAGE = [
    (),
    ("rnu",),
    ("run",),
    ("run", "x.toml", "--rounds", "3"),
    ("demo", "--rounds", "many"),
    ("resume", "x", "--rounds", "1.5"),
    ("tune", "x.toml"),
    ("verify", "silver", "x.mat"),
]


@pytest.mark.parametrize("arguments", USAGE, ids=" ".join)
def test_wrong_usage_exits_with_2(command, arguments):
    done = command(*arguments)
    assert done.code == 2
    assert done.err.startswith("usage: fedpact")
    assert "Traceback" not in done.err
    assert done.out == ""


def test_demo_of_no_rounds(command, tmp_path):
    done = command("demo", "--rounds", "0")
    refused(done, "rounds must be an integer of at least 1, got 0.")
    assert list(tmp_path.iterdir()) == []
