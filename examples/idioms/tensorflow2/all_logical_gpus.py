"""The same product on each logical GPU, and the sum of the parts on the CPU."""

import tensorflow as tf

tf.debugging.set_log_device_placement(True)
gpus = tf.config.list_logical_devices("GPU")
parts = []
for gpu in gpus or tf.config.list_logical_devices("CPU"):
    with tf.device(gpu.name):
        a = tf.constant([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
        b = tf.constant([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
        parts.append(tf.matmul(a, b))
with tf.device("/CPU:0"):
    total = tf.add_n(parts)
print(total)
print("devices:", len(parts))
