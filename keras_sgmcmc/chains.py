"""Several chains of one model."""

import contextlib
import os
import pathlib
import queue
import threading
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait

import keras
import numpy as np
import tensorflow as tf

from keras_sgmcmc import fused, random
from keras_sgmcmc.callbacks.backup_and_restore import BackupAndRestore
from keras_sgmcmc.callbacks.posterior_samples import PosteriorSamples
from keras_sgmcmc.data import Minibatches
from keras_sgmcmc.optimizers.base import Sampler
from keras_sgmcmc.posterior import Posterior
from keras_sgmcmc.validation import positive_integer
from keras_sgmcmc.vectorized_chains import StackedChains

# Least number of stacked chains for which a core more is worth the start of a program.
_CHAINS_A_PROGRAM = 8


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
    threads of this process, which changes no draw, or as one program, which changes their rounding.

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
        vectorized: Whether the chains of a device are one program that moves their stacked weights:
            on a GPU, or of small models. For SGLD and pSGLD, models without a state (statistics of
            batches, dropout), and `minibatches`; draws stay in memory. Chains are shared out among
            `devices`. By default, 16 or more on a processor of several cores, without `callbacks`
            and with `steps_per_execution` above 1, are shared out among its cores. `callbacks` is
            called once for each share, with the number of its first chain, and what it returns
            (not `GradientNoise`) sees the chains of that share as one model. Defaults to False.
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
    devices = _devices(devices)
    lock, stop, free, models = threading.Lock(), threading.Event(), queue.SimpleQueue(), []

    def build(number):
        chain_seed = (seed + number) % 2**32
        keras.utils.set_random_seed(chain_seed)
        model = build_model()
        if any(model is other for other in models):
            raise ValueError(
                "`build_model` should return a new model each time it is called. Received: the "
                "same model again"
            )
        if len(devices) > 1 and not model.built:
            raise ValueError(
                "`build_model` should return a built model where chains run at a time, or the "
                "first batch would draw its weights: give its inputs' shape, or call it once. "
                f"Received: {model!r}, devices={devices}"
            )
        _sampler(model).reseed(chain_seed)
        models.append(model)
        return model

    if vectorized:
        _check_stackable(data, directory)
        for number in range(chains):
            build(number)
        if devices == [None] and not callbacks:
            devices = _cores(models)
        programs = np.array_split(np.arange(chains), min(len(devices), chains))
    else:
        programs = np.arange(chains)[:, None]
    devices = devices[: len(programs)]
    for device in devices:
        free.put(device)
    shown, bar = {} if verbose == "auto" else {"verbose": verbose}, None
    if len(devices) > 1:
        shown = {"verbose": 0}
        total = len(programs) * epochs
        bar = keras.utils.Progbar(total, verbose=int(verbose != 0), unit_name="epoch")

    def run(numbers):
        device = free.get()
        try:
            return run_on(device, numbers)
        except BaseException:
            stop.set()
            raise
        finally:
            free.put(device)

    def run_on(device, numbers):
        if stop.is_set():
            return None
        first, count = int(numbers[0]), len(numbers)
        chain_seed = (seed + first) % 2**32
        with contextlib.nullcontext() if device is None else tf.device(device):
            if vectorized:
                model = StackedChains(models[first : first + count], chain_seed)
            else:
                with lock:  # what is drawn to build a model comes from one state of the process
                    model = build(first)
            samples = PosteriorSamples(burn_in, thinning, directory=directory)
            attached = [samples, *(callbacks(first) if callbacks else [])]
            if directory is not None:
                backup = pathlib.Path(directory) / f"backup-{chain_seed}"
                attached.insert(0, BackupAndRestore(backup, delete_checkpoint=False))
            if bar is not None:
                attached.append(_OneOfSeveral(bar, lock, stop))
            elif verbose:
                shown_as = f"{chains} chains" if vectorized else f"chain {first + 1} of {chains}"
                print(f"{shown_as}, seed {chain_seed}")
            if isinstance(data, Minibatches):
                batches = data.reseeded(chain_seed, count)
            else:
                batches = data(chain_seed)
            model.fit(batches, epochs=epochs, callbacks=attached, shuffle=False, **shown)
        if directory is not None:
            return Posterior.load(os.path.join(directory, f"chain-{chain_seed}"), model)
        return model.posterior(samples.posterior) if vectorized else samples.posterior

    if len(devices) > 1:
        posteriors = _at_a_time(run, programs, len(devices), stop)
    else:
        posteriors = [run(numbers) for numbers in programs]
    merged = Posterior.concatenate(posteriors)
    if merged.seconds is not None:
        rounds = -(-len(programs) // len(devices))
        merged.seconds *= rounds / len(programs)
    if verbose:
        print(_report(merged, chains))
    return merged


def _check_stackable(data, directory):
    if directory is not None:
        raise ValueError(
            "`directory` is not available with `vectorized=True`, which keeps its draws in memory "
            f"(`Posterior.save` stores them). Received: directory={directory}"
        )
    if not isinstance(data, Minibatches):
        raise ValueError(
            "`vectorized=True` needs `minibatches`, of which every chain gets its own. "
            f"Received: data={data!r}"
        )


def _cores(models):
    """The devices of one program, or of several on a CPU with cores for them."""
    # Steps that are not fused are mostly Python's, which runs in one thread at a time.
    if fused.has_accelerator() or models[0].steps_per_execution == 1:
        return [None]
    return [None] * max(1, min(_core_count(), len(models) // _CHAINS_A_PROGRAM))


def _core_count():
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _at_a_time(run, programs, threads, stop):
    """What `run(numbers)` returns, in order; the first error, or an interrupt, stops all chains."""
    with ThreadPoolExecutor(threads) as pool:
        futures = [pool.submit(run, numbers) for numbers in programs]
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
