"""The examples run, shortened, and save a figure."""

import importlib.util
import pathlib
import sys

import numpy as np
import pytest

EXAMPLES = pathlib.Path(__file__).resolve().parent.parent / "examples"

pytestmark = pytest.mark.usefixtures("without_xla")


def shortened(name, monkeypatch, tmp_path, **constants):
    """Run an example with other constants; returns the path of its figure."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for constant, value in constants.items():
        assert hasattr(module, constant), f"{name}.py has no {constant}"
        monkeypatch.setattr(module, constant, value)
    figure = tmp_path / f"{name}.png"
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--figure", str(figure)])
    module.main()
    return figure


def test_quickstart(monkeypatch, tmp_path, capsys):
    monkeypatch.delenv("KERAS_SGMCMC_DATA", raising=False)
    figure = shortened("quickstart", monkeypatch, tmp_path, STEPS=400, BURN_IN=200, THINNING=20)
    assert figure.stat().st_size > 10_000
    table = [line for line in capsys.readouterr().out.splitlines() if "%" in line]
    assert len(table) == 3
    assert all(float(line.split("%")[0].split()[-1]) > 80 for line in table)


def test_out_of_distribution(monkeypatch, tmp_path, capsys):
    monkeypatch.delenv("KERAS_SGMCMC_DATA", raising=False)
    monkeypatch.syspath_prepend(EXAMPLES)
    quickstart = importlib.import_module("quickstart")
    for constant, value in {"STEPS": 400, "BURN_IN": 200, "THINNING": 20}.items():
        monkeypatch.setattr(quickstart, constant, value)
    angles = range(0, 181, 60)
    figure = shortened("out_of_distribution", monkeypatch, tmp_path, ANGLES=angles, SHOWN=angles)
    assert figure.stat().st_size > 10_000
    printed = capsys.readouterr().out.splitlines()
    areas = printed[printed.index("area under the ROC curve") + 1 :]
    entropy, information = np.array([line.split()[-3:-1] for line in areas[:2]], float).T
    assert min(*entropy, *information) > 0.75


def test_regression(monkeypatch, tmp_path, capsys):
    figure = shortened("regression", monkeypatch, tmp_path, STEPS=2000, BURN_IN=1000)
    assert figure.stat().st_size > 10_000
    assert "95 % band" in capsys.readouterr().out


def test_automatic_relevance(monkeypatch, tmp_path, capsys):
    constants = {"FEATURES": 6, "STEPS": 5000, "LEARN_FROM": 1000, "BURN_IN": 2000}
    figure = shortened("automatic_relevance", monkeypatch, tmp_path, **constants)
    assert figure.stat().st_size > 10_000
    printed = capsys.readouterr().out
    assert "sd of weights" in printed
    assert "precisions learned" in printed
