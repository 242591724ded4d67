"""A posterior predictive as one ordinary network: Bayesian dark knowledge."""

import keras
import numpy as np
import tensorflow as tf
from keras import tree

from keras_sgmcmc.likelihoods import (
    FromLoss,
    MeanAbsoluteError,
    MeanSquaredError,
    Unknown,
    _are_probabilities,
    compiled_likelihoods,
)
from keras_sgmcmc.validation import positive_integer


def distill(
    posterior,
    student,
    x,
    *,
    epochs=10,
    batch_size=32,
    optimizer="adam",
    callbacks=None,
    verbose="auto",
):
    """Trains one network to predict what all draws of a posterior predict together.

        min_w  1/n sum_i KL[ p(y | x_i, data) || p(y | student_w(x_i)) ]

    up to a constant, where p(y | x, data) = sum_s w_s p(y | x, theta_s). The divergence is
    linear in the first density, so that is also the average over the draws of the divergence from
    each of them, which Korattikara et al. minimise while they sample.

    What the student's outputs mean is read from the loss that it is compiled with (see
    `keras_sgmcmc.likelihoods`); one that is not compiled has the likelihood of the posterior.

    | student's likelihood | learns |
    |---|---|
    | categorical or Bernoulli | the averaged probabilities |
    | mean squared or absolute error | the mean of y, by squared error |
    | a loss with `log_prob`, e.g. `NegativeLogLikelihood` | mean and total variance of y |

    A `NegativeLogLikelihood` of a Normal whose spread is an output of the student therefore learns
    `total_std` of `Posterior.predict_uncertainty` for each x. (The expectation over y is taken at
    mean - total_std and mean + total_std, which is exact for a log density that is quadratic in
    y.)

    The predictions of the draws are made once, before training: they take n times the size of an
    output, 4 bytes a class. `x` needs no labels. It should be of the kind of x on which the student
    is to be used: the training rows, perturbed copies of them, or rows without labels, of which
    the student can learn where the posterior is unsure.

    Only weights and other state of the student's layers are changed: how it is compiled is not, so
    it may be the posterior's own model. It saves, predicts and trains as any Keras model. Penalties
    of its layers are added to the loss that the progress bar shows, which is the crossentropy, not
    the divergence: at best it is the entropy of p(y | x, data).

    Args:
        posterior: A `Posterior` of a model with one output, compiled with a loss that is a density.
        student: Keras model, compiled or not, whose predictions have the posterior's shape.
        x: Array or tensor, or a list, tuple or dict of them as both models take it, n rows.
        epochs: Passes over `x`. Defaults to 10.
        batch_size: Rows of a step, and of a forward pass of the draws. Defaults to 32.
        optimizer: Keras optimizer, or its name. Defaults to `"adam"`. A schedule that decreases the
            learning rate to 0 makes the student more exact.
        callbacks: Keras callbacks. Their `model` is one around the student, without metrics.
            Defaults to None.
        verbose: As in `fit`; 0 also hides the bar of the draws. Defaults to `"auto"`.

    Returns:
        `student`.

    Raises:
        ValueError: If there is no draw, if the likelihood of posterior or student is not known, if
            their predictions differ in shape, or if `x` is a Dataset.

    Example:

    ```python
    student = keras.models.clone_model(model)
    keras_sgmcmc.distill(samples.posterior, student, x_train, epochs=20)
    student.save("student.keras")
    ```

    References:
        - A. Korattikara, V. Rathod, K. Murphy, M. Welling, "Bayesian dark knowledge", NIPS 2015.
        - C. Li, C. Chen, D. Carlson, L. Carin, "Preconditioned stochastic gradient Langevin
          dynamics for deep neural networks", AAAI 2016, which distils its draws so.
    """
    epochs = positive_integer("epochs", epochs)
    batch_size = positive_integer("batch_size", batch_size)
    if isinstance(x, tf.data.Dataset):
        raise ValueError(
            "`x` should be an array, or a list, tuple or dict of them: its rows are shuffled "
            "together with the predictions for them. For a Dataset that fits in memory pass "
            f"np.concatenate of its batches. Received: x of type {type(x).__name__}"
        )
    x = tree.map_structure(np.asarray, x)
    progress = {"batch_size": batch_size, "verbose": verbose}
    likelihood = _likelihood_of_student(posterior, student, x)
    if isinstance(likelihood, FromLoss):
        predicted = posterior.predict_uncertainty(x, **progress)
        points = [predicted.mean - predicted.total_std, predicted.mean + predicted.total_std]
    else:
        points = [posterior.predict(x, **progress)]
    trainer = _Around(student)
    trainer.compile(optimizer, loss=_Crossentropy(likelihood))
    trainer.fit(x, np.stack(points, axis=1), epochs=epochs, callbacks=callbacks, **progress)
    return student


def _likelihood_of_student(posterior, student, x):
    row = tree.map_structure(lambda a: a[:1], x)
    of_teacher, outputs = posterior.model(row, training=False), student(row, training=False)
    if tree.is_nested(of_teacher) or tree.is_nested(outputs):
        shapes = tree.map_structure(lambda a: tuple(a.shape), [of_teacher, outputs])
        raise ValueError(
            "`posterior.model` and `student` should have one output each. "
            f"Received: outputs of shapes {shapes[0]} and {shapes[1]}"
        )
    (of_posterior,) = compiled_likelihoods(posterior.model, of_teacher)
    if isinstance(of_posterior, Unknown):
        raise ValueError(
            "`posterior` should be of a model compiled with a loss that is a density. Compile "
            "posterior.model with the loss of its draws, e.g. "
            "posterior.model.compile(loss='sparse_categorical_crossentropy'). "
            f"Received: {of_posterior.reason}"
        )
    compiled = getattr(student, "_compile_config", None)
    if compiled is None or compiled.config["loss"] is None:
        likelihood = of_posterior
        if getattr(likelihood, "from_logits", None) is False and not _are_probabilities(outputs):
            raise ValueError(
                "`student` is not compiled and does not end in a softmax or sigmoid, so it is not "
                "known whether its outputs are logits. Compile it with its loss, e.g. "
                "student.compile(loss=keras.losses.SparseCategoricalCrossentropy("
                f"from_logits=True)). Received: student={student.name!r}"
            )
    else:
        (likelihood,) = compiled_likelihoods(student, outputs)
        if isinstance(likelihood, Unknown):
            raise ValueError(
                "`student` should be compiled with a loss that is a density, or not be compiled. "
                f"Received: {likelihood.reason}"
            )
    expected, shape = of_posterior.mean(of_teacher).shape, likelihood.mean(outputs).shape
    if shape != expected:
        raise ValueError(
            f"`student` should predict rows of the shape {tuple(expected[1:])}, as the posterior "
            f"does. Received: a student that predicts rows of the shape {tuple(shape[1:])}"
        )
    if isinstance(likelihood, MeanAbsoluteError):
        return MeanSquaredError()
    if _are_probabilities(outputs) and hasattr(likelihood, "from_logits"):
        likelihood.from_logits = False
    return likelihood


class _Around(keras.Model):
    """Trains the student without being it, so that how the student is compiled stays."""

    def __init__(self, student):
        super().__init__(name=f"distilling_{student.name}")
        self.student = student

    def call(self, inputs, training=None):
        return self.student(inputs, training=training)


class _Crossentropy(keras.losses.Loss):
    """-log p(y | outputs) of each row, averaged over the points y[:, i]."""

    def __init__(self, likelihood):
        super().__init__(name="crossentropy")
        self.likelihood = likelihood

    def call(self, y_true, y_pred):
        points = range(y_true.shape[1])
        return -sum(self.likelihood.log_prob(y_true[:, i], y_pred) for i in points) / len(points)
