"""The host's side of the round loop: cohorts in, rows out, between compiled blocks of rounds.

Blocks are sized to about a third of a second, so that progress shows, Ctrl-C is answered and the clock is looked at.
A block's length is an argument of one compiled program, so where a run is cut does not change its bits.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedpact.core.contract import Cohort, wire_bytes
from fedpact.core.errors import ClientError, DataError, FedpactError
from fedpact.core.history import TELEMETRY, History
from fedpact.core.keys import client_key
from fedpact.core.loop import GOING, NONFINITE, STOPPED, Carry, Drawn, Loop, draw
from fedpact.core.participation import Schedule
from fedpact.core.stop import Never, Outcome

BLOCK = 64
BLOCK_SECONDS = 0.3


class Resumed(NamedTuple):
    """Where a run goes on from: the arrays of the carry, its history and the seconds already spent."""

    restore: Callable[[Any], Any]
    history: History
    elapsed: float


class Finished(NamedTuple):
    """One trial's end: history, the server's model, the outcome, and which rule or which number it was, and when."""

    history: History
    model: Any
    outcome: Outcome
    where: str


class _Interrupt:
    """Ctrl-C once: finish the block and stop. Twice: stop at once."""

    asked = False

    def __call__(self, *_: Any) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


@contextmanager
def _interruptible() -> Iterator[_Interrupt]:
    handler = _Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield handler
        return
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield handler
    finally:
        signal.signal(signal.SIGINT, before)


class _Wire(NamedTuple):
    """Bytes: all hellos together, and one broadcast and one upload; and how many parties one client stands for."""

    hello: int
    down: int
    up: int
    parties: int = 1


def drive(
    loop: Loop,
    federations: Sequence[Any],
    w0: Any,
    participation: Any,
    seeds: Sequence[int],
    rounds: int,
    dtype: Any,
    *,
    resumed: Resumed | None = None,
    after_block: Callable[[Carry, History, float], None] | None = None,
    accounts: Sequence[Any] = (),
    roots: Sequence[Any] = (),
) -> list[Finished]:
    """Run to the end: one trial per seed, all trials in one program. `after_block` sees every block's end.

    `accounts` (privacy.account.Account, one per seed) are asked before every block how many of its rounds may release.
    `roots` are the random keys, where they are not those of the seeds.
    """
    trials = len(seeds) > 1
    if trials and len(federations) == 1:
        federations = list(federations) * len(seeds)
    native = getattr(loop.problem, "native", False)
    order, data = loop.engine.load(federations, dtype, **({"native": loop.problem} if native else {}))
    start, block = loop.compiled(trials)
    roots = list(roots) or [jax.random.key(seed) for seed in seeds]
    root = jnp.stack(roots) if trials else roots[0]
    with jax.disable_jit(loop.engine.eager):
        carry, hellos, row = start(w0, data, root)
    told = jax.device_get(hellos)
    for trial, numbers in enumerate(order):
        _admit(loop, jax.tree.map(lambda a, t=trial: a[t], told) if trials else told, numbers)
    carry = jax.device_get(carry) if resumed else carry
    wire = _wire(loop, carry, hellos, data, root, trials)
    del hellos, told  # which may be as large as everyone's models together
    layout = getattr(federations[0], "layout", None)  # of data split by features: a round is simulated as a whole
    wire = wire if layout is None else wire._replace(parties=len(layout.columns))
    # A given schedule may be as uneven as it likes; the slots' room is worked out for random draws only.
    given = isinstance(participation, Schedule)
    capacities = None if given else loop.engine.capacities(data, participation.capacity(order.shape[1]), trials)

    first = {name: np.atleast_1d(np.asarray(value)) for name, value in row.items()}
    if accounts:
        first["privacy"] = np.zeros(len(seeds))
    histories = [_history(loop, first, i, wire) for i in range(len(seeds))]
    elapsed, done = 0.0, 0
    if resumed:
        carry, histories, elapsed = resumed.restore(carry), [resumed.history], resumed.elapsed
        done = resumed.history.rounds
    pace = 0.0  # seconds a round, from the last block; 0 before the first
    most = 1 if getattr(loop.engine, "every_round", False) else BLOCK  # a checkpoint follows a block
    spent_out = False
    single = bool(accounts) and not isinstance(loop.stop, Never)  # a rule must not leave rounds paid and not run
    ready: dict[Any, Callable[..., Any]] = {}
    with _interruptible() as interrupt:
        while done < rounds and not interrupt.asked and np.any(np.asarray(carry.halt) == GOING):
            steps = min(
                rounds - done, max(1, min(most, int(BLOCK_SECONDS / pace))) if pace else loop.engine.first_block
            )
            asked = min(steps, 1) if single else steps
            halts = np.atleast_1d(np.asarray(carry.halt))
            paying = [account for i, account in enumerate(accounts) if halts[i] == GOING]
            steps = min((account.fit(done, asked) for account in paying), default=asked)
            spent_out = steps < asked
            if steps == 0:
                break
            for account in paying:
                account.spend(done, steps)
            drawn = _draw(participation, seeds, done, steps, order, capacities)
            cohorts = _stacked([d.cohorts for d in drawn]) if trials else drawn[0].cohorts
            args = (carry, data, cohorts, np.int64(steps), np.float64(elapsed), root)
            step = _compiled(loop, block, args, ready)
            clocked = len(loop.clock["local"])
            begun = time.perf_counter()
            with jax.disable_jit(loop.engine.eager):
                carry, rows = step(*args)
            jax.block_until_ready(carry)
            spent = time.perf_counter() - begun
            pace = max(spent / steps, 1e-9)
            ends = np.atleast_1d(np.asarray(carry.round))
            for i, history in enumerate(histories):
                count = int(ends[i]) - history.rounds
                mine = {name: np.asarray(value[i] if trials else value)[:count] for name, value in rows.items()}
                clock = _clock(loop, count, elapsed, spent / steps, clocked, history)
                if accounts:
                    mine["privacy"] = accounts[i].epsilon(range(history.rounds + 1, history.rounds + count + 1))
                history.extend(_rows(history, mine, drawn[i].participants[:count], wire, clock))
            elapsed = max(history.last("seconds") for history in histories)
            done += steps
            if after_block is not None:
                after_block(carry, histories[0], elapsed)
    if any(history.rounds % loop.evaluate_every for history in histories):
        _measure_last(loop, carry, data, histories, trials)
    why = Outcome.BUDGET if spent_out else Outcome.INTERRUPTED if interrupt.asked else Outcome.ROUNDS
    return [_finish(loop, carry, data, histories, order, i, trials, why) for i in range(len(seeds))]


def _admit(loop: Loop, hellos: Any, clients: np.ndarray) -> None:
    """Refuse, before round 1, a client whose first message the algorithm cannot work with, or that is not finite."""
    if loop.algorithm.admit is not None:
        loop.algorithm.admit(hellos, clients)
    for path, leaf in jax.tree_util.tree_leaves_with_path(hellos):
        bad = np.flatnonzero(~np.isfinite(leaf).reshape(len(leaf), -1).all(axis=1))
        if bad.size:
            name = jax.tree_util.keystr(path[:1]).lstrip(".")
            raise DataError(
                f"first message of client {clients[bad].min()} must be finite, got {name} that is not. Its rows are "
                "too large, or its gradient at the start is not finite: scale them, or take the client out."
            )


def _measure_last(loop: Loop, carry: Carry, data: Any, histories: Sequence[History], trials: bool) -> None:
    """Telemetry of the last round, where `evaluate_every` would leave it out.

    It is in the run's history, not in the folder's history.csv: a run that is extended has the rows of a longer one.
    """
    measure = jax.vmap(loop.measure_stage) if trials else loop.measure_stage
    more = () if loop.engine.compiled else (histories[0].rounds,)  # for sentences alone
    with jax.disable_jit(loop.engine.eager):
        row = jax.device_get((jax.jit(measure) if loop.engine.compiled else measure)(carry.state, data, *more))
    for i, history in enumerate(histories):
        if history.rounds % loop.evaluate_every:
            history.fill({name: float(value[i] if trials else value) for name, value in row.items()})


def _draw(
    participation: Any, seeds: Sequence[int], first: int, steps: int, order: np.ndarray, capacities: Any
) -> list[Drawn]:
    """Every trial's cohorts. If one trial's block does not fit its slots, all take everyone's."""
    drawn = [draw(participation, s, first, steps, BLOCK, o, capacities) for s, o in zip(seeds, order, strict=True)]
    if capacities is not None and any(d.cohorts.slots is None for d in drawn):
        return _draw(participation, seeds, first, steps, order, None)
    return drawn


def _compiled(
    loop: Loop, block: Any, args: tuple[Any, ...], ready: dict[Any, Callable[..., Any]]
) -> Callable[..., Any]:
    """The block's program, compiled ahead of the clock; one for rounds with slots and one for everyone's."""
    if loop.timing or not loop.engine.compiled:
        return block
    kind = args[2].slots is None
    if kind not in ready:
        ready[kind] = block.lower(*args).compile()
    return ready[kind]


def _stacked(cohorts: list[Cohort]) -> Cohort:
    return jax.tree.map(lambda *parts: np.stack(parts), *cohorts)


def _wire(loop: Loop, carry: Carry, hellos: Any, data: Any, root: Any, trials: bool) -> _Wire:
    one = (
        jax.tree.map(lambda a: a[0], (carry.state, hellos, data, root)) if trials else (carry.state, hellos, data, root)
    )
    state, hellos, data, root = one
    if loop.algorithm.wire is not None:
        rows = int(np.sum(jax.device_get(loop.engine.one_client(data).weight) > 0))
        up, down = loop.algorithm.wire(loop.algorithm.model(state.server), rows)
        return _Wire(wire_bytes(hellos), down, up)
    down = loop.algorithm.broadcast(state.server)
    batch, client = loop.engine.one_client(data), loop.engine.one_state(state.clients)

    native = getattr(loop.problem, "native", False)  # what is not JAX's cannot be traced: it is done, without training
    grad = _Still() if native else loop.grad

    def upload(client: Any, batch: Any) -> Any:
        return loop.algorithm.client_step(down, client, batch, grad, client_key(root, 0, batch.client))[1]

    with _named(loop, f"round 0, client {batch.client}, client_step"):
        sent = upload(client, batch) if native else jax.eval_shape(upload, client, batch)
        return _Wire(wire_bytes(hellos), wire_bytes(down), wire_bytes(sent))


class _Still:
    """An oracle for the types of messages alone: flat everywhere, and training stays where it is."""

    def __call__(self, w: Any, batch: Any) -> Any:
        return 0.0 * w

    def value_and_gradient(self, w: Any, batch: Any) -> tuple[Any, Any]:
        return np.zeros(()), 0.0 * w

    def train(self, w: Any, *_: Any, **__: Any) -> Any:
        return _Stayed(w)


class _Stayed(NamedTuple):
    """What training returns (`problems.training.Trained`)."""

    w: Any
    steps: int = 0
    loss: float = 0.0


@contextmanager
def _named(loop: Loop, place: str) -> Iterator[None]:
    """What fails here is raised with its place, as the engine that compiles nothing does in its rounds."""
    try:
        yield
    except Exception as error:
        if loop.engine.compiled or isinstance(error, FedpactError):
            raise
        raise ClientError(f"{place}: {type(error).__name__}: {error}") from error


def _history(loop: Loop, first: dict[str, np.ndarray], trial: int, wire: _Wire) -> History:
    own = [name for name in first if name not in ("gradients",)]
    head = [name for name in TELEMETRY if name in own]
    tail = [name for name in own if name not in head]
    clock = ["seconds", "local_seconds"] if loop.timing else ["seconds"]
    history = History(["round", *head, "participants", "bytes_up", "bytes_down", "gradients", *clock, *tail])
    row = {name: values[trial : trial + 1] for name, values in first.items()}
    zero = {name: np.zeros(1) for name in ("round", "participants", "bytes_down", "gradients", *clock)}
    history.extend(row | zero | {"bytes_up": np.array([wire.hello])})
    return history


def _clock(
    loop: Loop, count: int, elapsed: float, pace: float, clocked: int, history: History
) -> dict[str, np.ndarray]:
    """Seconds of the block's rounds; `clocked` is how many rounds the loop's clock had timed before it."""
    if not loop.timing:
        return {"seconds": elapsed + pace * np.arange(1, count + 1)}
    local, server = (np.array(loop.clock[name][clocked : clocked + count]) for name in ("local", "server"))
    return {"seconds": history.last("seconds") + np.cumsum(local + server), "local_seconds": local}


def _rows(
    history: History, mine: dict[str, np.ndarray], participants: np.ndarray, wire: _Wire, clock: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    count = len(participants)
    absent = sum((mine[name] for name in ("missing", "refused_uploads") if name in mine), np.zeros(count))
    participants = participants - absent + mine.get("late", np.zeros(count))
    total = np.cumsum(participants)
    gradients = mine.get("gradients", np.full(count, np.nan))
    return mine | {
        "round": history.rounds + np.arange(1, count + 1),
        "participants": participants * wire.parties,
        "bytes_up": history.last("bytes_up") + total * wire.up,
        "bytes_down": history.last("bytes_down") + total * wire.down,
        "gradients": np.cumsum([history.last("gradients"), *gradients])[1:],  # the same sum wherever blocks are cut
        **clock,
    }


def _finish(
    loop: Loop,
    carry: Carry,
    data: Any,
    histories: list[History],
    order: np.ndarray,
    trial: int,
    trials: bool,
    why: Outcome,
) -> Finished:
    one = jax.tree.map(lambda a: a[trial], carry) if trials else carry
    halt, culprit, client = int(one.halt), int(one.culprit), order[trial]
    history, where = histories[trial], ""
    parties = loop.algorithm.wire is not None  # one client stands for all of them: it is nobody to name
    if halt == NONFINITE and culprit >= 0:
        own = jax.tree.map(lambda a: a[trial], data) if trials else data
        loss = loop.loss_before(one.state.server, own, culprit)  # of a round that is not kept the server is the old one
        what = "the exchange: a value or a gradient" if parties else f"client {int(client[culprit])}: its upload"
        outcome, where = Outcome.NONFINITE, f"round {history.rounds}, {what} is not finite{loss}"
    elif halt == NONFINITE or not (
        loop.guard or loop.telemetry == "none" or np.isfinite(history.end(history.judged))  # not seen before
    ):
        what = "its model or the objective" if halt == NONFINITE else "the objective"
        most = f" (training loss {float(one.loss):g})" if culprit < -1 else ""
        if culprit < -1 and not parties:
            most = f" (largest training loss {float(one.loss):g}, client {int(client[-2 - culprit])})"
        outcome, where = Outcome.NONFINITE, f"round {history.rounds}, the server: {what} is not finite{most}"
    elif halt == STOPPED:
        outcome = Outcome.STOPPED
        where = f"round {history.rounds}, {' and '.join(loop.stop.met(jax.device_get(one.recent)))}"
    else:
        outcome, where = why, f"after round {history.rounds}" if why is Outcome.BUDGET else ""
    return Finished(history, loop.algorithm.model(jax.device_get(one.state.server)), outcome, where)
