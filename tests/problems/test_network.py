"""Networks: sizes, layers against XLA's own, losses by hand, and what is refused."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import logsumexp, softmax

import fedpact as fp
from fedpact.core.contract import Batch
from fedpact.core.errors import CheckpointError, DataError, InvalidArgument
from fedpact.core.vector import Vector
from fedpact.data import Dataset
from fedpact.data.dataset import Column, Schema
from fedpact.model import Model
from fedpact.problems.layers import block, convolve, pool
from fedpact.problems.network import Network

SMALL = fp.TwoLayer(inputs=6, hidden=4, classes=3)


@pytest.fixture(autouse=True)
def operation_by_operation():
    """Not here: thousands of random numbers are slow without compiled programs."""
    return


def dataset(rows=24, features=6, classes=3, seed=0, pixels=True, test=()):
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 256, (rows, features)).astype(np.uint8)
    y = np.minimum(x[:, 0] // (256 // classes), classes - 1).astype(float)
    columns = tuple(Column(f"pixel {i}", "number") for i in range(features))
    schema = Schema(columns, (1.0,) * features, (0.0,) * features, "class", tuple(map(str, range(classes))))
    return Dataset("tiny", x if pixels else x / 255.0, y, schema, {}, "none", test)


def batch(x, y, weight=None):
    weight = np.ones(len(y)) if weight is None else weight
    return Batch(jnp.asarray(x), jnp.asarray(y, float), jnp.asarray(weight, float), jnp.asarray(0, jnp.int32))


def drawn(problem, seed=0, dtype=np.float64):
    """Parameters of the problem's shapes, small and random: NumPy's, which needs no compiled program."""
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(lambda: problem.init(0, dtype))
    return jax.tree.map(lambda leaf: jnp.asarray(rng.uniform(-0.2, 0.2, leaf.shape), leaf.dtype), shapes)


def linear(tree, images):
    return images.reshape(len(images), -1) @ tree["a"] + tree["b"]


def own(initial=None, apply=linear, **options):
    start = lambda key: {"a": jax.random.normal(key, (6, 3)), "b": jnp.zeros(3)}
    return Network(apply, initial or start, **{"shape": (2, 3), "classes": 3} | options)


# Sizes and initial values


def test_the_networks_have_the_parameters_of_table_ii():
    """25·32 + 32, 25·32·64 + 64, 3136·512 + 512, 5130; for colours 75·32 + 32, …, 4096·256 + 256, 2570."""
    assert fp.CNN1().dim == 832 + 51_264 + 1_606_144 + 5_130 == 1_663_370
    assert fp.CNN2().dim == 2_432 + 51_264 + 1_048_832 + 2_570 == 1_105_098
    assert fp.TwoLayer().dim == 784 * 200 + 200 + 2_010
    assert own().dim == 21
    assert fp.TwoLayer(hidden=128, bias=False).dim == 128 * (784 + 10)  # the SSCA paper's J(P + L)
    assert fp.Softmax().dim == 7_840
    assert fp.Softmax(bias=True).dim == 7_850


def test_the_ssca_paper_s_network_by_its_formula():
    """Q = softmax(W_2 S(W_1 x)), S(z) = z/(1 + e^{−z}), no bias; weights from U(±start)."""
    problem = fp.TwoLayer(6, 4, 3, activation="swish", bias=False, start=0.3, mean=0.0, std=1.0)
    w, data = drawn(problem), dataset()
    assert set(w.tree["hidden"]) == set(w.tree["output"]) == {"w"}
    z = data.x / 255.0 @ np.asarray(w.tree["hidden"]["w"])
    scores = z / (1 + np.exp(-z)) @ np.asarray(w.tree["output"]["w"])
    np.testing.assert_allclose(problem.scores(w, jnp.asarray(data.x)), scores, rtol=1e-12, atol=1e-15)
    losses = logsumexp(scores, axis=1) - scores[np.arange(24), data.y.astype(int)]
    np.testing.assert_allclose(problem.losses(w, batch(data.x, data.y)), losses, rtol=1e-12)
    for part in jax.tree.leaves(
        fp.TwoLayer(40, 20, 3, bias=False, start=0.3).init(0, np.float64, jax.random.key(1)).tree
    ):
        assert 0.27 < np.abs(part).max() <= 0.3


def test_softmax_regression_by_its_formula():
    problem = fp.Softmax(6, 3, bias=True)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(problem.init(0, np.float64).tree))
    w, data = drawn(problem), dataset()
    scores = data.x / 255.0 @ np.asarray(w.tree["w"]) + np.asarray(w.tree["b"])
    np.testing.assert_allclose(problem.predict(w, jnp.asarray(data.x)), softmax(scores, axis=1), rtol=1e-13)


@pytest.mark.parametrize("problem", [fp.CNN2(hidden=8)], ids=["cnn2"])
def test_initial_values_are_uniform_up_to_one_over_the_root_of_the_inputs(problem):
    """U(±1/√fan_in): inside, and large layers fill the range with variance 1/(3 fan_in); biases too."""
    init = jax.jit(lambda key: problem.init(0, np.float64, key))
    tree = init(jax.random.key(3)).tree
    for name, layer in tree.items():
        fan = math.prod(layer["w"].shape[:-1])
        for part in layer.values():
            assert np.abs(part).max() <= 1 / math.sqrt(fan), name
        if layer["w"].size > 500:
            assert np.abs(layer["w"]).max() >= 0.98 / math.sqrt(fan)
            assert np.var(layer["w"]) * 3 * fan == pytest.approx(1, abs=0.15)
    leaves = jax.tree.leaves(tree)
    other = jax.tree.leaves(init(jax.random.key(4)).tree)
    assert all(np.mean(a != b) > 0.9 for a, b in zip(leaves, other, strict=True))
    single = jax.eval_shape(lambda: problem.init(0, np.float32))
    assert {leaf.dtype for leaf in jax.tree.leaves(single)} == {np.dtype(np.float32)}


# Layers


@functools.cache
def images(channels=3, outputs=4, size=5, dtype=np.float64):
    rng = np.random.default_rng(1)
    layer = {"w": rng.normal(size=(size, size, channels, outputs)), "b": rng.normal(size=outputs)}
    return jnp.asarray(rng.normal(size=(2, 8, 6, channels)), dtype), jax.tree.map(
        lambda a: jnp.asarray(a, dtype), layer
    )


def by_xla(x, layer):
    numbers = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, layer["w"], (1, 1), "SAME", dimension_numbers=numbers) + layer["b"]


def pooled_by_xla(x):
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


@pytest.mark.parametrize("kind", [{}, {"channels": 1, "size": 3}, {"dtype": np.float32}], ids=str)
def test_a_convolution_is_xla_s_and_so_are_its_gradients(kind):
    x, layer = images(**kind)
    near = {"rtol": 1e-5, "atol": 1e-4} if kind.get("dtype") else {"rtol": 1e-11, "atol": 1e-11}

    def both(f):
        return lambda x, layer: (f(x, layer), jax.grad(lambda *a: jnp.sum(jnp.cos(f(*a))), (0, 1))(x, layer))

    mine, theirs = (jax.jit(both(f))(x, layer) for f in (convolve, by_xla))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **near), mine, theirs)


def test_pooling_is_xla_s_and_so_is_its_gradient():
    x, _ = images()
    np.testing.assert_array_equal(pool(x), pooled_by_xla(x))
    mine, theirs = (jax.grad(lambda x, f=f: jnp.sum(jnp.cos(f(x))))(x) for f in (pool, pooled_by_xla))
    np.testing.assert_allclose(mine, theirs, rtol=1e-14)


@pytest.mark.parametrize("relu", [True, False], ids=["relu", "linear"])
@pytest.mark.parametrize("channels", [1, 16])  # one product of whole patches, and one for each row of the kernel
@pytest.mark.parametrize("rows", [2, 10, 25])  # below a chunk, a whole one, and two with a rest
def test_a_block_is_xla_s_convolution_and_pooling_and_so_are_its_gradients(rows, channels, relu):
    """Its way back is written by hand. Of the first layer the images' gradient is left out: zeros."""
    rng = np.random.default_rng(rows)
    b = rng.normal(size=2) - 5 * math.sqrt(channels)  # about half of the largest of four are below 0
    layer = {"w": jnp.asarray(rng.normal(size=(5, 5, channels, 2))), "b": jnp.asarray(b)}
    x = jnp.asarray(rng.normal(size=(rows, 6, 4, channels)))
    by = jnp.asarray(rng.normal(size=(rows, 3, 2, 2)))
    xla = lambda x, layer: pooled_by_xla(jnp.maximum(by_xla(x, layer), 0) if relu else by_xla(x, layer))

    def both(f):
        value, back = jax.vjp(f, x, layer)
        return value, *back(by)

    mine, first, theirs = jax.jit(
        lambda: (both(lambda *a: block(*a, relu)), both(lambda *a: block(*a, relu, first=True)), both(xla))
    )()
    close = functools.partial(np.testing.assert_allclose, rtol=1e-10, atol=1e-10)
    assert relu == bool(np.any(np.asarray(theirs[0]) == 0))
    jax.tree.map(close, mine, theirs)
    jax.tree.map(close, (first[0], first[2]), (theirs[0], theirs[2]))
    assert not np.any(first[1])


def test_the_gradient_of_equal_pixels_goes_to_one_of_them():
    """Where a window is flat the gradient is neither lost nor counted four times."""
    same = {"w": jnp.zeros((5, 5, 1, 1)).at[2, 2].set(1.0), "b": jnp.zeros(1)}  # the convolution that changes nothing
    g = np.asarray(jax.grad(lambda x: jnp.sum(block(x, same, relu=False)))(jnp.ones((1, 4, 4, 1))))
    assert g.sum() == 4
    assert set(np.unique(g)) == {0.0, 1.0}


def test_layers_against_finite_differences():
    x, layer = images(channels=1, size=3)
    f = lambda layer: jnp.sum(jnp.sin(pool(convolve(x, layer))))
    g = jax.grad(f)(layer)
    for name, place in (("w", (0, 1, 0, 2)), ("w", (2, 2, 0, 0)), ("b", (3,))):
        up, down = ({**layer, name: layer[name].at[place].add(h)} for h in (1e-6, -1e-6))
        assert float(g[name][place]) == pytest.approx(float(f(up) - f(down)) / 2e-6, rel=1e-6)


@pytest.mark.parametrize("relu", [True, False])
def test_a_cnn_is_conv_pool_conv_pool_hidden_output(relu):
    """conv 5×5 – (ReLU) – pool, twice, then ReLU(hidden) and the outputs, with XLA's own layers."""
    problem = fp.CNN1(hidden=6, relu=relu)
    w = drawn(problem)
    x = np.random.default_rng(0).integers(0, 256, (2, 784)).astype(np.uint8)
    a = jnp.asarray((x.reshape(2, 28, 28, 1) / 255 - 0.1307) / 0.3081)

    def twice(a, tree):
        for name in ("conv1", "conv2"):
            a = by_xla(a, tree[name])
            a = pooled_by_xla(jnp.maximum(a, 0) if relu else a)
        return a

    a = np.asarray(jax.jit(twice)(a, w.tree)).reshape(2, -1)
    a = np.maximum(a @ w.tree["hidden"]["w"] + w.tree["hidden"]["b"], 0)
    expected = a @ w.tree["output"]["w"] + w.tree["output"]["b"]
    np.testing.assert_allclose(jax.jit(problem.scores)(w, jnp.asarray(x)), expected, rtol=1e-9, atol=1e-11)


# Losses


def literal(tree, x, y, softened):
    z = np.maximum(x @ tree["hidden"]["w"] + tree["hidden"]["b"], 0) @ tree["output"]["w"] + tree["output"]["b"]
    z = softmax(z, axis=1) if softened else z
    return logsumexp(z, axis=1) - z[np.arange(len(y)), y.astype(int)], z


@pytest.mark.parametrize("softened", [False, True])
def test_the_loss_is_cross_entropy_over_the_real_rows(softened):
    """Weighted as everywhere: padding is nothing, rows that stand for several count so. softmax=True: of softmax."""
    problem = dataclasses.replace(SMALL, softmax=softened)
    data, w = dataset(8), drawn(problem)
    weight = np.array([1, 1, 0, 2, 1, 0, 1, 0.5])
    x = (data.x / 255 - 0.1307) / 0.3081
    loss, _ = literal(jax.tree.map(np.asarray, w.tree), x, data.y, softened)
    rows, value_of = batch(data.x, data.y, weight), jax.jit(problem.value)
    value, gradient = jax.jit(problem.value_and_gradient)(w, rows)
    assert float(value) == pytest.approx(weight @ loss / weight.sum(), rel=1e-12)
    assert float(value_of(w, rows)) == pytest.approx(float(value), rel=1e-14)
    for layer, part, place in (
        ("hidden", "w", (0, 1)),
        ("hidden", "b", (2,)),
        ("output", "w", (3, 2)),
        ("output", "b", (0,)),
    ):

        def moved(h, layer=layer, part=part, place=place):
            tree = jax.tree.map(np.array, w.tree)
            tree[layer][part][place] += h
            return float(value_of(Vector(tree), rows))

        assert float(gradient.tree[layer][part][place]) == pytest.approx((moved(1e-6) - moved(-1e-6)) / 2e-6, abs=1e-8)


def test_bytes_are_normalised_and_numbers_are_taken_as_they_are():
    problem = fp.TwoLayer(inputs=6, hidden=4, classes=3, mean=0.5, std=0.25)
    data, w = dataset(8), drawn(problem)
    ready = (data.x / 255.0 - 0.5) / 0.25
    np.testing.assert_allclose(
        problem.scores(w, jnp.asarray(data.x)), problem.scores(w, jnp.asarray(ready)), rtol=1e-12
    )


def test_predictions_are_probabilities_and_right_answers_are_counted():
    data, w = dataset(20), drawn(SMALL)
    _, z = literal(jax.tree.map(np.asarray, w.tree), (data.x / 255 - 0.1307) / 0.3081, data.y, False)
    np.testing.assert_allclose(SMALL.predict(w, jnp.asarray(data.x)), softmax(z, axis=1), rtol=1e-10)
    weight = np.append(np.ones(15), np.zeros(5))
    counts = SMALL.counts(w, batch(data.x, data.y, weight))
    assert float(counts["rows"]) == 15
    assert float(counts["correct"]) == np.sum(z.argmax(axis=1)[:15] == data.y[:15])


# Models


@pytest.mark.parametrize(
    "problem", [SMALL, fp.CNN2(hidden=2, classes=4, relu=False, softmax=True)], ids=["two", "cnn2"]
)
def test_a_model_comes_back_from_its_file(problem, tmp_path):
    data = dataset(5, math.prod(problem.shape), problem.classes)
    model = Model(problem, jax.tree.map(np.asarray, drawn(problem, dtype=np.float32)), data.schema)
    again = Model.load(model.save(tmp_path / "model.bin"))
    assert again.problem == problem
    assert again.features == math.prod(problem.shape)
    jax.tree.map(np.testing.assert_array_equal, again.w.tree, model.w.tree)
    np.testing.assert_array_equal(again.predict(data.x), model.predict(data.x))
    assert model.predict(data.x).shape == (5, problem.classes)
    with pytest.raises(InvalidArgument, match=r"^x must be an \(N, \d+\) array, got \(5, 3\)"):
        again.predict(data.x[:, :3])


def test_a_network_of_one_s_own_is_given_again(tmp_path):
    problem = own()
    model = Model(problem, jax.tree.map(np.asarray, drawn(problem, dtype=np.float32)), None)
    path = model.save(tmp_path / "model.bin")
    x = np.random.default_rng(0).normal(size=(4, 6))
    np.testing.assert_array_equal(Model.load(path, problem=problem).predict(x), model.predict(x))
    with pytest.raises(InvalidArgument, match=r"^problem must be given to load a network of your own, got none for "):
        Model.load(path)
    other = own(lambda key: {"a": jnp.zeros((6, 3)), "c": jnp.zeros(3)})
    with pytest.raises(CheckpointError, match=r"^model must have the parameters of its problem, got others in "):
        Model.load(path, problem=other)
    assert problem.to_dict()["apply"].endswith("test_network.linear")


def test_a_network_of_one_s_own_trains_and_its_run_is_read_again(tmp_path, monkeypatch):
    monkeypatch.setattr("fedpact.report.html.plots_section", lambda *_: "")
    federation = dataset(pixels=False).split(clients=3)
    run = fp.run(fp.FedSGD(rate=0.5), own(), federation, rounds=5, folder=tmp_path / "run")
    assert run.history.column("objective")[-1] < run.history.column("objective")[0]
    again = fp.Run.load(tmp_path / "run", problem=own())
    jax.tree.map(np.testing.assert_array_equal, again.model.w.tree, run.model.w.tree)
    with pytest.raises(InvalidArgument, match=r"^problem must be given to load a network of your own"):
        fp.Run.load(tmp_path / "run")


# What is refused


def refused(problem, data=None, error=InvalidArgument, **options):
    federation = (data or dataset()).split(clients=3)
    with pytest.raises(error) as caught:
        fp.run(fp.FedSGD(), problem, federation, rounds=1, **options)
    return str(caught.value)


def test_images_of_another_shape():
    said = refused(fp.CNN1(), error=DataError)
    assert said.startswith("x of dataset 'tiny' must be 784 numbers a row (28×28×1) for CNN1, got 6.")
    assert "TwoLayer(inputs=6)" in said


def test_labels_outside_the_outputs():
    said = refused(fp.TwoLayer(inputs=6, classes=2), error=DataError)
    assert said == "labels must be below 2, the outputs of TwoLayer, got class 2 (3 classes). Give the model classes=3."


def test_a_numeric_target():
    federation = fp.data.synthetic("least_squares", rows=20, features=6).split(clients=2)
    with pytest.raises(
        DataError, match=r"^labels must be classes for TwoLayer, got a numeric target\. Use LeastSquares"
    ):
        fp.run(fp.FedSGD(), SMALL, federation, rounds=1)


def test_parameters_that_are_not_floating_point(tmp_path):
    """Refused as the experiment is made: nothing of its folder is there."""
    whole = own(lambda key: {"a": jnp.zeros((6, 3)), "b": jnp.zeros(3, jnp.int32)})
    assert refused(whole).startswith("parameters of Network must be floating point, got int32 at ['b'].")
    refused(whole, folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_function_of_the_wrong_output_or_input():
    said = refused(own(apply=lambda tree, images: images.reshape(len(images), -1)))
    assert said.startswith("apply must be a function to scores of shape (B, 3), got (2, 6).")
    said = refused(own(apply=lambda tree, images: images @ tree["a"]))
    assert said.startswith("apply must take (tree, images of shape (B, 2, 3)), got ")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: fp.CNN1(hidden=0), r"hidden must be an integer of at least 1, got 0"),
        (lambda: fp.CNN2(classes=-1), r"classes must be an integer of at least 1, got -1"),
        (lambda: fp.CNN1(relu=1), r"relu must be true or false, got 1"),
        (lambda: fp.CNN1(softmax="yes"), r"softmax must be true or false, got 'yes'"),
        (lambda: fp.TwoLayer(std=0), r"std must be above 0, got 0"),
        (lambda: fp.TwoLayer(mean=None), r"mean must be a number, got None"),
        (lambda: fp.TwoLayer(inputs=2.0), r"inputs must be an integer of at least 1, got 2\.0"),
        (lambda: fp.TwoLayer(start=0), r"start must be above 0, or left out, got 0"),
        (lambda: fp.TwoLayer(bias="no"), r"bias must be true or false, got 'no'"),
        (lambda: fp.Softmax(inputs=0), r"inputs must be an integer of at least 1, got 0"),
        (lambda: own(shape=()), r"shape must be the sizes of one input, such as \(28, 28, 1\), got \(\)"),
        (lambda: own(shape=(2, -3)), r"shape must be the sizes of one input"),
        (lambda: Network(None, lambda key: {}), r"apply must be a function of \(tree, images\), got None"),
        (lambda: Network(linear, {}), r"initial must be a function of a key that returns a tree, got \{\}"),
    ],
)
def test_bad_settings(make, said):
    with pytest.raises(InvalidArgument, match=f"^{said}"):
        make()


def test_convolutions_of_several_clients_at_once_have_the_gradients_they_have_one_by_one():
    """The layers have gradients of their own; clients that step together are a batch of them."""
    rng, problem = np.random.default_rng(0), fp.CNN1(hidden=6)
    batch = Batch(rng.integers(0, 256, (3, 2, 784)).astype(np.uint8), np.ones((3, 2)), np.ones((3, 2)), np.arange(3))
    each = [problem.init(784, jnp.float64, jax.random.key(i)) for i in range(3)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)
    losses, gradients = jax.jit(jax.vmap(problem.value_and_gradient))(stacked, batch)
    one = jax.jit(problem.value_and_gradient)
    for i, w in enumerate(each):
        loss, gradient = one(w, jax.tree.map(lambda a, i=i: a[i], batch))
        assert float(losses[i]) == pytest.approx(float(loss), rel=1e-12)
        for a, b in zip(jax.tree.leaves(gradients), jax.tree.leaves(gradient), strict=True):
            np.testing.assert_allclose(a[i], b, rtol=1e-9, atol=1e-12)
