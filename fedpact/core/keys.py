"""Randomness: every number comes from (seed, round, client, purpose), never from order or thread."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import jax
import numpy as np


class Purpose(enum.IntEnum):
    """What a random number is for; two purposes never share a stream."""

    LOCAL = 1
    NOISE = 2
    PARTICIPATION = 3
    COVER = 4
    MODEL = 5


#: The round number under which `join` draws; rounds count from 0, so it never meets one of them.
JOIN_ROUND = 2**31 - 1
#: The number under which the server draws; clients count from 0.
SERVER = 2**31 - 1


def client_key(root: Any, round_number: Any, client: Any) -> Callable[[Purpose], Any]:
    """A client's keys in one round, by purpose. What does not depend on the client is hashed once for all."""

    def key(purpose: Purpose) -> Any:
        return jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(root, int(purpose)), round_number), client)

    return key


def host_generator(seed: int, round_number: int, purpose: Purpose) -> np.random.Generator:
    """The host's generator for one round and purpose (participation)."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, round_number, int(purpose)])))
