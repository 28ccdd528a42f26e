"""PyTorch modules as problems: the gradients are JAX's, the algorithms unchanged, bad modules refused."""

from __future__ import annotations

import copy
import os
import pickle
import re
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import fedpact as fp
from fedpact.core.contract import Batch, Oracle
from fedpact.core.errors import ClientError, FedpactError, InvalidArgument
from fedpact.core.stop import Outcome
from fedpact.core.vector import Vector
from fedpact.engines import HostEngine
from fedpact.model import Model
from fedpact.problems.torch import TorchNetwork, TorchOracle
from fedpact.problems.training import Plan, train


def two_layers():
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3))


THEIRS = TorchNetwork(two_layers, shape=(1, 4, 4), classes=3)
OURS = fp.TwoLayer(inputs=16, hidden=5, classes=3)


def as_ours(w):
    """PyTorch's weights are (outputs, inputs), ours the other way round."""
    t = {name: np.asarray(a) for name, a in w.tree.items()}
    layer = lambda i: {"w": jnp.asarray(t[f"{i}.weight"].T), "b": jnp.asarray(t[f"{i}.bias"])}
    return Vector({"hidden": layer(1), "output": layer(3)})


def close(theirs, ours, **near):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **near), as_ours(theirs).tree, ours.tree)


@pytest.fixture(scope="module")
def rows(federation):
    x, y = federation.client(0)
    weight = np.append(np.ones(len(y) - 4, np.float32), np.zeros(4, np.float32))  # the last four are padding
    return Batch(jnp.asarray(x), jnp.asarray(y, jnp.float32), jnp.asarray(weight), jnp.asarray(0, jnp.int32))


@pytest.fixture(scope="module")
def start():
    return THEIRS.init(16, np.float32, jax.random.key(1))


@pytest.mark.parametrize("softmax", [False, True])
def test_value_and_gradient_are_jax_s(rows, start, softmax):
    theirs = TorchNetwork(two_layers, shape=(1, 4, 4), classes=3, softmax=softmax)
    ours = fp.TwoLayer(inputs=16, hidden=5, classes=3, softmax=softmax)
    value, gradient = theirs.value_and_gradient(start, rows)
    expected, slope = ours.value_and_gradient(as_ours(start), rows)
    assert float(value) == pytest.approx(float(expected), rel=1e-5)
    close(gradient, slope, rtol=1e-4, atol=1e-6)
    assert float(theirs.value(start, rows)) == pytest.approx(float(expected), rel=1e-5)
    np.testing.assert_allclose(theirs.predict(start, rows.x), ours.predict(as_ours(start), rows.x), rtol=1e-4)
    assert float(theirs.counts(start, rows)["correct"]) == float(ours.counts(as_ours(start), rows)["correct"])


def test_a_colour_image_arrives_colour_by_colour():
    """2×2 pixels of red, green, blue: datasets have a pixel's three numbers together, PyTorch an image of each."""
    seen = []

    class Looking(torch.nn.Module):
        def forward(self, images):
            seen.append(images.clone())
            return images.reshape(len(images), -1)[:, :2]

    row = np.array([[11, 12, 13, 21, 22, 23, 31, 32, 33, 41, 42, 43]], np.float32)
    TorchNetwork(Looking, shape=(3, 2, 2), classes=2).scores(Vector({}), row)
    colours = [[[11, 21], [31, 41]], [[12, 22], [32, 42]], [[13, 23], [33, 43]]]
    np.testing.assert_array_equal(seen[0][0].numpy(), colours)
    assert seen[0].is_contiguous()


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_training_in_pytorch_is_the_generic_one_on_all_rows(rows, start, momentum):
    """Three epochs with momentum, a linear term and a pull towards another point."""
    rng = np.random.default_rng(0)
    other = start.map(lambda a: jnp.asarray(rng.normal(size=a.shape), np.float32))
    plan, key = Plan(0.1, momentum, None), jax.random.key(0)
    extra = {"rho": 0.3, "center": other}
    theirs = train(THEIRS.oracle, start, rows, key, plan, 3, linear=0.01 * other, **extra)
    extra = {"rho": 0.3, "center": as_ours(other)}
    ours = train(Oracle(OURS), as_ours(start), rows, key, plan, 3, linear=as_ours(0.01 * other), **extra)
    close(theirs.w, ours.w, rtol=1e-4, atol=1e-5)
    assert theirs.steps == int(ours.steps) == 3
    assert theirs.loss == pytest.approx(float(ours.loss), rel=1e-4)


def test_batches_see_every_real_row_once_an_epoch(rows, start):
    seen = []
    oracle = THEIRS.oracle
    loss = TorchNetwork._loss

    def noting(self, images, labels, weight):
        seen.append(images.reshape(len(images), -1).numpy())
        return loss(self, images, labels, weight)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TorchNetwork, "_loss", noting)
        done = train(oracle, start, rows, jax.random.key(3), Plan(0.1, 0.0, 6), 2)
    assert [len(part) for part in seen] == [6, 6, 4] * 2
    assert done.steps == 6
    real = np.sort(((np.asarray(rows.x[:16]) / 255 - 0.1307) / 0.3081).astype(np.float32), axis=0)
    for epoch in (seen[:3], seen[3:]):
        np.testing.assert_allclose(np.sort(np.concatenate(epoch), axis=0), real, rtol=1e-5, atol=1e-6)
    again = train(oracle, start, rows, jax.random.key(3), Plan(0.1, 0.0, 6), 2)
    jax.tree.map(np.testing.assert_array_equal, again.w.tree, done.w.tree)


@pytest.mark.parametrize(
    "settings",
    [
        fp.FedSGD(rate=0.5),
        fp.FedAvg(epochs=2, step=0.1),
        fp.FedADMM(epochs=2, vary=False, rate=0.1, momentum=0.5, rho=0.1),
        fp.FedADMM.preset("printed", epochs=2, vary=False, eta="participation", rho=0.1, weights="rows"),
        fp.FedADMM(epochs=3, batch=6, rate=[[0, 0.1], [1, 0.02]], message="augmented", newcomer="global", rho=0.5),
        fp.FedADMM(epochs=9, vary=False, rate=0.1, rho=0.1, accuracy=[0.2, 1e-6, 0.2, 1e9, 0.1]),
        fp.FedADMM(epochs=3, vary=False, rate=0.1, rho=0.5, solver="lbfgs", weights="rows"),
        fp.FedProx(epochs=2, step=0.1, mu=0.3, momentum=0.5),
        fp.Scaffold(epochs=2, rate=0.1),
    ],
    ids=["fedsgd", "fedavg", "fedadmm", "printed", "falling", "accuracy", "lbfgs", "fedprox", "scaffold"],
)
def test_runs_are_those_of_the_same_network_in_jax(settings, federation, monkeypatch):
    """From PyTorch's start: the same models after three rounds of some of the clients, to rounding; and the same V."""
    monkeypatch.setattr(
        fp.TwoLayer, "init", lambda self, features, dtype, key=None: as_ours(THEIRS.init(16, dtype, key))
    )
    options = {"participation": [[0, 1, 2], [2, 3], [0, 4]], "rounds": 3, "engine": HostEngine(at_once=1)}
    options["telemetry"] = "all"
    theirs = fp.run(settings, THEIRS, federation, **options)
    ours = fp.run(settings, OURS, federation, **options)
    close(theirs.model.w, ours.model.w, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(theirs.history.column("test_loss"), ours.history.column("test_loss"), rtol=1e-4)
    np.testing.assert_array_equal(theirs.history.column("bytes_up"), ours.history.column("bytes_up"))
    np.testing.assert_array_equal(theirs.history.column("gradients"), ours.history.column("gradients"))
    if "v" in ours.history.columns:
        np.testing.assert_allclose(theirs.history.column("v"), ours.history.column("v"), rtol=1e-3, atol=1e-9)


def test_a_run_with_batches_learns_leaves_a_folder_and_is_repeated(federation, tmp_path, monkeypatch):
    monkeypatch.setattr("fedpact.report.html.plots_section", lambda *_: "")
    settings = fp.FedADMM(epochs=4, batch=6, rate=0.1, momentum=0.5)
    run, again = (
        fp.run(settings, THEIRS, federation, rounds=8, seed=2, folder=tmp_path / name, telemetry="all") for name in "ab"
    )
    assert run.history.last("objective") < run.history.column("objective")[0]
    jax.tree.map(np.testing.assert_array_equal, run.model.w.tree, again.model.w.tree)
    model = Model.load(tmp_path / "a", problem=THEIRS)
    x = federation.dataset.x[:7]
    np.testing.assert_array_equal(model.predict(x), run.model.predict(x))
    loaded = fp.Run.load(tmp_path / "a", problem=THEIRS)
    assert loaded.history.rounds == 8
    with pytest.raises(InvalidArgument, match=r"^problem must be given to load a network of your own"):
        Model.load(tmp_path / "a")


@pytest.mark.parametrize("settings", [fp.FedADMM(epochs=1), fp.FedSGD()], ids=["fedadmm", "fedsgd"])
def test_a_round_with_nobody_changes_nothing(settings, federation):
    loss = fp.run(settings, THEIRS, federation, rounds=3, participation=[[], [0], []]).history.column("test_loss")
    assert loss[0] == loss[1] != loss[2] == loss[3]


def test_rounds_of_independent_clients(federation):
    scheme = fp.Independent([0.05] * 5)
    chosen = [len(scheme.select(0, t, 5)) for t in range(4)]
    assert 0 in chosen
    run = fp.run(fp.FedAvg(epochs=1, step=0.1), THEIRS, federation, rounds=4, participation=scheme)
    assert run.history.column("participants")[1:].tolist() == chosen


def test_all_devices_of_a_machine_with_one(federation):
    assert fp.run(fp.FedSGD(), THEIRS, federation, rounds=1, engine=HostEngine(devices=None)).history.rounds == 1


# Clients side by side


def seen_threads(monkeypatch):
    """Who trains, and with how many cores of its own."""
    seen, lock, train = [], threading.Lock(), TorchOracle.train

    def noting(self, *args, **options):
        with lock:
            seen.append((threading.get_ident(), torch.get_num_threads(), id(self.problem.module)))
        return train(self, *args, **options)

    monkeypatch.setattr(TorchOracle, "train", noting)
    return seen


def test_clients_side_by_side_are_those_one_after_the_other(federation, monkeypatch):
    settings, cores = fp.FedADMM(epochs=3, batch=6, rate=0.1, momentum=0.5, rho=0.1), torch.get_num_threads()
    seen, runs = seen_threads(monkeypatch), {}
    for count in (1, 3, None):
        problem = TorchNetwork(two_layers, shape=(1, 4, 4), classes=3)
        engine = HostEngine(at_once=count, spill=count == 3)
        runs[count] = fp.run(settings, problem, federation, rounds=4, engine=engine)
        mine = list(seen)
        seen.clear()
        threads, modules = ({one[place] for one in mine} for place in (0, 2))
        wanted = count or len(os.sched_getaffinity(0))
        assert len(modules) <= wanted, "modules are taken again"
        assert (threads == {threading.get_ident()}) == (wanted == 1)
        assert {one[1] for one in mine} == ({1} if wanted > 1 else {cores})
        assert torch.get_num_threads() == cores, "what is trained here later has all cores"
    near = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    for count in (3, None):
        jax.tree.map(near, runs[count].model.w.tree, runs[1].model.w.tree)


def test_a_client_that_fails_among_others_is_named(federation, monkeypatch):
    train = TorchOracle.train

    def failing(self, w, batch, *args, **options):
        if int(batch.client) == 2:
            raise OSError("no more")
        return train(self, w, batch, *args, **options)

    monkeypatch.setattr(TorchOracle, "train", failing)
    with pytest.raises(ClientError, match=r"^round 0, client 2, client_step: OSError: no more"):
        fp.run(fp.FedAvg(epochs=1, step=0.1), THEIRS, federation, rounds=2, engine=HostEngine(at_once=2))


def test_what_fails_half_way_leaves_nothing_behind(federation):
    """Neither a thread, nor a module that is not taken again, nor one core for the threads to come."""
    problem = TorchNetwork(two_layers, shape=(1, 4, 4), classes=3)
    taken = []

    def failing(item):
        taken.append(id(problem.module))
        raise OSError("no more")

    threads, cores, later = threading.active_count(), torch.get_num_threads(), []
    for _ in range(3):
        with pytest.raises(OSError, match="no more"):
            list(problem.side_by_side(failing, range(4), 2))
    assert len(set(taken)) <= 2
    assert not problem._modules
    assert threading.active_count() == threads
    thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert later == [cores]


def test_a_round_whose_answers_cannot_be_taken_ends_its_threads(federation, monkeypatch):
    """Though the error is kept, and with it whoever asked the clients: those that are waiting do not step."""
    seen, threads = seen_threads(monkeypatch), threading.active_count()

    def full(each, combine):
        next(each)
        raise MemoryError("no room")

    monkeypatch.setattr("fedpact.engines.host.collected", full)
    with pytest.raises(MemoryError) as kept:
        fp.run(fp.FedAvg(epochs=40, step=0.1, batch=1), THEIRS, federation, rounds=1, engine=HostEngine(at_once=2))
    assert kept.value.args == ("no room",)
    assert threading.active_count() == threads
    assert len(seen) - 1 < federation.clients


def test_two_rounds_at_once_have_modules_of_their_own():
    """A user's second thread with the same problem: neither takes what the other works with."""
    problem = TorchNetwork(two_layers, shape=(1, 4, 4), classes=3)
    begun, ended = threading.Barrier(3), threading.Event()
    same = []

    def slow(_):
        mine = problem.module
        begun.wait(10)
        ended.wait(10)
        same.append(problem.module is mine)
        return id(mine)

    first: list[int] = []
    thread = threading.Thread(target=lambda: first.extend(problem.side_by_side(slow, range(2), 2)))
    thread.start()
    begun.wait(10)
    second = list(problem.side_by_side(lambda _: id(problem.module), range(2), 2))
    ended.set()
    thread.join()
    assert same == [True, True]
    assert not set(first) & set(second)


@pytest.mark.parametrize("sharing", ["module", "tensor"])
def test_modules_that_share_parameters_are_refused(sharing, federation):
    """Side by side they would write into one another."""
    there = two_layers()

    def tied():
        module = two_layers()
        module[1].bias = torch.nn.Parameter(there[1].bias.detach())
        return module

    make = {"module": lambda: there, "tensor": tied}[sharing]
    said = r"^make must be a function whose modules share no parameters, got \['1\..*copy\.deepcopy\(module\)"
    with pytest.raises(InvalidArgument, match=said):
        fp.run(fp.FedSGD(), TorchNetwork(make, shape=(1, 4, 4), classes=3), federation, rounds=1)
    problem = TorchNetwork(lambda: copy.deepcopy(there), shape=(1, 4, 4), classes=3)
    problem.check(federation)
    np.testing.assert_array_equal(problem.init(16, np.float32).tree["1.bias"], there[1].bias.detach().numpy())


def test_a_machine_that_does_not_tell_its_cores(federation, monkeypatch):
    """macOS and Windows."""
    monkeypatch.delattr(os, "sched_getaffinity")
    _, data = HostEngine().load([federation], np.float32, native=THEIRS)
    assert data.at_once == os.cpu_count()


def test_copies_have_modules_of_their_own():
    problem = fp.TorchCNN1(hidden=3)
    used = problem.module
    for one in (pickle.loads(pickle.dumps(problem)), copy.copy(problem), copy.deepcopy(problem)):
        assert one == problem
        assert hash(one) == hash(problem)
        assert one.module is not used
    assert problem.module is used


def test_modules_that_draw_step_one_after_the_other(federation, monkeypatch):
    seen = seen_threads(monkeypatch)
    problem = TorchNetwork(dropping, shape=(1, 4, 4), classes=3)
    one, again = (fp.run(fp.FedAvg(epochs=2, step=0.1, batch=6), problem, federation, rounds=2) for _ in range(2))
    assert {thread for thread, _, _ in seen[1:]} == {threading.get_ident()}
    jax.tree.map(np.testing.assert_array_equal, one.model.w.tree, again.model.w.tree)


# How images lie in memory


def of_images():
    return torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3, padding=1), torch.nn.Flatten(), torch.nn.Linear(32, 3))


class Viewing(torch.nn.Module):
    """Takes for granted that an image of each colour lies in one piece."""

    def __init__(self):
        super().__init__()
        self.layers = of_images()

    def forward(self, images):
        layer = self.layers[0](images)
        return self.layers[2](layer.view(len(images), -1))


def test_a_module_that_views_its_layers_gets_them_colour_by_colour(rows, federation):
    quick, plain = (TorchNetwork(make, shape=(1, 4, 4), classes=3) for make in (of_images, Viewing))
    assert (quick._layout, plain._layout) == (torch.channels_last, torch.contiguous_format)
    assert THEIRS._layout == torch.contiguous_format  # nothing to gain
    w = quick.init(16, np.float32, jax.random.key(1))
    same = Vector({f"layers.{name}": a for name, a in w.tree.items()})
    plan = Plan(0.1, 0.5, 6)
    for problem in (quick, plain):
        assert fp.run(fp.FedAvg(epochs=1, step=0.1), problem, federation, rounds=1).history.rounds == 1
    extra = lambda start: {"linear": 0.1 * start, "rho": 0.3, "center": 0.5 * start}
    one = train(quick.oracle, w, rows, jax.random.key(0), plan, 3, **extra(w)).w
    other = train(plain.oracle, same, rows, jax.random.key(0), plan, 3, **extra(same)).w
    for name, a in one.tree.items():
        np.testing.assert_allclose(a, other.tree[f"layers.{name}"], rtol=1e-4, atol=1e-6)
    for name, a in quick.gradient(w, rows).tree.items():
        np.testing.assert_allclose(a, plain.gradient(same, rows).tree[f"layers.{name}"], rtol=1e-4, atol=1e-6)


class Joining(torch.nn.Module):
    """Of one colour: views what is made of the images alone."""

    def __init__(self):
        super().__init__()
        self.layers = of_images()

    def forward(self, images):
        twice = torch.cat([images, images], dim=1).view(len(images), -1)
        return self.layers[2](twice) + self.layers(images)


def test_a_module_that_views_what_it_made_of_one_colour(federation):
    problem = TorchNetwork(Joining, shape=(1, 4, 4), classes=3)
    assert fp.run(fp.FedAvg(epochs=1, step=0.1, batch=6), problem, federation, rounds=1).history.rounds == 1


# Dropout, and parameters that nothing depends on


def dropping():
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Dropout(0.5), torch.nn.Linear(16, 3))


def test_dropout_is_off_where_it_is_measured_and_on_in_training_with_draws_from_the_key(rows):
    problem = TorchNetwork(dropping, shape=(1, 4, 4), classes=3)
    plain = TorchNetwork(lambda: torch.nn.Sequential(*list(dropping())[::2]), shape=(1, 4, 4), classes=3)
    w = problem.init(16, np.float32, jax.random.key(1))
    same = Vector({name.replace("2.", "1."): a for name, a in w.tree.items()})

    def trained(key, of=problem, start=w):
        done = train(of.oracle, start, rows, jax.random.key(key), Plan(0.1, 0.0, None), 2).w
        return np.concatenate([np.ravel(a) for a in done.tree.values()])

    np.testing.assert_array_equal(trained(3), trained(3))
    assert not np.array_equal(trained(3), trained(4))
    np.testing.assert_array_equal(trained(3, plain, same), trained(4, plain, same))  # on all rows nothing else is drawn
    state = torch.random.get_rng_state()
    for measured in (problem.value, lambda w, b: problem.value_and_gradient(w, b)[0]):
        trained(3)  # which leaves it on
        assert float(measured(w, rows)) == pytest.approx(float(plain.value(same, rows)), rel=1e-6)
    trained(3)
    np.testing.assert_allclose(problem.predict(w, rows.x), plain.predict(same, rows.x), rtol=1e-6)
    assert torch.equal(torch.random.get_rng_state(), state), "the user's own draws are left alone"


def test_modules_are_made_without_the_user_s_draws(federation):
    state = torch.random.get_rng_state()
    problem = TorchNetwork(two_layers, shape=(1, 4, 4), classes=3)
    fp.run(fp.FedAvg(epochs=1, step=0.1), problem, federation, rounds=1, engine=HostEngine(at_once=2))
    assert torch.equal(torch.random.get_rng_state(), state)


class Idle(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.idle = torch.nn.Linear(16, 3), torch.nn.Linear(2, 2)

    def forward(self, images):
        return self.used(images.flatten(1))


def test_what_no_score_depends_on_has_gradient_zero(rows, federation):
    problem = TorchNetwork(Idle, shape=(1, 4, 4), classes=3)
    w = problem.init(16, np.float32, jax.random.key(1))
    slope = problem.gradient(w, rows)
    assert not np.any(slope.tree["idle.weight"])
    assert np.any(slope.tree["used.weight"])
    run = fp.run(fp.FedAvg(epochs=2, step=0.1), problem, federation, rounds=2)
    assert run.history.last("test_loss") < run.history.column("test_loss")[0]


def test_its_start_follows_from_the_seed():
    one, again, other = (THEIRS.init(16, np.float32, jax.random.key(s)) for s in (1, 1, 2))
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(again), strict=True))
    assert not any(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))
    assert THEIRS.dim == 16 * 5 + 5 + 18


# Bad modules and settings


class Whole(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.count = torch.nn.Parameter(torch.zeros(3, dtype=torch.int64), requires_grad=False)


def frozen():
    module = two_layers()
    module[1].bias.requires_grad_(False)
    return module


def failing():
    raise OSError("no weights here")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (frozen, r"^make must be a module whose parameters all learn \(requires_grad\), got \['1\.bias'\]"),
        (failing, r"^make must be a function that returns an nn\.Module, got OSError: no weights here\. Try make\(\)"),
        (lambda: 3, r"^make must be a function that returns an nn\.Module, got 3"),
        (Whole, r"^parameters must be floating point, got torch\.int64 at count"),
        (
            lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 3)),
            r"^make must be a module without running statistics, got \['1\.running_mean', '1\.running_var'\]",
        ),
        (
            lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 4)),
            r"^make must be a module to scores of shape \(B, 3\), got \(2, 4\)",
        ),
        (
            lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(9, 3)),
            r"^make must be a module that takes images of shape \(B, 1, 4, 4\), got RuntimeError",
        ),
    ],
)
def test_bad_modules(make, said, federation):
    with pytest.raises(InvalidArgument, match=said):
        fp.run(fp.FedSGD(), TorchNetwork(make, shape=(1, 4, 4), classes=3), federation, rounds=1)


class FailsInTraining(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = two_layers()

    def forward(self, images):
        if self.training:
            raise OSError("not in training")
        return self.layers(images)


def test_a_module_that_fails_in_training_is_told_with_client_and_stage(federation):
    problem = TorchNetwork(FailsInTraining, shape=(1, 4, 4), classes=3)
    with pytest.raises(ClientError, match=r"^round 0, client 0, client_step: OSError: not in training"):
        fp.run(fp.FedAvg(epochs=1, step=0.1), problem, federation, rounds=1)


def test_a_vector_of_another_module_is_refused(rows, start):
    """What it does not have would be left of the client before."""
    with pytest.raises(KeyError, match=r"3\.bias"):
        THEIRS.value(Vector({name: a for name, a in start.tree.items() if name != "3.bias"}), rows)


def test_what_needs_jax_is_refused(federation):
    options = {"rounds": 1}
    with pytest.raises(InvalidArgument, match=r"^make must be a function that returns an nn\.Module, got None"):
        TorchNetwork(None)
    with pytest.raises(InvalidArgument, match=r"^engine must be .host. for TorchNetwork, got 'LocalEngine'"):
        fp.run(fp.FedSGD(), THEIRS, federation, engine="local", **options)
    with pytest.raises(InvalidArgument, match=r"^precision must be .single. for TorchNetwork, got 'double'"):
        fp.run(fp.FedSGD(), THEIRS, federation, precision="double", **options)
    drawing = TorchNetwork(dropping, shape=(1, 4, 4), classes=3)
    with pytest.raises(InvalidArgument, match=r"^at_once must be 1 for a module that draws in training.* got 4"):
        fp.run(fp.FedSGD(), drawing, federation, engine=HostEngine(at_once=4), **options)
    for settings in (fp.FedAvg(steps=2, step=0.1), fp.FedProx(steps=2, step=0.1)):
        with pytest.raises(
            InvalidArgument, match=r"^epochs \(E\) must be given for a problem that is not JAX's, got None"
        ):
            fp.run(settings, THEIRS, federation, **options)


# Bad input


@pytest.mark.parametrize(
    ("settings", "rows", "said"),
    [
        (fp.FedAvg(epochs=1, step=0.1, batch=99), {}, r"^batch \(B\) must be at most the 22 rows of client \d, got 99"),
        (fp.FedSGD(), {"y": lambda y: np.arange(len(y)) % 4}, r"^labels must be below 3, the outputs of TorchNetwork"),
        (fp.FedSGD(), {"x": lambda x: x[:, :15]}, r"must be 16 numbers a row \(1×4×4\) for TorchNetwork, got 15\."),
    ],
    ids=["batch", "labels", "images"],
)
def test_bad_rows_are_refused_before_the_first_round(settings, rows, said, federation):
    x, y = federation.dataset.x, federation.dataset.y
    x, y = (rows.get(name, lambda a: a)(a) for name, a in (("x", x), ("y", y)))
    other = fp.data.from_arrays(x, y).split(clients=5, seed=0)
    with pytest.raises(FedpactError, match=said):
        fp.run(settings, THEIRS, other, rounds=1)


@pytest.mark.parametrize("spill", [False, True])
def test_a_rate_that_diverges_ends_with_round_client_and_loss_and_keeps_the_last_model(spill, federation):
    settings = fp.FedADMM(epochs=3, vary=False, rate=[[0, 0.1], [2, 1e30]], rho=0.1)
    run = fp.run(settings, THEIRS, federation, rounds=5, engine=HostEngine(spill=spill))
    assert run.outcome_kind is Outcome.NONFINITE
    told = r"round 2, client \d: its upload is not finite; at the model it was sent its loss was \S+"
    assert re.fullmatch(told, run.where)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(run.model.w.tree))
    before = fp.run(settings, THEIRS, federation, rounds=2)
    jax.tree.map(np.testing.assert_array_equal, run.model.w.tree, before.model.w.tree)
