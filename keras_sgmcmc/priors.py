"""Priors of the sampled variables. They belong to the optimizer and are immutable descriptions."""

import numbers
import re
from types import MappingProxyType
from typing import NamedTuple

import keras
import numpy as np

from keras_sgmcmc.validation import real_number


class Groups(NamedTuple):
    """How a prior groups variables.

    names: The group of each variable, None where it has no precision.
    precisions: Initial precision of each group.
    """

    names: list
    precisions: dict


class Prior:
    """Base class of priors.

    A prior says which variables share a precision (`groups_of`) and what the gradient of its
    negative log density is (`gradient`). The current precisions are the optimizer's variables.
    """

    def groups_of(self, paths):
        """The `Groups` of variables with these paths."""
        return Groups([None] * len(paths), {})

    def gradient(self, value, precision):
        """-d log p / d value in posterior units, of the shape of `value`; None where p is flat."""
        raise NotImplementedError

    def get_config(self):
        raise NotImplementedError

    @classmethod
    def from_config(cls, config):
        return cls(**config)

    def __eq__(self, other):
        return type(self) is type(other) and self.get_config() == other.get_config()

    __hash__ = None


@keras.saving.register_keras_serializable(package="keras_sgmcmc")
class GaussianPrior(Prior):
    """Zero-mean Gaussian prior: p(theta) = prod_g N(theta_g | 0, I / lambda_g).

    Args:
        precision: Initial precision lambda in posterior units (1 / variance of a weight), never
            divided by the number of rows. Positive. Defaults to `1.0`.
        groups: Which variables share a precision:
            - None: all of them, one group named `"all"`. The default.
            - `"layer"`: those of one layer, a group named by the layer's path within the model.
            - a dict of pattern to precision: a group for each pattern, named by it. A pattern is a
              regular expression that is searched for in the variable's path (`"kernel"`,
              `"dense_1/"`, `"bias$"`); the first that matches counts. A precision of None is a flat
              prior, and `precision` isn't used.

    Raises:
        ValueError: If a precision is not positive, or, when the optimizer is built, if a pattern
            matches no variable or a variable matches no pattern.

    Example:

    >>> prior = sg.GaussianPrior(groups={"kernel": 10.0, "bias": None})
    >>> optimizer = sg.SGLD(1e-2, train_size=len(x_train), prior=prior)
    """

    def __init__(self, precision=1.0, groups=None):
        self._precision = real_number("precision", precision, positive=True)
        if groups is None or groups == "layer":
            self._groups = groups
        elif isinstance(groups, dict) and groups:
            for pattern, value in groups.items():
                if not isinstance(pattern, str):
                    raise ValueError(f"`groups` should map strings. Received key: {pattern!r}")
                try:
                    re.compile(pattern)
                except re.error as error:
                    raise ValueError(
                        f"`groups` has a key that is no regular expression ({error}). "
                        f"Received: {pattern!r}"
                    ) from error
                if value is not None:
                    real_number(f"groups[{pattern!r}]", value, positive=True)
            self._groups = MappingProxyType(
                {key: None if value is None else float(value) for key, value in groups.items()}
            )
        else:
            raise ValueError(
                "`groups` should be None, 'layer', or a dict of path pattern to precision. "
                f"Received: groups={groups!r}"
            )

    @property
    def precision(self):
        return self._precision

    @property
    def groups(self):
        return self._groups

    def groups_of(self, paths):
        if self._groups is None:
            return Groups(["all"] * len(paths), {"all": self._precision})
        if self._groups == "layer":
            names = _layer_names(paths)
            return Groups(names, dict.fromkeys(names, self._precision))
        matches = [
            next((pattern for pattern in self._groups if re.search(pattern, path)), None)
            for path in paths
        ]
        unmatched = [path for path, match in zip(paths, matches, strict=True) if match is None]
        if unmatched:
            raise ValueError(
                f"No pattern of `groups` matches {unmatched}. Add a pattern for them, with a "
                f"precision of None for a flat prior. Received: groups={dict(self._groups)}"
            )
        unused = [pattern for pattern in self._groups if pattern not in matches]
        if unused:
            raise ValueError(
                f"The patterns {unused} of `groups` match no variable that an earlier pattern "
                f"doesn't. The variables are {list(paths)}."
            )
        precisions = {name: value for name, value in self._groups.items() if value is not None}
        return Groups([name if name in precisions else None for name in matches], precisions)

    def gradient(self, value, precision):
        return None if precision is None else precision * value

    def get_config(self):
        groups = self._groups
        return {
            "precision": self._precision,
            "groups": groups if groups is None or groups == "layer" else dict(groups),
        }

    def __repr__(self):
        config = self.get_config()
        return f"GaussianPrior(precision={config['precision']:g}, groups={config['groups']})"


def _layer_names(paths):
    """The layer of each path, without the model's name, which Keras may or may not put first."""
    layers = [path.split("/")[:-1] or [path] for path in paths]
    if len({layer[0] for layer in layers}) == 1 and all(len(layer) > 1 for layer in layers):
        layers = [layer[1:] for layer in layers]
    return ["/".join(layer) for layer in layers]


@keras.saving.register_keras_serializable(package="keras_sgmcmc")
class DistributionPrior(Prior):
    """Prior given by a TensorFlow Probability distribution of every weight.

    Its log density is evaluated at each sampled variable and summed, so the distribution's batch
    and event shape have to broadcast against every variable: mostly it is scalar.

    Args:
        distribution: A `tfp.distributions` object with a `log_prob`, for instance
            `tfd.StudentT(3.0, 0.0, 1.0)`; or a function without arguments that returns one,
            registered with `keras.saving.register_keras_serializable`, for what cannot be written
            as a class and its parameters.

    Raises:
        ValueError: If `distribution` has no `log_prob`, or if it can't be saved and loaded again;
            the message says what to register instead.

    Example:

    >>> import tensorflow_probability as tfp
    >>> prior = sg.DistributionPrior(tfp.distributions.Laplace(0.0, 0.5))
    >>> optimizer = sg.SGLD(1e-2, train_size=len(x_train), prior=prior)
    """

    def __init__(self, distribution):
        self._function = None
        if not hasattr(distribution, "log_prob") and callable(distribution):
            self._function = distribution
            distribution = distribution()
        if not hasattr(distribution, "log_prob"):
            raise ValueError(
                "`distribution` should be a TensorFlow Probability distribution or a registered "
                f"function that returns one. Received: distribution={distribution!r}"
            )
        self._distribution = distribution
        # At once rather than when training has ended and the model is to be saved.
        self._config = {"distribution": self._serialized()}

    @property
    def distribution(self):
        return self._distribution

    def gradient(self, value, precision):
        import tensorflow as tf

        del precision
        # A new tensor: TFP's bijectors remember the inverse of one they have seen, off the tape.
        value = tf.identity(value)
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(value)
            density = self._distribution.log_prob(tf.cast(value, self._distribution.dtype))
        return -tape.gradient(density, value)

    def _serialized(self):
        if self._function is None:
            return _serialize_distribution(self._distribution)
        name = keras.saving.get_registered_name(self._function)
        if keras.saving.get_registered_object(name) is not self._function:
            raise ValueError(
                f"`distribution` is a function that isn't registered: {self._function!r}. "
                + _REGISTER
            )
        return {"registered_function": name}

    def get_config(self):
        return dict(self._config)

    @classmethod
    def from_config(cls, config):
        description = config["distribution"]
        if not isinstance(description, dict):
            return cls(description)
        if "registered_function" in description:
            name = description["registered_function"]
            function = keras.saving.get_registered_object(name)
            if function is None:
                raise ValueError(
                    f"The prior was made by the function {name!r}, which is not registered in this "
                    "process. Import the module that registers it before loading."
                )
            return cls(function)
        return cls(_deserialize_distribution(description))

    def __repr__(self):
        return f"DistributionPrior({self._function or self._distribution!r})"


_REGISTER = (
    "Write a function without arguments that returns the distribution, decorate it with "
    "`@keras.saving.register_keras_serializable()`, and pass the function: "
    "`DistributionPrior(function)`."
)


def _serialize_distribution(distribution):
    """A distribution as its class name, dtype and parameters, which `json` can write."""
    import tensorflow_probability as tfp

    cls = type(distribution)
    if getattr(tfp.distributions, cls.__name__, None) is not cls:
        raise ValueError(
            f"A {cls.__name__} is not one of `tfp.distributions` and can't be saved. " + _REGISTER
        )
    parameters = {
        name: _serialize_parameter(cls.__name__, name, value)
        for name, value in distribution.parameters.items()
        if value is not None and name != "name"
    }
    return {"distribution_class": cls.__name__, "parameters": parameters}


def _serialize_parameter(owner, name, value):
    import tensorflow as tf
    import tensorflow_probability as tfp

    if isinstance(value, tfp.distributions.Distribution):
        return _serialize_distribution(value)
    if isinstance(value, tf.DType):
        return {"dtype": value.name}
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tf.Variable):
        raise ValueError(
            f"Parameter `{name}` of {owner} is a variable, whose value can't be written into a "
            "config. " + _REGISTER
        )
    if isinstance(value, list | tuple) and not all(isinstance(v, int | float) for v in value):
        return {"sequence": [_serialize_parameter(owner, name, item) for item in value]}
    if isinstance(value, list | tuple | np.ndarray | np.generic | tf.Tensor):
        array = np.asarray(value)
        if array.dtype.kind in "fiub":
            return {"array": array.tolist(), "dtype": array.dtype.name}
    raise ValueError(
        f"Parameter `{name}` of {owner} can't be saved, since it is a {type(value).__name__}. "
        + _REGISTER
    )


def _deserialize_distribution(description):
    import tensorflow_probability as tfp

    name = description["distribution_class"]
    cls = getattr(tfp.distributions, name, None)
    if not (isinstance(cls, type) and issubclass(cls, tfp.distributions.Distribution)):
        raise ValueError(f"{name!r} is not a class of `tfp.distributions`.")
    return cls(
        **{key: _deserialize_parameter(value) for key, value in description["parameters"].items()}
    )


def _deserialize_parameter(value):
    import tensorflow as tf

    if not isinstance(value, dict):
        return value
    if "distribution_class" in value:
        return _deserialize_distribution(value)
    if "sequence" in value:
        return [_deserialize_parameter(item) for item in value["sequence"]]
    if "array" in value:
        return np.array(value["array"], dtype=value["dtype"])
    return tf.dtypes.as_dtype(value["dtype"])


def as_prior(prior):
    """What optimizers take for a prior, as a `Prior` or None."""
    if prior is None or isinstance(prior, Prior):
        return prior
    if isinstance(prior, numbers.Real) and not isinstance(prior, bool):
        return GaussianPrior(prior)
    raise ValueError(
        "`prior` should be a positive number (the precision of a Gaussian), a `GaussianPrior`, a "
        "`DistributionPrior`, or None. For a TFP distribution write `DistributionPrior(...)`. "
        f"Received: prior={prior!r}"
    )
