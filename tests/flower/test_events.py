"""What a federation decides about its nodes is counted in the history and named, with why, in events.jsonl."""

from __future__ import annotations

import json
import logging
from collections import Counter

import numpy as np
import pytest
from helpers_nodes import Faulty, Late, federated, nodes, same_history, simulated, step_of, values

from fedpact.core import driver
from fedpact.core.errors import ClientError
from fedpact.core.wire import Refused, suffice
from fedpact.engines import FlowerEngine
from fedpact.experiment import build
from fedpact.run import Run

COUNTED = FlowerEngine.told
QUORUM = {"quorum": 0.5}


@pytest.fixture(autouse=True)
def plain_runs(monkeypatch):
    """A checkpoint after every round, however quick it is; and no report, whose plots take longer than the run."""
    monkeypatch.setattr(driver, "BLOCK_SECONDS", 0.0)
    monkeypatch.setattr(logging.getLogger("fedpact"), "propagate", True)
    monkeypatch.setattr(Run, "report", lambda self, folder: None)


def events(folder):
    path = folder / "events.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def but_back(folder):
    """Events without those of nodes that went back, as every node does whose last answer did not count."""
    return [event for event in events(folder) if event["what"] != "rolled_back"]


def consistent(run, folder):
    """Every count of the history is so many lines of events, and there are no others but those it does not count."""
    told = Counter((event["round"], event["what"]) for event in events(folder))
    for what in COUNTED:
        column = run.history.column(what).tolist()
        assert column == [told.pop((row, what), 0) for row in range(len(column))], what
    assert {what for _, what in told} <= {"unmeasured", "after_end"}


def scrambled(i, question, answer):
    """Client 3 is silent in round 1, client 0's upload not finite in round 2, client 2 late with that of round 1."""
    if i == 3 and step_of(question, 1):
        return None
    if i == 0 and step_of(question, 2):
        return answer._replace(arrays=[a * np.nan for a in answer.arrays])
    return Late(answer) if i == 2 and step_of(question, 1) else answer


def test_every_count_has_its_names_and_reasons(tmp_path):
    run = federated("fedavg", tmp_path, Faulty(nodes(tmp_path), scrambled), tmp_path / "run", flower=QUORUM, rounds=4)
    consistent(run, tmp_path / "run")
    assert but_back(tmp_path / "run") == [
        {"round": 2, "client": 2, "name": "2", "what": "missing", "why": "no answer by the deadline"},
        {"round": 2, "client": 3, "name": "3", "what": "missing", "why": "no answer by the deadline"},
        {"round": 3, "client": 0, "name": "0", "what": "refused_uploads", "why": "it is not finite."},
        {"round": 3, "client": 2, "name": "2", "what": "late_dropped", "why": 'upload of round 2; late = "drop"'},
    ]
    assert run.history.column("late_dropped").tolist() == [0, 0, 0, 1, 0]
    assert run.history.column("participants").tolist() == [0, 4, 2, 3, 4]


class Slow(Faulty):
    """Clients 2 and 3 answer the step of round 1 after its deadline, within its patience."""

    def ask(self, questions, deadline, enough, patience):
        answers = super().ask(questions, deadline, enough, patience)
        first = {i: one for i, one in answers.items() if i < 2 or not step_of(questions[i], 1)}
        return first if suffice(first, enough) else answers


@pytest.mark.parametrize("wrong", [lambda a: a * np.nan, lambda a: a[..., None], lambda a: a])
def test_a_wrong_upload_does_not_make_the_quorum(wrong, tmp_path):
    """Of four two are needed. Two come in time, one of them wrong: the round waits for the others, and goes on."""
    changed = lambda answer: answer._replace(arrays=[wrong(a) for a in answer.arrays])
    on_answer = lambda i, question, answer: changed(answer) if i == 0 and step_of(question, 1) else answer
    run = federated("fedavg", tmp_path, Slow(nodes(tmp_path), on_answer), flower=QUORUM, rounds=3)
    sound = np.isfinite(wrong(np.ones(1))).all() and wrong(np.ones(1)).ndim == 1
    assert run.history.column("participants").tolist() == ([0, 4, 2, 4] if sound else [0, 4, 3, 4])
    assert run.history.column("refused_uploads").tolist() == [0, 0, 0 if sound else 1, 0]
    assert run.history.column("missing").tolist() == [0, 0, 2 if sound else 0, 0]


def test_a_run_without_decisions_has_no_such_file(tmp_path):
    run = federated("fedavg", tmp_path, run=tmp_path / "run", rounds=2)
    assert not (tmp_path / "run" / "events.jsonl").exists()
    assert [run.history.column(name).sum() for name in COUNTED] == [0] * len(COUNTED)


@pytest.mark.parametrize("rounds", [[0, 1], [0, 1, 2, 3]])
def test_a_late_upload_is_used_where_its_node_is_not_asked_and_else_dropped(rounds, tmp_path):
    slow = lambda i, question, answer: Late(answer) if i == 2 and step_of(question, 0) else answer
    schedule = {"scheme": "schedule", "rounds": [[0, 1, 2, 3], rounds]}
    flower = {**QUORUM, "late": "use"}
    link = Faulty(nodes(tmp_path), slow)
    run = federated("fedavg", tmp_path, link, tmp_path / "run", flower=flower, rounds=2, participation=schedule)
    consistent(run, tmp_path / "run")
    what, why = ("late", "") if len(rounds) == 2 else ("late_dropped", "; its node has another upload in this round")
    told = {"round": 2, "client": 2, "name": "2", "what": what, "why": f"upload of round 1{why}"}
    assert but_back(tmp_path / "run")[1:] == [told]


def test_a_node_keeps_the_state_of_an_answer_that_may_still_be_used(tmp_path):
    """Client 2's answer of round 0 comes in round 2; by then the node has answered round 1 too, from version 0."""

    class Held(Faulty):
        def late(self):
            return super().late() if 2 in self.rounds else []

        def ask(self, questions, *rest):
            self.rounds |= {next(iter(questions.values())).values.get("round")}
            return super().ask(questions, *rest)

        rounds = frozenset()

    def slow(i, question, answer):
        if i != 2 or not (step_of(question, 0) or step_of(question, 1)):
            return answer
        return Late(answer) if step_of(question, 0) else None

    schedule = {"scheme": "schedule", "rounds": [[0, 1, 2, 3], [0, 1, 2, 3], [0, 1], [0, 1, 2, 3]]}
    options = {"flower": {**QUORUM, "late": "use"}, "rounds": 4, "participation": schedule}
    run = federated("fedavg", tmp_path, Held(nodes(tmp_path), slow), **options)
    assert run.history.column("late").tolist() == [0, 0, 0, 1, 0]
    assert run.history.column("participants").tolist() == [0, 3, 3, 3, 4]


def test_a_late_upload_that_is_not_sound_is_not_used(tmp_path):
    """One that is not finite, and one that goes on from another version."""
    bad = [lambda a: a._replace(arrays=[x * np.nan for x in a.arrays]), lambda a: a._replace(values={"round": 0})]
    for k, change in enumerate(bad):
        place = tmp_path / str(k)
        slow = lambda i, question, answer, f=change: Late(f(answer)) if i == 2 and step_of(question, 0) else answer
        schedule = {"scheme": "schedule", "rounds": [[0, 1, 2, 3], [0, 1]]}
        options = {"flower": {**QUORUM, "late": "use", "notes": False}, "rounds": 2, "participation": schedule}
        run = federated("fedavg", place, Faulty(nodes(place), slow), place / "run", **options)
        consistent(run, place / "run")
        assert run.history.column("late_dropped").tolist() == [0, 0, 1]
        assert run.history.column("late").tolist() == [0, 0, 0]
        assert run.history.column("participants").tolist() == [0, 3, 2]


@pytest.mark.parametrize("rule", ["drop", "use"])
def test_a_late_answer_that_cannot_be_read_is_counted_and_told_of(rule, tmp_path):
    """As the network hands it on: damaged, or from another node."""
    broken = Refused("answer must be whole, got a part of it.")
    slow = lambda i, question, answer: Late(broken) if i == 2 and step_of(question, 0) else answer
    schedule = {"scheme": "schedule", "rounds": [[0, 1, 2, 3], [0, 1]]}
    options = {"flower": {**QUORUM, "late": rule}, "rounds": 2, "participation": schedule}
    run = federated("fedavg", tmp_path, Faulty(nodes(tmp_path), slow), tmp_path / "run", **options)
    consistent(run, tmp_path / "run")
    assert run.history.column("late_dropped").tolist() == [0, 0, 1]
    assert str(broken) in events(tmp_path / "run")[-1]["why"]


def test_an_upload_that_comes_after_the_last_round_is_told_of(tmp_path, caplog):
    slow = lambda i, question, answer: Late(answer) if i == 2 and step_of(question, 1) else answer
    run = federated("fedavg", tmp_path, Faulty(nodes(tmp_path), slow), tmp_path / "run", flower=QUORUM, rounds=2)
    consistent(run, tmp_path / "run")
    last = {"round": 2, "client": 2, "name": "2", "what": "after_end", "why": "upload of round 2; the run had ended"}
    assert but_back(tmp_path / "run")[-1] == last
    assert "after round 2, the last, client 2 (2): a late upload was dropped" in caplog.text
    federated("fedavg", tmp_path, run=tmp_path / "run", flower=QUORUM, rounds=3)
    assert but_back(tmp_path / "run")[-1] == last


def test_who_telemetry_is_without_is_named(tmp_path):
    lost = lambda i, question, answer: None if i == 1 and question.kind == "measure" else answer
    run = federated("fedavg", tmp_path, Faulty(nodes(tmp_path), lost), tmp_path / "run", flower=QUORUM, rounds=2)
    consistent(run, tmp_path / "run")
    told = {"client": 1, "name": "1", "what": "unmeasured", "why": "no answer by the deadline"}
    assert events(tmp_path / "run") == [{"round": row, **told} for row in range(3)]


def test_who_the_last_row_is_without_is_named_where_it_is_measured_after_its_time(tmp_path):
    """Every second row is measured, and the third and last at the end; resumed, it is told of once."""
    lost = lambda i, question, answer: None if i == 1 and question.kind == "measure" else answer
    options = {"flower": QUORUM, "rounds": 3, "evaluate_every": 2}
    told = {"client": 1, "name": "1", "what": "unmeasured", "why": "no answer by the deadline"}
    for _ in range(2):
        federated("fedavg", tmp_path, Faulty(nodes(tmp_path), lost), tmp_path / "run", **options)
        assert events(tmp_path / "run") == [{"round": row, **told} for row in (0, 2, 3)]


def test_who_goes_back_to_the_state_that_counts_is_named(tmp_path):
    """Its answer of round 1 was lost, and it had gone on."""
    lost = lambda i, question, answer: None if i == 0 and step_of(question, 1) else answer
    folder = tmp_path / "run"
    run = federated("fedadmm", tmp_path, Faulty(nodes(tmp_path), lost), folder, flower=QUORUM, rounds=4)
    consistent(run, folder)
    why = "its state went back to version 1, which the server counts, from 2"
    assert events(folder)[1:] == [{"round": 3, "client": 0, "name": "0", "what": "rolled_back", "why": why}]


# Resumed runs


def test_a_round_that_is_run_again_has_its_events_once(tmp_path):
    """The server is killed in round 3; then the newest checkpoint is lost: a round that counted is run again."""

    class Killed(Exception):
        pass

    def kill(i, question, answer):
        if step_of(question, 3):
            raise Killed
        return None if i == 1 and question.kind == "measure" else scrambled(i, question, answer)

    folder = tmp_path / "run"
    with pytest.raises(Killed):
        federated("fedavg", tmp_path, Faulty(nodes(tmp_path), kill), folder, flower=QUORUM, rounds=5)
    before = but_back(folder)
    assert {event["round"] for event in before} == {0, 1, 2, 3}
    max(folder.glob("checkpoint-*.bin")).unlink()
    done = int(max(folder.glob("checkpoint-*.bin")).stem.split("-")[1])
    with (folder / "events.jsonl").open("a") as file:
        file.write('{"round": 1, "cli')  # the disk was full, or the power went
    run = federated("fedavg", tmp_path, Faulty(nodes(tmp_path), scrambled), folder, flower=QUORUM, rounds=5)
    consistent(run, folder)
    late = [event for event in before if event["what"] == "late_dropped" and event["round"] > done]
    again = [event for event in before if event["what"] != "unmeasured" or event["round"] <= done]
    assert but_back(folder) == [event for event in again if event not in late]  # what a lost server had heard is lost


def test_a_round_that_failed_leaves_no_events(tmp_path):
    lost = lambda i, question, answer: None if i < 3 and step_of(question, 2) else scrambled(i, question, answer)
    with pytest.raises(ClientError, match="at least 2 of 4 clients must answer, got 1"):
        federated("fedavg", tmp_path, Faulty(nodes(tmp_path), lost), tmp_path / "run", flower=QUORUM)
    assert {event["round"] for event in events(tmp_path / "run")} == {2}
    run = federated("fedavg", tmp_path, run=tmp_path / "run", flower=QUORUM)
    consistent(run, tmp_path / "run")


def test_a_run_that_begins_again_without_a_checkpoint_has_none_of_its_old_events(tmp_path):
    folder = tmp_path / "run"
    federated("fedavg", tmp_path, Faulty(nodes(tmp_path), scrambled), folder, flower=QUORUM, rounds=4)
    for path in folder.glob("checkpoint-*.bin"):
        path.unlink()
    run = federated("fedavg", tmp_path, run=folder, flower=QUORUM, rounds=4)
    assert but_back(folder) == []
    consistent(run, folder)


def test_a_folder_from_before_these_columns_goes_on_with_those_it_has(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    with monkeypatch.context() as before:
        before.setattr(FlowerEngine, "told", ("missing", "refused_uploads", "late"))
        before.setattr(FlowerEngine, "events", lambda self: [])
        federated("fedavg", tmp_path, run=folder, flower=QUORUM, rounds=2)
    assert not (folder / "events.jsonl").exists()
    run = federated("fedavg", tmp_path, Faulty(nodes(tmp_path), scrambled), folder, flower=QUORUM, rounds=4)
    assert "late" in run.history.columns
    assert not {"late_dropped", "restarted", "rolled_back"} & set(run.history.columns)
    assert [event["what"] for event in but_back(folder)] == ["refused_uploads"]
    schedule = {"scheme": "schedule", "rounds": [[0, 1, 2, 3]] * 2 + [[1, 2, 3], [0, 1, 2, 3]]}
    same_history(run, simulated("fedavg", rounds=4, participation=schedule), 1e-12)


# Nodes that start again


def by_hand(clients, rounds, rho, rate, epochs, l2, anew):
    """Algorithm 1 of FedADMM with start "local" and message "double", in numpy: θ and mean objective by round.

    `anew` are the round before whose step a client is as one that joins, w_i = θ⁰ and y_i = 0, and the client.
    """
    ones = [(np.hstack([x, np.ones((len(x), 1))]), b) for x, b in clients]
    m, n = len(ones), ones[0][0].shape[1]
    penalised = np.r_[np.ones(n - 1), 0.0]
    value = lambda w, x, b: (
        (np.sum(np.logaddexp(0, x @ w) - b * (x @ w)) + l2 / 2 * np.sum((penalised * w) ** 2)) / len(b)
    )
    gradient = lambda w, x, b: (x.T @ (1 / (1 + np.exp(-x @ w)) - b) + l2 * penalised * w) / len(b)
    theta, w, y = np.zeros(n), np.zeros((m, n)), np.zeros((m, n))
    objectives = [np.mean([value(theta, *one) for one in ones])]
    for t in range(rounds):
        if t == anew[0]:
            w[anew[1]], y[anew[1]] = 0.0, 0.0
        delta = np.zeros(n)
        for i, one in enumerate(ones):
            for _ in range(epochs):
                w[i] = w[i] - rate * (gradient(w[i], *one) + y[i] + rho * (w[i] - theta))  # l. 14-19
            y[i] = y[i] + rho * (w[i] - theta)  # l. 20
            delta += 2 * (w[i] - theta)
        theta = theta + delta / m  # (5)
        objectives.append(np.mean([value(theta, *one) for one in ones]))
    return objectives


def test_a_node_that_starts_again_does_so_as_one_that_joins(tmp_path):
    def before(i, question):
        if i == 2 and step_of(question, 2) and not question.values.get("fresh"):
            for path in tmp_path.glob("node-2/run-*/000002-*.bin"):
                path.unlink()

    settings = {"rho": 0.05, "rate": 0.1, "epochs": 3}
    fedadmm = {"name": "fedadmm", "start": "local", "message": "double", "vary": False, **settings}
    link = Faulty(nodes(tmp_path), before=before)
    run = federated(fedadmm, tmp_path, link, tmp_path / "run", flower={**QUORUM, "stale": "restart"})
    consistent(run, tmp_path / "run")
    assert run.history.column("restarted").tolist() == [0, 0, 0, 1, 0, 0]
    assert run.history.column("participants").tolist() == [0, 4, 4, 4, 4, 4]
    (told,) = events(tmp_path / "run")
    assert {**told, "why": ""} == {"round": 3, "client": 2, "name": "2", "what": "restarted", "why": ""}
    assert told["why"] == "state of node '2' must be of version 2, got none."
    federation = build(values(fedadmm))[0].federation
    rows = [federation.client(i) for i in range(4)]
    np.testing.assert_allclose(
        run.history.column("objective"), by_hand(rows, 5, **settings, l2=1e-2, anew=(2, 2)), rtol=1e-12
    )
    never = by_hand(rows, 5, **settings, l2=1e-2, anew=(9, 2))
    np.testing.assert_allclose(simulated(fedadmm).history.column("objective"), never, rtol=1e-12)
    assert abs(never[3] - run.history.column("objective")[3]) > 1e-6


def test_one_that_asks_to_start_again_and_does_not_answer_is_missing(tmp_path):
    def before(i, question):
        if i == 2 and step_of(question, 2) and not question.values.get("fresh"):
            for path in tmp_path.glob("node-2/run-*/000002-*.bin"):
                path.unlink()

    silent = lambda i, question, answer: None if i == 2 and question.values.get("fresh") else answer
    link = Faulty(nodes(tmp_path), silent, before)
    run = federated("fedadmm", tmp_path, link, tmp_path / "run", flower={**QUORUM, "stale": "restart"}, rounds=4)
    consistent(run, tmp_path / "run")
    assert run.history.column("missing").tolist() == [0, 0, 0, 1, 1]
    assert run.history.column("restarted").tolist() == [0, 0, 0, 0, 0]


def test_one_that_is_left_out_for_its_lost_state_is_missing_for_it(tmp_path):
    def before(i, question):
        if i == 2 and step_of(question, 1):
            for path in tmp_path.glob("node-2/run-*/000002-*.bin"):
                path.unlink()

    link = Faulty(nodes(tmp_path), before=before)
    run = federated("fedadmm", tmp_path, link, tmp_path / "run", flower=QUORUM, rounds=3)
    consistent(run, tmp_path / "run")
    told = [(e["round"], e["what"], e["why"]) for e in events(tmp_path / "run")]
    lost = "its state was lost in an earlier round"
    assert told[:2] == [
        (2, "refused_uploads", "state of node '2' must be of version 1, got none."),
        (2, "unmeasured", lost),
    ]
    assert told[2:] == [(3, "missing", lost), (3, "unmeasured", lost)]
