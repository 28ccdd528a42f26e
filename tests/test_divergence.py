"""A run that diverges stops, says where, and keeps the last good state."""

from __future__ import annotations

import json
import math
import re

import numpy as np
import pytest
from helpers_experiment import experiment, history_cells, patients, same_bits, tree, whole, write_csv, write_toml

import fedpact as fp
from fedpact.experiment import build, read


def test_a_step_that_is_too_long(command, people, tmp_path):
    tables = experiment(
        data={"scale": "none"},
        problem={"name": "least_squares", "l2": 0.0},
        algorithm={"step": 1e6},
        run={"rounds": 100},
    )
    write_toml(people, tables)
    done = command("run", people, "--out", "run")
    assert done.code == 1
    assert "Traceback" not in done.err
    found = re.search(r"a number was not finite.*: (round (\d+), (client \d+|the server).* not finite)", done.out)
    assert found, done.out
    folder = tmp_path / "run"
    whole(folder)
    assert found[1] in (folder / "report.html").read_text(encoding="utf-8")
    assert found[1] in json.loads((folder / "result.json").read_text())["outcome"]
    rows = history_cells(folder)
    assert 0 < int(rows[-1]["round"]) == int(found[2]) < 100
    assert all(math.isfinite(float(row["objective"])) for row in rows)
    assert all(np.all(np.isfinite(leaf)) for leaf in fp.Model.load(folder / "model.bin").w.tree.values())


def test_a_run_that_ends_above_its_start_says_so(command, people, tmp_path):
    """FedEPM's constants suit columns of 2-norm 1; on standardised ones its defaults diverge without a bad number."""
    tables = experiment(run={"rounds": 3, "participation": 1.0}) | {"algorithm": {"name": "fedepm"}}
    write_toml(people, tables)
    done = command("run", people, "--out", "run")
    assert done.code == 0, done.err
    f = [float(row["objective"]) for row in history_cells(tmp_path / "run")]
    assert f[-1] > f[0]
    said = f"notice: The objective ended above its start: {f[-1]:.5g} after 3 rounds, from 0.69315; "
    assert said in done.out
    assert "begin with mu0 = 10, eta = 1e-3." in done.out
    assert "ended above its start" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    compared = command("compare", "run", "--target", "0.5")
    assert "patients never improves on its start" in compared.out
    assert "notice (patients): The objective ended above its start" in compared.out


def test_a_run_that_improves_says_nothing(finished):
    assert not any("above its start" in notice for notice in fp.Run.load(finished).notices)


@pytest.fixture
def outlier(people, tmp_path):
    """Client 4 (west) has features that overflow in its second local step; it takes part in round 3 first."""
    rows = [row | {"dose": 1e120} if row["site"] == "west" else row for row in patients()]
    write_csv(tmp_path / "people.csv", rows)
    tables = experiment(
        data={"scale": "none"},
        problem={"name": "least_squares", "l2": 0.0},
        algorithm={"step": 1e-4},
        run={"participation": [[0], [1], [0, 2], [1, 3, 4], [0]], "rounds": 5},
    )
    return write_toml(people, tables)


def test_the_client_that_diverges_is_named_and_the_last_good_state_kept(command, outlier, tmp_path):
    done = command("run", outlier, "--out", "run")
    assert done.code == 1
    assert "Traceback" not in done.err
    where = "round 3, client 4: its upload is not finite"
    assert f"a number was not finite; the last good state is kept: {where}." in done.out
    folder = tmp_path / "run"
    whole(folder)
    assert where in (folder / "report.html").read_text(encoding="utf-8")
    assert where in json.loads((folder / "result.json").read_text())["outcome"]

    good = command("run", outlier, "--out", "good", "--set", "run.rounds=3")  # the same run, ended in time
    assert good.code == 0, good.err
    same_bits(folder, tmp_path / "good")

    before = tree(folder)
    again = command("resume", folder)
    assert again.code == 1
    assert where in again.out
    assert tree(folder)["history.csv"] == before["history.csv"]
    assert tree(folder)["model.bin"] == before["model.bin"]


def test_divergence_in_python_is_a_result(outlier):
    experiment, _ = build(read(outlier))
    participation, rounds = experiment.participation, experiment.rounds
    setup = (experiment.algorithm, experiment.problem, experiment.federation)
    run = fp.run(*setup, participation=participation, rounds=rounds)
    assert run.outcome.startswith("a number was not finite; the last good state is kept: ")
    assert run.where == "round 3, client 4: its upload is not finite"
    assert run.history.rounds == 3
    assert np.all(np.isfinite(run.model.w.tree["w"]))
    assert any("round 3, client 4" in notice for notice in run.notices)


def test_the_debug_engine_names_the_stage_too(command, outlier, tmp_path):
    done = command("run", outlier, "--out", "run", "--set", "run.engine=debug")
    assert done.code == 1
    assert "Traceback" not in done.err
    assert done.err.startswith("fedpact: round 3, client 4, client_step: ")
    assert "not finite" in done.err
    whole(tmp_path / "run")
