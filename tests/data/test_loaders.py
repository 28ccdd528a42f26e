import numpy as np
import pytest
from sklearn import datasets

import fedpact.data as data
from fedpact.core.errors import InvalidArgument, UnknownName

FACTS = {  # rows, features, counts per class, from the datasets' own descriptions
    "breast_cancer": (569, 30, [212, 357]),
    "digits": (1797, 64, [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]),
    "wine": (178, 13, [59, 71, 48]),
    "iris": (150, 4, [50, 50, 50]),
    "diabetes": (442, 10, []),
}


@pytest.mark.parametrize("name", FACTS)
def test_bundled_sets(name):
    dataset = data.load(name)
    rows, features, counts = FACTS[name]
    assert (dataset.name, dataset.rows, dataset.features) == (name, rows, features)
    assert len(dataset.classes) == len(counts)
    if counts:
        assert np.bincount(dataset.y.astype(int)).tolist() == counts
    np.testing.assert_allclose(dataset.x.mean(axis=0), 0, atol=1e-12)
    constant = dataset.x.std(axis=0) == 0
    np.testing.assert_allclose(dataset.x.std(axis=0)[~constant], 1, rtol=1e-12)
    assert constant.sum() == (3 if name == "digits" else 0)  # three pixels are always blank
    assert all(dataset.schema.scale[j] == 1 for j in np.flatnonzero(constant))


def test_bundled_sets_can_be_unscaled_to_what_scikit_learn_has():
    dataset, bunch = data.breast_cancer(), datasets.load_breast_cancer()
    np.testing.assert_allclose(
        dataset.x * dataset.schema.scale + dataset.schema.shift, bunch.data, rtol=1e-9, atol=1e-12
    )
    assert np.array_equal(dataset.y, bunch.target)
    assert dataset.classes == ("malignant", "benign")
    assert dataset.raw["diagnosis"][0] == "malignant"
    assert np.array_equal(dataset.raw["mean radius"], bunch.data[:, 0])


def test_diabetes_is_regression_on_the_original_units():
    dataset = data.diabetes()
    assert dataset.classes == ()
    assert (dataset.y.min(), dataset.y.max()) == (25, 346)
    assert dataset.raw["age"][0] == 59
    scaled = datasets.load_diabetes().data  # the same columns, scaled by scikit-learn
    np.testing.assert_allclose(dataset.x, scaled / scaled.std(axis=0), atol=1e-9)


def test_synthetic_least_squares_is_a_linear_rule_with_noise():
    exact = data.synthetic("least_squares", rows=200, features=5, noise=0.0, seed=3)
    w, residual, _, _ = np.linalg.lstsq(exact.x, exact.y, rcond=None)
    assert np.linalg.norm(w) == pytest.approx(1)
    assert residual.sum() < 1e-20
    noisy = data.synthetic("least_squares", rows=4000, features=5, noise=0.3, seed=3)
    w = np.linalg.lstsq(noisy.x, noisy.y, rcond=None)[0]
    assert np.std(noisy.y - noisy.x @ w) == pytest.approx(0.3, rel=0.05)
    assert noisy.classes == ()


def test_synthetic_logistic_has_both_classes_and_follows_the_rule():
    for rows, seed in ((2, 0), (3, 1), (50, 2)):
        dataset = data.synthetic(rows=rows, features=4, seed=seed)
        assert set(dataset.y) == {0, 1}
    big = data.synthetic(rows=4000, features=4, noise=0.0)
    assert big.y.mean() == 0.5
    w = np.linalg.lstsq(big.x, big.y - 0.5, rcond=None)[0]
    assert np.mean((big.x @ w > 0) == big.y) > 0.95
    assert np.linalg.cond(big.x) < 1.2


def test_synthetic_depends_on_the_seed_only():
    assert data.synthetic(seed=1).digest == data.synthetic(seed=1).digest != data.synthetic(seed=2).digest


@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [
        (
            {"kind": "logistics"},
            UnknownName,
            r"kind must be one of least_squares, logistic, got 'logistics'\. Did you",
        ),
        ({"rows": 0}, InvalidArgument, r"rows \(d\) must be an integer of at least 1, got 0\."),
        ({"rows": 1}, InvalidArgument, r"rows \(d\) must be at least 2, got 1\."),
        ({"features": 0}, InvalidArgument, r"features \(n\) must be an integer of at least 1, got 0\."),
        ({"noise": -1}, InvalidArgument, r"noise must be a finite number of at least 0, got -1\."),
        ({"seed": -1}, InvalidArgument, r"seed must be an integer of at least 0, got -1\."),
    ],
)
def test_synthetic_arguments(options, error, sentence):
    with pytest.raises(error, match=sentence):
        data.synthetic(**options)


def test_load_by_name_is_the_function_and_takes_its_options():
    assert data.load("synthetic", rows=20, seed=4).digest == data.synthetic(rows=20, seed=4).digest
    images = {"cifar10", "fashion_mnist", "mnist"}
    assert set(data.names()) == {
        *FACTS,
        *images,
        "adult",
        "covtype",
        "mixture",
        "qsar",
        "santander",
        "synthetic",
        "w8a",
    }
    assert all(line and "\n" not in line for line in data.names().values())


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("adlt", {}, r"dataset must be one of adult, .*, wine, got 'adlt'\. Did you mean 'adult'\?"),
        (
            "synthetic",
            {"row": 5},
            r"option of dataset 'synthetic' must be one of .*, got 'row'\. Did you mean 'rows'\?",
        ),
        ("iris", {"rows": 5}, r"option of dataset 'iris' must be one of \(none\), got 'rows'\."),
    ],
)
def test_load_names_that_do_not_exist(name, options, sentence):
    with pytest.raises(UnknownName, match=sentence):
        data.load(name, **options)


def test_public_names_are_sorted_documented_and_there():
    assert data.__all__ == sorted(data.__all__)
    assert all(getattr(data, name).__doc__ for name in data.__all__)
