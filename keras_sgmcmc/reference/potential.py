"""The log density that the reference methods work on: that of the samplers, on flat vectors."""

import logging
import math
import warnings

import keras
import numpy as np
import tensorflow as tf
from keras import tree

from keras_sgmcmc import predictive
from keras_sgmcmc.fused import is_slow_in_a_loop
from keras_sgmcmc.guards import check_loss
from keras_sgmcmc.optimizers.base import Sampler
from keras_sgmcmc.priors import DistributionPrior, GaussianPrior, as_prior

_logger = logging.getLogger("keras_sgmcmc")

# Beyond this, data and draws are refused.
MAX_BYTES = 4 * 2**30


class Potential:
    """-U(theta) / T of a compiled model, its data and its prior, for several theta at once.

    theta is the vector of all trainable variables, one after the other, each in row-major order.
    The network runs in inference mode on weights that are handed to it: those of the model are
    read once, as the starting point, and nothing of the model is changed.

    Args:
        model, x, y, sample_weight: As in `model.fit`; `x` may be a finite `tf.data.Dataset`.
        prior: What the optimizers accept, or `"optimizer"`: that of the compiled sampler with its
            current precisions, flat if the compiled optimizer is none.
        temperature: T > 0.

    Attributes:
        variables: The trainable variables.
        start: Their values as one vector, shape (D,).
        dtype: That of the vectors: the widest of the variables.
        data: The tensors (x, y, sample_weight) of all N rows, an argument of `log_prob`.
        train_size: N.
    """

    def __init__(self, model, x, y, sample_weight, prior, temperature):
        _check_model(model)
        self.model = model
        self.variables = list(model.trainable_variables)
        self.temperature = temperature
        dtypes = [keras.backend.standardize_dtype(v.dtype) for v in self.variables]
        self.dtype = tf.as_dtype("float64" if "float64" in dtypes else "float32")
        self._shapes = [tuple(v.shape) for v in self.variables]
        self._sizes = [math.prod(shape) for shape in self._shapes]
        self.size = sum(self._sizes)
        self.start = np.concatenate(
            [keras.ops.convert_to_numpy(v).reshape(-1) for v in self.variables]
        ).astype(self.dtype.as_numpy_dtype)
        self._prior, self._precisions = _resolve_prior(prior, model, self.variables)
        self.data = self._load(x, y, sample_weight)
        self.train_size = int(tree.flatten(self.data)[0].shape[0])
        targets = tree.map_structure(lambda a: tf.TensorSpec((None, *a.shape[1:])), self.data[1])
        check_loss(model, targets)
        self._check_arithmetic()

    def _load(self, x, y, sample_weight):
        pieces = predictive.chunks(x, y, sample_weight)
        data = predictive.concatenate(*pieces)
        if data[1] is None:
            raise ValueError(
                "Targets are needed: pass `y`, or a Dataset of (x, y). Received: y=None"
            )
        size = sum(a.nbytes for a in tree.flatten(data) if a is not None)
        if size > MAX_BYTES:
            raise ValueError(
                f"The data take {size / 2**30:.1f} GiB, more than the {MAX_BYTES / 2**30:g} GiB "
                "that the reference methods load as one tensor. They are for small problems: pass "
                "fewer rows, or sample with `keras_sgmcmc.SGLD` on minibatches."
            )

        def tensor(array):
            if array is None:
                return None
            # As `fit` does, and once rather than in every pass.
            return tf.constant(array, self.dtype if array.dtype.kind == "f" else None)

        return tree.map_structure(tensor, data)

    def _check_arithmetic(self):
        """Warn where the energies that decide on acceptance are lost to rounding."""
        loss = self._mean_loss(self.values(self.start), self.data)
        loss, dtype = float(loss), loss.dtype
        if not math.isfinite(loss):
            raise ValueError(
                f"The loss is {loss} at the model's current weights, where the chains start. "
                "Begin from weights with a finite loss, and check the data for NaN."
            )
        optimizer = getattr(self.model, "optimizer", None)
        sampler = getattr(optimizer, "inner_optimizer", optimizer)
        if isinstance(sampler, Sampler) and sampler.train_size not in (None, self.train_size):
            warnings.warn(
                f"`train_size={sampler.train_size}` of the optimizer is not the {self.train_size} "
                "rows given here: the two posteriors are of data sets of different size.",
                stacklevel=5,
            )
        constrained = [v.path for v in self.variables if getattr(v, "constraint", None) is not None]
        if constrained:
            warnings.warn(f"The constraints of {constrained} are ignored.", stacklevel=5)
        rounding = self.train_size * abs(loss) * np.finfo(dtype.as_numpy_dtype).eps
        if rounding / self.temperature > 0.1:
            warnings.warn(
                f"U = {self.train_size * loss:.3g} is rounded to about {rounding:.1g} in "
                f"{dtype.name}, which blurs the acceptance of proposals. Call keras.config."
                "set_floatx('float64') and set_dtype_policy('float64') before building and "
                "compiling the model.",
                stacklevel=5,
            )

    def values(self, vector):
        """The vector theta, shape (D,), as one tensor for each variable."""
        parts = tf.split(tf.convert_to_tensor(vector, self.dtype), self._sizes)
        return [
            tf.cast(tf.reshape(part, shape), v.dtype)
            for part, shape, v in zip(parts, self._shapes, self.variables, strict=True)
        ]

    def arrays(self, vectors):
        """Vectors, shape (S, D), as one array (S, *shape) for each variable."""
        vectors = np.asarray(vectors)
        parts = np.split(vectors, np.cumsum(self._sizes)[:-1], axis=1)
        return [
            part.reshape(len(vectors), *shape).astype(keras.backend.standardize_dtype(v.dtype))
            for part, shape, v in zip(parts, self._shapes, self.variables, strict=True)
        ]

    def named(self, vector):
        """The vector theta as a dict: path of a variable -> array; unique as in `Posterior`."""
        arrays = self.arrays(vector[None])
        return dict(zip(unique_paths(self.variables), (a[0] for a in arrays), strict=True))

    def _mean_loss(self, values, data):
        x, y, sample_weight = data
        mapping = list(zip(self.variables, values, strict=True))
        with keras.StatelessScope(state_mapping=mapping, collect_losses=True):
            outputs = self.model(x, training=False)
            loss = self.model._compute_loss(
                x=x, y=y, y_pred=outputs, sample_weight=sample_weight, training=False
            )
        return loss

    def _log_prior(self, values):
        total = tf.zeros((), self.dtype)
        if self._prior is None:
            return total
        for value, precision in zip(values, self._precisions, strict=True):
            total += tf.cast(_log_prior(self._prior, value, precision), self.dtype)
        return total

    def _log_prob_and_gradient(self, vector, data):
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(vector)
            values = self.values(vector)
            loss = tf.cast(self._mean_loss(values, data), self.dtype)
            energy = self.train_size * loss - self._log_prior(values)
            log_prob = -energy / self.temperature
        return log_prob, tape.gradient(log_prob, vector)

    def log_prob(self, vectors, data):
        """-U / T of each of the `vectors`, shape (C, D) -> (C,), differentiable once.

        A loop over chains works for every layer, also those that can't be vectorised, and takes
        no more memory than one pass.
        """

        fixed = tf.stop_gradient(vectors)
        log_prob, gradient = tf.map_fn(
            lambda vector: self._log_prob_and_gradient(vector, data),
            fixed,
            fn_output_signature=(
                tf.TensorSpec((), self.dtype),
                tf.TensorSpec((self.size,), self.dtype),
            ),
            parallel_iterations=1,
        )
        # The value, and a term of value 0 that hands on the gradient: nobody differentiates the
        # loop, which would keep all passes in memory.
        slope = tf.stop_gradient(gradient)
        return tf.stop_gradient(log_prob) + tf.reduce_sum(slope * (vectors - fixed), axis=1)


def unique_paths(variables):
    """The names of variables in `Posterior.draws`: repeated paths get a suffix."""
    names = {}
    for variable in variables:
        name, count = variable.path, 0
        while name in names:
            count += 1
            name = f"{variable.path}_{count}"
        names[name] = variable
    return list(names)


def _log_prior(prior, value, precision):
    if isinstance(prior, GaussianPrior):
        if precision is None:
            return 0.0
        log_normaliser = 0.5 * math.log(precision / (2.0 * math.pi))
        return tf.reduce_sum(log_normaliser - 0.5 * precision * tf.square(value))
    # A new tensor: TFP's bijectors remember the inverse of one they have seen, off the tape.
    value = tf.cast(tf.identity(value), prior.distribution.dtype)
    return tf.reduce_sum(prior.distribution.log_prob(value))


def _resolve_prior(prior, model, variables):
    """The prior and the precision of each variable, None where it has none."""
    current = {}
    if isinstance(prior, str) and prior == "optimizer":
        optimizer = getattr(model, "optimizer", None)
        optimizer = getattr(optimizer, "inner_optimizer", optimizer)
        prior = None
        if isinstance(optimizer, Sampler):
            prior = optimizer.prior
            if prior is not None and optimizer.built:
                current = {
                    name: float(keras.ops.convert_to_numpy(precision))
                    for name, precision in optimizer.prior_precision.items()
                }
    prior = as_prior(prior)
    if prior is None:
        return None, None
    if not isinstance(prior, GaussianPrior | DistributionPrior):
        raise ValueError(
            "The reference methods need the log density of the prior, which they know of "
            "`GaussianPrior` and `DistributionPrior`. Write it as a `DistributionPrior`. "
            f"Received: prior={prior!r}"
        )
    groups = prior.groups_of([variable.path for variable in variables])
    precisions = {**groups.precisions, **current}
    return prior, [precisions.get(name) for name in groups.names]


def _check_model(model):
    if not model.built:
        raise ValueError(
            f"The model {model.name!r} is not built, so it has no weights yet: give it an "
            "`Input`, or call it once on data, `model(x[:1])`."
        )
    compiled = getattr(model, "_compile_config", None)
    has_loss = compiled is not None and compiled.config["loss"] is not None
    if not has_loss and type(model).compute_loss is keras.Model.compute_loss:
        raise ValueError(
            f"The model {model.name!r} is not compiled with a loss, which is the likelihood: call "
            "model.compile(loss=...) first."
        )
    if not model.trainable_variables:
        raise ValueError(f"The model {model.name!r} has no trainable weights to sample.")
    for owner, dtype in [
        *((v.path, v.dtype) for v in model.trainable_variables),
        *((layer.path, layer.compute_dtype) for layer in model._flatten_layers()),
    ]:
        if dtype is not None and keras.backend.standardize_dtype(dtype) in ("float16", "bfloat16"):
            raise ValueError(
                f"{owner} is of {dtype}, too coarse for the energies that the reference methods "
                "compare. Build the model in float32 or float64: "
                "keras.config.set_dtype_policy('float32')."
            )


def check_bytes(potential, draws, chains=1):
    """Refuse a number of draws, warm-up included, that does not fit."""
    # The vectors, and the arrays of the Posterior made of them.
    size = 2 * draws * chains * potential.size * potential.dtype.size
    if size > MAX_BYTES:
        raise ValueError(
            f"{draws * chains} draws of {potential.size:,} weights need {size / 2**30:.1f} GiB, "
            f"more than {MAX_BYTES / 2**30:g} GiB. The reference methods are for small models: "
            "take fewer `draws`"
            + (", `warmup` or `chains`" if chains > 1 else "")
            + ", or sample with `keras_sgmcmc.SGLD` and `PosteriorSamples`."
        )


def compile_or_trace(potential, function, jit_compile):
    """`function` under XLA, if asked for and possible, else as a graph."""
    if jit_compile not in ("auto", True, False):
        raise ValueError(
            f"`jit_compile` should be 'auto', True or False. Received: jit_compile={jit_compile!r}"
        )
    automatic = jit_compile == "auto"
    if automatic:
        heavy = any(map(is_slow_in_a_loop, potential.model._flatten_layers()))
        jit_compile = bool(tf.config.list_logical_devices("GPU")) or not heavy
    chosen = [tf.function(function, jit_compile=jit_compile, autograph=False)]

    def call(*arguments):
        nonlocal automatic
        try:
            return chosen[0](*arguments)
        except (tf.errors.InvalidArgumentError, tf.errors.UnimplementedError) as error:
            if not (automatic and jit_compile):
                raise
            _logger.warning("XLA can't compile this model, which goes on without: %s", error)
            chosen[0] = tf.function(function, autograph=False)
            return chosen[0](*arguments)
        finally:
            automatic = False

    return call


def progress_bar(total, verbose, unit):
    """A Keras progress bar; `"auto"` shows it where Keras shows its own."""
    show = keras.config.is_interactive_logging_enabled() if verbose == "auto" else verbose
    return keras.utils.Progbar(total, verbose=int(bool(show)), interval=0.5, unit_name=unit)


def random_keys(count, seed, step):
    """Keys of TensorFlow's stateless generators, shape (count, 2), for step number `step`.

    The algorithm is named because with the default one XLA takes seconds longer to compile.
    """
    return tf.random.stateless_uniform(
        (count, 2),
        tf.stack([seed, step]),
        minval=None,
        maxval=None,
        dtype=tf.int32,
        alg="philox",
    )
