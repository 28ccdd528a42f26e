"""Feature-split federations over nodes that have their own columns: equal to the simulation, and who can read what."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("cryptography")

from helpers_parties import (
    BOUNDED,
    CLOSER,
    LOGISTIC,
    NAMES,
    Changing,
    arrays_within,
    assert_same,
    found_in,
    nodes_in,
    over_nodes,
    patterns,
    refused,
    simulated,
    tables,
)

from fedpact.core.errors import ClientError, DataError, InvalidArgument
from fedpact.core.vertical import STEP
from fedpact.core.wire import Message, unpack
from fedpact.experiment import federation_of
from fedpact.flower.links import Direct
from fedpact.flower.node import Node
from fedpact.flower.server import federate
from fedpact.secure import primitives

CASES = {
    "sgd": tables(LOGISTIC, batch=20, momentum=0.1),
    "ssca": tables(LOGISTIC, name="vertical_ssca", batch=50),
    "ssca-constrained": tables(BOUNDED, name="vertical_ssca", batch=100, penalty=100.0),
}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A finished run and everything that crossed."""
    link = Direct(nodes_in(tmp_path_factory.mktemp("nodes")))
    link.record = True
    return federate(over_nodes(CASES["sgd"]), link), link


def columns_of(party: str) -> np.ndarray:
    federation = federation_of(CASES["sgd"])
    return federation.client(0)[0][:, list(federation.layout.columns[NAMES.index(party)])]


# Equal to the simulation


@pytest.mark.parametrize("name", CASES)
def test_the_history_is_the_simulations(name, recorded, tmp_path):
    values = CASES[name]
    ours = recorded[0] if name == "sgd" else federate(over_nodes(values), Direct(nodes_in(tmp_path)))
    theirs = simulated(values)
    assert_same(ours, theirs)
    assert ours.history.rounds == 5
    for a, b in zip(*(run.model.w.tree.values() for run in (ours, theirs)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)


def test_nodes_are_found_by_name_in_any_order(tmp_path, recorded):
    link = Direct(nodes_in(tmp_path, ("worst", "means", "errors")))
    assert_same(federate(over_nodes(CASES["sgd"]), link), recorded[0])
    assert link.nodes[2].own.y is not None  # "errors" closes the loss


def test_hidden_units_several_classes_and_single_precision(tmp_path):
    problem = {"name": "two_layer", "inputs": 64, "hidden": 6, "classes": 10}
    values = tables(problem, rounds=2, batch=60)
    values["data"] = {"name": "digits"}
    assert_same(federate(over_nodes(values), Direct(nodes_in(tmp_path))), simulated(values), within=2e-5)


def test_with_all_records_telemetry_is_the_next_rounds_exchange(tmp_path):
    values = tables(LOGISTIC, rounds=3, batch=None)
    del values["algorithm"]["batch"]
    link = Direct(nodes_in(tmp_path))
    link.record = True
    assert_same(federate(over_nodes(values), link), simulated(values))
    kinds = [unpack(one).kind for one in link.sent[::2]]
    assert kinds.count("close") == 4  # at the start and after each of the three rounds


def test_without_telemetry_a_round_is_its_own_exchange_alone(tmp_path, recorded):
    values = over_nodes(CASES["sgd"])
    values["run"]["telemetry"] = "none"
    link = Direct(nodes_in(tmp_path))
    link.record = True
    run = federate(values, link)
    kinds = [unpack(one).kind for one in link.sent[::2]]
    assert kinds.count("close") == 5
    np.testing.assert_array_equal(run.model.w.tree["w"], recorded[0].model.w.tree["w"])


def test_sums_beyond_the_lattice_end_the_run_as_in_the_simulation(tmp_path, caplog):
    values = tables(LOGISTIC, rounds=4, rate=1e9)
    ours, theirs = federate(over_nodes(values), Direct(nodes_in(tmp_path))), simulated(values)
    assert ours.outcome == theirs.outcome
    assert ours.where == theirs.where
    assert ours.where == "round 0, the server: its model or the objective is not finite (training loss 0.693147)"
    assert "partial sums of party 2 (worst) are not finite, or too large to be added up" in caplog.text  # the closer's
    assert_same(ours, theirs)


# Who has what


def test_no_number_of_anyones_columns_crosses(recorded):
    crossed = b"".join(recorded[1].sent)
    assert len(crossed) > 100_000
    for party in NAMES:
        own = columns_of(party)
        assert not found_in(crossed, patterns(own)), party
        assert not found_in(crossed, patterns(np.round(own / STEP).astype(np.int64).view(np.float64))), party
    row = columns_of("means")[7].tobytes()
    assert len(found_in(crossed + row, patterns(columns_of("means")))) == 10  # it would be seen


def test_a_node_has_its_own_columns_and_no_others(recorded):
    for node in recorded[1].nodes:
        held = [array for array in arrays_within(node) if array.size and array.dtype.kind in "fu"]
        content = b"".join(np.asarray(a, np.float64).tobytes() for a in held)
        for party in NAMES:
            seen = len(found_in(content, patterns(columns_of(party)[:20])))
            assert (seen > 100) == (party == node.name), f"{node.name} has {seen} numbers of {party}"
        assert (node.own.y is not None) == (node.name == NAMES[CLOSER])


def relayed(link, kind, number=-1):
    """The question or answer of an exchange: (party, question, answer)."""
    pairs = [(unpack(q), unpack(a)) for q, a in zip(link.sent[::2], link.sent[1::2], strict=True)]
    return [(q.values["client"], q, a) for q, a in pairs if q.kind == kind]


def test_what_is_relayed_opens_for_its_receiver_alone(recorded):
    link = recorded[1]
    closer = link.nodes[CLOSER].at.run
    of_server, partials = bytes(range(32)), relayed(link, "partial")[-2:]
    for party, question, answer in partials:
        content = answer.arrays[0]
        bound = bound_of(question)
        assert len(closer.keys.opened(party, "partial sums", bound, content)) == 1 + 8 * len(question.arrays[0])
        context = primitives.digest(closer.keys.run.encode(), bound)
        for public in closer.keys.public:  # all that the server knows, and a key of its own
            for label in (b"seal", b"mask"):
                key = primitives.agree(of_server, public, label, context, 0)
                about = f"partial sums {party} {CLOSER}".encode()
                assert primitives.unseal(key, content.tobytes(), about) is None
        other = next(node.at.run for node in link.nodes if node.name not in (NAMES[CLOSER], NAMES[party]))
        with pytest.raises(InvalidArgument, match=f"partial sums of party {party}"):
            other.keys.opened(party, "partial sums", bound, content)


def bound_of(question):
    from fedpact.flower.vertical import _bound

    return _bound(question)


def test_the_closer_learns_the_sum_and_not_its_parts(recorded):
    link = recorded[1]
    closer, words, parts = link.nodes[CLOSER].at.run, [], []
    for party, question, answer in relayed(link, "partial")[-2:]:
        plain = closer.keys.opened(party, "partial sums", bound_of(question), answer.arrays[0])
        words.append(np.frombuffer(plain, "<u8", offset=1))
        x = columns_of(NAMES[party])[question.arrays[0]]
        parts.append(np.round(x @ question.arrays[1] / STEP).astype(np.int64).view(np.uint64).ravel())
    off = (words[0] + words[1] - parts[0] - parts[1]).view(np.int64)
    assert np.abs(off).max() <= 2  # of the sum's rounding
    for word, part in zip(words, parts, strict=True):
        apart = (word - part).view(np.int64)
        assert np.abs(apart).astype(float).min() > 2.0**40  # of 426 masks of 64 bits, below by chance: 1e-5


# What is refused


def test_a_party_that_does_not_answer_is_named(tmp_path):
    lost = lambda i, message: None if (i, message.kind) == (2, "block") else message
    told = refused(CASES["sgd"], Changing(nodes_in(tmp_path), lost))
    assert "party 2 (worst) did not answer within 2 s" in told
    assert told.startswith("telemetry after round 0, block")


def flipped(array: np.ndarray, place: int = 40) -> np.ndarray:
    out = np.array(array)
    out[place] ^= 1
    return out


@pytest.mark.parametrize(
    ("kind", "place", "what"),
    [("close", -1, "partial sums of party 2 (worst)"), ("block", 1, "feedback of party 1 (errors)")],
)
def test_a_sealed_message_that_was_changed_is_refused_by_name(kind, place, what, tmp_path):
    def change(i: int, message: Message) -> Message:
        if message.kind != kind:
            return message
        arrays = list(message.arrays)
        arrays[place] = flipped(arrays[place])
        return message._replace(arrays=arrays)

    told = refused(CASES["sgd"], Changing(nodes_in(tmp_path), change))
    assert f"{what} must be as sealed for party" in told


def test_a_sealed_message_of_another_exchange_is_refused(tmp_path):
    kept = []

    def replay(i: int, message: Message) -> Message:
        if message.kind != "close":
            return message
        kept.append(message.arrays[-1])
        again = next(one for one in kept if one.shape == message.arrays[-1].shape)
        return message._replace(arrays=[*message.arrays[:-1], again])

    assert "partial sums of party 2 (worst)" in refused(CASES["sgd"], Changing(nodes_in(tmp_path), replay))


def test_answers_of_a_wrong_shape_are_refused_by_name(tmp_path):
    def cut(i: int, message: Message) -> Message:
        wrong = message.kind == "block" and i == 0
        return message._replace(arrays=[message.arrays[0][:, :-1]]) if wrong else message

    told = refused(CASES["sgd"], Changing(nodes_in(tmp_path), cut, answers=True))
    assert "array 0 of party 0 (means)'s block must be of shape (1, 10, 1), got (1, 9, 1)" in told


class Nth:
    """Of the n-th answer of a party to a kind of question, with its arrays changed; n-th from 1."""

    def __init__(self, party: int, kind: str, number: int, change) -> None:
        self.left, self.which, self.change = number, (party, kind), change

    def __call__(self, i: int, message: Message) -> Message:
        self.left -= (i, message.kind) == self.which
        if self.left or (i, message.kind) != self.which:
            return message
        self.left = -1
        return message._replace(arrays=self.change(list(message.arrays)))


def nan(array: np.ndarray) -> np.ndarray:
    return np.full_like(array, np.nan)


def nan_block(arrays: list[np.ndarray]) -> list[np.ndarray]:
    """The last number of every block is none."""
    last = lambda a: np.append(a.ravel()[:-1], np.nan).reshape(a.shape)
    return [last(a) if a.shape == (1, 10, 1) else a for a in arrays]


@pytest.mark.parametrize(
    ("party", "kind", "number", "where"),
    [
        (2, "block", 4, "round 1, block: block of party 2 (worst)"),
        (0, "block", 5, "telemetry after round 2, block: block of party 0 (means)"),
        (CLOSER, "close", 4, "round 1, close: close of party 1 (errors)"),
    ],
    ids=["step", "telemetry", "closer"],
)
def test_an_answer_that_is_not_finite_names_its_party_and_the_run_is_resumed(
    party, kind, number, where, tmp_path, recorded
):
    nodes, run = nodes_in(tmp_path / "nodes"), tmp_path / "run"
    with pytest.raises(ClientError) as error:
        federate(over_nodes(CASES["sgd"]), Changing(nodes, Nth(party, kind, number, nan_block), answers=True), run)
    assert str(error.value).startswith(f"{where} must be finite, as all that it is made of is, got numbers that are")
    again = federate(over_nodes(CASES["sgd"]), Direct(nodes), run, resume=True)
    assert_same(again, recorded[0])
    assert np.isfinite(again.history.column("gradient")).all()


def test_counts_that_are_not_finite_name_the_closer(tmp_path):
    change = Nth(CLOSER, "close", 1, lambda arrays: [*arrays[:-1], nan(arrays[-1])])
    told = refused(CASES["sgd"], Changing(nodes_in(tmp_path), change, answers=True))
    assert told.startswith("telemetry after round 0, close: close of party 1 (errors) must be finite")


def test_values_that_are_not_finite_are_a_result_and_name_nobody(tmp_path):
    """Whether the run has diverged or a party's sums were wrong cannot be told: the closer knows the sum alone."""
    change = Nth(CLOSER, "close", 4, lambda arrays: [nan(arrays[0]), *arrays[1:]])
    run = federate(over_nodes(CASES["sgd"]), Changing(nodes_in(tmp_path), change, answers=True))
    assert run.where == "round 1, the exchange: a value or a gradient is not finite"
    assert run.history.rounds == 1


def test_so_is_feedback_of_which_the_closer_says_that_it_is_not_finite(tmp_path):
    def unsound(arrays):
        (whether,) = [k for k, a in enumerate(arrays) if a.dtype == bool]
        assert arrays[whether]
        return [*arrays[:whether], np.asarray(False), *arrays[whether + 1 :]]

    changes = [Nth(i, "block", 4, nan_block) for i in (0, 2)] + [Nth(CLOSER, "close", 4, unsound)]

    def change(i: int, message: Message) -> Message:
        for one in changes:
            message = one(i, message)
        return message

    run = federate(over_nodes(CASES["sgd"]), Changing(nodes_in(tmp_path), change, answers=True))
    assert run.where == "round 1, the exchange: a value or a gradient is not finite"


def test_the_closer_says_that_its_feedback_is_not_finite(recorded):
    node = recorded[1].nodes[CLOSER]
    _, question, answer = relayed(recorded[1], "close")[-1]
    head = [nan(question.arrays[2])]
    again = question._replace(arrays=[*question.arrays[:2], *head, *question.arrays[3:]])
    said = [[a for a in one.arrays if a.dtype == bool] for one in (answer, unpack(node.answer(again.pack())))]
    assert said == [[True], [False]]


@pytest.mark.parametrize(("party", "kind"), [(0, "partial"), (CLOSER, "close"), (2, "block")])
def test_an_answer_of_another_exchange_is_refused_by_name(party, kind, tmp_path):
    kept: dict[Any, Message] = {}

    def replay(i: int, message: Message) -> Message:
        shapes = tuple(a.shape for a in message.arrays)
        return kept.setdefault(shapes, message) if (i, message.kind) == (party, kind) else message

    told = refused(CASES["sgd"], Changing(nodes_in(tmp_path), replay, answers=True))
    who = f"party {party} ({NAMES[party]})"
    assert f", {kind}: {kind} of {who} must be of the exchange that it was asked for, got another's" in told


@pytest.mark.parametrize("records", [[5], [1, 1], [*range(19), 9999]], ids=["one", "two", "outside"])
def test_a_node_answers_for_batches_of_the_experiment_alone(records, recorded):
    node = recorded[1].nodes[0]
    told = {"client": 0, "mark": "x", "server": recorded[1].session}
    asked = Message("partial", told, [np.array(records, np.int64), np.zeros((10, 1))])
    answer = unpack(node.answer(asked.pack()))
    assert answer.kind == "error"
    assert "records must be 20 or 427 of the 427, each once" in answer.values["sentence"]


def test_a_node_counts_right_predictions_on_all_records_alone(recorded):
    _, question, answer = next(one for one in relayed(recorded[1], "close") if len(one[1].arrays[0]) == 20)
    again = question._replace(values={**question.values, "counts": True})
    told = unpack(recorded[1].nodes[CLOSER].answer(again.pack()))
    assert len(told.arrays) == len(answer.arrays)


def test_keys_that_are_not_the_nodes_own_are_refused(tmp_path):
    def swap(i: int, message: Message) -> Message:
        if message.kind != "coded":
            return message
        forged = primitives.public_of(bytes([i + 1] * 32)).hex()
        return message._replace(values={**message.values, "public": forged})

    told = refused(CASES["sgd"], Changing(nodes_in(tmp_path), swap, answers=True))
    assert "key of party 1 (errors) must be the one it made" in told


def test_what_needs_less_than_everyone_or_shows_rows_is_refused(tmp_path):
    with pytest.raises(InvalidArgument, match=r"quorum must be 1.0 for data split by features, got 0.5"):
        federate(over_nodes(CASES["sgd"], quorum=0.5), Direct(nodes_in(tmp_path)))
    shows = tables(LOGISTIC, collection="one-step", reveal_rows=True)
    with pytest.raises(InvalidArgument, match='collection must be "two-step" in a federation'):
        federate(over_nodes(shows), Direct(nodes_in(tmp_path)))
    with pytest.raises(DataError, match="nodes must be the split's parties"):
        federate(over_nodes(CASES["sgd"]), Direct(nodes_in(tmp_path, ("means", "errors"))))


# Crashes


def test_a_node_that_is_started_again_goes_on(tmp_path, recorded):
    asked = []

    def restart(i: int, message: Message) -> Message:
        asked.append(message.kind)
        if message.kind == "block" and asked.count("block") % 5 == 0:  # between two questions of one exchange
            link.nodes[i] = Node({"name": NAMES[i]}, tmp_path / NAMES[i])
        return message

    link = Changing(nodes_in(tmp_path), restart)
    assert_same(federate(over_nodes(CASES["sgd"]), link), recorded[0])
    assert (tmp_path / "means" / f"run-{link.nodes[0].at.run.keys.run}" / "party.bin").stat().st_mode & 0o77 == 0


def test_a_server_that_is_started_again_goes_on(tmp_path, recorded):
    nodes, asked = nodes_in(tmp_path / "nodes"), []

    def lost(i: int, message: Message) -> Message | None:
        asked.append(message.kind)
        return None if message.kind == "close" and asked.count("close") == 6 else message

    with pytest.raises(ClientError, match="party 1 "):
        federate(over_nodes(CASES["sgd"]), Changing(nodes, lost), tmp_path / "run")
    again = federate(over_nodes(CASES["sgd"]), Direct(nodes), tmp_path / "run", resume=True)
    assert_same(again, recorded[0])
    assert again.least is None  # nobody can tell it


def _surveyed(i, one, **changes):
    survey = {**one.values["survey"], **changes} if one.kind == "hello" else {}
    return one._replace(values={**one.values, "survey": survey}) if one.kind == "hello" else one


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"layout": 3}, "layout of node 'means' must be everyone's columns and the closer, got 3"),
        ({"layout": [[[0], [1]], 2]}, "layout of node 'means' must be everyone's columns and the closer"),
        ({"names": None}, "names of node 'means' must be a list of texts, got None"),
        ({"made": "x"}, "made of node 'means' must be a table, got 'x'"),
    ],
)
def test_a_layout_that_a_node_tells_is_checked(changes, sentence, tmp_path):
    link = Changing(nodes_in(tmp_path), lambda i, one: _surveyed(i, one, **changes), answers=True)
    with pytest.raises(InvalidArgument, match=sentence):
        federate(over_nodes(CASES["sgd"]), link)


def test_a_run_s_name_is_no_path_at_a_party(tmp_path):
    told = []
    link = Changing(nodes_in(tmp_path / "nodes"), lambda i, one: one)
    tell = link.tell
    odd = lambda one: one._replace(values={**one.values, "run": "x/../../../escaped"})
    link.tell = lambda questions: (told.append(1), tell({i: odd(one) for i, one in questions.items()}))
    sentence = refused(CASES["sgd"], link)
    assert "run must be 16 digits of 0-9 and a-f, got 'x/../../../escaped'" in sentence
    assert told
    assert not list(tmp_path.rglob("escaped*"))
