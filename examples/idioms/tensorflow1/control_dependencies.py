"""Control dependencies: read a counter only after the updates of the step."""

import tensorflow as tf

counter = tf.Variable(0, name="counter")
average = tf.Variable(0.0, name="average")
value = tf.placeholder(tf.float32, [])

update = [tf.assign_add(counter, 1), tf.assign(average, 0.9 * average + 0.1 * value)]
with tf.control_dependencies(update):
    step = counter.read_value()

config = tf.ConfigProto()
config.gpu_options.allow_growth = True
with tf.Session(config=config) as sess:
    sess.run(tf.global_variables_initializer())
    for number in range(5):
        print("step", sess.run(step, {value: float(number)}))
    print(f"average: {sess.run(average):.3f}")
