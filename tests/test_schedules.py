import json
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_sgmcmc.schedules import BlockDecay, Cyclical, PowerDecay

CASES = {
    "PowerDecay": (
        PowerDecay(a=0.5, b=10.0, gamma=0.55),
        lambda t: 0.5 * (10.0 + t) ** -0.55,
    ),
    "BlockDecay": (
        BlockDecay(initial=0.1, every=50_000_000),
        lambda t: 0.1 * 0.5 ** np.floor(t / 50_000_000),
    ),
    "BlockDecay, factor near 1": (
        BlockDecay(initial=0.1, every=1_000_000, factor=0.999),
        lambda t: 0.1 * 0.999 ** np.floor(t / 1_000_000),
    ),
    "Cyclical": (
        Cyclical(initial=0.2, cycle_steps=3000),
        lambda t: 0.2 / 2 * (np.cos(np.pi * (t % 3000) / 3000) + 1),
    ),
}
STEPS = [0, 1, 2, 2999, 10**7, 2**24 + 1, 10**9 + 1, 2**31 + 5]


@pytest.fixture(params=CASES)
def case(request):
    return CASES[request.param]


def test_values(case):
    schedule, formula = case
    for t in STEPS:
        np.testing.assert_allclose(schedule(t), formula(t), rtol=1e-6, err_msg=f"t={t}")


def test_same_value_for_every_kind_of_step(case):
    schedule, formula = case
    for t in (
        np.int32(7),
        np.int64(7),
        np.array(7),
        tf.constant(7, "int32"),
        tf.constant(7, "int64"),
        tf.Variable(7, dtype="int64"),
        keras.Variable(7, dtype="int64"),
    ):
        value = schedule(t)
        assert value.dtype == "float32"
        np.testing.assert_allclose(value, formula(7), rtol=1e-6)


@pytest.mark.parametrize("jit_compile", [False, True])
def test_values_in_a_compiled_function(case, jit_compile):
    schedule, formula = case
    function = tf.function(
        schedule,
        jit_compile=jit_compile,
        input_signature=[tf.TensorSpec((), "int64")],
    )
    for t in STEPS:
        np.testing.assert_allclose(
            function(tf.constant(t, "int64")), formula(t), rtol=1e-6, err_msg=f"t={t}"
        )


def test_result_has_floatx(case):
    schedule, formula = case
    floatx = keras.config.floatx()
    keras.config.set_floatx("float64")
    try:
        value = schedule(12345)
    finally:
        keras.config.set_floatx(floatx)
    assert value.dtype == "float64"
    np.testing.assert_allclose(value, formula(12345), rtol=1e-12)


def test_blocks_begin_at_the_exact_step():
    # float32 rounds 2^24 + 1 to 2^24, and would begin the block one step late.
    schedule = BlockDecay(initial=1.0, every=2**24 + 1, factor=0.25)
    assert float(schedule(2**24)) == 1.0
    assert float(schedule(2**24 + 1)) == 0.25


def test_cycles_keep_the_exact_position():
    schedule = Cyclical(initial=1.0, cycle_steps=2)
    np.testing.assert_allclose(
        [schedule(t) for t in range(2**24, 2**24 + 4)], [1.0, 0.5, 1.0, 0.5], rtol=1e-6
    )


def test_end_of_a_cycle_does_not_cancel():
    # initial / 2 (1 - cos x) with x = pi / cycle_steps is initial (x / 2)^2 to relative order x^2.
    # In float32, cos(pi - x) + 1 is 0.
    schedule = Cyclical(initial=0.1, cycle_steps=10**6)
    np.testing.assert_allclose(schedule(10**6 - 1), 0.1 * (np.pi / 2e6) ** 2, rtol=1e-6)


def test_fit_takes_the_steps_of_the_schedule():
    schedule = BlockDecay(initial=0.5, every=2, factor=0.1)
    inputs = keras.Input((1,))
    outputs = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")(inputs)
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.SGD(schedule), loss=lambda y, y_pred: y_pred)
    model.fit(np.ones((5, 1)), np.ones((5, 1)), batch_size=1, verbose=0)
    # The gradient is 1, so the weight is minus the sum of the learning rates of five steps.
    np.testing.assert_allclose(model.get_weights()[0], -(0.5 + 0.5 + 0.05 + 0.05 + 0.005))


@pytest.mark.parametrize(
    "schedule",
    [
        PowerDecay(a=np.float32(0.5), b=np.int64(10), gamma=np.float64(0.75)),
        BlockDecay(initial=np.float64(0.25), every=np.int32(7), factor=np.float32(0.75)),
        Cyclical(initial=1, cycle_steps=np.int64(9)),
    ],
    ids=lambda schedule: type(schedule).__name__,
)
def test_serialization_round_trip(schedule):
    config = json.loads(json.dumps(keras.optimizers.schedules.serialize(schedule)))
    restored = keras.optimizers.schedules.deserialize(config)
    assert type(restored) is type(schedule)
    assert restored.get_config() == schedule.get_config()
    assert float(restored(20)) == float(schedule(20))

    optimizer = keras.optimizers.SGD(schedule)
    restored = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
    assert float(restored.learning_rate) == float(schedule(0))


def test_config_holds_the_constructor_values():
    assert PowerDecay(0.5, 10, 0.75).get_config() == {"a": 0.5, "b": 10.0, "gamma": 0.75}
    assert BlockDecay(0.5, 1e3).get_config() == {"initial": 0.5, "every": 1000, "factor": 0.5}
    assert Cyclical(0.5, 10).get_config() == {"initial": 0.5, "cycle_steps": 10}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PowerDecay(0.0, 1.0, 0.55), r"`a` should be a positive.*Received: a=0\.0"),
        (lambda: PowerDecay(1.0, -2, 0.55), r"`b` should be a positive.*Received: b=-2"),
        (lambda: PowerDecay(1.0, np.inf, 0.55), r"`b` should be a positive.*Received: b=inf"),
        (lambda: PowerDecay(1.0, 1.0, np.nan), r"`gamma` should be a finite.*Received: gamma=nan"),
        (lambda: PowerDecay("fast", 1.0, 0.55), r"`a` should be a positive.*Received: a='fast'"),
        (lambda: BlockDecay(-0.1, 10), r"`initial` should be a positive.*Received: initial=-0\.1"),
        (lambda: BlockDecay(0.1, 0), r"`every` should be an integer >= 1.*Received: every=0"),
        (lambda: BlockDecay(0.1, 2.5), r"`every` should be an integer >= 1.*every=2\.5"),
        (lambda: BlockDecay(0.1, 10, 0.0), r"`factor` should be a positive .*< 1.*factor=0\.0"),
        (lambda: BlockDecay(0.1, 10, 2.0), r"`factor` should be a positive .*< 1.*factor=2\.0"),
        (lambda: Cyclical(None, 10), r"`initial` should be a positive.*Received: initial=None"),
        (lambda: Cyclical(0.1, np.inf), r"`cycle_steps` should be an integer >= 1.*inf"),
    ],
)
def test_errors_name_the_argument_and_quote_the_value(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("gamma", "broken"),
    [(0.5, r"sum eps_t\^2 < inf"), (1 / 3, r"sum eps_t\^2 < inf"), (1.5, "sum eps_t = inf")],
)
def test_gamma_outside_robbins_monro_warns(gamma, broken):
    with pytest.warns(UserWarning, match=rf"Robbins-Monro.*gamma={gamma}, which breaks {broken}"):
        schedule = PowerDecay(0.5, 2.0, gamma)
    np.testing.assert_allclose(schedule(3), 0.5 * 5.0**-gamma, rtol=1e-6)


@pytest.mark.parametrize("gamma", [0.500001, 0.55, 1, 1.0])
def test_gamma_inside_robbins_monro_does_not_warn(gamma):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert PowerDecay(0.5, 2.0, gamma).gamma == gamma
