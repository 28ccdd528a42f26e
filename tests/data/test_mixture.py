"""The mixture of Example 5.1: sizes, shares and shapes of the three distributions, and what is independent."""

import numpy as np
import pytest
from scipy import stats

import fedpact.data as data
from fedpact.core.errors import InvalidArgument

KINDS = ("normal", "student", "uniform")
LAWS = {"normal": stats.norm(), "student": stats.t(5), "uniform": stats.uniform(-5, 10)}


@pytest.fixture(scope="module", params=[True, False], ids=["shuffled", "one per client"])
def drawn(request):
    return request.param, data.mixture(clients=60, features=8, seed=1, iid=request.param)


def test_sizes(drawn):
    """d_i from 50 to 150, both ends reached among many; clients are consecutive blocks."""
    _, dataset = drawn
    owner = dataset.raw["client"]
    sizes = np.bincount(owner)
    assert len(sizes) == 60
    assert sizes.min() >= 50
    assert sizes.max() <= 150
    assert np.all(np.diff(owner) >= 0)
    many = np.bincount(data.mixture(clients=3000, features=1).raw["client"])
    assert (many.min(), many.max()) == (50, 150)
    assert many.mean() == pytest.approx(100, abs=5 * 29.2 / 3000**0.5)  # a uniform draw's deviation is √((101²−1)/12)
    assert (dataset.features, dataset.classes, dataset.name) == (8, (), "mixture")


@pytest.mark.parametrize("iid", [True, False])
def test_every_kind_has_its_law(iid):
    """Kolmogorov and Smirnov on features and targets, which are drawn alike; enough of them to tell t(4) from t(5)."""
    dataset = data.mixture(clients=600, features=8, seed=1, iid=iid)
    table = np.column_stack([dataset.x, dataset.y])
    for kind in KINDS:
        mine = table[dataset.raw["distribution"] == kind]
        for values in (mine[:, :-1].ravel(), mine[:, -1]):
            assert stats.kstest(values, LAWS[kind].cdf).pvalue > 1e-3
        for other in set(KINDS) - {kind}:
            assert stats.kstest(mine.ravel(), LAWS[other].cdf).pvalue < 1e-6
    uniform = table[dataset.raw["distribution"] == "uniform"]
    assert np.abs(uniform).max() <= 5
    assert np.abs(uniform).max() > 4.99


def test_a_third_of_the_rows_each():
    for seed in range(6):
        kinds = data.mixture(clients=7, features=1, seed=seed).raw["distribution"]
        count = [int(np.sum(kinds == kind)) for kind in KINDS]
        assert count[0] == count[1] == -(-len(kinds) // 3)
        assert sum(count) == len(kinds)


def test_shuffled_rows_are_dealt_to_everyone():
    dataset = data.mixture(clients=60, features=1, seed=1)
    for client in range(60):
        mine = dataset.raw["distribution"][dataset.raw["client"] == client]
        assert all(0.05 < np.mean(mine == kind) < 0.7 for kind in KINDS)


def test_otherwise_a_client_draws_from_one_of_the_three():
    dataset = data.mixture(clients=61, features=1, seed=1, iid=False)
    whose = [set(dataset.raw["distribution"][dataset.raw["client"] == client]) for client in range(61)]
    assert [len(kinds) for kinds in whose] == [1] * 61
    assert sorted(sum(kinds == {kind} for kinds in whose) for kind in KINDS) == [20, 20, 21]


def test_targets_tell_nothing_about_features(drawn):
    """b is drawn beside A: every correlation is within five deviations of 0, 1/√d each."""
    _, dataset = drawn
    for kind in KINDS:
        mine = dataset.raw["distribution"] == kind
        table = np.column_stack([dataset.x, dataset.y])[mine]
        off = np.corrcoef(table.T) - np.eye(9)
        assert np.abs(off).max() < 5 / np.sqrt(mine.sum())


def test_split_by_client():
    dataset = data.load("mixture", clients=5, features=3, seed=2)
    federation = dataset.split(how="column", column="client")
    assert federation.names == ("0", "1", "2", "3", "4")
    assert federation.sizes.tolist() == np.bincount(dataset.raw["client"]).tolist()
    np.testing.assert_array_equal(federation.client(0)[0], dataset.x[: federation.sizes[0]])


def test_the_seed_decides():
    make = lambda **options: data.mixture(clients=3, features=2, **options).digest
    assert make(seed=4) == make(seed=4)
    assert len({make(), make(seed=1), make(seed=2), make(iid=False)}) == 4
    assert make() == make(seed=0)
    defaults = data.mixture()
    assert (defaults.features, len(set(defaults.raw["client"]))) == (100, 64)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"clients": 0}, r"clients \(m\) must be an integer of at least 1, got 0\."),
        ({"clients": 2.0}, r"clients \(m\) must be an integer of at least 1, got 2\.0\."),
        ({"features": 0}, r"features \(n\) must be an integer of at least 1, got 0\."),
        ({"seed": -1}, r"seed must be an integer of at least 0, got -1\."),
        ({"seed": "1"}, r"seed must be an integer of at least 0, got '1'\."),
        ({"seed": True}, r"seed must be an integer of at least 0, got True\."),
        ({"iid": 1}, r"iid must be true or false, got 1\."),
    ],
)
def test_arguments(options, sentence):
    with pytest.raises(InvalidArgument, match=f"^{sentence}$"):
        data.mixture(**options)
