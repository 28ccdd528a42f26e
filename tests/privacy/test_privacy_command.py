"""`fedpact privacy plan` and `privacy ledger`: their numbers, and one sentence for everything that is wrong."""

from __future__ import annotations

import json

import pytest

from fedpact.cli import parser
from fedpact.privacy import Event, Ledger, Release, epsilon

SAMPLED = ("--sampling", "poisson", "--rate", 0.01)


def plan(command, *arguments):
    done = command("privacy", "plan", *arguments, "--json")
    assert done.code == 0, done.err
    assert done.err == ""
    return json.loads(done.out)


@pytest.mark.parametrize(
    ("arguments", "key", "value"),
    [
        (("--mechanism", "gaussian", "--noise", 1, *SAMPLED, "--rounds", 300, "--delta", 1e-5), "epsilon", 1.068),
        (("--noise", 2, "--sampling", "poisson", "--rate", 0.05, "--rounds", 300), "epsilon", 1.929),
        (("--noise", 5, "--sampling", "full", "--rounds", 300), "epsilon", 20.125),
        (("--mechanism", "laplace", "--noise", 10, "--rounds", 100), "epsilon", 4.220),
        (("--epsilon", 8, "--rounds", 100), "noise", 6.002),
        (("--noise", 5, "--rounds", 100, "--relation", "replace-one"), "epsilon", 24.38),
        (("--noise", 6.0030, "--epsilon", 8), "rounds", 100),
    ],
)
def test_reference_values(command, arguments, key, value):
    found = plan(command, *arguments)
    assert found["solved_for"] == key
    assert found[key] == pytest.approx(value, rel=0.005)


def test_what_is_solved_for_fits_and_everything_is_named(command):
    found = plan(command, "--epsilon", 2, "--rounds", 50, *SAMPLED, "--delta", 1e-6, "--relation", "replace-one")
    assert found["epsilon"] <= 2
    event = Event("gaussian", found["noise"], "poisson", 0.01, "replace-one")
    assert epsilon({event: 50}, 1e-6).epsilon == pytest.approx(found["epsilon"])
    assert (found["delta"], found["method"], found["sensitivity"]) == (1e-6, "PLD", 2.0)


def test_the_other_samplers_and_the_lattice(command):
    truncated = ("--sampling", "truncated", "--rate", 0.05, "--records", 1000, "--cap", 80)
    assert plan(command, "--noise", 1, *truncated, "--rounds", 10)["method"] == "PLD"
    fixed = ("--sampling", "fixed", "--rate", 0.05, "--relation", "replace-one")
    assert plan(command, "--noise", 1, *fixed, "--rounds", 100)["epsilon"] == pytest.approx(34.3, rel=0.005)
    lattice = ("--mechanism", "discrete_gaussian", "--steps", 1024, "--dimension", 100)
    assert plan(command, "--noise", 4, *lattice, "--rounds", 10)["sensitivity"] == pytest.approx(
        1 + 40 / 1024, rel=1e-3
    )


def test_the_words_on_the_console(command):
    done = command("privacy", "plan", "--epsilon", 8, "--rounds", 100)
    assert done.out.splitlines()[0].startswith("noise 6.002")
    assert "(closed form): 100 releases of gaussian noise 6.002" in done.out
    assert json.loads(command("privacy", "--json", "plan", "--noise", 5, "--rounds", 3).out)["rounds"] == 3


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--noise", 1), "plan must have two of --epsilon, --noise and --rounds, got --noise."),
        (("--noise", 1, "--rounds", 2, "--epsilon", 3), "got --epsilon --noise --rounds."),
        ((), "got none of them."),
        (("--noise", 1, "--rounds", 2, "--delta", 0), "delta (δ) must be a number from 1e-100 to below 1, got 0.0."),
        (("--noise", 1, "--rounds", 2, "--delta", 1), "delta (δ) must be"),
        (("--epsilon", -1, "--rounds", 2), "epsilon (ε) must be a number from 0.001 to 10000, got -1.0."),
        (("--epsilon", "nan", "--noise", 1), "epsilon (ε) must be"),
        (("--noise", 0, "--rounds", 2), "noise (z) must be"),
        (("--noise", 1, "--rounds", 0), "rounds (T) must be an integer of at least 1, got 0."),
        (("--noise", 1, "--rounds", 2, "--sampling", "poisson"), "rate (q) must be given where sampling is poisson"),
        (
            ("--noise", 1, "--rounds", 2, "--sampling", "fixed", "--rate", 0.1),
            "sampling must be one with a valid bound",
        ),
        (
            ("--noise", 1, "--rounds", 2, "--sampling", "shuffle"),
            "sampling must be one of fixed, full, poisson, truncated",
        ),
        (("--noise", 1, "--rounds", 2, "--mechanism", "gausian"), "Did you mean 'gaussian'?"),
        (("--noise", 0.1, "--epsilon", 0.1), "noise (z) must be large enough for one round, got 0.1"),
    ],
)
def test_a_bad_plan_ends_in_one_sentence(command, arguments, sentence):
    done = command("privacy", "plan", *arguments)
    assert done.code == 1
    assert done.out == ""
    assert done.err.startswith("fedpact: ")
    assert len(done.err.splitlines()) == 1
    assert sentence in done.err


# The ledger


@pytest.fixture
def run(tmp_path):
    with Ledger(tmp_path / "run") as ledger:
        for t in range(3):
            ledger.spend(
                [Release("north", t, Event("gaussian", 5), 1.0), Release("south", t, Event("laplace", 9), 1.0)]
            )
    return tmp_path / "run"


def test_a_ledger_per_client_and_the_worst(command, run):
    done = command("privacy", "ledger", "run", "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert (found["releases"], found["verified"], found["delta"]) == (6, True, 1e-5)
    costs = {row["client"]: row["epsilon"] for row in found["clients"]}
    assert costs["north"] == pytest.approx(epsilon({Event("gaussian", 5): 3}, 1e-5).epsilon)
    assert costs["south"] == pytest.approx(epsilon({Event("laplace", 9): 3}, 1e-5).epsilon)
    assert [row["client"] for row in found["worst"]] == ["north"]
    text = command("privacy", "ledger", "run/ledger.jsonl", "--delta", 1e-6).out
    assert "6 releases, the chain is whole" in text
    figure = f"{epsilon({Event('gaussian', 5): 3}, 1e-6).epsilon:.6g}"
    assert f"worst client for hiding a record from the server (add-remove): north, ε = {figure} at δ = 1e-06" in text


def test_a_torn_line_is_told_and_left_alone(command, run):
    with (run / "ledger.jsonl").open("ab") as file:
        file.write(b'{"bef')
    assert "notice: 5 bytes of a last line that was never released" in command("privacy", "ledger", "run").out
    assert (run / "ledger.jsonl").read_bytes().endswith(b'{"bef')


def test_a_claim_that_does_not_hold_is_infinite(command, run):
    with Ledger(run) as ledger:
        ledger.spend([Release("north", 9, Event("gaussian", 5), 1.0, adversary="outsider", place="central")])
    found = json.loads(command("privacy", "ledger", "run", "--json").out)
    (row,) = [row for row in found["clients"] if (row["client"], row["adversary"]) == ("north", "server")]
    assert row["epsilon"] is None
    assert row["method"].startswith("no guarantee")
    assert "north, ε = ∞" in command("privacy", "ledger", "run").out


def test_an_edited_ledger_ends_in_one_sentence(command, run):
    path = run / "ledger.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"noise":9.0', b'"noise":99.0', 1))
    done = command("privacy", "ledger", "run")
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("fedpact: line 2 of the ledger must be as it was written")
    assert len(done.err.splitlines()) == 1


@pytest.mark.parametrize("name", ["nowhere", "nowhere/ledger.jsonl", "."])
def test_no_ledger_there(command, tmp_path, name):
    done = command("privacy", "ledger", name)
    assert done.code == 1
    assert "ledger.jsonl must be that of a private run, got none at" in done.err
    assert list(tmp_path.iterdir()) == []


def test_every_option_of_the_commands_says_what_it_does():
    (top,) = [action for action in parser()._actions if getattr(action, "choices", None)]
    (group,) = [action for action in top.choices["privacy"]._actions if getattr(action, "choices", None)]
    assert set(group.choices) == {"plan", "ledger", "audit"}
    for sub in group.choices.values():
        assert sub.description
        assert all(action.help for action in sub._actions)
        assert "--json" in sub._option_string_actions
