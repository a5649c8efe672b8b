"""Style transfer and maps of attention: an image, not a model, is what an optimizer changes, or gradients are of."""

import keras
import numpy as np
import tensorflow as tf
from tiny import images

BACKENDS = ("tensorflow",)


def main():
    keras.utils.set_random_seed(2)
    layers = keras.layers
    inputs = keras.Input((8, 8, 1))
    features = layers.Conv2D(4, 3, activation="relu", name="features")(inputs)
    network = keras.Model(inputs, layers.Dense(3)(layers.GlobalAveragePooling2D()(features)))
    content, style = tf.constant(images(1)), tf.constant(images(2)[1:])
    extractor = keras.Model(inputs, [network.get_layer("features").output, network.output])
    image, optimizer = tf.Variable(content), keras.optimizers.SGD(0.5)

    @tf.function
    def losses():
        with tf.GradientTape() as tape:
            ours, theirs = extractor(image)[0], extractor(style)[0]
            loss = tf.reduce_mean(tf.square(ours - theirs)) + 0.1 * tf.reduce_mean(tf.square(image - content))
        return loss, tape.gradient(loss, image)

    found = []
    for _ in range(3):
        loss, gradient = losses()
        optimizer.apply_gradients([(gradient, image)])
        found.append(loss)
    with tf.GradientTape() as tape:
        maps, scores = extractor(content)
        score = scores[:, int(np.argmax(scores[0]))]
    heat = tf.reduce_mean(tape.gradient(score, maps), axis=(0, 1, 2))
    return {"losses": found, "image": image, "heat": heat}
