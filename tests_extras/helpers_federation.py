"""Small experiments that run on every engine, and what it means that two histories are the same."""

from __future__ import annotations

import numpy as np

from fedpact.experiment import build, read
from fedpact.run import execute

ALGORITHMS = {
    "fedepm": 'name = "fedepm"',
    "inexact_admm": 'name = "inexact_admm"\npreset = "paper"',
    "fedadmm": 'name = "fedadmm"\nbatch = 20',
    "fedavg": 'name = "fedavg"',
    "scaffold": 'name = "scaffold"\nbatch = 20',
    "fedpdm": 'name = "fedpdm"',
    "vertical_ssca": 'name = "vertical_ssca"\nbatch = 50',
}
TEXT = """
[data]
name = "breast_cancer"

[split]
how = "{how}"
clients = 2
seed = 0

[problem]
name = "logistic"
{l2}intercept = true

[algorithm]
{algorithm}

[run]
rounds = {rounds}
seed = 0
precision = "{precision}"
{engine}
"""
FLOWER = 'engine = {{ name = "flower", notes = true, deadline = {deadline}, patience = 300, quorum = {quorum} }}'


def text(name, engine="", precision="double", rounds=5):
    vertical = name.startswith("vertical")
    how, l2 = ("features", "l2 = 0.0\n") if vertical else ("iid", "l2 = 1e-2\n")
    return TEXT.format(how=how, l2=l2, algorithm=ALGORITHMS[name], rounds=rounds, precision=precision, engine=engine)


def flower(deadline=200, quorum=1.0):
    return FLOWER.format(deadline=deadline, quorum=quorum)


#: A round of parties needs all of them: there is nothing to choose but how long it waits.
PARTIES = 'engine = { name = "flower", patience = 300 }'


def same(one, other, tolerance, skip=("seconds", "local_seconds")):
    shared = [c for c in one.history.columns if c in other.history.columns and c not in skip]
    assert {"objective", "gradient", "participants"} <= set(shared)
    for column in shared:
        a, b = one.history.column(column), other.history.column(column)
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True, err_msg=column)


def simulated(name, folder, engine="", precision="double", rounds=5):
    path = folder / f"{name}-{precision}.toml"
    path.write_text(text(name, engine, precision, rounds))
    return execute(build(read(path))[0])
