"""An optimizer of one's own that centres gradients, a schedule of one's own, and a callback that finds a rate."""

import keras
from keras import ops
from tiny import numbers

BACKENDS = ("torch", "jax", "tensorflow")


class Centred(keras.optimizers.RMSprop):
    def update_step(self, gradient, variable, learning_rate):
        if len(gradient.shape) > 1:
            gradient = gradient - ops.mean(gradient, axis=0, keepdims=True)
        super().update_step(gradient, variable, learning_rate)


class Warm(keras.optimizers.schedules.LearningRateSchedule):
    def __call__(self, step):
        return 0.02 * ops.minimum(1.0, (ops.cast(step, "float32") + 1) / 5)


class Finder(keras.callbacks.Callback):
    """Raises the rate after each batch and notes the loss, then puts back weights and rate."""

    def on_train_begin(self, logs=None):
        self.weights, self.losses = self.model.get_weights(), []
        self.model.optimizer.learning_rate = 1e-4

    def on_epoch_end(self, epoch, logs=None):
        self.losses.append(logs["loss"])
        self.model.optimizer.learning_rate = 3 * float(self.model.optimizer.learning_rate)

    def on_train_end(self, logs=None):
        self.model.set_weights(self.weights)


def main():
    keras.utils.set_random_seed(8)
    x, y = numbers(61)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    finder = Finder()
    model.compile(keras.optimizers.SGD(0.1), loss)
    model.fit(x, y, batch_size=8, epochs=3, callbacks=[finder])
    model.compile(Centred(Warm(), epsilon=1e-2), loss, metrics=["accuracy"])
    history = model.fit(x, y, batch_size=8, epochs=2).history
    return {"losses": finder.losses, "history": history, "model": model}
