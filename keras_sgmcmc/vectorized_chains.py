"""Several chains of one small model as one model: stacked weights that a single step moves."""

import keras
import numpy as np
import tensorflow as tf
from keras import tree

from keras_sgmcmc.fit_run import layers_with_statistics
from keras_sgmcmc.optimizers.base import CLIPPING
from keras_sgmcmc.optimizers.psgld import pSGLD
from keras_sgmcmc.optimizers.sgld import SGLD
from keras_sgmcmc.posterior import Posterior

# Methods that move every weight by its own gradient alone, so that no chain sees another.
_ELEMENTWISE = (SGLD, pSGLD)


class StackedChains(keras.Model):
    """The chains of one model as a model whose weights have a first axis of chains.

    A batch of C S rows is one batch of S rows for each of C chains, in their order; so are the
    outputs. The loss, a mean over all rows, is the mean of the chains' losses; the sampler moves
    each chain by the gradient of its own, and by its own noise.

    Args:
        models: The chains, built models of one architecture; the first is compiled with a sampler.
        seed: Seed of the first chain's noise; those of the others follow it.

    Raises:
        ValueError: If chains of this model can't be stacked.
    """

    def __init__(self, models, seed):
        super().__init__(autocast=False, name=f"{models[0].name}_chains")
        template = models[0]
        _check(template)
        # Not tracked: its variables only lend their place to those of a chain.
        vars(self)["template"] = template
        self.stacked_chains = len(models)
        self._stacked = []
        for variables in zip(*(model.trainable_variables for model in models), strict=True):
            first = variables[0]
            values = np.stack([keras.ops.convert_to_numpy(v) for v in variables])
            stacked = keras.Variable(values, dtype=first.dtype, name=first.name)
            # A prior chooses its groups by the paths of the model's own variables.
            stacked._path = first.path
            self._stacked.append(stacked)
        self.built = True
        config = dict(template._compile_config.config)
        sampler = config.pop("optimizer")
        sampler = type(sampler).from_config(sampler.get_config())
        sampler.reseed(seed)
        sampler.stacked_chains = self.stacked_chains
        self.compile(optimizer=sampler, **config)

    @property
    def operations_a_row(self):
        """Floating-point operations of a step for each row of a batch."""
        return 6 * sum(int(np.prod(v.shape[1:])) for v in self._stacked)

    def call(self, x, training=None):
        template, chains = self.template, self.stacked_chains
        arguments = {"training": training} if template._call_has_training_arg else {}

        def one(given):
            values, rows = given
            mapping = list(zip(template.trainable_variables, values, strict=True))
            with keras.StatelessScope(state_mapping=mapping):
                return template(rows, **arguments)

        def split(rows):
            return tf.reshape(rows, [chains, -1, *rows.shape[1:]])

        def joined(outputs):
            return tf.reshape(outputs, [-1, *outputs.shape[2:]])

        values = [tf.convert_to_tensor(v) for v in self._stacked]
        outputs = tf.vectorized_map(one, (values, tree.map_structure(split, x)))
        return tree.map_structure(joined, outputs)

    def posterior(self, stacked):
        """The draws of a `Posterior` of this model, as those of the chains of the model itself."""
        draws = [stacked.weights(index) for index in range(len(stacked))]
        whole = Posterior(
            self.template,
            self.template.trainable_variables,
            [
                [array[chain] for array in draw]
                for chain in range(self.stacked_chains)
                for draw in draws
            ],
            np.tile(stacked.steps, self.stacked_chains),
            chain_ids=np.repeat(np.arange(self.stacked_chains), len(draws)),
        )
        whole.seconds = stacked.seconds
        return whole


def _check(model):
    sampler = model.optimizer
    if type(sampler) not in _ELEMENTWISE:
        raise ValueError(
            "`vectorized=True` is for samplers that move every weight by its own gradient alone, "
            "SGLD and pSGLD: others would mix the chains. Sample them one by one. "
            f"Received: optimizer={sampler!r}"
        )
    if getattr(sampler, "include_gamma", False):
        raise ValueError(
            "`include_gamma` works out the Hessian of all chains as that of one model: leave it "
            "out, or sample one by one. Received: include_gamma=True"
        )
    clipping = [name for name in CLIPPING if getattr(sampler, name) is not None]
    if clipping:
        raise ValueError(
            f"`{clipping[0]}` would clip the gradients of all chains together: leave it out, or "
            f"sample one by one. Received: {clipping[0]}={getattr(sampler, clipping[0])}"
        )
    if not model.built:
        raise ValueError(
            "`build_model` should return a built model for `vectorized=True`: give its inputs' "
            f"shape, or call it once. Received: {model!r}"
        )
    if type(model).train_step is not keras.Model.train_step:
        raise ValueError(
            "`vectorized=True` takes the place of `train_step`, and this model has one of its own: "
            f"sample its chains one by one. Received: {type(model).__name__}"
        )
    random = [layer for layer in model._flatten_layers() if layer._seed_generators]
    moving = [layer.name for layer in [*random, *layers_with_statistics(model)]]
    if moving:
        raise ValueError(
            f"`vectorized=True` is for models without a state, and {moving} have one (statistics "
            "of batches, or the seed of a random layer): sample their chains one by one."
        )
    penalised = [v.path for v in model.trainable_variables if v.regularizer or v.constraint]
    if penalised or model.losses:
        raise ValueError(
            "`vectorized=True` knows neither regularizers nor constraints: use `prior=`, or sample "
            f"the chains one by one. Received: {penalised or model.losses}"
        )
