"""The union of clients' words comes out of the sum of their tables, with how many have each; and nothing else does."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpact.core.errors import InvalidArgument
from fedpact.secure.vocabulary import PLACES, Table

SALT = bytes(range(16))
WORDS = st.text(max_size=12).map(lambda text: text.encode("utf-8", "surrogatepass"))


def opened(table, sets):
    return table.words(sum(table.of(words) for words in sets), len(sets))


@given(st.lists(st.sets(WORDS, max_size=20), min_size=1, max_size=6), st.binary(min_size=16, max_size=16))
@settings(deadline=None, max_examples=60)
def test_the_union_and_how_many_have_each(sets, salt):
    """Any words: none, empty ones, such as end in zeros, the same ones at all clients."""
    counts = Counter(word for words in sets for word in words)
    table = Table.room_for(sum(counts.values()), salt, 48)
    assert opened(table, sets) in (counts, None)
    tries = (Table(bytes([k]) * 16, table.part, 48) for k in range(4))
    assert next(found for one in tries if (found := opened(one, sets)) is not None) == counts


@pytest.mark.parametrize(
    "sets",
    [
        [set()],
        [set(), set(), set()],
        [{b""}],
        [{b"", b"\0", b"\0\0"}, {b"\0"}],
        [{"süß".encode(), "病".encode()}, {"süß".encode()}],
        [{b"yes", b"no"}] * 5,
        [{b"x" * 64}, {b"x" * 63}],
    ],
)
def test_sets_of_every_kind(sets):
    assert opened(Table.room_for(8, SALT, 64), sets) == Counter(word for words in sets for word in words)


def test_the_sum_does_not_depend_on_who_has_which():
    table = Table.room_for(8, SALT, 16)
    one = [{b"a", b"b"}, {b"b", b"c"}, set()]
    other = [{b"b"}, {b"a", b"b", b"c"}, set()]
    np.testing.assert_array_equal(*(sum(table.of(words) for words in sets) for sets in (one, other)))


@pytest.mark.parametrize("count", [10, 100, 300])
def test_few_tables_do_not_peel(count):
    words = [b"%d" % k for k in range(count)]
    tables = [Table.room_for(count, bytes([k, 1]) * 8, 8) for k in range(100)]
    assert sum(table.words(table.of(words), 1) is None for table in tables) <= 1


def test_many_words_peel():
    words = {b"word %d" % k for k in range(5000)}
    assert opened(Table.room_for(5000, SALT, 16), [words, words]) == dict.fromkeys(words, 2)


def test_a_table_that_is_too_small_says_so():
    words = {b"%d" % k for k in range(200)}
    assert Table(SALT, 16, 8).words(Table(SALT, 16, 8).of(words), 1) is None


def test_what_is_no_sum_of_tables_does_not_peel():
    """Nor is a loop made of it: each word comes out once."""
    table = Table(SALT, 8, 8)
    random = np.random.default_rng(0)
    assert table.words(random.integers(-(2**40), 2**40, table.shape), 3) is None
    right = table.of({b"a"})
    assert table.words(2 * right, 1) is None  # more often than there are clients
    assert table.words(-right, 1) is None
    for place in np.flatnonzero(right[:, 0]):
        changed = right.copy()
        changed[place, -1] += 1
        assert table.words(changed, 1) is None
        changed = right.copy()
        changed[place] = 0
        assert table.words(changed, 1) is None
    alone = np.zeros_like(right)
    alone[(np.flatnonzero(right[:, 0])[0] + 1) % len(right)] = right.max(axis=0)  # where the word does not belong
    assert table.words(alone, 1) is None


def test_by_hand():
    """Four cells hold the word, one in each quarter: its number of clients, its length, its bytes by threes."""
    table = Table(SALT, 5, 8)
    cells = table.of([b"grave", b"grave"])
    assert cells.shape == (PLACES * 5, 1 + 2 + 1 + 3)
    held = np.flatnonzero(cells[:, 0])
    assert (held // 5).tolist() == [0, 1, 2, 3]
    for row in cells[held]:
        assert (row[0], row[3]) == (1, 5)
        assert row[4:].tolist() == [int.from_bytes(b"gra", "little"), int.from_bytes(b"ve", "little"), 0]
    assert not np.delete(cells, held, axis=0).any()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((b"short", 4, 8), "salt must be 16 bytes"),
        ((SALT, 0, 8), "part must be an integer of at least 1, got 0"),
        ((SALT, 4, 0), "width must be an integer of at least 1, got 0"),
    ],
)
def test_bad_arguments(arguments, sentence):
    with pytest.raises(InvalidArgument, match=sentence):
        Table(*arguments)


def test_a_word_that_is_too_long():
    with pytest.raises(InvalidArgument, match="word must be of at most 8 bytes, got 9"):
        Table(SALT, 4, 8).of([b"123456789"])
