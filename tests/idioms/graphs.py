"""Graphs of many sizes: a loader that pads each batch to its largest graph, with messages along edges."""

import math

import keras
import numpy as np
from keras import ops

BACKENDS = ("torch", "jax")  # Keras refuses such sizes on TensorFlow


class Graphs(keras.utils.PyDataset):
    def __init__(self, count, batch, **kwargs):
        super().__init__(**kwargs)
        random = np.random.default_rng(3)
        sizes = random.integers(2, 7, count)
        self.nodes = [random.normal(size=(n, 4)).astype("float32") for n in sizes]
        self.edges = [(random.uniform(size=(n, n)) < 0.5).astype("float32") for n in sizes]
        self.y = np.array([n.sum() > 0 for n in self.nodes], "float32")[:, None]
        self.batch, self.order = batch, np.arange(count)

    def __len__(self):
        return math.ceil(len(self.y) / self.batch)

    def __getitem__(self, index):
        rows = self.order[index * self.batch : (index + 1) * self.batch]
        most = max(len(self.nodes[i]) for i in rows)
        nodes, edges = np.zeros((len(rows), most, 4), "float32"), np.zeros((len(rows), most, most), "float32")
        for place, i in enumerate(rows):
            size = len(self.nodes[i])
            nodes[place, :size], edges[place, :size, :size] = self.nodes[i], self.edges[i]
        return {"nodes": nodes, "edges": edges}, self.y[rows]

    def on_epoch_end(self):
        np.random.shuffle(self.order)


class Messages(keras.layers.Layer):
    def __init__(self, width):
        super().__init__()
        self.dense = keras.layers.Dense(width, activation="relu")

    def call(self, nodes, edges):
        degree = ops.maximum(ops.sum(edges, axis=-1, keepdims=True), 1)
        return self.dense(ops.concatenate([nodes, ops.matmul(edges, nodes) / degree], axis=-1))


class Network(keras.Model):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.out = Messages(6), Messages(5), keras.layers.Dense(1, activation="sigmoid")

    def call(self, inputs):
        hidden = self.second(self.first(inputs["nodes"], inputs["edges"]), inputs["edges"])
        return self.out(ops.sum(hidden, axis=1))


def main():
    keras.utils.set_random_seed(9)
    model = Network()
    model.compile("adam", "binary_crossentropy", metrics=["accuracy", keras.metrics.AUC(num_thresholds=30)])
    history = model.fit(Graphs(37, 6), epochs=3, validation_data=Graphs(17, 5)).history
    return {"history": history, "model": model}
