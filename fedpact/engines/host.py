"""The host engine: for models too large to keep every client's state on the device.

Rounds are driven from the host. Clients step one after the other, or some at once in one vectorised program
(`at_once`), or shared out over several devices; only they are on the device. States are made when a client first
takes part and stay on the host, or on disk (`spill`). The rows of the dataset are on the device once; a client is a
list of indices into them. Uploads are added up as they come in where the algorithm only needs their sum.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fedpact.core.contract import Batch, Cohort, Stepped, Streamed
from fedpact.core.environment import cache_folder
from fedpact.core.errors import ClientError, FedpactError, InvalidArgument, require, require_positive_int
from fedpact.core.files import make_folder, write_json
from fedpact.core.settings import plain_fields
from fedpact.core.store import Store, packed, sweep

#: Rows of the test set that are looked at together.
TEST_ROWS = 500
#: How many clients at once are tried where the user leaves the choice to a measurement.
CANDIDATES = (1, 8)
#: They are timed in turns, for a machine may be busy for a moment: until one takes so many times as long, or so often.
CLEAR, TURNS = 1.5, 4
#: Several at once are taken where they take at most this share of the time.
WORTH = 0.9


class Rows:
    """What `load` returns: the dataset on the device, the clients' indices, and the programs compiled so far."""

    native: Any = None  # the problem, where it is not JAX's

    def __init__(self, federation: Any, dtype: Any) -> None:
        dataset = federation.dataset
        x = dataset.x.toarray() if scipy.sparse.issparse(dataset.x) else dataset.x
        self.x = jnp.asarray(x if x.dtype == np.uint8 else x.astype(dtype))
        self.y = jnp.asarray(dataset.y.astype(dtype))
        self.index, self.test, self.dtype = federation.rows, dataset.test, np.dtype(dtype)
        self.widths = padded_widths(federation.sizes)
        self.programs: dict[Any, Any] = {}
        self.compile: Callable[..., Any] = jax.jit
        self.at_once: int | None = None
        self.measured: int | None = None

    def padded(self, clients: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Indices and weights of these clients, padded to one of a few widths."""
        longest = max(len(self.index[i]) for i in clients)
        width = next(w for w in self.widths if w >= longest)
        index, weight = np.zeros((len(clients), width), np.int32), np.zeros((len(clients), width), self.dtype)
        for row, i in enumerate(clients):
            index[row, : len(self.index[i])], weight[row, : len(self.index[i])] = self.index[i], 1
        return index, weight


def padded_widths(sizes: np.ndarray) -> list[int]:
    """The largest size, and two thirds of it again and again: few programs, little padding."""
    widths = [int(sizes.max())]
    while widths[-1] * 2 // 3 >= max(int(sizes.min()), 1):
        widths.append(widths[-1] * 2 // 3)
    return sorted(widths)


class Answers(NamedTuple):
    """What clients made of a round, by client: states, notes, whether all that is sent is finite; and what is sent.

    Where the algorithm only needs the sum of the uploads `total` is it, and `uploads` is empty.
    """

    states: dict[int, Any]
    notes: dict[int, Any]
    sound: dict[int, bool]
    uploads: dict[int, Any]
    total: Any


def collected(each: Iterable[tuple[int, Any]], combine: str) -> Answers:
    """The answers (client, (state, upload, note)) as they come in."""
    found = Answers({}, {}, {}, {}, None)
    for client, (state, upload, note) in each:
        found.states[client], found.notes[client] = packed(state), note
        found.sound[client] = all(bool(np.isfinite(leaf).all()) for leaf in jax.tree.leaves(upload))
        if combine == "sum":
            found = found._replace(total=plus(found.total, upload))
        else:
            found.uploads[client] = upload
    return found


def stepped(ids: Sequence[int], rows: Any, found: Answers, combine: str) -> Stepped:
    """The answers of these clients as the loop takes them; `rows` is what `keep` is given of them."""
    stack = lambda parts: jax.tree.map(lambda *a: jnp.asarray(np.stack(a)), *parts)
    exact = Cohort((jnp.asarray(ids, jnp.int32),), jnp.ones(len(ids), bool))
    gathered: Any = Streamed(jnp.asarray(len(ids))) if combine == "sum" else exact
    sent = jax.tree.map(jnp.asarray, found.total) if combine == "sum" else stack([found.uploads[i] for i in ids])
    sound = jnp.asarray([found.sound[i] for i in ids])
    return Stepped(rows, sent, stack([found.notes[i] for i in ids]), sound, exact, gathered)


def plus(total: Any, part: Any) -> Any:
    """Their sum, number by number on the host; None is no total yet."""
    return part if total is None else jax.tree.map(np.add, total, part)


@dataclass(frozen=True)
class HostEngine:
    """Client states on the host. `at_once`: clients stepped together; 1 is one after the other, None is the faster of 1
    and 8, measured.

    Clients of a PyTorch module step in threads, as many as there are cores where `at_once` is None.

    `devices`: how many devices share the clients of a round (None: all there are), each its own one after the other;
    `at_once` is then how many clients are handed out together. `spill`: True keeps the states on
    disk, in a temporary folder that goes with the engine; a path says where that folder is made.
    """

    at_once: int | None = None
    devices: int | None = 1
    spill: bool | str = False
    compiled, eager, first_block = False, False, 1
    _temporary: list[Any] = field(default_factory=list, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        plain_fields(self)
        for name in ("at_once", "devices"):
            if getattr(self, name) is not None:
                require_positive_int(name, getattr(self, name))
        ok = isinstance(self.spill, bool) or (isinstance(self.spill, str) and self.spill)
        require(ok, "spill", "true, false or a folder", self.spill)
        there = len(jax.devices())
        hint = "XLA_FLAGS=--xla_force_host_platform_device_count=8 makes eight of one processor."
        require((self.devices or 1) <= there, "devices", f"at most the {there} there are", self.devices, hint=hint)
        devices, hint = self.devices or there, "Each device has as many of them as the others."
        even = self.at_once is None or self.at_once % devices == 0
        require(even, "at_once", f"a multiple of the {devices} devices", self.at_once, hint=hint)

    def load(self, federations: Sequence[Any], dtype: Any, native: Any = None) -> tuple[np.ndarray, Rows]:
        """The dataset once, in the user's order of clients. `native`: the problem, where it is not JAX's."""
        if len(federations) > 1:
            raise InvalidArgument("engine must be 'local' for vectorised trials, got 'host'. Run them one by one.")
        rows = Rows(federations[0], dtype)
        rows.at_once = self.at_once
        if native is not None:
            hint = "PyTorch has one stream of draws, so such clients step one after the other."
            ok = self.at_once in (None, 1) or not native.draws
            require(ok, "at_once", "1 for a module that draws in training (Dropout)", self.at_once, hint=hint)
            hint = "A problem that is not JAX's steps clients in threads (at_once) of one device."
            require(len(self._devices()) == 1, "devices", "1 here", self.devices, hint=hint)
            rows.native, rows.compile = native, lambda run: run
            rows.at_once = 1 if native.draws else self.at_once or _cores()
        return np.arange(federations[0].clients)[None], rows

    def clients_of(self, data: Rows) -> Any:
        """The client numbers by position."""
        return np.arange(len(data.index))

    def one_client(self, data: Rows, position: int = 0) -> Batch:
        """The rows of one client."""
        index, weight = data.padded([position])
        return _gathered(data.x, data.y, index[0], jnp.asarray(weight[0]), jnp.asarray(position, jnp.int32))

    def one_state(self, clients: Store) -> Any:
        """The first client's state, to learn a message's shape from."""
        return clients.get(0)

    def capacities(self, data: Any, largest: int, trials: bool) -> None:
        """The host steps who takes part and nobody else."""
        return

    def _folder(self) -> Path | None:
        if self.spill is False:
            return None
        if not self._temporary:  # one of its own also below a given path: files of others are never touched
            where = self.spill if isinstance(self.spill, str) else None
            if where is not None:
                make_folder(Path(where))
            self._temporary.append(tempfile.TemporaryDirectory(prefix="fedpact-", dir=where))
        return Path(self._temporary[0].name)

    def join(self, f: Callable[..., Any], shared: Any, data: Rows, where: tuple[Any, str]) -> tuple[Store, Any]:
        """Nobody's state: it is made when it is needed. Everyone's hello, where the algorithm has one."""
        state_of = self._program(data, "join", lambda given, batch: f(given, batch)[0])
        hello_of = self._program(data, "hello", lambda given, batch: f(given, batch)[1])
        folder = self._folder()
        own = folder and Path(tempfile.mkdtemp(dir=folder))  # another run may have the same engine
        store = Store(lambda client: _one(state_of, shared, data, client), own)
        if not jax.tree.leaves(jax.eval_shape(lambda: hello_of(shared, data.x, data.y, *_batched(data, [0])))):
            return store, hello_of(shared, data.x, data.y, *_batched(data, [0]))
        hellos: Any = None
        for i in range(len(data.index)):
            one = _one(hello_of, shared, data, i)
            if hellos is None:
                hellos = jax.tree.map(lambda a: self.room((len(data.index), *a.shape), a.dtype), one)
            jax.tree.map(lambda into, a, i=i: into.__setitem__(i, a), hellos, one)
        return store, hellos

    def room(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """Room for something of every client: in memory, or with `spill` in a mapped file that goes with its array."""
        folder = self._folder()
        if folder is None:
            return np.empty(shape, dtype)
        with tempfile.TemporaryFile(dir=folder) as file:
            return np.memmap(file, dtype, "w+", shape=shape)

    def step(
        self,
        f: Callable[..., Any],
        shared: Any,
        data: Rows,
        clients: Store,
        cohort: Cohort,
        combine: str,
        where: tuple[Any, str],
    ) -> Stepped:
        """f(shared, batch, state) for the cohort, a few clients at a time."""
        ids = [int(i) for i in np.flatnonzero(np.asarray(cohort.mask))]
        if not ids:
            return self._nobody(f, shared, data, clients, combine)
        with contextlib.closing(self._each(f, shared, data, clients, ids, where)) as each:  # no thread outlives it
            found = collected(each, combine)
        return stepped(ids, found.states, found, combine)

    def _nobody(self, f: Callable[..., Any], shared: Any, data: Rows, clients: Store, combine: str) -> Stepped:
        """A round without anyone: the shapes of one client's answer, masked."""
        if "nobody" not in data.programs:
            given = (shared, self.one_client(data), clients.get(0))
            out = (
                f(*given) if data.native is not None else jax.eval_shape(f, *given)
            )  # what is not JAX's cannot be traced: it is done
            data.programs["nobody"] = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype), out)
        _, upload, note = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), data.programs["nobody"])
        one = Cohort((jnp.zeros(1, jnp.int32),), jnp.zeros(1, bool))
        stack = lambda tree: jax.tree.map(lambda a: a[None], tree)
        gathered: Any = Streamed(jnp.asarray(0)) if combine == "sum" else one
        return Stepped({}, upload if combine == "sum" else stack(upload), stack(note), jnp.ones(1, bool), one, gathered)

    def keep(self, clients: Store, rows: Any, cohort: Cohort, t: Any) -> Store:
        """The store with the cohort's new states; a round that is not kept leaves it as it was."""
        if not bool(jnp.all(cohort.mask)):
            return clients
        new = clients.put(rows, int(t) + 1)
        if new.spill is not None:
            sweep(new.spill, [new.versions, clients.versions])
        return new

    def total(self, f: Callable[..., Any], shared: Any, data: Rows, clients: Store, where: tuple[Any, str]) -> Any:
        """The sum of f(shared, batch, state) over all clients."""
        with contextlib.closing(self._each(f, shared, data, clients, range(len(data.index)), where)) as each:
            return jax.tree.map(jnp.asarray, reduce(plus, (out for _, out in each), None))

    def test(self, f: Callable[..., Any], w: Any, data: Rows) -> Any:
        """The sums of f(w, batch) over the dataset's own test rows, or None where it has none."""
        if not len(data.test):
            return None
        program = self._program(data, "test", f)
        total: Any = None
        for begin in range(0, len(data.test), TEST_ROWS):
            part = data.test[begin : begin + TEST_ROWS]
            index, weight = np.zeros(TEST_ROWS, np.int32), np.zeros(TEST_ROWS, data.dtype)
            index[: len(part)], weight[: len(part)] = part, 1
            out = program(w, data.x, data.y, index, weight, np.int32(0))
            total = out if total is None else jax.tree.map(jnp.add, total, out)
        return total

    # Programs

    def _program(self, data: Rows, kind: Any, f: Callable[..., Any]) -> Callable[..., Any]:
        """f for one client, given by its indices; compiled unless the problem is not JAX's."""
        if kind not in data.programs:

            def run(shared: Any, x: Any, y: Any, index: Any, weight: Any, client: Any, *state: Any) -> Any:
                return f(shared, _gathered(x, y, index, weight, client), *state)

            data.programs[kind] = data.compile(run)
        return data.programs[kind]

    def _together(self, data: Rows, f: Callable[..., Any], stage: str, count: int) -> Callable[..., Any]:
        """f for `count` clients in one program, on one device or shared out over several."""
        kind = (stage, count)
        if kind in data.programs:
            return data.programs[kind]

        def one(shared: Any, x: Any, y: Any, index: Any, weight: Any, client: Any, state: Any) -> Any:
            return f(shared, _gathered(x, y, index, weight, client), state)

        over = (None, None, None, 0, 0, 0, 0)
        devices = self._devices()
        if len(devices) == 1:
            data.programs[kind] = jax.jit(jax.vmap(one, in_axes=over))
            return data.programs[kind]
        mesh = Mesh(np.array(devices), ("clients",))
        own, everyone = PartitionSpec("clients"), PartitionSpec()

        def shard(shared: Any, x: Any, y: Any, *mine: Any) -> Any:  # each device: its clients one after the other
            return jax.lax.map(lambda c: one(shared, x, y, *c), mine)

        specs = (everyone, everyone, everyone, own, own, own, own)
        mapped = jax.jit(jax.shard_map(shard, mesh=mesh, in_specs=specs, out_specs=own, check_vma=False))
        sharding, whole = NamedSharding(mesh, own), NamedSharding(mesh, everyone)

        def placed(shared: Any, x: Any, y: Any, *mine: Any) -> Any:
            return mapped(*jax.device_put((shared, x, y), whole), *jax.device_put(mine, sharding))

        data.programs[kind] = placed
        return placed

    def _devices(self) -> list[Any]:
        return jax.devices()[: self.devices] if self.devices is not None else jax.devices()

    def _each(
        self, f: Callable[..., Any], shared: Any, data: Rows, clients: Store, ids: Sequence[int], where: Any
    ) -> Generator[tuple[int, Any], None, None]:
        """f for these clients, in order, as arrays of the host."""
        t, stage = where
        count = self._count(f, shared, data, clients, ids, stage)
        size = count if data.native is None else 1  # what is not JAX's is no program of several clients: threads of one
        groups = [list(ids[begin : begin + size]) for begin in range(0, len(ids), size)]
        work = lambda mine: self._run(f, shared, data, clients, mine, stage, size)
        beside = data.native is not None and min(count, len(groups)) > 1
        made = data.native.side_by_side(work, groups, count) if beside else map(work, groups)
        for mine in groups:
            try:
                outs = next(made)
            except FedpactError:
                raise
            except Exception as error:
                who = f"client {mine[0]}" if len(mine) == 1 else f"one of clients {mine[0]} to {mine[-1]}"
                raise ClientError(f"round {int(t)}, {who}, {stage}: {type(error).__name__}: {error}") from error
            yield from zip(mine, outs, strict=True)

    def _run(
        self, f: Callable[..., Any], shared: Any, data: Rows, clients: Store, mine: list[int], stage: str, count: int
    ) -> list[Any]:
        if count == 1:
            program = self._program(data, (stage, 1), f)
            return [jax.device_get(_one(program, shared, data, mine[0], clients.get(mine[0])))]
        filled = mine + [mine[0]] * (count - len(mine))  # a program of one size: the last clients are joined by copies
        states = jax.tree.map(lambda *a: np.stack(a), *(clients.get(i) for i in filled))
        out = jax.device_get(
            self._together(data, f, stage, count)(
                shared, data.x, data.y, *data.padded(filled), np.array(filled, np.int32), states
            )
        )
        return [jax.tree.map(lambda a, i=i: np.array(a[i]), out) for i in range(len(mine))]

    def _count(
        self, f: Callable[..., Any], shared: Any, data: Rows, clients: Store, ids: Sequence[int], stage: str
    ) -> int:
        """How many clients step together: as the user says, at least one for each device, or as measured."""
        if data.native is not None:
            return data.at_once or 1
        devices = len(self._devices())
        if devices > 1:
            return data.at_once or devices
        if stage != "client_step":
            return 1
        if data.at_once is not None:
            return data.at_once
        if len(ids) < max(CANDIDATES):
            return 1  # by this round's clients alone, so that a resumed run does the same
        if data.measured is None:
            data.measured = self._measured(f, shared, data, clients, ids)
        return data.measured

    def _measured(self, f: Callable[..., Any], shared: Any, data: Rows, clients: Store, ids: Sequence[int]) -> int:
        """The faster of the candidates, timed on this round's clients; remembered on this machine for such programs."""
        few = list(ids)[: max(CANDIDATES)]
        known = cache_folder() / "at_once.json"
        key = self._kind(f, shared, data, clients, few[0])
        table: dict[str, int] = {}
        with contextlib.suppress(OSError, ValueError):  # absent or torn: measure again
            table = json.loads(known.read_text())
        if table.get(key) in CANDIDATES:
            return table[key]
        one, several = CANDIDATES
        spent = dict.fromkeys(CANDIDATES, math.inf)
        for turn in range(TURNS):
            for count in CANDIDATES:
                begun = time.perf_counter()
                for begin in range(0, len(few), count):
                    self._run(f, shared, data, clients, few[begin : begin + count], "client_step", count)
                if turn:  # the first one compiles
                    spent[count] = min(spent[count], time.perf_counter() - begun)
            if turn and max(spent.values()) > CLEAR * min(spent.values()):
                break
        best = several if spent[several] < WORTH * spent[one] else one
        with contextlib.suppress(OSError):  # a cache that cannot be written is none
            known.parent.mkdir(parents=True, exist_ok=True)
            write_json(known, table | {key: best})
        return best

    def _kind(self, f: Callable[..., Any], shared: Any, data: Rows, clients: Store, client: int) -> str:
        """The machine, and the shapes of all that the program computes: model, batch and solver, no learning rate."""
        text = str(jax.make_jaxpr(f)(shared, self.one_client(data), clients.get(client)))
        shapes = hashlib.sha256(" ".join(re.findall(r"[a-z]+\d*\[[\d,]*\]", text)).encode()).hexdigest()[:16]
        return f"{jax.devices()[0].device_kind} x{os.cpu_count()} {shapes} rows {data.widths[-1]} {data.dtype}"


def _cores() -> int:
    """Those that this process may use; macOS and Windows do not tell."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _gathered(x: Any, y: Any, index: Any, weight: Any, client: Any) -> Batch:
    """A client's rows; padding is zeros, as everywhere."""
    rows = x[index]
    return Batch(jnp.where(weight[:, None] > 0, rows, jnp.zeros_like(rows)), y[index] * weight, weight, client)


def _batched(data: Rows, clients: list[int]) -> tuple[Any, ...]:
    index, weight = data.padded(clients)
    return index[0], weight[0], np.int32(clients[0])


def _one(program: Callable[..., Any], shared: Any, data: Rows, client: int, *state: Any) -> Any:
    return program(shared, data.x, data.y, *_batched(data, [client]), *state)
