# As Horovod's documentation shows it for PyTorch, with a Keras model.
import keras
import torch
import horovod.torch as hvd

hvd.init()
if torch.cuda.is_available():
    torch.cuda.set_device(hvd.local_rank())
x = torch.arange(64.0).reshape(16, 4)
data = torch.utils.data.TensorDataset(x, x.sum(dim=1, keepdim=True))
sampler = torch.utils.data.distributed.DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank())
loader = torch.utils.data.DataLoader(data, batch_size=4, sampler=sampler)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size())
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = ((model(inputs) - targets) ** 2).mean()
        loss.backward()
        optimizer.step()
print(hvd.rank(), float(hvd.allreduce(loss.detach(), name="loss")))
hvd.shutdown()
