import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2_contingency, chisquare

from fedpact.core.errors import DataError, InvalidArgument, UnknownName
from fedpact.data import Dataset, from_arrays, partition, synthetic

SEEDS = (0, 1, 17)
LABELS = np.random.default_rng(5).integers(0, 4, 240)


def make(how, clients=12, seed=0, **options):
    rng = np.random.default_rng([seed, 99])
    labels = how in ("shards", "dirichlet")
    return getattr(partition, how)(rng, LABELS if labels else len(LABELS), clients, **options)


CASES = [("iid", {}), ("cuts", {}), ("shards", {}), ("dirichlet", {"alpha": 0.5})]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("how", "options"), CASES)
def test_every_row_goes_to_one_client(how, options, seed):
    parts = make(how, seed=seed, **options)
    assert len(parts) == 12
    assert min(map(len, parts)) >= 1
    assert sorted(np.concatenate(parts)) == list(range(240))


@pytest.mark.parametrize(("how", "options"), CASES)
def test_the_seed_decides(how, options):
    one, again, other = (make(how, seed=s, **options) for s in (3, 3, 4))
    assert all(np.array_equal(a, b) for a, b in zip(one, again, strict=True))
    assert any(not np.array_equal(a, b) for a, b in zip(one, other, strict=True))


@given(rows=st.integers(1, 500), share=st.floats(0, 1), seed=st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_iid_and_cuts_for_any_number_of_clients(rows, share, seed):
    clients = 1 + int(share * (rows - 1))
    for how in (partition.iid, partition.cuts):
        parts = how(np.random.default_rng(seed), rows, clients)
        d = [len(part) for part in parts]
        assert len(d) == clients
        assert sorted(np.concatenate(parts)) == list(range(rows))
        assert max(d) - min(d) <= 1 if how is partition.iid else min(d) > 0.01 * rows / clients


@pytest.mark.parametrize(("how", "options"), [case for case in CASES if case[0] != "shards"])
def test_rows_are_shuffled(how, options):
    rows = np.concatenate(make(how, clients=1, **options))
    if how == "dirichlet":  # class after class, in random order within each
        rows = rows[: np.sum(LABELS == 0)]
    assert rows.tolist() != sorted(rows)


@pytest.mark.parametrize("clients", [50, 100, 1000, 10000])
@pytest.mark.parametrize("seed", SEEDS)
def test_cuts_meet_the_papers_condition(clients, seed):
    d = np.array([len(p) for p in partition.cuts(np.random.default_rng(seed), 45222, clients)])
    assert d.sum() == 45222
    assert d.min() > 0.01 * 45222 / clients
    assert d.max() > 3 * 45222 / clients  # uniform cuts are far from equal


def rejection(rng, rows, clients):
    """The paper's code, word for word: draw cut points until the smallest part is large enough."""
    while True:
        points = np.sort(rng.choice(np.arange(1, rows), clients - 1, replace=False))
        d = np.diff(np.concatenate([[0], points, [rows]]))
        if d.min() > 0.01 * rows / clients:
            return d


def test_cuts_of_two_are_uniform_over_every_allowed_cut():
    # d = 400, m = 2: the condition is d_i > 2, so the first size is uniform on 3..397.
    rng, draws = np.random.default_rng(8), 12000
    first = [len(partition.cuts(rng, 400, 2)[0]) for _ in range(draws)]
    counts = np.bincount(first, minlength=401)
    assert counts[:3].sum() == counts[398:].sum() == 0
    assert counts[3] > 0
    assert counts[397] > 0
    assert chisquare(counts[3:398]).pvalue > 1e-3


def test_cuts_have_the_distribution_of_the_papers_retries():
    # d = 10,000, m = 100: d_i > 1, which about a third of the draws meet.
    draws, rng = 2500, np.random.default_rng(21)
    fast = np.array([[len(p) for p in partition.cuts(rng, 10000, 100)] for _ in range(draws)])
    slow = np.array([rejection(rng, 10000, 100) for _ in range(draws)])
    for statistic in (lambda d: d[:, 0], lambda d: d[:, -1], lambda d: d.max(axis=1), lambda d: np.sort(d)[:, 1]):
        both = np.concatenate([statistic(fast), statistic(slow)])
        edges = np.unique(np.quantile(both, np.linspace(0, 1, 11)))
        edges[-1] += 1
        table = np.array([np.histogram(statistic(d), edges)[0] for d in (fast, slow)])
        assert chi2_contingency(table[:, table.sum(axis=0) > 0]).pvalue > 1e-3
    assert fast.min() == slow.min() == 2


def test_sizes_are_as_given_and_rows_are_used_once():
    parts = partition.sizes(np.random.default_rng(0), 100, [5, 1, 30])
    assert [len(p) for p in parts] == [5, 1, 30]
    assert len(set(np.concatenate(parts))) == 36
    assert set(np.concatenate(parts)) != set(range(36))


@pytest.mark.parametrize("seed", SEEDS)
def test_shards_hold_few_labels(seed):
    labels = np.repeat(np.arange(10), 24)[np.random.default_rng(1).permutation(240)]
    parts = partition.shards(np.random.default_rng(seed), labels, 20)
    assert {len(p) for p in parts} == {12}  # 40 shards of 6
    held = [len(set(labels[p])) for p in parts]
    assert max(held) == 2  # 6 divides 24: a shard has one label
    one = partition.shards(np.random.default_rng(seed), labels, 20, shards=1)
    assert {len(set(labels[p])) for p in one} == {1}


def test_shards_are_consecutive_blocks_of_the_sorted_rows():
    labels = np.array([1, 0, 1, 0, 1, 0, 1, 0])
    parts = partition.shards(np.random.default_rng(0), labels, 2)
    blocks = {(1, 3), (5, 7), (0, 2), (4, 6)}
    assert {tuple(p[k : k + 2].tolist()) for p in parts for k in (0, 2)} == blocks


def test_small_alpha_is_more_uneven_than_large_alpha():
    def spread(alpha):
        shares = []
        for seed in range(20):
            parts = make("dirichlet", clients=4, seed=seed, alpha=alpha)
            table = np.array([np.bincount(LABELS[p], minlength=4) for p in parts])
            shares.append((table / np.bincount(LABELS)).std())
        return np.mean(shares)

    # The standard deviation of one Dirichlet(α,…,α) coordinate is √(3/16 / (4α+1)).
    for alpha in (0.2, 1.0, 100.0):
        assert spread(alpha) == pytest.approx(np.sqrt(3 / 16 / (4 * alpha + 1)), rel=0.15, abs=0.01)


def test_dirichlet_gives_everyone_least_rows():
    for seed in SEEDS:
        assert min(len(p) for p in make("dirichlet", clients=6, seed=seed, alpha=0.3, least=15)) >= 15


def test_column_makes_one_client_per_value_in_order():
    rows, names = partition.column("site", np.array(["b", "a", "b", "c"], dtype=object))
    assert names == ["a", "b", "c"]
    assert [r.tolist() for r in rows] == [[1], [0, 2], [3]]
    rows, names = partition.column("year", np.array([10.0, 2.0, 10.0, 0.5]))
    assert names == ["0.5", "2", "10"]
    assert [r.tolist() for r in rows] == [[3], [1], [0, 2]]


@pytest.mark.parametrize("values", [np.array(["a", ""], dtype=object), np.array([1.0, np.nan])])
def test_column_with_a_gap(values):
    with pytest.raises(DataError, match=r"column 'site' must be filled in every row, got nothing at row 1\."):
        partition.column("site", values)


SPLIT_ERRORS = [
    ({}, r"clients \(m\) must be an integer of at least 1, got None\."),
    ({"clients": 0}, r"clients \(m\) must be an integer of at least 1, got 0\."),
    ({"clients": 2.0}, r"clients \(m\) must be an integer of at least 1, got 2\.0\."),
    ({"clients": 31}, r"clients \(m\) must be at most the number of rows, 30, got 31\."),
    ({"clients": 31, "how": "cuts"}, r"clients \(m\) must be at most the number of rows, 30, got 31\."),
    ({"clients": 31, "how": "shards"}, r"clients \(m\) must be at most the number of rows, 30, got 31\."),
    (
        {"clients": 31, "how": "dirichlet", "alpha": 1.0},
        r"clients \(m\) must be at most the number of rows, 30, got 31\.",
    ),
    ({"clients": 16, "how": "shards"}, r"clients × shards must be at most the number of rows, 30, got 32\. Use fewer"),
    ({"clients": 2, "how": "shards", "shards": 0}, r"shards must be an integer of at least 1, got 0\."),
    ({"clients": 2, "how": "dirichlet"}, r"alpha \(α\) must be a finite number above 0, got None\."),
    ({"clients": 2, "how": "dirichlet", "alpha": 0}, r"alpha \(α\) must be a finite number above 0, got 0\."),
    ({"clients": 2, "how": "dirichlet", "alpha": -1.0}, r"alpha \(α\) must be a finite number above 0, got -1\.0\."),
    ({"clients": 2, "how": "dirichlet", "alpha": 1.0, "least": 0}, r"least must be an integer of at least 1, got 0\."),
    (
        {"clients": 2, "how": "dirichlet", "alpha": 1.0, "least": 16},
        r"least must be at most rows / clients, 15, got 16\.",
    ),
    (
        {"clients": 30, "how": "dirichlet", "alpha": 0.01},
        r"alpha \(α\) must be large enough for 1 rows at each of 30 clients, got 0\.01 .* Use a larger alpha",
    ),
    ({"how": "sizes"}, r"sizes \(d_i\) must be a list of whole numbers, one per client, got None\."),
    ({"how": "sizes", "sizes": [1.5, 2.0]}, r"sizes \(d_i\) must be a list of whole numbers"),
    ({"how": "sizes", "sizes": [3, 0]}, r"sizes \(d_i\) must be at least 1 each, got 0\."),
    ({"how": "sizes", "sizes": [20, 11]}, r"sizes \(d_i\) must be in all at most the number of rows, 30, got 31\."),
    ({"clients": 3, "how": "sizes", "sizes": [2, 2]}, r"clients \(m\) must be 2, as sizes says, or left out, got 3\."),
    ({"clients": 3, "how": "column", "column": "y"}, r"clients \(m\) must be 2, as column says, or left out, got 3\."),
    ({"clients": 3, "seed": -1}, r"seed must be an integer of at least 0, got -1\."),
    ({"clients": 3, "seed": 1.5}, r"seed must be an integer of at least 0, got 1\.5\."),
    ({"clients": 3, "holdout": 1.0}, r"holdout must be a fraction in \[0, 1\), got 1\.0\."),
    ({"clients": 3, "holdout": -0.1}, r"holdout must be a fraction in \[0, 1\), got -0\.1\."),
    ({"clients": 3, "holdout": "half"}, r"holdout must be a fraction in \[0, 1\), got 'half'\."),
]


@pytest.mark.parametrize(("arguments", "sentence"), SPLIT_ERRORS)
def test_split_arguments_that_break_their_constraint(arguments, sentence):
    with pytest.raises(InvalidArgument, match=sentence):
        synthetic(rows=30, features=2).split(**arguments)


SPLIT_NAMES = [
    ({"clients": 3, "how": "idd"}, r"how must be one of column, cuts, .*, got 'idd'\. Did you mean 'iid'\?"),
    (
        {"clients": 3, "how": "dirichlet", "alfa": 1},
        r"option of the split 'dirichlet' must be one of alpha, clients, holdout, how, least, seed, got 'alfa'\. "
        r"Did you mean 'alpha'\?",
    ),
    (
        {"clients": 3, "alpha": 1},
        r"option of the split 'iid' must be one of clients, holdout, how, seed, got 'alpha'\.",
    ),
    (
        {"how": "column", "column": "x9"},
        r"column of dataset 'synthetic logistic' must be one of x0, x1, y, got 'x9'\. Did you mean",
    ),
]


@pytest.mark.parametrize(("arguments", "sentence"), SPLIT_NAMES)
def test_split_names_that_do_not_exist(arguments, sentence):
    with pytest.raises(UnknownName, match=sentence):
        synthetic(rows=30, features=2).split(**arguments)


def test_dirichlet_needs_classes():
    with pytest.raises(InvalidArgument, match=r"how must be a split that needs no classes, got 'dirichlet'\. Choose"):
        from_arrays(np.eye(30), np.linspace(0, 1, 30)).split(3, how="dirichlet", alpha=1.0)


# The imbalanced groups of FedADMM's Table VI


@pytest.mark.parametrize(("rows", "shard", "mean", "deviation"), [(60_000, 6, 300, 171.03), (50_000, 5, 250, 142.52)])
def test_the_imbalanced_split_is_table_vi(rows, shard, mean, deviation):
    """200 clients: pairs with 1, 2, … 99 shards of 6 (5) rows each, 50 each for the last two; mean and deviation."""
    labels = np.repeat(np.arange(10), rows // 10)
    parts = partition.imbalanced(np.random.default_rng(0), labels, 200)
    d = np.array([len(part) for part in parts])
    assert d.tolist() == [shard * g for g in range(1, 100) for _ in (0, 1)] + [50 * shard] * 2
    assert d.mean() == mean
    assert abs(d.std(ddof=1) - deviation) < 0.01  # 171.033 and 142.527, which the table cuts to 142.52
    assert sorted(np.concatenate(parts)) == list(range(rows))
    for part in parts[:20]:  # a shard is of one label here, but for those that a class's end cuts
        assert len(np.unique(labels[part])) <= len(part) // shard


def test_the_imbalanced_split_by_name_and_seed():
    dataset = from_arrays(np.zeros((240, 2)), LABELS.astype(float), classes=list("abcd"))
    one, again, other = (dataset.split(clients=20, how="imbalanced", seed=s) for s in (3, 3, 4))
    assert one.sizes.sum() == 240
    assert all(np.array_equal(a, b) for a, b in zip(one.rows, again.rows, strict=True))
    assert any(not np.array_equal(a, b) for a, b in zip(one.rows, other.rows, strict=True))


@pytest.mark.parametrize(
    ("clients", "said"),
    [
        (7, r"clients \(m\) must be even for pairs of clients, got 7"),
        (2, r"clients \(m\) must be at least 4 for pairs of unlike size, got 2"),
        (40, r"\(clients/2\)² must be at most the number of rows, 240, got 400\. Use fewer clients"),
        (0, r"clients \(m\) must be an integer of at least 1, got 0"),
    ],
)
def test_imbalanced_splits_that_cannot_be(clients, said):
    with pytest.raises(InvalidArgument, match=f"^{said}"):
        partition.imbalanced(np.random.default_rng(0), LABELS, clients)


# A dataset's own test rows are nobody's


@pytest.mark.parametrize(
    ("how", "options"),
    [
        ("iid", {"clients": 6}),
        ("cuts", {"clients": 6}),
        ("sizes", {"sizes": [50, 60, 70]}),
        ("shards", {"clients": 6}),
        ("imbalanced", {"clients": 6}),
        ("dirichlet", {"clients": 6, "alpha": 1.0}),
        ("iid", {"clients": 6, "holdout": 0.25}),
    ],
    ids=str,
)
def test_no_split_gives_a_client_a_test_row(how, options):
    whole = from_arrays(np.arange(480.0).reshape(240, 2), LABELS.astype(float), classes=list("abcd"))
    test = np.random.default_rng(1).permutation(240)[:60]
    dataset = Dataset(whole.name, whole.x, whole.y, whole.schema, {}, "none", test)
    federation = dataset.split(how=how, **options)
    given = np.concatenate([*federation.rows, *federation.held_out])
    assert len(np.unique(given)) == len(given) == 180
    assert not np.intersect1d(given, test).size
    assert federation.digest != whole.split(how=how, **options).digest


def test_test_rows_are_rows_and_not_all_of_them():
    whole = from_arrays(np.zeros((6, 1)), np.arange(6.0) % 2, classes=["a", "b"])
    for test, said in (
        ([0, 6], "test of dataset"),
        ([1, 1], "test of dataset"),
        (range(6), r"test .* must leave rows"),
    ):
        with pytest.raises((DataError, InvalidArgument), match=said):
            Dataset("x", whole.x, whole.y, whole.schema, {}, "none", list(test))
    some = Dataset("x", whole.x, whole.y, whole.schema, {}, "none", [4, 5])
    assert some.take([5, 0, 4]).test.tolist() == [0, 2]
