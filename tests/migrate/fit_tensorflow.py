# As Horovod's documentation shows it for fit on TensorFlow: GPUs by local rank, scaled rate, warm-up, callbacks.
import numpy as np
import tensorflow as tf

import horovod.tensorflow.keras as hvd

# Horovod: initialize it.
hvd.init()

# Horovod: one GPU for each process.
gpus = tf.config.list_physical_devices("GPU")
for gpu in gpus:
    tf.config.experimental.set_memory_growth(gpu, True)
if gpus:
    tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")

x = np.random.default_rng(0).normal(size=(256, 4)).astype("float32")
y = x.sum(axis=1, keepdims=True)
dataset = tf.data.Dataset.from_tensor_slices((x, y)).shard(hvd.size(), hvd.rank())
dataset = dataset.repeat().shuffle(256).batch(16)

model = tf.keras.Sequential([tf.keras.Input((4,)), tf.keras.layers.Dense(1)])

# Horovod: a larger rate for more processes.
scaled_rate = 0.01 * hvd.size()
opt = tf.keras.optimizers.Adam(scaled_rate)

# Horovod: wrap the optimizer.
opt = hvd.DistributedOptimizer(opt, backward_passes_per_step=1, average_aggregated_gradients=True)

model.compile(loss="mse", optimizer=opt, metrics=["mae"], experimental_run_tf_function=False)

callbacks = [
    # Horovod: all begin with the weights of the first.
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),

    # Horovod: metrics are averaged.
    hvd.callbacks.MetricAverageCallback(),

    # Horovod: the rate rises slowly.
    hvd.callbacks.LearningRateWarmupCallback(initial_lr=scaled_rate, warmup_epochs=2, verbose=1),
    tf.keras.callbacks.ReduceLROnPlateau(patience=10),
]

# Horovod: only the first process writes.
if hvd.rank() == 0:
    callbacks.append(tf.keras.callbacks.ModelCheckpoint("checkpoint-{epoch}.keras"))

verbose = 1 if hvd.rank() == 0 else 0
history = model.fit(dataset, steps_per_epoch=16 // hvd.size(), callbacks=callbacks, epochs=3, verbose=verbose)
if hvd.rank() == 0:
    print("ranks", hvd.size(), "loss", history.history["loss"][-1])
