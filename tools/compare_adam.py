"""Posterior predictive against Adam on the data of the quickstart, over several random splits.

    python tools/compare_adam.py [--seeds 5] [--data DIR]

Every seed is another split into training, validation and test rows and another start of every
network. All methods train on the training rows alone. The validation rows choose the prior
precision of the posterior, by negative log-likelihood on a grid, and stop the early-stopped Adam;
nothing is refitted on them. The temperature is 1.
"""

import pathlib
import statistics
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "examples"))

import quickstart
from keras.utils import set_random_seed

PRECISIONS = (1.0, 2.0, 4.0)
POSTERIOR = "posterior (T = 1)"
ADAM = f"Adam, {quickstart.STEPS:,} steps"
STOPPED = "Adam, early stopping"


def best_posterior(train, validation, seed):
    """The precision of least validation NLL, and its posterior."""
    candidates = []
    for precision in PRECISIONS:
        set_random_seed(seed)
        posterior = quickstart.sample_posterior(train, precision)
        probabilities = posterior.predict(validation.x, batch_size=500, verbose=0)
        nll = quickstart.score(probabilities, validation.y).nll
        print(f"  seed {seed}: prior precision {precision:g}, validation NLL {nll:.4f}", flush=True)
        candidates.append((nll, precision, posterior))
    _, precision, posterior = min(candidates, key=lambda candidate: candidate[0])
    return precision, posterior


def compare(file, seed):
    """Scores of the methods on the test rows of split `seed`."""
    train, validation, test = quickstart.load_data(file, seed)
    precision, posterior = best_posterior(train, validation, seed)
    predictions = {POSTERIOR: posterior.predict(test.x, batch_size=500, verbose=0)}
    for name, stop_on in ((ADAM, None), (STOPPED, validation)):
        set_random_seed(seed)
        predictions[name] = quickstart.train_adam(train, stop_on).predict(test.x, verbose=0)
    scores = {name: quickstart.score(p, test.y) for name, p in predictions.items()}
    for name, (accuracy, nll, ece) in scores.items():
        note = f"   prior precision {precision:g}" if name == POSTERIOR else ""
        print(f"{seed:>4}  {name:<22}{accuracy:>9.1%}{nll:>9.4f}{ece:>9.4f}{note}", flush=True)
    return scores


def main():
    parser = quickstart.argument_parser(__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5, help="number of splits")
    arguments = parser.parse_args()

    file = quickstart.mnist_file(arguments.data)
    print(f"data: {file or 'digits of scikit-learn'}")
    print(f"seed  {'method':<22}{'accuracy':>9}{'NLL':>9}{'ECE':>9}")
    results = [compare(file, seed) for seed in range(arguments.seeds)]
    print("\nmean over the seeds")
    for name in (POSTERIOR, ADAM, STOPPED):
        columns = zip(*(scores[name] for scores in results), strict=True)
        accuracy, nll, ece = map(statistics.mean, columns)
        print(f"      {name:<22}{accuracy:>9.1%}{nll:>9.4f}{ece:>9.4f}")
    for other in (ADAM, STOPPED):
        wins = sum(scores[POSTERIOR].nll <= scores[other].nll for scores in results)
        print(f"the posterior's NLL is no worse than that of {other}: {wins} of {len(results)}")


if __name__ == "__main__":
    main()
