"""A session with every option that people set: growth, one GPU, soft placement, logs, threads."""

import tensorflow as tf

gpu_options = tf.GPUOptions(allow_growth=True, visible_device_list="0")
config = tf.ConfigProto(
    gpu_options=gpu_options,
    allow_soft_placement=True,
    log_device_placement=True,
    inter_op_parallelism_threads=2,
    intra_op_parallelism_threads=4,
)

with tf.device("/gpu:0"):
    a = tf.constant([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], shape=[2, 3], name="a")
    b = tf.constant([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], shape=[3, 2], name="b")
    c = tf.matmul(a, b)

sess = tf.Session(config=config)
print(sess.run(c))
