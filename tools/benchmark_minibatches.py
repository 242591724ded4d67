"""Microseconds a batch, by ways of drawing minibatches.

Every way fills the same kind of batch and is consumed in-graph, by a loop over its iterator in a
`tf.function`. "cpu" is the time of all threads: what is taken from training where there are no
idle cores. "start" is what a new iterator, that is an epoch, costs up to its first batch. The ways
take turns in one process, so that all see the same machine.

    python tools/benchmark_minibatches.py
    python tools/benchmark_minibatches.py --shapes 500x50 --blocks 1 10 40 100 --repeats 15
"""

import argparse
import statistics
import time

import numpy as np
import tensorflow as tf

from keras_sgmcmc.data import minibatches


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--shapes",
        nargs="+",
        default=["500x50", "100x784", "32x28x28x1"],
        help="shape of a batch of x, batch size first; y is one integer a row",
    )
    parser.add_argument("--rows", type=int, default=10_000, help="rows of the data set")
    parser.add_argument("--batches", type=int, default=1_000, help="batches a measurement")
    parser.add_argument("--repeats", type=int, default=7, help="measurements of each way")
    parser.add_argument(
        "--blocks", nargs="+", type=int, default=[10, 40, 100], help="batches a gather"
    )
    return parser.parse_args()


def ways(x, y, batch_size, batches, blocks):
    """Name -> (dataset, batches in one of its elements)."""
    data = minibatches(x, y, batch_size, seed=0, steps=batches)
    counted = tf.Variable(0, dtype=tf.int64)

    def count(*batch):
        counted.assign_add(1, read_value=False)
        return batch

    def stacked(block):
        return (
            tf.data.Dataset.range(0, batches, block)
            .map(lambda t: data.batches(t, block))
            .prefetch(2)
        )

    def first(t):
        return tf.nest.map_structure(lambda v: v[0], data.batches(t, 1))

    one_by_one = tf.data.Dataset.range(batches).map(first)
    shuffled = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x)).repeat()
    result = {
        "minibatches": (data, 1),
        "minibatches, not counted": (data._batches, 1),
        "minibatches, counted by Dataset.map": (data._batches.map(count), 1),
        "one gather a batch": (one_by_one.prefetch(2), 1),
        "from_tensor_slices, shuffle, batch": (
            shuffled.batch(batch_size, drop_remainder=True).prefetch(2),
            1,
        ),
        "loop alone (the same batch repeated)": (
            tf.data.Dataset.from_tensors(first(0)).repeat(batches),
            1,
        ),
    }
    for block in blocks:
        result[f"{block} batches a gather, stacked"] = (stacked(block), block)
    return result


@tf.function
def consume(iterator, count):
    for _ in tf.range(count):
        batch = next(iterator)
    return batch[1]


def main():
    arguments = parse_arguments()
    random = np.random.default_rng(0)
    for shape in arguments.shapes:
        batch_size, *features = (int(size) for size in shape.split("x"))
        x = random.normal(size=(arguments.rows, *features)).astype("float32")
        y = random.integers(10, size=arguments.rows)
        table = ways(x, y, batch_size, arguments.batches, arguments.blocks)
        times = {name: [] for name in table}
        processor = {name: [] for name in table}
        starts = {name: [] for name in table}
        for repeat in range(arguments.repeats + 1):
            for name, (dataset, block) in table.items():
                # Rows are shuffled one by one: a tenth of the batches is enough to time it.
                total = arguments.batches // (10 if "shuffle" in name else 1)
                rounds = total // block - 1
                before = time.perf_counter()
                iterator = iter(dataset)
                next(iterator)
                between, cpu = time.perf_counter(), time.process_time()
                consume(iterator, tf.constant(rounds))
                after, cpu = time.perf_counter(), time.process_time() - cpu
                if repeat:  # the first round traces and fills the caches
                    starts[name].append((between - before) * 1e3)
                    times[name].append((after - between) / (rounds * block) * 1e6)
                    processor[name].append(cpu / (rounds * block) * 1e6)
        medians = {name: statistics.median(values) for name, values in times.items()}
        print(f"\nbatch {shape}, {arguments.rows} rows, {arguments.repeats} repeats")
        print(
            f"{'way':37}{'median us/batch':>16}{'least':>8}{'ratio':>7}{'cpu':>8}{'start ms':>10}"
        )
        for name, median in medians.items():
            ratio = median / medians["minibatches"]
            least, cpu = min(times[name]), statistics.median(processor[name])
            start = statistics.median(starts[name])
            print(f"{name:37}{median:16.1f}{least:8.1f}{ratio:7.2f}{cpu:8.1f}{start:10.1f}")


if __name__ == "__main__":
    main()
