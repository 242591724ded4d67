"""Kills chains at random moments and compares what is resumed with a chain that was left alone.

    python tools/kill_chains.py [--kills 50] [--epochs 60] [--seed 0]

A process trains a small network by SGFS with every callback attached: `BackupAndRestore`,
`GradientNoise`, `PriorPrecisionEM` with the noise level, `StepSizeAnnealing`, `IterateAverages` and
`PosteriorSamples`, both writing to a directory. It is sent SIGKILL at a random moment, again and
again, and started anew each time, until it comes to its end; then another begins. After every kill
all draws on disk are loaded and their sums compared. At the end the draws, the weights, the
precisions and the covariance of the gradients must equal those of a chain that was never killed,
bit for bit, none missing and none twice.
"""

import argparse
import os
import pathlib
import signal
import sys
import tempfile
import time
import warnings

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np

import keras_sgmcmc as sg

ROWS, BATCH, STEPS = 500, 10, 25


def train(directory, epochs):
    """The whole run, or what is left of it; writes `end.npz` when it is done."""
    directory = pathlib.Path(directory)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((ROWS, 4)).astype("float32")
    y = (np.sin(x[:, :1]) + 0.3 * rng.standard_normal((ROWS, 1))).astype("float32")
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(16, "tanh"), keras.layers.Dense(1)]
    )
    optimizer = sg.SGFS(
        train_size=ROWS,
        batch_size=BATCH,
        prior=sg.GaussianPrior(groups="layer"),
        warmup_steps=100,
        seed=7,
    )
    loss = sg.GaussianNegativeLogLikelihood(1.0)
    model.compile(optimizer, loss, steps_per_execution=5)
    noise = sg.callbacks.GradientNoise(every=2)
    schedule = sg.schedules.PowerDecay(1.0, 100.0, 0.55)
    callbacks = [
        sg.callbacks.BackupAndRestore(directory / "backup"),
        noise,
        sg.callbacks.PriorPrecisionEM(start=200, every=3, learn_noise_std=True),
        sg.callbacks.StepSizeAnnealing(schedule),
        sg.callbacks.IterateAverages(150, window=20, directory=directory / "averages"),
        sg.callbacks.PosteriorSamples(
            150, thinning=5, directory=directory / "samples", step_weights=True
        ),
    ]
    data = sg.minibatches(x, y, BATCH, seed=3, steps=STEPS)
    (directory / "begun").touch()
    model.fit(data, epochs=epochs, callbacks=callbacks, shuffle=False, verbose=0)
    values = [v.numpy() for v in optimizer.prior_precision.values()]
    values += [*model.get_weights(), keras.ops.convert_to_numpy(loss.noise_std)]
    values += [*noise.covariance.values(), noise.examples]
    np.savez(directory / "end.npz", *values)


def start(directory, epochs):
    """A process of its own that trains, from one in which TensorFlow has done nothing yet."""
    (pathlib.Path(directory) / "begun").unlink(missing_ok=True)
    child = os.fork()
    if child:
        return child
    try:
        warnings.simplefilter("ignore")
        train(directory, epochs)
        os._exit(0)
    except BaseException:
        import traceback

        traceback.print_exc()
        os._exit(1)


def ended(child):
    """Exit status of a process, None while it runs."""
    done, status = os.waitpid(child, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if done else None


def in_process(function, *arguments):
    """`function` in a process of its own; True if it came to its end."""
    child = os.fork()
    if not child:
        try:
            warnings.simplefilter("error", UserWarning)
            function(*arguments)
            os._exit(0)
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def check_whole(directory):
    """Every draw on disk loads, and has the sum that it was written with."""
    from keras_sgmcmc import storage

    for kind in ("averages", "samples"):
        if list((directory / kind).glob("chain-*/manifest.json")):
            (chain,) = storage.chain_directories(directory / kind)
            manifest = storage.read_manifest(chain)
            with warnings.catch_warnings():
                # Those that the killed process had moved aside and not yet made again.
                warnings.filterwarnings("ignore", ".*missing")
                storage.find_draws(chain, manifest, verify=True)


def check_equal(directory, alone):
    for kind in ("averages", "samples"):
        ours, theirs = (sg.Posterior.load(path / kind, verify=True) for path in (directory, alone))
        np.testing.assert_array_equal(ours.steps, theirs.steps)
        assert len(set(ours.steps)) == len(ours.steps)
        np.testing.assert_array_equal(ours.draw_weights, theirs.draw_weights)
        for one, other in zip(ours.draws.values(), theirs.draws.values(), strict=True):
            np.testing.assert_array_equal(one, other)
    with np.load(directory / "end.npz") as ours, np.load(alone / "end.npz") as theirs:
        for name in theirs:
            np.testing.assert_array_equal(ours[name], theirs[name])


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--epochs", type=int, default=60, help="of 25 steps; draws begin at 7")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = np.random.default_rng(args.seed)
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        alone = folder / "alone"
        alone.mkdir()
        begin = time.perf_counter()
        child = start(alone, args.epochs)
        while ended(child) is None:
            if not (alone / "begun").exists():
                begin = time.perf_counter()
            time.sleep(0.01)
        seconds = time.perf_counter() - begin
        samples = len(list((alone / "samples" / "chain-7").glob("draw-*")))
        averages = len(list((alone / "averages" / "chain-7").glob("draw-*")))
        print(f"alone: {seconds:.1f} s, {samples} draws and {averages} averages", flush=True)
        kills = chains = before = 0
        while kills < args.kills:
            directory = folder / f"chain{chains}"
            directory.mkdir()
            status = None
            while status is None:
                child = start(directory, args.epochs)
                # What is left of the run is no longer than the whole.
                wait, begun = rng.uniform(0, seconds), None
                while True:
                    status = ended(child)
                    if begun is None and (directory / "begun").exists():
                        begun = time.perf_counter()
                    if status is not None:
                        break
                    due = begun is not None and time.perf_counter() - begun > wait
                    if due and kills < args.kills:
                        os.kill(child, signal.SIGKILL)
                        os.waitpid(child, 0)
                        kills += 1
                        there = len(list(directory.glob("*/chain-7/draw-*")))
                        before += there > 0
                        if not in_process(check_whole, directory):
                            sys.exit(f"kill {kills}: a draw is not whole")
                        break
                    time.sleep(0.005)
            if status != 0 or not in_process(check_equal, directory, alone):
                sys.exit(f"chain {chains} differs from the one that was left alone")
            chains += 1
            print(f"chain {chains} is equal after {kills} kills in all", flush=True)
        print(f"{kills} kills, {before} of them with draws on disk; {chains} chains, all equal")


if __name__ == "__main__":
    main()
