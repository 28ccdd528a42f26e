"""Common records of several parties: right on random sets, no other id in the messages, bad messages refused."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from helpers_sum import SOURCES

from fedpact.core.errors import DataError, InvalidArgument
from fedpact.data import align
from fedpact.secure import psi
from fedpact.secure.psi import Party, intersect, match

pytest.importorskip("cryptography")

SESSION = bytes(range(16))


def random_ids(rng, parties, most=60):
    """Some sets of different sizes, each in an order of its own."""
    sizes = rng.integers(1, most, parties)
    return {f"party {i}": [f"id{k}" for k in rng.permutation(most)[:size]] for i, size in enumerate(sizes)}


@pytest.mark.parametrize("parties", [2, 3, 4])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_rows_are_those_of_the_ids_that_all_have(parties, seed):
    ids = random_ids(np.random.default_rng([seed, parties]), parties)
    rows = intersect(ids)
    found = [[ids[name][row] for row in rows[name]] for name in ids]
    assert all(own == found[0] for own in found)
    assert sorted(found[0]) == sorted(set.intersection(*map(set, ids.values())))
    closer = "party 1"
    rows = intersect(ids, closer)
    assert rows[closer] == sorted(rows[closer])
    assert all([ids[name][row] for row in rows[name]] == [ids[closer][row] for row in rows[closer]] for name in ids)


def test_nothing_in_common():
    assert intersect({"a": ["1", "2"], "b": ["3"]}, "a") == {"a": [], "b": []}


def test_the_common_order_is_another_every_time():
    ids = [str(k) for k in range(40)]
    assert len({tuple(intersect({"a": ids, "b": ids})["a"]) for _ in range(3)}) == 3


def test_it_finds_the_records_that_align_joins(tmp_path):
    rng = np.random.default_rng(3)
    files, ids = {}, {}
    for name, column in (("clinic", "outcome"), ("lab", "test"), ("imaging", "size")):
        ids[name] = [f"P{k:03d}" for k in rng.permutation(40)[:32]]
        rows = [f"{one},{rng.integers(2) if column == 'outcome' else rng.normal()}" for one in ids[name]]
        files[name] = tmp_path / f"{name}.csv"
        files[name].write_text("\n".join([f"id,{column}", *rows]) + "\n")
    federation = align(files, on="id", target="outcome", unmatched="drop", scale="none")
    found = intersect(ids, closer="clinic")
    assert all(len(rows) == federation.unmatched[name]["kept"] for name, rows in found.items())
    table = {name: path.read_text().splitlines()[1:] for name, path in files.items()}
    x = [[float(table[name][row].split(",")[1]) for row in found[name]] for name in ("lab", "imaging")]
    np.testing.assert_array_equal(federation.dataset.x, np.transpose(x))


def messages_of(ids, source=None):
    """All messages of an alignment, and the parties."""
    names = list(ids)
    parties = {
        n: Party(SESSION, n, names, own, *([source(i)] if source else [])) for i, (n, own) in enumerate(ids.items())
    }
    said, last = [], []
    for i, name in enumerate(names):
        said.append(parties[name].begin())
        for other in names[i + 1 :] + names[:i]:
            said.append(parties[other].blind(said[-1]))
        last.append(said[-1])
    return parties, said, last


@pytest.mark.parametrize("source", SOURCES)
def test_no_id_and_no_hash_of_one_is_in_the_messages(source):
    ids = {"a": ["anna", "bert", "carl"], "b": ["carl", "dora"], "c": ["emil", "carl", "anna"]}
    parties, said, last = messages_of(ids, SOURCES[source])
    places = match(SESSION, list(ids), last).values()
    wire = b"".join(m.points for m in said) + b"".join(np.asarray(p.places).tobytes() for p in places)
    for one in {one for own in ids.values() for one in own}:
        text = one.encode()
        for name in ("md5", "sha1", "sha256", "sha512", "blake2b"):
            hashed = hashlib.new(name, text).digest()
            assert hashed[:16] not in wire
            assert hashed.hex().encode() not in wire
        assert text not in wire
        assert parties["a"]._hashed(one).public_numbers().x.to_bytes(32, "big") not in wire  # H(id) without a key
    sets = [set(psi._cut(m.points)) for m in said]
    for i, m in enumerate(said):
        for j in range(i):  # points agree only where both sets have been with everyone
            common = sets[i] & sets[j]
            assert bool(common) == (len(m.path) == len(said[j].path) == 3)
    again = messages_of(ids)[1]
    assert not sets[0] & set(psi._cut(again[0].points))


def test_points_are_products_on_the_curve():
    """By arithmetic of our own: the x of a·b·H is that of b·a·H, and of the affine formulas."""
    p = 2**256 - 2**224 + 2**192 + 2**96 - 1
    party = Party(SESSION, "a", ["a", "b"], ["one"])
    n = party._hashed("one").public_numbers()
    k = party._key.private_numbers().private_value

    def add(u, v):
        if u is None or v is None:
            return u or v
        if u[0] == v[0] and (u[1] + v[1]) % p == 0:
            return None
        slope = (3 * u[0] ** 2 - 3) * pow(2 * u[1], -1, p) if u == v else (v[1] - u[1]) * pow(v[0] - u[0], -1, p)
        x = (slope**2 - u[0] - v[0]) % p
        return x, (slope * (u[0] - x) - u[1]) % p

    total, double = None, (n.x, n.y)
    for bit in range(256):
        total = add(total, double) if k >> bit & 1 else total
        double = add(double, double)
    assert party.begin().points == total[0].to_bytes(32, "big")


def test_sets_that_are_not_right():
    parties, said, last = messages_of({"a": ["1", "2", "3"], "b": ["2", "4"]})
    fresh, mine = Party(SESSION, "b", ["a", "b"], ["2"]), said[0]
    point = mine.points
    off = b"\xff" * 32
    refused = {
        "session of the set of 'a' must be 0001": mine._replace(session=bytes(16)),
        "path of the set of 'a' must be its owner": mine._replace(path=("b",)),
        "path of the set of 'c' must be its owner": mine._replace(owner="c", path=("c",)),
        "path of the set of 'b' must be one without b": said[2],
        "set of 'a' must be points of 32 bytes, got '95 bytes'": mine._replace(points=point[:-1]),
        "set of 'a' must be points of 32 bytes, got '0 bytes'": mine._replace(points=b""),
        "set of 'a' must be sorted, with each point once": mine._replace(points=point[:32] * 2),
        "set of 'a' must be sorted": mine._replace(points=point[32:] + point[:32]),
        "point 3 of the set of 'a' must be the x of a point of P-256, got ffff": mine._replace(points=point + off),
    }
    for text, message in refused.items():
        with pytest.raises(InvalidArgument, match=f"^{text}"):
            fresh.blind(message)
    fresh.blind(mine)
    with pytest.raises(InvalidArgument, match=r"^path of the set of 'a' must be one without b"):
        fresh.blind(mine)  # a second time, for another permutation
    with pytest.raises(InvalidArgument, match=r"^begin of a must be called once"):
        parties["a"].begin()
    with pytest.raises(InvalidArgument, match=r"^path of the set of 'a' must be all parties"):
        match(SESSION, ["a", "b"], [said[0], last[1]])
    with pytest.raises(InvalidArgument, match=r"^sets must be one of each of a, b"):
        match(SESSION, ["a", "b"], [last[0], last[0]])


def test_places_that_are_not_right():
    parties, _, last = messages_of({"a": ["1", "2", "3"], "b": ["2", "4"]})
    places = match(SESSION, ["a", "b"], last)["a"]
    b, a = parties["b"], parties["a"]
    refused = {
        "session of Places of 'a' must be 0001": places._replace(session=bytes(16)),
        "path of Places of 'a' must be one that ends with b": places._replace(path=("a",)),
        "Places of 'a' must be distinct, below 3": places._replace(places=[3]),
        r"Places of 'a' must be distinct, below 3, got array\(\[1, 1\]\)": places._replace(places=[1, 1]),
    }
    for text, message in refused.items():
        with pytest.raises(InvalidArgument, match=f"^{text}"):
            b.unwind(message)
    back = b.unwind(places)
    with pytest.raises(InvalidArgument, match=r"^Places of 'a' must be sent to b once"):
        b.unwind(places)
    with pytest.raises(InvalidArgument, match=r"^order of a must be asked for after finish"):
        a.order()
    assert a.finish(back) == [1]
    with pytest.raises(InvalidArgument, match=r"^Order of 'a' must be a permutation of 1 records"):
        a.arrange(a.order()._replace(places=np.asarray([0, 1])))


def test_ids_that_occur_twice_are_refused():
    with pytest.raises(DataError, match=r"^id 'x' of 'b' must occur once, got it in rows 0 and 2. Remove one of them"):
        intersect({"a": ["x"], "b": ["x", "y", "x"]})


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((b"", "a", ["a", "b"], ["1"]), "session must be 16 to 64 bytes"),
        ((SESSION, "a", ["a"], ["1"]), "parties must be two or more distinct names"),
        ((SESSION, "c", ["a", "b"], ["1"]), "name must be one of a, b, got 'c'"),
        ((SESSION, "a", ["a", "b"], []), "ids of 'a' must be texts that are not empty, at least one"),
        ((SESSION, "a", ["a", "b"], ["1", ""]), "ids of 'a' must be texts"),
        ((SESSION, "a", ["a", "b"], [1]), "ids of 'a' must be texts"),
        ((SESSION, "a", ["a", "b"], "12"), "ids of 'a' must be texts"),
    ],
)
def test_bad_arguments(arguments, text):
    with pytest.raises(InvalidArgument, match=f"^{text}"):
        Party(*arguments)


def test_the_closer_is_a_party():
    with pytest.raises(InvalidArgument, match=r"^closer must be one of a, b, got 'c'"):
        intersect({"a": ["1"], "b": ["1"]}, "c")
