"""The GPU is chosen by its number on a shared machine, before TensorFlow is imported."""

import os

os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
os.environ["CUDA_VISIBLE_DEVICES"] = "2"

import tensorflow as tf

print("GPU:", tf.test.gpu_device_name() or "none")
