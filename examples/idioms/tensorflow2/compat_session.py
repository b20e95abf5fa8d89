"""A script of TensorFlow 1 that was moved to tf.compat.v1, with the config that it always had."""

import tensorflow.compat.v1 as tf

tf.disable_v2_behavior()


def place(op):
    """Return the device of an operation: variables on the CPU."""
    return "/cpu:0" if "Var" in op.type else "/gpu:0"


config = tf.ConfigProto(allow_soft_placement=True, log_device_placement=True)
config.gpu_options.per_process_gpu_memory_fraction = 0.4
config.gpu_options.allow_growth = True
config.gpu_options.visible_device_list = "1"
config.intra_op_parallelism_threads = 4
config.inter_op_parallelism_threads = 2

with tf.device(place):
    counter = tf.get_variable("counter", initializer=0)
    with tf.control_dependencies([tf.assign_add(counter, 2)]):
        total = counter.read_value() + 1

with tf.Session(config=config) as sess:
    sess.run(tf.global_variables_initializer())
    print("total:", sess.run(total))
