import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_sgmcmc import data as data_module
from keras_sgmcmc.callbacks import ChainMonitor
from keras_sgmcmc.data import Minibatches, minibatches

ROWS = 60

# Statistical tests draw from fixed seeds and allow four standard errors: a false alarm in 16,000.
SIGMAS = 4.0


def numbered(rows=ROWS):
    """Rows that tell which they are: `x[i] = i`, `y[i] = 2 i`."""
    return np.arange(rows, dtype="float32")[:, None], 2 * np.arange(rows)


def drawn(batches):
    """Row numbers of some batches of `numbered` data, one line a batch."""
    return np.stack([x.numpy()[:, 0] for x, *_ in batches]).astype(int)


def many(seed, batch_size, count):
    """Row numbers of the first `count` batches."""
    return minibatches(*numbered(), batch_size, seed=seed).batches(0, count)[1].numpy() // 2


def rows_by_hand(seed, first, count, batch_size, train_size):
    """Row numbers by Philox4x32-10, written from the paper (Salmon et al. 2011)."""
    blocks = (batch_size + 1) // 2
    position = np.arange(first * blocks, (first + count) * blocks, dtype=np.uint64)
    low = np.uint64(0xFFFFFFFF)
    c = [position & low, position >> np.uint64(32), 0 * position, 0 * position]
    key = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        p0, p1 = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        k0, k1 = (np.uint64(k) for k in key)
        shift = np.uint64(32)
        c = [(p1 >> shift) ^ c[1] ^ k0, p1 & low, (p0 >> shift) ^ c[3] ^ k1, p0 & low]
        key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
    words = np.stack([c[0] | c[1] << np.uint64(32), c[2] | c[3] << np.uint64(32)], axis=1)
    rows = words.reshape(count, 2 * blocks) % np.uint64(train_size)
    return rows[:, :batch_size].astype(int)


# Which rows


@pytest.mark.parametrize("batch_size", [1, 7, 8])
@pytest.mark.parametrize("seed", [0, 2**40 + 5])
def test_rows_are_philox(batch_size, seed):
    data = minibatches(*numbered(), batch_size, seed=seed, steps=30, start_step=2**33)
    expected = rows_by_hand(seed, 2**33, 30, batch_size, ROWS)
    np.testing.assert_array_equal(drawn(data), expected)


def test_rows_are_uniform():
    rows = many(1, 40, 500)
    expected = rows.size / ROWS
    chi_square = np.sum((np.bincount(rows.ravel(), minlength=ROWS) - expected) ** 2 / expected)
    degrees = ROWS - 1
    # Reshuffling would give 0, which is 5.4 standard errors below.
    assert abs(chi_square - degrees) < SIGMAS * np.sqrt(2 * degrees)


def test_batches_repeat_rows_as_draws_with_replacement_do():
    size, count = 30, 800
    rows = many(2, size, count)
    distinct = np.mean([len(set(batch)) for batch in rows])
    one, two = (1 - 1 / ROWS) ** size, (1 - 2 / ROWS) ** size
    variance = ROWS * one + ROWS * (ROWS - 1) * two - ROWS**2 * one**2
    assert abs(distinct - ROWS * (1 - one)) < SIGMAS * np.sqrt(variance / count)


def test_batch_noise_is_that_of_independent_draws():
    # With N/S batches an epoch, reshuffling makes the mean over an epoch constant.
    size, count = 10, 3000
    rows = many(3, size, count)
    noise = (rows - (ROWS - 1) / 2) / np.sqrt((ROWS**2 - 1) / 12)
    batch_means = noise.mean(1)
    epoch_means = batch_means.reshape(-1, ROWS // size).mean(1)
    for means, draws in ((batch_means, size), (epoch_means, ROWS)):
        ratio = np.mean(means**2) * draws
        assert abs(ratio - 1) < SIGMAS * np.sqrt(2 / len(means))
    for lag in (1, ROWS // size):
        correlation = np.mean(batch_means[lag:] * batch_means[:-lag]) * size
        assert abs(correlation) < SIGMAS / np.sqrt(count - lag)
    neighbours = np.mean(noise[:, 1:] * noise[:, :-1])
    assert abs(neighbours) < SIGMAS / np.sqrt(noise[:, 1:].size)


def test_other_seeds_draw_other_rows():
    one, two = (many(seed, 40, 500) for seed in (7, 8))
    share = np.mean(one == two)
    assert abs(share - 1 / ROWS) < SIGMAS * np.sqrt(1 / ROWS / one.size)


# A batch depends on seed and index alone


def test_batch_is_a_function_of_seed_and_index(monkeypatch):
    reference = drawn(minibatches(*numbered(), 7, seed=4, steps=40))
    many_epochs = minibatches(*numbered(), 7, seed=np.int64(4), steps=8)
    np.testing.assert_array_equal(np.concatenate([drawn(many_epochs) for _ in range(5)]), reference)
    started = minibatches(*numbered(), 7, seed=4, steps=3, start_step=np.int32(13))
    np.testing.assert_array_equal(drawn(started), reference[13:16])
    monkeypatch.setattr(data_module, "_LONGEST_BLOCK", 3)
    other_blocks = minibatches(*numbered(), 7, seed=4, steps=40)
    np.testing.assert_array_equal(drawn(other_blocks), reference)


def test_stacked_batches_are_the_same_and_leave_the_position():
    data = minibatches(*numbered(), 7, seed=4, steps=40)
    x, y = tf.function(lambda t: data.batches(t, 9))(tf.constant(5))
    np.testing.assert_array_equal(y.numpy(), 2 * x.numpy()[..., 0])
    assert data.position == 0
    np.testing.assert_array_equal(x.numpy()[..., 0], drawn(data)[5:14])


def test_large_rows_are_gathered_in_small_blocks():
    # 4 MiB hold one batch only; the draws are those of small rows.
    small = drawn(minibatches(*numbered(), 7, seed=4, steps=5))
    wide = np.repeat(numbered()[0], 200_000, axis=1)
    np.testing.assert_array_equal(
        drawn(minibatches(wide, None, 7, seed=4, steps=5).map(lambda x: (x[:, -1:],))), small
    )


def test_seed_comes_from_python_random():
    keras.utils.set_random_seed(11)
    one, other = (minibatches(*numbered(), 7) for _ in range(2))
    keras.utils.set_random_seed(11)
    again = minibatches(*numbered(), 7)
    assert one.seed == again.seed != other.seed
    np.testing.assert_array_equal(drawn(one), drawn(minibatches(*numbered(), 7, seed=one.seed)))


def test_later_changes_of_the_arrays_do_not_matter():
    aligned = np.zeros(4096 + 16, "float32")
    offset = (-aligned.ctypes.data % 64) // 4  # memory that TensorFlow would share
    x = aligned[offset : offset + 4096].reshape(-1, 1)
    data = minibatches(x, None, 50, seed=0, steps=4)
    x += 1
    assert not np.any(data.batches(0, 4))


# Iterators continue


def test_iterators_continue_after_whole_and_broken_epochs():
    reference = drawn(minibatches(*numbered(), 7, seed=5, steps=40))
    data = minibatches(*numbered(), 7, seed=5, steps=10)
    seen = [drawn(data)]
    for batch in data:
        seen.append(drawn([batch]))
        if data.position == 14:
            break
    assert data.position == 14  # nothing is read ahead
    seen.append(drawn(data.take(3)))
    seen.append(drawn(data))
    np.testing.assert_array_equal(np.concatenate(seen), reference[:27])
    data.position = 30
    np.testing.assert_array_equal(drawn(data), reference[30:])


def test_counts_in_a_graph():
    data = minibatches(*numbered(), 7, seed=5, steps=10)

    @tf.function
    def total():
        result = tf.zeros((), tf.int64)
        for _, y in data:
            result += tf.reduce_sum(y)
        return result

    expected = [int(np.sum(data.batches(first, 10)[1])) for first in (0, 10)]
    assert [int(total()) for _ in range(2)] == expected
    assert data.position == 20


def test_open_iterators_never_make_the_next_one_repeat():
    data = minibatches(*numbered(), 7, seed=5, steps=10)
    one, two = iter(data), iter(data)
    next(one)
    next(two)  # begins where the position is at its first batch
    assert data.position == 2
    list(one)
    np.testing.assert_array_equal(drawn([next(two)])[0], drawn([data_at(data, 2)])[0])
    assert data.position == 12


def data_at(data, t):
    return tuple(v[0] for v in data.batches(t, 1))


def test_iterators_carry_the_dataset():
    data = minibatches(*numbered(), 7)
    assert iter(data).minibatches is data


# With Keras


def weight_by_hand(data, first, count, weight=0.0, rate=1e-4):
    for t in range(first, first + count):
        x, y = (v.numpy().astype("float64").reshape(-1) for v in data_at(data, t))
        weight -= rate * np.mean((weight * x - y) * x)
    return weight


def compiled(**options):
    """Unbuilt, one weight, half the squared error."""
    model = keras.Sequential([keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
    model.compile(
        keras.optimizers.SGD(1e-4),
        lambda y, f: 0.5 * keras.ops.square(f - keras.ops.reshape(y, (-1, 1))),
        **options,
    )
    return model


@pytest.mark.parametrize(
    "options",
    [
        {"jit_compile": False},
        {"jit_compile": True},
        {"jit_compile": True, "steps_per_execution": 4},
        {"jit_compile": False, "steps_per_execution": 4},
        {"run_eagerly": True},
    ],
    ids=str,
)
def test_fit_trains_on_successive_batches(options):
    data = minibatches(*numbered(), 7, seed=6, steps=10)
    model = compiled(**options)
    for epochs in (1, 2):
        model.fit(data, epochs=epochs, verbose=0, shuffle=False)
    assert data.position == 30  # building the model took no batch
    assert int(model.optimizer.iterations) == 30
    weight = float(model.get_weights()[0][0, 0])
    assert weight == pytest.approx(weight_by_hand(data, 0, 30), rel=1e-5)


class Break(keras.callbacks.Callback):
    def __init__(self, at, error=None):
        self.at, self.error = at, error

    def on_train_batch_end(self, batch, logs=None):
        if batch == self.at:
            if self.error:
                raise self.error
            self.model.stop_training = True


def test_fit_continues_where_the_last_was_broken_off():
    data = minibatches(*numbered(), 7, seed=6, steps=10)
    model = compiled()
    model.fit(data, verbose=0, shuffle=False, callbacks=[Break(3)])
    assert data.position == 4
    with pytest.raises(KeyboardInterrupt):
        model.fit(data, verbose=0, shuffle=False, callbacks=[Break(5, KeyboardInterrupt())])
    assert data.position == 10
    model.fit(data, verbose=0, shuffle=False, epochs=2, steps_per_epoch=4)
    assert data.position == 18
    weight = float(model.get_weights()[0][0, 0])
    assert weight == pytest.approx(weight_by_hand(data, 0, 18), rel=1e-5)
    model.evaluate(data, verbose=0)
    assert data.position == 28


def test_train_function_gets_the_recognisable_iterator():
    data = minibatches(*numbered(), 7, steps=3)
    seen = []

    class Look(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            function = self.model.train_function

            def look(iterator):
                seen.append(iterator.minibatches)
                return function(iterator)

            self.model.train_function = look

    compiled().fit(data, epochs=2, verbose=0, shuffle=False, callbacks=[Look()])
    assert len(seen) == 6
    assert all(one is data for one in seen)


def test_sample_weights_and_structures_in_fit():
    x, y = numbered()
    inputs = {"a": keras.Input((1,), name="a"), "b": keras.Input((1,), name="b")}
    outputs = {
        "p": keras.layers.Dense(1, name="p")(inputs["a"]),
        "q": keras.layers.Dense(1, name="q")(inputs["b"]),
    }
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.SGD(0.0), {"p": "mse", "q": "mse"})
    data = minibatches({"a": x, "b": -x}, {"p": y, "q": y}, 7, sample_weight=y, seed=0, steps=1)
    loss = model.fit(data, verbose=0, shuffle=False).history["loss"][0]
    batch_x, batch_y, _ = tf.nest.map_structure(lambda v: v[0], data.batches(0, 1))
    predicted = model(batch_x)
    target = batch_y["p"].numpy()
    expected = sum(
        np.mean(target * (predicted[name].numpy()[:, 0] - target) ** 2) for name in ("p", "q")
    )
    assert loss == pytest.approx(expected, rel=1e-4)


def test_mirrored_strategy(mirrored):
    x = np.arange(60, dtype="float32")[:, None]
    seen = []

    class Recorder(keras.Model):
        def train_step(self, data):
            tf.py_function(lambda v: seen.append(v.numpy()[:, 0]), [data[0]], [])
            return super().train_step(data)

    with mirrored.scope():
        data = minibatches(x, 2 * x, 8, seed=6, steps=10)
        inputs = keras.Input((1,))
        model = Recorder(inputs, keras.layers.Dense(1)(inputs))
        model.compile("sgd", "mse", jit_compile=False)

    last = 0
    for _ in range(2):
        seen.clear()
        model.fit(data, epochs=2, verbose=0, shuffle=False)
        halves = {tuple(half) for half in seen}
        assert len(seen) == len(halves) == 40
        batches = data.batches(0, 100)[0].numpy()[:, :, 0].reshape(100, 2, 4)
        here = [t for t in range(100) if all(tuple(half) in halves for half in batches[t])]
        # Whole batches, one epoch after the other, beyond what Keras' look ahead took.
        assert here == list(range(here[0], here[0] + 20)), here
        assert last <= here[0] <= last + 10, here
        last = here[-1] + 1
        assert data.position == last


# Structures, shapes and dtypes


def test_attributes_cardinality_and_static_shapes():
    x, y = numbered()
    data = minibatches(x, y, np.int64(7), seed=3)
    assert isinstance(data, Minibatches)
    assert isinstance(data, tf.data.Dataset)
    assert (data.train_size, data.batch_size, data.seed) == (ROWS, 7, 3)
    assert (data.steps, data.position) == (ROWS // 7, 0)
    assert int(data.cardinality()) == len(data) == len(list(data)) == ROWS // 7
    assert [spec.shape.as_list() for spec in data.element_spec] == [[7, 1], [7]]
    assert minibatches(x, y, 100, start_step=5).steps == 1
    assert minibatches(x, y, 100, start_step=5).position == 5


def test_packs_like_keras():
    x, y = numbered()
    assert minibatches(x, None, 7).element_spec.shape == (7, 1)
    assert len(minibatches((x, x), None, 7).element_spec) == 1
    assert len(minibatches(x, y, 7).element_spec) == 2
    assert len(minibatches(x, y, 7, sample_weight=y).element_spec) == 3


def test_structures_and_weights_stay_aligned():
    x, y = numbered()
    data = minibatches({"a": x, "b": [3 * x, (4 * y,)]}, 5 * y, 7, sample_weight=6.0 * y, steps=3)
    for inputs, target, weight in data:
        row = inputs["a"].numpy()[:, 0]
        assert isinstance(inputs["b"], tuple)
        np.testing.assert_array_equal(inputs["b"][0].numpy()[:, 0], 3 * row)
        np.testing.assert_array_equal(inputs["b"][1][0].numpy(), 8 * row)
        np.testing.assert_array_equal(target.numpy(), 10 * row)
        np.testing.assert_array_equal(weight.numpy(), 12 * row)


@pytest.mark.parametrize(
    ("dtype", "floatx", "expected"),
    [
        ("float16", "float32", "float32"),
        ("float64", "float32", "float32"),
        ("float32", "float64", "float64"),
        ("uint8", "float32", "uint8"),
        ("int64", "float32", "int64"),
        ("bool", "float32", "bool"),
        ("str", "float32", "string"),
    ],
)
def test_dtypes_are_those_of_keras(dtype, floatx, expected):
    array = np.arange(20).astype(dtype)
    before = keras.config.floatx()
    keras.config.set_floatx(floatx)
    try:
        specs = minibatches((array, tf.constant(array)), None, 4).element_spec[0]
    finally:
        keras.config.set_floatx(before)
    assert [spec.dtype.name for spec in specs] == [expected, expected]


def test_pandas():
    pandas = pytest.importorskip("pandas")
    x, y = numbered()
    frame, series = pandas.DataFrame(x, columns=["u"]), pandas.Series(y)
    batch_x, batch_y = next(iter(minibatches(frame, series, 7)))
    assert batch_x.shape == batch_y.shape == (7, 1)
    np.testing.assert_array_equal(batch_y.numpy(), 2 * batch_x.numpy())


def test_arrays_are_captured_and_not_written_into_the_graph():
    data = minibatches(np.zeros((1000, 1000)), None, 4)
    function = tf.function(data.batches).get_concrete_function(
        tf.TensorSpec((), tf.int64), tf.TensorSpec((), tf.int64)
    )
    assert function.graph.as_graph_def().ByteSize() < 100_000


# Errors


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"y": np.zeros(59)}, ValueError, r"same number of rows.*'x': \[60\], 'y': \[59\]"),
        ({"sample_weight": np.zeros(61)}, ValueError, r"'sample_weight': \[61\]"),
        ({"x": (np.zeros(60), np.zeros(3))}, ValueError, r"'x': \[60, 3\]"),
        ({"x": np.zeros((0, 2)), "y": np.zeros(0)}, ValueError, r"at least one.*\[0\]"),
        ({"x": np.float32(1.0), "y": None}, ValueError, r"'x': \[0\]"),
        ({"y": None, "sample_weight": np.zeros(60)}, ValueError, "`sample_weight` needs targets"),
        ({"batch_size": 0}, ValueError, "`batch_size`.*batch_size=0"),
        ({"batch_size": None}, ValueError, "`batch_size`.*batch_size=None"),
        ({"batch_size": True}, ValueError, "`batch_size`.*batch_size=True"),
        ({"batch_size": 2.5}, ValueError, "`batch_size`.*batch_size=2.5"),
        ({"steps": 0}, ValueError, "`steps`.*steps=0"),
        ({"start_step": -1}, ValueError, "`start_step`.*start_step=-1"),
        ({"seed": "one"}, ValueError, "`seed`.*seed='one'"),
        ({"x": tf.data.Dataset.range(60)}, TypeError, "`x` should be an array.*_RangeDataset"),
        ({"x": (i for i in range(60))}, TypeError, "`x` should be an array.*generator"),
        ({"x": list(range(60))}, TypeError, "`x` should be an array.*asarray.*int"),
        ({"y": 32}, TypeError, "`y` should be an array.*int"),
        ({"x": (np.zeros(60), None)}, TypeError, "`x` should be an array.*NoneType"),
        ({"x": tf.sparse.eye(60)}, TypeError, "`x` should be an array.*SparseTensor"),
    ],
)
def test_errors(change, error, message):
    x, y = numbered()
    arguments = {"x": x, "y": y, "batch_size": 7, **change}
    with pytest.raises(error, match=message):
        minibatches(**arguments)


def test_position_is_checked():
    data = minibatches(*numbered(), 7)
    with pytest.raises(ValueError, match=r"`position`.*position=-1"):
        data.position = -1


def test_iterators_are_made_when_they_are_first_asked_for(monkeypatch):
    """Keras wants two an epoch; fused steps read from none."""
    made, owned = [], data_module._Iterator.__base__
    make = owned._create_iterator

    def noted(self, dataset):
        made.append(dataset)
        make(self, dataset)

    monkeypatch.setattr(owned, "_create_iterator", noted)
    x = np.arange(12.0, dtype="float32")[:, None]
    batches = minibatches(x, x, 3, seed=1)
    iterator = iter(batches)
    assert batches not in made
    # The position counts at the first batch.
    batches.position = 2
    first, _ = next(iterator)
    np.testing.assert_array_equal(first, batches.batches(2, 1)[0][0])
    assert made.count(batches) == 1
    assert len(list(iterator)) == 3
    assert made.count(batches) == 1

    @tf.function
    def in_graph():
        return next(other)[0]

    other = iter(batches)
    np.testing.assert_array_equal(in_graph(), batches.batches(6, 1)[0][0])
    np.testing.assert_array_equal(in_graph(), batches.batches(7, 1)[0][0])
    assert made.count(batches) == 2

    def fit(**arguments):
        made.clear()
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", **arguments)
        model.fit(batches, epochs=3, verbose=0, callbacks=[ChainMonitor()])
        return made.count(batches)

    assert fit(steps_per_execution=4) == 0
    assert fit() == 3
