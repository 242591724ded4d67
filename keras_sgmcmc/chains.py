"""Several chains of one model."""

import os
import pathlib

import keras

from keras_sgmcmc import random
from keras_sgmcmc.callbacks.backup_and_restore import BackupAndRestore
from keras_sgmcmc.callbacks.posterior_samples import PosteriorSamples
from keras_sgmcmc.data import Minibatches
from keras_sgmcmc.optimizers.base import Sampler
from keras_sgmcmc.posterior import Posterior
from keras_sgmcmc.validation import positive_integer


def sample_chains(
    build_model,
    data,
    *,
    chains=4,
    burn_in,
    thinning=1,
    epochs=1,
    directory=None,
    seed=None,
    callbacks=None,
    verbose="auto",
):
    """Sample several chains one after the other, and merge their draws.

    Chain k has the seed `seed + k`: for the initial weights that `build_model` draws, for the
    sampler's noise (whatever seed it was given: two samplers of one config have the same noise),
    and for the batches of `minibatches`. At the end the largest R-hat and the least effective
    number of draws are printed, if ArviZ is installed.

    With a directory, draws are written as they come, and a checkpoint every epoch: called again
    after it was broken off, chains that are complete are not sampled again, and the one that was
    under way goes on.

    Args:
        build_model: Function without arguments that returns a new model, built and compiled with a
            sampler.
        data: `minibatches`, of which each chain gets its own; or a function of a chain's seed that
            returns what `fit` takes.
        chains: Number of chains. Defaults to `4`.
        burn_in, thinning: As for `PosteriorSamples`.
        epochs: As for `fit`. Defaults to `1`.
        directory: Where to keep draws and checkpoints. Defaults to None: draws in memory.
        seed: Integer. Defaults to None: drawn.
        callbacks: Function of the chain's number that returns a list of new callbacks, such as
            `GradientNoise`. Defaults to None.
        verbose: As for `fit`; 0 prints nothing.

    Returns:
        A `Posterior` of all draws, on the model of the first chain; `chain_ids` tells them apart.

    Raises:
        ValueError: If an argument is out of range, or `build_model` returns the same model twice,
            or one that is not compiled with a sampler.

    Example:

    >>> posterior = sg.sample_chains(
    ...     build_model, sg.minibatches(x, y, 100), chains=4, burn_in=5_000, thinning=100, epochs=50
    ... )
    >>> posterior.summary(x_test)
    """
    chains = positive_integer("chains", chains)
    seed = random.as_seed(seed)
    verbosity = {} if verbose == "auto" else {"verbose": verbose}
    posteriors = []
    for number in range(chains):
        chain_seed = (seed + number) % 2**32
        keras.utils.set_random_seed(chain_seed)
        model = build_model()
        optimizer = _sampler(model)
        if any(model is posterior.model for posterior in posteriors):
            raise ValueError(
                "`build_model` should return a new model each time it is called. Received: the "
                "same model again"
            )
        optimizer.reseed(chain_seed)
        samples = PosteriorSamples(burn_in, thinning, directory=directory)
        attached = [samples, *(callbacks(number) if callbacks else [])]
        if directory is not None:
            backup = pathlib.Path(directory) / f"backup-{chain_seed}"
            attached.insert(0, BackupAndRestore(backup, delete_checkpoint=False))
        if verbose:
            print(f"chain {number + 1} of {chains}, seed {chain_seed}")
        model.fit(
            data.reseeded(chain_seed) if isinstance(data, Minibatches) else data(chain_seed),
            epochs=epochs,
            callbacks=attached,
            shuffle=False,
            **verbosity,
        )
        if directory is not None:
            path = os.path.join(directory, f"chain-{chain_seed}")
            posteriors.append(Posterior.load(path, model))
        else:
            posteriors.append(samples.posterior)
    merged = Posterior.concatenate(posteriors)
    if verbose:
        print(_report(merged, chains))
    return merged


def _sampler(model):
    optimizer = getattr(model, "optimizer", None)
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    if not isinstance(optimizer, Sampler):
        raise ValueError(
            "`build_model` should return a model that is compiled with a sampler, such as `SGLD`. "
            f"Received: optimizer={optimizer!r}"
        )
    return optimizer


def _report(posterior, chains):
    line = f"{chains} chains, {len(posterior)} draws"
    try:
        table = posterior.summary()
    except ImportError:
        return line + '; for R-hat install "keras-sgmcmc[diagnostics]"'
    return (
        f"{line}: R-hat at most {table['r_hat'].max():.3f}, effective draws at least "
        f"{table['ess_bulk'].min():.0f} (of weights; `summary(x)` tells those of predictions)"
    )
