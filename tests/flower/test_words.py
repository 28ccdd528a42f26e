"""A secure run's categories and classes are those of a plain one, and no answer of a node has one of them."""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace

import numpy as np
import pytest
from helpers_masked import Watched
from helpers_nodes import same_history

from fedpact.core.errors import ClientError, DataError, InvalidArgument
from fedpact.core.wire import Message, unpack
from fedpact.flower import node as at_node
from fedpact.flower import words as both
from fedpact.flower.links import Direct
from fedpact.flower.node import Node
from fedpact.flower.server import agree, federate, greet
from fedpact.secure import primitives
from fedpact.secure.vocabulary import Table

pytest.importorskip("cryptography")

#: By site what its cells hold: of two columns of categories, and of the target.
CELLS = {
    "east": (("alder-tree", "beech-tree"), ("rain-fall",), ("recovered", "still-sick")),
    "north": (("beech-tree", "süßkirsche 🌳"), ("snow-fall", "rain-fall"), ("recovered", "has-died-of-it")),
    "west": (("zirbe-baum",), ("rain-fall",), ("still-sick", "recovered")),
}
SUM = ["mask_words", "mask_reveal"]


def written(folder, cells=CELLS, rows=24):
    folder.mkdir(exist_ok=True)
    for k, (site, (trees, skies, ends)) in enumerate(cells.items()):
        lines = [
            f"{i * 7 % 50 + k},{trees[i % len(trees)]},{skies[i // 2 % len(skies)]},{ends[i // 3 % len(ends)]}"
            for i in range(max(rows, len(trees)))
        ]
        (folder / f"{site}.csv").write_text("\n".join(["age,tree,sky,end", *lines]) + "\n", encoding="utf-8")
    return folder


def values(secure, data=()):
    return {
        "data": {"target": "end", "categorical": ["tree", "sky"], **dict(data)},
        "problem": {"name": "logistic", "l2": 1e-2},
        "algorithm": {"name": "fedavg"},
        "run": {"rounds": 2, "seed": 0, "engine": {"name": "flower", "notes": True, "secure": secure}},
    }


def members(folder, secure, cells=CELLS):
    return [Node({"name": s, "csv": str(folder / f"{s}.csv")}, folder / f"state-{secure}" / s) for s in cells]


def agreed(folder, secure, data=(), cells=CELLS):
    """The schema, and the link with all that crossed it."""
    link = Watched(members(folder, secure, cells))
    link.record = True
    asked = values(secure, data)
    found = greet(asked, link, 60)
    return agree(asked, link, [found[i]["survey"] for i in range(len(cells))], 60).schema, link


def words_in(cells=CELLS):
    return sorted({word for parts in cells.values() for part in parts for word in part})


def seen(answers, cells=CELLS):
    """Which of the nodes' words are in these answers: spelt, or by the numbers that a table has for them.

    Words of three letters are in a megabyte of masks by chance: these have eight or more.
    """
    assert min(map(len, words_in(cells))) >= 8
    table = Table(bytes(16), 1, 258)
    found = []
    for word in words_in(cells):
        x = word.encode()
        # the bytes in threes, after the two that say whose word it is; the first may have them before it
        spelt = [table.of([bytes(2) + x])[0][5:7].astype(kind).tobytes() for kind in (np.uint64, np.float64)]
        if any(form in answer for form in (x, json.dumps(word)[1:-1].encode(), *spelt) for answer in answers):
            found.append(word)
    return found


@pytest.mark.parametrize("data", [{}, {"coding": "onehot"}, {"classes": ["recovered", "still-sick", "has-died-of-it"]}])
def test_the_schema_is_the_plain_one(tmp_path, data):
    folder = written(tmp_path / "files")
    (plain, _), (secure, link) = (agreed(folder, on, data) for on in (False, True))
    assert secure.columns == plain.columns
    assert secure.classes == plain.classes
    assert secure.target == plain.target
    np.testing.assert_allclose(secure.shift, plain.shift, rtol=1e-9)
    np.testing.assert_allclose(secure.scale, plain.scale, rtol=1e-9)
    assert link.asks[:6] == ["hello", "vocabulary", "mask_shares", *SUM, "moments"]
    if not data:
        assert plain.columns[1].categories == ("alder-tree", "beech-tree", "süßkirsche 🌳", "zirbe-baum")
        assert plain.classes == ("has-died-of-it", "recovered", "still-sick")


def test_runs_are_the_plain_ones(tmp_path):
    cells = {**CELLS, "north": (*CELLS["north"][:2], ("still-sick", "recovered"))}
    folder, data = written(tmp_path / "files", cells), {"coding": "onehot"}
    plain, secure = (federate(values(on, data), Direct(members(folder, on))) for on in (False, True))
    same_history(plain, secure, 1e-9)
    assert plain.model.schema.columns == secure.model.schema.columns
    assert plain.model.schema.classes == secure.model.schema.classes == ("recovered", "still-sick")


@pytest.mark.parametrize(
    ("ends", "classes"),
    [
        ((("1", "0"), ("2.0", "1"), ("2", "1.0")), ("0", "1", "2")),
        ((tuple(f"{k}.5" for k in range(15)), tuple(f"{k}.5" for k in range(10, 24)), ("3.5",)), ()),  # 24 over all
        ((tuple(f"{k}.5" for k in range(24)), ("1.5",), ("1.5",)), ()),  # many at one node: nobody is asked
    ],
)
def test_numbers_are_classes_if_they_are_few_over_all_nodes(tmp_path, ends, classes):
    cells = {site: (*parts[:2], end) for (site, parts), end in zip(CELLS.items(), ends, strict=True)}
    folder = written(tmp_path / "files", cells, rows=80)
    (plain, _), (secure, link) = (agreed(folder, on, cells=cells) for on in (False, True))
    assert [float(c) for c in secure.classes] == [float(c) for c in classes]
    assert (secure.classes, secure.columns) == (plain.classes, plain.columns)
    asked = [unpack(content) for content in link.sent[::2]]
    assert {m.values["target"] for m in asked if m.kind == "vocabulary"} == {ends[0][-1] != "23.5"}


def test_no_answer_of_a_node_has_a_word(tmp_path, monkeypatch):
    folder = written(tmp_path / "files")
    _, link = agreed(folder, True)
    assert seen(link.sent[1::2]) == []
    surveys = [unpack(answer).values["survey"] for answer in link.sent[1:6:2]]
    assert [s["categories"] for s in surveys] == [{"tree": [], "sky": []}] * 3
    assert [s["values"] for s in surveys] == [[]] * 3
    _, link = agreed(folder, False)
    assert seen(link.sent[1::2]) == words_in()
    monkeypatch.setattr(primitives, "add_stream", lambda total, key, sign: None)
    _, link = agreed(folder, True)
    assert seen(link.sent[1::2]) == words_in()  # without masks they would be found


def test_what_the_server_learns_does_not_depend_on_who_has_which(tmp_path, monkeypatch):
    """Of the same words at as many nodes each, the sums are the same to the last number."""
    totals, of = [], Table.words

    def watched(self, total, clients):
        totals.append(total)
        return of(self, total, clients)

    monkeypatch.setattr(Table, "words", watched)
    monkeypatch.setattr(both, "os", SimpleNamespace(urandom=bytes))  # the same salts
    turned = dict(zip(CELLS, [CELLS["west"], CELLS["east"], CELLS["north"]], strict=True))
    for name, cells in (("a", CELLS), ("b", turned)):
        agreed(written(tmp_path / name, cells), True, cells=cells)
    np.testing.assert_array_equal(*totals)


def test_what_is_listed_is_not_asked_for(tmp_path, caplog):
    caplog.set_level(logging.INFO, "fedpact")
    folder = written(tmp_path / "files")
    lists = {
        "categories": {"tree": [w for w in words_in() if "-tree" in w or "z" in w or "🌳" in w]},
        "classes": ["recovered", "still-sick", "has-died-of-it"],
        "scale": "none",
    }
    _, link = agreed(folder, True, {**lists, "categorical": [], "drop": ["sky"]})
    assert link.asks == ["hello", "coded"]
    _, link = agreed(folder, True, {**lists, "categorical": ["sky"]})
    asked = next(m for m in map(unpack, link.sent[::2]) if m.kind == "vocabulary").values
    assert (asked["columns"], asked["target"]) == (["sky"], False)
    assert "the server was told which categories of 'sky' there are over all nodes" in caplog.text


@pytest.mark.parametrize(
    ("trees", "long"),
    [
        ([f"tree number {k}" for k in range(400)], False),
        (["t" * 65, "ü" * 128, "oak-tree"], True),
        ([f"{'wood ' * 20}{k}" for k in range(300)], True),
    ],
)
def test_many_words_and_long_ones_take_a_second_table(tmp_path, trees, long):
    cells = {
        "east": (trees, *CELLS["east"][1:]),
        "north": (trees[:2], *CELLS["north"][1:]),
        "west": (trees[1:], *CELLS["west"][1:]),
    }
    folder = written(tmp_path / "files", cells)
    (plain, _), (secure, link) = (agreed(folder, on, cells=cells) for on in (False, True))
    assert secure.columns == plain.columns
    assert link.asks[:8] == ["hello", "vocabulary", "mask_shares", *SUM, "vocabulary", *SUM]
    asked = [m.values for m in map(unpack, link.sent[::2]) if m.kind == "vocabulary"]
    assert [m["width"] for m in asked[::3]] == [66, 258 if long else 66]
    assert asked[0]["salt"] != asked[3]["salt"]
    assert seen(link.sent[1::2], cells) == []


def test_a_word_too_long_is_refused_by_its_column_and_not_quoted(tmp_path, caplog):
    word = "ü" * 128 + "!"
    cells = {**CELLS, "north": (("oak", word), *CELLS["north"][1:])}
    sentence = (
        r"^vocabulary: node 'north': cells of column 'tree' must be at most 256 bytes of UTF-8 each to be told by a "
        r"masked sum \(list them in \[data\] categories, or drop it\); what was found is in the node's own log\.$"
    )
    with pytest.raises(ClientError, match=sentence):
        agreed(written(tmp_path / "a", cells), True, cells=cells)
    assert "got one of 257." in caplog.text
    assert word not in caplog.text
    cells = {**CELLS, "north": (*CELLS["north"][:2], ("recovered", word))}
    with pytest.raises(ClientError, match=r"cells of the target must .* \(list them in \[data\] classes\);"):
        agreed(written(tmp_path / "b", cells), True, cells=cells)


def test_a_table_that_does_not_peel_is_made_again_with_another_salt(tmp_path, monkeypatch):
    folder, of, salts = written(tmp_path / "files"), Table.words, []

    def seldom(self, total, clients):
        salts.append(self.salt)
        return of(self, total, clients) if len(salts) > 2 else None

    plain, _ = agreed(folder, False)
    monkeypatch.setattr(Table, "words", seldom)
    secure, _ = agreed(folder, True)
    assert (secure.columns, secure.classes) == (plain.columns, plain.classes)
    assert len(set(salts)) == 3


def test_words_that_no_table_gives_end_the_start(tmp_path, monkeypatch):
    monkeypatch.setattr(Table, "words", lambda *_: None)
    sentence = (
        r"^categories and classes must be at most 65536 words over all nodes to be told by a masked sum \(list them "
        r"for everyone in \[data\], .*\), got sums of 15 that did not tell them in 4 tries\.$"
    )
    with pytest.raises(DataError, match=sentence):
        agreed(written(tmp_path / "files"), True)


def test_a_node_with_too_many_words_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(both, "MOST", 4)
    with pytest.raises(ClientError, match="node 'east': categories and classes of a node must be at most 4 to be told"):
        agreed(written(tmp_path / "files"), True)


@pytest.mark.parametrize("word", [b"\x00\x09oak", b"\x00\x00\xff\xfe"])
def test_words_of_what_was_not_asked_for_are_refused(tmp_path, monkeypatch, word):
    def other(survey, values):
        table = Table(bytes.fromhex(values["salt"]), values["part"], values["width"])
        return [np.array([1.0, 0.0]), table.of([word])]

    monkeypatch.setattr(at_node, "words_of", other)
    with pytest.raises(InvalidArgument, match="words of the nodes' masked sum must be of what was asked for, in UTF-8"):
        agreed(written(tmp_path / "files"), True)


@pytest.mark.parametrize("told", [(-300.0, 0.0), (1e6, 0.0), (0.0, 2.0**30)])
def test_numbers_of_words_that_are_not_theirs_end_the_start(tmp_path, monkeypatch, told):
    other = lambda survey, values: [
        np.array(told),
        Table(bytes(16), values["part"], values["width"]).of([b"\x00\x00oak"]),
    ]
    monkeypatch.setattr(at_node, "words_of", other)
    monkeypatch.setattr(both, "MOST", 100)
    with pytest.raises(DataError, match="categories and classes must be at most 100 words over all nodes"):
        agreed(written(tmp_path / "files"), True)


def test_numbers_that_are_none_are_refused(tmp_path, monkeypatch):
    ends = {site: (*parts[:2], ("0", "1")) for site, parts in CELLS.items()}
    own = at_node.words_of
    monkeypatch.setattr(at_node, "words_of", lambda survey, values: own({**survey, "values": ["0", "nan"]}, values))
    with pytest.raises(DataError, match="values of the target must be finite numbers, as the nodes say, got others in"):
        agreed(written(tmp_path / "files", ends), True, cells=ends)


@pytest.mark.parametrize(
    "changes",
    [
        {"salt": "00"},
        {"salt": None},
        {"part": 0},
        {"part": 10**6},
        {"width": 2},
        {"width": 259},
        {"columns": 3},
        {"columns": [["tree"]]},
        {"target": 1},
    ],
)
def test_a_node_answers_no_other_question(tmp_path, changes):
    node = members(written(tmp_path / "files"), True)[0]
    node.answer(Message("hello", {"experiment": values(True)}).pack())
    right = {"client": 0, "columns": ["tree"], "target": True, "salt": "00" * 16, "part": 64, "width": 66}
    answer = unpack(node.answer(Message("vocabulary", {**right, **changes}).pack()))
    assert answer.values["sentence"] == (
        "question for a vocabulary must have columns, target and a table's salt, part and width, got others."
    )


def test_a_node_of_a_plain_run_is_not_asked_so(tmp_path):
    node = members(written(tmp_path / "files"), False)[0]
    node.answer(Message("hello", {"experiment": values(False)}).pack())
    answer = unpack(node.answer(Message("vocabulary", {"client": 0}).pack()))
    assert answer.values["sentence"] == "question for a vocabulary must be of a secure run, got one of another."


def test_everyone_must_stay(tmp_path, monkeypatch):
    lost = lambda self, i, kind, answer: None if (i, kind) == (1, "mask_reveal") else answer
    monkeypatch.setattr(Watched, "answered", lost)
    with pytest.raises(ClientError, match=r"^round 0, vocabulary: at least 3 of 3 clients must stay .* at mask_reveal"):
        agreed(written(tmp_path / "files"), True)
