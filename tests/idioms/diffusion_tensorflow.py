"""Denoising diffusion: an adapted normalizer, random times and noises, and a network that follows the trained one."""

import keras
import tensorflow as tf
from keras import ops
from tiny import images

BACKENDS = ("tensorflow",)
layers = keras.layers


def network():
    noisy, level = keras.Input((8, 8, 1)), keras.Input((1, 1, 1))
    both = layers.Concatenate()([noisy, layers.UpSampling2D(8)(level)])
    x = layers.BatchNormalization(center=False, scale=False)(layers.Conv2D(4, 3, padding="same")(both))
    return keras.Model([noisy, level], layers.Conv2D(1, 1, kernel_initializer="zeros")(x))


class Diffusion(keras.Model):
    def __init__(self):
        super().__init__()
        self.normalizer = layers.Normalization()
        self.network = network()
        self.follower = keras.models.clone_model(self.network)

    def compile(self, **options):
        super().compile(**options)
        self.tracker = keras.metrics.Mean(name="noise_loss")

    @property
    def metrics(self):
        return [self.tracker]

    def noise_loss(self, data, network, training):
        clean = self.normalizer(data, training=training)
        n = ops.shape(clean)[0]
        noise = keras.random.normal((n, 8, 8, 1))
        angle = keras.random.uniform((n, 1, 1, 1)) * 1.5
        noisy = ops.cos(angle) * clean + ops.sin(angle) * noise
        return self.loss(noise, network([noisy, ops.sin(angle) ** 2], training=training))

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.noise_loss(data, self.network, True)
        variables = self.network.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        self.tracker.update_state(loss)
        for weight, follower in zip(self.network.weights, self.follower.weights, strict=True):
            follower.assign(0.99 * follower + 0.01 * weight)
        return {m.name: m.result() for m in self.metrics}

    def test_step(self, data):
        self.tracker.update_state(self.noise_loss(data, self.follower, False))
        return {m.name: m.result() for m in self.metrics}


def main():
    keras.utils.set_random_seed(9)
    model = Diffusion()
    model.compile(optimizer=keras.optimizers.AdamW(1e-3), loss=keras.losses.mean_absolute_error)
    model.normalizer.adapt(images())
    history = model.fit(images(), batch_size=16, epochs=2, validation_data=images(32)).history
    return {"_history": history, "_models": [model.network, model.follower]}
