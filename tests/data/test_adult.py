import numpy as np

from fedpact.data import Federation


def test_counts(adult):
    assert (adult.rows, adult.features) == (45222, 14)
    assert adult.y.sum() == 11208
    assert adult.classes == ("<=50K", ">50K")
    assert set(np.unique(adult.y)) == {0.0, 1.0}


def test_columns_have_norm_one_and_the_norms_are_recorded(adult):
    np.testing.assert_allclose(np.linalg.norm(adult.x, axis=0), 1, rtol=1e-12)
    assert set(adult.schema.shift) == {0.0}
    age = adult.schema.scale[0]
    assert np.isclose(age**2, np.sum(adult.raw["age"] ** 2))


def test_rows_of_adult_test_come_first(adult):
    # First complete rows of adult.test and of adult.data, read off the files.
    assert [adult.raw[c][0] for c in ("age", "fnlwgt", "education", "income")] == [25, 226802, "11th", "<=50K"]
    assert [adult.raw[c][15060] for c in ("age", "fnlwgt", "education", "income")] == [39, 77516, "Bachelors", "<=50K"]
    assert [adult.raw[c][-1] for c in ("age", "fnlwgt", "sex", "income")] == [52, 287927, "Female", ">50K"]


def test_categories_are_coded_alphabetically_over_the_rows_kept(adult):
    column = adult.schema.columns[1]
    # "Never-worked" occurs only in rows with a '?'.
    assert column.categories == (
        "Federal-gov",
        "Local-gov",
        "Private",
        "Self-emp-inc",
        "Self-emp-not-inc",
        "State-gov",
        "Without-pay",
    )
    # 25, Private, 226802, 11th, 7, Never-married, Machine-op-inspct, Own-child, Black, Male, 0, 0, 40, United-States
    raw = adult.x[0] * np.array(adult.schema.scale)
    np.testing.assert_allclose(raw, [25, 2, 226802, 1, 7, 4, 6, 3, 2, 1, 0, 0, 40, 38], rtol=1e-12)


def test_columns_can_be_split_by(adult):
    federation = adult.split(how="column", column="race")
    assert federation.names == ("Amer-Indian-Eskimo", "Asian-Pac-Islander", "Black", "Other", "White")
    assert federation.sizes.sum() == adult.rows
    for name, rows in zip(federation.names, federation.rows, strict=True):
        assert set(adult.raw["race"][rows]) == {name}
    assert adult.split(how="column", column="income").sizes.tolist() == [45222 - 11208, 11208]


def test_recorded_partition_gives_the_recorded_objective(adult, golden):
    d = golden["di"].astype(int)
    rows = golden["perm"].astype(int) - 1
    assert sorted(rows) == list(range(adult.rows))
    assert d.min() > 0.01 * adult.rows / 50
    federation = Federation(adult, tuple(np.split(rows, np.cumsum(d)[:-1])))
    assert federation.sizes.tolist() == d.tolist()
    # PAPERS.md 1.2: f_i = (Σ logloss + (β/2)‖w‖²) / d_i with β = 1e-3; `obj` ends at `sol`.
    w, total = golden["sol"], 0.0
    for i in range(federation.clients):
        x, y = federation.client(i)
        z = x @ w
        total += (np.sum(np.logaddexp(0, z) - y * z) + 0.5e-3 * w @ w) / len(y)
    assert abs(total - golden["obj"][-1]) < 1e-11
