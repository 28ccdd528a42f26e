"""A federation whose clients are nodes: the same history as a simulation, and what becomes of faults."""

from __future__ import annotations

import logging
import re

import numpy as np
import pytest
from helpers_nodes import Faulty, Late, federated, nodes, same_history, simulated, step_of, values

from fedpact.algorithms import ALGORITHMS as REGISTRY
from fedpact.core.errors import ClientError, InvalidArgument
from fedpact.core.stop import Outcome
from fedpact.experiment import build
from fedpact.flower.links import Direct

ALGORITHMS = {
    "fedepm": {"name": "fedepm"},
    "inexact_admm": {"name": "inexact_admm", "preset": "paper"},
    "fedadmm": {"name": "fedadmm", "batch": 20},
    "fedavg": {"name": "fedavg"},
    "scaffold": {"name": "scaffold", "batch": 20},
    "fedpdm": {"name": "fedpdm"},
}
#: With the others of the registry on data split by rows, which have their defaults; SFedProx takes shorter steps, for
#: its own swing on these rows, and rounding grows a thousandfold a round.
OTHERS = {"sfedprox": {"name": "sfedprox", "scale": 0.3}}
#: What a node says that goes back to a state it has gone on from: round, its name, the version asked and that it had.
BACK = r"run [0-9a-f]{16}, round (\d+), node '(\d+)': the state goes back to version (\d+), .* from (\d+)"
EVERY = {name: (ALGORITHMS | OTHERS).get(name, {"name": name}) for name, cls in REGISTRY.items() if not cls.vertical}


@pytest.mark.parametrize("participation", [1.0, 0.5])
@pytest.mark.parametrize("name", EVERY)
def test_a_run_over_nodes_has_the_history_of_a_simulation(name, participation, tmp_path):
    one = simulated(EVERY[name], participation=participation)
    other = federated(EVERY[name], tmp_path, participation=participation)
    same_history(one, other, 1e-12)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_in_single_precision_too(name, tmp_path):
    one = simulated(ALGORITHMS[name], precision="single")
    same_history(one, federated(ALGORITHMS[name], tmp_path, precision="single"), 1e-6)


def test_notes_stay_with_the_nodes_unless_they_are_asked_for(tmp_path):
    kept = federated("fedavg", tmp_path, flower={"notes": False}, rounds=2)
    assert np.isnan(kept.history.column("gradients")[1:]).all()
    assert not np.isnan(federated("fedavg", tmp_path / "b", rounds=2).history.column("gradients")).any()


# Faults of the network


def test_who_does_not_answer_is_left_out_as_one_that_was_not_drawn(tmp_path, caplog):
    """Rounds 1 and 2 go on without client 3: the run is that of a schedule without it there."""
    lost = lambda i, question, answer: None if i == 3 and (step_of(question, 1) or step_of(question, 2)) else answer
    link = Faulty(nodes(tmp_path), lost)
    run = federated(ALGORITHMS["fedepm"], tmp_path, link, flower={"quorum": 0.5})
    everyone = [0, 1, 2, 3]
    schedule = {"scheme": "schedule", "rounds": [everyone, [0, 1, 2], [0, 1, 2], everyone, everyone]}
    same_history(run, simulated(ALGORITHMS["fedepm"], participation=schedule), 1e-12)
    assert run.history.column("missing").tolist() == [0, 0, 1, 1, 0, 0]
    assert "round 1, client 3 (3): no answer by the deadline; left out" in caplog.text


@pytest.mark.parametrize("name", ["fedadmm", "scaffold"])
def test_a_state_that_the_server_does_not_count_is_rolled_back(name, tmp_path, caplog):
    """The node had stepped and written version 2; the server never heard of it and names version 1 again."""
    lost = lambda i, question, answer: None if i == 0 and step_of(question, 1) else answer
    run = federated(ALGORITHMS[name], tmp_path, Faulty(nodes(tmp_path), lost), flower={"quorum": 0.5})
    schedule = {"scheme": "schedule", "rounds": [[0, 1, 2, 3], [1, 2, 3]] + [[0, 1, 2, 3]] * 3}
    same_history(run, simulated(ALGORITHMS[name], participation=schedule), 1e-12)
    assert re.findall(BACK, caplog.text) == [("2", "0", "1", "2")]
    assert run.history.column("rolled_back").tolist() == [0, 0, 0, 1, 0, 0]


def test_too_few_end_the_run_with_a_sentence_and_it_can_be_resumed(tmp_path):
    lost = lambda i, question, answer: None if i < 3 and step_of(question, 2) else answer
    with pytest.raises(ClientError, match=r"round 2: at least 2 of 4 clients must answer, got 1"):
        federated("fedavg", tmp_path, Faulty(nodes(tmp_path), lost), tmp_path / "run", flower={"quorum": 0.5})
    run = federated("fedavg", tmp_path, Direct(nodes(tmp_path)), tmp_path / "run", flower={"quorum": 0.5})
    same_history(run, simulated("fedavg"), 1e-12)


def test_a_late_upload_is_dropped_or_used_by_rule(tmp_path, caplog):
    slow = lambda i, question, answer: Late(answer) if i == 2 and step_of(question, 0) else answer
    schedule = {"scheme": "schedule", "rounds": [[0, 1, 2, 3], [0, 1], [0, 1, 2, 3]]}
    options = {"rounds": 3, "participation": schedule}
    dropped = federated("fedadmm", tmp_path, Faulty(nodes(tmp_path), slow), flower={"quorum": 0.5}, **options)
    assert "client 2 (2): a late upload was dropped" in caplog.text
    assert dropped.history.column("late").tolist() == [0, 0, 0, 0]
    assert dropped.history.column("late_dropped").tolist() == [0, 0, 1, 0]
    used = federated(
        "fedadmm", tmp_path / "b", Faulty(nodes(tmp_path / "b"), slow), flower={"quorum": 0.5, "late": "use"}, **options
    )
    assert "client 2 (2): a late upload was used" in caplog.text
    assert used.history.column("late").tolist() == [0, 0, 1, 0]
    assert used.history.column("participants").tolist() == [0, 3, 3, 4]
    assert used.history.column("objective")[2] != dropped.history.column("objective")[2]


def test_a_late_upload_counts_in_the_round_it_comes_in_as_by_hand(tmp_path):
    """FedSGD with η = 1: w ← w − mean g. Client 2's gradient at w⁰ comes after round 0 and counts in round 1."""
    slow = lambda i, question, answer: Late(answer) if i == 2 and step_of(question, 0) else answer
    schedule = {"scheme": "schedule", "rounds": [[0, 1, 2, 3], [0, 1], [0, 1, 2, 3]]}
    run = federated(
        {"name": "fedsgd", "rate": 1.0},
        tmp_path,
        Faulty(nodes(tmp_path), slow),
        flower={"quorum": 0.5, "late": "use"},
        rounds=3,
        participation=schedule,
    )
    federation = build(values())[0].federation
    rows = [(np.c_[x, np.ones(len(x))], y) for x, y in map(federation.client, range(4))]
    penalty = 1e-2 * np.r_[np.ones(federation.features), 0]  # the intercept has none

    def gradient(i, w):
        x, y = rows[i]
        return (x.T @ (1 / (1 + np.exp(-x @ w)) - y) + penalty * w) / len(x)

    w0 = np.zeros(federation.features + 1)
    w1 = w0 - sum(gradient(i, w0) for i in (0, 1, 3)) / 3
    w2 = w1 - (gradient(0, w1) + gradient(1, w1) + gradient(2, w0)) / 3
    w3 = w2 - sum(gradient(i, w2) for i in range(4)) / 4
    np.testing.assert_allclose(np.r_[run.model.w.tree["w"], run.model.w.tree["b"]], w3, rtol=1e-12, atol=1e-12)
    assert run.history.column("participants").tolist() == [0, 3, 3, 4]


@pytest.mark.parametrize("participation", [1.0, {"scheme": "schedule", "rounds": [[0, 1, 2, 3]] * 3}, 0.5])
def test_a_run_that_can_use_no_late_upload_says_so(participation, tmp_path):
    options = {"rounds": 2, "participation": participation}
    run = federated("fedavg", tmp_path, flower={"late": "use"}, **options)
    told = [notice for notice in run.notices if notice.startswith('late = "use" uses nothing where everyone is asked')]
    assert len(told) == (participation != 0.5)
    dropped = federated("fedavg", tmp_path / "b", **options)
    assert not [notice for notice in dropped.notices if "late" in notice]


def test_telemetry_without_some_is_of_the_others_and_says_so(tmp_path, caplog):
    lost = lambda i, question, answer: None if i == 1 and question.kind == "measure" else answer
    run = federated("fedavg", tmp_path, Faulty(nodes(tmp_path), lost), flower={"quorum": 0.5}, rounds=2)
    assert run.history.column("measured").tolist() == [0.75, 0.75, 0.75]
    assert "telemetry is of 3 of 4 clients; without client 1 (1)" in caplog.text
    whole = simulated("fedavg", rounds=2)
    np.testing.assert_allclose(run.history.column("objective"), whole.history.column("objective"), rtol=0.2)


def test_telemetry_that_is_not_finite_is_left_out_where_others_is(tmp_path, caplog):
    def endless(i, question, answer):
        return (
            arrays(lambda a: [one * np.nan for one in a])(answer) if i == 1 and question.kind == "measure" else answer
        )

    run = federated("fedavg", tmp_path, Faulty(nodes(tmp_path), endless), flower={"quorum": 0.5}, rounds=2)
    assert run.history.column("measured").tolist() == [0.75, 0.75, 0.75]
    assert np.isfinite(run.history.column("objective")).all()
    assert "client 1 (1), measure: its numbers are not finite" in caplog.text


BAD_TELEMETRY = {
    "from another round": ({"round": 0}, "must be of round 1, got one of round 0"),
    "of no round": ({"round": None}, "must be of round 1, got one of round None"),
    "from another client": ({"client": 1}, "must be its own, got one of client 1"),
    "from a stale state": ({"version": 0}, "must be of version 1, got 0"),
}


@pytest.mark.parametrize("fault", BAD_TELEMETRY)
def test_telemetry_of_another_question_is_refused_by_name(fault, tmp_path, caplog):
    told, sentence = BAD_TELEMETRY[fault]

    def bad(i, question, answer):
        wrong = i == 3 and question.kind == "measure" and question.values["round"] == 1
        return changed(**told)(answer) if wrong else answer

    run = federated("fedavg", tmp_path, Faulty(nodes(tmp_path), bad), flower={"quorum": 0.5}, rounds=2)
    assert run.history.column("measured").tolist() == [1, 0.75, 1]
    assert f"round 1, client 3 (3), measure: answer of client 3 (3) {sentence}" in caplog.text


# Faults of nodes


def changed(**values):
    return lambda answer: answer._replace(values={**answer.values, **values})


def arrays(change):
    return lambda answer: answer._replace(arrays=change(list(answer.arrays)))


BAD = {
    "not finite": (arrays(lambda a: [a[0] * np.nan, *a[1:]]), "it is not finite"),
    "of the wrong shape": (arrays(lambda a: [a[0], a[1][:-1], *a[2:]]), r"must be of shape \(30,\), got \(29,\)"),
    "of the wrong type": (arrays(lambda a: [a[0].astype(np.float32), *a[1:]]), "must be of float64, got float32"),
    "with an array too few": (arrays(lambda a: a[:-1]), "arrays, got"),
    "from another round": (changed(round=0), "must be of round 2, got one of round 0"),
    "from another client": (changed(client=1), "must be its own, got one of client 1"),
    "from a stale state": (changed(based=1), "must go on from version 2, got 1"),
    "from the state of one that joins": (changed(based=0), "must go on from version 2, got 0"),
    "of no round": (changed(round=None), "must be of round 2, got one of round None"),
    "without its version": (changed(version=None), "must tell its state's version and digest"),
    "too long": (arrays(lambda a: [a[0] * 1e9, *a[1:]]), "must be of norm at most 1000, got"),
    "no step": (lambda answer: answer._replace(kind="join"), "must be a step, got 'join'"),
}


@pytest.mark.parametrize("fault", BAD)
def test_a_bad_upload_is_refused_by_name_and_the_round_goes_on(fault, tmp_path, caplog):
    change, sentence = BAD[fault]
    bad = lambda i, question, answer: change(answer) if i == 3 and step_of(question, 2) else answer
    link = Faulty(nodes(tmp_path), bad)
    run = federated("fedavg", tmp_path, link, flower={"quorum": 0.5, "largest": 1000.0, "notes": False})
    schedule = {"scheme": "schedule", "rounds": [[0, 1, 2, 3]] * 2 + [[0, 1, 2]] + [[0, 1, 2, 3]] * 2}
    same_history(run, simulated("fedavg", participation=schedule), 1e-12, skip=("gradients",))
    assert run.history.column("refused_uploads").tolist() == [0, 0, 0, 1, 0, 0]
    assert "round 2, client 3 (3): upload refused" in caplog.text
    assert re.search(sentence, caplog.text), caplog.text


def test_an_upload_that_is_not_finite_does_not_count_for_the_quorum(tmp_path):
    """Of four one is silent and one not finite: two are not three quarters."""

    def bad(i, question, answer):
        if not step_of(question, 2) or i < 2:
            return answer
        return None if i == 2 else BAD["not finite"][0](answer)

    sentence = r"round 2: at least 3 of 4 clients must answer, got 2\. client 3 \(3\): its upload is not finite"
    with pytest.raises(ClientError, match=sentence):
        federated("fedavg", tmp_path, Faulty(nodes(tmp_path), bad), flower={"quorum": 0.75})


def test_where_everyone_diverges_the_run_stops_as_a_simulation_does(tmp_path):
    with np.errstate(all="ignore"):
        run = federated({"name": "fedavg", "epochs": 5, "step": 1e200}, tmp_path, rounds=4)
    assert run.outcome_kind is Outcome.NONFINITE
    assert "its upload is not finite" in run.outcome or "objective is not finite" in run.outcome
    assert not re.search(r"loss|nan", run.where), "its rows are not here"


def test_nodes_that_are_started_again_before_every_question_change_nothing(tmp_path):
    """Everything a node needs is in its folder."""
    link = Faulty(nodes(tmp_path))

    def restarted(i, question):
        if question.kind in ("step", "measure"):
            link.nodes[i] = nodes(tmp_path)[i]

    link.before = restarted
    run = federated(ALGORITHMS["fedadmm"], tmp_path, link, rounds=3)
    same_history(run, simulated(ALGORITHMS["fedadmm"], rounds=3), 1e-12)


def test_asked_twice_a_node_answers_the_same(tmp_path):
    """The server resumed after it had asked: the same question, the same upload, also of a state on from it."""
    link = Faulty(nodes(tmp_path))
    twice = []

    def again(i, question, answer):
        if question.kind == "step":
            once_more = link._answer(i, question)
            twice.append(all(np.array_equal(a, b) for a, b in zip(answer.arrays, once_more.arrays, strict=True)))
            assert once_more.values == answer.values
        return answer

    link.on_answer = again
    same_history(federated(ALGORITHMS["scaffold"], tmp_path, link), simulated(ALGORITHMS["scaffold"]), 1e-12)
    assert len(twice) == 20
    assert all(twice)


def test_two_runs_at_the_same_nodes_do_not_meet(tmp_path):
    """In the middle of one run the nodes take part in the whole of another."""
    members = nodes(tmp_path)
    one, other = Faulty(members), Direct(members)
    found = []

    def between(i, question):
        if i == 2 and step_of(question, 1) and not found:
            found.append(federated(ALGORITHMS["scaffold"], tmp_path, other))

    one.before = between
    same_history(federated(ALGORITHMS["fedadmm"], tmp_path, one), simulated(ALGORITHMS["fedadmm"]), 1e-12)
    same_history(found[0], simulated(ALGORITHMS["scaffold"]), 1e-12)


def lose_state(folder, i):
    for path in folder.glob(f"node-{i}/run-*/{i:06d}-*.bin"):
        path.unlink()


def test_a_node_that_lost_its_state_is_left_out_from_then_on(tmp_path, caplog):
    def before(i, question):
        if i == 2 and step_of(question, 2):
            lose_state(tmp_path, 2)

    run = federated("fedadmm", tmp_path, Faulty(nodes(tmp_path), before=before), flower={"quorum": 0.5})
    assert "state of node '2' must be of version 2, got none. It is left out from now on." in caplog.text
    assert run.history.column("refused_uploads").tolist() == [0, 0, 0, 1, 0, 0]
    assert run.history.column("missing").tolist() == [0, 0, 0, 0, 1, 1]
    assert run.history.column("measured")[-1] == 0.75


def test_where_everyone_is_needed_the_sentence_says_what_can_be_done(tmp_path):
    """The node is there, and asking it again brings nothing back; a quorum below 1 does."""

    def before(i, question):
        if i == 2 and step_of(question, 2):
            lose_state(tmp_path, 2)

    wanted = (
        r"round 2: at least 4 of 4 clients must answer, got 3\. client 2 \(2\): state of node '2' must be of version "
        r"2, got none\. The state of client 2 \(2\) is lost, and asking again does not bring it back: resume with a "
        r'quorum of at most 0\.75, or with stale = "restart" where the algorithm allows it\.$'
    )
    members = nodes(tmp_path)
    for link in (Faulty(members, before=before), Direct(members)):
        with pytest.raises(ClientError, match=wanted):
            federated("fedadmm", tmp_path, link, tmp_path / "run")
    run = federated("fedadmm", tmp_path, Direct(members), tmp_path / "run", flower={"quorum": 0.75})
    assert run.history.rounds == 5


def test_and_that_others_are_missing_where_they_are(tmp_path):
    def before(i, question):
        if i == 2 and step_of(question, 1):
            lose_state(tmp_path, 2)

    lost = lambda i, question, answer: None if i == 0 and step_of(question, 1) else answer
    wanted = (
        r"got 2\. .* where the algorithm allows it\. Start the missing nodes \(client 0 \(0\)\) and resume, or lower"
    )
    with pytest.raises(ClientError, match=wanted):
        federated("fedadmm", tmp_path, Faulty(nodes(tmp_path), lost, before), flower={"quorum": 0.75})


def test_or_starts_again_where_the_rule_says_so(tmp_path, caplog):
    def before(i, question):
        if i == 2 and step_of(question, 2) and not question.values.get("fresh"):
            lose_state(tmp_path, 2)

    flower = {"quorum": 0.5, "stale": "restart"}
    run = federated("fedadmm", tmp_path, Faulty(nodes(tmp_path), before=before), flower=flower)
    assert "It starts again from the state of one that joins." in caplog.text
    assert run.history.column("participants").tolist() == [0, 4, 4, 4, 4, 4]


@pytest.mark.parametrize("name", ["scaffold", "inexact_admm"])
def test_who_sends_changes_cannot_start_again(name, tmp_path):
    """The server would count what the client has forgotten for ever."""
    with pytest.raises(InvalidArgument, match=f'stale must be "refuse" for {name}, got .restart.'):
        federated(name, tmp_path, flower={"stale": "restart"})


def test_a_question_that_comes_after_its_time_removes_no_later_state(tmp_path):
    link, asked = Faulty(nodes(tmp_path)), {}

    def old_again(i, question, answer):
        if step_of(question, 0):
            asked[i] = question
        if step_of(question, 2):
            link._answer(i, asked[i])
        return answer

    link.on_answer = old_again
    run = federated("scaffold", tmp_path, link)
    same_history(run, simulated("scaffold"), 1e-12)


def test_a_state_of_another_content_under_the_right_version_is_not_used(tmp_path, caplog):
    def before(i, question):
        if i == 1 and step_of(question, 2):
            source = next(tmp_path.glob("node-0/run-*/000000-000000002.bin"))
            target = next(tmp_path.glob("node-1/run-*/000001-000000002.bin"))
            target.write_bytes(source.read_bytes())

    federated("fedadmm", tmp_path, Faulty(nodes(tmp_path), before=before), flower={"quorum": 0.5})
    assert "must be of version 2, got another state of that version" in caplog.text


def test_a_full_disk_at_a_node_leaves_it_out_of_the_round_and_nothing_is_lost(tmp_path, monkeypatch, caplog):
    from fedpact.core import store

    whole = store._write
    full = []

    def write(path, leaves):
        if full and "node-3" in str(path):
            raise OSError(28, "No space left on device")
        whole(path, leaves)

    monkeypatch.setattr(store, "_write", write)

    def before(i, question):
        full[:] = [True] if step_of(question, 1) else []

    run = federated("fedadmm", tmp_path, Faulty(nodes(tmp_path), before=before), flower={"quorum": 0.5})
    schedule = {"scheme": "schedule", "rounds": [[0, 1, 2, 3], [0, 1, 2]] + [[0, 1, 2, 3]] * 3}
    same_history(run, simulated("fedadmm", participation=schedule), 1e-12)
    assert "No space left on device" in caplog.text


# The server is killed


@pytest.mark.parametrize("name", ["fedepm", "fedadmm", "scaffold"])
def test_a_server_that_is_killed_anywhere_resumes_to_the_same_history(name, tmp_path):
    """Killed after nodes have stepped in round t and before it counted: t is asked again, and counts once."""

    class Killed(Exception):
        pass

    for number in (0, 2):
        place = tmp_path / str(number)

        def kill(i, question, answer, number=number):
            if i == 2 and step_of(question, number):
                raise Killed
            return answer

        with pytest.raises(Killed):
            federated(ALGORITHMS[name], place, Faulty(nodes(place), kill), place / "run")
        run = federated(ALGORITHMS[name], place, Direct(nodes(place)), place / "run")
        same_history(run, simulated(ALGORITHMS[name]), 1e-12)


def test_server_and_nodes_resume_to_one_cut_where_nodes_are_ahead(tmp_path, caplog):
    """The newest checkpoint is lost: the server goes back a round, and the nodes with it."""
    federated(ALGORITHMS["fedadmm"], tmp_path, run=tmp_path / "run", rounds=4)
    newest = max((tmp_path / "run").glob("checkpoint-*.bin"))
    newest.unlink()
    again = federated(ALGORITHMS["fedadmm"], tmp_path, run=tmp_path / "run", rounds=5)
    same_history(again, simulated(ALGORITHMS["fedadmm"]), 1e-12)
    assert not re.search(BACK, caplog.text), "the question is that of before, and so is the answer: nothing was undone"


# Bad starts


def test_how_long_a_run_waits_may_change_when_it_is_resumed(tmp_path):
    gone = lambda i, question, answer: None if i == 2 and step_of(question, 1) else answer
    with pytest.raises(ClientError, match="at least 4 of 4 clients must answer, got 3"):
        federated("fedavg", tmp_path, Faulty(nodes(tmp_path), gone), run=tmp_path / "run")
    run = federated("fedavg", tmp_path, run=tmp_path / "run", flower={"quorum": 0.5, "deadline": 9})
    same_history(run, simulated("fedavg"), 1e-12)


def test_as_many_nodes_as_clients(tmp_path):
    with pytest.raises(InvalidArgument, match=r"nodes must be the 4 clients of \[split\], got 3"):
        federated("fedavg", tmp_path, Direct(nodes(tmp_path, 3)))


def test_the_engine_needs_its_nodes(tmp_path):
    import fedpact as fp

    federation = fp.data.breast_cancer().split(clients=4)
    with pytest.raises(InvalidArgument, match=r'engine must be one of this machine here, got "flower"'):
        fp.run(fp.FedAvg(), fp.Logistic(), federation, engine="flower", rounds=1)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"deadline": 0}, "deadline must be a number of seconds above 0"),
        ({"quorum": 1.5}, r"quorum must be a fraction in \(0, 1\]"),
        ({"late": "maybe"}, "late must be one of drop, use"),
        ({"stale": "guess"}, "stale must be one of refuse, restart"),
        ({"largest": -1}, "largest must be above 0"),
        ({"deadline": 20, "patience": 10}, "patience must be at least the deadline, 20 s, got 10"),
    ],
)
def test_settings_of_the_engine_are_checked(options, sentence, tmp_path):
    with pytest.raises((InvalidArgument, KeyError), match=sentence):
        federated("fedavg", tmp_path, flower=options)


@pytest.fixture(autouse=True)
def told(caplog):
    caplog.set_level(logging.WARNING, logger="fedpact")
    logging.getLogger("fedpact").propagate = True
