"""What is the network unsure about? Uncertainty of test digits, of rotated ones, of photographs.

    python examples/out_of_distribution.py [--figure out_of_distribution.png] [--data DIR]

A digit classifier is sampled by pSGLD, as in the quickstart and on its data (scikit-learn's digits,
or MNIST with `--data DIR` or KERAS_SGMCMC_DATA). It is then shown test digits, the same digits
rotated, and patches of photographs. The predictive entropy is its whole uncertainty about the
class; the mutual information is the part that comes from not knowing the weights, which says "I
have seen nothing like it". A table says how well each tells the unfamiliar images from test digits,
beside the entropy of a single draw: by the area under the ROC curve, 1 for perfectly and 1/2 for
not at all.
"""

import os
import pathlib
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import matplotlib.pyplot as plt
import numpy as np
from scipy import ndimage
from sklearn.datasets import load_sample_images
from sklearn.metrics import roc_auc_score

import keras_sgmcmc as sg

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import quickstart

ANGLES = np.arange(0, 181, 15)
ROTATED = 90
SHOWN = ANGLES[::3]
BLUE, ORANGE, RED = "#08519c", "#fd8d3c", "#a63603"


def rotate(x, angle):
    """The images, turned counter-clockwise about their centre."""
    turned = ndimage.rotate(x, angle, axes=(2, 1), reshape=False, order=1)
    return np.clip(turned, 0.0, 1.0)


def photographs(shape, count, rng):
    """Patches, at half resolution, of the photographs that come with scikit-learn."""
    grey = [image.mean(-1)[::2, ::2] / 255.0 for image in load_sample_images().images]
    patches = []
    for _ in range(count):
        image = grey[rng.integers(len(grey))]
        row, column = (rng.integers(a - b + 1) for a, b in zip(image.shape, shape, strict=True))
        patches.append(image[row : row + shape[0], column : column + shape[1]])
    return np.stack(patches).astype("float32")


def uncertainty(posterior, x):
    """Per image: entropy and mutual information of the posterior, entropy of its last draw."""
    each = posterior.predict(x, batch_size=500, reduce=None, verbose=0)
    return {
        "predictive entropy": sg.metrics.predictive_entropy(each.mean(axis=0)),
        "mutual information": sg.metrics.mutual_information(each),
        "entropy of one draw": sg.metrics.predictive_entropy(each[-1]),
    }


def plot(of_sets, of_angles, digits, path):
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 5), layout="constrained")
    for (name, values), colour in zip(of_sets.items(), (BLUE, ORANGE, RED), strict=True):
        for kind, style in (("predictive entropy", "-"), ("entropy of one draw", "--")):
            label = name if style == "-" else None
            left.ecdf(values[kind], color=colour, ls=style, label=label)
    left.plot([], [], color="0.4", ls="--", label="the same, by one draw")
    left.set(
        title="How unsure, about how many images?",
        xlabel="predictive entropy (nats)",
        ylabel="share of images with at most this entropy",
        xlim=(0.0, np.log(10)),
    )
    left.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=2, fontsize=9)
    for (kind, values), colour in zip(of_angles.items(), (BLUE, RED, BLUE), strict=True):
        style = "--" if "one draw" in kind else "-"
        right.plot(ANGLES, values, color=colour, ls=style, marker="o", ms=4, label=kind)
    right.set(
        title="Test digits, rotated",
        xlabel="angle (degrees)",
        ylabel="mean over test digits (nats)",
        xticks=SHOWN,
        ylim=(0.0, 1.45 * max(map(max, of_angles.values()))),
    )
    for angle, image in zip(SHOWN, digits, strict=True):
        inset = right.inset_axes((angle / ANGLES[-1] * 0.86 + 0.02, 0.72, 0.1, 0.14))
        inset.imshow(image, cmap="gray_r")
        inset.set(xticks=[], yticks=[])
    right.legend(loc="upper left", ncols=2, fontsize=9)
    figure.savefig(path, dpi=110)


def main():
    parser = quickstart.argument_parser(__doc__.splitlines()[0])
    parser.add_argument("--figure", default="out_of_distribution.png", help="where to save it")
    arguments = parser.parse_args()

    train, _, test = quickstart.load_data(quickstart.mnist_file(arguments.data))
    keras.utils.set_random_seed(0)
    posterior = quickstart.sample_posterior(train, verbose=2)
    rng = np.random.default_rng(0)
    sets = {
        "test digits": test.x,
        f"test digits rotated by {ROTATED}°": rotate(test.x, ROTATED),
        "photographs": photographs(test.x.shape[1:], len(test.x), rng),
    }
    of_sets = {name: uncertainty(posterior, x) for name, x in sets.items()}
    familiar, *unfamiliar = of_sets.items()
    print(f"\n{'mean (nats)':<32}" + "".join(f"{kind:>21}" for kind in familiar[1]))
    for name, values in of_sets.items():
        print(f"{name:<32}" + "".join(f"{v.mean():>21.3f}" for v in values.values()))
    print("area under the ROC curve")
    for name, values in unfamiliar:
        areas = []
        for kind, known in familiar[1].items():
            labels = np.repeat([0, 1], [len(known), len(values[kind])])
            areas.append(roc_auc_score(labels, np.concatenate([known, values[kind]])))
        print(f"{name:<32}" + "".join(f"{area:>21.3f}" for area in areas))

    some = test.x[:1000]
    rows = [uncertainty(posterior, rotate(some, angle)) for angle in ANGLES]
    of_angles = {kind: [row[kind].mean() for row in rows] for kind in rows[0]}
    digits = [rotate(some[:1], angle)[0] for angle in SHOWN]
    plot(of_sets, of_angles, digits, arguments.figure)
    print(f"figure: {arguments.figure}")


if __name__ == "__main__":
    main()
