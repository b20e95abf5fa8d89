"""Train on all GPUs of a lease at once, with a copy of the network on each.

    gpulease run --mem 4G --gpus 2 examples/two_gpus.py

If TensorFlow finds no GPU, the copies are on its CPU devices. On simulated GPUs it finds as many
CPU devices as GPUs were leased. With a single device there is a single copy.
"""

import argparse

import tensorflow as tf
from digits import load, network


def strategy() -> tf.distribute.Strategy:
    """Return a strategy with a replica on each GPU, or else on each CPU device."""
    gpus = tf.config.list_logical_devices("GPU")
    devices = [device.name for device in gpus or tf.config.list_logical_devices("CPU")]
    # NCCL refuses two logical GPUs on the same card.
    crossing = tf.distribute.HierarchicalCopyAllReduce() if len(devices) > 1 else None
    return tf.distribute.MirroredStrategy(devices, cross_device_ops=crossing)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20, help="passes over the digits (20)")
    arguments = parser.parse_args()

    tf.keras.utils.set_random_seed(1)
    training, testing = load()
    mirrored = strategy()
    print(f"replicas: {mirrored.num_replicas_in_sync}", flush=True)
    with mirrored.scope():
        model = network()
    batch = 32 * mirrored.num_replicas_in_sync
    model.fit(*training, epochs=arguments.epochs, batch_size=batch, verbose=2)
    _, accuracy = model.evaluate(*testing, batch_size=batch, verbose=0)
    print(f"test accuracy: {accuracy:.4f}")


if __name__ == "__main__":
    main()
