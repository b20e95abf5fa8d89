"""Only the first GPU is visible."""

import tensorflow as tf

gpus = tf.config.list_physical_devices("GPU")
if gpus:
    try:
        tf.config.set_visible_devices(gpus[0], "GPU")
        logical_gpus = tf.config.list_logical_devices("GPU")
        print(len(gpus), "physical GPUs,", len(logical_gpus), "logical GPU")
    except RuntimeError as error:
        print(error)

print(tf.reduce_sum(tf.random.normal([1000, 1000])).shape)
