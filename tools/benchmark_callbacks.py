"""What the callbacks cost: time of a step of a small MLP with and without them.

    python tools/benchmark_callbacks.py [--repeats 40] [--steps 100] [--only EM Iterate]

Each repeat runs every variant once, in turn and on the same model, so that a busy machine slows all
of them alike. The table gives the median time of a step, the median, over repeats, of its ratio to
the same repeat's run without callbacks, with its standard error, and the ratio of the fastest runs.
A second run without callbacks shows what is chance.
"""

import argparse
import os
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf

import keras_sgmcmc as sg

ROWS, BATCH = 10_000, 100


def compiled_mlp(optimizer, width=400, **arguments):
    model = keras.Sequential(
        [
            keras.Input((784,)),
            keras.layers.Dense(width, activation="relu"),
            keras.layers.Dense(width, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=loss, **arguments)
    return model


def median_and_error(ratios):
    """The median, and its standard error if the ratios are normal but for a few."""
    low, middle, high = np.quantile(ratios, [0.25, 0.5, 0.75])
    return middle, 1.25 * (high - low) / 1.35 / len(ratios) ** 0.5


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--steps", type=int, default=100, help="steps of one run, one epoch")
    parser.add_argument("--only", nargs="*", default=[""], help="parts of the names of variants")
    arguments = parser.parse_args()

    generator = np.random.default_rng(1)
    x = generator.normal(size=(ROWS, 784)).astype("float32")
    y = generator.integers(0, 10, ROWS)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH).repeat().prefetch(4)

    schedule = sg.schedules.PowerDecay(1e-3, 100.0, 0.55)
    variants = {
        "none": [],
        "none again": [],
        "ChainMonitor()": [sg.callbacks.ChainMonitor()],
        "ChainMonitor(health=True)": [sg.callbacks.ChainMonitor(health=True)],
        "StepSizeAnnealing": [sg.callbacks.StepSizeAnnealing(schedule)],
        "PosteriorSamples(thinning=100)": [sg.callbacks.PosteriorSamples(0, 100, 20)],
        "IterateAverages(window=100)": [sg.callbacks.IterateAverages(0, 100, 20)],
        "PriorPrecisionEM(every=10)": [sg.callbacks.PriorPrecisionEM(start=0)],
        "PosteriorSamples and annealing": [
            sg.callbacks.PosteriorSamples(0, 100, 20),
            sg.callbacks.StepSizeAnnealing(schedule),
        ],
    }
    variants = {
        name: callbacks
        for name, callbacks in variants.items()
        if "none" in name or any(part in name for part in arguments.only)
    }
    model = compiled_mlp(sg.pSGLD(1e-3, train_size=ROWS, prior=1.0, seed=1))

    def seconds_a_step(name):
        clock = Clock()
        model.fit(
            data,
            steps_per_epoch=arguments.steps,
            callbacks=[*variants[name], clock],
            verbose=0,
        )
        return clock.seconds / (arguments.steps - 1)

    for name in variants:
        seconds_a_step(name)
    times = {name: [] for name in variants}
    for _ in range(arguments.repeats):
        for name in variants:
            times[name].append(seconds_a_step(name))

    print(f"pSGLD, MLP 784-400-400-10, batch {BATCH}, {arguments.repeats} runs of each")
    print(f"{'callbacks':32} {'ms a step':>10} {'ratio':>17} {'fastest':>8}")
    for name, values in times.items():
        middle, error = median_and_error(np.array(values) / np.array(times["none"]))
        fastest = min(values) / min(times["none"])
        print(
            f"{name:32} {1e3 * np.median(values):10.2f} {middle:8.3f} +- {error:.3f} {fastest:8.3f}"
        )


class Clock(keras.callbacks.Callback):
    """Time from the end of the first batch, which may trace, to the end of the epoch."""

    def on_train_batch_end(self, batch, logs=None):
        if batch == 0:
            self._begin = time.perf_counter()

    def on_epoch_end(self, epoch, logs=None):
        self.seconds = time.perf_counter() - self._begin


if __name__ == "__main__":
    main()
