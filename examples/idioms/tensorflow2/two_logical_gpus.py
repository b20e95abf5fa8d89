"""Two logical GPUs on the first GPU, to try code for several GPUs on one."""

import tensorflow as tf

gpus = tf.config.list_physical_devices("GPU")
if gpus:
    try:
        tf.config.set_logical_device_configuration(
            gpus[0],
            [
                tf.config.LogicalDeviceConfiguration(memory_limit=4096),
                tf.config.LogicalDeviceConfiguration(memory_limit=4096),
            ],
        )
        logical_gpus = tf.config.list_logical_devices("GPU")
        print(len(gpus), "physical GPUs,", len(logical_gpus), "logical GPUs")
    except RuntimeError as error:
        print(error)

strategy = tf.distribute.MirroredStrategy(
    cross_device_ops=tf.distribute.HierarchicalCopyAllReduce()
)
with strategy.scope():
    total = tf.Variable(0.0, aggregation=tf.VariableAggregation.SUM)
print("replicas:", strategy.num_replicas_in_sync)
