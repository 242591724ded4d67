"""The peers of `benchmark_peers.py`: multilayer perceptrons by BlackJAX and by posteriors.

A perceptron is its weights, a dict of `w0`, `b0`, `w1`, ... with one output for labels of 0 and 1,
and a logit for each class otherwise; the prior has precision 1. SGLD's step is that of
`sg.SGLD(1e-4)`; what the step is does not change its time.
"""

import itertools
import time

import numpy as np

_STEP = 1e-4


def perceptron(sizes, rng):
    """Weights of a perceptron with these numbers of units."""
    weights = {}
    for k, (rows, columns) in enumerate(itertools.pairwise(sizes)):
        scale = np.sqrt(2 / rows)
        weights[f"w{k}"] = (scale * rng.standard_normal((rows, columns))).astype("float32")
        weights[f"b{k}"] = np.zeros(columns, "float32")
    return weights


def _outputs(weights, rows, relu):
    layers = len(weights) // 2
    for k in range(layers):
        rows = rows @ weights[f"w{k}"] + weights[f"b{k}"]
        if k < layers - 1:
            rows = relu(rows)
    return rows


def _turn(advance, state, steps, count=1, wait=lambda state: state):
    """Seconds a step of `advance(state)`, which does `count` of them, after its first call."""
    state = wait(advance(state))
    begin = time.perf_counter()
    for _ in range(steps // count - 1):
        state = advance(state)
    wait(state)
    return (time.perf_counter() - begin) / (count * (steps // count - 1))


def _jax_log_likelihood(weights, row, label):
    import jax

    outputs = _outputs(weights, row, jax.nn.relu)
    if outputs.shape == (1,):
        return -jax.nn.softplus(-(2 * label - 1) * outputs).sum()
    return jax.nn.log_softmax(outputs)[label]


def _jax_log_prior(weights):
    import jax
    import jax.numpy as jnp

    return -0.5 * sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(weights))


def blackjax_sgld(weights, data, batch_size, steps):
    """Turns of BlackJAX's SGLD on batches of rows drawn with replacement, name to function.

    Step by step; in a scan that draws and gathers its batches; and in one over batches that were
    gathered before.
    """
    import blackjax
    import jax
    import jax.numpy as jnp

    rows = len(data[0])
    data = tuple(map(jnp.asarray, data))
    gradient = blackjax.sgmcmc.gradients.grad_estimator(
        _jax_log_prior,
        lambda p, row: _jax_log_likelihood(p, *row),  # which it maps over the rows
        rows,
    )
    sgld = blackjax.sgld(gradient)
    epsilon = 2 * _STEP / rows
    block = max(1, min(100, steps // 2))  # the first is not timed

    def drawn(position, key):
        at, noise = jax.random.split(key)
        index = jax.random.randint(at, (batch_size,), 0, rows)
        return sgld.step(noise, position, tuple(part[index] for part in data), epsilon), None

    @jax.jit
    def one(position, key):
        return drawn(position, key)[0]

    @jax.jit
    def scan(position, key):
        return jax.lax.scan(drawn, position, jax.random.split(key, block))[0]

    @jax.jit
    def gather(key):
        index = jax.random.randint(key, (block, batch_size), 0, rows)
        return tuple(part[index] for part in data)

    @jax.jit
    def scan_gathered(position, key, batches):
        def step(position, given):
            key, batch = given
            return sgld.step(key, position, batch, epsilon), None

        return jax.lax.scan(step, position, (jax.random.split(key, block), batches))[0]

    # Drawn before, as is what the clock should not see; some come again.
    keys = itertools.cycle(list(jax.random.split(jax.random.key(1), 1000)))

    def turn(function, count):
        def run():
            begin = jax.tree.map(jnp.asarray, weights)
            advance = lambda position: function(position, next(keys))  # noqa: E731
            return _turn(advance, begin, steps, count, jax.block_until_ready)

        return run

    return {
        "SGLD, BlackJAX, scan": turn(scan, block),
        "SGLD, BlackJAX, scan of gathered batches": turn(
            lambda position, key: scan_gathered(position, key, gather(key)), block
        ),
        "SGLD, BlackJAX, jitted step": turn(one, 1),
    }


def blackjax_nuts(weights, data, draws, warmup=500):
    """Draws of BlackJAX's NUTS after its adaptation, a list of arrays, and the seconds of both."""
    import blackjax
    import jax
    import jax.numpy as jnp

    data = tuple(map(jnp.asarray, data))

    def log_density(p):
        each = jax.vmap(lambda *row: _jax_log_likelihood(p, *row))(*data)
        return _jax_log_prior(p) + each.sum()

    @jax.jit
    def adapt(key):
        adaptation = blackjax.window_adaptation(blackjax.nuts, log_density)
        (state, parameters), _ = adaptation.run(key, jax.tree.map(jnp.asarray, weights), warmup)
        return state, parameters

    @jax.jit
    def sample(key, state, parameters):
        kernel = blackjax.nuts(log_density, **parameters).step

        def step(state, key):
            state, _ = kernel(key, state)
            return state, state.position

        return jax.lax.scan(step, state, jax.random.split(key, draws))[1]

    begin = time.perf_counter()
    state = jax.block_until_ready(adapt(jax.random.key(1)))
    warm = time.perf_counter() - begin
    compiled = sample.lower(jax.random.key(2), *state).compile()
    begin = time.perf_counter()
    positions = jax.block_until_ready(compiled(jax.random.key(2), *state))
    return [np.asarray(positions[name]) for name in weights], warm, time.perf_counter() - begin


def posteriors_sgld(weights, data, batch_size, steps):
    """Turns of posteriors' SGLD, with its step compiled and not; none if it isn't installed."""
    try:
        import posteriors
        import torch
    except ImportError:
        return {}
    rows = len(data[0])
    data = tuple(map(torch.tensor, data))

    def log_posterior(p, batch):
        inputs, labels = batch
        outputs = _outputs(p, inputs, torch.relu)
        if outputs.shape[-1] == 1:
            each = -torch.nn.functional.softplus(-(2 * labels - 1) * outputs)
        else:
            each = torch.log_softmax(outputs, -1).gather(1, labels[:, None].long())
        prior = -0.5 * sum((leaf**2).sum() for leaf in p.values())
        return rows * each.mean() + prior, torch.tensor([])

    transform = posteriors.sgmcmc.sgld.build(log_posterior, lr=_STEP / rows)

    def turn(update):
        def advance(state):
            index = torch.randint(rows, (batch_size,))
            return update(state, tuple(part[index] for part in data), inplace=False)[0]

        begin = transform.init({name: torch.tensor(value) for name, value in weights.items()})
        return lambda: _turn(advance, begin, steps)

    return {
        "SGLD, posteriors": turn(transform.update),
        "SGLD, posteriors, torch.compile": turn(torch.compile(transform.update)),
    }
