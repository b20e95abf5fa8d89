"""The model on the second GPU, without soft placement."""

import tensorflow as tf

with tf.device("/cpu:0"):
    pictures = tf.random_normal([32, 64], seed=1)
with tf.device("/gpu:1"):
    weights = tf.Variable(tf.truncated_normal([64, 10], stddev=0.1, seed=2))
    scores = tf.nn.softmax(tf.matmul(pictures, weights))

with tf.Session() as sess:
    sess.run(tf.global_variables_initializer())
    print("scores:", sess.run(scores).shape)
