"""Stop rules, each against numbers worked out by hand."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import pytest

from fedpact.core.errors import InvalidArgument
from fedpact.core.stop import (
    GradientNorm,
    Never,
    Outcome,
    Rising,
    Rounds,
    Seconds,
    Target,
    Variance,
    any_of,
    first_fired,
)


def recent(**columns):
    return {name: jnp.asarray(values, jnp.float64) for name, values in columns.items()}


def fired(rule, **columns):
    return bool(rule.fired(recent(**columns)))


def test_rules_are_the_same_in_a_compiled_block():
    rule = (Variance(3.0, window=3) | Rounds(9)) & (GradientNorm(0.5) | Target("objective", 2.0)) & Seconds(1.0)
    compiled = jax.jit(rule.fired)
    for f, g, t, s in (
        ([1, 2, 3], 0.1, 1, 2),
        ([1, 2, 9], 0.1, 9, 2),
        ([1, 2, 9], 0.1, 8, 2),
        ([1, 2, 3], 0.1, 1, 0.5),
    ):
        columns = recent(objective=f, gradient=[g] * 3, round=[t] * 3, seconds=[s] * 3)
        assert bool(compiled(columns)) == bool(rule.fired(columns))


def test_rounds():
    assert [fired(Rounds(3), round=[t]) for t in (0.0, 2.0, 3.0, 4.0)] == [False, False, True, True]


def test_target_from_above_and_from_below():
    assert [fired(Target("objective", 0.5), objective=[f]) for f in (0.51, 0.5, 0.1)] == [False, True, True]
    rule = Target("accuracy", 0.8, above=True)
    assert [fired(rule, accuracy=[a]) for a in (0.79, 0.8, 0.9)] == [False, True, True]
    assert rule.reads == ("accuracy",)
    assert not fired(Target("objective", 0.5), objective=[math.nan])
    assert not fired(rule, accuracy=[math.nan])


def test_gradient_norm_is_strict_and_on_the_squared_norm_column():
    assert [fired(GradientNorm(1e-6), gradient=[g]) for g in (2e-6, 1e-6, 9e-7)] == [False, False, True]
    assert GradientNorm().tolerance == 1e-6


def test_never_reads_nothing_and_ends_nothing():
    assert Never().reads == ()
    assert not fired(Never())
    assert not fired(Never() & Rounds(1), round=[9.0])
    assert fired(Never() | Rounds(1), round=[9.0])
    assert first_fired(Never(), {"objective": [1.0, -math.inf]}) is None


def test_seconds():
    assert [fired(Seconds(1.5), seconds=[s]) for s in (1.0, 1.5, 2.0)] == [False, True, True]


def test_variance_by_hand():
    """1, 2, 3, 4: mean 2.5, squares 2.25+.25+.25+2.25 = 5, sample variance 5/3 (not 5/4). Bound tol/(1+|f|) = tol/5."""
    f = [1.0, 2.0, 3.0, 4.0]
    assert fired(Variance(5 / 3 * 5 * 1.0001), objective=f)
    assert not fired(Variance(5 / 3 * 5 * 0.9999), objective=f)
    assert not fired(Variance(1.5 * 5), objective=f)  # the population's variance 1.25 would do
    assert fired(Variance(5 / 3 * 5 * 1.0001), objective=[-v for v in f])  # 1 + |−4| is 5 too
    assert not fired(Variance(5 / 3 * 5 * 0.9999), objective=[-v for v in f])
    assert fired(Variance(5 / 3 * 2 * 1.0001), objective=f[::-1])  # the newest is last: 1 + |1| = 2
    assert not fired(Variance(5 / 3 * 2 * 0.9999), objective=f[::-1])


def test_variance_of_a_sum_over_clients():
    """With scale = 10 the values are 10, 20, 30, 40: variance 500/3, bound tol/41."""
    f = [1.0, 2.0, 3.0, 4.0]
    assert fired(Variance(500 / 3 * 41 * 1.0001, scale=10.0), objective=f)
    assert not fired(Variance(500 / 3 * 41 * 0.9999, scale=10.0), objective=f)


def test_rising_wants_both_above_all_before():
    rule = Rising()
    up, down = [3.0, 1.0, 2.0, 3.5], [3.0, 1.0, 2.0, 2.5]
    assert rule.window == 4
    assert fired(rule, objective=up, gradient=up)
    assert not fired(rule, objective=up, gradient=down)
    assert not fired(rule, objective=down, gradient=up)
    assert not fired(rule, objective=[3.0, 1.0, 2.0, 3.0], gradient=up)  # as large is not above
    assert not fired(rule, objective=[math.nan, 1.0, 2.0, 3.5], gradient=up)
    assert fired(Rising(window=2), objective=[1.0, 2.0], gradient=[1.0, 2.0])


def test_the_first_row_of_a_record_at_which_a_rule_fires():
    columns = {"objective": [5.0, 3.0, 3.0, 1.0], "gradient": [4.0, 2.0, 1.0, 0.5]}
    assert first_fired(Target("objective", 3.0), columns) == 1
    assert first_fired(Variance(1e-9, window=2), columns) == 2
    assert first_fired(GradientNorm(1.5) & Target("objective", 2.0), columns) == 3
    assert first_fired(Target("objective", 0.5), columns) is None
    assert first_fired(Variance(1e9, window=4), columns) == 3
    assert first_fired(Target("objective", 5.0), columns) == 1  # row 0 is before the first round


def test_the_rules_that_fired_say_so():
    now = recent(objective=[3.0, 2.0, 1.0], gradient=[1.0, 1.0, 0.5], round=[1, 2, 3], seconds=[0, 0, 9])
    low, flat, late = Target("objective", 1.0), Variance(1e-9, window=3), Seconds(5.0)
    assert (flat | low).met(now) == ["objective ≤ 1"]
    assert (flat | (low & late)).met(now) == ["objective ≤ 1", "seconds ≥ 5"]
    assert ((flat & low) | GradientNorm(0.1) | Rising(window=2)).met(now) == []
    assert [str(rule) for rule in (Rounds(3), GradientNorm(), Target("accuracy", 0.9, above=True), flat, Rising())] == [
        "round ≥ 3",
        "‖∇f‖² < 1e-06",
        "accuracy ≥ 0.9",
        "variance of the last 3 objectives ≤ 1e-09/(1 + |f|)",
        "objective and ‖∇f‖² above those of the 3 rounds before",
    ]


def test_equal_objectives_have_no_variance():
    assert fired(Variance(1e-300), objective=[0.5] * 4)


def test_a_window_that_is_not_full_fires_nothing():
    assert not fired(Variance(1e9), objective=[math.nan, 1, 1, 1])
    assert fired(Variance(1e9), objective=[2, 1, 1, 1])


def test_either_and_both():
    a, b = Target("objective", 0.5), GradientNorm(1e-3)
    for f, g in ((0.4, 1e-2), (0.6, 1e-4), (0.4, 1e-4), (0.6, 1e-2)):
        one, other = f <= 0.5, g < 1e-3
        assert fired(a | b, objective=[f], gradient=[g]) == (one or other)
        assert fired(a & b, objective=[f], gradient=[g]) == (one and other)
    assert (a | b).reads == (a & b).reads == ("objective", "gradient")


def test_each_rule_of_a_pair_sees_its_own_window():
    """Over the last two (1, 1) the variance is 0; over all four it is not; the target sees the newest alone."""
    short, long = Variance(1e-6, window=2), Variance(1e-6, window=4)
    f = [9.0, 5.0, 1.0, 1.0]
    assert (short | long).window == (short & long).window == 4
    assert fired(short | long, objective=f)
    assert not fired(short & long, objective=f)
    assert fired(short & Target("objective", 1.0), objective=[5.0, 1.0, 1.0])
    assert not fired(short & Target("objective", 0.9), objective=[0.5, 1.0, 1.0])


def test_nested_pairs():
    rule = (Target("objective", 0.5) & GradientNorm(1e-3)) | Rounds(10)
    assert fired(rule, objective=[1.0], gradient=[1.0], round=[10.0])
    assert fired(rule, objective=[0.1], gradient=[1e-4], round=[1.0])
    assert not fired(rule, objective=[0.1], gradient=[1.0], round=[1.0])
    assert set(rule.reads) == {"objective", "gradient", "round"}
    deep = Variance(1e-6, window=3) | rule
    assert not fired(deep, objective=[1.0, 2.0, 3.0], gradient=[1.0] * 3, round=[1.0, 2.0, 3.0])
    assert fired(deep, objective=[1.0, 2.0, 3.0], gradient=[1.0] * 3, round=[8.0, 9.0, 10.0])


def test_any_of_a_list():
    rules = [Rounds(3), GradientNorm(1e-3)]
    assert any_of(rules[0]) is rules[0]
    assert fired(any_of(*rules), round=[3.0], gradient=[1.0])
    assert not fired(any_of(*rules), round=[2.0], gradient=[1.0])


def test_the_paper_s_rule():
    """FedEPM: ‖∇f‖² < 1e-6 or var of the last four f ≤ n·1e-8/(1+|f|), f = Σ f_i; here n = 14, m = 50, f/m = .5431.

    The columns are of f/m: ‖∇f/m‖² < 1e-6/2500 = 4e-10. With f/m in steps of d the variance of f is 2500 · 5/3 · d²,
    the bound 14e-8/(1 + 27.155) = 4.97e-9, so d ≤ 1.09e-6.
    """
    rule = GradientNorm(1e-6 / 50**2) | Variance(14 * 1e-8, scale=50)
    f = lambda d: [0.5431 + d * k for k in (3, 2, 1, 0)]
    assert fired(rule, objective=f(1e-6), gradient=[math.nan, 1, 1, 1])
    assert not fired(rule, objective=f(1.2e-6), gradient=[1, 1, 1, 1])
    assert fired(rule, objective=f(1), gradient=[1, 1, 1, 3.9e-10])
    assert not fired(rule, objective=f(1), gradient=[1, 1, 1, 4.1e-10])


def test_rules_that_differ_are_written_differently():
    """A run's digest holds the rule's text."""
    rules = [
        Variance(1e-3),
        Variance(1e-3, window=5),
        Rounds(3),
        Rounds(3) | Rounds(4),
        Rounds(3) & Rounds(4),
        (Rounds(3) | Rounds(4)) & Rounds(5),
        Rounds(3) | (Rounds(4) & Rounds(5)),
        (Rounds(3) & Rounds(4)) | Rounds(5),
    ]
    assert len({repr(rule) for rule in rules}) == len(rules)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Rounds(0), r"rounds must be an integer of at least 1, got 0\."),
        (lambda: Rounds(2.5), r"rounds must be an integer of at least 1, got 2\.5\."),
        (lambda: Target("objective", "low"), r"value must be a finite number, got 'low'\. .+"),
        (lambda: Target("objective", math.nan), r"value must be a finite number, got nan\. .+"),
        (lambda: Target("objective", -math.inf), r"value must be a finite number, got -inf\. .+no stop rule\."),
        (lambda: Target("accuracy", 0.9, above="no"), r"above must be true or false, got 'no'\."),
        (lambda: Target(5, 0.9), r"column must be the name of a column, got 5\. .+"),
        (lambda: GradientNorm(0), r"tolerance must be a number above 0, got 0\."),
        (lambda: Variance(-1.0), r"tolerance must be a number above 0, got -1\.0\."),
        (lambda: Variance(1.0, scale="m"), r"scale must be a number above 0, got 'm'\. .+"),
        (lambda: Variance(1.0, scale=0), r"scale must be a number above 0, got 0\. .+"),
        (lambda: Variance(1.0, window=1), r"window must be an integer of at least 2, got 1\."),
        (lambda: Seconds(math.nan), r"seconds must be a number above 0, got nan\."),
    ],
)
def test_bad_rules_are_refused(make, said):
    with pytest.raises(InvalidArgument, match=f"^{said}$"):
        make()


def test_outcomes_are_sentences():
    assert all(" " in outcome.value for outcome in Outcome)
