"""Sparse features in datasets, federations and models, beside the same numbers in full; and columns beside them."""

import numpy as np
import pytest
import scipy.sparse
from sklearn.metrics import log_loss, roc_auc_score

import fedpact as fp
from fedpact.core.errors import DataError, InvalidArgument, UnknownName
from fedpact.core.vector import Vector
from fedpact.data import Dataset, Federation, Schema, from_arrays
from fedpact.data.dataset import Column
from fedpact.metrics import held_out

DENSE = np.array([[3.0, 0, 0, 0], [0, 0, -2, 0], [0, 0, 0, 0], [4, 0, 0, 0.5], [0, 0, 1, 0]])
Y = np.array([0.0, 1, 1, 0, 1])
SPARSE = scipy.sparse.csr_array(DENSE)


def same(dataset, dense):
    """A sparse dataset holds the dense one's numbers."""
    assert scipy.sparse.issparse(dataset.x)
    assert dataset.x.format == "csr"
    assert dataset.x.dtype == np.float64
    np.testing.assert_array_equal(dataset.x.toarray(), dense.x)
    np.testing.assert_array_equal(dataset.y, dense.y)
    assert dataset.schema == dense.schema


@pytest.mark.parametrize("kind", ["csr", "csc", "coo", "lil", "dok", "dia", "bsr"])
def test_every_format_of_scipy(kind):
    same(from_arrays(SPARSE.asformat(kind), Y), from_arrays(DENSE, Y))
    same(from_arrays(scipy.sparse.csr_matrix(DENSE).asformat(kind), Y), from_arrays(DENSE, Y))


@pytest.mark.parametrize("dtype", [bool, np.int8, np.uint16, np.int64, np.float32])
def test_other_numbers_become_doubles(dtype):
    same(from_arrays(scipy.sparse.csr_array(DENSE != 0).astype(dtype), Y), from_arrays(DENSE != 0, Y))


def test_duplicates_are_summed_and_stored_zeros_dropped():
    """(0, 0) twice, 1 + 2; (1, 2) as −2 + 1 − 1; a stored 0 and a pair that cancels."""
    rows, columns = [0, 0, 1, 1, 1, 2, 3, 3, 3, 3, 4], [0, 0, 2, 2, 2, 1, 3, 0, 1, 1, 2]
    values = [1.0, 2, -2, 1, -1, 0, 0.5, 4, 7, -7, 1]
    ends = np.cumsum([0, 2, 3, 1, 4, 1])
    for mine in (
        scipy.sparse.coo_array((values, (rows, columns)), shape=(5, 4)),
        scipy.sparse.csr_array((values, columns, ends), shape=(5, 4)),  # which keeps them as they are
    ):
        dataset = from_arrays(mine, Y)
        same(dataset, from_arrays(DENSE, Y))
        assert dataset.x.nnz == 5
        assert dataset.digest == from_arrays(SPARSE, Y).digest


def test_the_digest_is_of_the_numbers():
    one = from_arrays(SPARSE, Y)
    assert one.digest == from_arrays(SPARSE.tocsc(), Y, name="other").digest
    seen = {one.digest}
    for change in (
        {"x": 0.5 * SPARSE},
        {"x": scipy.sparse.csr_array(DENSE + 1e-15 * (DENSE == 1))},
        {"x": scipy.sparse.csr_array(DENSE[:, [1, 0, 2, 3]])},  # the same numbers in another column
        {"x": scipy.sparse.csr_array(DENSE[[2, 1, 0, 3, 4]])},  # and in another row
        {"x": scipy.sparse.csr_array(np.pad(DENSE, ((0, 0), (0, 1))))},
        {"y": 1 - Y},
    ):
        seen.add(from_arrays(**({"x": SPARSE, "y": Y} | change)).digest)
    assert len(seen) == 7


def test_the_dataset_has_memory_of_its_own_that_cannot_be_changed():
    mine = SPARSE.copy()
    dataset = from_arrays(mine, Y)
    mine.data[:] = 0
    np.testing.assert_array_equal(dataset.x.toarray(), DENSE)
    for array in (dataset.x.data, dataset.x.indices, dataset.x.indptr, dataset.y):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def test_scaling_to_unit_columns():
    """Norms 5, 0, √5 and ½; a column of zeros is divided by 1."""
    dataset = from_arrays(SPARSE, Y, scale="norm")
    assert dataset.schema.scale == pytest.approx((5.0, 1.0, 5**0.5, 0.5), rel=1e-15)
    assert dataset.schema.shift == (0.0,) * 4
    expected = [[0.6, 0, 0, 0], [0, 0, -2 / 5**0.5, 0], [0, 0, 0, 0], [0.8, 0, 0, 1], [0, 0, 1 / 5**0.5, 0]]
    np.testing.assert_allclose(dataset.x.toarray(), expected, rtol=1e-15)
    assert scipy.sparse.issparse(dataset.x)
    same(dataset, from_arrays(DENSE, Y, scale="norm"))


def with_nan(value):
    dense = DENSE.copy()
    dense[3, 3] = value
    return scipy.sparse.csr_array(dense)


def text():
    matrix = SPARSE.copy()
    matrix.data = np.array(["a"] * matrix.nnz)
    return matrix


@pytest.mark.parametrize("scale", ["none", "norm"])
@pytest.mark.parametrize(
    ("x", "sentence"),
    [
        (
            with_nan(np.nan),
            r"x of dataset 'arrays' must be finite, got nan at row 3, column 3\. Fill it or remove the r",
        ),
        (with_nan(-np.inf), r"x of dataset 'arrays' must be finite, got -inf at row 3, column 3\."),
        (text(), r"x of dataset 'arrays' must be numbers, got <U1\. Code it as numbers\."),
        (1j * SPARSE, r"x of dataset 'arrays' must be numbers, got complex128\."),
        (scipy.sparse.coo_array(Y), r"x of dataset 'arrays' must be of shape \(rows, features\), got \(5,\)\."),
        (SPARSE[:4], r"y of dataset 'arrays' must be one number per row, shape \(4,\), got \(5,\)\."),
    ],
)
def test_sparse_features_that_cannot_be_used(x, scale, sentence):
    with pytest.raises(DataError, match=sentence):
        from_arrays(x, Y, scale=scale)


def test_sparse_features_cannot_be_standardised():
    said = (
        r"^scale must be 'norm' or 'none' for sparse features, got 'standard'\. .*subtracting means would fill the zer"
    )
    with pytest.raises(InvalidArgument, match=said):
        from_arrays(SPARSE, Y, scale="standard")
    with pytest.raises(UnknownName, match=r"scale must be one of none, norm, standard, got 'unit'\."):
        from_arrays(SPARSE, Y, scale="unit")


def test_a_dataset_checks_sparse_features_itself():
    schema = Schema((Column("a", "number"), Column("b", "number")), (1.0, 1.0), (0.0, 0.0), "y")
    with pytest.raises(DataError, match=r"x of dataset 'd' must be of shape \(rows, 2\), got \(5, 4\)\."):
        Dataset("d", SPARSE, Y, schema)
    with pytest.raises(DataError, match=r"x of dataset 'd' must be finite, got nan at row 0, column 1\."):
        Dataset("d", scipy.sparse.csr_array([[1.0, np.nan]]), [1.0], schema)
    with pytest.raises(DataError, match=r"dataset 'd' must be of at least one row, got none\."):
        Dataset("d", scipy.sparse.csr_array((0, 2)), [], schema)


def test_rows_are_taken_as_from_the_dense_ones():
    dataset, dense = from_arrays(SPARSE, Y, scale="norm"), from_arrays(DENSE, Y, scale="norm")
    for rows in ([3, 0, 3], [4], Y == 1):
        part = dataset.take(rows)
        same(part, dense.take(rows))
        assert part.raw.keys() == {"y"}
        np.testing.assert_array_equal(part.raw["y"], dense.take(rows).y)


@pytest.mark.parametrize("how", ["iid", "shards", "dirichlet"])
def test_splits_deal_the_same_rows(how):
    options = {"alpha": 5.0} if how == "dirichlet" else {"shards": 1} if how == "shards" else {}
    sparse, dense = (from_arrays(x, Y).split(2, how, seed=3, holdout=0.4, **options) for x in (SPARSE, DENSE))
    assert sparse.clients == dense.clients == 2
    for i in range(2):
        for one, other in ((sparse.client(i), dense.client(i)), (sparse.test(i), dense.test(i))):
            np.testing.assert_array_equal(one[0].toarray(), other[0])
            np.testing.assert_array_equal(one[1], other[1])
    assert sum(len(sparse.test(i)[1]) for i in range(2)) > 0


def test_a_federation_of_one_s_own_sparse_arrays():
    """Where one client's features are sparse, all are stored so."""
    for first, second in ((SPARSE[:2], SPARSE[2:]), (SPARSE[:2], DENSE[2:]), (DENSE[:2], SPARSE[2:])):
        federation = Federation.from_arrays([(first, Y[:2]), (second, Y[2:])], classes=["0", "1"])
        same(federation.dataset, from_arrays(DENSE, Y))
        assert [rows.tolist() for rows in federation.rows] == [[0, 1], [2, 3, 4]]
    with pytest.raises(DataError, match=r"x of dataset 'client 1' must be finite, got nan at row 1, column 3\."):
        Federation.from_arrays([(SPARSE[:2], Y[:2]), (with_nan(np.nan)[2:], Y[2:])])


# Columns that are no features


@pytest.mark.parametrize("x", [SPARSE, DENSE], ids=["sparse", "dense"])
def test_columns_beside_the_features_split_the_rows(x):
    site = ["north", "south", "north", "east", "south"]
    ward = np.array([2, 1, 2, 1, 2])
    dataset = from_arrays(x, Y, extra={"site": site, "ward": ward})
    plain = from_arrays(x, Y)
    assert dataset.features == 4
    assert dataset.schema == plain.schema
    assert dataset.digest == plain.digest
    by_site = dataset.split(how="column", column="site")
    assert by_site.names == ("east", "north", "south")
    assert [rows.tolist() for rows in by_site.rows] == [[3], [0, 2], [1, 4]]
    assert [rows.tolist() for rows in dataset.split(how="column", column="ward").rows] == [[1, 3], [0, 2, 4]]
    assert dataset.take([4, 3]).raw["site"].tolist() == ["south", "east"]
    ward[:] = 0
    assert dataset.raw["ward"].tolist() == [2, 1, 2, 1, 2], "copied"


@pytest.mark.parametrize("x", [SPARSE, DENSE], ids=["sparse", "dense"])
@pytest.mark.parametrize(
    ("extra", "error", "sentence"),
    [
        (
            {"site": ["a"]},
            DataError,
            r"extra\['site'\] of dataset 'd' must be one value per row, shape \(5,\), got \(1,\)",
        ),
        (
            {"site": "a"},
            DataError,
            r"extra\['site'\] of dataset 'd' must be one value per row, shape \(5,\), got \(\)\.",
        ),
        ({"site": np.eye(5)}, DataError, r"extra\['site'\] .* must be one value per row, shape \(5,\), got \(5, 5\)\."),
        ({"site": [[1], [1, 2], 3, 4, 5]}, DataError, r"extra\['site'\] .* one value per row, .*different lengths\."),
        ({"y": Y}, InvalidArgument, r"extra must be columns that are neither features nor the target, got 'y'\. Give"),
        ({"x3": Y}, InvalidArgument, r"extra must be columns that are neither features nor the target, got 'x3'\."),
        (["site"], InvalidArgument, r"extra must be columns by name, got \['site'\]\."),
    ],
)
def test_columns_that_cannot_be_used(x, extra, error, sentence):
    with pytest.raises(error, match=sentence):
        from_arrays(x, Y, name="d", extra=extra)


# Models

W, B = np.array([0.5, 1.0, -0.25, 2.0]), 0.3


@pytest.mark.parametrize("host", [np.asarray, "jax"], ids=["numpy", "jax"])
def test_predictions_for_sparse_rows(host):
    import jax.numpy as jnp

    w = (jnp.asarray if host == "jax" else np.asarray)(W)
    z = DENSE @ W + B
    logistic = fp.Model(fp.Logistic(intercept=True), Vector({"w": w, "b": np.array(B)}), None)
    linear = fp.Model(fp.LeastSquares(), Vector({"w": w}), None)
    for x in (SPARSE, SPARSE.tocsc(), scipy.sparse.coo_matrix(DENSE), SPARSE.astype(np.float32)):
        np.testing.assert_allclose(logistic.predict(x), 1 / (1 + np.exp(-z)), rtol=1e-14)
        np.testing.assert_allclose(linear.predict(x), DENSE @ W, rtol=1e-14)
    with pytest.raises(InvalidArgument, match=r"^x must be an \(N, 4\) array, got \(5, 3\)\.$"):
        linear.predict(SPARSE[:, :3])


def test_scores_on_held_out_sparse_rows():
    """Against scikit-learn, on the rows that the split set aside."""
    rng = np.random.default_rng(0)
    dense = rng.normal(size=(60, 4)) * (rng.random((60, 4)) < 0.4)
    y = (dense @ W + rng.normal(size=60) > 0).astype(float)
    federation = from_arrays(scipy.sparse.csr_array(dense), y, classes=("0", "1")).split(3, seed=1, holdout=0.4)
    model = fp.Model(fp.Logistic(), Vector({"w": W}), None)
    found = held_out(model, federation)
    aside = np.concatenate(federation.held_out)
    p = 1 / (1 + np.exp(-dense[aside] @ W))
    assert found["pooled"]["rows"] == len(aside) == 24
    assert found["pooled"]["log_loss"] == pytest.approx(log_loss(y[aside], p), rel=1e-12)
    assert found["pooled"]["auc"] == pytest.approx(roc_auc_score(y[aside], p), rel=1e-12)
    for client, rows in zip(found["clients"], federation.held_out, strict=True):
        assert client["accuracy"] == pytest.approx(np.mean((dense[rows] @ W > 0) == (y[rows] > 0.5)))
