"""Memory growth on each GPU: the first lines of most scripts for TensorFlow 2."""

import numpy as np
import tensorflow as tf

gpus = tf.config.list_physical_devices("GPU")
if gpus:
    try:
        for gpu in gpus:
            tf.config.experimental.set_memory_growth(gpu, True)
        logical_gpus = tf.config.list_logical_devices("GPU")
        print(len(gpus), "physical GPUs,", len(logical_gpus), "logical GPUs")
    except RuntimeError as error:
        print(error)  # memory growth must be set before the GPUs are initialized

model = tf.keras.Sequential([tf.keras.layers.Dense(8, activation="relu"), tf.keras.layers.Dense(1)])
model.compile(optimizer="adam", loss="mse")
inputs = np.random.default_rng(0).random((64, 4), dtype=np.float32)
history = model.fit(inputs, inputs.sum(axis=1), epochs=3, verbose=0)
print(f"loss: {history.history['loss'][-1]:.3f}")
