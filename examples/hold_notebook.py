# %% [markdown]
# A lease in a notebook. Open this file in Jupyter (with jupytext), VS Code or Spyder and run it
# cell by cell, or as a whole with `python examples/hold_notebook.py`.

# %% Ask for GPU memory first. This cell waits until it is free, and shows which jobs it waits for.
# In Jupyter and VS Code, `%load_ext gpulease` and `%gpulease 2G --name notebook` do the same.
import gpulease

lease = gpulease.lease("2G", name="notebook")
print(lease)

# %% From here on TensorFlow stays within the lease.
import tensorflow as tf  # noqa: E402
from digits import load, network  # noqa: E402

tf.keras.utils.set_random_seed(1)
training, testing = load()
model = network()
model.fit(*training, epochs=8, batch_size=32, verbose=2)

# %% The lease lasts as long as the kernel, so there is no hurry to look at the result.
_, accuracy = model.evaluate(*testing, verbose=0)
print(f"test accuracy: {accuracy:.4f}")

# %% [markdown]
# Restart the kernel to release the memory. No framework releases a GPU before its process ends.
