"""A limit of one gigabyte for the first GPU, by a logical GPU."""

import tensorflow as tf

gpus = tf.config.list_physical_devices("GPU")
if gpus:
    try:
        tf.config.set_logical_device_configuration(
            gpus[0], [tf.config.LogicalDeviceConfiguration(memory_limit=1024)]
        )
    except RuntimeError as error:
        print(error)

print(tf.reduce_sum(tf.random.normal([1000, 1000])).shape)
