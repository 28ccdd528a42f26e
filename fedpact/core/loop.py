"""The round loop: the only one.

    measure row 0
    repeat   draw the cohort → broadcast → clients step (and release) → server steps → measure → stop?

`Loop` builds one round from an algorithm's pure functions and an engine's map over clients. The same body runs in a
compiled `while` over a block of rounds (the block's length is an argument, so a run cut anywhere gives the same bits),
in a plain Python `while` (engine `debug`), or stage by stage with a clock around each (`timing=True`).
Row t of the history is measured at the server's model after t rounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fedpact.core.contract import READS, Algorithm, Batch, Cohort, Oracle, Stepped
from fedpact.core.errors import InvalidArgument, NotFinite, unknown
from fedpact.core.keys import JOIN_ROUND, SERVER, Purpose, client_key
from fedpact.core.shards import Shards, is_kept, settled
from fedpact.core.stop import Rule

GOING, STOPPED, NONFINITE = 0, 1, 2
#: The largest loss of rows that a client holds out which goes into a sum: masked ones hold no more.
LARGEST = 1e24
#: Rows of a client that are looked at together where its loss is asked for.
ROWS = 500


class State(NamedTuple):
    """What the next round needs: the server's state, every client's, and each client's last notes (for reading)."""

    server: Any
    clients: Any
    notes: Any


class Carry(NamedTuple):
    """What a block of rounds hands on: the state, the rounds done, the recent rows, and why it halted if it did."""

    state: State
    round: Any
    recent: dict[str, Any]
    halt: Any
    culprit: Any  # position of the client whose upload was not finite; else −2 − that of the largest loss, −1 for none
    loss: Any  # that largest training loss in the round, where the algorithm notes it


def _finite(tree: Any) -> Any:
    seen = [leaf for leaf in jax.tree.leaves(tree, is_leaf=is_kept) if not is_kept(leaf)]  # uploads were looked at
    leaves = [leaf for leaf in seen if jnp.issubdtype(leaf.dtype, jnp.floating)]
    return jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in leaves]).all()


def _either(choice: Any, this: Any, that: Any) -> Any:
    if any(map(is_kept, jax.tree.leaves(this, is_leaf=is_kept))):
        return this if bool(choice) else that
    return jax.tree.map(lambda a, b: jnp.where(choice, a, b), this, that)


def _tested(sums: dict[str, Any]) -> dict[str, Any]:
    """Columns from the test's sums."""
    sums = {name: jnp.asarray(value, jnp.float64) for name, value in sums.items()}
    loss = sums["loss"] / sums["rows"]
    row = {"test_loss": jnp.where(sums.get("endless", 0) > 0, jnp.inf, loss)}
    return row | ({"test_accuracy": sums["correct"] / sums["rows"]} if "correct" in sums else {})


def _python_while(cond: Callable[[Any], Any], body: Callable[[Any], Any], value: Any) -> Any:
    while bool(cond(value)):
        value = body(value)
    return value


class Loop:
    """One algorithm on one problem, ready to run blocks of rounds through an engine."""

    def __init__(
        self,
        algorithm: Algorithm,
        problem: Any,
        engine: Any,
        stop: Rule,
        evaluate_every: int,
        timing: bool,
        telemetry: str = "all",
        guard: Any = None,
        scored: bool = False,
    ) -> None:
        self.algorithm, self.problem, self.engine, self.stop = algorithm, problem, engine, stop
        self.guard = guard  # privacy.guard.Guard, of a private run
        self.grad = getattr(guard, "oracle", None) or getattr(problem, "oracle", None) or Oracle(problem)
        self.evaluate_every, self.timing, self.telemetry = evaluate_every, timing, telemetry
        self.scored = scored  # whether clients, which are nodes, score rows of their own that they hold out
        self._names: list[str] = []
        self._told: tuple[str, ...] = getattr(engine, "told", ())
        self._judged = "objective" if telemetry == "all" else "test_loss"
        self.shards: Shards | None = None  # of a server on the host that needs every client's message
        self.clock: dict[str, list[float]] = {"local": [], "server": []}
        plain = timing or not engine.compiled
        self._on_host = not (engine.compiled or engine.eager)
        self._while = _python_while if plain else lax.while_loop
        self._steps = self._timed("local", self.client_stage) if timing else self.client_stage
        self._serve = self._timed("server", self.server_stage) if timing else self.server_stage
        self._measure = jax.jit(self.measure_stage) if timing and engine.compiled else self.measure_stage

    # What one client does

    def _join_one(self, shared: Any, batch: Batch) -> Any:
        w0, root = shared
        return self.algorithm.join(w0, batch, client_key(root, JOIN_ROUND, batch.client))

    def _step_one(self, shared: Any, batch: Batch, client: Any) -> Any:
        msg, t, root = shared
        key = client_key(root, t, batch.client)
        state, upload, notes = self.algorithm.client_step(msg, client, batch, self.grad, key)
        if self.guard is not None:
            state, upload = self.guard.released(msg, client, state, batch, upload, t, key(Purpose.NOISE))
        return state, upload, notes

    def _measure_one(self, shared: Any, batch: Batch, client: Any, aside: Batch | None = None) -> Any:
        seen, w = shared
        more = {} if self.guard is None else self.guard.measures(w, batch)
        if self.scored:  # at the server, which has no rows, for the shapes of an answer alone
            more |= self._score_one(w, batch if aside is None else aside)
        return self.algorithm.measure(seen, client, batch) | more

    def _score_one(self, w: Any, aside: Batch) -> dict[str, Any]:
        """The test's sums over rows that a client holds out, if any; a loss that is not finite is counted instead."""
        sums = self._test_one(w, aside)
        some, sound = aside.rows > 0, jnp.abs(sums["loss"]) <= LARGEST
        sums |= {
            "loss": jnp.where(some & sound, sums["loss"], 0),
            "endless": (some & ~sound).astype(aside.weight.dtype),
        }
        return {f"test_{name}": total for name, total in sums.items()}

    def _loss_one(self, w: Any, batch: Batch) -> Any:
        """The loss, summed over these rows."""
        value = getattr(self.problem, "test_value", None) or (lambda w, b: self.problem.value_and_gradient(w, b)[0])
        return value(w, batch) * batch.rows

    def _test_one(self, w: Any, batch: Batch) -> Any:
        if hasattr(self.problem, "tested"):  # all of it in one pass, where no compiler makes one of two
            return self.problem.tested(w, batch)
        return {"loss": self._loss_one(w, batch), **self.problem.counts(w, batch)}

    def loss_before(self, server: Any, data: Any, position: int) -> str:
        """What is told of a client that diverged in the round of this server: its loss at the model it was sent.

        It is computed then only; of a network a few rows at a time, as on the test set. In a private run, or where the
        rows are at nodes, it is not told.
        """
        if self.guard is not None or getattr(self.engine, "remote", False):
            return ""
        w, batch = self.algorithm.model(server), self.engine.one_client(data, position)
        count, parts = int(batch.rows), [batch]
        if hasattr(self.problem, "test_value"):
            some = np.array_split(np.arange(count), -(-count // ROWS))
            parts = [Batch(batch.x[i], batch.y[i], batch.weight[i], batch.client) for i in some]
        loss = sum(float(self._loss_one(w, part)) for part in parts) / count
        return f"; at the model it was sent its loss was {f'{loss:.4g}' if np.isfinite(loss) else 'not finite either'}"

    # One round, in its three stages

    def client_stage(self, server: Any, clients: Any, data: Any, cohort: Cohort, t: Any, root: Any) -> Stepped:
        """Broadcast, and every client of the cohort steps."""
        shared = (self.algorithm.broadcast(server), t, root)
        given = (data, clients, cohort, self.algorithm.combine, (t, "client_step"))
        try:
            return self.engine.step(self._step_one, shared, *given)
        except NotFinite as bad:
            told = str(bad).removesuffix(".") + self.loss_before(server, data, bad.position)
            raise NotFinite(f"{told}.", bad.position) from None

    def server_stage(self, server: Any, uploads: Any, cohort: Any, t: Any, root: Any) -> Any:
        """The server's step on the cohort's uploads."""
        if self.guard is not None and self.guard.central:
            key = client_key(root, t, SERVER)(Purpose.NOISE)
            uploads, cohort = self.guard.summed(self.algorithm.broadcast(server), uploads, cohort, key)
        if self.shards is not None:
            return self.shards.step(server, uploads, cohort)
        return self.algorithm.server_step(server, uploads, cohort)

    def measure_stage(self, state: State, data: Any, t: Any = 0) -> dict[str, Any]:
        """Telemetry at the server's model: over all clients, on the dataset's own test rows, or both."""
        if self.telemetry == "none":
            return {name: jnp.asarray(jnp.nan, jnp.float64) for name in ("objective", "gradient")}
        row = self._measure_all(state, data, t) if self.telemetry == "all" else {}
        tested = self.engine.test(self._test_one, self.algorithm.model(state.server), data)
        row |= {} if tested is None else _tested(tested)
        return {name: jnp.asarray(value, jnp.float64) for name, value in row.items()}

    def _measure_all(self, state: State, data: Any, t: Any) -> dict[str, Any]:
        """Means of f_i and of what the algorithm adds, over all clients."""
        seen = (self.algorithm.observe or self.algorithm.broadcast)(state.server)
        shared = (seen, self.algorithm.model(state.server))
        sums = self.engine.total(self._measure_one, shared, data, state.clients, where=(t, "measure"))
        clients = self.engine.clients_of(data).shape[0]
        row = {"objective": sums.pop("objective") / clients, "gradient": (sums.pop("gradient") / clients).norm2()}
        rows = sums.pop("rows")
        if self.scored:
            row |= _tested({name[5:]: sums.pop(name) for name in list(sums) if name.startswith("test_")})
        if "correct" in sums:
            row["accuracy"] = sums.pop("correct") / rows
        for name, total in sums.items():
            how = self.algorithm.reads.get(name, "sum" if name == "refused" else "mean")
            row[name] = (READS[how] if isinstance(how, str) else how)(total, clients)
        return row

    def _timed(self, name: str, stage: Callable[..., Any]) -> Callable[..., Any]:
        compiled = jax.jit(stage) if self.engine.compiled else stage
        warm: set[Any] = set()

        def run(*args: Any) -> Any:
            if self.engine.compiled:  # compilation is not the round's time
                shapes = jax.tree.structure(args), tuple(jnp.shape(a) for a in jax.tree.leaves(args))
                if shapes not in warm:
                    jax.block_until_ready(compiled(*args))
                    warm.add(shapes)
            begun = time.perf_counter()
            out = jax.block_until_ready(compiled(*args))
            self.clock[name].append(time.perf_counter() - begun)
            return out

        return run

    def _notes_row(self, notes: Any, last: Any, cohort: Cohort) -> dict[str, Any]:
        """Read the clients' notes as the algorithm declares: over this round's cohort, or over everyone's last."""
        row = {}
        for name, how in self.algorithm.notes.items():
            if how in ("sum", "mean"):
                total = cohort.sum(getattr(notes, name))
                row[name] = total if how == "sum" else total / jnp.maximum(cohort.count, 1)
            else:
                row[name] = (jnp.nanmin if how == "min" else jnp.nanmax)(getattr(last, name))
        return {name: jnp.asarray(value, jnp.float64) for name, value in row.items()}

    def check_stop(self, w0: Any, features: int, dtype: Any, tested: bool = False) -> None:
        """Refuse a stop rule on a column that no round has. Counts that only the host keeps cannot be watched."""
        x, y = jax.ShapeDtypeStruct((2, features), dtype), jax.ShapeDtypeStruct((2,), dtype)

        def measure(x: Any, y: Any) -> dict[str, Any]:
            batch = Batch(x, y, jnp.ones_like(y), jnp.asarray(0, jnp.int32))
            state, hello = self.algorithm.join(w0, batch, client_key(jax.random.key(0), JOIN_ROUND, 0))
            server = self.algorithm.init(w0, jax.tree.map(lambda a: a[None], hello))
            seen = (self.algorithm.observe or self.algorithm.broadcast)(server)
            return self.algorithm.measure(seen, state, batch)

        if self.telemetry == "all" and getattr(self.problem, "native", False):
            return  # what is not JAX's cannot be traced: a wrong name is found at the start
        sums = set(jax.eval_shape(measure, x, y)) if self.telemetry == "all" else set()
        known = (sums - {"rows", "correct"}) | ({"accuracy"} if "correct" in sums else set()) | {"round", "seconds"}
        known |= {"test_loss", "test_accuracy"} if tested or self.scored else set()
        known |= (set(self.algorithm.notes) | set(self.algorithm.info)) - {"gradients"}  # cumulative on the host
        for name in self.stop.reads:
            if name not in known:
                raise unknown("column of the stop rule", name, known)

    # Start, and blocks of rounds

    def start(self, w0: Any, data: Any, root: Any) -> tuple[Any, Any, dict[str, Any]]:
        """Everyone joins, the server starts, row 0 is measured. Returns the carry, the hellos and the row."""
        clients, hellos = self.engine.join(self._join_one, (w0, root), data, where=(0, "join"))
        if not jax.tree.leaves(self.engine.one_state(clients)):
            raise InvalidArgument(f"ClientState of {self.algorithm.name} must hold at least one array, got none.")
        ids = self.engine.clients_of(data)
        if self.algorithm.combine == "each" and self.algorithm.separable is not None and self._on_host:
            self.shards = Shards(self.algorithm, len(ids), getattr(self.engine, "room", np.empty))
        server = (self.shards or self.algorithm).init(w0, hellos)
        none = {name: jnp.full(ids.shape, jnp.nan, jnp.float64) for name in self.algorithm.notes}
        state = State(server, clients, none)
        row = self.measure_stage(state, data)
        self._names = list(row)
        row |= {name: jnp.asarray(jnp.nan) for name in (*self.algorithm.notes, *self.algorithm.info)}
        row |= {name: jnp.asarray(0.0) for name in self._told}
        known = row | {"round": 0.0, "seconds": 0.0}
        recent = {
            name: jnp.full(self.stop.window, jnp.nan, jnp.float64).at[-1].set(known[name]) for name in self.stop.reads
        }
        sound = self._judge(row)
        halt = jnp.where(sound, GOING, NONFINITE)  # rules end rounds: row 0 stops nothing
        carry = Carry(state, jnp.asarray(0), recent, halt, jnp.asarray(-1), jnp.asarray(jnp.nan))
        strong = lambda a: a if is_kept(a) else lax.convert_element_type(a, a.dtype)  # no weak types
        return jax.tree.map(strong, carry, is_leaf=is_kept), hellos, row

    def block(
        self, carry: Carry, data: Any, cohorts: Cohort, steps: Any, elapsed: Any, root: Any
    ) -> tuple[Carry, dict[str, Any]]:
        """Up to `steps` rounds; `cohorts` is stacked over the block. Returns the carry and the block's rows."""
        length = cohorts.mask.shape[0]
        first = carry.round
        blank = {name: jnp.full(length, jnp.nan, jnp.float64) for name in self._columns()}

        def going(loop: tuple[Carry, dict[str, Any]]) -> Any:
            return (loop[0].round - first < steps) & (loop[0].halt == GOING)

        def body(loop: tuple[Carry, dict[str, Any]]) -> tuple[Carry, dict[str, Any]]:
            carry, rows = loop
            new, row = self._round(carry, data, jax.tree.map(lambda a: a[carry.round - first], cohorts), elapsed, root)
            place = jnp.where(new.halt == NONFINITE, length, carry.round - first)
            return new, {name: rows[name].at[place].set(row[name], mode="drop") for name in rows}

        return self._while(going, body, (carry, blank))

    def _columns(self) -> list[str]:
        return [*self._names, *self.algorithm.notes, *self.algorithm.info, *self._told]

    def _round(self, carry: Carry, data: Any, cohort: Cohort, elapsed: Any, root: Any) -> tuple[Carry, dict[str, Any]]:
        old, t = carry.state, carry.round
        stepped = self._steps(old.server, old.clients, data, cohort, t, root)
        notes, cohort, sound = stepped.notes, stepped.cohort, stepped.sound
        server, info = self._serve(old.server, stepped.uploads, stepped.gathered, t, root)
        fine = jnp.all(sound) & _finite(server)
        # A round with a number that is not finite is not kept. Clients' rows are written in place, never copied.
        kept = cohort._replace(mask=cohort.mask & fine)
        last = kept.put(old.notes, {name: getattr(notes, name) for name in self.algorithm.notes})
        new = State(_either(fine, server, old.server), self.engine.keep(old.clients, stepped.rows, kept, t), last)

        last_view = notes._replace(**last) if self.algorithm.notes else notes
        row = self._notes_row(notes, last_view, cohort) | {name: stepped.told[name] for name in self._told}
        if info._fields != self.algorithm.info:
            declared = self.algorithm.info
            raise InvalidArgument(f"info of {self.algorithm.name} must be {info._fields}, its Info's, got {declared}.")
        row |= {name: jnp.asarray(value, jnp.float64) for name, value in info._asdict().items()}
        row |= self._measured(new, data, t + 1)

        if self.evaluate_every == 1:
            fine = fine & self._judge(row)
        measured = row | {"round": t + 1.0, "seconds": elapsed}
        recent = {name: jnp.roll(carry.recent[name], -1).at[-1].set(measured[name]) for name in self.stop.reads}
        met = self.stop.fired(recent)
        if self.evaluate_every > 1:
            keep = (t + 1) % self.evaluate_every == 0
            recent = jax.tree.map(lambda a, b: jnp.where(keep, a, b), recent, carry.recent)
            met = met & keep
            fine = fine & (self._judge(row) | ~keep)
        halt = jnp.where(fine, jnp.where(met, STOPPED, GOING), NONFINITE)
        new = new._replace(server=settled(_either(fine, new.server, old.server)))
        culprit, loss = self._culprit(notes, cohort, sound)
        place = culprit.astype(carry.culprit.dtype), loss.astype(carry.loss.dtype)
        return Carry(new, jnp.where(fine, t + 1, t), recent, halt, *place), row

    def _culprit(self, notes: Any, cohort: Cohort, sound: Any) -> tuple[Any, Any]:
        """Who to name where a number is not finite, as `Carry` has it, and the largest training loss.

        A private run names nobody for a loss: it was not released.
        """
        bad, first = ~jnp.all(sound), jnp.argmin(sound)
        if "train_loss" not in self.algorithm.notes:
            return jnp.where(bad, cohort.positions[first], -1), jnp.asarray(jnp.nan)
        losses = jnp.where(cohort.mask & ~jnp.isnan(notes.train_loss), notes.train_loss, -jnp.inf)
        most = jnp.argmax(losses)
        told = (losses[most] > -jnp.inf) & (self.guard is None)
        server = jnp.where(told, -2 - cohort.positions[most], -1)
        return jnp.where(bad, cohort.positions[first], server), notes.train_loss[most]

    def _judge(self, row: dict[str, Any]) -> Any:
        """Whether the telemetry lets a run go on. A private run is not ended by it: when it ends is seen."""
        blind = self.guard is not None or self.telemetry == "none"
        return jnp.asarray(True) if blind else jnp.isfinite(row[self._judged])

    def _measured(self, state: State, data: Any, t: Any) -> dict[str, Any]:
        if self.evaluate_every == 1:
            return self._measure(state, data, t)
        if self.timing or not self.engine.compiled:
            if int(t) % self.evaluate_every == 0:
                return self._measure(state, data, t)
            return {name: jnp.asarray(jnp.nan) for name in self._names}
        blank = lambda *_: jax.tree.map(
            lambda s: jnp.full(s.shape, jnp.nan), jax.eval_shape(self.measure_stage, state, data)
        )
        return lax.cond(t % self.evaluate_every == 0, self.measure_stage, blank, state, data, t)

    def compiled(self, trials: bool) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """`start` and `block`, compiled where the engine compiles, over a leading axis of trials if asked."""
        if not self.engine.compiled:
            return self.start, self.block
        if self.timing:
            return jax.jit(self.start), self.block
        if trials:
            return (
                jax.jit(jax.vmap(self.start, in_axes=(None, 0, 0))),
                jax.jit(jax.vmap(self.block, in_axes=(0, 0, 0, None, None, 0))),
            )
        return jax.jit(self.start), jax.jit(self.block)


class Drawn(NamedTuple):
    """A block's cohorts in the layout's terms, and who they are in the user's."""

    cohorts: Cohort
    participants: np.ndarray


def draw(
    participation: Any, seed: int, first: int, steps: int, length: int, order: np.ndarray, capacities: Any
) -> Drawn:
    """The cohorts of rounds first … first+steps−1 as slots and masks of fixed shape (`length` rounds)."""
    clients = len(order)
    position = np.empty(clients, dtype=np.int32)
    position[order] = np.arange(clients, dtype=np.int32)
    selected = [np.sort(position[participation.select(seed, first + i, clients)]) for i in range(steps)]
    participants = np.array([len(s) for s in selected])
    if capacities is not None:
        starts = np.array([lo for lo, _ in capacities.bounds])
        counts = [np.bincount(np.searchsorted(starts, s, side="right") - 1, minlength=len(starts)) for s in selected]
        if all(np.all(c <= capacities.sizes) for c in counts):
            return Drawn(_tight(selected, counts, length, capacities), participants)
    mask = np.zeros((length, clients), dtype=bool)
    for i, s in enumerate(selected):
        mask[i, s] = True
    return Drawn(Cohort(None, mask), participants)


def _tight(selected: list[np.ndarray], counts: list[np.ndarray], length: int, capacities: Any) -> Cohort:
    slots, mask = [], []
    begins = [np.concatenate([[0], np.cumsum(count)]) for count in counts]
    for b, ((lo, _), size) in enumerate(zip(capacities.bounds, capacities.sizes, strict=True)):
        slots.append(np.full((length, size), lo, dtype=np.int32))
        mask.append(np.zeros((length, size), dtype=bool))
        for i, chosen in enumerate(selected):
            mine = chosen[begins[i][b] : begins[i][b + 1]]
            slots[b][i, : len(mine)] = mine
            mask[b][i, : len(mine)] = True
    return Cohort(tuple(slots), np.concatenate(mask, axis=1))
