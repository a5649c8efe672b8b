# As Horovod's documentation shows it for a loop of one's own on TensorFlow.
import tensorflow as tf
import horovod
import horovod.tensorflow as hvd


def train():
    hvd.init()
    x = tf.random.stateless_normal((256, 4), seed=(1, 2))
    y = tf.reduce_sum(x, axis=1, keepdims=True)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).shard(hvd.size(), hvd.rank()).repeat().batch(16)
    model = tf.keras.Sequential([tf.keras.Input((4,)), tf.keras.layers.Dense(1)])
    loss = tf.keras.losses.MeanSquaredError()
    opt = tf.keras.optimizers.Adam(0.001 * hvd.size())

    @tf.function
    def step(images, labels, first):
        with tf.GradientTape() as tape:
            value = loss(labels, model(images, training=True))
        # Horovod: averages gradients.
        tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(value, model.trainable_variables)
        opt.apply_gradients(zip(gradients, model.trainable_variables))
        if first:
            hvd.broadcast_variables(model.variables, root_rank=0)
            hvd.broadcast_variables(opt.variables, root_rank=0)
        return value

    for batch, (images, labels) in enumerate(dataset.take(64 // hvd.size())):
        value = step(images, labels, batch == 0)
        if batch % 10 == 0 and hvd.local_rank() == 0:
            print("step", batch, float(value))
    mean = hvd.allreduce(value, op=hvd.Average, name="loss")
    total = hvd.allreduce(tf.constant([1.0]), average=False)
    return model, mean, total


if __name__ == "__main__":
    train()
