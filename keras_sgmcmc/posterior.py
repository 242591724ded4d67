"""A set of draws of a model's weights, and the predictions that they make together."""

import copy
import functools
import math
import pathlib
import re
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from keras import tree

from keras_sgmcmc import metrics, predictive, storage
from keras_sgmcmc.diagnostics import tables
from keras_sgmcmc.likelihoods import Bernoulli, Categorical, compiled_likelihoods
from keras_sgmcmc.validation import positive_integer, real_number


class Uncertainty(NamedTuple):
    """What `Posterior.predict_uncertainty` returns; every field has the shape of the mean."""

    mean: Any
    epistemic_std: Any
    observation_std: Any
    total_std: Any


class Posterior:
    """Draws theta_1, ..., theta_S of a Keras model's weights, and their weights w_s (sum 1).

    Averages are over what the outputs mean, never over logits:

        p(y | x, data) = sum_s w_s p(y | x, theta_s)

    What the outputs mean is read from the compiled loss (see `keras_sgmcmc.likelihoods`). The
    network runs in inference mode (no dropout; the moving statistics of the draw itself) on the
    weights as arguments: the live weights, seeds and metrics of `model` are neither read nor
    changed. Predictions do not depend on the order of the draws, except for rounding.

    A Posterior does not change, and shares no memory with the model. `len(p)` is the number of
    draws; `p[i]` is `p.weights(i)`; a slice, an array of indices or a boolean mask gives a smaller
    Posterior.

    Args:
        model: The built Keras model.
        variables: The Keras variables of the model that each draw holds values for: the sampled
            ones and the state that goes with them, e.g. moving statistics.
        draws: One list of arrays for each draw, aligned with `variables`. They are copied, unless
            they own their memory and are read-only already, or lie on disk (`load`), where they are
            read whenever they are used.
        steps: The optimizer step (`optimizer.iterations`) of each draw.
        weights: Non-negative weight of each draw, of any scale, e.g. its step size. Defaults to
            None, all alike.
        common: Pairs (variable, value) for variables of the model that are not in `variables`
            (frozen layers, seeds). Those not listed keep their value of now. Defaults to None.
        chain_ids: Integer for each draw, the chain that it is from. Defaults to None, one chain.

    Attributes:
        steps: Integer array, shape (S,).
        draw_weights: Array of shape (S,) that sums to 1.
        chain_ids: Integer array, shape (S,). `concatenate` numbers the chains anew.
        seconds: Wall time that the draws took, all chains together, or None if it is not known.
            A part of a Posterior does not know it.

    Raises:
        ValueError: If the number or the shape of the values does not fit.

    Example:

    ```python
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])
    model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    draws = [[np.ones((2, 3)), np.zeros(3)], [np.zeros((2, 3)), np.ones(3)]]
    posterior = Posterior(model, model.trainable_variables, draws, steps=[10, 20])
    probabilities = posterior.predict(np.zeros((5, 2)))
    ```
    """

    def __init__(self, model, variables, draws, steps, weights=None, common=None, chain_ids=None):
        self.model = model
        self.variables = list(variables)
        self._draws = [self._arrays(i, draw) for i, draw in enumerate(draws)]
        drawn = {id(v) for v in self.variables}
        given = {id(v): value for v, value in common or ()}
        if not drawn | given.keys() <= {id(v) for v in model.variables}:
            raise ValueError("`variables` and `common` may only hold variables of `model`.")
        self._others = [v for v in model.variables if id(v) not in drawn]
        self._common = [
            _read_only(v, given[id(v)] if id(v) in given else keras.ops.convert_to_numpy(v))
            for v in self._others
        ]
        self._set_labels(
            steps, weights, np.zeros(len(self._draws)) if chain_ids is None else chain_ids
        )
        # Shared with all Posteriors made from this one, so that they are traced once.
        self._functions = {}

    def _arrays(self, index, draw):
        if isinstance(draw, storage.StoredDraw):
            return draw
        draw = list(draw)
        if len(draw) != len(self.variables):
            raise ValueError(
                f"A draw needs one array for each of {len(self.variables)} variables. "
                f"Received: {len(draw)} arrays in draw {index}"
            )
        return [_read_only(v, value) for v, value in zip(self.variables, draw, strict=True)]

    def _set_labels(self, steps, weights, chain_ids):
        self.seconds = None
        self.steps = np.array(steps, dtype="int64").reshape(-1)
        self.chain_ids = np.array(chain_ids, dtype="int64").reshape(-1)
        self._weights = None if weights is None else np.array(weights, dtype="float64").reshape(-1)
        labels = {"steps": self.steps, "weights": self._weights, "chain_ids": self.chain_ids}
        for name, value in labels.items():
            if value is not None and len(value) != len(self._draws):
                raise ValueError(
                    f"`{name}` needs one entry for each of {len(self._draws)} draws. "
                    f"Received: {len(value)} entries"
                )
        raw = np.ones(len(self._draws)) if self._weights is None else self._weights
        if len(raw) and not (np.all(np.isfinite(raw) & (raw >= 0)) and raw.sum() > 0):
            raise ValueError(
                "`weights` must be finite, not negative, and not all zero. "
                f"Received: weights={self._weights}"
            )
        self.draw_weights = raw / raw.sum() if len(raw) else raw
        for label in (self.steps, self.chain_ids, self.draw_weights):
            label.setflags(write=False)

    def _replace(self, draws, steps, weights, chain_ids):
        new = copy.copy(self)
        new._draws = draws
        new._set_labels(steps, weights, chain_ids)
        return new

    @classmethod
    def concatenate(cls, posteriors):
        """All draws of several chains as one Posterior, on the model of the first.

        Draw weights keep their scale: a chain with larger steps counts for more. Which chain a draw
        is from stays known: see `chain_ids`.

        Args:
            posteriors: Posteriors of models of one architecture: the same variables in the same
                order, by path (numbers that Keras appended to names aside) and shape, and equal
                frozen weights.

        Raises:
            ValueError: If the models differ, or only some chains have draw weights.
        """
        posteriors = list(posteriors)
        if not posteriors:
            raise ValueError("`concatenate` needs at least one Posterior.")
        first = posteriors[0]
        weights = {id(v) for v in first.model.weights}
        for other in posteriors[1:]:
            ours, theirs = first._architecture(), other._architecture()
            if ours != theirs:
                differing = [pair for pair in zip(ours, theirs, strict=False) if len(set(pair)) > 1]
                raise ValueError(
                    "Only chains of one architecture can be concatenated: the same variables in "
                    f"the same order, drawn or common. Received: {len(ours)} and {len(theirs)} "
                    f"variables, of which these differ first: {differing[:1]}"
                )
            for v, a, b in zip(first._others, first._common, other._common, strict=True):
                if id(v) in weights and not np.array_equal(a, b):
                    raise ValueError(
                        f"The frozen variable {v.path} differs between the chains, so their draws "
                        "are not of one model. Start all chains from the same frozen weights."
                    )
        if len({p._weights is None for p in posteriors}) > 1:
            raise ValueError("Either all chains or none must have draw weights.")
        chain_ids, count = [], 0
        for p in posteriors:
            chains, inverse = np.unique(p.chain_ids, return_inverse=True)
            chain_ids.append(count + inverse)
            count += len(chains)
        whole = first._replace(
            [draw for p in posteriors for draw in p._draws],
            np.concatenate([p.steps for p in posteriors]),
            None if first._weights is None else np.concatenate([p._weights for p in posteriors]),
            np.concatenate(chain_ids),
        )
        if all(p.seconds is not None for p in posteriors):
            whole.seconds = sum(p.seconds for p in posteriors)
        return whole

    def _architecture(self):
        # Keras numbers the layers of a second model of the same function: dense, then dense_1.
        return [
            (kind, re.sub(r"_\d+(?=/|$)", "", v.path), tuple(v.shape))
            for kind, variables in (("drawn", self.variables), ("common", self._others))
            for v in variables
        ]

    def __len__(self):
        return len(self._draws)

    def __iter__(self):
        return (self.weights(i) for i in range(len(self)))

    def __getitem__(self, index):
        if isinstance(index, (int, np.integer)):
            return self.weights(index)
        index = np.arange(len(self))[index]
        weights = None if self._weights is None else self._weights[index]
        return self._replace(
            [self._draws[i] for i in index], self.steps[index], weights, self.chain_ids[index]
        )

    def __repr__(self):
        size = sum(math.prod(v.shape) for v in self.variables)
        span = f", steps {self.steps[0]} to {self.steps[-1]}" if len(self) else ""
        return (
            f"<Posterior of {self.model.name!r}: {len(self)} draws{span}, each of {size:,} values "
            f"in {len(self.variables)} variables>"
        )

    def weights(self, index):
        """Draw `index` as a list of arrays in the order of `model.set_weights`."""
        values = zip(
            self.variables + self._others, [*self._draws[index], *self._common], strict=True
        )
        values = {id(v): value for v, value in values}
        return [values[id(v)].copy() for v in self.model.weights]

    @property
    def draws(self):
        """Dict: path of a variable -> its draws, shape (S, *shape); a copy.

        A path that several variables share gets a suffix: "dense/kernel", "dense/kernel_1".
        """
        result = {}
        for i, (name, v) in enumerate(self._named_variables().items()):
            values = [draw[i] for draw in self._draws]
            result[name] = np.stack(values) if values else np.empty((0, *v.shape))
        return result

    def _named_variables(self):
        return storage.named(self.variables)

    @classmethod
    def load(cls, directory, model=None, verify=False):
        """The draws in a directory of `PosteriorSamples(directory=...)`, or of `save`.

        They stay on disk and are read one by one when they are used, so that predicting holds one
        at a time. Draws that are damaged or missing are left out, with a warning. Chains are in the
        order of their numbers, their draws in that of their steps.

        Args:
            directory: What was given there; or the directory of one chain in it.
            model: The model, built and compiled. Defaults to None: made anew from the manifest.
            verify: Whether to read everything now and compare check sums, rather than when a draw
                is used, which then raises `StorageError`. Defaults to False.

        Raises:
            OSError: If there is nothing to read there (`keras_sgmcmc.storage.StorageError`).
            ValueError: If the draws are of another model, or it can't be made.
        """
        chains = []
        for path in storage.chain_directories(directory):
            manifest = storage.read_manifest(path)
            if model is None:
                model = storage.model_of(path, manifest)
            variables, others = storage.variables_of(model, manifest)
            values = storage.read_common(path, manifest)
            draws = storage.find_draws(path, manifest, verify)
            weights = None
            if manifest["sampling"].get("step_weights"):
                weights = [draw.weight for draw in draws]
            names = [entry["name"] for entry in manifest["common"]]
            common = [(v, values[name]) for v, name in zip(others, names, strict=True)]
            chain = cls(model, variables, draws, [draw.step for draw in draws], weights, common)
            chain.seconds = manifest["seconds"]
            chains.append(chain)
        return chains[0] if len(chains) == 1 else cls.concatenate(chains)

    def save(self, directory):
        """Write all draws to a new directory, as `load` and `PosteriorSamples` have them.

        One safetensors file for each draw and a manifest for each chain; see
        `keras_sgmcmc.storage`.

        Raises:
            OSError: If the directory holds draws already, or can't be written to.
        """
        sampling = {"step_weights": self._weights is not None}
        others = storage.named(self._others)
        manifest = storage.manifest_of(self.model, self._named_variables(), others, sampling)
        common = dict(zip(others, self._common, strict=True))
        for chain in np.unique(self.chain_ids):
            store = storage.ChainStore(
                pathlib.Path(directory) / f"chain-{chain}", manifest, new=True
            )
            store.open(0, common)
            for i in np.flatnonzero(self.chain_ids == chain):
                weight = 1.0 if self._weights is None else float(self._weights[i])
                store.append(int(self.steps[i]), list(self._draws[i]), weight)
            alone = self.seconds is not None and len(np.unique(self.chain_ids)) == 1
            store.write_manifest(self.seconds if alone else None)

    def by_chain(self, values):
        """Values of all draws, shape (S, ...), chain by chain: shape (C, n, ...).

        The layout of `keras_sgmcmc.diagnostics` and of ArviZ, e.g. for
        `p.by_chain(p.predict(x, reduce=None))`. A chain's draws are in the order of their steps; of
        chains of unequal length the last n draws are taken, n those of the shortest.

        Raises:
            ValueError: If there is not one entry for each draw.
        """
        values = np.asarray(values)
        if not len(self) or values.shape[:1] != (len(self),):
            raise ValueError(
                f"`values` needs one entry for each of {len(self)} draws, at least one, along its "
                f"first axis. Received: shape {values.shape}"
            )
        chains = [np.flatnonzero(self.chain_ids == chain) for chain in np.unique(self.chain_ids)]
        shortest = min(len(chain) for chain in chains)
        ordered = [chain[np.argsort(self.steps[chain], kind="stable")] for chain in chains]
        return values[np.stack([chain[-shortest:] for chain in ordered])]

    def predict(self, x, batch_size=32, reduce="mean", from_logits=None, verbose="auto"):
        """Posterior predictive mean, sum_s w_s E[y | x, theta_s]; class probabilities.

        Args:
            x: Array or tensor, a list, tuple or dict of them as the model takes it, or a finite
                `tf.data.Dataset` of x, (x, y) or (x, y, sample_weight), read once.
            batch_size: Rows of a forward pass, for a Dataset too. Defaults to 32.
            reduce: `"mean"` (the default) or None for the mean of y under each draw, unweighted.
            from_logits: Whether the outputs are logits. Defaults to None, as the compiled loss
                says; needed if it does not say.
            verbose: `"auto"` (the default) or 1 shows a progress bar, 0 does not.

        Returns:
            Array of shape (n, ...), or (S, n, ...) for `reduce=None`; for a model of several
            outputs a structure of them. Averages are formed in float64.

        Raises:
            ValueError: If there is no draw, if it is not known whether outputs are logits, or if
                `x` has no rows or arrays of different lengths.
        """
        if reduce not in ("mean", None):
            raise ValueError(f"`reduce` should be 'mean' or None. Received: reduce={reduce!r}")
        accumulator = predictive.Moments if reduce else predictive.Stack
        return self._run("mean", accumulator, (x,), batch_size, verbose, from_logits)[0][0]

    def predict_moments(self, x, batch_size=32, from_logits=None, verbose="auto"):
        """Mean and standard deviation over the draws of mu_s = E[y | x, theta_s].

            mean = sum_s w_s mu_s,    epistemic_std^2 = sum_s w_s (mu_s - mean)^2

        The population form (no S - 1): the draws are the mixture that predicts. Observation
        noise is not in it; see `predict_uncertainty`. Arguments and errors as for `predict`.

        Returns:
            mean, epistemic_std: arrays of shape (n, ...) in the units of y.
        """
        moments, _ = self._run("mean", predictive.Moments, (x,), batch_size, verbose, from_logits)
        return tuple(moments)

    def predict_uncertainty(self, x, batch_size=32, from_logits=None, verbose="auto"):
        """Mean and standard deviation of y itself, split by where the spread comes from.

            total_std^2 = epistemic_std^2 + observation_std^2
                        = Var_s[mu_s]     + E_s[sigma_s^2],   sigma_s^2 = Var[y | x, theta_s]

        sigma^2 is the likelihood's: noise_std^2 of `GaussianNegativeLogLikelihood`, p (1 - p) for
        classes, and d/2 for Keras' `"mse"` on d outputs, which has no factor 1/2. Arguments and
        errors as for `predict`.

        Returns:
            `Uncertainty`, a named tuple (mean, epistemic_std, observation_std, total_std) of arrays
            of shape (n, ...) in the units of y.

        Raises:
            ValueError: Also if the loss is no known density, naming those that are.
        """
        moments, _ = self._run(
            "mean_variance", predictive.Moments, (x,), batch_size, verbose, from_logits
        )
        (mean, variance), (epistemic, _) = moments
        noise = tree.map_structure(np.sqrt, variance)
        total = tree.map_structure(np.hypot, epistemic, noise)
        return Uncertainty(mean, epistemic, noise, total)

    def log_predictive_density(self, x, y=None, batch_size=32, verbose="auto", reduce="mean"):
        """Log posterior predictive density of every row, log sum_s w_s p(y | x, theta_s).

        Summed in log space, so that densities too small for a float count. The density of a row
        is normalised, and joint over its outputs; see `keras_sgmcmc.likelihoods`.

        Args:
            x: As for `predict`; a Dataset holds y as well.
            y: Targets, as in `model.fit`.
            batch_size: Rows of a forward pass. Defaults to 32.
            verbose: `"auto"` (the default) or 1 shows a progress bar, 0 does not.
            reduce: `"mean"` (the default) or None for log p(y | x, theta_s) of each draw.

        Returns:
            Array of shape (n,), or (S, n) for `reduce=None`.

        Raises:
            ValueError: Also if the loss is no density of y that is known, naming those that are.
        """
        if reduce not in ("mean", None):
            raise ValueError(f"`reduce` should be 'mean' or None. Received: reduce={reduce!r}")
        accumulator = predictive.LogMean if reduce else predictive.Stack
        (densities,), _ = self._run("log_prob", accumulator, (x, y), batch_size, verbose)
        return densities

    def predictive_quality(self, x, y=None, batch_size=32, verbose="auto"):
        """How good the predictions are, as a dict of the metrics in `keras_sgmcmc.metrics`.

        For every model whose loss is a density: `negative_log_likelihood`, the mean over the rows
        of -log sum_s w_s p(y | x, theta_s). For one trained with a Keras crossentropy also
        `brier_score` and `expected_calibration_error` of the averaged probabilities, and the means
        of `predictive_entropy` and of `mutual_information`, its part that is due to not knowing the
        weights, both in nats.

        Args:
            x: As for `predict`; a Dataset holds y as well, and is read twice.
            y: Targets, as in `model.fit`.
            batch_size: Rows of a forward pass. Defaults to 32.
            verbose: `"auto"` (the default) or 1 shows a progress bar, 0 does not.

        Raises:
            ValueError: Also if the loss is no density of y that is known, or the model has several
                outputs.
        """
        data = (x, y)
        (p, *entropies), (y, _) = self._run("mean", predictive.Entropies, data, batch_size, verbose)
        if tree.is_nested(p):
            raise ValueError(
                "The model has several outputs. Give those of one of them, predict(x)[...], to the "
                "functions of `keras_sgmcmc.metrics`."
            )
        densities = self.log_predictive_density(*data, batch_size, verbose)
        result = {"negative_log_likelihood": float(-np.mean(densities, dtype="float64"))}
        (likelihood,) = compiled_likelihoods(self.model, p)
        if isinstance(likelihood, Categorical):
            entropy = entropies[0].sum(axis=-1)
        elif isinstance(likelihood, Bernoulli):
            p, entropy = np.stack([1.0 - p, p], axis=-1), entropies[0] + entropies[1]
            y = y.reshape(p.shape[:-1])
        else:
            return result
        total = metrics.predictive_entropy(p)
        return {
            **result,
            "brier_score": metrics.brier_score(p, y),
            "expected_calibration_error": metrics.expected_calibration_error(p, y),
            "predictive_entropy": float(np.mean(total)),
            "mutual_information": float(np.mean(total - entropy)),
        }

    def summary(self, x=None, *, seconds=None, max_elements=200, batch_size=32):
        """How well the chains have mixed: a table with one row for each variable.

        A row is about the worst of a variable's elements. With `x` there are rows for the
        predictions too, E[y | x, theta_s]. They are what to judge a network by: its weights may be
        permuted and scaled against each other without changing anything, so that they mix badly,
        and disagree between chains, where the predictions do not.

        At most `max_elements` elements of a variable are looked at, evenly spaced from its first to
        its last in C order, and as many predictions, of evenly spaced rows; so it takes about 4 ms
        an element and no memory to speak of, whatever the size of the network. For a row for every
        element of a small model use `arviz.summary(posterior.to_arviz())`.

        | column | meaning |
        |---|---|
        | `size`, `checked` | number of elements, and how many were looked at |
        | `still` | of these, how many never change or are not finite; left out of the rest |
        | `r_hat` | the largest R-hat; of a single chain, its halves are compared |
        | `r_hat_above_1.01` | the share of elements above 1.01 |
        | `ess_bulk`, `ess_bulk_median` | effective number of draws, least and median |
        | `ess_tail` | least effective number for the 5 % and 95 % quantiles |
        | `ess_mean`, `ess_square` | the same for means and for variances |
        | `mcse_mean` | the largest standard error of a mean, in units of the element |
        | `ess_per_second` | `ess_bulk` / `seconds`, if the time is known |

        Weighted draws count by Kish's formula; see `keras_sgmcmc.diagnostics`. Chains that are told
        apart by `chain_ids` are compared, the last n draws of each, n those of the shortest.

        Args:
            x: Array, or list, tuple or dict of them as the model takes it. Defaults to None.
            seconds: Wall time that the draws took. Defaults to None: `self.seconds`.
            max_elements: Largest number of elements of a row. Defaults to `200`.
            batch_size: Rows of a forward pass. Defaults to 32.

        Returns:
            A pandas DataFrame, whose `attrs` hold the numbers of `chains` and of `draws` a chain,
            and `kish`, Kish's effective number of all draws by their weights alone.

        Raises:
            ValueError: If there are fewer than 4 draws a chain, or an argument is out of range.
            ImportError: If ArviZ is not installed.

        Warns:
            If elements never change.
        """
        if seconds is None:
            seconds = self.seconds
        else:
            seconds = real_number("seconds", seconds, positive=True)
        max_elements = positive_integer("max_elements", max_elements)
        return tables.summary(self, x, seconds, max_elements, batch_size)

    def to_arviz(self, x=None, y=None, batch_size=32):
        """The draws as an `arviz.InferenceData`, for all that ArviZ can do with them.

        Holds every weight of every draw in memory. Chains are as in `by_chain`.

        | group | variables |
        |---|---|
        | `posterior` | the variables by their path, with dots for slashes: "dense.kernel" |
        | `sample_stats` | `step` and `weight` of a draw; with `y`, `energy` = -log p(y, all rows) |
        | `predictions` | with `x`, E[y | x, theta_s]: `predictions`, or "predictions.<output>" |
        | `log_likelihood` | with `y`, log p(y_i | x_i, theta_s) of each row |

        Dimensions are named after the layer: "dense_out" is the last axis of all variables of
        `dense` in which it has one length, "dense.kernel_dim_0" another axis of its kernel.
        ArviZ knows no weights of draws, and counts all alike.

        Args:
            x: As for `predict`. Defaults to None.
            y: Targets, as in `model.fit`. Defaults to None.
            batch_size: Rows of a forward pass. Defaults to 32.

        Raises:
            ValueError: If there is no draw; as `log_predictive_density`, with `y`.
            ImportError: If ArviZ is not installed.
        """
        return tables.to_arviz(self, x, y, batch_size)

    def evaluate(self, x, y=None, batch_size=32, sample_weight=None, verbose="auto"):
        """The compiled loss and metrics of the averaged prediction, as a dict.

        The loss and fresh copies of the metrics receive `predict(x)`; where they expect logits,
        log p or logit(p), so that a crossentropy is -log of the averaged probability. For a
        regression loss it is the loss of the mean, not the negative log predictive density.
        Penalties of layers are left out.

        Args:
            x: As for `predict`; a Dataset holds y and sample weights as well.
            y: Targets, as in `model.evaluate`.
            batch_size: Rows of a forward pass. Defaults to 32.
            sample_weight: As in `model.evaluate`. Defaults to None.
            verbose: `"auto"` (the default) or 1 shows a progress bar, 0 does not.

        Raises:
            ValueError: Also if the model is not compiled with a loss, or its loss reads something
                else than a mean.
        """
        compiled = getattr(self.model, "_compile_config", None)
        if compiled is None or compiled.config["loss"] is None:
            raise ValueError(
                "`evaluate` needs the model's loss and metrics: call model.compile(...) first."
            )
        data = (x, y, sample_weight)
        (mean, _), (y, sample_weight) = self._run(
            "mean", predictive.Moments, data, batch_size, verbose
        )
        likelihoods = compiled_likelihoods(self.model, mean)
        outputs = [a.outputs(m) for a, m in zip(likelihoods, tree.flatten(mean), strict=True)]
        if ("evaluate", compiled) not in self._functions:
            self._functions["evaluate", compiled] = predictive.compile_identity(
                self.model, compiled.config
            )
        return self._functions["evaluate", compiled].evaluate(
            tree.pack_sequence_as(mean, outputs),
            y,
            batch_size=batch_size,
            sample_weight=sample_weight,
            verbose=0,
            return_dict=True,
        )

    def _run(self, head, accumulator, data, batch_size, verbose, from_logits=None):
        """Accumulates over the draws what `head` makes of the outputs, chunk by chunk of rows.

        Returns:
            The results of the accumulator, each in the structure of the head, and (y,
            sample_weight) of all rows.
        """
        if not len(self):
            raise ValueError(
                "The posterior holds no draw, so it predicts nothing. Training may have ended "
                "before the burn-in did: check `burn_in` and `thinning` against the number of "
                "optimizer steps (epochs times batches)."
            )
        batch_size = positive_integer("batch_size", batch_size)
        chunks = predictive.chunks(*data, batch_size=batch_size)
        total = len(chunks) * len(self) if isinstance(chunks, list) else None
        show = keras.config.is_interactive_logging_enabled() if verbose == "auto" else verbose
        bar = keras.utils.Progbar(total, verbose=int(bool(show)), interval=0.5, unit_name="draw")
        common = [tf.constant(value) for value in self._common]
        size = tf.constant(batch_size, tf.int32)
        results, rest = [], []
        for x, y, sample_weight in chunks:
            if len(data) > 1 and y is None:
                raise ValueError("Targets are needed: pass `y`, or a Dataset of (x, y).")
            rest.append((y, sample_weight))
            batch = tree.map_structure(tf.constant, (x, y) if head == "log_prob" else (x,))
            function = self._function(head, from_logits, batch)
            folds, begin, length = None, 0, 1
            while begin < len(self):
                arrays = predictive.stacked(self._draws[begin : begin + length])
                weights = self.draw_weights[begin : begin + length]
                values = function(len(weights), arrays, common, batch, size)
                flat = [value.numpy() for value in tree.flatten(values)]
                folds = folds or [accumulator() for _ in flat]
                for fold, value in zip(folds, flat, strict=True):
                    for weight, one in zip(weights, value, strict=True):
                        fold.add(weight, one)
                begin += len(weights)
                bar.add(len(weights))
                # The first draw by itself tells what one takes.
                nbytes = sum(array.nbytes for array in [*arrays, *flat]) // len(weights)
                length = max(1, predictive.GROUP_BYTES // max(1, nbytes))
            parts = zip(*(fold.result() for fold in folds), strict=True)
            results.append([tree.pack_sequence_as(values, part) for part in parts])
        if total is None:
            bar.update(len(results) * len(self), finalize=True)
        join = functools.partial(predictive.concatenate, axis=accumulator.axis)
        return [join(*part) for part in zip(*results, strict=True)], predictive.concatenate(*rest)

    def _function(self, head, from_logits, batch):
        specs = tree.map_structure(lambda a: tf.TensorSpec((None, *a.shape[1:]), a.dtype), batch)
        key = (head, from_logits, getattr(self.model, "_compile_config", None), str(specs))
        if key not in self._functions:
            self._functions[key] = predictive.trace(
                self.model, self.variables, self._others, head, from_logits, specs
            )
        return self._functions[key]


def _read_only(variable, value):
    """`value` as an array in the variable's dtype that nobody can write to."""
    dtype = tf.as_dtype(variable.dtype).as_numpy_dtype
    array = np.asarray(value)
    if tuple(array.shape) != tuple(variable.shape):
        raise ValueError(
            f"The variable {variable.path} has shape {tuple(variable.shape)}. "
            f"Received: a value of shape {array.shape}"
        )
    if not array.flags.owndata or array.flags.writeable or array.dtype != dtype:
        array = np.array(array, dtype=dtype)
        array.setflags(write=False)
    return array
