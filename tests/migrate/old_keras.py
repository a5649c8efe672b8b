# As Horovod's documentation shows it for Keras 2 on TensorFlow 1, and what has no counterpart.
import math, keras, horovod.keras as hvd
import tensorflow as tf
from keras import backend as K

hvd.init()
config = tf.compat.v1.ConfigProto()
config.gpu_options.allow_growth = True
config.gpu_options.visible_device_list = str(hvd.local_rank())
K.set_session(tf.compat.v1.Session(config=config))

resume_from = hvd.broadcast(3, 0, name="resume_from")
compression = hvd.Compression.fp16 if True else hvd.Compression.none
epochs = int(math.ceil(12.0 / hvd.size()))

model = hvd.load_model("model.h5", compression=compression)
model.compile(
    loss="mse",
    optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.1 * hvd.size(), momentum=0.9), compression=hvd.Compression.fp16, op=hvd.Adasum, backward_passes_per_step=4),
)
callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
callbacks.append(hvd.callbacks.LearningRateWarmupCallback(0.1 * hvd.size(), 5))
callbacks.append(hvd.callbacks.LearningRateScheduleCallback(initial_lr=0.1, start_epoch=30, multiplier=0.1))
if hvd.rank() == 0:
    callbacks.append(keras.callbacks.ModelCheckpoint("checkpoint.keras"))
    callbacks.append(keras.callbacks.TensorBoard("logs"))
score = hvd.allreduce(model.evaluate([[1.0]], [1.0]))
who = hvd.cross_rank(), hvd.nccl_built()


@hvd.elastic.run
def train(state):
    if hvd.rank() == 0: print("begin")
    hvd.join()
