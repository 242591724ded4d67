"""Tail counts and moments of the noise stream over many draws.

    python tools/check_noise.py

draws 10^8 normals as the samplers do, over many steps and variables, and prints how many lie
beyond 4, 4.5 and 5 standard deviations beside what a normal law expects, with the difference in
Poisson standard errors. It exits with an error if one is off by more than 4.
"""

import argparse
import math
import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf

from keras_sgmcmc import random

LEVELS = (4.0, 4.5, 5.0)
CHUNK = 1_000_000


@tf.function(jit_compile=True)
def statistics(seed, step, stream):
    z = random.normal((CHUNK,), "float32", seed=seed, step=step, stream=stream)
    beyond = tf.stack([tf.reduce_sum(tf.cast(tf.abs(z) > a, tf.int64)) for a in LEVELS])
    z = tf.cast(z, tf.float64)
    powers = tf.stack([tf.reduce_sum(z**k) for k in (1, 2, 3, 4)])
    return beyond, powers, tf.reduce_max(tf.abs(z))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--draws", type=int, default=10**8)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()

    chunks = math.ceil(args.draws / CHUNK)
    n = chunks * CHUNK
    beyond, powers, largest = np.zeros(len(LEVELS)), np.zeros(4), 0.0
    for i in range(chunks):
        step, stream = divmod(i, 10)
        counts, sums, top = statistics(
            *(tf.constant(v, tf.int64) for v in (args.seed, step, stream))
        )
        beyond += counts.numpy()
        powers += sums.numpy()
        largest = max(largest, float(top))

    print(f"{n:,} draws, seed {args.seed}, largest |z| {largest:.2f}")
    worst = 0.0
    print("beyond       found   expected  Poisson standard errors")
    for level, found in zip(LEVELS, beyond, strict=True):
        expected = n * math.erfc(level / math.sqrt(2))
        z = (found - expected) / math.sqrt(expected)
        worst = max(worst, abs(z))
        print(f"{level:.1f} sigma {found:9.0f}  {expected:9.1f}  {z:+.2f}")
    print("moment       found   expected  standard errors")
    for k, expected, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        found = powers[k - 1] / n
        z = (found - expected) / math.sqrt(variance / n)
        worst = max(worst, abs(z))
        print(f"E z^{k}    {found:+.6f}  {expected:9d}  {z:+.2f}")
    if worst > 4:
        sys.exit("The stream is not normal.")


if __name__ == "__main__":
    main()
