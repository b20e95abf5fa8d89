"""The same computation on each GPU that device_lib lists, and the sum of the parts."""

import tensorflow as tf
from tensorflow.python.client import device_lib


def available_gpus():
    """Return the names of the GPUs of this machine."""
    return [it.name for it in device_lib.list_local_devices() if it.device_type == "GPU"]


parts = []
for number, device in enumerate(available_gpus() or ["/cpu:0"]):
    with tf.device(device), tf.name_scope(f"tower_{number}"):
        matrix = tf.ones([100, 100])
        parts.append(tf.reduce_sum(tf.matmul(matrix, matrix)))
with tf.device("/cpu:0"):
    total = tf.add_n(parts)

with tf.Session(config=tf.ConfigProto(log_device_placement=True)) as sess:
    print("total:", sess.run(total), "from", len(parts), "devices")
