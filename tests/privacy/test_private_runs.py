"""Private runs as users start them: the noise, the ledger, the budget and resuming."""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers_experiment import private_tables, same_bits, write_toml
from jax.flatten_util import ravel_pytree

import fedpact as fp
from fedpact.core.contract import Batch
from fedpact.core.errors import CheckpointError
from fedpact.core.stop import Outcome
from fedpact.privacy import Event, Ledger, epsilon, rounds_for
from fedpact.privacy.guard import MARGIN, Noise, Noisy, room
from fedpact.privacy.private import Private
from fedpact.run import Experiment, private_plan

SIZES, FEATURES, CLIP, WIDE = (6, 9, 12), 4, 0.5, 500
LOGISTIC = fp.Logistic(l2=0.1)


def parts(sizes=SIZES, features=FEATURES, seed=0):
    rng = np.random.default_rng(seed)
    return [(rng.normal(size=(d, features)), np.arange(d) % 2.0) for d in sizes]


def federation(clients=None, classes=("0", "1")):
    return fp.data.Federation.from_arrays(parts() if clients is None else clients, classes=classes)


FEDEPM = fp.FedEPM(k0=3, c=0.0, eta=0.5, lam=0.01, mu0=1.0)
FEDAVG = fp.FedAvg(epochs=2, step=0.1, batch=3)
FEDPDM = fp.FedPDM(rho=2.0, rate=0.2, steps=3)
CONVEX = {"way": "convex", "reach": 1.0}
#: (algorithm, privacy) by way; with noise for whoever needs one.
WAYS = {
    "once": (FEDEPM, Private(CLIP, noise=4.0)),
    "steps": (FEDAVG, Private(CLIP, noise=4.0)),
    "convex": (FEDPDM, Private(CLIP, noise=4.0, **CONVEX)),
    "client": (fp.Scaffold(epochs=2, rate=0.1), Private(CLIP, noise=4.0, way="client")),
    "central": (FEDAVG, Private(CLIP, noise=4.0, way="client", place="central")),
}


def quick(names, *kept):
    """These by name, all but the kept ones as drills: every run is compiled."""
    return [name if name in kept else pytest.param(name, marks=pytest.mark.drill) for name in names]


def flat(run):
    return np.asarray(ravel_pytree(run.model.w)[0])


def again(settings, **changes):
    return dataclasses.replace(settings, **changes)


# The noise


@pytest.fixture(scope="module")
def alone():
    """One client: what it sends is the server's model after a round."""
    return federation(parts(sizes=(8,), features=WIDE))


ALONE = {
    "once": (FEDEPM, {}, lambda plan: plan.moved(8, 0)),
    "once, laplace": (FEDEPM, {"mechanism": "laplace"}, lambda plan: plan.moved(8, 0)),
    "once, discrete": (FEDEPM, {"mechanism": "discrete_gaussian", "lattice": 512}, lambda plan: plan.moved(8, 0)),
    "steps": (fp.FedAvg(epochs=1, step=0.3), {}, lambda plan: 0.3 * CLIP / 8),
    "steps, batch": (fp.FedAvg(epochs=1, step=0.3, batch=8), {}, lambda plan: 0.3 * CLIP / 8),
    "convex": (FEDPDM, CONVEX, lambda plan: plan.moved(8, 0)),
    "client": (fp.FedPDM(rho=2.0, rate=0.2, steps=3), {"way": "client"}, lambda plan: CLIP),
    "central": (fp.FedAvg(epochs=1, step=0.3), {"way": "client", "place": "central"}, lambda plan: CLIP),
}


@pytest.mark.drill
@pytest.mark.parametrize("name", quick(ALONE, "once"))
def test_the_noise_has_the_scale_that_the_plan_says(name, alone):
    settings, kind, moved = ALONE[name]
    private, seeds = Private(CLIP, noise=3.0, **kind), range(12)
    bare = flat(fp.run(settings, LOGISTIC, alone, rounds=1, privacy=again(private, noise=1e-3)))  # next to none
    runs = fp.trials(settings, LOGISTIC, alone, seeds, rounds=1, privacy=private)
    away = np.stack([flat(run) for run in runs]) - bare
    expected = 3.0 * moved(private_plan(Experiment(settings, LOGISTIC, alone, rounds=1, privacy=private)))
    count = away.size
    if private.mechanism == "laplace":
        assert np.mean(np.abs(away)) == pytest.approx(expected, rel=5 / math.sqrt(count))
    else:
        assert np.sqrt(np.mean(away**2)) == pytest.approx(expected, rel=5 / math.sqrt(2 * count))
        assert np.mean(np.abs(away)) == pytest.approx(expected * math.sqrt(2 / math.pi), rel=5 / math.sqrt(count))
    assert abs(np.mean(away)) < 5 * expected * math.sqrt(2 / count)
    between = np.corrcoef(away)[np.triu_indices(len(seeds), 1)]
    assert np.abs(between).max() < 5 / math.sqrt(WIDE)  # every seed has its own
    neighbours = np.mean(away[:, 1:] * away[:, :-1]) / np.mean(away**2)
    assert abs(neighbours) < 5 / math.sqrt(count)  # and every coordinate


def test_the_printed_formulas_of_how_far_a_record_moves():
    """By hand: FedEPM's k0 = 3 steps of (μ̄D + C/d)/(η + μ̄), and FedPDM's Q = 3 of (1 − ηρ)D + ηC/d, doubled."""
    made = private_plan(Experiment(FEDEPM, LOGISTIC, federation(), rounds=3, privacy=WAYS["once"][1]))
    d = 0.0
    for j in (4, 5, 6):  # round 1
        mu = 1.0 * 1.001**j / 9
        d = (mu * d + CLIP / 9) / (0.5 + mu)
    assert made.moved(9, 1) == pytest.approx(d, rel=1e-12)
    made = private_plan(Experiment(FEDPDM, LOGISTIC, federation(), rounds=3, privacy=WAYS["convex"][1]))
    step = 0.2 * CLIP / 9
    assert made.moved(9, 1) == pytest.approx(2 * (step + 0.6 * step + 0.36 * step), rel=1e-12)


def test_poisson_samples_take_every_row_on_its_own_with_probability_q():
    rows, size, draws = 12, 3, 20000
    x = jnp.eye(rows)
    batch = Batch(x, jnp.zeros(rows), jnp.ones(rows), jnp.asarray(0, jnp.int32))
    oracle = Noisy(LOGISTIC, CLIP, 1.0, Noise("gaussian"))

    def taken(key):
        drawn, share = oracle._draw(batch, size, key)
        return drawn.weight @ drawn.x, share

    seen, share = jax.jit(jax.vmap(taken))(jax.random.split(jax.random.key(0), draws))
    seen, q = np.asarray(seen), size / rows
    assert set(np.unique(seen)) == {0.0, 1.0}
    assert np.all(np.asarray(share) == size)  # the divisor is the mean, never how many were drawn
    np.testing.assert_allclose(seen.mean(axis=0), q, atol=5 * math.sqrt(q * (1 - q) / draws))
    pairs = np.corrcoef(seen.T)[np.triu_indices(rows, 1)]
    assert np.abs(pairs).max() < 5 / math.sqrt(draws)
    counts = seen.sum(axis=1)
    assert counts.var() == pytest.approx(rows * q * (1 - q), rel=0.05)  # a sample of fixed size has none
    assert {0.0, 8.0} <= set(counts)


def test_the_room_for_a_sample_is_next_to_never_too_small():
    from scipy.stats import binom

    for size, rows in ((10, 1000), (100, 60000), (1, 50)):
        assert binom.sf(room(size, rows), rows, size / rows) < 1e-30
        assert size < room(size, rows) < rows
    assert room(5, 5) == room(9, 5) == 5


@pytest.mark.drill
def test_a_large_client_is_sampled_into_less_room_and_still_by_q():
    rows, size = 400, 4
    batch = Batch(jnp.eye(rows), jnp.zeros(rows), jnp.ones(rows), jnp.asarray(0, jnp.int32))
    oracle = Noisy(LOGISTIC, CLIP, 1.0, Noise("gaussian"))
    drawn, _ = jax.vmap(lambda key: oracle._draw(batch, size, key))(jax.random.split(jax.random.key(1), 2000))
    assert drawn.weight.shape[1] == room(size, rows) < rows
    counts = np.asarray(drawn.weight).sum(axis=1)
    assert counts.mean() == pytest.approx(size, abs=5 * math.sqrt(size / 2000))
    seen = np.einsum("kr,krn->kn", drawn.weight, drawn.x)
    assert set(np.unique(seen)) == {0.0, 1.0}  # no row twice
    assert np.all((seen > 0).any(axis=0))


# The ledger and ε


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """folders(way) is a finished run in a folder: 4 rounds, three clients."""
    base, done = tmp_path_factory.mktemp("private"), {}

    def finished(way):
        if way not in done:
            settings, private = WAYS[way]
            done[way] = fp.run(settings, LOGISTIC, federation(), rounds=4, folder=base / way, privacy=private)
        return done[way]

    return finished


@pytest.fixture(autouse=True)
def without_plots(request, monkeypatch):
    """The plots are most of a short run's time."""
    if "writes_down" not in request.node.name:
        monkeypatch.setattr("fedpact.report.html.plots_section", lambda *_: "")


@pytest.fixture
def folder(folders, tmp_path):
    """folder(way) is a copy to damage."""
    return lambda way: shutil.copytree(folders(way).folder, tmp_path / way)


#: What four rounds are made of, of the client with this many rows: (event, how often).
EVENTS = {
    "once": lambda d: (Event("gaussian", 4.0, relation="replace-one"), 4),
    "steps": lambda d: (Event("gaussian", 4.0, "poisson", 3 / d), 4 * 2 * math.ceil(d / 3)),
    "convex": lambda d: (Event("gaussian", 4.0, relation="replace-one"), 4),
    "client": lambda d: (Event("gaussian", 4.0, relation="replace-one"), 4),
    "central": lambda d: (Event("gaussian", 4.0, relation="replace-one"), 4),
}


@pytest.mark.parametrize("way", quick(WAYS, "once", "steps"))
def test_the_ledger_has_every_release_once_and_costs_what_the_events_do(way, folders):
    book = Ledger(folders(way).folder, read_only=True)
    who = ["*"] if way == "central" else ["0", "1", "2"]
    assert sorted(r.key[:2] for r in book.releases) == sorted((name, t) for name in who for t in range(4))
    rows = {row["client"]: row for row in book.epsilon(1e-5)}
    assert sorted(rows) == who
    for name, row in rows.items():
        event, times = EVENTS[way](0 if way == "central" else SIZES[int(name)])
        assert row["releases"] == times
        assert row["epsilon"] == epsilon({event: times}, 1e-5).epsilon
        unit = "client" if way in ("client", "central") else "record"
        assert (row["unit"], row["adversary"]) == (unit, "outsider" if way == "central" else "server")
    tracked = folders(way).history.column("privacy")
    assert tracked[0] == 0
    assert np.all(np.diff(tracked) > 0)
    most = max(row["epsilon"] for row in rows.values())
    assert tracked[-1] == most if way != "steps" else most <= tracked[-1] < 1.6 * most  # by RDP on the way


@pytest.mark.drill
@pytest.mark.parametrize("way", quick(["once", "central"], "once"))
def test_what_a_private_run_writes_down(way, tmp_path):
    settings, private = WAYS[way]
    run = fp.run(settings, LOGISTIC, federation(), rounds=4, folder=tmp_path / way, privacy=private)
    config = json.loads((run.folder / "config.json").read_text())["privacy"]
    assert (config["clip"], config["noise"], config["delta"]) == (CLIP, 4.0, 1e-5)
    assert config["unit"] == ("record" if way == "once" else "client")
    result = json.loads((run.folder / "result.json").read_text())
    spent = Ledger(run.folder, read_only=True).epsilon(1e-5)[0]["epsilon"]
    lines = result["privacy"]["epsilon"]
    assert list(lines) == (["client 0", "client 1", "client 2"] if way == "once" else ["every client"])
    for values in lines.values():
        assert values[0] == 0
        assert values[-1] == spent
    said = f"ε = {spent:.4g} at δ = 1e-05"
    assert any(said in notice for notice in result["notices"])
    assert any("telemetry" in notice for notice in result["notices"])
    assert result["tables"]["What privacy was spent"][0]["value"] == f"{spent:.4g}"
    page = (run.folder / "report.html").read_text()
    assert said in page
    assert "ε spent by client against rounds" in page
    loaded = fp.Run.load(run.folder)
    assert loaded.privacy == run.privacy
    assert loaded.notices == run.notices


@pytest.mark.parametrize("way", quick(WAYS))
def test_calibrated_noise_spends_what_was_granted_and_no_more(way):
    settings, private = WAYS[way]
    for participation in (1.0, 0.5):
        private = again(private, noise=None, epsilon=2.0)
        one = Experiment(settings, LOGISTIC, federation(), rounds=7, participation=participation, privacy=private)
        made = private_plan(one)
        cost = max(epsilon({event: n}, 1e-5).epsilon for event, n in made.counted(0, 7))
        assert 0.99 * 2.0 < cost <= 2.0
    done = fp.run(settings, LOGISTIC, federation(), rounds=7, privacy=private)
    assert done.outcome_kind is Outcome.ROUNDS
    assert (
        0.99 * 2.0
        < max(values[-1] for values in done.privacy["epsilon"].values())
        < 2.0 * (1.6 if way == "steps" else 1 + 1e-12)
    )


# The budget

GATED = again(WAYS["once"][1], noise=12.0, epsilon=2.5)


def test_the_run_ends_before_the_round_that_would_exceed_the_budget(tmp_path):
    fits = rounds_for(2.5, 1e-5, Event("gaussian", 12.0, relation="replace-one"))
    assert 5 <= fits <= 40
    run = fp.run(FEDEPM, LOGISTIC, federation(), rounds=fits + 10, privacy=GATED, folder=tmp_path / "run")
    assert run.outcome_kind is Outcome.BUDGET
    assert run.outcome == f"stopped before the round that would exceed the privacy budget: after round {fits}"
    assert run.history.rounds == fits
    book = Ledger(tmp_path / "run", read_only=True)
    assert {r.round for r in book.releases} == set(range(fits))  # none paid that was not run
    assert book.epsilon(1e-5)[0]["epsilon"] <= 2.5
    exact = fp.run(FEDEPM, LOGISTIC, federation(), rounds=fits, privacy=GATED)
    assert exact.outcome_kind is Outcome.ROUNDS
    np.testing.assert_array_equal(flat(exact), flat(run))
    more = {"rounds": fits + 50, "privacy": GATED, "folder": tmp_path / "run", "resume": True}
    resumed = fp.run(FEDEPM, LOGISTIC, federation(), **more)
    assert resumed.outcome == run.outcome
    assert resumed.history.rounds == fits
    np.testing.assert_array_equal(flat(resumed), flat(run))
    assert Ledger(tmp_path / "run", read_only=True).head == book.head
    assert json.loads((tmp_path / "run" / "result.json").read_text())["outcome_kind"] == "BUDGET"


def test_a_budget_for_no_round_at_all_releases_nothing(tmp_path):
    private = Private(CLIP, noise=0.5, epsilon=0.1)
    run = fp.run(FEDEPM, LOGISTIC, federation(), rounds=5, privacy=private, folder=tmp_path / "run")
    assert run.outcome_kind is Outcome.BUDGET
    assert run.history.rounds == 0
    assert Ledger(tmp_path / "run", read_only=True).releases == []
    assert run.notices[0] == "Nothing was released, so nothing was spent."
    assert not flat(run).any()


@pytest.mark.drill
def test_a_client_drawn_more_often_ends_the_run(tmp_path):
    """Its own releases count, not the rounds: the budget is of each client."""
    rounds = [[0], [1], [0], [2], [0], [0, 1], [1]]
    fits = rounds_for(1.0, 1e-5, Event("gaussian", 14.5, relation="replace-one"))
    assert fits == 3
    private = Private(CLIP, noise=14.5, epsilon=1.0)
    run = fp.run(FEDEPM, LOGISTIC, federation(), rounds=7, participation=rounds, privacy=private)
    assert (run.outcome_kind, run.history.rounds) == (Outcome.BUDGET, 5)
    assert run.privacy["epsilon"]["client 1"][-1] < run.privacy["epsilon"]["client 0"][-1] <= 1.0


@pytest.mark.drill
def test_a_stop_rule_leaves_no_round_paid_that_was_not_run(tmp_path):
    stop, private = fp.stop.Rounds(3), WAYS["once"][1]
    run = fp.run(FEDEPM, LOGISTIC, federation(), rounds=30, stop=stop, privacy=private, folder=tmp_path / "run")
    assert (run.outcome_kind, run.history.rounds) == (Outcome.STOPPED, 3)
    assert {r.round for r in Ledger(tmp_path / "run", read_only=True).releases} == {0, 1, 2}


@pytest.mark.drill
def test_a_trial_that_stopped_pays_no_more_while_the_others_go_on():
    settings, private = WAYS["once"]
    x, y = parts(sizes=(60,))[0]
    tested = dataclasses.replace(fp.data.from_arrays(x, y, classes=["0", "1"]), test=np.arange(20)).split(clients=3)
    plain = fp.trials(settings, LOGISTIC, tested, range(4), rounds=12, privacy=private)
    reached = [float(np.nanmin(run.history.column("test_loss")[1:])) for run in plain]
    stop = fp.stop.Target("test_loss", sorted(reached)[1] * (1 + 1e-9))  # some get there, some do not
    runs = fp.trials(settings, LOGISTIC, tested, range(4), rounds=12, stop=stop, privacy=private)
    assert len({run.history.rounds for run in runs}) > 1
    for run in runs:
        event = Event("gaussian", 4.0, relation="replace-one")
        cost = epsilon({event: run.history.rounds}, 1e-5).epsilon
        assert run.privacy["epsilon"]["client 0"][-1] == cost
        assert f"ε = {cost:.4g} at" in run.notices[0]


@pytest.mark.drill
def test_trials_are_the_runs_of_their_seeds():
    settings, private = WAYS["steps"]
    federations = federation()
    runs = fp.trials(settings, LOGISTIC, federations, [3, 5], rounds=3, privacy=private, participation=0.5)
    for run, seed in zip(runs, (3, 5), strict=True):
        alone = fp.run(settings, LOGISTIC, federations, seed=seed, rounds=3, privacy=private, participation=0.5)
        np.testing.assert_allclose(flat(run), flat(alone), rtol=1e-9)
        np.testing.assert_array_equal(run.history.column("privacy"), alone.history.column("privacy"))
        assert run.notices == alone.notices


@pytest.mark.drill
def test_trials_end_each_by_its_own_budget():
    private = Private(CLIP, noise=14.5, epsilon=1.0)  # three releases of a client
    options = {"rounds": 12, "participation": 0.3, "privacy": private}
    runs = fp.trials(FEDEPM, LOGISTIC, federation(), [0, 1, 2], **options)
    alone = [fp.run(FEDEPM, LOGISTIC, federation(), seed=seed, **options) for seed in (0, 1, 2)]
    assert [run.history.rounds for run in runs] == [run.history.rounds for run in alone]
    assert len({run.history.rounds for run in alone}) > 1


# Engines, resuming, tampering


@pytest.mark.parametrize("way", quick(WAYS))
def test_every_engine_gives_the_same_private_run(way, folders):
    settings, private = WAYS[way]
    for engine in ("host", "debug"):
        other = fp.run(
            settings, LOGISTIC, federation(), rounds=4 if engine == "host" else 2, privacy=private, engine=engine
        )
        count = other.history.rounds + 1
        for column in ("objective", "privacy"):
            expected = folders(way).history.column(column)[:count]
            np.testing.assert_allclose(other.history.column(column), expected, rtol=1e-9, err_msg=engine)


@pytest.mark.parametrize("way", quick(["steps", "once"], "steps"))
def test_a_resumed_run_has_the_same_bits_and_spends_nothing_twice(way, folder, folders, tmp_path):
    settings, private = WAYS[way]
    options = {"rounds": 9, "privacy": private}
    straight = fp.run(settings, LOGISTIC, federation(), folder=tmp_path / "straight", **options)
    resumed = fp.run(settings, LOGISTIC, federation(), folder=folder(way), resume=True, **options)
    same_bits(resumed.folder, straight.folder)
    books = [Ledger(run.folder, read_only=True) for run in (resumed, straight)]
    assert [r.key for r in books[0].releases] == [r.key for r in books[1].releases]
    assert books[0].head == books[1].head
    assert resumed.notices == straight.notices
    assert resumed.privacy == straight.privacy


def resumed_as(way, place, **changes):
    settings, private = WAYS[way]
    options = {"rounds": 9, "privacy": private, **changes}
    return fp.run(options.pop("algorithm", settings), LOGISTIC, federation(), folder=place, resume=True, **options)


def test_a_ledger_that_was_edited_is_refused(folder):
    place = folder("once")
    text = (place / "ledger.jsonl").read_text()
    (place / "ledger.jsonl").write_text(text.replace('"noise":4.0', '"noise":9.0', 1))
    with pytest.raises(
        CheckpointError, match="line 1 of the ledger must be as it was written, got one that does not m"
    ):
        resumed_as("once", place)


def test_a_ledger_that_was_shortened_with_its_head_is_found_by_the_checkpoint(folder):
    place = folder("once")
    lines = (place / "ledger.jsonl").read_text().splitlines(keepends=True)
    (place / "ledger.jsonl").write_text("".join(lines[:-3]))
    last = json.loads(lines[-4])
    (place / "ledger.head").write_text(json.dumps({"lines": len(lines) - 3, "hash": last["hash"]}))
    assert Ledger(place, read_only=True).head.lines == len(lines) - 3  # by itself it is whole
    with pytest.raises(CheckpointError, match="ledger must have the 12 lines that the checkpoint says, got 9 in "):
        resumed_as("once", place)
    for name in ("ledger.jsonl", "ledger.head"):
        (place / name).unlink()
    with pytest.raises(CheckpointError, match="ledger must have the 12 lines that the checkpoint says, got 0 in "):
        resumed_as("once", place)


@pytest.mark.parametrize(
    "changes",
    [{"seed": 1}, {"algorithm": fp.FedAvg(epochs=2, step=0.2, batch=3)}, {"privacy": None}],
    ids=["seed", "algorithm", "privacy"],
)
def test_other_releases_under_the_names_of_those_that_were_paid_are_refused(changes, folder):
    """Killed before its first checkpoint, a run has spent; with another seed its rounds would be sent a second time."""
    place = folder("steps")
    before = (place / "ledger.jsonl").read_bytes()
    for path in (*place.glob("checkpoint-*"), place / "history.csv", place / "result.json"):
        path.unlink()
    with pytest.raises(CheckpointError, match="a run that has released must be resumed as it was made, got "):
        resumed_as("steps", place, **changes)
    assert (place / "ledger.jsonl").read_bytes() == before
    again_ = resumed_as("steps", place, rounds=4)  # as it was made: the same bits, and nothing is spent twice
    assert (place / "ledger.jsonl").read_bytes() == before
    assert again_.history.rounds == 4


@pytest.mark.drill
def test_more_rounds_than_the_noise_was_calibrated_for_are_refused(tmp_path):
    private = Private(CLIP, epsilon=2.0)
    fp.run(FEDEPM, LOGISTIC, federation(), rounds=3, privacy=private, folder=tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"privacy\.noise was .* and is "):
        fp.run(FEDEPM, LOGISTIC, federation(), rounds=6, privacy=private, folder=tmp_path / "run", resume=True)


# Lattices, rows that are not finite, the secret cohort


@pytest.mark.drill
@pytest.mark.parametrize("mechanism", ["discrete_gaussian", "discrete_laplace"])
@pytest.mark.parametrize("way", ["once", "steps", "central"])
def test_discrete_noise_runs_and_is_repeatable(mechanism, way):
    settings, private = WAYS[way]
    private = again(private, mechanism=mechanism, lattice=1024)
    one, two = (fp.run(settings, LOGISTIC, federation(), rounds=2, privacy=private) for _ in range(2))
    np.testing.assert_array_equal(flat(one), flat(two))
    other = fp.run(settings, LOGISTIC, federation(), rounds=2, privacy=private, seed=1)
    assert not np.array_equal(flat(one), flat(other))


@pytest.mark.drill
def test_a_discrete_release_is_on_its_lattice():
    private = Private(CLIP, noise=3.0, mechanism="discrete_gaussian", lattice=64)
    alone = federation(parts(sizes=(8,)))
    run = fp.run(FEDEPM, LOGISTIC, alone, rounds=1, privacy=private)
    made = private_plan(Experiment(FEDEPM, LOGISTIC, alone, rounds=1, privacy=private))
    cells = flat(run) / (3.0 * made.moved(8, 0) * (1 + MARGIN) / 64)
    np.testing.assert_allclose(cells, np.rint(cells), atol=1e-6)
    assert np.abs(cells).max() > 2


@pytest.mark.parametrize("way", quick(["once", "steps", "convex"]))
def test_a_row_that_overflows_counts_as_zero(way, monkeypatch):
    run_module = importlib.import_module("fedpact.run")
    monkeypatch.setattr(run_module, "root_of", lambda experiment: jax.random.key(0))  # the same noise on other data
    settings, private = WAYS[way]
    problem, models = fp.LeastSquares(l2=0.1), []
    huge = 1e200 if way != "convex" else np.finfo(float).max  # 1e200 is scaled down to R there
    for row in (np.full(FEATURES, huge), np.zeros(FEATURES)):
        clients = parts()
        clients[1][0][4] = row
        run = fp.run(settings, problem, federation(clients, None), rounds=3, privacy=private)
        models.append(flat(run))
    assert np.all(np.isfinite(models[0]))
    if way != "convex":
        np.testing.assert_allclose(models[0], models[1], rtol=1e-12)


@pytest.mark.drill
def test_a_central_sum_is_divided_by_what_is_public_not_by_the_secret_cohort():
    """With next to no noise the model is Σ clipped / (ρm), in rounds of one client and of all."""
    clients = parts(sizes=(6, 6, 6, 6))
    settings = fp.FedAvg(epochs=1, step=0.1)
    bare, steps = federation(clients), {}
    for i in range(4):
        alone = fp.run(settings, LOGISTIC, federation([clients[i]]), rounds=1)
        steps[i] = flat(alone)
        assert np.linalg.norm(steps[i]) < 10
    private = Private(10.0, noise=1e-3, way="client", place="central")
    counts = set()
    for seed in range(3):
        chosen = fp.Poisson(0.5).select(seed, 0, 4)
        counts.add(len(chosen))
        run = fp.run(settings, LOGISTIC, bare, rounds=1, participation=fp.Poisson(0.5), privacy=private, seed=seed)
        expected = sum((steps[i] for i in chosen), np.zeros(FEATURES)) / 2.0  # ρm
        np.testing.assert_allclose(flat(run), expected, atol=6 * 1e-3 * 10 / 2)
    assert len(counts) > 1
    plan = private_plan(Experiment(settings, LOGISTIC, bare, rounds=1, participation=fp.Poisson(0.5), privacy=private))
    assert plan.event(0) == Event("gaussian", 1e-3, "poisson", 0.5)


@pytest.mark.drill
@pytest.mark.parametrize("settings", [fp.FedAvg(epochs=1, step=1e-9), fp.FedPDM(rate=1e-9, steps=1, rho=1.0)])
def test_a_secret_cohort_of_less_than_one_client_leaves_the_model_where_it_is(settings):
    """Nobody moves it (the steps are next to nothing), so that what is seen is noise around the start."""
    problem, sizes = fp.TwoLayer(inputs=FEATURES, hidden=3, classes=2), (6, 6, 6)
    private = Private(1e-6, noise=1.0, way="client", place="central")
    options = {"rounds": 5, "participation": fp.Poisson(0.1), "precision": "double"}
    start = fp.run(settings, problem, federation(parts(sizes)), rounds=1, participation=[[]], precision="double")
    run = fp.run(settings, problem, federation(parts(sizes)), privacy=private, **options)
    np.testing.assert_allclose(flat(run), flat(start), atol=1e-3)
    assert np.abs(flat(start)).max() > 0.1


# The command


def test_the_plan_of_a_file_is_what_its_run_costs(command, people, tmp_path):
    write_toml(tmp_path / "private.toml", private_tables(epsilon=3.0))
    planned = json.loads(command("privacy", "plan", "private.toml", "--json").out)
    assert 0.99 * 3 < planned["epsilon"] <= planned["granted"] == 3.0
    done = command("run", "private.toml", "--out", "run")
    assert done.code == 0, done.err
    spent = json.loads(command("privacy", "ledger", "run", "--json").out)["worst"][0]
    assert spent["epsilon"] == pytest.approx(planned["epsilon"], rel=1e-12)
    assert spent["releases"] == planned["releases"]
    assert (planned["way"], planned["sampling"], planned["relation"]) == ("once", "full", "replace-one")
    text = command("privacy", "plan", "private.toml").out
    assert text.startswith(f"epsilon {planned['epsilon']:.6g}\nε = ")
    assert f"{planned['releases']} releases of gaussian noise {planned['noise']:.6g} C" in text
    assert f"ε = {planned['epsilon']:.4g} at δ = 1e-05" in (tmp_path / "run" / "report.html").read_text()
    over = command("privacy", "plan", "private.toml", "--set", "privacy.noise=1.0", "--set", "privacy.epsilon=0.5").out
    assert over.endswith("The run would end before its last round: ε = 0.5 is granted.\n")
