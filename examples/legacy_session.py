"""Train on the same digits in the style of TensorFlow 1: graph, placeholders, monitored session.

    gpulease run --mem 4G examples/legacy_session.py

Such scripts request memory with a ConfigProto. This one requests nine tenths of the GPU, with
growth, as many scripts do.
"""

import argparse
import gzip
from pathlib import Path

import numpy as np
import tensorflow as tf

DATA = Path(__file__).with_name("digits.csv.gz")
FOR_TESTING = 360
v1 = tf.compat.v1


def load() -> tuple[np.ndarray, np.ndarray]:
    """Return images of 64 values from 0 to 1, and the digits that they show."""
    with gzip.open(DATA, "rt") as lines:
        table = np.loadtxt(lines, delimiter=",", skiprows=1, dtype=np.float32)
    table = np.random.default_rng(0).permutation(table)
    return table[:, :64] / 16, table[:, 64].astype(np.int32)


def dense(values: tf.Tensor, name: str, width: int) -> tf.Tensor:
    """Return a fully connected layer of `width` outputs on `values`."""
    inputs = int(values.shape[1])
    start = v1.truncated_normal_initializer(stddev=(2 / inputs) ** 0.5, seed=1)
    weights = v1.get_variable(f"{name}_weights", [inputs, width], initializer=start)
    biases = v1.get_variable(f"{name}_biases", [width], initializer=v1.zeros_initializer())
    return tf.matmul(values, weights) + biases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=300, help="passes over the digits (300)")
    arguments = parser.parse_args()
    pictures, digits = load()

    with tf.Graph().as_default():
        images = v1.placeholder(tf.float32, [None, 64])
        labels = v1.placeholder(tf.int32, [None])
        scores = dense(tf.nn.relu(dense(images, "hidden", 128)), "output", 10)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=scores)
        right = tf.equal(tf.argmax(scores, 1, output_type=tf.int32), labels)
        accuracy = tf.reduce_mean(tf.cast(right, tf.float32))
        step = v1.train.get_or_create_global_step()
        train = v1.train.AdamOptimizer().minimize(tf.reduce_mean(losses), global_step=step)

        config = v1.ConfigProto(allow_soft_placement=True)
        config.gpu_options.per_process_gpu_memory_fraction = 0.9
        config.gpu_options.allow_growth = True
        shuffle = np.random.default_rng(1)
        with v1.train.MonitoredTrainingSession(config=config) as session:
            for _ in range(arguments.epochs):
                order = shuffle.permutation(np.arange(FOR_TESTING, len(digits)))
                for batch in np.array_split(order, len(order) // 32):
                    session.run(train, {images: pictures[batch], labels: digits[batch]})
            test = {images: pictures[:FOR_TESTING], labels: digits[:FOR_TESTING]}
            print(f"test accuracy: {session.run(accuracy, test):.4f}")


if __name__ == "__main__":
    main()
