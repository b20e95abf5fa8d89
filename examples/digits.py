"""Train a small network on 1,797 handwritten digits, in plain TensorFlow.

It takes about half a minute on two CPU cores, which leaves time to watch it run.
"""

import argparse
import gzip
from pathlib import Path

import numpy as np
import tensorflow as tf

DATA = Path(__file__).with_name("digits.csv.gz")
FOR_TESTING = 360


def load() -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Return images (8 by 8, values from 0 to 1) with their digits: for training, for testing."""
    with gzip.open(DATA, "rt") as lines:
        table = np.loadtxt(lines, delimiter=",", skiprows=1, dtype=np.float32)
    table = np.random.default_rng(0).permutation(table)
    images = table[:, :64].reshape(-1, 8, 8, 1) / 16
    digits = table[:, 64].astype(np.int32)
    testing = images[:FOR_TESTING], digits[:FOR_TESTING]
    return (images[FOR_TESTING:], digits[FOR_TESTING:]), testing


def network() -> tf.keras.Model:
    """Return an untrained convolutional network."""
    layers = tf.keras.layers
    model = tf.keras.Sequential(
        [
            layers.Input((8, 8, 1)),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.Conv2D(32, 3, activation="relu"),
            layers.Flatten(),
            layers.Dropout(0.3),
            layers.Dense(64, activation="relu"),
            layers.Dense(10),
        ]
    )
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=30, help="passes over the digits (30)")
    parser.add_argument("--batch", type=int, default=32, help="digits per step (32)")
    arguments = parser.parse_args()

    tf.keras.utils.set_random_seed(1)
    training, testing = load()
    model = network()
    model.fit(*training, epochs=arguments.epochs, batch_size=arguments.batch, verbose=2)
    _, accuracy = model.evaluate(*testing, verbose=0)
    print(f"test accuracy: {accuracy:.4f}")


if __name__ == "__main__":
    main()
