"""What holds for every algorithm of the registry."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import re
import sys
from pathlib import Path

import byhand
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from byhand import PROBLEM, built, flat, key_of, parts, play, relative, vector

import fedpact as fp
from fedpact.algorithms import ALGORITHMS, algorithm
from fedpact.core.contract import Algorithm, Cohort, Oracle
from fedpact.core.errors import UnknownName
from fedpact.core.keys import JOIN_ROUND
from fedpact.core.loop import Loop, draw
from fedpact.core.participation import Everyone, Fraction
from fedpact.core.settings import Settings
from fedpact.core.stop import Never
from fedpact.engines import DebugEngine, HostEngine, LocalEngine

#: Step sizes that suit the small federation; an algorithm that is not named here runs with its defaults.
SMALL = {
    "fedepm": {"k0": 3, "eta": 1.5, "lam": 0.05, "mu0": 5.0, "c": 5.0, "alpha": 1.05},
    "sfedavg": {"k0": 2, "scale": 0.02},
    "sfedprox": {"k0": 2, "scale": 0.02, "mu": 0.1},
    "fedavg": {"steps": 2},
    "fedprox": {"steps": 2, "mu": 0.1},
    "inexact_admm": {"k0": 2},
    "fedavg_stale": {"k0": 2, "a": 5.0},
    "fedprox_local": {"k0": 2, "a": 5.0},
    "fedadmm": {"epochs": 2, "vary": False, "rate": 0.05},
    "scaffold": {"epochs": 2, "rate": 0.05},
    "fedsgd": {"rate": 0.05},
    "fedpdm": {"rho": 4.0, "steps": 3},
    "ssca": {"tau": 0.5},
    "local_sgd": {"steps": 2, "momentum": 0.5},
    "vertical_ssca": {"tau": 0.5},
    "vertical_sgd": {"momentum": 0.5},
}
#: Batches drawn from a client's rows. (Runs with noise are compared in test_fedepm.)
RANDOM = {
    "fedavg-batch": fp.FedAvg(steps=2, step=0.2, batch=3, weights="rows"),
    "fedavg-epochs": fp.FedAvg(epochs=2, step=0.2, batch=3, short=True, momentum=0.5, vary=True),
    "fedadmm-batch": fp.FedADMM(
        epochs=2, batch=3, short=True, weights="rows", start="local", message="augmented", rho=1
    ),
    "fedadmm-newcomer": fp.FedADMM(epochs=2, batch=3, short=True, message="augmented", newcomer="global", rho=1),
    "fedadmm-falling": fp.FedADMM(epochs=2, batch=3, short=True, rate=((0, 0.1), (2, 0.02)), rho=1),
    "fedadmm-accuracy": fp.FedADMM(epochs=4, batch=3, short=True, rho=1, accuracy=0.05),
    "fedadmm-lbfgs": fp.FedADMM(epochs=3, solver="lbfgs", rho=1, accuracy=1e-12),
    "fedpdm-batch": fp.FedPDM(rho=4.0, steps=3, batch=3, memory=True),
    "ssca-batch": fp.SSCA(batch=3, tau=0.5),
    "local_sgd-batch": fp.LocalSGD(steps=2, batch=3, momentum=0.5),
    "vertical_ssca-batch": fp.VerticalSSCA(batch=5, tau=0.5),
}
SETTINGS = {name: cls(**SMALL.get(name, {})) for name, cls in ALGORITHMS.items()}
COHORTS = ((0, 2, 5), (1, 2, 3, 6), (4,), (), (0, 1, 2, 3, 4, 5, 6), (3, 6))
#: Of data split by features there is one client, which is all parties, and a round needs them all.
TOGETHER = ((0,),) * len(COHORTS)
ONE = LocalEngine(buckets=1)
ZERO = vector(np.zeros(4), intercept=True)

each = pytest.mark.parametrize("name", ALGORITHMS)
QUICK = (
    "fedavg-batch",
    "fedadmm-batch",
    "fedadmm-newcomer",
    "fedadmm-accuracy",
)  # of those that draw batches; the others are drills
each_and_random = pytest.mark.parametrize(
    "settings",
    [
        pytest.param(settings, id=name, marks=[pytest.mark.drill] * (name in RANDOM and name not in QUICK))
        for name, settings in (SETTINGS | RANDOM).items()
    ],
)
with_presets = pytest.mark.parametrize(
    ("name", "preset"), [(n, p) for n, cls in ALGORITHMS.items() for p in (None, *cls.presets)]
)


def quick(name, *these):
    """One of these in every run of the tests, the others in the drills."""
    return name if name in these else pytest.param(name, marks=pytest.mark.drill)


def cohorts_of(settings):
    return TOGETHER if settings.vertical else COHORTS


def parties_of(settings):
    """How many one client stands for."""
    return len(byhand.case(True).federation.layout.columns) if settings.vertical else 1


def options_of(settings):
    return {"participation": 1.0 if settings.vertical else COHORTS, "rounds": len(COHORTS)}


def played(settings, cohorts=None, order=None):
    """The literal loop on what the algorithm runs on, its clients in another order where one is given."""
    case = byhand.case(settings.vertical)
    clients = case.clients if order is None else [case.clients[i] for i in order]
    return play(built(settings), case.problem, clients, ZERO, cohorts or [range(len(clients))])


def module_of(name):
    return sys.modules[ALGORITHMS[name].__module__]


@pytest.fixture(scope="module")
def rounds():
    """One round of everyone by the literal loop, per algorithm."""
    cache = {}

    def of(name):
        if name not in cache:
            cache[name] = played(SETTINGS[name])[0]
        return cache[name]

    return of


# Settings


@each
def test_the_registry_knows_it_by_its_name(name):
    assert ALGORITHMS[name].name == name
    assert algorithm(name) is ALGORITHMS[name]
    assert issubclass(ALGORITHMS[name], Settings)
    assert getattr(fp, ALGORITHMS[name].__name__) is ALGORITHMS[name]


def test_unknown_algorithms_are_named_with_the_nearest():
    with pytest.raises(
        UnknownName, match=r"^algorithm must be one of .*fedepm.*, got 'fedepn'\. Did you mean 'fedepm'\?$"
    ):
        algorithm("fedepn")


@each
def test_settings_go_to_plain_data_and_back(name):
    for settings in (ALGORITHMS[name](), SETTINGS[name]):
        plain = settings.to_dict()
        assert list(plain) == [field.name for field in dataclasses.fields(settings)]
        assert type(settings).from_dict(json.loads(json.dumps(plain))) == settings
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.name_of_no_setting = 1


@each
def test_the_label_names_what_differs_from_the_defaults(name):
    cls = ALGORITHMS[name]
    assert cls().label == cls.__name__
    changed = {key: value for key, value in SMALL.get(name, {}).items() if getattr(cls(), key) != value}
    inside = re.fullmatch(rf"{cls.__name__}\((.*)\)", SETTINGS[name].label).group(1) if changed else ""
    assert sorted(inside.split(", ") if inside else []) == sorted(f"{key}={value}" for key, value in changed.items())


@each
def test_an_unknown_setting_comes_with_the_nearest_name(name):
    cls = ALGORITHMS[name]
    known = max((field.name for field in dataclasses.fields(cls)), key=len)
    for make in (cls.from_dict, lambda values: cls.preset(next(iter(cls.presets)), **values)):
        with pytest.raises(UnknownName) as caught:
            make({known + "s": 1})
        said = str(caught.value)
        assert said.startswith(f"setting of {name} must be one of ")
        assert said.endswith(f", got '{known}s'. Did you mean '{known}'?")
        assert all(field.name in said for field in dataclasses.fields(cls))
    with pytest.raises(UnknownName, match=rf"^{name} preset must be one of "):
        cls.preset("no such preset")


@with_presets
def test_it_builds(name, preset):
    cls = ALGORITHMS[name]
    settings = cls() if preset is None else cls.preset(preset)
    bundle = built(settings)
    assert isinstance(bundle, Algorithm)
    assert bundle.name == name
    assert bundle.combine in ("sum", "each")
    assert all(hasattr(PROBLEM, need) for need in bundle.needs)
    assert all(isinstance(notice, str) and notice.endswith(".") for notice in bundle.notices)


# Its page

DOCS = Path(__file__).resolve().parents[2] / "docs" / "algorithms"


@each
def test_the_docs_say_what_telemetry_and_stop_rules_need_from_the_clients(name):
    """`measure` sums f_i, ∇f_i(w) and d_i over all clients: they leave the client where a rule looks at them."""
    page = (DOCS / f"{module_of(name).__name__.rpartition('.')[2]}.md").read_text(encoding="utf-8")
    (row,) = re.findall(r"^\| telemetry / stop rules \|.*$", page, re.MULTILINE)
    for what in ("f_i", "∇f_i(w)", "d_i", "all m clients", "`gradient`", "`variance`", "`rising`"):
        assert what in row, what
    (kept,) = re.findall(r"^\| never leaves the client \|.*$", page, re.MULTILINE)
    assert "but for telemetry" in kept


@each
def test_the_module_s_page_is_the_paper_s_box(name):
    page = inspect.getdoc(module_of(name))
    lines = page.splitlines()
    assert re.match(r"^\S.+\.$", lines[0]), "a title"
    assert re.search(r"\b(19|20)\d\d\b", page), "the paper's year"
    assert re.search(r"Algorithms? \d", page), "which algorithm of it"
    for word in ("Server", "Client"):
        assert any(line.startswith(word) for line in lines), word
    assert any(line.startswith("paper → code:") for line in lines)
    assert any(line.startswith("Differs from the paper:") for line in lines)


@each
def test_the_symbol_table_points_at_names_in_the_code(name):
    module = module_of(name)
    page = inspect.getdoc(module)
    table = page[page.index("paper → code:") + len("paper → code:") : page.index("Differs from the paper")]
    targets = re.findall(r"→ ([A-Za-z_][\w.]*)", table)
    assert targets
    own = "\n".join(inspect.getsource(module).split('"""')[2::2])  # outside every docstring
    for target in targets:
        last = target.rstrip(".").split(".")[-1]
        assert re.search(rf"\b{last}\b", own), f"{target} is in the symbol table and not in the code"


@each
def test_every_setting_is_documented(name):
    cls, page = ALGORITHMS[name], inspect.getdoc(module_of(name))
    source = inspect.getsource(cls).splitlines()
    for field in dataclasses.fields(cls):
        (line,) = [text for text in source if re.match(rf"    {field.name}: ", text)]
        assert "  # " in line or re.search(rf"\b{field.name}\b", page), (
            f"{field.name} has no comment and is not on the page"
        )


@each
def test_there_is_no_print_clock_or_file_in_it(name):
    names = {n.id for n in ast.walk(ast.parse(inspect.getsource(module_of(name)))) if isinstance(n, ast.Name)}
    assert not names & {"print", "open", "logging", "time", "os", "Path"}


# Pure functions, and what crosses the wire


@each_and_random
def test_the_functions_are_pure(settings):
    """Traced twice, the same program with the same constants: nothing comes from a clock, a counter or a global."""
    case = byhand.case(settings.vertical)
    many_are, problem = len(case.clients), case.problem
    bundle, data, key = built(settings), byhand.batch(*parts()[3], client=3), key_of(3, 0, 3)

    def traced(f, *args):
        texts = []
        for _ in range(2):
            program = jax.make_jaxpr(f)(*args)
            texts.append((str(program), [np.asarray(c).tobytes() for c in program.consts if not is_key(c)]))
        assert texts[0] == texts[1]
        return jax.eval_shape(f, *args)

    is_key = lambda a: jnp.issubdtype(a.dtype, jax.dtypes.prng_key)
    many = lambda tree: jax.tree.map(lambda a: jax.ShapeDtypeStruct((many_are, *a.shape), a.dtype), tree)
    client, hello = traced(lambda w, b: bundle.join(w, b, key), ZERO, data)
    server = traced(bundle.init, ZERO, many(hello))
    msg = traced(bundle.broadcast, server)
    state, upload, _ = traced(lambda m, c, b: bundle.client_step(m, c, b, Oracle(problem), key), msg, client, data)
    cohort = Cohort(None, jnp.ones(many_are, bool))
    after, _ = traced(bundle.server_step, server, many(upload), cohort)
    traced(bundle.measure, server if bundle.observe else msg, client, data)
    shapes = lambda tree: [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree)]
    assert shapes(state) == shapes(client)
    assert shapes(after) == shapes(server)


@each
def test_the_wire_carries_named_tuples_of_arrays(name, rounds):
    bundle, module, moment = built(SETTINGS[name]), module_of(name), rounds(name)
    hello = jax.eval_shape(lambda b: bundle.join(ZERO, b, key_of(0, JOIN_ROUND, 0))[1], byhand.batch(*parts()[0]))
    for kind, message in (("Hello", hello), ("Broadcast", moment.msg), ("Upload", moment.uploads[0])):
        assert type(message).__name__ == kind
        assert isinstance(message, tuple)
        assert message._fields == getattr(inspect.getmodule(type(message)), kind)._fields
        assert type(message).__doc__, f"{kind} says what it is"
        assert all(hasattr(leaf, "dtype") and hasattr(leaf, "shape") for leaf in jax.tree.leaves(message))
    assert type(moment.before).__name__ == "ServerState"
    assert type(moment.clients_before[0]).__name__ == "ClientState"
    assert inspect.getmodule(type(moment.msg)).__name__.startswith("fedpact.algorithms.")
    assert module.__name__.startswith("fedpact.algorithms.")


@each
def test_every_note_is_declared(name, rounds):
    bundle, moment = built(SETTINGS[name]), rounds(name)
    notes = moment.notes[0]
    assert type(notes).__name__ == "Notes"
    assert set(bundle.notes) | set(notes._field_defaults) == set(notes._fields)
    assert set(bundle.notes.values()) <= {"sum", "min", "max", "mean"}
    assert "gradients" in bundle.notes
    assert all(leaf.dtype == np.float64 and leaf.shape == () for leaf in (getattr(notes, f) for f in bundle.notes))
    assert type(moment.info).__name__ == "Info"
    assert bundle.info == moment.info._fields
    assert not set(moment.info._fields) & set(notes._fields)


def size(message):
    return sum(int(np.prod(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(message))


@each
def test_bytes_are_participants_times_message_sizes(name, run_once, rounds):
    settings, bundle, moment = SETTINGS[name], built(SETTINGS[name]), rounds(name)
    hello = bundle.join(ZERO, byhand.batch(*parts()[0]), key_of(0, JOIN_ROUND, 0))[1]
    history = run_once(settings, ONE, **options_of(settings)).history
    took_part = np.cumsum([0, *map(len, cohorts_of(settings))])
    assert size(moment.uploads[0]) > 0
    each = parties_of(settings)
    assert history.column("participants").tolist() == [0, *(each * len(c) for c in cohorts_of(settings))]
    up, down = size(moment.uploads[0]), size(moment.msg)
    if bundle.wire is not None:  # by hand in test_vertical_ssca
        up, down = bundle.wire(ZERO, 12)
    everyone = len(byhand.case(settings.vertical).clients)
    np.testing.assert_array_equal(history.column("bytes_up"), everyone * size(hello) + took_part * up)
    np.testing.assert_array_equal(history.column("bytes_down"), took_part * down)
    each_note = float(moment.notes[0].gradients)
    np.testing.assert_allclose(history.column("gradients"), took_part * each_note, rtol=1e-12)


# Precision


def leaves_of_a_run(bundle, dtype, participation):
    """Types of everything that lives through a round, in the loop that runs it; nothing is computed."""
    case = byhand.case(ALGORITHMS[bundle.name].vertical)
    loop = Loop(bundle, case.problem, ONE, Never(), 1, False)
    order, data = ONE.load([case.federation], dtype)
    root, start, most = jax.random.key(0), case.problem.init(3, dtype), participation.capacity(len(case.clients))
    carry, hellos, _ = jax.eval_shape(loop.start, start, data, root)
    cohorts = draw(participation, 0, 0, 2, 2, order[0], ONE.capacities(data, most, False)).cohorts
    after, _ = jax.eval_shape(loop.block, carry, data, cohorts, np.int64(2), np.float64(0), root)
    first = jax.tree.map(lambda a: a[0], cohorts)
    sent = jax.eval_shape(lambda s, d: loop.client_stage(s.server, s.clients, d, first, 0, root), carry.state, data)
    msg = jax.eval_shape(bundle.broadcast, carry.state.server)
    return {
        "server": after.state.server,
        "clients": after.state.clients,
        "hello": hellos,
        "broadcast": msg,
        "upload": sent[1],
        "model": bundle.model(after.state.server),
    }


def floats_of(tree):
    """The precisions in a message or state; of SSCA's server the model and the slopes: its few scalars are doubles."""
    if hasattr(tree, "shared"):
        tree = (tree.w, tree.shared.a)
    return {leaf.dtype for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)}


@with_presets
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_run_stays_in_its_precision(name, preset, dtype):
    cls = ALGORITHMS[name]
    if preset in ("noiseless", "lipschitz") and dtype is np.float64:
        return  # in double precision the defaults and the paper's say it all
    if cls.sips and preset not in (None, *list(cls.presets)[:1]):
        return  # which differ in numbers alone
    settings = cls(**SMALL.get(name, {})) if preset is None else cls.preset(preset)
    participation = Everyone() if dtype is np.float64 else Fraction(0.4)  # a slot for everyone, or gathered
    for what, tree in leaves_of_a_run(built(settings), dtype, participation).items():
        floats = floats_of(tree)
        assert floats <= {np.dtype(dtype)}, f"{what} has {floats}"


@each
def test_numbers_of_numpy_are_numbers(name):
    """A setting swept with np.logspace is a NumPy double: it must not lift a run in single precision to double."""
    numbers = {k: np.float64(v) for k, v in SMALL.get(name, {}).items() if isinstance(v, float)}
    settings = ALGORITHMS[name](**numbers)
    for what, tree in leaves_of_a_run(built(settings), np.float32, Everyone()).items():
        floats = floats_of(tree)
        assert floats <= {np.dtype(np.float32)}, f"{what} has {floats}"


# Runs


def check(bundle, run, moments, clients):
    """A run's model and telemetry against the literal loop's models, measured by hand. SSCA's F_0 is over all rows."""
    problem = byhand.case(True).problem.model if ALGORITHMS[bundle.name].vertical else PROBLEM
    weights = [len(y) if bundle.name == "ssca" else 1 for _, y in clients]
    assert relative(flat(run.model.w), flat(bundle.model(moments[-1].after))) <= 1e-12
    for t, moment in enumerate(moments):
        w = flat(bundle.model(moment.after))
        f = np.average([byhand.value(problem, w, x, y) for x, y in clients], weights=weights)
        g = np.average([byhand.gradient(problem, w, x, y) for x, y in clients], axis=0, weights=weights)
        right = [np.mean((np.column_stack([x, np.ones(len(x))]) @ w > 0) == (y > 0.5)) * len(y) for x, y in clients]
        row = {name: run.history.column(name)[t + 1] for name in run.history.columns}
        assert row["objective"] == pytest.approx(f, rel=1e-12)
        assert row["gradient"] == pytest.approx(g @ g, rel=1e-9)
        assert row["accuracy"] == pytest.approx(sum(right) / sum(len(y) for _, y in clients), rel=1e-12)
        assert row["participants"] == len(moment.chosen) * parties_of(ALGORITHMS[bundle.name])
        for name, value in moment.info._asdict().items():
            assert row[name] == pytest.approx(float(value), rel=1e-11)


@each_and_random
def test_the_local_engine_runs_the_literal_loop(settings, run_once):
    """Clients of unequal sizes, laid out by size and padded; nobody in one of the rounds."""
    run, clients = run_once(settings, ONE, **options_of(settings)), byhand.case(settings.vertical).clients
    check(built(settings), run, played(settings, cohorts_of(settings)), clients)


@pytest.mark.parametrize(
    "name",
    [
        quick(name, "scaffold")
        for name in ("scaffold", "fedepm", "fedsgd", "fedavg-epochs", "fedadmm-batch", "ssca-batch", "local_sgd-batch")
    ],
)
def test_the_host_engine_runs_the_literal_loop(name):
    """Two clients at a time, states made when first needed, uploads added up where a sum will do."""
    settings = (SETTINGS | RANDOM)[name]
    bundle = built(settings)
    run = fp.run(settings, PROBLEM, byhand.federation(parts()), engine=HostEngine(at_once=2), **options_of(settings))
    check(bundle, run, play(bundle, PROBLEM, parts(), ZERO, COHORTS), parts())


@pytest.mark.parametrize(
    "name", [quick(name, "fedepm", "fedavg-batch", "fedadmm-batch") for name in (*SETTINGS, *RANDOM)]
)
def test_the_debug_engine_runs_the_literal_loop(name):
    settings = (SETTINGS | RANDOM)[name]
    case, cohorts = byhand.Case(PROBLEM, parts(sizes=(12, 12, 12)), 3), ((0, 2), (1,), ())
    if settings.vertical:
        case, cohorts = byhand.case(True), ((0,), (0,), (0,))
    drawn = 1.0 if settings.vertical else cohorts
    run = fp.run(settings, case.problem, case.federation, engine=DebugEngine(), participation=drawn, rounds=3)
    bundle = built(settings, case.problem, case.given)
    check(bundle, run, play(bundle, case.problem, case.clients, ZERO, cohorts), case.clients)


@each_and_random
def test_the_seed_decides_a_run(settings, run_once):
    case, options = byhand.case(settings.vertical), options_of(settings)
    again = fp.run(settings, case.problem, case.federation, engine=ONE, **options)
    np.testing.assert_array_equal(flat(again.model.w), flat(run_once(settings, ONE, **options).model.w))
    if settings in RANDOM.values():
        other = fp.run(settings, case.problem, case.federation, engine=ONE, seed=1, **options)
        assert np.all(flat(other.model.w) != flat(again.model.w))


@each
def test_the_order_of_the_clients_does_not_matter(name):
    """With everyone and no randomness the server's model is the same beyond rounding."""
    settings, bundle = SETTINGS[name], built(SETTINGS[name])
    order = [0] if settings.vertical else [3, 6, 0, 5, 1, 4, 2]  # of the parties: in test_vertical_ssca
    a = played(settings, [range(len(order))] * 2)[-1]
    b = played(settings, [range(len(order))] * 2, order)[-1]
    assert relative(flat(bundle.model(b.after)), flat(bundle.model(a.after))) <= 1e-13
    for place, i in enumerate(order):
        for one, other in zip(jax.tree.leaves(a.uploads[i]), jax.tree.leaves(b.uploads[place]), strict=True):
            assert relative(other, one) <= 1e-12


@each
def test_it_makes_progress(name, run_once):
    objective = run_once(SETTINGS[name], ONE, **options_of(SETTINGS[name])).history.column("objective")
    assert np.all(np.isfinite(objective))
    assert objective[-1] < objective[0]
    if not SETTINGS[name].vertical:
        assert objective[4] == pytest.approx(objective[3], rel=1e-12)  # nobody took part
