"""Placement by hand: logs of it, soft placement, threads, and a product on the second GPU."""

import tensorflow as tf

tf.debugging.set_log_device_placement(True)
tf.config.set_soft_device_placement(True)
tf.config.threading.set_inter_op_parallelism_threads(2)
tf.config.threading.set_intra_op_parallelism_threads(4)

with tf.device("/CPU:0"):
    a = tf.constant([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    b = tf.constant([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
with tf.device("/gpu:1"):
    c = tf.matmul(a, b)
print(c)
