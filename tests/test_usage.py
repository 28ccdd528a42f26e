"""Names and options on the command line that do not exist."""

from __future__ import annotations

import json

import pytest
from helpers_refused import refused


def test_names_on_the_command_line(command):
    refused(command("show", "fedemp"), "algorithm must be one of ", "got 'fedemp'. Did you mean 'fedepm'?")
    refused(command("paper", "fedemp", "fig3"), "paper must be one of ", "got 'fedemp'. Did you mean 'fedepm'?")
    refused(command("paper", "fedepm", "fig99"), "figure of fedepm must be one of ", "got 'fig99'.")
    refused(command("paper", "fedepm"), "figure of fedepm must be one of ", "got None.")


def test_lines_and_cells_of_a_table_that_do_not_exist(command, tmp_path):
    """FedADMM's table is drawn without a run, and not at all where a name is wrong."""
    table = ("paper", "fedadmm", "table3", "--hours", "0", "--cell", "mnist-100-iid")
    refused(command(*table, "--algorithm", "FedAMM"), "algorithm must be one of FedADMM; ", "mean 'FedADMM'?")
    refused(command(*table, "--cell", "mnist-100"), "cell must be one of ", "got 'mnist-100'.")
    refused(command("paper", "fedepm", "fig3", "--algorithm", "FedEPM"), "algorithm must be left out for fedepm fig3")
    done = command(*table, "--algorithm", "FedADMM", "--algorithm", "FedADMM as printed", "--json")
    assert done.code == 0, done.err
    rows = json.loads(done.out)["tables"]["Rounds"]
    assert {"FedADMM", "FedADMM as printed", "FedSGD", "SCAFFOLD"} <= {row["algorithm"] for row in rows}


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
