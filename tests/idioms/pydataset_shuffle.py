"""A PyDataset that draws its order from np.random, when it is made and after each epoch."""

import keras
import numpy as np
from tiny import compiled, numbers

BACKENDS = ("torch",)


class Shuffled(keras.utils.PyDataset):
    def __init__(self, x, y, batch_size, **options):
        super().__init__(**options)
        self.x, self.y, self.batch_size = x, y, batch_size
        self.order = np.random.permutation(len(x))

    def __len__(self):
        return len(self.x) // self.batch_size

    def __getitem__(self, index):
        rows = self.order[index * self.batch_size : (index + 1) * self.batch_size]
        return self.x[rows], self.y[rows]

    def on_epoch_end(self):
        np.random.shuffle(self.order)


def main():
    x, y = numbers()
    model = compiled()  # sets the seed
    history = model.fit(Shuffled(x, y, 16), epochs=2, validation_data=Shuffled(x, y, 16)).history
    workers = model.fit(Shuffled(x, y, 16, workers=2), epochs=1).history
    return {"history": history, "_workers": workers, "model": model}
