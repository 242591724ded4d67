"""Several chains of one model."""

import contextlib
import os
import pathlib
import queue
import threading
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait

import keras
import tensorflow as tf

from keras_sgmcmc import random
from keras_sgmcmc.callbacks.backup_and_restore import BackupAndRestore
from keras_sgmcmc.callbacks.posterior_samples import PosteriorSamples
from keras_sgmcmc.data import Minibatches
from keras_sgmcmc.optimizers.base import Sampler
from keras_sgmcmc.posterior import Posterior
from keras_sgmcmc.validation import positive_integer
from keras_sgmcmc.vectorized_chains import StackedChains


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
    devices=None,
    vectorized=False,
    verbose="auto",
):
    """Sample several chains, and merge their draws.

    Chains run one after the other, or, where there are several devices, one on each at a time, in
    threads of this process. That changes no draw.

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
        devices: Names of the devices to run on, such as `["GPU:0", "GPU:1"]`; one that is named
            twice runs two chains at a time, for which small models on a processor of several cores
            leave room. Defaults to None: all GPUs (or TPU cores) if there are several, and else one
            chain at a time where TensorFlow puts it.
        vectorized: Whether all chains are one program that moves their stacked weights, each on
            batches of its own: on a GPU, or of small models. For SGLD and pSGLD, models without a
            state (statistics of batches, dropout), and `minibatches`; draws stay in memory.
            `callbacks` is called once, with 0, and what it returns sees all chains as one model.
            The noise is not that of the chains one by one. Defaults to False.
        verbose: As for `fit`; 0 prints nothing. Of chains that run at a time one bar shows the
            epochs of all.

    Returns:
        A `Posterior` of all draws, on the model of the first chain; `chain_ids` tells them apart.

    Raises:
        ValueError: If an argument is out of range, or `build_model` returns the same model twice,
            or one that is not compiled with a sampler, or, for several devices, not built; with
            `vectorized=True`, if the sampler, the model or the data are not of the kinds above.

    Example:

    >>> posterior = sg.sample_chains(
    ...     build_model, sg.minibatches(x, y, 100), chains=4, burn_in=5_000, thinning=100, epochs=50
    ... )
    >>> posterior.summary(x_test)
    """
    chains = positive_integer("chains", chains)
    seed = random.as_seed(seed)
    if vectorized:
        given = {"directory": directory, "devices": devices}
        merged = _vectorized(
            build_model, data, chains, burn_in, thinning, epochs, seed, callbacks, verbose, given
        )
        if verbose:
            print(_report(merged, chains))
        return merged
    devices = _devices(devices)[:chains]
    parallel = len(devices) > 1
    lock, stop, free, models = threading.Lock(), threading.Event(), queue.SimpleQueue(), []
    for device in devices:
        free.put(device)
    shown = {} if verbose == "auto" else {"verbose": verbose}
    bar = None
    if parallel:
        shown = {"verbose": 0}
        bar = keras.utils.Progbar(chains * epochs, verbose=int(verbose != 0), unit_name="epoch")

    def build(number):
        chain_seed = (seed + number) % 2**32
        keras.utils.set_random_seed(chain_seed)
        model = build_model()
        if any(model is other for other in models):
            raise ValueError(
                "`build_model` should return a new model each time it is called. Received: the "
                "same model again"
            )
        if parallel and not model.built:
            raise ValueError(
                "`build_model` should return a built model where chains run at a time, or the "
                "first batch would draw its weights: give its inputs' shape, or call it once. "
                f"Received: {model!r}, devices={devices}"
            )
        _sampler(model).reseed(chain_seed)
        models.append(model)
        return model, chain_seed

    def run(number):
        device = free.get()
        try:
            return run_on(device, number)
        except BaseException:
            stop.set()
            raise
        finally:
            free.put(device)

    def run_on(device, number):
        if stop.is_set():
            return None
        with contextlib.nullcontext() if device is None else tf.device(device):
            with lock:  # what is drawn to build a model comes from one state of the process
                model, chain_seed = build(number)
            samples = PosteriorSamples(burn_in, thinning, directory=directory)
            attached = [samples, *(callbacks(number) if callbacks else [])]
            if directory is not None:
                backup = pathlib.Path(directory) / f"backup-{chain_seed}"
                attached.insert(0, BackupAndRestore(backup, delete_checkpoint=False))
            if bar is not None:
                attached.append(_OneOfSeveral(bar, lock, stop))
            elif verbose:
                print(f"chain {number + 1} of {chains}, seed {chain_seed}")
            model.fit(
                data.reseeded(chain_seed) if isinstance(data, Minibatches) else data(chain_seed),
                epochs=epochs,
                callbacks=attached,
                shuffle=False,
                **shown,
            )
        if directory is not None:
            return Posterior.load(os.path.join(directory, f"chain-{chain_seed}"), model)
        return samples.posterior

    if parallel:
        posteriors = _at_a_time(run, chains, len(devices), stop)
    else:
        posteriors = [run(number) for number in range(chains)]
    merged = Posterior.concatenate(posteriors)
    if verbose:
        print(_report(merged, chains))
    return merged


def _vectorized(
    build_model, data, chains, burn_in, thinning, epochs, seed, callbacks, verbose, given
):
    for name, value in given.items():
        if value is not None:
            raise ValueError(
                f"`{name}` is not available with `vectorized=True`, whose chains are one program "
                f"with its draws in memory (`Posterior.save` stores them). Received: {name}={value}"
            )
    if not isinstance(data, Minibatches):
        raise ValueError(
            "`vectorized=True` needs `minibatches`, of which every chain gets its own. "
            f"Received: data={data!r}"
        )
    models = []
    for number in range(chains):
        keras.utils.set_random_seed((seed + number) % 2**32)
        models.append(build_model())
        _sampler(models[-1])
    if len(set(map(id, models))) < chains:
        raise ValueError(
            "`build_model` should return a new model each time it is called. Received: the same "
            "model again"
        )
    stacked = StackedChains(models, seed)
    samples = PosteriorSamples(burn_in, thinning)
    stacked.fit(
        data.reseeded(seed, chains * data.batch_size),
        epochs=epochs,
        callbacks=[samples, *(callbacks(0) if callbacks else [])],
        shuffle=False,
        **({} if verbose == "auto" else {"verbose": verbose}),
    )
    return stacked.posterior(samples.posterior)


def _at_a_time(run, chains, threads, stop):
    """What `run(number)` returns, in order; the first error, or an interrupt, stops all chains."""
    with ThreadPoolExecutor(threads) as pool:
        futures = [pool.submit(run, number) for number in range(chains)]
        try:
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
        except BaseException:
            stop.set()
            raise
        return [future.result() for future in futures]


class _OneOfSeveral(keras.callbacks.Callback):
    """Shows the epochs of a chain in the bar of all, and ends it when another has failed."""

    def __init__(self, bar, lock, stop):
        super().__init__()
        self._bar, self._lock, self._stop, self._seen = bar, lock, stop, 0

    def on_train_batch_end(self, batch, logs=None):
        if self._stop.is_set():
            self.model.stop_training = True

    def _show(self, epochs):
        with self._lock:
            self._bar.add(epochs - self._seen)
            self._seen = epochs

    def on_epoch_end(self, epoch, logs=None):
        self._show(epoch + 1)

    def on_train_end(self, logs=None):
        if not self._stop.is_set():
            self._show(self.params["epochs"])


def _devices(names):
    """Names of logical devices; a name of None leaves the choice to TensorFlow."""
    if names is None:
        for kind in ("GPU", "TPU"):
            found = [device.name for device in tf.config.list_logical_devices(kind)]
            if len(found) > 1:
                return found
        return [None]
    known = [device.name for device in tf.config.list_logical_devices()]
    wanted = [f"/device:{str(name).removeprefix('/device:')}" for name in names]
    if not wanted or not set(wanted) <= set(known):
        short = [name.removeprefix("/device:") for name in known]
        raise ValueError(f"`devices` should be a list of some of {short}. Received: {names!r}")
    return wanted


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
