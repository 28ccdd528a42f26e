"""A federation and an algorithm so simple that a run can be followed in the head."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from fedpact.core.contract import Algorithm
from fedpact.core.driver import drive
from fedpact.core.loop import Loop
from fedpact.core.participation import Schedule
from fedpact.core.stop import Never
from fedpact.core.vector import Vector
from fedpact.engines import DebugEngine

NEVER = Never()
COHORTS = ((0, 3), (1, 2, 3), (), (3,), (0, 1, 2, 3))


class Clients:
    """Four clients of 5, 2, 4 and 2 rows: by size they stand in the order 1, 3, 2, 0."""

    sizes = np.array([5, 2, 4, 2])
    clients, features = 4, 2
    dataset = SimpleNamespace(test=())

    def client(self, i):
        d = self.sizes[i]
        return np.full((d, 2), float(i)), np.arange(float(d))


class ServerState(NamedTuple):
    w: Vector


class ClientState(NamedTuple):
    times: Any


class Hello(NamedTuple):
    number: Any


class Broadcast(NamedTuple):
    w: Vector


class Upload(NamedTuple):
    w: Vector


class Notes(NamedTuple):
    gradients: Any
    least: Any
    most: Any
    middle: Any


class Info(NamedTuple):
    present: Any


def toy(explodes=None) -> Algorithm:
    """Client i, at its n-th time, sends w + n(i+1); the server takes the mean. f_i = i + w₀, so f = 1.5 + w₀.

    `explodes` = (client, n) sends an infinity at that client's n-th time.
    """

    def join(w0, batch, key):
        return ClientState(jnp.zeros(())), Hello(batch.client.astype(jnp.float64))

    def init(w0, hellos):
        return ServerState(w0)

    def client_step(msg, client, batch, grad, key):
        times = client.times + 1
        number = batch.client.astype(jnp.float64)
        w = msg.w.map(lambda a: a + times * (number + 1))
        if explodes is not None:
            bad = (batch.client == explodes[0]) & (times == explodes[1])
            w = w.map(lambda a: jnp.where(bad, jnp.inf, a))
        return ClientState(times), Upload(w), Notes(jnp.asarray(2.0), number, number, number)

    def server_step(server, uploads, cohort):
        return ServerState(cohort.mean(uploads.w, server.w)), Info(cohort.count)

    def measure(msg, client, batch):
        objective = batch.client + msg.w.tree["w"][0]
        return {"objective": objective, "gradient": msg.w, "rows": batch.rows, "times": client.times}

    return Algorithm(
        name="toy",
        join=join,
        init=init,
        broadcast=lambda server: Broadcast(server.w),
        client_step=client_step,
        server_step=server_step,
        measure=measure,
        model=lambda server: server.w,
        info=Info._fields,
        notes={"gradients": "sum", "least": "min", "most": "max", "middle": "mean"},
    )


PROBLEM = SimpleNamespace(value_and_gradient=lambda w, batch: (batch.client + w.tree["w"][0], w))  # f_i = i + w₀


def followed(cohorts):
    """The toy's run in plain Python: per round w, how often each client took part, and who stood where."""
    w, times, last, rows = 0.0, [0] * 4, {}, []
    rows.append({"w": w, "times": 0.0, "least": np.nan, "most": np.nan, "middle": np.nan, "present": np.nan})
    for chosen in cohorts:
        for i in chosen:
            times[i] += 1
        w = w + sum(times[i] * (i + 1) for i in chosen) / len(chosen) if chosen else w
        last |= {i: i for i in chosen}
        rows.append(
            {
                "w": w,
                "times": sum(times) / 4,
                "least": min(last),
                "most": max(last),
                "middle": sum(chosen) / max(len(chosen), 1),
                "present": len(chosen),
            }
        )
    return rows


def run_toy(
    algorithm=None,
    engine=None,
    cohorts=COHORTS,
    rounds=None,
    stop=NEVER,
    evaluate_every=1,
    timing=False,
    guard=None,
    **options,
):
    """Drive the toy; returns the loop and how it finished."""
    loop = Loop(algorithm or toy(), PROBLEM, engine or DebugEngine(), stop, evaluate_every, timing, guard=guard)
    start = Vector({"w": jnp.zeros(2)})
    count = len(cohorts) if rounds is None else rounds
    (end,) = drive(loop, [Clients()], start, Schedule(cohorts), [0], count, np.float64, **options)
    return loop, end
