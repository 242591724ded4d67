"""The contract every sampler keeps: arguments, state, saving, and the guards of the target."""

import functools
import json

import fresh
import keras
import numpy as np
import pytest

import keras_sgmcmc as sg

pytestmark = pytest.mark.usefixtures("without_xla")

samplers = pytest.mark.parametrize("cls", [sg.SGLD, sg.pSGLD])


def dense_model(**kwargs):
    return keras.Sequential(
        [
            keras.Input((3,)),
            keras.layers.Dense(4, activation="tanh", name="hidden", **kwargs),
            keras.layers.Dense(1, name="out"),
        ]
    )


def data(rows=32):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((rows, 3)).astype("float32")
    return x, x[:, :1] - 0.5 * x[:, 1:2]


def fitted(optimizer, model=None, epochs=2, **compile_kwargs):
    model = model or dense_model()
    model.compile(optimizer=optimizer, loss=sg.GaussianNegativeLogLikelihood(0.5), **compile_kwargs)
    model.fit(*data(), batch_size=8, epochs=epochs, shuffle=False, verbose=0)
    return model


# Arguments


@samplers
@pytest.mark.parametrize("train_size", [0, -3, True, 10.5, "10", float("nan")])
def test_train_size_is_checked(cls, train_size):
    with pytest.raises(ValueError, match=r"`train_size` should be an integer >= 1. Received"):
        cls(train_size=train_size)


@samplers
@pytest.mark.parametrize("train_size", [7, 7.0, np.int32(7), np.float32(7)])
def test_train_size_takes_integral_numbers(cls, train_size):
    assert cls(train_size=train_size).train_size == 7


@samplers
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1.0),
        ("temperature", float("inf")),
        ("temperature", True),
        ("learning_rate", 0.0),
        ("learning_rate", -1),
        ("learning_rate", "fast"),
        ("seed", -1),
        ("seed", 1.5),
        ("seed", 2**32),
        ("prior", -1.0),
        ("prior", 0.0),
        ("prior", True),
        ("prior", "normal"),
        ("weight_decay", 1e-4),
        ("use_ema", True),
        ("dataset_size", 10),
    ],
)
def test_bad_arguments_are_named(cls, name, value):
    with pytest.raises(ValueError, match=name if name != "prior" else "pr(ior|ecision)"):
        cls(**{"train_size": 10, name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [("rho", 1.0), ("rho", -0.1), ("epsilon", 0.0), ("adaptation_steps", 0)],
)
def test_bad_arguments_of_psgld_are_named(name, value):
    with pytest.raises(ValueError, match=f"`{name}` should be .* Received: {name}={value}"):
        sg.pSGLD(train_size=10, **{name: value})


@samplers
def test_learning_rate_is_the_only_positional_argument(cls):
    with pytest.raises(TypeError):
        cls(0.1, 100)
    assert cls(np.float32(0.5), train_size=3).get_config()["learning_rate"] == 0.5
    assert float(cls(1, train_size=3).learning_rate) == 1.0


@samplers
def test_train_size_is_needed_at_build_and_said_in_one_sentence(cls):
    model = dense_model()
    model.compile(optimizer=cls(), loss="mse")
    with pytest.raises(ValueError, match=r"needs `train_size`.*len\(x_train\)"):
        model.fit(*data(), verbose=0)
    with pytest.raises(ValueError, match="needs `train_size`"):
        cls(temperature=0, prior=1.0).build(dense_model().trainable_variables)
    cls(temperature=0).build(dense_model().trainable_variables)


@samplers
def test_clipping_and_constraints_warn_that_the_target_changes(cls):
    with pytest.warns(UserWarning, match="`clipnorm=1.0` changes the gradient"):
        cls(train_size=3, clipnorm=1.0)
    model = dense_model(kernel_constraint="non_neg")
    with pytest.warns(UserWarning, match=r"constraints of .*hidden/kernel"):
        cls(train_size=3).build(model.trainable_variables)


@samplers
def test_regularizers_are_named_with_the_precision_they_mean(cls):
    model = dense_model(kernel_regularizer=keras.regularizers.L2(0.01))
    with pytest.warns(UserWarning, match=r"hidden/kernel .*l2=0.01 .*2 \* l2 \* N = 2\b"):
        cls(train_size=100).build(model.trainable_variables)


@samplers
def test_half_precision_variables_are_refused(cls):
    model = keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(1, dtype=keras.DTypePolicy("bfloat16"))]
    )
    with pytest.raises(ValueError, match=r"bfloat16.*mixed_bfloat16"):
        cls(train_size=3).build(model.trainable_variables)


@samplers
def test_repr_says_what_is_sampled(cls):
    optimizer = cls(0.5, train_size=100, prior=4.0, temperature=0.25)
    optimizer.build(dense_model().trainable_variables)
    text = repr(optimizer)
    for part in ("train_size=100", "temperature=0.25", "'all': 4.0", "noise_std=0.05"):
        assert part in text


@pytest.mark.usefixtures("without_xla")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("learning_rate", 0.02),
        ("train_size", 11),
        ("prior", 2.0),
        ("temperature", 0.5),
        ("seed", 2),
        ("rho", 0.9),
        ("epsilon", 1e-2),
        ("adaptation_steps", 2),
        ("gradient_accumulation_steps", 2),
        ("clipvalue", 1e-4),
    ],
)
@pytest.mark.filterwarnings("ignore:.*changes the gradient")
def test_no_argument_is_without_effect(name, value):
    assert np.abs(end_of_chain(**{name: value}) - end_of_chain()).max() > 1e-6


@functools.cache
def end_of_chain(**changed):
    keras.utils.set_random_seed(1)
    arguments = {"learning_rate": 0.01, "train_size": 10, "prior": 1.0, "seed": 1}
    model = fitted(sg.pSGLD(**(arguments | changed)))
    return np.concatenate([w.ravel() for w in model.get_weights()])


# Variables and state


@samplers
def test_temperature_and_precision_are_read_at_every_step(cls):
    """No data: the variance of one step is 2 T H / N, its drift lambda theta H / N; no retrace."""
    traces = []

    class Counting(cls):
        def preconditioner(self, *args):
            traces.append(1)
            return super().preconditioner(*args)

    optimizer = Counting(1.0, train_size=10, prior=1.0, seed=1, **frozen_arguments(cls))
    variable = keras.Variable(np.full(50_000, 2.0, "float32"), name="theta")
    zero = np.zeros(50_000, "float32")
    optimizer.build([variable])
    results = []
    for temperature, precision in ((1.0, 1.0), (0.25, 100.0)):
        optimizer.temperature = temperature
        (group,) = optimizer.prior_precision.values()
        group.assign(precision)
        variable.assign(zero + 2.0)
        optimizer.apply([keras.ops.convert_to_tensor(zero)], [variable])
        results.append(variable.numpy())
    H = 1.0 if cls is sg.SGLD else 1e-2  # second moments are 0, epsilon is 100
    for result, temperature, precision in zip(results, (1.0, 0.25), (1.0, 100.0), strict=True):
        variance = 2 * temperature * H / 10
        assert result.var() == pytest.approx(variance, rel=4 * np.sqrt(2 / 50_000))
        expected = 2.0 * (1 - H * precision / 10)
        assert abs(result.mean() - expected) < 4 * np.sqrt(variance / 50_000)
    assert len(traces) == 1


def frozen_arguments(cls):
    return {} if cls is sg.SGLD else {"epsilon": 100.0}


@samplers
def test_temperature_above_zero_needs_a_train_size(cls):
    optimizer = cls(temperature=0)
    with pytest.raises(ValueError, match=r"needs `train_size`.*temperature=1"):
        optimizer.temperature = 1.0
    with pytest.raises(ValueError, match="temperature"):
        optimizer.temperature = -1.0


@samplers
def test_an_optimizer_belongs_to_one_model(cls):
    optimizer = cls(train_size=10)
    fitted(optimizer)
    with pytest.raises(ValueError, match=r"belongs to one model.*from_config"):
        fitted(optimizer, dense_model())
    fresh = cls.from_config(optimizer.get_config())
    assert int(fresh.iterations) == 0
    fitted(fresh, dense_model())


@samplers
def test_freezing_and_unfreezing(cls):
    model = dense_model()
    optimizer = cls(train_size=32, seed=1)
    fitted(optimizer, model)
    model.get_layer("hidden").trainable = False
    before = model.get_weights()
    fitted(optimizer, model)
    after = model.get_weights()
    assert all(np.array_equal(a, b) for a, b in zip(before[:2], after[:2], strict=True))
    assert not any(np.array_equal(a, b) for a, b in zip(before[2:], after[2:], strict=True))

    model = dense_model()
    model.get_layer("hidden").trainable = False
    optimizer = cls(train_size=32)
    fitted(optimizer, model)
    model.get_layer("hidden").trainable = True
    with pytest.raises(ValueError, match="build on all variables first"):
        fitted(optimizer, model)


@samplers
def test_variables_without_gradient_stay_and_are_named(cls):
    inputs = keras.Input((3,))
    used = keras.layers.Dense(1, name="used")(inputs)
    unused = keras.layers.Dense(1, name="unused")(inputs)
    model = keras.Model(inputs, [used, unused])
    model.compile(optimizer=cls(train_size=32, prior=1.0), loss=["mse", None])
    x, y = data()
    before = model.get_layer("unused").get_weights()
    with pytest.warns(UserWarning, match="Gradients do not exist for variables.*unused/kernel"):
        model.fit(x, [y, y], verbose=0)
    for now, then in zip(model.get_layer("unused").get_weights(), before, strict=True):
        np.testing.assert_array_equal(now, then)
    optimizer = cls(train_size=32)
    with pytest.raises(ValueError, match="No gradients provided for any variable"):
        optimizer.apply([None] * 4, dense_model().trainable_variables)


# Configuration


def configurations():
    groups = sg.GaussianPrior(groups={"kernel": 10.0, "bias": None})
    schedule = sg.schedules.PowerDecay(0.01, 10.0, 0.55)
    return [
        sg.SGLD(),
        sg.SGLD(schedule, train_size=5, prior=groups, temperature=0.5, seed=3, clipnorm=None),
        sg.SGLD(0.1, train_size=5, gradient_accumulation_steps=4, jit_compile=False, name="chain"),
        sg.pSGLD(0.3, train_size=5, rho=0.9, epsilon=1e-3, adaptation_steps=100, prior=2),
        sg.pSGLD(1e-3, train_size=60_000, prior=sg.GaussianPrior(3.0, groups="layer")),
    ]


@pytest.mark.parametrize("index", range(5))
def test_config_round_trip(index):
    optimizer = configurations()[index]
    config = json.loads(json.dumps(optimizer.get_config()))
    again = type(optimizer).from_config(config)
    assert again.get_config() == optimizer.get_config()
    assert again.prior == optimizer.prior
    assert again.seed == optimizer.seed
    serialized = json.loads(json.dumps(keras.optimizers.serialize(optimizer)))
    assert keras.optimizers.get(serialized).get_config() == optimizer.get_config()


def test_config_holds_constructor_values_after_training():
    optimizer = sg.pSGLD(1e-3, train_size=32, prior=3.0, temperature=0.7, seed=5)
    before = optimizer.get_config()
    model = fitted(optimizer)
    optimizer.temperature = 0.1
    assert optimizer.get_config() == before
    assert before["learning_rate"] == 1e-3
    model.optimizer.learning_rate = 2e-3
    assert optimizer.get_config()["learning_rate"] == pytest.approx(2e-3)


def test_seed_is_drawn_once_and_kept():
    keras.utils.set_random_seed(3)
    first, second = sg.SGLD(), sg.SGLD()
    keras.utils.set_random_seed(3)
    assert sg.SGLD().seed == first.seed != second.seed
    assert first.get_config()["seed"] == first.seed


# Saving


def state(optimizer):
    return {name: v.numpy() for name, v in optimizer._named_state().items()}


@samplers
@pytest.mark.parametrize("accumulation", [None, 2])
def test_saved_and_loaded_state_is_equal(cls, accumulation, tmp_path):
    prior = sg.GaussianPrior(groups="layer")
    optimizer = cls(1e-2, train_size=32, prior=prior, gradient_accumulation_steps=accumulation)
    model = fitted(optimizer, epochs=5)
    next(iter(optimizer.prior_precision.values())).assign(7.0)
    optimizer.temperature = 0.3
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras").optimizer
    saved = state(optimizer)
    assert sorted(saved) == sorted(state(loaded))
    for name, value in state(loaded).items():
        np.testing.assert_array_equal(value, saved[name], err_msg=name)
    assert float(loaded.temperature) == pytest.approx(0.3)


def test_another_layout_is_an_error_and_a_foreign_state_one_warning(tmp_path):
    path = tmp_path / "w.weights.h5"
    fitted(sg.SGLD(train_size=32, prior=1.0)).save_weights(path)
    for other in (
        sg.pSGLD(train_size=32, prior=1.0),
        sg.SGLD(train_size=32),
        sg.SGLD(train_size=32, prior=sg.GaussianPrior(groups="layer")),
        sg.SGLD(
            keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9), train_size=32, prior=1.0
        ),
    ):
        model = fitted(other)
        with pytest.raises(ValueError, match="does not fit this"):
            model.load_weights(path)

    fitted(keras.optimizers.Adam()).save_weights(path)
    model = fitted(sg.SGLD(train_size=32))
    with pytest.warns(UserWarning, match="not a sampler's.*starts afresh"):
        model.load_weights(path)


def test_a_chosen_seed_stays_and_a_drawn_one_is_restored(tmp_path):
    path = tmp_path / "w.weights.h5"
    fitted(sg.SGLD(train_size=32, seed=11)).save_weights(path)
    free, chosen = fitted(sg.SGLD(train_size=32)), fitted(sg.SGLD(train_size=32, seed=12))
    for model in (free, chosen):
        model.load_weights(path)
    assert free.optimizer.seed == free.optimizer.get_config()["seed"] == 11
    assert chosen.optimizer.seed == 12


def test_an_unbuilt_optimizer_is_saved_and_loaded(tmp_path):
    model = dense_model()
    model.compile(optimizer=sg.SGLD(train_size=32, seed=4), loss="mse")
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert loaded.optimizer.seed == 4
    assert int(loaded.optimizer.iterations) == 0


CONTINUE = """
import sys
import numpy as np
import keras
import keras_sgmcmc as sg

data, *paths = sys.argv[1:]
with np.load(data) as file:
    x, y = file["x"], file["y"]
for path in paths:
    model = keras.saving.load_model(path)
    model.fit(x, y, batch_size=8, epochs=5, shuffle=False, verbose=0)
    np.savez(f"{path}.npz", *model.get_weights())
"""


@pytest.mark.usefixtures("with_grappler")
def test_a_saved_chain_goes_on_bit_for_bit_in_a_fresh_process(tmp_path, monkeypatch):
    """20 steps, saved and loaded by name in safe mode, 20 more: as if never stopped."""
    monkeypatch.undo()  # compiled by XLA, as the other process is
    x, y = data()
    np.savez(tmp_path / "data.npz", x=x, y=y)
    paths, expected, mid = [], [], []
    makers = [
        lambda: sg.SGLD(
            sg.schedules.PowerDecay(0.05, 10.0, 0.6),
            train_size=32,
            prior=sg.GaussianPrior(groups={"kernel": 2.0, "bias": None}),
        ),
        lambda: sg.pSGLD(1e-2, train_size=32, prior=1.0, adaptation_steps=30),
    ]
    for i, make in enumerate(makers):
        model = fitted(make(), epochs=5)
        assert int(model.optimizer.iterations) == 20
        mid.append(model.get_weights())
        paths.append(tmp_path / f"{i}.keras")
        model.save(paths[-1])
        model.fit(x, y, batch_size=8, epochs=5, shuffle=False, verbose=0)
        expected.append(model.get_weights())
    fresh.run(CONTINUE, tmp_path / "data.npz", *paths)
    for i, path in enumerate(paths):
        with np.load(f"{path}.npz") as file:
            continued = [file[name] for name in file.files]
        for ours, theirs, then in zip(continued, expected[i], mid[i], strict=True):
            np.testing.assert_array_equal(ours, theirs)
            assert not np.array_equal(theirs, then)
