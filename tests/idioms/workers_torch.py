"""DataLoaders with processes of their own, with samples drawn by weight, and over a stream."""

import torch
from tiny import compiled, numbers

BACKENDS = ("torch",)


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, x, y):
        self.x, self.y = x, y

    def __iter__(self):
        return iter(list(zip(self.x, self.y, strict=True)))


def main():
    x, y = (torch.as_tensor(value) for value in numbers(48))
    rows, tools = torch.utils.data.TensorDataset(x, y), torch.utils.data
    model = compiled()
    history = model.fit(tools.DataLoader(rows, batch_size=16, num_workers=2), epochs=2).history
    seen = {"in_order": history, "model": model}
    weighted = compiled()
    sampler = tools.WeightedRandomSampler([1.0 + float(of) for of in y], num_samples=40)
    seen["_weighted"] = weighted.fit(tools.DataLoader(rows, batch_size=16, sampler=sampler), epochs=2).history
    streamed = compiled()
    seen["_streamed"] = streamed.fit(tools.DataLoader(Stream(x, y), batch_size=16), epochs=2).history
    return seen | {"_models": [weighted, streamed]}
