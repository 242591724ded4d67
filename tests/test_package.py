"""What a user gets on import, and what stays away until it is needed."""

import subprocess
import sys

import keras

import keras_sgmcmc as sg

PUBLIC = {
    "SGLD",
    "pSGLD",
    "SGFS",
    "ConstantSGD",
    "GaussianPrior",
    "DistributionPrior",
    "GaussianNegativeLogLikelihood",
    "NegativeLogLikelihood",
    "minibatches",
    "Posterior",
    "DivergenceError",
    "callbacks",
    "diagnostics",
    "distill",
    "metrics",
    "optimizers",
    "per_example",
    "reference",
    "sample_chains",
    "schedules",
    "theory",
}


def test_public_names_exist():
    assert set(sg.__all__) == PUBLIC
    assert all(hasattr(sg, name) for name in PUBLIC)
    assert set(sg.callbacks.__all__) == {
        "BackupAndRestore",
        "ChainMonitor",
        "GradientNoise",
        "InGraphCallback",
        "IterateAverages",
        "PosteriorSamples",
        "PriorPrecisionEM",
        "StepSizeAnnealing",
    }


def test_every_public_class_has_a_docstring_and_is_registered_under_the_package():
    serializable = [
        sg.SGLD,
        sg.pSGLD,
        sg.SGFS,
        sg.ConstantSGD,
        sg.GaussianPrior,
        sg.DistributionPrior,
        sg.GaussianNegativeLogLikelihood,
        sg.NegativeLogLikelihood,
        sg.metrics.BrierScore,
        sg.metrics.ExpectedCalibrationError,
        sg.metrics.PredictiveEntropy,
        sg.schedules.PowerDecay,
        sg.schedules.BlockDecay,
        sg.schedules.Cyclical,
        sg.callbacks.BackupAndRestore,
        sg.callbacks.ChainMonitor,
        sg.callbacks.GradientNoise,
        sg.callbacks.IterateAverages,
        sg.callbacks.PosteriorSamples,
        sg.callbacks.PriorPrecisionEM,
        sg.callbacks.StepSizeAnnealing,
    ]
    for cls in serializable:
        assert cls.__doc__
        assert keras.saving.get_registered_name(cls) == f"keras_sgmcmc>{cls.__name__}"


def test_import_leaves_heavy_packages_alone():
    code = (
        "import sys, keras; before = set(sys.modules); import keras_sgmcmc; "
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}; "
        "heavy = {'tensorflow_probability', 'arviz', 'matplotlib', 'pandas', 'sklearn'}; "
        "print(sorted(new & heavy))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
