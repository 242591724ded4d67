"""The step that every sampler shares."""

import contextlib
import math
import warnings

import keras
import numpy as np
from keras import ops

from keras_sgmcmc import compilation, random
from keras_sgmcmc.optimizers import state
from keras_sgmcmc.priors import as_prior
from keras_sgmcmc.validation import positive_integer, real_number

_REFUSED = {
    "weight_decay": "it is neither preconditioned nor scaled by `train_size`, so it is no prior. "
    "Use `prior=`, a precision in posterior units.",
    "use_ema": "it would overwrite the state of the chain by an average when `fit` ends. "
    "Collect draws with `callbacks.PosteriorSamples` and average predictions instead.",
}
CLIPPING = ("clipnorm", "clipvalue", "global_clipnorm")


class Sampler(keras.optimizers.Optimizer):
    """Base class of the stochastic-gradient MCMC optimizers: one step, which methods fill in.

    With mean-loss gradient g, N rows of data (`train_size`), temperature T, a preconditioner H
    and independent standard normals z, every sampler moves by

        theta <- theta - H (g + grad(-log p(theta)) / N) + sqrt(Q) z,      Q = 2 T H / N,

    so that its stationary law is p_T(theta) ~ exp(-U(theta) / T) up to the discretisation and the
    batch noise, with U = sum_i -log p(y_i | x_i, theta) - log p(theta) (Welling & Teh 2011, eq. 4,
    whose step is epsilon = 2 H / N).

    A method says what H is (`preconditioner`) and, where part of the noise comes from the batch,
    what Q is (`noise_variance`). Write it in `keras.ops`.

    Args:
        learning_rate: Positive number, `keras.optimizers.schedules.LearningRateSchedule`, or a
            callable without arguments. Multiplies the gradient of the *mean* loss. A schedule is
            evaluated at `iterations`, which counts real updates.
        train_size: Number of rows of training data, N. Duplicated rows count, repeats of the
            pipeline and augmentations don't. Needed unless `temperature=0` and there is no prior.
        prior: Prior of the sampled variables: a positive number (the precision of a zero-mean
            Gaussian, in posterior units), a `keras_sgmcmc.GaussianPrior`, a
            `keras_sgmcmc.DistributionPrior`, or None (flat). It belongs here and not in the loss.
        temperature: T >= 0. 1 is the posterior, less is a cold posterior, 0 is plain optimization.
            It tempers prior and likelihood alike.
        seed: Integer in [0, 2^32). None draws one when the optimizer is made, which
            `keras.utils.set_random_seed` governs.
        jit_compile: Whether the update is compiled by XLA, whatever `compile` was told. False is
            for devices without XLA and for debugging; on a CPU it costs 2 to 3 times the update.
        **kwargs: The common arguments of Keras' optimizers: `name`, `clipnorm`, `clipvalue`,
            `global_clipnorm`, `loss_scale_factor`, `gradient_accumulation_steps`.

    Raises:
        ValueError: If an argument is out of range, if `weight_decay` or `use_ema` is asked for, or,
            at build, if `train_size` is needed and missing or a variable is of half precision.
    """

    # Whether the noise of the batches is part of the method, so that they must be independent.
    uses_batch_noise = False
    # A method whose steps remember earlier ones has another.
    momentum = 0.0
    # Number of chains that the first axis of every variable stands for, if they are stacked.
    stacked_chains = None

    def __init__(
        self,
        learning_rate,
        *,
        train_size=None,
        prior=None,
        temperature=1.0,
        seed=None,
        jit_compile=True,
        **kwargs,
    ):
        for name, reason in _REFUSED.items():
            if kwargs.get(name):
                raise ValueError(
                    f"`{name}` is not available for a sampler: {reason} "
                    f"Received: {name}={kwargs[name]}"
                )
        if not callable(learning_rate):
            learning_rate = real_number("learning_rate", learning_rate, positive=True)
        super().__init__(learning_rate, **kwargs)
        self._configured_learning_rate = learning_rate
        self.train_size = None if train_size is None else positive_integer("train_size", train_size)
        self.prior = as_prior(prior)
        self.jit_compile = bool(jit_compile)
        self._configured_temperature = real_number("temperature", temperature, minimum=0.0)
        self._configured_seed = random.as_seed(seed)
        self._seed_is_free = seed is None

        self._temperature = self.add_variable(
            shape=(),
            initializer=keras.initializers.Constant(self._configured_temperature),
            aggregation="only_first_replica",
            name="temperature",
        )
        self._seed = keras.Variable(
            np.uint32(self._configured_seed),
            dtype="uint32",
            trainable=False,
            aggregation="only_first_replica",
            name="seed",
        )
        self._track_variable(self._seed)
        self._slots = {}
        # Not tracked: they are not the optimizer's own.
        object.__setattr__(self, "_kept", {})
        object.__setattr__(self, "_observers", ())
        self._unclaimed = {}
        self._prior_precision = {}
        self._precision_of_variable = []
        self._group_of_variable = []
        self._compiled = ()
        self._curvature = None

        clipping = [name for name in CLIPPING if getattr(self, name) is not None]
        if clipping and self._configured_temperature > 0:
            warnings.warn(
                f"`{clipping[0]}={getattr(self, clipping[0])}` changes the gradient, and with it "
                "the distribution that is sampled: the draws are not from the posterior while it "
                "clips. Use a smaller `learning_rate` instead.",
                stacklevel=3,
            )

    # The two lines in which methods differ.

    def preconditioner(self, index, gradient, learning_rate):
        """H of variable number `index`, as the pair (step, metric) with H = step / metric.

        Args:
            index: Position of the variable among those that the optimizer was built on.
            gradient: Gradient of the mean likelihood loss, before the prior is added.
            learning_rate: Scalar tensor of the variable's dtype.

        Returns:
            `(step, metric)`: tensors of the variable's dtype that broadcast against it; a metric of
            None stands for 1.
        """
        raise NotImplementedError

    def noise_variance(self, index, preconditioner):
        """Q of variable number `index`: the variance of the injected noise. Here 2 T H / N.

        None if the method injects none.
        """
        del index
        temperature = ops.cast(self._temperature, preconditioner.dtype)
        return (2.0 * temperature / self.train_size) * preconditioner

    def step_size(self, index):
        """H of variable number `index` as it is now, for reports: a scalar, or of its shape."""
        raise NotImplementedError

    def prepare(self):
        """Work on the optimizer's own state, called by `apply` before the compiled update."""
        # AutoGraph can't convert a body that is a docstring alone.
        return None

    def curvature(self, gradients, variables):
        """What `correction` needs and only the graph of the forward pass can tell, or None.

        Called by `apply` before the update is compiled by itself, where `gradients` still belong to
        that graph. What is returned, a structure of tensors, is `self._curvature` in the update.
        """
        del gradients, variables

    def correction(self, index, gradient, learning_rate):
        """A further drift of variable number `index`, added to theta, or None.

        Called after `preconditioner`, with the same arguments.
        """
        del index, gradient, learning_rate

    # The step.

    def update_step(self, gradient, variable, learning_rate):
        """Move one variable: theta <- theta - H (g + grad(-log p) / N) + sqrt(Q) z."""
        if self.jit_compile and compilation.is_distributed() and not compilation.is_eager():
            # `apply` reduces over replicas, which XLA can't compile; the move of one variable can.
            rate = ops.cast(learning_rate, variable.dtype)
            compilation.compiled(lambda g, rate: self._move(g, variable, rate))(gradient, rate)
        else:
            self._move(gradient, variable, learning_rate)

    def _move(self, gradient, variable, learning_rate):
        index = self._get_variable_index(variable)
        gradient = ops.cast(gradient, variable.dtype)
        rate = ops.cast(learning_rate, variable.dtype)
        step, metric = self.preconditioner(index, gradient, rate)

        # Observers get an H of their own making, from the state alone: a tensor that is also wanted
        # elsewhere would be rounded before the move, which XLA otherwise fuses with what makes it.
        self._show(
            index,
            variable,
            lambda: self._law(index, variable, gradient, rate, self.step_size(index), None),
        )
        _, increment, variance = self._law(index, variable, gradient, rate, step, metric)
        if variance is not None:
            noise = self._normal(tuple(variable.shape), variable.dtype, index)
            increment = increment - ops.sqrt(variance) * noise
        self._displace(index, variable, increment)

    def _law(self, index, variable, gradient, learning_rate, step, metric):
        """The drift g + grad(-log p) / N, the increment without noise, and Q."""

        def divided_by_metric(value):
            return value if metric is None else ops.divide(value, metric)

        step = ops.cast(step, variable.dtype)
        prior = self._prior_gradient(index, variable)
        drift = gradient if prior is None else gradient + prior / self.train_size
        increment = divided_by_metric(ops.multiply(drift, step))
        correction = self.correction(index, gradient, learning_rate)
        if correction is not None:
            increment = increment - correction
        variance = None
        if self.train_size is not None:
            variance = self.noise_variance(index, divided_by_metric(step))
        return drift, increment, variance

    def displace(self, index, variable, increment):
        """Subtract the increment of a step from variable number `index`."""
        del index
        self.assign_sub(variable, increment)

    def _displace(self, index, variable, increment):
        self.displace(index, variable, increment)
        for observer in self._observers:
            observer.after_move(index, variable)

    @contextlib.contextmanager
    def observed_by(self, observer):
        """Show the steps that are traced, or run eagerly, in this context to a `StepObserver`."""
        before = self._observers
        # Not tracked: it belongs to whoever observes.
        object.__setattr__(self, "_observers", (*before, observer))
        try:
            yield
        finally:
            object.__setattr__(self, "_observers", before)

    def _show(self, index, variable, law):
        for observer in self._observers:
            observer.before_move(index, variable, law)

    def _normal(self, shape, dtype, stream):
        """Standard normals of this step; each stream has its own."""
        key = {"seed": self._seed, "step": self.iterations, "stream": stream}
        return random.normal(shape, dtype, **key, chains=self.stacked_chains)

    def _has_precision(self, index):
        return self.prior is not None and self._precision_of_variable[index] is not None

    def precision_of(self, index):
        """The Gaussian prior's precision of variable number `index`, a scalar; 0 for others."""
        precision = self._precision_of_variable[index] if self._has_precision(index) else 0.0
        return ops.cast(ops.convert_to_tensor(precision), "float32")

    def _prior_gradient(self, index, variable):
        if self.prior is None:
            return None
        precision = self._precision_of_variable[index]
        if precision is not None:
            precision = ops.cast(precision, variable.dtype)
        return self.prior.gradient(ops.convert_to_tensor(variable), precision)

    def apply(self, grads, trainable_variables=None):
        """Update the variables: `keras.optimizers.Optimizer.apply`, compiled by XLA by itself."""
        grads = [compilation.densify(gradient) for gradient in grads]
        if self.stacked_chains is not None:
            # The loss is the mean of the chains'; each is to move by the gradient of its own.
            grads = [None if g is None else self.stacked_chains * g for g in grads]
        if trainable_variables is not None:
            trainable_variables = list(trainable_variables)
            if not self.built:
                with keras.name_scope(self.name):
                    self.build(trainable_variables)
            self._check_known(trainable_variables)
        if not grads or not self.built:
            super().apply(grads, trainable_variables)
            return
        if trainable_variables is None:
            trainable_variables = self._trainable_variables
        self.prepare()
        curvature = self.curvature(grads, trainable_variables)
        if compilation.is_distributed():
            self._apply(grads, trainable_variables, curvature, self._observers)
            return
        if not self.jit_compile:
            # Or a step that finds no data any more would still be counted.
            with compilation.after(grads):
                self._apply(grads, trainable_variables, curvature, self._observers)
            return
        indices = tuple(self._get_variable_index(variable) for variable in trainable_variables)

        def update(observers):
            self._compiled_apply(indices, observers)(grads, curvature)

        due = [observer.is_due() for observer in self._observers]
        if not due or None in due:
            update(self._observers)
        else:
            # The compiled update has to copy what it shows, also when nobody looks.
            compilation.conditionally(
                ops.any(ops.stack(due)), lambda: update(self._observers), lambda: update(())
            )

    def _apply(self, grads, variables, curvature, observers):
        before = self._observers
        # Not tracked, and gone after the update: the tensors live in the graph of one trace.
        object.__setattr__(self, "_curvature", curvature)
        object.__setattr__(self, "_observers", observers)
        try:
            super().apply(grads, variables)
        finally:
            object.__setattr__(self, "_curvature", None)
            object.__setattr__(self, "_observers", before)

    def _compiled_apply(self, indices, observers):
        """The compiled `apply` on the variables at `indices`, traced once and kept."""
        key = indices, observers
        for known, function in self._compiled:
            if known == key:
                return function
        variables = [self._trainable_variables[index] for index in indices]
        function = compilation.compiled(
            lambda grads, curvature: self._apply(grads, variables, curvature, observers)
        )
        # Those of observers that have gone, go too.
        kept = [entry for entry in self._compiled if entry[0][1] in ((), self._observers)]
        # Not tracked: it holds no state, and neither saving nor copying should meet it.
        object.__setattr__(self, "_compiled", (*kept, (key, function)))
        return function

    def _check_known(self, variables):
        unknown = [
            variable
            for variable in variables
            if self._var_key(variable) not in self._trainable_variables_indices
        ]
        if unknown:
            raise ValueError(
                f"This {type(self).__name__} was built on other variables and does not know "
                f"{[getattr(v, 'path', v.name) for v in unknown]}. An optimizer belongs to one "
                "model: make a new one (`type(optimizer).from_config(optimizer.get_config())`). If "
                "layers are unfrozen later, build on all variables first: make all layers "
                "trainable, call `optimizer.build(model.trainable_variables)`, then freeze."
            )

    # Scale, prior and state.

    def build(self, variables):
        if self.built:
            return
        variables = list(variables)
        if self.train_size is None and (self._configured_temperature > 0 or self.prior is not None):
            raise ValueError(
                f"{type(self).__name__} needs `train_size`, the number of rows of the training "
                "data, which an optimizer can't see: pass `train_size=len(x_train)`. "
                "Received: train_size=None"
            )
        self._check_variables(variables)
        super().build(variables)
        if self.gradient_accumulation_steps:
            self._slots["gradient_accumulator"] = self._accumulated_gradients
        if self.prior is None:
            return
        groups = self.prior.groups_of([_path(variable) for variable in variables])
        for name, precision in groups.precisions.items():
            self._prior_precision[name] = self.add_variable(
                shape=(),
                initializer=keras.initializers.Constant(precision),
                aggregation="only_first_replica",
                name="prior_precision",
            )
        self._precision_of_variable = [self._prior_precision.get(name) for name in groups.names]
        # By position: the names follow Keras' paths, which change when a model is loaded.
        order = list(groups.precisions)
        self._group_of_variable = [None if n is None else order.index(n) for n in groups.names]

    def _check_variables(self, variables):
        for variable in variables:
            dtype = keras.backend.standardize_dtype(variable.dtype)
            if dtype not in ("float32", "float64"):
                raise ValueError(
                    f"Variable {_path(variable)} is of dtype {dtype}, which rounds Langevin "
                    "increments away. Keep the variables in float32 and compute in half precision: "
                    "`keras.config.set_dtype_policy('mixed_bfloat16')` or `'mixed_float16'`."
                )
        constrained = [_path(v) for v in variables if getattr(v, "constraint", None) is not None]
        if constrained:
            warnings.warn(
                f"The constraints of {constrained} change the distribution that is sampled: the "
                "draws are not from the posterior of the unconstrained model.",
                stacklevel=3,
            )
        for variable in variables:
            regularizer = getattr(variable, "regularizer", None)
            if regularizer is not None:
                warnings.warn(_regularizer_message(variable, regularizer, self), stacklevel=3)

    def add_slots(self, name, initializer="zeros"):
        """One optimizer variable like each sampled variable, saved under `name`."""
        self._slots[name] = self.add_optimizer_variables(
            self._trainable_variables, name, initializer
        )
        return self._slots[name]

    def add_state(self, name, shapes, initializer="zeros", dtype="float32"):
        """Optimizer variables of any shapes, equal on all replicas, saved under `name`."""
        self._slots[name] = [
            self.add_variable(
                shape=shape,
                initializer=initializer,
                dtype=dtype,
                aggregation="only_first_replica",
                name=name,
            )
            for shape in shapes
        ]
        return self._slots[name]

    def keep(self, name, variable):
        """Save a variable of a callback or a loss with the optimizer's state, under `name`.

        Keras saves neither. The variable gets its value back when a state that has one is loaded,
        at once if that was before; a state without one leaves it alone.
        """
        self._kept[name] = variable
        self._restore_kept()

    def _restore_kept(self):
        for name in self._kept.keys() & self._unclaimed.keys():
            value, variable = self._unclaimed.pop(name), self._kept[name]
            if tuple(value.shape) == tuple(variable.shape):
                variable.assign(value)
            else:
                warnings.warn(
                    f"The saved `{name}` is of shape {tuple(value.shape)}, and this one of "
                    f"{tuple(variable.shape)}: it is not restored, and begins anew. To go on, use "
                    "the callbacks and the loss of the saved run, with the same arguments.",
                    stacklevel=3,
                )

    def noise_ratio(self, variances, rows):
        """tr(H C H / S) / tr(2 T H / N): noise of the batches against the noise wanted.

        For samplers that add all the noise that is wanted it is, to first order, by how much the
        variance is too large, as a share of it.

        Args:
            variances: C_kk, the variance of each weight's per-example gradient: one tensor for
                each sampled variable.
            rows: Rows of an update, S.

        Returns:
            A float; infinite for T = 0, where no noise is wanted.
        """
        brought = wanted = 0.0
        for index, variance in enumerate(variances):
            H = ops.broadcast_to(ops.cast(self.step_size(index), variance.dtype), variance.shape)
            brought += float(ops.sum(ops.square(H) * variance)) / rows
            wanted += 2.0 * float(self._temperature) * float(ops.sum(H)) / self.train_size
        return brought / wanted if wanted > 0 else math.inf

    @property
    def temperature(self):
        """The temperature T: a variable, read at every step. Assign a number to change it."""
        return self._temperature

    @temperature.setter
    def temperature(self, value):
        value = real_number("temperature", value, minimum=0.0)
        if value > 0 and self.train_size is None:
            raise ValueError(
                "A temperature above 0 needs `train_size`: make the optimizer with "
                f"`train_size=len(x_train)`. Received: temperature={value}"
            )
        self._temperature.assign(value)

    @property
    def seed(self):
        """The integer that keys the noise, together with the step and the variable."""
        return int(self._seed.numpy())

    def reseed(self, seed):
        """Give the noise another seed, an integer in [0, 2^32): another chain."""
        self._configured_seed = random.as_seed(seed)
        self._seed_is_free = False
        self._seed.assign(np.uint32(self._configured_seed))

    @property
    def prior_precision(self):
        """Current precisions of a Gaussian prior: dict of group name to scalar variable.

        They are read at every step, in posterior units: assign to one and the next step uses it.
        """
        if self.prior is not None and not self.built:
            raise ValueError(
                "`prior_precision` exists once the optimizer is built, since groups follow the "
                "model's variables: call `optimizer.build(model.trainable_variables)` or `fit`."
            )
        return dict(self._prior_precision)

    @property
    def prior_groups(self):
        """dict of group name to the positions of its variables."""
        groups = list(enumerate(self._group_of_variable))
        return {
            name: [index for index, group in groups if group == position]
            for position, name in enumerate(self._prior_precision)
        }

    def sampled(self, index):
        """Which elements of variable number `index` move by noise now: a bool, or of its shape."""
        del index
        return True

    def largest_precision(self, index):
        """The prior's precision of variable number `index` that H bears: H lambda / N <= 1.

        The chain is unstable from twice as much on.
        """
        return self.train_size / ops.max(self.step_size(index))

    def _get_current_learning_rate(self):
        # Keras calls a schedule with the count of micro-batches; `iterations` counts updates.
        if isinstance(self._learning_rate, keras.optimizers.schedules.LearningRateSchedule):
            return self._learning_rate(self.iterations)
        return super()._get_current_learning_rate()

    # Saving.

    def _named_state(self):
        named = {
            "iterations": self._iterations,
            "temperature": self._temperature,
            "seed": self._seed,
        }
        if isinstance(self._learning_rate, keras.Variable):
            named["learning_rate"] = self._learning_rate
        for position, variable in enumerate(self._prior_precision.values()):
            named[f"prior_precision.{position}"] = variable
        for name, slots in self._slots.items():
            for position, variable in enumerate(slots):
                if variable is not None:
                    named[f"{name}.{position}"] = variable
        missing = {id(v) for v in self.variables} - {id(v) for v in named.values()}
        if missing:
            raise RuntimeError(
                f"{type(self).__name__} made variables outside `add_slots` and `add_state`, which "
                f"would not be saved: {[v.path for v in self.variables if id(v) in missing]}"
            )
        return named

    def _layout(self):
        return {
            "class": type(self).__name__,
            "prior_groups": self._group_of_variable,
            "state": sorted(self._named_state()),
        }

    def save_own_variables(self, store):
        """Write the state by name, beside the class and the layout."""
        kept = {name: ops.convert_to_numpy(variable) for name, variable in self._kept.items()}
        # What was loaded and not asked for since goes on.
        kept = {**self._unclaimed, **kept}
        state.save(store, self._layout(), self._named_state(), kept, built=self.built)

    def load_own_variables(self, store):
        """Read the state by name.

        Raises:
            ValueError: If the state is that of a sampler of another class or layout.
        """
        named = self._named_state()
        if not self._seed_is_free:
            # A seed that was chosen stays: two chains from one checkpoint must differ.
            del named["seed"]
        self._unclaimed = state.load(store, self._layout(), named)
        self._restore_kept()

    def get_config(self):
        config = super().get_config()
        for name in ("weight_decay", "use_ema", "ema_momentum", "ema_overwrite_frequency"):
            del config[name]
        given = self._configured_learning_rate
        if isinstance(given, float) and config["learning_rate"] == float(np.float32(given)):
            config["learning_rate"] = given
        prior = self.prior
        config.update(
            train_size=self.train_size,
            prior=None if prior is None else keras.saving.serialize_keras_object(prior),
            temperature=self._configured_temperature,
            seed=self.seed,
            jit_compile=self.jit_compile,
        )
        return config

    @classmethod
    def from_config(cls, config, custom_objects=None):
        config = dict(config)
        if isinstance(config.get("prior"), dict):
            config["prior"] = keras.saving.deserialize_keras_object(
                config["prior"], custom_objects=custom_objects
            )
        return super().from_config(config, custom_objects=custom_objects)

    def __repr__(self):
        temperature = float(self._temperature.numpy())
        parts = [f"train_size={self.train_size}", f"temperature={temperature:g}"]
        prior = self.prior
        if self._prior_precision:
            prior = {name: float(v.numpy()) for name, v in self._prior_precision.items()}
        parts.append(f"prior={prior}")
        learning_rate = float(ops.convert_to_tensor(self.learning_rate).numpy())
        parts.append(f"learning_rate={learning_rate:g}")
        if self.train_size is not None:
            std = math.sqrt(2 * temperature * learning_rate / self.train_size)
            parts.append(f"noise_std={std:g}")
        parts.append(f"seed={self.seed}")
        return f"<{type(self).__name__} {', '.join(parts)}>"


def _path(variable):
    return getattr(variable, "path", variable.name)


def _regularizer_message(variable, regularizer, sampler):
    message = (
        f"The regularizer of {_path(variable)} is part of the mean loss, so it acts as a further "
        "prior, scaled by `train_size`"
    )
    l2 = getattr(regularizer, "l2", None)
    if l2 is not None and sampler.train_size is not None and float(l2) > 0:
        precision = 2.0 * float(l2) * sampler.train_size
        message += f": l2={float(l2):g} is a Gaussian of precision 2 * l2 * N = {precision:g}"
    return message + ". Say what you mean once, with `prior=`, and drop the regularizer."
