"""Hamiltonian Monte Carlo and the no-U-turn sampler, by TensorFlow Probability."""

import time
import warnings

import numpy as np
import tensorflow as tf

from keras_sgmcmc import random
from keras_sgmcmc.posterior import Posterior
from keras_sgmcmc.reference.potential import (
    Potential,
    check_bytes,
    compile_or_trace,
    progress_bar,
    random_keys,
)
from keras_sgmcmc.validation import positive_integer, real_number

# Transitions that one call makes at most, and the seconds that it should take.
_BLOCK = 100
_SECONDS = 0.3

# Ends of the warm-up's windows, as shares of it. All but the last set the scales.
_WINDOWS = (0.1, 0.25, 0.45, 0.8, 1.0)

# A proposal of an energy higher by this is what Stan calls divergent.
_DIVERGENT_ENERGY = 1000.0


class ChainsPosterior(Posterior):
    """The `Posterior` that `hmc` and `nuts` return: draws chain after chain.

    A part of it (`p[i:j]`) and a concatenation are a plain `Posterior`.

    Attributes:
        steps: Number of each draw in its chain, 1 to n, shape (C n,).
        step_size: The leapfrog step, in units of `scale`.
        scale: Dict: path of a variable -> array, the standard deviations estimated in the warm-up
            (the inverse root of the diagonal mass matrix).
        acceptance: Mean acceptance probability of each chain, shape (C,).
        divergences: Number of divergent transitions of each chain after warm-up, shape (C,).
        gradients: Gradients of U that each chain took after warm-up, shape (C,).
        warmup_gradients: Those of the warm-up, the search for a first step size included, (C,).
        seconds: Wall time of the draws, compilation excluded.
        warmup_seconds: Wall time of the warm-up, compilation of the transitions excluded.
    """

    def _replace(self, draws, steps, weights, chain_ids):
        common = list(zip(self._others, self._common, strict=True))
        part = Posterior(self.model, self.variables, draws, steps, weights, common, chain_ids)
        part._functions = self._functions
        return part

    @property
    def chains(self):
        """Dict: path of a variable -> its draws by chain, shape (C, n, *shape); a copy."""
        return {name: self.by_chain(values) for name, values in self.draws.items()}

    def r_hat(self):
        """Dict: path of a variable -> R-hat of its elements, the chains split into halves.

            R^2 = (n - 1) / n + B / W,    n the draws of a half-chain,

        with B the variance of the means of the half-chains and W the mean of their variances. It
        is near 1 (below 1.01, say) where the chains agree, NaN where they never moved. Needs at
        least 4 draws a chain (Gelman et al., Bayesian Data Analysis, 3rd edition, 11.4).
        """
        return {name: _r_hat(values) for name, values in self.chains.items()}

    def ess(self):
        """Dict: path of a variable -> effective number of independent draws of its elements.

        Over all chains, from Geyer's initial positive sequence of autocorrelations, by
        `tfp.mcmc.effective_sample_size`. The Monte Carlo standard error of a mean is std/sqrt(ess).
        """
        import tensorflow_probability as tfp

        def effective(values):
            # TFP wants at least two chains to compare: the halves of a single one are as good.
            values = values.astype("float64")
            if len(values) == 1:
                n = values.shape[1] // 2
                values = np.concatenate([values[:, :n], values[:, n : 2 * n]])
            return tfp.mcmc.effective_sample_size(
                np.moveaxis(values, 0, 1), filter_beyond_positive_pairs=True, cross_chain_dims=1
            ).numpy()

        return {name: effective(values) for name, values in self.chains.items()}


def _r_hat(values):
    n = values.shape[1] // 2
    if n < 2:
        raise ValueError(f"R-hat needs at least 4 draws a chain. Received: {values.shape[1]}")
    values = values.astype("float64")
    halves = np.concatenate([values[:, :n], values[:, -n:]])
    within = halves.var(axis=1, ddof=1).mean(axis=0)
    between = halves.mean(axis=1).var(axis=0, ddof=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.sqrt((n - 1) / n + between / within)


class _HMC:
    """HMC with a number of leapfrog steps that is drawn anew for every transition."""

    def __init__(self, leapfrog_steps):
        self.leapfrog_steps = leapfrog_steps

    def kernel(self, log_prob, step_size):
        import tensorflow_probability as tfp

        return tfp.mcmc.HamiltonianMonteCarlo(log_prob, step_size, self.leapfrog_steps)

    def prepare(self, results, seed):
        steps = tf.random.stateless_uniform(
            (), seed, minval=1, maxval=self.leapfrog_steps + 1, dtype=tf.int32, alg="philox"
        )
        accepted = results.accepted_results._replace(num_leapfrog_steps=steps)
        return results._replace(accepted_results=accepted)

    def report(self, results):
        ratio = results.log_accept_ratio
        divergent = tf.logical_not(ratio > -_DIVERGENT_ENERGY)
        steps = tf.fill(tf.shape(ratio), results.accepted_results.num_leapfrog_steps)
        return ratio, divergent, steps


class _NUTS:
    def __init__(self, max_tree_depth):
        self.max_tree_depth = max_tree_depth

    def kernel(self, log_prob, step_size):
        import tensorflow_probability as tfp

        return tfp.mcmc.NoUTurnSampler(
            log_prob,
            step_size,
            max_tree_depth=self.max_tree_depth,
            max_energy_diff=_DIVERGENT_ENERGY,
        )

    def prepare(self, results, seed):
        del seed
        return results

    def report(self, results):
        return results.log_accept_ratio, results.has_divergence, results.leapfrogs_taken


class _Chains:
    """Chains on theta / scale, moved by compiled blocks of transitions."""

    def __init__(self, potential, method, target_accept, seed, jit_compile):
        self.potential = potential
        self.method = method
        self.target_accept = target_accept
        self.seed = tf.constant(np.uint32(seed).view("int32"))
        self.step = 0
        self.seconds = 0.0
        self.search_gradients = 0
        self._compiled = False
        self._block = 1
        self._bootstrap = tf.function(self._bootstrap_graph, autograph=False)
        self._try_step = tf.function(self._try_step_graph, autograph=False)
        self._advance = compile_or_trace(potential, self._advance_graph, jit_compile)

    def _kernel(self, scale, data, step_size=1.0, adaptation_steps=0):
        import tensorflow_probability as tfp

        dtype = self.potential.dtype
        return tfp.mcmc.DualAveragingStepSizeAdaptation(
            self.method.kernel(self._log_prob(scale, data), tf.cast(step_size, dtype)),
            adaptation_steps,
            target_accept_prob=tf.constant(self.target_accept, dtype),
        )

    def _log_prob(self, scale, data):
        return lambda z: self.potential.log_prob(z * scale, data)

    def _bootstrap_graph(self, z, scale, step_size, adaptation_steps, data):
        kernel = self._kernel(scale, data, step_size, adaptation_steps)
        return kernel.bootstrap_results(z)

    def _try_step_graph(self, z, scale, step_size, seed, data):
        """Mean acceptance of proposals of a single leapfrog step."""
        import tensorflow_probability as tfp

        kernel = tfp.mcmc.HamiltonianMonteCarlo(self._log_prob(scale, data), step_size, 1)
        _, results = kernel.one_step(z, kernel.bootstrap_results(z), seed=seed)
        return tf.reduce_mean(tf.exp(tf.minimum(results.log_accept_ratio, 0.0)))

    def _advance_graph(self, z, results, scale, first, steps, seed, data):
        """`steps` transitions, at most `_BLOCK`, numbered from `first`."""
        kernel = self._kernel(scale, data)

        def body(i, z, results, arrays):
            # Of the transition's number alone, so that the draws don't depend on the blocks.
            keys = tf.unstack(random_keys(2, seed, first + i))
            prepared = self.method.prepare(results.inner_results, keys[0])
            z, results = kernel.one_step(z, results._replace(inner_results=prepared), seed=keys[1])
            ratio, divergent, leapfrogs = self.method.report(results.inner_results)
            acceptance = tf.exp(tf.minimum(ratio, 0.0))
            values = (z * scale, acceptance, divergent, leapfrogs)
            arrays = [a.write(i, v) for a, v in zip(arrays, values, strict=True)]
            return i + 1, z, results, arrays

        count = z.shape[0]
        arrays = [
            tf.TensorArray(dtype, size=_BLOCK, element_shape=shape)
            for dtype, shape in (
                (z.dtype, z.shape),
                (z.dtype, (count,)),
                (tf.bool, (count,)),
                (tf.int32, (count,)),
            )
        ]
        _, z, results, arrays = tf.while_loop(
            lambda i, *_: i < steps,
            body,
            (tf.constant(0), z, results, arrays),
            parallel_iterations=1,
        )
        return z, results, [array.stack() for array in arrays]

    def begin(self, vectors, scale, adaptation_steps):
        """Begin a window at `vectors`, shape (C, D), with a step size found afresh."""
        dtype = self.potential.dtype
        self.scale = tf.constant(scale, dtype)
        self.z = tf.constant(vectors, dtype) / self.scale
        self.search_gradients += 1
        self.results = self._bootstrap(
            self.z,
            self.scale,
            tf.constant(self._reasonable_step_size(), dtype),
            tf.constant(adaptation_steps),
            self.potential.data,
        )

    def _reasonable_step_size(self):
        """The power of 2 at which the acceptance of one step crosses 1/2.

        Hoffman & Gelman 2014, algorithm 4.
        """

        def acceptance(step_size):
            step_size = tf.constant(step_size, self.potential.dtype)
            key = random_keys(1, self.seed, -1 - self.step)[0]
            self.search_gradients += 2
            return float(self._try_step(self.z, self.scale, step_size, key, self.potential.data))

        step_size = 1.0
        growing = acceptance(step_size) > 0.5
        for _ in range(50):
            following = step_size * (2.0 if growing else 0.5)
            if growing and not acceptance(following) > 0.5:
                break
            step_size = following
            if not growing and acceptance(step_size) > 0.5:
                break
        return step_size

    def run(self, count, bar):
        """`count` transitions: draws (count, C, D), acceptance, divergences and leapfrogs."""
        if not self._compiled:
            # No transition: so that the times and the block's length are those of transitions.
            self._compiled = True
            self._call(0)
        parts = []
        while count > 0:
            steps = min(self._block, count)
            began = time.monotonic()
            self.z, self.results, blocks = self._call(steps)
            parts.append([block.numpy()[:steps] for block in blocks])
            pace = (time.monotonic() - began) / steps
            self._block = int(np.clip(_SECONDS / pace, 1, min(2 * self._block, _BLOCK)))
            self.step += steps
            count -= steps
            self.seconds += time.monotonic() - began
            bar.add(steps)
        return [np.concatenate(part) for part in zip(*parts, strict=True)]

    def _call(self, steps):
        return self._advance(
            self.z,
            self.results,
            self.scale,
            tf.constant(self.step),
            tf.constant(steps),
            self.seed,
            self.potential.data,
        )

    @property
    def step_size(self):
        return float(self.results.new_step_size)


def _warm_up(chains, vectors, steps, bar):
    """Find the step size and the scales: windows, each with the scales that the last one saw.

    Returns the gradients that each chain took.
    """
    scale = np.ones(chains.potential.size)
    done, gradients = 0, np.zeros(len(vectors), int)
    for share in _WINDOWS:
        end = round(share * steps)
        length, done = end - done, end
        if not length:
            continue
        chains.begin(vectors, scale, length)
        draws, _, _, leapfrogs = chains.run(length, bar)
        gradients += leapfrogs.sum(axis=0)
        draws = draws.astype("float64")
        vectors = draws[-1]
        # Fewer draws say too little of a variance. Chains may still be far apart.
        if share < 1.0 and draws.shape[0] * draws.shape[1] >= 20 and length > 1:
            std = np.sqrt(draws.var(axis=0).mean(axis=0))
            scale = np.where(np.isfinite(std) & (std > 0), std, scale)
    return gradients + chains.search_gradients


def hmc(
    model,
    x,
    y=None,
    *,
    prior="optimizer",
    sample_weight=None,
    temperature=1.0,
    draws=1000,
    warmup=500,
    chains=4,
    leapfrog_steps=20,
    start=None,
    target_accept=0.8,
    seed=None,
    jit_compile="auto",
    verbose="auto",
):
    """Hamiltonian Monte Carlo on all rows: draws from exp(-U(theta) / T).

        U(theta) = N L(theta) - log p(theta),    L the compiled loss on all N rows, a mean

    Momentum r ~ N(0, M), M = diag(scale)^-2, then L leapfrog steps of size `step_size`, accepted
    with probability min(1, exp(-change of (U/T + r' M^-1 r/2))). L is drawn for every transition
    from 1, ..., `leapfrog_steps`: with a fixed L an orbit may close on itself (Neal 2011, 3.2).

    The network runs in inference mode (no dropout, moving statistics as they are), and the model
    is left as it was. In the warm-up the step size is found by dual averaging, the same for all
    chains, and the scales (the diagonal mass matrix) from the standard deviations in windows of
    growing length. The last fifth adapts the step alone.

    Args:
        model: A built Keras model, compiled with a loss.
        x: Array or tensor, a list, tuple or dict of them as the model takes it, or a finite
            `tf.data.Dataset` of (x, y) or (x, y, sample_weight), loaded as a whole.
        y: Targets, as in `model.fit`.
        prior: What the optimizers accept: a positive number (the precision of a Gaussian), a
            `GaussianPrior`, a `DistributionPrior`, or None (flat). Defaults to `"optimizer"`: the
            prior of the compiled sampler with its current precisions; flat if the compiled
            optimizer is not a sampler.
        sample_weight: Weights of the rows, as in `model.fit`. Defaults to None.
        temperature: T > 0. Defaults to 1.0, the posterior.
        draws: Draws of each chain after the warm-up. Defaults to 1000.
        warmup: Transitions of each chain that adapt, and are dropped. Defaults to 500.
        chains: Number of chains. Defaults to 4.
        leapfrog_steps: Largest number of leapfrog steps of a transition. Defaults to 20.
        start: For each chain a list of arrays, one for each of `model.trainable_variables`.
            Defaults to None: the model's weights plus N(0, 0.01^2).
        target_accept: Mean acceptance probability that the step size is adapted to, in (0, 1).
            Defaults to 0.8.
        seed: Integer in [0, 2^32). Equal seeds give equal draws, bit for bit on one machine. None,
            the default, draws one, which `keras.utils.set_random_seed` governs.
        jit_compile: Whether XLA compiles the transitions. Defaults to `"auto"`: where it can, but
            on a CPU not for convolutions and recurrent layers, which it makes slow.
        verbose: `"auto"` (the default) or 1 shows a progress bar, 0 does not.

    Returns:
        `ChainsPosterior`: a `Posterior` of chains x draws draws of the trainable variables, with
        `chains`, `r_hat()`, `ess()`, `divergences`, `acceptance`.

    Warns:
        If transitions diverged or chains disagree (R-hat above 1.1); if float32 rounds U too
        coarsely for N; if the compiled sampler has another `train_size`; as the samplers do, for
        losses such as `"mse"` whose noise is not the one you may mean.

    Raises:
        ValueError: If an argument is out of range; if the model is not built, not compiled with a
            loss, without trainable weights or of half precision; if its loss is not finite at the
            start or no mean over rows; if the prior's log density is not known; if the data or the
            draws take more than 4 GiB.

    References:
        R. M. Neal, "MCMC using Hamiltonian dynamics", Handbook of Markov Chain Monte Carlo, 2011.
        M. D. Hoffman, A. Gelman, "The No-U-Turn sampler", JMLR 15, 2014 (dual averaging).

    Example:

    >>> exact = sg.reference.hmc(model, x_train, y_train, prior=1.0)
    >>> max(r.max() for r in exact.r_hat().values())
    >>> mean, std = exact.predict_moments(x_test)
    """
    method = _HMC(positive_integer("leapfrog_steps", leapfrog_steps))
    return _run(
        method,
        model,
        x,
        y,
        prior=prior,
        sample_weight=sample_weight,
        temperature=temperature,
        draws=draws,
        warmup=warmup,
        chains=chains,
        start=start,
        target_accept=target_accept,
        seed=seed,
        jit_compile=jit_compile,
        verbose=verbose,
    )


def nuts(
    model,
    x,
    y=None,
    *,
    prior="optimizer",
    sample_weight=None,
    temperature=1.0,
    draws=1000,
    warmup=500,
    chains=4,
    max_tree_depth=10,
    start=None,
    target_accept=0.8,
    seed=None,
    jit_compile="auto",
    verbose="auto",
):
    """The no-U-turn sampler on all rows: draws from exp(-U(theta) / T).

    HMC whose trajectories double in length until they turn back, so that there is no number of
    leapfrog steps to choose. Chains move together: each transition takes as long as the longest
    trajectory of any chain. Everything else is as in `hmc`: the target, the warm-up, what is
    returned, warned of and raised.

    Args:
        model, x, y, prior, sample_weight, temperature, draws, warmup, chains, start,
            target_accept, seed, jit_compile, verbose: As for `hmc`.
        max_tree_depth: Doublings of a trajectory at most: it takes up to 2^max_tree_depth - 1
            gradients. Defaults to 10.

    Returns:
        `ChainsPosterior`.

    Reference:
        M. D. Hoffman, A. Gelman, "The No-U-Turn sampler: adaptively setting path lengths in
        Hamiltonian Monte Carlo", JMLR 15, 2014.

    Example:

    >>> exact = sg.reference.nuts(model, x_train, y_train, prior=1.0)
    """
    method = _NUTS(positive_integer("max_tree_depth", max_tree_depth))
    return _run(
        method,
        model,
        x,
        y,
        prior=prior,
        sample_weight=sample_weight,
        temperature=temperature,
        draws=draws,
        warmup=warmup,
        chains=chains,
        start=start,
        target_accept=target_accept,
        seed=seed,
        jit_compile=jit_compile,
        verbose=verbose,
    )


def _run(
    method,
    model,
    x,
    y,
    *,
    prior,
    sample_weight,
    temperature,
    draws,
    warmup,
    chains,
    start,
    target_accept,
    seed,
    jit_compile,
    verbose,
):
    temperature = real_number("temperature", temperature, positive=True)
    draws = positive_integer("draws", draws)
    warmup = positive_integer("warmup", warmup)
    count = positive_integer("chains", chains)
    target_accept = real_number("target_accept", target_accept, positive=True, below=1.0)
    seed = random.as_seed(seed)
    potential = Potential(model, x, y, sample_weight, prior, temperature)
    check_bytes(potential, draws + warmup, count)
    vectors = _starting_points(potential, start, count, seed)
    chains = _Chains(potential, method, target_accept, seed, jit_compile)
    bar = progress_bar(warmup + draws, verbose, "draw")
    warmup_gradients = _warm_up(chains, vectors, warmup, bar)
    warmup_seconds = chains.seconds
    vectors, acceptance, divergent, leapfrogs = chains.run(draws, bar)
    by_chain = np.moveaxis(vectors, 1, 0).reshape(count * draws, -1)
    posterior = ChainsPosterior(
        model,
        potential.variables,
        zip(*potential.arrays(by_chain), strict=True),
        np.tile(np.arange(1, draws + 1), count),
        chain_ids=np.repeat(np.arange(count), draws),
    )
    posterior.step_size = chains.step_size
    posterior.scale = potential.named(chains.scale.numpy())
    posterior.acceptance = acceptance.mean(axis=0, dtype="float64")
    posterior.divergences = divergent.sum(axis=0)
    posterior.gradients = leapfrogs.sum(axis=0)
    posterior.warmup_gradients = warmup_gradients
    posterior.warmup_seconds = warmup_seconds
    posterior.seconds = chains.seconds - warmup_seconds
    _report(posterior, draws)
    return posterior


def _report(posterior, draws):
    divergences = int(posterior.divergences.sum())
    if divergences:
        warnings.warn(
            f"{divergences} of {len(posterior)} transitions diverged: the chains can't follow the "
            "curvature everywhere, and the draws are biased where they can't. Raise "
            "`target_accept`, use float64, or a prior that keeps the weights from degenerating.",
            stacklevel=4,
        )
    if draws < 4:
        return
    worst = max(np.nanmax(r, initial=1.0) for r in posterior.r_hat().values())
    if worst > 1.1:
        warnings.warn(
            f"The chains disagree: the largest R-hat of a weight is {worst:.3g}. Take more "
            "`warmup` and `draws`. (Networks whose hidden units can be exchanged have many equal "
            "modes: compare predictions, not weights.)",
            stacklevel=4,
        )


def _starting_points(potential, start, count, seed):
    """Vectors, shape (C, D)."""
    if start is not None:
        start = [[np.asarray(value) for value in values] for values in start]
        shapes = [tuple(v.shape) for v in potential.variables]
        if len(start) != count or any([v.shape for v in s] != shapes for s in start):
            raise ValueError(
                f"`start` needs, for each of {count} chains, one array for each trainable variable "
                f"of the model, of shapes {shapes}. "
                f"Received: shapes {[[v.shape for v in values] for values in start]}"
            )
        return np.stack([np.concatenate([v.reshape(-1) for v in values]) for values in start])
    generator = np.random.default_rng(seed)
    return potential.start + 0.01 * generator.standard_normal((count, potential.size))
