"""What crosses in a secure federation: keys, sealed shares, words that tell nothing, and no number of anybody's."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from helpers_masked import Watched, nodes, run, shared_programs, values
from scipy import stats

from fedpact.core.wire import Message, unpack
from fedpact.flower import masked
from fedpact.flower.links import Direct
from fedpact.flower.masked import Rules, Summands, Sums
from fedpact.flower.run_at_node import RunAtNode
from fedpact.secure import masks, primitives

pytest.importorskip("cryptography")

CERTAIN = 1e-12


# Everything that nodes send in a run


@pytest.fixture
def uploads(monkeypatch):
    """Every number that nodes computed for a round, as it was."""
    found: list[np.ndarray] = []
    stepped = RunAtNode._stepped

    def noticed(self, message):
        body = stepped(self, message)
        found.extend(np.asarray(a) for a in unpack(body).arrays)
        return body

    monkeypatch.setattr(RunAtNode, "__init__", shared_programs)
    monkeypatch.setattr(RunAtNode, "_stepped", noticed)
    return found


def crossed(folder, engine):
    link = Direct(nodes(folder))
    link.record = True
    run(folder, values({"name": "scaffold", "batch": 20}, engine, rounds=2), link)
    return link.sent[1::2]


def times(numbers, contents):
    """How many of these numbers are in these bytes, as doubles or as cells of the lattice."""
    lattice = masked.Rules("", 1e6).coding("step").lattice(6)
    whole = b"".join(contents)
    as_cells = lattice.encode(numbers)
    return sum(one.tobytes() in whole or cell.tobytes() in whole for one, cell in zip(numbers, as_cells, strict=True))


def test_no_number_of_an_upload_crosses(tmp_path, uploads):
    sent = crossed(tmp_path, {"secure": True})
    numbers = np.concatenate([a.ravel() for a in uploads])
    numbers = numbers[numbers != 0]
    assert len(numbers) > 100
    assert times(numbers, sent) == 0
    kinds = {"step", "measure", "join", "mask_shares", "mask_words", "mask_reveal"}
    messages = [unpack(content) for content in sent if unpack(content).kind in kinds]
    for message in messages:
        wanted = [np.dtype(np.uint64)] if message.kind == "mask_words" else []
        assert [a.dtype for a in message.arrays] == wanted, message.kind
        assert not any(isinstance(value, float) for value in message.values.values())
    fields = {kind: set().union(*(m.values for m in messages if m.kind == kind)) for kind in kinds}
    masks_of = {"finite", "keys", "commitment", "sealed"}
    assert fields["step"] == {"client", "round", "based", "version", "digest", "notes", "own", *masks_of} - {"keys"}
    assert fields["measure"] == {"client", "round", "version", *masks_of}
    assert fields["mask_words"] == set()


def test_without_masks_all_of_them_do(tmp_path, uploads):
    sent = crossed(tmp_path, {})
    numbers = np.concatenate([a.ravel() for a in uploads])
    assert times(numbers, sent) == len(numbers)


def test_what_the_server_knows_a_state_by_is_keyed(tmp_path, uploads):
    """An open digest of a state would let the server try what it might be."""
    parties = nodes(tmp_path)
    link = Watched(parties)
    link.record = True
    run(tmp_path, values({"name": "scaffold", "batch": 20}, {"secure": True}, rounds=1), link)
    (path,) = parties[0].folder.glob("run-*/000000-000000001.bin")
    own = path.read_bytes().split(b"\n", 1)[0].split()[-1]
    assert not any(own in content for content in link.sent)


# Two runs with different data and equal sums

N, D = 5, 4000


class Party:
    """A node that does nothing but take part in sums with a vector it was given."""

    def __init__(self, number, vector):
        self.name, self.number, self.vector = str(number), number, vector
        self.summands = Summands()

    def answer(self, content):
        message = unpack(content)
        if message.kind != "step":
            return self.summands.answer(message)
        told = self.summands.put(Rules("run", 20.0, 2 / 3), "step", message, self.number, [self.vector])
        return Message("step", told).pack()


class Seen(Watched):
    """Remembers the words as they come."""

    def __init__(self, parties):
        super().__init__(parties)
        self.words = {}

    def answered(self, i, kind, answer):
        if kind == "mask_words":
            self.words[i] = answer.arrays[0].copy()
        return answer


def data_sets():
    """Equal sums, different summands."""
    rng = np.random.default_rng(0)
    one = np.round(rng.uniform(-10, 10, (N, D)) * 2**20) / 2**20
    moved = np.round(rng.normal(3, 1, (N, D)) * 2**20) / 2**20 * np.array([[1], [0], [1], [0], [0]])
    return one, one + moved - np.roll(moved, 1, axis=0)


def one_sum(x, link_of=Seen):
    link = link_of([Party(i, x[i]) for i in range(N)])
    started = Sums(link, Rules("run", 20.0, 2 / 3), 1, 1).start("step", 4, range(N), [np.zeros(D)])
    questions = {i: Message("step", {"round": 4}) for i in range(N)}
    for i, answer in started.ask(questions, 1, N, 1).items():
        assert started.add(i, answer)
    (total,), who = started.total()
    np.testing.assert_allclose(total, x[who].sum(axis=0), rtol=0, atol=1e-12)
    return link, started


def views(x, seed, monkeypatch):
    """The words that crossed, and what the server can make of them: it takes the self masks off."""
    with monkeypatch.context() as patch:
        patch.setattr(masked.os, "urandom", np.random.default_rng(seed).bytes)  # so that verdicts repeat
        link, started = one_sum(x)
    server = started._server
    bare = {}
    for i, words in link.words.items():
        bare[i] = words.copy()
        key = masks._seed_key(server._joined("seeds", i), server._context, i)
        primitives.add_stream(bare[i], key, -1)
    sums = (sum(bare[i] for i in some) for size in range(1, N) for some in itertools.combinations(bare, size))
    return [*link.words.values(), *sums]


def verdicts(monkeypatch):
    """p of two-sample Kolmogorov-Smirnov for every vector of words, and for every sum but that of all."""
    one, other = data_sets()
    np.testing.assert_array_equal(one.sum(0), other.sum(0))
    pairs = zip(views(one, 1, monkeypatch), views(other, 2, monkeypatch), strict=True)
    return [stats.ks_2samp(a, b).pvalue for a, b in pairs]


def test_the_servers_views_cannot_be_told_apart(monkeypatch):
    p = verdicts(monkeypatch)
    assert min(p) * len(p) > 0.01  # Bonferroni


def test_with_the_masks_off_they_can(monkeypatch):
    monkeypatch.setattr(primitives, "add_stream", lambda *_: None)
    p = verdicts(monkeypatch)
    assert min(p[:N]) < CERTAIN
    assert min(p[N:]) < CERTAIN


# No masks twice


def test_the_terms_bind_run_round_and_purpose():
    told = {"nonce": "00" * 16, "clients": [0, 1, 2]}
    base = Rules("a").terms("step", 1, told, 5)
    others = [
        Rules("b").terms("step", 1, told, 5),
        Rules("a").terms("measure", 1, told, 5),
        Rules("a").terms("step", 2, told, 5),
        Rules("a").terms("step", 1, {**told, "nonce": "01" * 16}, 5),
        Rules("a").terms("step", 1, {**told, "clients": [0, 1, 3]}, 5),
    ]
    assert len({base.digest, *(terms.digest for terms in others)}) == 6


def test_a_vector_under_two_sums_has_other_words():
    x, _ = data_sets()
    (a, _), (b, _) = one_sum(x), one_sum(x)
    assert np.mean(a.words[0] == b.words[0]) < 0.01


def test_keys_that_were_sent_ahead_serve_once():
    summands, rules = Summands(), Rules("run", 20.0)
    party = [Party(i, np.ones(3)) for i in range(2)]
    party[0].summands = summands
    link = Seen(party)
    sums = Sums(link, Rules("run", 20.0, 2 / 3), 1, 1)
    invitations = []

    def again():
        one = sums.start("step", 0, range(2), [np.zeros(3)])
        invitations.append(one._told)
        for i, answer in one.ask({i: Message("step", {"round": 0}) for i in range(2)}, 1, 2, 1).items():
            one.add(i, answer)
        return one.total()

    again(), again()
    assert [("sealing" in told) for told in invitations] == [False, True]
    with pytest.raises(masked.KeysLost, match=r"^keys in an invitation must be those this node sent ahead, got others"):
        summands.put(rules, "step", Message("step", {"round": 1, "sum": invitations[1]}), 0, [np.ones(3)])


def test_the_same_question_has_the_same_answer():
    """A transport may deliver twice what it did not see the answer to."""

    class Twice(Seen):
        def _answer(self, i, message):
            first = super()._answer(i, message)
            again = super()._answer(i, message)
            assert (first.values, len(first.arrays)) == (again.values, len(again.arrays))
            return again

    one_sum(data_sets()[0], Twice)
