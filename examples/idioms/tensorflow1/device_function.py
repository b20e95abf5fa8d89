"""A device function: variables on the CPU, everything else on the GPU."""

import tensorflow as tf


def place(op):
    """Return the device of an operation."""
    return "/cpu:0" if op.type.startswith("Variable") else "/gpu:0"


with tf.device(place):
    weight = tf.get_variable("weight", initializer=5.0)
    loss = tf.square(weight)
    train = tf.train.MomentumOptimizer(0.05, 0.9).minimize(loss)

config = tf.ConfigProto(allow_soft_placement=True, log_device_placement=True)
with tf.Session(config=config) as sess:
    sess.run(tf.global_variables_initializer())
    for _ in range(100):
        sess.run(train)
    print(f"loss: {sess.run(loss):.4f}")
