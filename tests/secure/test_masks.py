"""Secure sums: equal to the plain sums whoever drops out, and every message that is not right is refused by name."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from helpers_sum import SESSION, SOURCES, conversation, terms
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpact.core.errors import InvalidArgument
from fedpact.secure import Client, Lattice, Server, WrongShare, shamir
from fedpact.secure.messages import Inbox

pytest.importorskip("cryptography")

STEPS = ("advertise", "share", "mask", "reveal")


def vectors(n: int = 9, d: int = 50, seed: int = 0):
    return np.random.default_rng(seed).uniform(-10, 10, (n, d))


def check(view, agreed, x, contributors):
    """Exact on the lattice, computed by Python's integers, and 1e-6 from the plain sum."""
    assert view.total.clients == tuple(contributors)
    rows = [agreed.clients.index(i) for i in contributors]
    step = agreed.lattice.step
    exact = [sum(round(float(v) / step) for v in x[rows, k]) for k in range(x.shape[1])]
    assert view.total.cells.tolist() == exact
    np.testing.assert_allclose(view.total.values, x[rows].sum(0), rtol=0, atol=1e-6)


@pytest.mark.parametrize("source", SOURCES)
def test_a_sum_without_dropouts(source):
    agreed, x = terms(), vectors()
    check(conversation(agreed, x, source=SOURCES[source]), agreed, x, range(9))


@pytest.mark.parametrize("gone", [(0, 1, 2), (3, 5, 8), (6, 7, 8)])
@pytest.mark.parametrize("step", STEPS)
def test_a_third_drops_out_at_any_step(step, gone):
    agreed, x = terms(), vectors()
    stayed = range(9) if step == "reveal" else [i for i in range(9) if i not in gone]
    check(conversation(agreed, x, {step: gone}), agreed, x, stayed)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_random_dropouts_over_all_steps(data):
    n = data.draw(st.integers(2, 13), "n")
    who = sorted(data.draw(st.sets(st.integers(0, 2**64 - 1), min_size=n, max_size=n), "who"))
    x = vectors(n, 3, data.draw(st.integers(0, 99)))
    agreed = terms(n, 3, clients=tuple(who))
    gone = data.draw(st.lists(st.sampled_from(who), unique=True, max_size=n - agreed.threshold), "gone")
    drops: dict[str, list[int]] = {}
    for i in gone:
        drops.setdefault(data.draw(st.sampled_from(STEPS)), []).append(i)
    late = drops.get("reveal", [])
    check(conversation(agreed, x, drops), agreed, x, [i for i in who if i not in gone or i in late])


def test_a_large_vector_over_several_chunks():
    agreed, x = terms(4, 150_000), vectors(4, 150_000)
    view = conversation(agreed, x, {"mask": [2]})
    np.testing.assert_allclose(view.total.values, x[[0, 1, 3]].sum(0), rtol=0, atol=1e-6)


@pytest.mark.parametrize("step", STEPS)
def test_too_many_dropouts_are_refused_with_the_numbers_and_more_may_come(step):
    agreed, x = terms(), vectors()
    with pytest.raises(
        InvalidArgument, match=rf"^clients that answered {step} must be at least 6 of 9 .*, got 5\. Wait"
    ):
        conversation(agreed, x, {step: [0, 2, 4, 6]})


def test_a_step_that_was_refused_goes_on_with_the_next_answer():
    agreed, server = terms(3, 2), Server(terms(3, 2))
    clients = [Client(agreed, i) for i in range(3)]
    server.add(clients[0].advertise())
    with pytest.raises(InvalidArgument, match="got 1"):
        server.roster()
    assert server.waiting == (1, 2)
    server.add(clients[2].advertise())
    assert [keys.sender for keys in server.roster().keys] == [0, 2]


# What a client refuses


@pytest.fixture
def masked():
    """All clients have sent their masked vectors, client 8 excepted."""
    return conversation(terms(), vectors(), {"mask": [8]}, until="reveal")


def request_of(view):
    return view.server._request


def test_a_client_that_is_told_to_reveal_both_shares_refuses(masked):
    request, client = request_of(masked), masked.clients[0]
    both = request._replace(dropped=(7, 8))
    with pytest.raises(
        InvalidArgument,
        match=r"^clients in Request \(U_3, U_2∖U_3\) must be survivors or dropped, never both, got \[7\]",
    ):
        client.reveal(both)
    answer = client.reveal(request)
    assert (set(answer.seeds), set(answer.keys)) == (set(range(8)), {8})


def test_nor_does_it_reveal_the_other_share_later(masked):
    request, client = request_of(masked), masked.clients[0]
    client.reveal(request)
    with pytest.raises(InvalidArgument, match=r"^step of client 0 must be none, it is done, got 'reveal'"):
        client.reveal(request._replace(survivors=tuple(range(7)), dropped=(7, 8)))
    assert client._held == {}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"survivors": tuple(range(7))}, r"clients in Request must be \[0, .* 8\], got \[0, 1, 2, 3, 4, 5, 6, 8\]"),
        ({"survivors": (*range(8), 7)}, r"clients in Request must be"),
        ({"survivors": tuple(range(8)), "dropped": (8, 77)}, r"clients in Request must be"),
        ({"survivors": tuple(range(1, 8)), "dropped": (0, 8)}, "survivors in the Request to client 0 must be it and"),
        ({"survivors": tuple(range(5)), "dropped": (5, 6, 7, 8)}, "survivors in Request must be at least 6 of 9"),
        ({"round": 2}, "round of Request to client 0 must be 3, got 2"),
        ({"session": bytes(16)}, "session of Request to client 0 must be 0001"),
    ],
)
def test_a_request_that_is_not_right(masked, changes, text):
    with pytest.raises(InvalidArgument, match=f"^{text}"):
        masked.clients[0].reveal(request_of(masked)._replace(**changes))


def keys_with(roster, place, **changes):
    keys = list(roster.keys)
    keys[place] = keys[place]._replace(**changes)
    return roster._replace(keys=tuple(keys))


def test_a_roster_that_is_not_right():
    view = conversation(terms(), vectors(), until="share")
    roster, client = view.server._roster, view.clients[4]
    refused = {
        "clients in Roster must be at least 6 of 9": roster._replace(keys=roster.keys[2:7]),
        "clients in Roster must be some of": keys_with(roster, 8, sender=77),
        "clients in Roster must be .*each once": roster._replace(keys=(*roster.keys, roster.keys[0])),
        "Roster's keys of client 4 must be its own": keys_with(roster, 4, masking=bytes(range(32))),
        "keys of client 2 must be two of 32 bytes": keys_with(roster, 2, sealing=b"x"),
        "public keys in Roster must be distinct": keys_with(roster, 2, sealing=roster.keys[4].sealing),
        "round of Keys of client 1 in Roster must be 3, got 2": keys_with(roster, 1, round=2),
        "seal key of client 6 must be a point of large order": keys_with(roster, 6, sealing=bytes(32)),
        "message to client 4 must be Roster, got 'Keys'": roster.keys[0],
    }
    for text, message in refused.items():
        with pytest.raises(InvalidArgument, match=f"^{text}"):
            client.share(message)
    assert client.share(roster).sender == 4


def test_an_inbox_that_is_not_right():
    view = conversation(terms(), vectors(), until="mask")
    old = conversation(terms(), vectors(), until="mask")
    client, x, boxes = view.clients[4], vectors()[4], view.sent["share"]
    sealed = {i: boxes[i].sealed[4] for i in boxes if i != 4}
    inbox = inbox_of(4, sealed)
    flipped = sealed[1][:40] + bytes([sealed[1][40] ^ 1]) + sealed[1][41:]
    refused = {
        "Shares of client 1 for client 4 must be sealed by it": {**sealed, 1: flipped},
        "Shares of client 2 for client 4 must be sealed by it": {**sealed, 2: sealed[3]},  # another's
        "Shares of client 3 for client 4 must be sealed by it": {**sealed, 3: old.sent["share"][3].sealed[4]},
        "Shares of client 5 for client 4 must be sealed by it": {**sealed, 5: boxes[5].sealed[6]},  # to another
        "Shares of client 1 for client 4 must be 94 bytes, got 93": {**sealed, 1: sealed[1][:-1]},
        r"senders in the Inbox of client 4 must be .* got \[4\]": {**sealed, 4: sealed[1]},
        "clients in the Inbox of client 4, itself included, must be at least 6 of 9": dict(list(sealed.items())[:4]),
    }
    for text, content in refused.items():
        with pytest.raises(InvalidArgument, match=f"^{text}"):
            client.mask(inbox_of(4, content), x)
    with pytest.raises(InvalidArgument, match=r"^receiver of Inbox must be 4, got 5"):
        client.mask(inbox._replace(receiver=5), x)
    with pytest.raises(InvalidArgument, match=r"^values\[49\] must be finite and at most 10"):
        client.mask(inbox, np.append(x[:49], 11.0))
    with pytest.raises(InvalidArgument, match=r"^values \(d\) must be a vector of 50 numbers, got '49'"):
        client.mask(inbox, x[:49])
    assert client.mask(inbox, x).sender == 4


def inbox_of(receiver, sealed):
    return Inbox(SESSION, 3, receiver, sealed)


def test_shares_of_another_roster_do_not_open():
    """A server that shows two clients different rosters is found out by whoever opens a share."""
    agreed = terms(3, 2)
    clients = {i: Client(agreed, i) for i in range(3)}
    server = Server(agreed)
    for client in clients.values():
        server.add(client.advertise())
    roster = server.roster()
    stranger = Client(agreed, 2).advertise()
    other = roster._replace(keys=(*roster.keys[:2], stranger))
    sent = {0: clients[0].share(roster), 1: clients[1].share(other)}
    with pytest.raises(InvalidArgument, match=r"^Shares of client 1 for client 0 must be sealed by it for this sum"):
        clients[0].mask(inbox_of(0, {1: sent[1].sealed[0]}), np.zeros(2))


def test_steps_are_taken_in_order_and_once():
    client, server = Client(terms(), 3), Server(terms())
    with pytest.raises(InvalidArgument, match=r"^step of client 3 must be advertise, got 'share'"):
        client.share(None)
    client.advertise()
    with pytest.raises(InvalidArgument, match=r"^step of client 3 must be share, got 'advertise'"):
        client.advertise()
    for call in (server.inboxes, server.request, server.total):
        with pytest.raises(InvalidArgument, match=r"^step of the server must be advertise"):
            call()


# What the server refuses


MESSAGE = {"advertise": "Keys", "share": "Shares", "mask": "Masked", "reveal": "Reveal"}


@pytest.mark.parametrize("step", STEPS)
def test_messages_that_are_not_of_this_step_sum_or_client(step):
    agreed, x = terms(), vectors()
    full = conversation(agreed, x)
    other = conversation(terms(round=2), x).sent[step]
    away = conversation(terms(session=bytes(16)), x).sent[step]
    view = conversation(agreed, x, {step: [0]}, until="never" if step == "reveal" else STEPS[STEPS.index(step) + 1])
    server, kind = view.server, MESSAGE[step]
    server._at = STEPS.index(step)  # as if it were still open
    mine = full.sent[step][0]
    later = full.sent[STEPS[(STEPS.index(step) + 1) % 4]][0]
    refused = {
        f"round of {kind} from client 0 must be 3, got 2": other[0],
        f"session of {kind} from client 0 must be 0001": away[0],
        f"{kind} from client 1 must be sent once, got 'another'": view.sent[step][1],
        f"sender of {kind} must be one of the step's clients": mine._replace(sender=99),
        f"message from client 0 must be {kind}, got": later,
        f"message from client None must be {kind}, got 'NoneType'": None,
    }
    for text, message in refused.items():
        with pytest.raises(InvalidArgument, match=f"^{text}"):
            server.add(message)


def test_messages_of_a_wrong_size(masked):
    view = conversation(terms(), vectors(), until="mask")
    shares = view.sent["share"][0]
    masks = conversation(terms(), vectors(), until="reveal").sent["mask"][0]
    reveal = masked.clients[0].reveal(request_of(masked))
    fresh, after = (conversation(terms(), vectors(), until=step).server for step in ("share", "mask"))
    refused = [
        (fresh, shares._replace(commitment=b""), "commitment in Shares from client 0 must be 32 bytes"),
        (fresh, shares._replace(sealed={1: b""}), r"receivers in Shares from client 0 must be \[1, 2"),
        (fresh, shares._replace(sealed={**shares.sealed, 3: b""}), "Shares from client 0 must be 94 bytes a receiver"),
        (after, masks._replace(words=masks.words[:-1]), r"words in Masked from client 0 must be 50 .*shape \(49,\)"),
        (after, masks._replace(words=masks.words.view(np.int64)), "words in Masked from client 0 must be 50 unsigned"),
        (after, masks._replace(words=None), "words in Masked from client 0 must be 50 .*NoneType"),
        (masked.server, reveal._replace(keys={}), r"keys in Reveal from client 0 must be of \[8\], got \[\]"),
        (masked.server, reveal._replace(keys={8: b""}), "keys in Reveal from client 0 must be shares of 33 bytes"),
    ]
    for server, message, text in refused:
        with pytest.raises(InvalidArgument, match=f"^{text}"):
            server.add(message)


@pytest.mark.parametrize("field", ["seeds", "keys"])
@pytest.mark.parametrize("answers", [6, 8])
def test_a_wrong_share_stops_the_sum(masked, field, answers):
    """With six answers the commitment or the public key tells, with eight the polynomial does."""
    request = request_of(masked)
    for i in range(answers):
        answer = masked.clients[i].reveal(request)
        if i == 2:
            owner = 5 if field == "seeds" else 8
            answer = answer._replace(**{field: {**getattr(answer, field), owner: bytes(31) + b"\x01\x02"}})
        masked.server.add(answer)
    told = {"seeds": r"seed of client 5 \(b\)", "keys": r"mask key of client 8 \(s\)"}[field]
    how = "must be" if answers == 6 else "could not be joined: shares must be of one secret"
    with pytest.raises(WrongShare, match=f"^{told} {how}") as refused:
        masked.server.total()
    assert refused.value.owner == (5 if field == "seeds" else 8)


def test_a_vector_that_was_changed_on_its_way_stops_the_sum():
    view = conversation(terms(), vectors(), until="reveal")
    view.server._sum += np.random.default_rng(0).integers(0, 2**64, 50, dtype=np.uint64)
    for client in view.clients.values():
        view.server.add(client.reveal(request_of(view)))
    with pytest.raises(InvalidArgument, match=r"^sum must be of 9 vectors of the lattice, got .* beyond"):
        view.server.total()


# Terms


@pytest.mark.parametrize(("n", "t"), [(2, 2), (3, 2), (4, 3), (9, 6), (10, 7), (100, 67)])
def test_the_threshold_lets_a_third_drop_out(n, t):
    assert terms(n).threshold == t > n / 2
    assert n - t <= n / 3 < n - t + 1 or n == 2


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"session": b"short"}, "session must be 16 to 64 bytes"),
        ({"round": -1}, "round must be an integer of at least 0"),
        ({"clients": [0, 1]}, "clients must be a tuple"),
        ({"clients": (1, 0)}, "clients must be two or more distinct integers"),
        ({"clients": (0, 0)}, "clients must be two or more distinct integers"),
        ({"clients": (0,)}, "clients must be two or more distinct integers"),
        ({"dimension": 0}, r"dimension \(d\) must be an integer of at least 1"),
        ({"lattice": Lattice(1.0, 8)}, "lattice must be one for at least 9 clients, got 8"),
        ({"threshold": 4}, r"threshold \(t\) must be above 9/2 and at most 9, got 4"),
        ({"threshold": 10}, r"threshold \(t\) must be above 9/2 and at most 9, got 10"),
    ],
)
def test_bad_terms(changes, text):
    with pytest.raises(InvalidArgument, match=f"^{text}"):
        terms(**changes)


def test_other_terms_have_another_digest():
    changes = [
        {},
        {"round": 4},
        {"session": bytes(16)},
        {"threshold": 7},
        {"dimension": 51},
        {"lattice": Lattice(9.0, 9)},
    ]
    assert len({terms(**change).digest for change in changes}) == len(changes)


def test_a_stranger_is_no_client():
    with pytest.raises(InvalidArgument, match=r"^number must be one of the sum's clients"):
        Client(terms(), 9)


def test_without_cryptography_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography", None)  # which makes its import fail
    with pytest.raises(InvalidArgument, match=r"^cryptography must be installed.* pip install 'fedpact\[secure\]'$"):
        Server(terms())


def test_fewer_reveals_than_the_threshold_cannot_be_joined(masked):
    request = request_of(masked)
    shares = {i + 1: masked.clients[i].reveal(request).seeds[0] for i in range(5)}
    with pytest.raises(InvalidArgument, match="at least 6, got 5"):
        shamir.join(shares, 6)
