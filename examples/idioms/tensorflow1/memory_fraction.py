"""A session with four tenths of the GPU: the line at the top of countless scripts."""

import numpy as np
import tensorflow as tf

config = tf.ConfigProto()
config.gpu_options.per_process_gpu_memory_fraction = 0.4

x = tf.placeholder(tf.float32, [None], name="x")
y = tf.placeholder(tf.float32, [None], name="y")
slope = tf.Variable(0.0)
intercept = tf.Variable(0.0)
loss = tf.reduce_mean(tf.square(slope * x + intercept - y))
train = tf.train.GradientDescentOptimizer(0.1).minimize(loss)

inputs = np.linspace(-1, 1, 50)
with tf.Session(config=config) as sess:
    sess.run(tf.global_variables_initializer())
    for _ in range(200):
        sess.run(train, {x: inputs, y: 3 * inputs + 2})
    print("slope and intercept:", sess.run([slope, intercept]))
