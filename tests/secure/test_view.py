"""What the server sees of two runs with different data and equal sums: nothing to tell them apart by.

The server's view is every message, so it takes off the self masks of those who stayed. What is left of client i is
x_i plus its pairwise masks: sums over any clients but all of them must be uniform words. Three kinds of adversary:

    uniform    χ² of the first and of the last byte, Kolmogorov-Smirnov of the words, against the uniform law
    two runs   two-sample Kolmogorov-Smirnov
    informed   knows both data sets, and asks with which the words correlate

Bytes of all keys come from seeded generators: the verdicts repeat.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from helpers_sum import conversation, terms
from scipy import stats

from fedpact.core.errors import InvalidArgument
from fedpact.secure import masks, primitives, shamir
from fedpact.secure.messages import Inbox

pytest.importorskip("cryptography")

N, D = 5, 4000
CERTAIN = 1e-12


def data_sets():
    """Equal sums, different summands; client 4 drops out and has the same in both."""
    rng = np.random.default_rng(0)
    one = np.round(rng.uniform(-10, 10, (N, D)) * 2**20) / 2**20  # so that sums are exact
    moved = np.round(rng.normal(3, 1, (N - 1, D)) * 2**20) / 2**20 * [[1], [0], [1], [0]]  # 0 and 2 give to 1 and 3
    other = one.copy()
    other[:-1] = one[:-1] + moved - np.roll(moved, 1, axis=0)
    return one, other


def seen(x, seed):
    """What the server can work out for each client that stayed, and for the one that dropped out after masking."""
    agreed = terms(N, D, bound=20.0)
    view = conversation(agreed, x, {"mask": [N - 1]}, lambda i: np.random.default_rng([seed, i]).bytes)
    request, context = view.server._request, view.server._context
    words = {}
    for j in request.survivors:
        shares = {view.server._x[i]: answer.seeds[j] for i, answer in view.sent["reveal"].items()}
        left = view.sent["mask"][j].words.copy()
        masks.primitives.add_stream(left, masks._seed_key(shamir.join(shares, agreed.threshold), context, j), -1)
        words[j] = left
    k = N - 1  # its key is known now: the pairs with it come off too
    shares = {view.server._x[i]: answer.keys[k] for i, answer in view.sent["reveal"].items()}
    private = shamir.join(shares, agreed.threshold)
    public = {keys.sender: keys.masking for keys in view.server._roster.keys}
    for j, left in words.items():
        masks.primitives.add_stream(left, masks._pair_key(private, public[j], context, k, j), -1)
    np.testing.assert_array_equal(sum(words.values()).view(np.int64), view.total.cells)
    np.testing.assert_allclose(view.total.values, x[:-1].sum(0), rtol=0, atol=1e-9)
    return words


def parts(words):
    """Sums over all sets of clients but the whole."""
    who = sorted(words)
    for size in range(1, len(who)):
        for chosen in itertools.combinations(who, size):
            yield chosen, sum(words[i] for i in chosen)


def uniform(word):
    first, last = np.bincount(word >> np.uint64(56), minlength=256), np.bincount(word & np.uint64(255), minlength=256)
    fraction = word.astype(float) / 2.0**64
    return [stats.chisquare(first).pvalue, stats.chisquare(last).pvalue, stats.kstest(fraction, "uniform").pvalue]


def informed(word, *candidates):
    """p of the correlation with what either data set would have there."""
    return [stats.pearsonr(word.view(np.int64).astype(float), x).pvalue for x in candidates]


def verdicts(views, x):
    """The p-value of every test on every part, of both runs."""
    found = {"uniform": [], "two runs": [], "informed": []}
    for (chosen, a), (_, b) in zip(parts(views[0]), parts(views[1]), strict=True):
        found["uniform"] += uniform(a) + uniform(b)
        found["two runs"].append(stats.ks_2samp(a, b).pvalue)
        one, other = (data[list(chosen)].sum(0) for data in x)
        found["informed"] += informed(a, one, other) + informed(b, one, other)
    return found


def test_the_two_runs_cannot_be_told_apart():
    x = data_sets()
    np.testing.assert_array_equal(x[0].sum(0), x[1].sum(0))
    found = verdicts([seen(x[0], 1), seen(x[1], 2)], x)
    for name, p in found.items():
        assert min(p) * len(p) > 0.01, name  # Bonferroni


def test_with_the_masks_off_every_test_rejects(monkeypatch):
    monkeypatch.setattr(primitives, "add_stream", lambda *_: None)
    x = data_sets()
    found = verdicts([seen(x[0], 1), seen(x[1], 2)], x)
    assert all(min(p) < CERTAIN for p in found.values())
    assert max(found["uniform"] + found["informed"]) < CERTAIN  # of every part


def test_with_the_pairwise_masks_off_the_self_masks_do_not_hide_it(monkeypatch):
    """Self masks are taken off by everyone's shares: the pairwise ones are what protects those who stayed."""
    stream = primitives.add_stream
    pairs = set()
    key = masks._pair_key
    monkeypatch.setattr(masks, "_pair_key", lambda *a: pairs.add(made := key(*a)) or made)
    monkeypatch.setattr(primitives, "add_stream", lambda total, k, sign: None if k in pairs else stream(total, k, sign))
    x = data_sets()
    found = verdicts([seen(x[0], 1), seen(x[1], 2)], x)
    assert all(min(p) < CERTAIN for p in found.values())


def late(x):
    """What is left of a vector that comes after its client was given up: its pairs come off, for its key is known."""
    agreed, k = terms(N, D, bound=20.0), N - 1
    view = conversation(agreed, x, {"mask": [k]}, lambda i: np.random.default_rng([3, i]).bytes)
    inbox = Inbox(agreed.session, agreed.round, k, {i: view.sent["share"][i].sealed[k] for i in range(k)})
    left = view.clients[k].mask(inbox, x[k])
    with pytest.raises(InvalidArgument, match=r"^message must be of a sum under way"):
        view.server.add(left)
    shares = {view.server._x[i]: answer.keys[k] for i, answer in view.sent["reveal"].items()}
    private = shamir.join(shares, agreed.threshold)
    for keys in view.server._roster.keys[:k]:
        key = masks._pair_key(private, keys.masking, view.server._context, k, keys.sender)
        primitives.add_stream(left.words, key, 1)  # all others come before k, which subtracted
    return left.words, agreed.lattice


def test_a_vector_that_comes_too_late_stays_under_its_self_mask(monkeypatch):
    x, _ = data_sets()
    words, lattice = late(x)
    p = uniform(words) + informed(words, x[N - 1])
    assert min(p) * len(p) > 0.01
    stream, seeds, key = primitives.add_stream, set(), masks._seed_key
    monkeypatch.setattr(masks, "_seed_key", lambda *a: seeds.add(made := key(*a)) or made)
    monkeypatch.setattr(primitives, "add_stream", lambda total, k, sign: None if k in seeds else stream(total, k, sign))
    np.testing.assert_array_equal(late(x)[0], lattice.encode(x[N - 1]))  # it is what hid it


def test_the_same_vector_twice_gives_other_words():
    x, _ = data_sets()
    a, b = (conversation(terms(N, D, bound=20.0), x).sent["mask"][0].words for _ in range(2))
    assert np.mean(a == b) < 0.01
    assert abs(np.corrcoef(a.astype(float), b.astype(float))[0, 1]) < 0.1
