"""The Ray engine: clients spread over the workers of a cluster.

A worker is an actor that holds the rows of its clients and steps them. A round sends it the broadcast and those of its
clients who take part; back come their uploads, added up where the algorithm needs their sum only, and their notes.
States stay with the worker, each in a file by client and version in `folder`, whole before the uploads are returned:

    worker   step(broadcast, clients with their versions, t)  →  states of version t+1 in files;  uploads, notes
    driver   keep(t)                                          →  these clients now have version t+1

Which version is whose is a value of the run (`core.store`), so that a round that is not kept leaves no trace and a
checkpoint is as with the engine `host`. A worker that is lost is started again with its clients' rows, and is asked
again what it owed: the files and the keys give the same bits. On several machines `folder` must be one that all see.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse

from fedpact.core.contract import Batch, Cohort, Stepped
from fedpact.core.errors import ClientError, FedpactError, InvalidArgument, require, require_positive_int, the_extra
from fedpact.core.files import make_folder
from fedpact.core.settings import plain_fields
from fedpact.core.store import Store, sweep
from fedpact.engines.host import Answers, HostEngine, Rows, collected, padded_widths, plus, stepped

log = logging.getLogger("fedpact")
#: How often a worker is started again within one question before the run gives up.
AGAIN = 3
#: Seconds that a cluster's address has to answer.
ANSWER = 10.0
#: Seconds that a worker has to be there: a machine with a free CPU is found, and has its clients' rows.
PLACED = 300.0
#: What Ray calls the cluster that an address has led to.
_REACHED: dict[str, str] = {}


class Shard(Rows):
    """The rows of some clients, by their numbers, and some of the test rows; what a worker has of the data."""

    def __init__(self, parts: Mapping[int, tuple[Any, Any]], test: tuple[Any, Any], widths: list[int], dtype: Any):
        ends = np.cumsum([0, *(len(y) for _, y in parts.values())])
        tested = int(ends[-1])
        self.x = jnp.asarray(np.concatenate([*(x for x, _ in parts.values()), test[0]]))
        self.y = jnp.asarray(np.concatenate([*(y for _, y in parts.values()), test[1]]))
        places = zip(parts, ends[:-1], ends[1:], strict=True)
        self.index = {client: np.arange(lo, hi) for client, lo, hi in places}
        self.test = np.arange(tested, tested + len(test[1]))
        self.widths, self.dtype = widths, np.dtype(dtype)
        self.programs, self.compile, self.at_once, self.measured = {}, jax.jit, None, None


class Worker:
    """What an actor does; it never sees another worker's rows."""

    def __init__(
        self,
        number: int,
        threads: int | None,
        folder: str,
        data: tuple[Any, ...],
        at_once: int | None,
        home: str | None = None,  # the machine whose own folder it is; None: all see it
    ):
        self.home = home
        if threads is not None:  # before anything is computed: XLA makes its threads then
            cores = sorted(os.sched_getaffinity(0))
            mine = [cores[(number * threads + k) % len(cores)] for k in range(min(threads, len(cores)))]
            os.sched_setaffinity(0, mine)
        self.engine = HostEngine(at_once=at_once)
        self.shard = Shard(*data)
        self.shard.at_once = at_once
        self.folder = Path(folder)
        make_folder(self.folder)
        self.stages: dict[str, Callable[..., Any]] = {}
        self.make: Callable[[int], Any] = lambda client: None

    def ready(self) -> int:
        """That it is there, by its process."""
        self._check_home()
        return os.getpid()

    def _check_home(self) -> None:
        if self.home is None:
            return
        import ray

        here = ray.get_runtime_context().get_node_id()
        hint = "A worker on another machine would not find its clients' states there. Give one that all machines see."
        require(here == self.home, "folder", "given on a cluster of several machines", None, hint=hint)

    def learn(self, stage: str, blob: bytes) -> None:
        """The function of a stage, as the loop has it."""
        from ray import cloudpickle

        self.stages[stage] = cloudpickle.loads(blob)

    def join(self, shared: Any) -> list[tuple[int, Any]]:
        """Every client's hello, where there is one; states are made when they are needed."""
        f, shared = self.stages["join"], _arrived(shared)
        state_of = self.engine._program(self.shard, "join", lambda given, batch: f(given, batch)[0])
        hello_of = self.engine._program(self.shard, "hello", lambda given, batch: f(given, batch)[1])
        self.make = lambda client: self._alone(state_of, shared, client)
        first = next(iter(self.shard.index))
        empty = not jax.tree.leaves(jax.eval_shape(lambda: self._alone(hello_of, shared, first)))
        ids = [first] if empty else list(self.shard.index)
        return [(client, jax.tree.map(np.asarray, self._alone(hello_of, shared, client))) for client in ids]

    def _alone(self, program: Callable[..., Any], shared: Any, client: int) -> Any:
        index, weight = self.shard.padded([client])
        return program(shared, self.shard.x, self.shard.y, index[0], weight[0], np.int32(client))

    def _store(self, versions: Mapping[int, int]) -> Store:
        self._check_home()  # one that was lost may be started again elsewhere
        store = Store(self.make, self.folder)
        store.versions, store.held = dict(versions), dict.fromkeys(versions)
        if versions:
            store.structure = jax.tree.structure(self.make(next(iter(versions))))
        return store

    def step(self, shared: Any, ids: list[int], versions: Mapping[int, int], where: Any, combine: str) -> Answers:
        """What the cohort's clients that are here answer; their states stay."""
        store, f, shared = self._store(versions), self.stages["client_step"], _arrived(shared)
        found = collected(self.engine._each(f, shared, self.shard, store, ids, where), combine)
        store.put(found.states, int(where[0]) + 1)
        return found._replace(states={})

    def total(self, shared: Any, versions: Mapping[int, int], where: Any) -> Any:
        """The sum of the telemetry over all clients that are here."""
        store, f, everyone = self._store(versions), self.stages["measure"], list(self.shard.index)
        each = self.engine._each(f, _arrived(shared), self.shard, store, everyone, where)
        return reduce(plus, (out for _, out in each), None)

    def test(self, w: Any) -> Any:
        """The sums over the test rows that are here."""
        found = self.engine.test(self.stages["test"], w, self.shard)
        return None if found is None else jax.tree.map(np.asarray, found)


@dataclass(frozen=True)
class RayEngine:
    """Clients spread over `workers` actors of a Ray cluster, each on `threads` cores of its machine (None: all).

    `address` is the cluster's (None: the one this process is on, that of RAY_ADDRESS, or one that is started here and
    ends with the process).
    `folder` is where the clients' states are kept, one that all machines see (None: a temporary one of this machine).
    """

    workers: int = 2
    threads: int | None = 1
    at_once: int | None = 1
    address: str | None = None
    folder: str | None = None
    compiled, eager, first_block = False, False, 1
    #: What may change when a run is resumed: numbers by rounding at most.
    loose = ("workers", "threads", "address", "folder")
    _running: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        plain_fields(self)
        the_extra("ray")
        require_positive_int("workers", self.workers)
        for name in ("threads", "at_once"):
            if getattr(self, name) is not None:
                require_positive_int(name, getattr(self, name))
        for name in ("address", "folder"):
            value = getattr(self, name)
            require(value is None or (isinstance(value, str) and value), name, "a word, or left out", value)

    def __getstate__(self) -> dict[str, Any]:
        """Without what runs: a worker gets the settings only."""
        return {name: getattr(self, name) for name in ("workers", "threads", "at_once", "address", "folder")}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        for name, value in state.items():
            object.__setattr__(self, name, value)
        object.__setattr__(self, "_running", {})

    # The cluster

    def _cluster(self) -> Any:
        ray = the_extra("ray")
        if not ray.is_initialized():
            quiet = {"log_to_driver": False, "logging_level": logging.ERROR, "include_dashboard": False}
            there = self.address or os.environ.get("RAY_ADDRESS")
            if there:
                _connect(ray, there)
            else:
                with _loopback():
                    ray.init(num_cpus=max(self.workers, os.cpu_count() or 1), **quiet)
        elif self.address is not None:
            _check_reached(ray, self.address)
        return ray

    def _home(self) -> str | None:
        """The machine that the states are kept on, where `folder` is not one that all see."""
        return None if self.folder is not None else self._cluster().get_runtime_context().get_node_id()

    def _start(self, number: int) -> Any:
        """Start a worker, or start it again, and tell it what it must know; returns what comes once it is there."""
        ray, run = self._cluster(), self._running
        with contextlib.suppress(Exception):
            ray.kill(run["actors"][number])
        actor = ray.remote(num_cpus=1, max_restarts=0)(Worker)
        told = (number, self.threads, run["folder"], run["data"][number], self.at_once, run["home"])
        run["actors"][number] = actor.remote(*told)
        ready = run["actors"][number].ready.remote()
        for stage, blob in run["stages"].items():
            run["actors"][number].learn.remote(stage, blob)
        if run["joined"] is not None:
            run["actors"][number].join.remote(run["joined"])
        return ready

    def _check_room(self, count: int) -> None:
        """Refuse more workers than the cluster has CPUs for: Ray would wait for them without a word."""
        cpus = int(self._cluster().cluster_resources().get("CPU", 0))
        hint = (
            "Each takes one. Give fewer workers, or a larger cluster; one that was started in this process before ends "
            "with ray.shutdown()."
        )
        require(
            count <= cpus, "workers", f"at most {cpus}, the CPUs of the cluster that is up", self.workers, hint=hint
        )

    def _placed(self, starting: Mapping[int, Any], why: str) -> None:
        """Wait for these workers, or say that there is no room for them."""
        waiting = self._cluster().wait(list(starting.values()), num_returns=len(starting), timeout=PLACED)[1]
        if waiting:
            names = ", ".join(str(number) for number, one in starting.items() if one in waiting)
            raise ClientError(
                f"{why}: every worker must be placed within {PLACED:g} s, got no place for {names}. No machine of the "
                "cluster has a free CPU (`ray status` tells), or the rows take longer. Free one, add a machine or give "
                "fewer workers, and resume."
            )

    def _ask(self, method: str, questions: Mapping[int, tuple[Any, ...]], why: str) -> dict[int, Any]:
        """Every worker's answer. A worker that is lost is started again and asked again."""
        ray, run = self._cluster(), self._running
        send = lambda number: getattr(run["actors"][number], method).remote(*questions[number])
        asked = {number: send(number) for number in questions}
        answers = {}
        for number in questions:
            for attempt in range(AGAIN + 1):
                try:
                    answers[number] = ray.get(asked[number])
                    break
                except ray.exceptions.RayTaskError as error:
                    cause = error.cause
                    raise cause if isinstance(cause, FedpactError) else ClientError(f"{why}: {cause}") from None
                except ray.exceptions.RayError as error:
                    if attempt == AGAIN:
                        raise ClientError(f"{why}: worker {number} was lost {AGAIN + 1} times: {error}") from None
                    told = ", ".join(map(str, list(run["owned"][number])[:5]))
                    log.warning("%s: worker %d was lost; started again with clients %s, …", why, number, told)
                    self._placed({number: self._start(number)}, why)
                    asked[number] = send(number)
        return answers

    def _learn(self, stage: str, f: Callable[..., Any]) -> None:
        if stage in self._running["stages"]:
            return
        from ray import cloudpickle

        blob = self._cluster().put(cloudpickle.dumps(f))
        self._running["stages"][stage] = blob
        self._ask("learn", dict.fromkeys(self._running["actors"], (stage, blob)), f"learning {stage}")

    def close(self) -> None:
        """End the workers, and remove the states they kept."""
        if not self._running:
            return
        ray = the_extra("ray")
        for actor in self._running.get("actors", {}).values():
            with contextlib.suppress(Exception):
                ray.kill(actor)
        if "folder" in self._running:  # a checkpoint has its own copies
            shutil.rmtree(self._running["folder"], ignore_errors=True)
        self._running.clear()

    # The engine's side of a run

    def load(self, federations: Sequence[Any], dtype: Any) -> tuple[np.ndarray, Any]:
        """Deal the clients to the workers, largest first to the one with the fewest rows, and start them."""
        if len(federations) > 1:
            raise InvalidArgument("engine must be 'local' for vectorised trials, got 'ray'. Run them one by one.")
        (federation,), ray = federations, self._cluster()
        self.close()
        count = min(self.workers, federation.clients)
        self._check_room(count)
        owned: dict[int, list[int]] = {number: [] for number in range(count)}
        rows = [0] * count
        for client in np.argsort(-federation.sizes, kind="stable"):
            least = int(np.argmin(rows))
            owned[least].append(int(client))
            rows[least] += int(federation.sizes[client])
        if self.folder is not None:
            make_folder(Path(self.folder))
        folder = tempfile.mkdtemp(prefix="fedpact-ray-", dir=self.folder)
        data = {}
        for number, clients in owned.items():
            parts = {client: _dense(federation.client(client), dtype) for client in sorted(clients)}
            mine = federation.dataset.test[number::count]
            tested = _dense((federation.dataset.x[mine], federation.dataset.y[mine]), dtype)
            data[number] = ray.put((parts, tested, padded_widths(federation.sizes), dtype))
        more = {"actors": {}, "stages": {}, "joined": None, "owned": owned, "data": data, "folder": folder}
        self._running.update(more, home=self._home())
        self._placed({number: self._start(number) for number in owned}, "start")
        self._ask("ready", dict.fromkeys(owned, ()), "start")
        return np.arange(federation.clients)[None], Spread(federation, dtype)

    def clients_of(self, data: Spread) -> Any:
        """The client numbers by position."""
        return np.arange(data.clients)

    def one_client(self, data: Spread, position: int = 0) -> Batch:
        """The rows of one client."""
        return data.rows(position)

    def one_state(self, clients: Store) -> Any:
        """The first client's state, to learn a message's shape from."""
        return clients.get(0)

    def capacities(self, data: Any, largest: int, trials: bool) -> None:
        """Workers step who takes part and nobody else."""
        return

    def join(self, f: Callable[..., Any], shared: Any, data: Spread, where: tuple[Any, str]) -> tuple[Store, Any]:
        """Everyone's hello; states are made by the workers when they are needed."""
        self._learn("join", f)
        sent = _on_host(shared)
        found = self._ask("join", dict.fromkeys(self._running["actors"], (sent,)), "join")
        self._running["joined"] = sent
        store = Store(lambda client: f(shared, data.first)[0], Path(self._running["folder"]))
        hellos = dict(pair for pairs in found.values() for pair in pairs)
        if not jax.tree.leaves(next(iter(hellos.values()))):
            return store, next(iter(hellos.values()))
        ordered = [hellos[client] for client in range(data.clients)]
        return store, jax.tree.map(lambda *parts: jnp.asarray(np.stack(parts)), *ordered)

    def step(
        self,
        f: Callable[..., Any],
        shared: Any,
        data: Spread,
        clients: Store,
        cohort: Cohort,
        combine: str,
        where: tuple[Any, str],
    ) -> Stepped:
        """f(shared, batch, state) for the cohort, each client at its worker."""
        self._learn("client_step", f)
        ids = [int(i) for i in np.flatnonzero(np.asarray(cohort.mask))]
        if not ids:
            return HostEngine()._nobody(f, shared, _One(data.first), clients, combine)  # type: ignore[arg-type]
        t, shared = int(where[0]), self._cluster().put(_on_host(shared))
        questions = {}
        for number, owned in self._running["owned"].items():
            mine = sorted(set(ids) & set(owned))
            versions = {i: clients.versions[i] for i in mine if i in clients.versions}
            if mine:
                questions[number] = (shared, mine, versions, (t, where[1]), combine)
        found = reduce(_merged, self._ask("step", questions, f"round {t}").values())
        return stepped(ids, ids, found, combine)

    def keep(self, clients: Store, rows: Any, cohort: Cohort, t: Any) -> Store:
        """The versions with those of the cohort; a round that is not kept leaves them as they were."""
        if not bool(jnp.all(cohort.mask)):
            return clients
        new = Store(clients.make, clients.spill)
        new.versions = {**clients.versions, **dict.fromkeys(rows, int(t) + 1)}
        new.held = dict.fromkeys(new.versions)
        new.structure = clients.structure or jax.tree.structure(clients.make(0))
        if clients.spill is not None:
            sweep(clients.spill, [new.versions, clients.versions])
        return new

    def total(self, f: Callable[..., Any], shared: Any, data: Spread, clients: Store, where: tuple[Any, str]) -> Any:
        """The sum of f(shared, batch, state) over all clients."""
        self._learn("measure", f)
        shared, at = self._cluster().put(_on_host(shared)), (int(where[0]), where[1])
        questions = {
            number: (shared, {i: clients.versions[i] for i in owned if i in clients.versions}, at)
            for number, owned in self._running["owned"].items()
        }
        return _summed(self._ask("total", questions, f"round {at[0]}, measure").values())

    def test(self, f: Callable[..., Any], w: Any, data: Spread) -> Any:
        """The sums of f(w, batch) over the dataset's own test rows, or None where it has none."""
        if not data.tested:
            return None
        self._learn("test", f)
        w = self._cluster().put(_on_host(w))
        found = self._ask("test", dict.fromkeys(self._running["actors"], (w,)), "test").values()
        return _summed(part for part in found if part is not None)


def _connect(ray: Any, address: str) -> None:
    """To a cluster that is there; Ray would try for many minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        if host and port.isdigit():
            socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER).close()
        ray.init(address=address)
    except (OSError, ValueError, RuntimeError) as error:
        why = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        hint = "Start it (ray start --head), or leave address and RAY_ADDRESS out."
        raise InvalidArgument(
            f"address must be that of a Ray cluster which answers, got {address!r}: {why}. {hint}"
        ) from None
    _REACHED[address] = ray.get_runtime_context().gcs_address


def _check_reached(ray: Any, address: str) -> None:
    """Refuse an address of another cluster than the one this process is on: Ray has one at a time, and would stay."""
    address = (os.environ.get("RAY_ADDRESS") or address) if address == "auto" else address  # as Ray reads it
    up = ray.get_runtime_context().gcs_address
    if address == "auto" or _REACHED.get(address) == up:
        return
    (host, _, port), (there, _, its) = address.rpartition(":"), up.rpartition(":")
    same = port == its and not _machine(ray, host).isdisjoint(_machine(ray, there))
    hint = "Leave it out to run there, or leave that cluster first with ray.shutdown()."
    require(same, "address", f"that of the cluster which this process is on, {up!r}", address, hint=hint)
    _REACHED[address] = up


def _machine(ray: Any, host: str) -> set[str]:
    """The addresses that a host name stands for; of this machine also those it is called by here."""
    here = {"127.0.0.1", "::1", ray.util.get_node_ip_address()}
    try:
        found = {str(one[4][0]) for one in socket.getaddrinfo(host.strip("[]"), None)}
    except OSError:
        return {host}
    return found if found.isdisjoint(here) else found | here


@contextlib.contextmanager
def _loopback() -> Iterator[None]:
    """A cluster that is started within this listens on 127.0.0.1 alone: Ray asks nobody who connects for a password.

    Ray does so by itself on macOS and Windows. Its processes read the variable; this one has, when it was imported.
    """
    constants: Any = importlib.import_module("ray._private.ray_constants")
    variable, before = constants.ENABLE_RAY_CLUSTERS_ENV_VAR, constants.ENABLE_RAY_CLUSTER
    given = os.environ.get(variable)
    os.environ[variable], constants.ENABLE_RAY_CLUSTER = "0", False
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = before
        os.environ.pop(variable)
        if given is not None:
            os.environ[variable] = given


class Spread:
    """What the driver has of the data: the number of clients, the first one's rows, and whether there are test rows."""

    def __init__(self, federation: Any, dtype: Any) -> None:
        self.federation, self.dtype = federation, dtype
        self.clients, self.first, self.tested = federation.clients, self.rows(0), len(federation.dataset.test) > 0

    def rows(self, client: int) -> Batch:
        """A client's rows, which the driver dealt."""
        x, y = _dense(self.federation.client(client), self.dtype)
        return Batch(jnp.asarray(x), jnp.asarray(y), jnp.ones(len(y), self.dtype), jnp.asarray(client, jnp.int32))


class _One:
    """The first client's rows, as `HostEngine.one_client` takes them."""

    native = None

    def __init__(self, batch: Batch) -> None:
        self.programs: dict[Any, Any] = {}
        self.x, self.y = batch.x, batch.y
        self._weight = np.asarray(batch.weight)

    def padded(self, clients: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Its rows, without padding."""
        return np.arange(len(self._weight), dtype=np.int32)[None], self._weight[None]


def _dense(rows: tuple[Any, Any], dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    x, y = rows
    x = x.toarray() if scipy.sparse.issparse(x) else np.asarray(x)
    return (x if x.dtype == np.uint8 else x.astype(dtype)), np.asarray(y).astype(dtype)


class _Key:
    """A random key on its way to a worker."""

    def __init__(self, words: np.ndarray) -> None:
        self.words = words


def _on_host(tree: Any) -> Any:
    """As arrays of NumPy, keys as their words: what travels."""
    key = lambda a: isinstance(a, jax.Array) and jnp.issubdtype(a.dtype, jax.dtypes.prng_key)
    return jax.tree.map(lambda a: _Key(np.asarray(jax.random.key_data(a))) if key(a) else np.asarray(a), tree)


def _arrived(tree: Any) -> Any:
    """What travelled, with its keys."""
    key = lambda a: isinstance(a, _Key)
    return jax.tree.map(lambda a: jax.random.wrap_key_data(a.words) if key(a) else a, tree, is_leaf=key)


def _merged(one: Answers, other: Answers) -> Answers:
    """The answers of two workers; states are with neither."""
    notes, sound, uploads = one.notes | other.notes, one.sound | other.sound, one.uploads | other.uploads
    return Answers({}, notes, sound, uploads, plus(one.total, other.total))


def _summed(parts: Iterable[Any]) -> Any:
    return jax.tree.map(jnp.asarray, reduce(plus, parts, None))
