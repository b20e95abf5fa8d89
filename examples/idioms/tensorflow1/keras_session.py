"""Keras on a session whose memory grows, up to half of the GPU."""

import numpy as np
import tensorflow as tf

config = tf.ConfigProto()
config.gpu_options.allow_growth = True
config.gpu_options.per_process_gpu_memory_fraction = 0.5
tf.keras.backend.set_session(tf.Session(config=config))

model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=[4])])
model.compile(optimizer="sgd", loss="mse")
inputs = np.random.RandomState(0).rand(64, 4)
history = model.fit(inputs, inputs.sum(axis=1), epochs=20, verbose=0)
print("loss:", history.history["loss"][-1])
