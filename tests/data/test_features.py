import dataclasses
import re

import numpy as np
import pytest
import scipy.sparse

from fedpact.core.errors import DataError, InvalidArgument, UnknownName
from fedpact.data import Federation, VerticalFederation, align, from_arrays, from_csv, synthetic
from fedpact.data.features import Layout


@pytest.fixture
def dataset():
    return synthetic(rows=40, features=7, seed=1)


def columns_of(federation):
    return [block.tolist() for block in federation.blocks]


def test_equal_runs_of_columns(dataset):
    federation = dataset.split_features(3)
    assert columns_of(federation) == [[0, 1, 2], [3, 4], [5, 6]]
    assert federation.parties == ("0", "1", "2")
    assert federation.layout == Layout(((0, 1, 2), (3, 4), (5, 6)), ("0", "1", "2"), 0)
    assert federation.description == "features, 3 parties"
    text = "'synthetic logistic': 3 parties with 2 to 3 of 7 features, 40 records; labels with '0'"
    assert repr(federation) == f"VerticalFederation({text})"
    assert federation.alignment() == "Every party has every record."
    assert federation.unmatched == {}
    assert dataset.split_features(np.int64(3)).digest == federation.digest


@pytest.mark.parametrize("parties", [2, 3, 4, 5, 6, 7])
def test_blocks_are_a_partition(dataset, parties):
    blocks = columns_of(dataset.split_features(parties))
    sizes = [len(block) for block in blocks]
    assert sorted(j for block in blocks for j in block) == list(range(7))
    assert max(sizes) - min(sizes) <= 1
    assert len(blocks) == parties


def test_engines_see_one_client_with_all_records(dataset):
    federation = dataset.split_features(3)
    assert isinstance(federation, Federation)
    assert (federation.clients, federation.sizes.tolist(), federation.features) == (1, [40], 7)
    x, y = federation.client(0)
    assert np.array_equal(x, dataset.x)
    assert np.array_equal(y, dataset.y)
    assert federation.test(0)[0].shape == (0, 7)


def test_blocks_by_number_and_by_name(dataset):
    names = [column.name for column in dataset.schema.columns]
    numbers = [[6, 0], range(1, 4), np.array([5, 4])]
    federation = dataset.split_features(blocks=numbers, names=["a", "b", "c"], closer=2)
    assert columns_of(federation) == [[6, 0], [1, 2, 3], [5, 4]], "in the party's order"
    assert federation.layout.names == ("a", "b", "c")
    assert repr(federation).endswith("3 parties with 2 to 3 of 7 features, 40 records; labels with 'c')")
    same = [[names[j] for j in block] for block in numbers]
    assert columns_of(dataset.split_features(3, blocks=same)) == columns_of(federation)
    mixed = [[names[6], 0], [1, names[2], 3], same[2]]
    assert columns_of(dataset.split_features(blocks=mixed)) == columns_of(federation)


def test_the_name_of_a_coded_column_means_all_its_features(csv_file):
    path = csv_file("age,ward,sick\n30,b,no\n50,c,yes\n40,a,no\n")
    dataset = from_csv(path, "sick", categorical="ward", coding="onehot")
    assert columns_of(dataset.split_features(blocks=[["ward"], ["age"]])) == [[1, 2, 3], [0]]
    assert columns_of(dataset.split_features(blocks=[["ward=a", "age"], ["ward=c", "ward=b"]])) == [[1, 0], [3, 2]]


def test_the_datasets_own_test_rows_are_nobodys(dataset):
    tested = dataclasses.replace(dataset, test=[3, 5])
    federation = tested.split_features(2, holdout=0.5)
    given = np.concatenate([federation.rows[0], federation.held_out[0]])
    assert sorted(given.tolist()) == [i for i in range(40) if i not in (3, 5)]


@pytest.mark.parametrize("sparse", [False, True])
def test_holdout_is_drawn_as_for_one_client_and_does_not_scale(sparse):
    x = np.random.default_rng(3).lognormal(size=(40, 3)) * [1, 100, 0.01]
    dataset = from_arrays(scipy.sparse.csr_array(x) if sparse else x, np.arange(40) % 2, scale="norm")
    federation = dataset.split_features(2, holdout=0.25, seed=7)
    assert [len(federation.rows[0]), len(federation.held_out[0])] == [30, 10]
    aside = np.sort(np.random.default_rng([7, 2, 0]).permutation(40)[:10])  # (seed, purpose, client)
    assert federation.held_out[0].tolist() == aside.tolist()
    kept = np.delete(x, aside, axis=0)
    found = federation.dataset.x.toarray() if sparse else federation.dataset.x
    np.testing.assert_allclose(found, x / np.sqrt((kept**2).sum(0)))
    assert federation.description == "features, 2 parties, seed 7, holdout 0.25"
    assert "30 records, 10 held out; labels" in repr(federation)
    assert dataset.split_features(2).dataset is dataset


def test_digest_covers_blocks_names_and_closer(dataset):
    def digest(blocks=([0, 1, 2], [3, 4, 5, 6]), **options):
        return dataset.split_features(blocks=blocks, **options).digest

    others = [
        digest(([0, 2, 1], [3, 4, 5, 6])),
        digest(([0, 1], [2, 3, 4, 5, 6])),
        digest(([3, 4, 5, 6], [0, 1, 2])),
        digest(names=["a", "b"]),
        digest(closer=1),
        digest(holdout=0.5),
        digest(holdout=0.5, seed=1),
        Federation(dataset, (np.arange(40),)).digest,
        synthetic(rows=40, features=7, seed=2).split_features(blocks=[[0, 1, 2], [3, 4, 5, 6]]).digest,
    ]
    assert digest() == digest(seed=9) == digest(names=["0", "1"])
    assert len({digest(), *others}) == 10


def test_blocks_cannot_be_changed(dataset):
    mine = np.arange(3)
    federation = dataset.split_features(blocks=[mine, [3, 4, 5, 6]])
    mine[0] = 5
    assert federation.blocks[0].tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match="read-only"):
        federation.blocks[0][0] = 5


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({}, r"clients must be a number of parties from 2 to that of the columns \(7\), got None\. Or give blocks"),
        ({"clients": 1}, r"clients must be a number of parties from 2 to that of the columns \(7\), got 1\."),
        ({"clients": 8}, r"clients must be a number of parties from 2 to that of the columns \(7\), got 8\."),
        ({"clients": 2.0}, r"clients must be a number of parties from 2 to .*, got 2\.0\."),
        ({"clients": 3, "blocks": [[0], [1]]}, r"clients must be 2, as blocks says, or left out, got 3\. Leave"),
        ({"blocks": [range(7)]}, r"blocks must be the columns of at least two parties, got 1\."),
        ({"blocks": "ab"}, r"blocks must be a list of columns per party, got 'ab'\."),
        ({"blocks": [range(6), 6]}, r"blocks must be a list of columns per party, got 6\."),
        (
            {"blocks": [range(7), []]},
            r"block of party '1' must be at least one column, got \[\]\. Give it a column, or",
        ),
        ({"blocks": [range(6), [7]]}, r"block of party '1' must be column numbers from 0 to 6, got \[7\]\."),
        ({"blocks": [range(6), [-1]]}, r"block of party '1' must be column numbers from 0 to 6, got \[-1\]\."),
        ({"blocks": [range(6), [0.5]]}, r"block of party '1' must be a list of column numbers, got \[0\.5\]\."),
        (
            {"blocks": [range(6), [6, 2]], "names": ["bank", "shop"]},
            r"column 'x2' \(number 2\) must be in one block, once, got \['bank', 'shop'\]\. Take it out of one",
        ),
        ({"blocks": [range(6), [6, 6]]}, r"column 'x6' \(number 6\) must be in one block, once, got \['1', '1'\]\."),
        (
            {"blocks": [[1], [3]]},
            r"must have all 7 columns, got 5 that nobody holds: 'x0', 'x2', 'x4', 'x5', 'x6'\. Give",
        ),
        ({"blocks": [[1], []]}, r"block of party '1' must be at least one column"),
        ({"clients": 3, "names": ["a", "b"]}, r"names of the parties must be one per block \(3\), got 2\."),
        ({"clients": 2, "names": ["a", "a"]}, r"names of the parties must be distinct, got \('a', 'a'\)\."),
        ({"clients": 2, "names": "ab"}, r"names must be a list of names, one per party, got 'ab'\."),
        ({"clients": 2, "closer": 2}, r"closer must be a party's number from 0 to 1, got 2\."),
        ({"clients": 2, "closer": -1}, r"closer must be a party's number from 0 to 1, got -1\."),
        ({"clients": 2, "closer": True}, r"closer must be a party's number from 0 to 1, got True\."),
        ({"clients": 2, "holdout": 1.0}, r"holdout must be a fraction in \[0, 1\), got 1\.0\."),
        ({"clients": 2, "seed": -1}, r"seed must be an integer of at least 0, got -1\."),
    ],
)
def test_splits_that_make_no_sense(options, sentence):
    with pytest.raises(InvalidArgument, match=sentence):
        from_arrays(np.eye(7), np.arange(7) % 2).split_features(**options)


def test_columns_that_do_not_exist_or_that_nobody_holds():
    dataset = from_arrays(np.eye(9), np.arange(9) % 2)
    with pytest.raises(UnknownName, match=r"column of dataset 'arrays' must be one of x0, .*, got 'y0'\. Did you mean"):
        dataset.split_features(blocks=[["x1"], ["y0"]])
    with pytest.raises(InvalidArgument, match=r"got 7 that nobody holds: 'x1', 'x2', 'x3', 'x4', 'x5', …\. Give each"):
        dataset.split_features(blocks=[[0], [8]])


def test_a_vertical_federation_has_one_client(dataset):
    with pytest.raises(InvalidArgument, match=r"rows must be one index array, of the records that all .*, got 2\."):
        VerticalFederation(dataset, ([0], [1]), blocks=([0, 1, 2], [3, 4, 5, 6]))


# One CSV file per party.

BANK = "id,income,job\nc,3,cook\na,1,nurse\nb,2,cook\n"
SHOP = "visits,id,buys\n10,a,no\n30,c,yes\n20,b,no\n"


@pytest.fixture
def files(csv_file):
    return [csv_file(BANK, "bank.csv"), csv_file(SHOP, "shop.csv")]


def join(files, **options):
    return align(files, **{"on": "id", "target": "buys", "categorical": "job", "scale": "none", **options})


def test_records_come_in_the_order_of_the_labels(files):
    federation = join(files)
    assert federation.dataset.x.tolist() == [[1, 1, 10], [3, 0, 30], [2, 0, 20]]  # a, c, b; cook 0, nurse 1
    assert federation.dataset.y.tolist() == [0, 1, 0]
    assert federation.dataset.classes == ("no", "yes")
    assert federation.layout == Layout(((0, 1), (2,)), ("bank", "shop"), 1)
    assert [column.name for column in federation.dataset.schema.columns] == ["income", "job", "visits"]
    assert federation.dataset.raw["id"].tolist() == ["a", "c", "b"]
    assert federation.dataset.raw["job"].tolist() == ["nurse", "cook", "cook"]
    assert federation.dataset.raw["buys"].tolist() == ["no", "yes", "no"]
    assert (federation.rows[0].tolist(), federation.unmatched) == ([0, 1, 2], {})
    assert federation.description == "features, 2 parties, aligned on 'id'"
    text = "'bank+shop': 2 parties with 1 to 2 of 3 features, 3 records; labels with 'shop'"
    assert repr(federation) == f"VerticalFederation({text})"


def test_the_order_of_files_and_of_the_others_rows_is_no_matter(files, csv_file):
    federation, turned = join(files), join(files[::-1])
    assert turned.dataset.x[:, [1, 2, 0]].tolist() == federation.dataset.x.tolist()
    assert turned.dataset.y.tolist() == federation.dataset.y.tolist()
    assert turned.layout == Layout(((0,), (1, 2)), ("shop", "bank"), 0)
    header, *lines = BANK.splitlines()
    csv_file("\n".join([header, *sorted(lines)]), "bank.csv")
    assert join(files).digest == federation.digest


def test_names_are_given_with_the_paths(files):
    federation = join({"credit": files[0], "store": str(files[1])})
    assert federation.parties == ("credit", "store")
    assert columns_of(federation) == columns_of(join(files))
    assert federation.digest != join(files).digest


def test_three_parties_and_a_join_done_by_from_csv(files, csv_file):
    """The witness is one file that was joined by hand."""
    files.append(csv_file("id,age\nb,40\nc,60\na,50\n", "clinic.csv"))
    joined = csv_file("income,job,visits,age,buys\n1,nurse,10,50,no\n3,cook,30,60,yes\n2,cook,20,40,no\n", "joined.csv")
    for options in ({"scale": "standard"}, {"scale": "norm", "coding": "onehot"}):
        federation, whole = join(files, **options), from_csv(joined, "buys", categorical="job", **options)
        assert federation.dataset.digest == whole.digest
        assert federation.dataset.schema == whole.schema
        assert federation.parties == ("bank", "shop", "clinic")


def test_a_category_becomes_features_of_its_party(files):
    federation = join(files, coding="onehot")
    assert [column.name for column in federation.dataset.schema.columns] == [
        "income",
        "job=cook",
        "job=nurse",
        "visits",
    ]
    assert columns_of(federation) == [[0, 1, 2], [3]]
    assert federation.dataset.x[:, 1:3].tolist() == [[0, 1], [1, 0], [1, 0]]


def test_targets_of_numbers(csv_file):
    people = [csv_file("id,a\n" + "".join(f"{i},{i * i}\n" for i in range(30)), "one.csv")]
    people.append(csv_file("id,b,t\n" + "".join(f"{i},{-i},{i / 2}\n" for i in range(29, -1, -1)), "two.csv"))
    federation = align(people, "id", "t", holdout=0.2, seed=3)
    assert federation.dataset.classes == ()
    assert federation.dataset.y.tolist() == [i / 2 for i in range(29, -1, -1)]
    assert len(federation.held_out[0]) == 6
    kept = federation.dataset.x[federation.rows[0]]
    np.testing.assert_allclose([kept.mean(0), kept.std(0)], [[0, 0], [1, 1]], atol=1e-12)
    classes = align(people, "id", "t", task="classification").dataset
    assert (len(classes.classes), classes.classes[:2]) == (30, ("0.0", "0.5"))


def test_columns_of_the_same_name_are_told_apart(csv_file):
    paths = [
        csv_file("id,age,ward\n1,30,a\n2,40,b\n", "north.csv"),
        csv_file("id,ward,age,y\n2,d,41,0\n1,c,31,1\n", "south.csv"),
    ]
    options = {"on": "id", "target": "y", "scale": "none"}
    dataset = align(paths, categorical="ward", coding="onehot", **options).dataset
    names = ["north.age", "north.ward=a", "north.ward=b", "south.ward=c", "south.ward=d", "south.age"]
    assert [column.name for column in dataset.schema.columns] == names
    assert dataset.x.tolist() == [[40, 0, 1, 0, 1, 41], [30, 1, 0, 1, 0, 31]]
    assert set(dataset.raw) == {"id", "y", "north.age", "north.ward", "south.age", "south.ward"}
    header, row = ["south.age", "north.age", "south.ward", "north.ward"], ["1", "2", "c", "b"]
    assert dataset.schema.encode(header, [row], "new").tolist() == [[2, 0, 1, 1, 0, 1]]
    less = align(paths, categorical="north.ward", drop=["south.ward", "north.age"], **options)
    assert [column.name for column in less.dataset.schema.columns] == ["north.ward", "south.age"]
    assert less.dataset.raw["north.age"].tolist() == ["40", "30"]
    with pytest.raises(
        DataError, match=r"column 'south\.ward' \(.*south\.csv, line 2\) must be a finite .*, got 'd'\."
    ):
        align(paths, categorical="north.ward", **options)


LONG = BANK + "d,4,cook\ne,5,cook\nf,6,judge\ng,x,cook\n"
MORE = SHOP + "7,z,maybe\n"


def test_records_that_some_lack_are_refused(files, csv_file):
    csv_file(LONG, "bank.csv"), csv_file(MORE, "shop.csv")
    files.append(csv_file("id,age\nb,40\nc,60\na,50\n", "clinic.csv"))
    said = r"bank\.csv 4 of 7 \('d', 'e', 'f', …\); .*shop\.csv 1 of 4 \('z'\); .*clinic\.csv 0 of 3\."
    with pytest.raises(
        DataError, match=rf"files must have the same ids in column 'id', got ids that .*{said}"
    ) as error:
        join(files)
    assert str(error.value).endswith('. Correct the files, or keep the 3 that all have with unmatched="drop".')


def test_records_that_some_lack_are_left_out_and_reported(files, csv_file):
    whole = join(files)
    csv_file(LONG, "bank.csv"), csv_file(MORE, "shop.csv")
    federation = join(files, unmatched="drop")
    assert federation.digest == whole.digest, "a category, a class and a bad cell of records left out are no matter"
    assert federation.unmatched == {
        "bank": {"records": 7, "kept": 3, "missing": 4, "examples": ("d", "e", "f")},
        "shop": {"records": 4, "kept": 3, "missing": 1, "examples": ("z",)},
    }
    assert federation.alignment().splitlines() == [
        "party  records     kept  missing elsewhere",
        "bank         7        3                  4: d, e, f, …",
        "shop         4        3                  1: z",
    ]


def test_an_error_tells_the_line_in_the_partys_own_file(files, csv_file):
    csv_file(LONG.replace("b,2,", "b,two,"), "bank.csv")
    with pytest.raises(
        DataError, match=r"column 'income' \(.*bank\.csv, line 4\) must be .*, got 'two'\. Add the column"
    ):
        join(files, unmatched="drop")
    csv_file("visits,id,buys\n1,z,no\n1,a,1\n30,c,yes\n20,b,3\n", "shop.csv")
    with pytest.raises(DataError, match=r"column 'buys' \(.*shop\.csv, line 4\) must be a finite number, got 'yes'\."):
        join([csv_file(LONG, "bank.csv"), files[1]], unmatched="drop")


FILES = [
    (BANK + "a,9,cook\n", SHOP, {}, r"id 'a' of .*bank\.csv must occur once, got it on lines 3 and 5\. Remove one"),
    (BANK, SHOP + "1,,no\n", {}, r"column 'id' \(.*shop\.csv, line 5\) must be filled in every row, got an empty cell"),
    (BANK.replace("id", "ID"), SHOP, {}, r"bank\.csv must have the id column 'id', got only ID, .*mean 'ID'\?"),
    (
        BANK.replace("job", "buys"),
        SHOP,
        {},
        r"target 'buys' must be in one party's file, got it in .*bank\.csv and .*sh",
    ),
    (
        BANK,
        SHOP,
        {"target": "buy"},
        r"target must be one of buys, income, job, visits, got 'buy'\. Did you mean 'buys'",
    ),
    (BANK, SHOP, {"target": "id"}, r"target must be another column than the id, got 'id'\."),
    (
        "id,income,job\n01,1,cook\n",
        SHOP,
        {},
        r"files must share ids in column 'id', got none that all have: .*bank\.csv begins with '01', .* with 'a'\.",
    ),
    ("id,income,job\n01,1,cook\n", SHOP, {"unmatched": "drop"}, r"got none that all have"),
    (BANK, SHOP, {"unmatched": "keep"}, r"unmatched must be one of drop, refuse, got 'keep'\."),
    (
        BANK,
        SHOP,
        {"categorical": ()},
        r"column 'job' \(.*bank\.csv, line 3\) must be a finite number, got 'nurse'\. Add",
    ),
    (
        BANK,
        SHOP,
        {"drop": ["income", "job"], "categorical": ()},
        r"bank\.csv must have a feature, got none besides the id, the target and dropped",
    ),
    (BANK, SHOP, {"drop": "visit"}, r"drop must be one of .*, got 'visit'\. Did you mean 'visits'\?"),
    (BANK, SHOP, {"drop": ["id"]}, r"drop must be columns other than the id and the target, got \['id'\]\."),
    (BANK, SHOP, {"categorical": "buys"}, r"categorical must be columns other than the id and the target, got"),
    (BANK, SHOP, {"scale": "unit"}, r"scale must be one of none, norm, standard, got 'unit'\."),
    (BANK, SHOP, {"task": "guess"}, r"task must be one of auto, classification, regression, got 'guess'\."),
    (BANK, SHOP, {"coding": "hot"}, r"coding must be one of onehot, ordinal, got 'hot'\."),
    (BANK, SHOP, {"holdout": 2}, r"holdout must be a fraction in \[0, 1\), got 2\."),
    (
        BANK,
        SHOP.replace("yes", "no"),
        {},
        r"target 'buys' of .*shop\.csv must be of at least two classes, got only 'no'",
    ),
    (BANK, "", {}, r"shop\.csv must be a header line and rows, got an empty file\."),
]


@pytest.mark.parametrize(("bank", "shop", "options", "sentence"), FILES)
def test_files_that_cannot_be_joined(csv_file, bank, shop, options, sentence):
    with pytest.raises((DataError, InvalidArgument, UnknownName), match=sentence):
        join([csv_file(bank, "bank.csv"), csv_file(shop, "shop.csv")], **options)


def test_fewer_than_two_files_and_names_that_are_not_distinct(files, tmp_path):
    for given in (files[:1], {"bank": files[0]}, [], str(files[0]), [files[0], 3], 5):
        shown = "" if given == files[:1] else re.escape(repr(given)[:20])
        with pytest.raises(InvalidArgument, match=rf"files must be at least two paths, one per party, got .*{shown}"):
            join(given)
    with pytest.raises(InvalidArgument, match=r"names of the parties must be distinct, got \['bank', 'bank'\]\. Give"):
        join([files[0], tmp_path / "other" / "bank.csv"])
    with pytest.raises(DataError, match=r"path must be a CSV file, got '.*none\.csv', which does not exist\."):
        join([files[0], tmp_path / "none.csv"])


def test_line_breaks_inside_cells_are_counted(csv_file, files):
    csv_file('id,income,job\n"c",3,"co\nok"\na,1,nurse\nb,2,cook\na,5,cook\n', "bank.csv")
    with pytest.raises(DataError, match=r"id 'a' of .*bank\.csv must occur once, got it on lines 4 and 6\."):
        join(files)


def test_who_has_the_labels_may_have_nothing_else(files):
    federation = join(files, drop="visits")
    assert federation.table()["shop"] == {"features": 0, "labels": True}
    assert federation.dataset.features == sum(len(block) for block in federation.blocks) > 0
