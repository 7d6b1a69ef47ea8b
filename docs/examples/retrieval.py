"""Learns which event of a long stream an alarm asks for, by attention_vjp and gradient descent in NumPy alone."""

from typing import NamedTuple

import numpy as np

import refattn

WIDTH, D_K, PAYLOAD = 32, 8, 4
MARKED, ORDINARY = 4, 8  # kinds of events
LENGTH, STREAMS, STEPS, RATE = 64, 32, 400, 1.0

# What tokens look like: directions that are drawn once, of which the model is told nothing.
DIRECTIONS, _ = np.linalg.qr(np.random.default_rng(7).standard_normal((WIDTH, WIDTH)))
ENDS = np.cumsum([MARKED, MARKED, PAYLOAD, ORDINARY])
MARKS, ALARMS, PLACES, KINDS, _ = np.split(DIRECTIONS, ENDS)
LOUD = 8.0  # the length of an alarm


class Streams(NamedTuple):
    """Streams of events, each with an alarm that asks for one of them."""

    events: np.ndarray  # (streams, events, WIDTH)
    alarm: np.ndarray  # (streams, 1, WIDTH)
    asked: np.ndarray  # (streams,) the marked kind that is asked for
    right: np.ndarray  # (streams,) the event of that kind
    payload: np.ndarray  # (streams, PAYLOAD) what that event carries


def draw(rng, streams=STREAMS, length=LENGTH):
    """Draw streams: kinds, places and payloads are new in each."""
    looks = KINDS[rng.integers(ORDINARY, size=(streams, length))]
    marked = np.argsort(rng.random((streams, length)))[:, :MARKED]
    each = np.arange(streams)
    looks[each[:, None], marked] = MARKS
    payload = rng.standard_normal((streams, length, PAYLOAD))
    asked = rng.integers(MARKED, size=streams)
    right = marked[each, asked]
    alarm = LOUD * ALARMS[asked][:, None]
    return Streams(looks + payload @ PLACES, alarm, asked, right, payload[each, right])


class Model(NamedTuple):
    """The projections to queries, keys and values."""

    w_q: np.ndarray  # (WIDTH, D_K)
    w_k: np.ndarray  # (WIDTH, D_K)
    w_v: np.ndarray  # (WIDTH, PAYLOAD)


def project(model, streams):
    """The query of each alarm, keys and values of all events, (streams, 1 head, ...)."""
    inputs = (streams.alarm, streams.events, streams.events)
    return [(x @ w)[:, None] for x, w in zip(inputs, model)]


def learn(model, streams, vjp=refattn.attention_vjp):
    """One step of gradient descent: the next model, and the error of this one."""
    q, k, v = project(model, streams)
    error = refattn.attention(q, k, v) - streams.payload[:, None, None]
    gradients = vjp(q, k, v, 2 * error / error.size)  # of the mean of error**2
    inputs = (streams.alarm, streams.events, streams.events)
    moved = (np.tensordot(x, g[:, 0], ((0, 1), (0, 1))) for x, g in zip(inputs, gradients))
    return Model(*(w - RATE * by for w, by in zip(model, moved))), np.mean(error**2)


def train(seed=0, steps=STEPS, vjp=refattn.attention_vjp):
    """Learn from new streams at each step: all models, and their errors but the last."""
    rng = np.random.default_rng(seed)
    widths = (D_K, D_K, PAYLOAD)
    models = [Model(*(0.3 * rng.standard_normal((WIDTH, width)) for width in widths))]
    errors = []
    for _ in range(steps):
        model, error = learn(models[-1], draw(rng), vjp)
        models.append(model)
        errors.append(float(error))
    return models, errors


def weights(model, streams):
    """The weights of each alarm, (streams, events)."""
    return refattn.attention_stages(*project(model, streams)).weights[:, 0, 0]


def on_right(model, streams):
    """The weight of the event that is asked for, (streams,)."""
    return weights(model, streams)[np.arange(len(streams.right)), streams.right]


def found(model, length=LENGTH, streams=200):
    """The same on fresh streams, their mean; chance is 1 / length."""
    return float(on_right(model, draw(np.random.default_rng(1), streams, length)).mean())


if __name__ == "__main__":
    models, _ = train()
    for step in range(0, STEPS + 1, 50):
        print(f"step {step:3}: {found(models[step]):.3f} on the right event, chance {1 / LENGTH:.3f}")
