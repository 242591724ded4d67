"""What `ChainMonitor(health=True)` measures: the configurational temperature and stationarity."""

import math
import warnings
from collections import deque
from typing import NamedTuple

import numpy as np
import tensorflow as tf
from keras import ops

from keras_sgmcmc import compilation
from keras_sgmcmc.callbacks.in_graph_callback import InGraphCallback
from keras_sgmcmc.noise_covariance import statistic
from keras_sgmcmc.optimizers.base import Sampler
from keras_sgmcmc.optimizers.observer import StepObserver

# Of many weights a step tells enough to be measured only now and then.
_FEW_WEIGHTS, _INTERVAL = 100_000, 20
# Steps before the first centre, positions that the mean of a centre is of, and the least number of
# steps behind a warning.
_FIRST_WINDOW, _POSITIONS, _JUDGED = 50, 20, 500
_BLOCKS, _BATCHES = 1024, 20
# What a warning takes: both a difference that matters and one that is not chance.
_DIFFERENCE, _ERRORS = 0.1, 4.0


class Estimate(NamedTuple):
    """A ratio of means along the chain, and its standard error."""

    value: float
    error: float

    @property
    def is_one(self):
        """Whether it is 1, up to what matters or may be chance."""
        return not abs(self.value - 1) > max(_DIFFERENCE, _ERRORS * self.error)


class _Block(NamedTuple):
    first: int
    sums: np.ndarray


class ChainHealth(InGraphCallback, StepObserver):
    """Sums along the chain, taken where the sampler moves, and what they say.

    For a centre c, a step that finds theta adds (theta - c)' N g and D T, and 2 (theta - c)' H g
    and |H g|^2 + tr Q. Once E g = 0 their means have the ratios of the docstring of `ChainMonitor`
    for every c that does not depend on the steps that are averaged; one near the mean makes for
    little noise, and for no cancellation in float32. So c is the mean of 20 positions before: it
    stands still while the chain doubles its length.

    The sums are fetched where the monitor looks at the chain, and added up in double precision.

    Attributes:
        logs: dict of what can be said by now.
    """

    def __init__(self):
        super().__init__()
        self.logs, self._reported = {}, set()
        self._step = None

    # The step.

    def create_state(self):
        optimizer = self.optimizer
        if not isinstance(optimizer, Sampler):
            raise ValueError(
                "`health=True` needs a sampler of keras_sgmcmc, which knows the noise that it "
                f"adds. Received: optimizer={type(optimizer).__name__}"
            )
        if compilation.is_distributed():
            raise ValueError(
                "`health=True` is not available under a distribution strategy. Train on one "
                f"replica without one, or leave it out. Received: {tf.distribute.get_strategy()}"
            )
        trained = {id(variable) for variable in self.model.trainable_variables}
        variables = optimizer._trainable_variables
        self._watched = {i: v for i, v in enumerate(variables) if id(v) in trained}
        weights = sum(math.prod(variable.shape) for variable in self._watched.values())
        self._interval = 1 if weights <= _FEW_WEIGHTS else _INTERVAL
        self._centres, self._deviations = (
            {i: statistic(v.shape, name, v.dtype) for i, v in self._watched.items()}
            for name in ("centre", "deviation_sum")
        )
        self._sums = statistic((4,), "health_sums")
        work = self._read, self._add_position, self._move_centres
        self._fetch, self._visit, self._recentre = map(compilation.traced, work)
        self._step = None

    def wrap(self, step):
        def wrapped(data):
            with self.optimizer.observed_by(self):
                return step(data)

        return wrapped

    def before_move(self, index, variable, law):
        if index not in self._centres:
            return
        # In a branch always: if XLA fused this with the move, it might round the move differently.
        compilation.conditionally(self._due(), lambda: self._add(index, variable, law))

    def is_due(self):
        return None if self._interval == 1 else self._due()

    def _due(self):
        return (self.optimizer.iterations + 1) % self._interval == 0

    def _add(self, index, variable, law):
        optimizer = self.optimizer
        drift, increment, variance = law()
        distance = ops.convert_to_tensor(variable) - ops.convert_to_tensor(self._centres[index])
        sampled = optimizer.sampled(index)

        def total(values):
            if sampled is not True:
                values = ops.where(sampled, values, ops.zeros_like(values))
            return ops.cast(ops.sum(values), "float32")

        number = total(ops.ones_like(drift))
        terms = [
            total(distance * drift) * float(optimizer.train_size or 0),
            number * ops.cast(optimizer.temperature, "float32"),
        ]
        if increment is None or optimizer.momentum > 0:
            terms += [0.0, 0.0]
        else:
            spread = ops.square(increment)
            if variance is not None:
                spread = spread + variance
            terms += [2.0 * total(distance * increment), total(spread)]
        self._sums.assign_add(ops.stack(terms))

    def _read(self):
        sums = tf.identity(tf.convert_to_tensor(self._sums))
        self._sums.assign(tf.zeros_like(sums))
        return sums

    def _add_position(self):
        for index, variable in self._watched.items():
            centre = tf.convert_to_tensor(self._centres[index])
            self._deviations[index].assign_add(tf.convert_to_tensor(variable) - centre)

    def _move_centres(self, count):
        for index, centre in self._centres.items():
            sums = self._deviations[index]
            centre.assign_add(tf.convert_to_tensor(sums) / tf.cast(count, sums.dtype))
            sums.assign(tf.zeros(sums.shape, sums.dtype))

    # Around the step.

    def look(self, step):
        """Fetch what the steps up to `step` have added."""
        if self._home is None or self._home() is not self.model or step == self._step:
            return
        if self._step is None or step < self._step:
            self._begin(step)
            return
        block = _Block(self._step, self._fetch().numpy().astype("float64"))
        self._step = step
        if step >= self._next_visit:
            self._visit()
            self._visits += 1
            self._next_visit = step + max(1, (self._window - self._origin) // _POSITIONS)
        # What is not finite is for the monitor to say.
        if self._centred and np.all(np.isfinite(block.sums)) and np.any(block.sums):
            self._blocks.append(block)
        while self._blocks and self._blocks[0].first < (self._origin + step) / 2:
            self._blocks.popleft()
        if len(self._blocks) > _BLOCKS:
            self._merge()
        self.logs = {name: estimate.value for name, estimate in self._estimates(1)}
        if step - self._origin >= max(_FIRST_WINDOW, 2 * (self._window - self._origin)):
            self._turn()

    def _begin(self, step):
        self._origin = self._window = self._step = step
        self._centred, self._blocks, self.logs = False, deque(), {}
        self._fetch()
        self._recentre(tf.constant(1))
        self._visits, self._next_visit = 0, step

    def _turn(self):
        """Let the mean of the steps since the last time be the centre."""
        self._recentre(tf.constant(self._visits))
        self._window, self._centred, self._visits = self._step, True, 0

    def _merge(self):
        blocks = list(self._blocks)
        pairs = zip(blocks[::2], [*blocks[1::2], None], strict=False)
        self._blocks = deque(
            one if other is None else _Block(one.first, one.sums + other.sums)
            for one, other in pairs
        )

    def _estimates(self, batches):
        """Pairs of a name and an `Estimate` over the later half of the chain.

        Standard errors are those of batch means.
        """
        if not self._blocks:
            return []
        sums = np.array([block.sums for block in self._blocks])
        if batches > 1:
            # Blocks are as long as each other, or nearly so.
            sums = np.array([part.sum(0) for part in np.array_split(sums, batches)])
        found = []
        for name, over, under in (("configurational_temperature", 0, 1), ("stationarity", 2, 3)):
            whole = sums[:, under].sum()
            if not whole > 0:
                continue
            value = sums[:, over].sum() / whole
            residuals = sums[:, over] - value * sums[:, under]
            error = math.nan
            if batches > 1:
                error = math.sqrt(batches / (batches - 1) * np.sum(residuals**2)) / whole
            found.append((name, Estimate(float(value), error)))
        return found

    @property
    def estimates(self):
        """dict of name to `Estimate`; empty before there are steps enough for standard errors."""
        if self._step is None or len(self._blocks) < _BATCHES:
            return {}
        return dict(self._estimates(_BATCHES))

    def warn(self, ended):
        """Warn, once each, of what is wrong; of a chain that still travels when it has `ended`."""
        found = self.estimates
        if not found or self._step - self._blocks[0].first < _JUDGED:
            return
        stationarity = found.get("stationarity")
        temperature = found.get("configurational_temperature")
        if stationarity is not None and not stationarity.is_one:
            if ended:
                self._report("stationarity", stationarity, _NOT_STATIONARY)
        elif temperature is not None and not temperature.is_one:
            high = temperature.value > 1
            self._report("configurational temperature", temperature, _HOT if high else _COLD)

    def _report(self, name, estimate, meaning):
        if name in self._reported:
            return
        self._reported.add(name)
        warnings.warn(
            f"The {name} of the chain is {estimate.value:.3g} (standard error "
            f"{estimate.error:.2g}) over steps {self._blocks[0].first} to {self._step}, and should "
            f"be 1. {meaning}",
            stacklevel=4,
        )


_NOT_STATIONARY = (
    "The burn-in is not over, or some directions (of flat likelihood and small prior precision, in "
    "a network) are slower than the run is long: below 1 the weights still travel or spread. Train "
    "longer, and discard these steps. If more steps don't change it, the noise is not what it "
    "should be."
)
_HOT = (
    "The draws spread too far, since batches bring noise that is not accounted for, or since the "
    "step is too long: take larger batches or a smaller learning rate."
)
_COLD = (
    "The draws spread too little: the noise is less than the posterior needs, or the covariance of "
    "gradients that the step is made of is not the curvature."
)
