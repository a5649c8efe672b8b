"""A student learns from a trained teacher: `compute_loss` of one's own, one model inside of another."""

import keras
from keras import ops
from tiny import classifier, compiled, numbers

BACKENDS = ("jax", "torch")


class Distiller(keras.Model):
    def __init__(self, student, teacher):
        super().__init__()
        self.student, self.teacher = student, teacher
        self.teacher.trainable = False
        self.alike = keras.losses.KLDivergence()

    def call(self, x):
        return self.student(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        wanted = ops.softmax(self.teacher(x, training=False) / 3)
        return 0.1 * super().compute_loss(x, y, y_pred) + 0.9 * self.alike(wanted, ops.softmax(y_pred / 3))


def main():
    x, y = numbers()
    teacher = compiled(seed=1)
    teacher.fit(x, y, batch_size=16, epochs=2)
    model = Distiller(classifier(seed=2), teacher)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer="adam", loss=loss, metrics=["accuracy"])
    history = model.fit(x, y, batch_size=16, epochs=2).history
    return {"history": history, "evaluated": model.evaluate(x, y, batch_size=16), "model": model}
