"""Losses that are exactly -log p(y|x, theta), as the samplers need them.

A sampler draws from exp(-U), U = -sum_i log p(y_i|x_i, theta) - log p(theta), and is handed the
gradient of the loss. Both losses here are the mean over the rows of a batch

    L = -1/B sum_i w_i log p(y_i|x_i, theta),

so that N L estimates the first term of U without bias, constants included. Row weights w_i, where
given, multiply the log likelihood of their row: U = sum_i w_i l_i.
"""

import math
import types
import warnings

import keras
import numpy as np
from keras import ops


class _NegativeLogDensity(keras.losses.Loss):
    """The part that both losses share; a subclass says what `log_prob` is."""

    def __init__(self, name, reduction, dtype):
        if reduction not in ("sum_over_batch_size", "mean"):
            raise ValueError(
                "`reduction` must be 'sum_over_batch_size', the mean over the rows of a batch, "
                "because the samplers multiply the loss by the number of training rows. 'sum' "
                "(and None, which Keras sums when it takes the gradient) multiplies the "
                "likelihood by the batch size; 'mean_with_sample_weight' divides by the sum of "
                "the weights, so that their scale is lost. For the value of each row call "
                f"`log_prob(y_true, y_pred)`. Received: reduction={reduction!r}"
            )
        super().__init__(name=name, reduction=reduction, dtype=dtype)
        self._dtype_given = dtype is not None

    def __call__(self, y_true, y_pred, sample_weight=None):
        if not self._dtype_given and ops.is_tensor(y_pred):
            received = keras.backend.standardize_dtype(y_pred.dtype)
            if received == "float64" and self.dtype != "float64":
                warnings.warn(
                    f"The model computes in float64 but its loss, `{self.name}`, rounds the "
                    f"predictions to {self.dtype}. Give the loss dtype='float64', or call "
                    "keras.config.set_floatx('float64') before building the model; "
                    f"dtype='{self.dtype}' keeps the rounding and silences this warning.",
                    stacklevel=2,
                )
        # Rows are summed over their outputs, so weights or masks of single outputs or time steps
        # would multiply whole rows, and the wrong ones.
        if sample_weight is not None:
            shape = tuple(ops.convert_to_tensor(sample_weight).shape)
            if len(shape) > 2 or (len(shape) == 2 and shape[1] not in (1, None)):
                raise ValueError(
                    "`sample_weight` must have one weight for each row, shape (batch,). "
                    f"Received: sample_weight of shape {shape}"
                )
        if getattr(y_pred, "_keras_mask", None) is not None:
            raise ValueError(
                "The predictions carry a Keras mask (from a Masking layer or mask_zero=True), "
                f"which `{self.name}` cannot apply: it sums the log density of a row over its "
                "time steps. Make the model drop the mask, or write the likelihood of the steps "
                "that count as a loss of your own."
            )
        return super().__call__(y_true, y_pred, sample_weight)

    def call(self, y_true, y_pred):
        return -self.log_prob(y_true, y_pred)

    def _convert(self, value):
        return ops.convert_to_tensor(value, dtype=self.dtype)

    def get_config(self):
        dtype = self.dtype if self._dtype_given else None
        return {**super().get_config(), "dtype": dtype}


@keras.saving.register_keras_serializable(package="keras_sgmcmc")
class GaussianNegativeLogLikelihood(_NegativeLogDensity):
    """Negative log likelihood of outputs with Gaussian noise of a given standard deviation.

        y_j | x, theta ~ N(f_j(x, theta), sigma_j^2),   j = 1, ..., d

        loss = 1/B sum_i sum_j [(y_ij - f_ij)^2 / (2 sigma_j^2) + log sigma_j + log(2 pi) / 2]

    where f is `y_pred` and j runs over all axes but the first.

    Keras' `"mse"` is another likelihood: it has no factor 1/2 and takes the mean over the d
    outputs, 1/d sum_j (y_j - f_j)^2, which is this loss (up to its constant) with
    sigma^2 = d/2. A sampler run on `"mse"` therefore assumes a noise variance of 1/2 for one
    output, 1 for two, 5 for ten, whatever the data say.

    Args:
        noise_std: Positive float, or a sequence of d positive floats, one for each entry of the
            last axis of `y_pred`: the standard deviation sigma of the observation noise, in
            the units of y. Defaults to 1.0. `callbacks.PriorPrecisionEM(learn_noise_std=True)`
            learns it; to predict it for each row, see `NegativeLogLikelihood`.
        name: Name of the loss.
        reduction: `"sum_over_batch_size"` (the default) or its synonym `"mean"`.
        dtype: Dtype of the computation. Defaults to `keras.config.floatx()`; a float64 model
            needs `"float64"`.

    Attributes:
        noise_std: Variable, of shape () or (d,). It is read at every step: assign to it and the
            next step uses it. A saved model keeps its value.

    Raises:
        ValueError: If `noise_std` is not positive and finite or does not fit the outputs, if
            `reduction` is another one, or if `y_true` and `y_pred` differ in shape. Only an axis
            of length 1 at the end is added or dropped, as in Keras' own losses.

    Example:

    ```python
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    loss = keras_sgmcmc.GaussianNegativeLogLikelihood(noise_std=0.3)
    model.compile(optimizer="sgd", loss=loss)
    model.fit(np.zeros((8, 3)), np.zeros(8), verbose=0)
    ```
    """

    def __init__(
        self,
        noise_std=1.0,
        name="gaussian_negative_log_likelihood",
        reduction="sum_over_batch_size",
        dtype=None,
    ):
        super().__init__(name=name, reduction=reduction, dtype=dtype)
        try:
            array = np.asarray(noise_std, dtype="float64")
        except (TypeError, ValueError):
            array = np.asarray(np.nan)
        if array.ndim > 1 or array.size == 0 or not np.all((array > 0) & np.isfinite(array)):
            raise ValueError(
                "`noise_std` must be a positive, finite number, or a sequence of them, one for "
                "each output: the standard deviation of the noise in y, e.g. 0.1. "
                f"Received: noise_std={noise_std!r}"
            )
        self._configured_noise_std = array.tolist()
        self.noise_std = keras.Variable(
            array,
            dtype="float64" if self.dtype == "float64" else "float32",
            trainable=False,
            aggregation="only_first_replica",
            name="noise_std",
        )

    def log_prob(self, y_true, y_pred):
        """Log density of each row, log p(y|x, theta), summed over outputs: shape (batch,)."""
        residual = self.residual(y_true, y_pred)
        noise_std = self._noise_std(residual)
        z = residual / noise_std
        return _sum_over_outputs(
            -0.5 * ops.square(z) - ops.log(noise_std) - 0.5 * math.log(2.0 * math.pi)
        )

    def residual(self, y_true, y_pred):
        """y - f, in the shape of `y_pred`."""
        y_pred = self._convert(y_pred)
        return _match_shape(self._convert(y_true), y_pred.shape, "`y_pred` has shape") - y_pred

    def predictive_mean(self, y_pred):
        """Mean of y given the network's output: `y_pred` itself."""
        return self._convert(y_pred)

    def predictive_variance(self, y_pred):
        """Variance of y given the network's output, sigma^2, in the shape of `y_pred`."""
        y_pred = self._convert(y_pred)
        return ops.ones_like(y_pred) * ops.square(self._noise_std(y_pred))

    def _noise_std(self, y_pred):
        noise_std = self._convert(self.noise_std)
        shape = tuple(y_pred.shape)
        if noise_std.ndim == 1 and (len(shape) < 2 or shape[-1] != noise_std.shape[0]):
            raise ValueError(
                "A sequence `noise_std` needs one entry for each entry of the last axis of "
                f"`y_pred`. Received: noise_std={self._configured_noise_std} of length "
                f"{noise_std.shape[0]} and y_pred of shape {shape}"
            )
        return noise_std

    def get_config(self):
        # Keras saves the variables of layers, optimizers and metrics, but not those of losses.
        value = ops.convert_to_numpy(self.noise_std)
        given = self._configured_noise_std
        is_given = np.array_equal(value, np.asarray(given, value.dtype))
        return {**super().get_config(), "noise_std": given if is_given else value.tolist()}


@keras.saving.register_keras_serializable(package="keras_sgmcmc")
class NegativeLogLikelihood(_NegativeLogDensity):
    """Negative log likelihood under any TensorFlow Probability distribution of the outputs.

        y | x, theta ~ make_distribution(y_pred)

        loss = -1/B sum_i log p(y_i | x_i, theta)

    where the log density of a row is summed over all axes but the first.

    Labels reach the distribution as floats, because Keras converts them; TFP's discrete
    distributions accept that. `y_true` must have the distribution's batch shape followed by its
    event shape. Only an axis of length 1 at the end is added or dropped, as in Keras' own losses:
    labels of shape (n, 1) fit a `Categorical` of batch shape (n,), and are not broadcast
    against it.

    Args:
        make_distribution: Function that takes `y_pred`, a tensor of shape (batch, ...), and
            returns a TFP distribution whose first batch axis is the batch. To save the model,
            register the function (as below). A function that is not registered, a lambda for
            instance, trains but cannot be saved: `get_config` raises.
        name: Name of the loss.
        reduction: `"sum_over_batch_size"` (the default) or its synonym `"mean"`.
        dtype: Dtype of the computation. Defaults to `keras.config.floatx()`; a float64 model
            needs `"float64"`.

    Raises:
        ValueError: If `make_distribution` is not callable or returns no distribution, if
            `reduction` is another one, if the shape of `y_true` is not the distribution's, or,
            from `get_config`, if the function is not registered.

    Example: a network with two outputs that predicts the mean and the spread of one y.

    ```python
    import tensorflow_probability as tfp

    @keras.saving.register_keras_serializable(package="my_package")
    def gaussian(y_pred):
        mean, raw_scale = keras.ops.split(y_pred, 2, axis=-1)
        return tfp.distributions.Normal(mean, 1e-3 + keras.ops.softplus(raw_scale))

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile(optimizer="sgd", loss=keras_sgmcmc.NegativeLogLikelihood(gaussian))
    model.fit(np.zeros((8, 3)), np.zeros(8), verbose=0)
    ```

    Another process loads the saved model with `keras.saving.load_model` once it has imported the
    module that registers the function.
    """

    def __init__(
        self,
        make_distribution,
        name="negative_log_likelihood",
        reduction="sum_over_batch_size",
        dtype=None,
    ):
        super().__init__(name=name, reduction=reduction, dtype=dtype)
        if not callable(make_distribution):
            raise ValueError(
                "`make_distribution` must be a function that takes y_pred and returns a TFP "
                "distribution, e.g. a registered function that returns "
                "tfp.distributions.Categorical(logits=y_pred). "
                f"Received: make_distribution={make_distribution!r}"
            )
        self.make_distribution = make_distribution

    def log_prob(self, y_true, y_pred):
        """Log density of each row, log p(y|x, theta), summed over outputs: shape (batch,)."""
        distribution = self._distribution(y_pred)
        shape = distribution.batch_shape + distribution.event_shape
        expected = f"make_distribution returned {distribution}, for y of shape"
        y_true = _match_shape(self._convert(y_true), shape, expected)
        return _sum_over_outputs(distribution.log_prob(y_true))

    def predictive_mean(self, y_pred):
        """Mean of y given the network's output: `make_distribution(y_pred).mean()`.

        Raises:
            NotImplementedError: If the distribution has none. A `Categorical` counts as such,
                though TFP returns the mean of the class index; the mean of a `OneHotCategorical`
                is the vector of class probabilities.
        """
        return self._distribution_with_moments(y_pred).mean()

    def predictive_variance(self, y_pred):
        """Variance of y given the network's output, in the shape of `predictive_mean`."""
        distribution = self._distribution_with_moments(y_pred)
        return ops.broadcast_to(distribution.variance(), ops.shape(distribution.mean()))

    def _distribution_with_moments(self, y_pred):
        from tensorflow_probability import distributions as tfd

        distribution = self._distribution(y_pred)
        if isinstance(distribution, tfd.Categorical):
            raise NotImplementedError(
                "The mean of a class index says nothing about the classes. For class "
                "probabilities return tfp.distributions.OneHotCategorical from make_distribution, "
                f"with one-hot labels. Received: {distribution}"
            )
        return distribution

    def _distribution(self, y_pred):
        distribution = self.make_distribution(self._convert(y_pred))
        if not hasattr(distribution, "log_prob"):
            raise ValueError(
                "`make_distribution` must return a TFP distribution. "
                f"Received: {distribution!r} of type {type(distribution).__name__}"
            )
        return distribution

    def get_config(self):
        # Refused here rather than in __init__, so that a lambda can be used for a quick run; and
        # rather than when loading, where Keras would refuse it, too late to be repaired.
        if not _is_registered(self.make_distribution):
            raise ValueError(
                "A model with this NegativeLogLikelihood cannot be saved, because "
                "`make_distribution` is not registered with Keras and could not be found when "
                "loading. Write it as a named function, def my_likelihood(y_pred): ..., under "
                "the decorator @keras.saving.register_keras_serializable(package='my_package'), "
                "and compile with that. A named function can also be registered now: "
                "keras.saving.register_keras_serializable('my_package')(my_likelihood). "
                "model.save_weights needs neither. "
                f"Received: make_distribution={self.make_distribution!r}"
            )
        function = keras.saving.serialize_keras_object(self.make_distribution)
        return {**super().get_config(), "make_distribution": function}

    @classmethod
    def from_config(cls, config):
        function = keras.saving.deserialize_keras_object(config["make_distribution"])
        return cls(**{**config, "make_distribution": function})


def _match_shape(y_true, shape, expected):
    """Adds or drops a last axis of length 1 to make `y_true` fit `shape`; never broadcasts."""
    received, shape = tuple(y_true.shape), tuple(shape)
    if len(received) + 1 == len(shape) and shape[-1] == 1:
        y_true = ops.expand_dims(y_true, axis=-1)
    elif len(received) == len(shape) + 1 and received[-1] == 1:
        y_true = ops.squeeze(y_true, axis=-1)
    matched = tuple(y_true.shape)
    if (
        not shape
        or len(matched) != len(shape)
        or any(None not in pair and pair[0] != pair[1] for pair in zip(matched, shape, strict=True))
    ):
        raise ValueError(
            "`y_true` must have the shape of the predictions, (batch, ...), and is not "
            f"broadcast against it. {expected} {shape}. Received: y_true of shape {received}"
        )
    return y_true


def _sum_over_outputs(values):
    return ops.sum(values, axis=tuple(range(1, len(values.shape))))


def _is_registered(function):
    """Whether Keras can find `function`, or the class of a callable object, when loading."""
    if isinstance(function, types.FunctionType):
        # Keras saves the bytecode of any lambda, and refuses to load it in its safe mode.
        if function.__name__ == "<lambda>":
            return False
        key = function
    else:
        key = type(function)
    return keras.saving.get_registered_object(keras.saving.get_registered_name(key)) is key
