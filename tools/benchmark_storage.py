"""What it costs to keep draws on disk.

    python tools/benchmark_storage.py [--draws 1000] [--directory DIR]

1. Draws of a model of a million parameters are written by the store, and as plain bytes to one file
   each on the same disk, in turns of a tenth; rates and their ratio.
2. An MLP 784-1000-215 is trained with a draw every 100 steps in memory, on disk, and without any.
3. Predictions from the stored draws: peak memory of the process beside that of the draws.
4. 200 draws of a small MLP over 10,000 rows: `posterior.predict` against `model.predict` once for
   each draw, with its weights set.
"""

import argparse
import os
import pathlib
import resource
import tempfile
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np

import keras_sgmcmc as sg
from keras_sgmcmc import storage


def build():
    model = keras.Sequential(
        [
            keras.Input((784,)),
            keras.layers.Dense(1000, "relu"),
            keras.layers.Dense(215),
        ]
    )
    model.compile(
        sg.SGLD(1e-4, train_size=10_000, prior=1.0, seed=1),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return model


def write_rates(folder, draws):
    """Bytes a second of the store and of plain files, a tenth of the draws at a time."""
    model = build()
    arrays = [np.array(v) for v in model.get_weights()]
    variables = list(model.trainable_variables)
    size = sum(array.nbytes for array in arrays)
    common = [(v, np.array(v)) for v in model.non_trainable_variables]
    store = storage.open_chain(folder / "store", model, model.optimizer, variables, common, {}, 0)
    (folder / "plain").mkdir()
    count, rates = draws // 10, {"plain": [], "store": []}
    for turn in range(10):
        steps = range(1 + turn * count, 1 + (turn + 1) * count)
        begin = time.perf_counter()
        for step in steps:
            with open(folder / "plain" / f"{step}.bin", "wb") as file:
                for array in arrays:
                    file.write(array)
        middle = time.perf_counter()
        for step in steps:
            store.append(step, arrays, 1.0)
        end = time.perf_counter()
        rates["plain"].append(count * size / (middle - begin))
        rates["store"].append(count * size / (end - middle))
    store.write_manifest()
    return size, {name: np.array(values) for name, values in rates.items()}


class Clock(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 0:
            self.begin = time.perf_counter()

    def on_epoch_end(self, epoch, logs=None):
        self.seconds = (time.perf_counter() - self.begin) / (self.params["steps"] - 1)


def step_times(folder, repeats):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((10_000, 784)).astype("float32")
    y = rng.integers(0, 215, 10_000)
    places = {"none": None, "memory": None, "disk": folder / "training"}
    models = {name: build() for name in places}
    times = {name: [] for name in places}
    for _ in range(repeats + 1):
        for name, directory in places.items():
            clock, callbacks = Clock(), [sg.callbacks.ChainMonitor()]
            if name != "none":
                callbacks = [sg.callbacks.PosteriorSamples(0, 100, directory=directory)]
            data = sg.minibatches(x, y, 100, seed=1, steps=300)
            models[name].fit(data, callbacks=[*callbacks, clock], verbose=0, shuffle=False)
            times[name].append(clock.seconds)
    return {name: np.array(values[1:]) for name, values in times.items()}


def predict_times(repeats):
    """Seconds of `posterior.predict`, and of `model.predict` draw by draw."""
    model = keras.Sequential(
        [keras.Input((20,)), keras.layers.Dense(50, "tanh"), keras.layers.Dense(1)]
    )
    model.compile(loss=sg.GaussianNegativeLogLikelihood(1.0))
    rng = np.random.default_rng(0)
    x = rng.standard_normal((10_000, 20)).astype("float32")
    variables = list(model.trainable_variables)
    draws = [[rng.standard_normal(v.shape) for v in variables] for _ in range(200)]
    posterior = sg.Posterior(model, variables, draws, range(200))
    times = {"posterior": [], "model": []}
    # Traces both.
    posterior[:2].predict(x, batch_size=32, verbose=0)
    model.predict(x, batch_size=32, verbose=0)
    for _ in range(repeats):
        begin = time.perf_counter()
        ours = posterior.predict(x, batch_size=32, verbose=0)
        middle = time.perf_counter()
        theirs = 0.0
        for index in range(len(posterior)):
            model.set_weights(posterior.weights(index))
            theirs = theirs + model.predict(x, batch_size=32, verbose=0) / len(posterior)
        end = time.perf_counter()
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-4)
        times["posterior"].append(middle - begin)
        times["model"].append(end - middle)
    return {name: np.array(values) for name, values in times.items()}


def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--directory", help="where to write; defaults to a temporary directory")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.directory) as folder:
        folder = pathlib.Path(folder)
        size, rates = write_rates(folder, args.draws)
        print(f"{args.draws} draws of {size / 2**20:.2f} MiB, MB/s: median (range) over turns")
        for name, values in rates.items():
            low, high = values.min() / 1e6, values.max() / 1e6
            print(f"  {name:8} {np.median(values) / 1e6:8.0f} ({low:.0f}-{high:.0f})")
        print(f"  store / plain {np.median(rates['store'] / rates['plain']):.2f}")

        x = np.zeros((1000, 784), "float32")
        posterior = sg.Posterior.load(folder / "store")
        posterior[:2].predict(x, batch_size=500, verbose=0)
        before, begin = peak(), time.perf_counter()
        posterior.predict(x, batch_size=500, verbose=0)
        seconds, more = time.perf_counter() - begin, (peak() - before) / 2**20
        total = len(posterior) * size / 2**30
        print(
            f"predicting 1,000 rows from {len(posterior)} draws ({total:.1f} GiB): {seconds:.1f} s,"
            f" peak memory {more:+.0f} MiB"
        )

        times = predict_times(1)
        ratio = np.median(times["model"] / times["posterior"])
        print(
            f"10,000 rows, 200 draws: posterior.predict {np.median(times['posterior']):.2f} s, "
            f"model.predict for each {np.median(times['model']):.2f} s, {ratio:.1f} times as long"
        )

        times = step_times(folder, args.repeats)
        print("time of a step with a draw every 100 steps, against none")
        for name, values in times.items():
            ratio = np.median(values / times["none"])
            fastest = values.min() / times["none"].min()
            print(
                f"  {name:8} {1e3 * np.median(values):7.2f} ms, ratio {ratio:.3f},"
                f" of the fastest turns {fastest:.3f}"
            )


if __name__ == "__main__":
    main()
