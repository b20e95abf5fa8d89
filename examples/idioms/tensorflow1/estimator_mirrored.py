"""An Estimator on all GPUs with MirroredStrategy, and a session config that lets memory grow."""

import tempfile

import numpy as np
import tensorflow as tf


def model(features, labels, mode):
    """Fit a line."""
    answers = tf.layers.dense(features["x"], 1)
    loss = tf.losses.mean_squared_error(labels, answers)
    train = tf.train.GradientDescentOptimizer(0.2).minimize(
        loss, global_step=tf.train.get_or_create_global_step()
    )
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train)


def examples():
    """Return points of a line, without end."""
    x = np.linspace(-1, 1, 64, dtype=np.float32).reshape(-1, 1)
    return tf.data.Dataset.from_tensor_slices(({"x": x}, 3 * x + 2)).repeat().batch(32)


session_config = tf.ConfigProto(allow_soft_placement=True)
session_config.gpu_options.allow_growth = True
with tempfile.TemporaryDirectory() as folder:
    run = tf.estimator.RunConfig(
        train_distribute=tf.distribute.MirroredStrategy(), session_config=session_config
    )
    estimator = tf.estimator.Estimator(model, model_dir=folder, config=run)
    estimator.train(examples, steps=100)
    print("slope:", estimator.get_variable_value("dense/kernel")[0, 0])
