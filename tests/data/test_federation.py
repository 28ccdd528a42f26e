import numpy as np
import pytest
import scipy.sparse

from fedpact.core.errors import DataError, InvalidArgument
from fedpact.data import Federation, from_arrays, synthetic


@pytest.fixture
def dataset():
    return synthetic(rows=100, features=3, seed=1)


def test_clients_hold_their_rows(dataset):
    federation = dataset.split(7, seed=2)
    assert (federation.clients, federation.features) == (7, 3)
    assert federation.sizes.tolist() == [15, 15, 14, 14, 14, 14, 14]
    assert federation.names == ("0", "1", "2", "3", "4", "5", "6")
    assert federation.description == "iid, 7 clients, seed 2"
    x, y = federation.client(3)
    assert np.array_equal(x, dataset.x[federation.rows[3]])
    assert np.array_equal(y, dataset.y[federation.rows[3]])
    assert federation.test(3)[0].shape == (0, 3)
    assert federation.test(3)[1].shape == (0,)


def test_description_tells_the_split_apart(dataset):
    text = dataset.split(4, how="dirichlet", alpha=5.0, seed=3, holdout=0.25).description
    assert text == "dirichlet (alpha=5.0), 4 clients, seed 3, holdout 0.25"
    assert dataset.split(how="sizes", sizes=[3, 4]).description == "sizes, 2 clients, seed 0"


@pytest.mark.parametrize("how", ["iid", "cuts", "shards"])
def test_split_is_repeatable_and_depends_on_the_seed(dataset, how):
    one, again, other = (dataset.split(10, how=how, seed=s) for s in (5, 5, 6))
    assert one.digest == again.digest != other.digest


def test_holdout_is_repeatable_and_depends_on_the_seed(dataset):
    one, again, other = (dataset.split(how="column", column="y", seed=s, holdout=0.3) for s in (5, 5, 6))
    assert one.digest == again.digest != other.digest


def test_numpy_integers_are_integers(dataset):
    assert dataset.split(np.int64(5), seed=np.int64(3)).digest == dataset.split(5, seed=3).digest


def test_holdout_sets_rows_aside_without_losing_any(dataset):
    whole, part = dataset.split(10, seed=4), dataset.split(10, seed=4, holdout=0.3)
    assert part.sizes.tolist() == [7] * 10
    for i in range(10):
        assert sorted([*part.rows[i], *part.held_out[i]]) == sorted(whole.rows[i])
        assert len(part.test(i)[1]) == 3
        kept = [row for row in whole.rows[i] if row in part.rows[i]]
        assert part.rows[i].tolist() == kept  # in the order of the split
    positions = [tuple(np.flatnonzero(np.isin(whole.rows[i], part.held_out[i]))) for i in range(10)]
    assert len(set(positions)) > 1  # each client draws its own
    assert part.digest != whole.digest


def test_holdout_leaves_a_training_row(dataset):
    federation = dataset.split(100, holdout=0.9)
    assert federation.sizes.tolist() == [1] * 100
    assert dataset.split(50, holdout=0.99).sizes.tolist() == [1] * 50


def test_digest_covers_data_rows_and_who_holds_them(dataset):
    one = Federation(dataset, (np.arange(3), np.arange(3, 9)))
    same = Federation(dataset, ([0, 1, 2], [3, 4, 5, 6, 7, 8]), names=("a", "b"))
    moved = Federation(dataset, (np.arange(4), np.arange(4, 9)))
    held = Federation(dataset, (np.arange(3), np.arange(3, 9)), ([9], [10]))
    other = Federation(synthetic(rows=100, features=3, seed=2), (np.arange(3), np.arange(3, 9)))
    assert one.digest == same.digest
    assert len({one.digest, moved.digest, held.digest, other.digest}) == 4


def test_rows_may_be_shared_and_cannot_be_changed(dataset):
    federation = Federation(dataset, ([0, 1], [1, 2]))
    assert federation.sizes.tolist() == [2, 2]
    with pytest.raises(ValueError, match="read-only"):
        federation.rows[0][0] = 7


@pytest.mark.parametrize(
    ("arguments", "error", "sentence"),
    [
        ({"rows": ([0], [])}, DataError, r"client '1' must be given at least one row, got none\. Remove it"),
        ({"rows": ()}, InvalidArgument, r"rows must be one index array per client, at least one, got 0\."),
        ({"rows": ([0], [100])}, InvalidArgument, r"rows of client '1' must be row numbers from 0 to 99, got \[100\]"),
        ({"rows": ([0], [-1])}, InvalidArgument, r"rows of client '1' must be row numbers from 0 to 99, got \[-1\]\."),
        ({"rows": ([0.5],)}, InvalidArgument, r"rows of client '0' must be a list of row numbers, got \[0\.5\]\."),
        ({"rows": ([0], [1]), "names": ("a",)}, InvalidArgument, r"names must be one per client \(2\), got 1\."),
        ({"rows": ([0], [1]), "names": ("a", "a")}, InvalidArgument, r"names must be distinct, got \('a', 'a'\)\."),
        (
            {"rows": ([0], [1]), "held_out": ([2],)},
            InvalidArgument,
            r"held_out must be one index array per client \(2\)",
        ),
        (
            {"rows": ([0], [1]), "held_out": ([2], [100])},
            InvalidArgument,
            r"held_out of client '1' must be row numbers",
        ),
    ],
)
def test_federations_that_make_no_sense(dataset, arguments, error, sentence):
    with pytest.raises(error, match=sentence):
        Federation(dataset, **arguments)


@pytest.mark.parametrize("i", [-1, 2, "0"])
def test_client_that_does_not_exist(dataset, i):
    with pytest.raises(InvalidArgument, match=r"client \(i\) must be a number from 0 to 1, got"):
        dataset.split(2).client(i)


def test_from_arrays_keeps_what_each_client_has():
    a, b = (np.ones((2, 3)), [0, 1]), (2 * np.ones((4, 3)), [1, 1, 0, 2])
    federation = Federation.from_arrays([a, b], names=["north", "south"], feature_names=["u", "v", "w"])
    assert federation.names == ("north", "south")
    assert federation.sizes.tolist() == [2, 4]
    assert federation.dataset.classes == ("0", "1", "2")
    assert [c.name for c in federation.dataset.schema.columns] == ["u", "v", "w"]
    x, y = federation.client(1)
    assert np.array_equal(x, b[0])
    assert y.tolist() == [1, 1, 0, 2]


def test_from_arrays_takes_class_names_and_regression():
    pair = (np.eye(2), [0, 1])
    assert Federation.from_arrays([pair], classes=["no", "yes"]).dataset.classes == ("no", "yes")
    arrays = Federation.from_arrays([pair], classes=np.array(["no", "yes"]), feature_names=np.array(["a", "b"])).dataset
    assert (arrays.classes, arrays.schema.columns[1].name) == (("no", "yes"), "b")
    assert Federation.from_arrays([pair], classes=()).dataset.classes == ()
    assert Federation.from_arrays([(np.eye(2), [0.5, 1])]).dataset.classes == ()


GOOD = (np.eye(2), [0, 1])


@pytest.mark.parametrize(
    ("clients", "options", "sentence"),
    [
        ([], {}, r"clients must be a list of pairs \(x, y\), at least one, got \[\]\."),
        ([np.eye(2)], {}, r"clients must be a list of pairs \(x, y\)"),
        ([GOOD, (np.empty((0, 2)), [])], {}, r"dataset 'client 1' must be of at least one row, got none\."),
        (
            [GOOD, (np.eye(3), [0, 1, 1])],
            {},
            r"x of 'client 1' must be of 2 columns, as those of 'client 0' are, got 3",
        ),
        (
            [GOOD, (np.eye(2), [0])],
            {},
            r"y of dataset 'client 1' must be one number per row, shape \(2,\), got \(1,\)\.",
        ),
        (
            [GOOD, ([[1, np.nan], [0, 0]], [0, 1])],
            {},
            r"x of dataset 'client 1' must be finite, got nan at row 0, column",
        ),
        (
            [GOOD, ([[1, "b"], [0, 0]], [0, 1])],
            {},
            r"x of dataset 'client 1' must be numbers, got 'b' at row 0, column 1",
        ),
        ([GOOD], {"classes": ["a"]}, r"y of dataset 'client 0' must be class codes 0\.\.0, got 1 at row 1\."),
        ([GOOD], {"names": ["a", "b"]}, r"names must be one per client \(1\), got 2\."),
    ],
)
def test_arrays_that_cannot_be_used(clients, options, sentence):
    with pytest.raises((DataError, InvalidArgument), match=sentence):
        Federation.from_arrays(clients, **options)


def test_changing_ones_own_array_does_not_change_the_federation():
    x = np.eye(3)
    federation, data = Federation.from_arrays([(x, [0, 1, 0])]), from_arrays(x, [0, 1, 0])
    x[0, 0] = 5
    assert federation.client(0)[0][0, 0] == data.x[0, 0] == data.raw["x0"][0] == 1


@pytest.mark.parametrize(("scale", "sparse"), [("standard", False), ("norm", False), ("norm", True)])
def test_rows_held_out_do_not_decide_the_scaling(scale, sparse):
    """The statistics are those of the training rows, worked out here from the raw numbers."""
    x = np.random.default_rng(3).lognormal(size=(40, 3)) * [1, 100, 0.01]
    dataset = from_arrays(scipy.sparse.csr_array(x) if sparse else x, np.arange(40) % 2, scale=scale)
    federation = dataset.split(clients=4, holdout=0.25, seed=1)
    kept = x[np.concatenate(federation.rows)]
    shift, divisor = (kept.mean(0), kept.std(0)) if scale == "standard" else (0, np.sqrt((kept**2).sum(0)))
    found = federation.dataset.x.toarray() if sparse else federation.dataset.x
    np.testing.assert_allclose(found, (x - shift) / divisor, rtol=1e-10, atol=1e-12)
    schema = federation.dataset.schema
    np.testing.assert_allclose(schema.scaled(x), found, rtol=1e-10, atol=1e-12)
    assert dataset.split(clients=4, seed=1).dataset is dataset, "nothing is held out: nothing changes"
    assert dataset.take(range(30)).scale == scale
