# %% [markdown]
# A lease in a notebook: open this file in Jupyter (with jupytext), VS Code or Spyder and run it
# cell by cell, or run all of it with `python examples/hold_notebook.py`.

# %% Ask for the GPU memory first. This cell waits until it is free, and says for whom.
import gpulease

lease = gpulease.lease("2G", name="notebook")
print(lease)

# %% From here on TensorFlow keeps to the lease.
import tensorflow as tf  # noqa: E402
from digits import load, network  # noqa: E402

tf.keras.utils.set_random_seed(1)
training, testing = load()
model = network()
model.fit(*training, epochs=8, batch_size=32, verbose=2)

# %% Look at the result for as long as you like: the lease lasts as long as the kernel.
_, accuracy = model.evaluate(*testing, verbose=0)
print(f"test accuracy: {accuracy:.4f}")

# %% [markdown]
# To give the memory back, restart the kernel: no framework lets go of a GPU before its process
# ends.
