"""A small network trained at few bits beside Brevitas: the same data, network, loop, bits and range of codes, in five
seeds.

Accuracy of five runs on 497 images: a mean may lie below Brevitas' by its own standard deviation. The lines that a user
writes for it are counted from the functions below."""
import copy
import inspect
import brevitas.nn as bnn
import torch
from brevitas.quant import Int8ActPerTensorFloat, Int8WeightPerChannelFloat, Uint8ActPerTensorFloat
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from shok_nb import quantize_model_

DATA = load_digits()
ORDER = torch.randperm(len(DATA.images), generator=torch.Generator().manual_seed(0))
X = (torch.tensor(DATA.images, dtype=torch.float32)[:, None]/16)[ORDER]
Y = torch.tensor(DATA.target)[ORDER]
TRAIN,TEST = slice(0, 1300),slice(1300, None)

def network():
    return nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 10))

def train(model, epochs, lr, seed):
    adam = torch.optim.Adam(model.train().parameters(), lr=lr)
    slower = torch.optim.lr_scheduler.CosineAnnealingLR(adam, epochs)
    g = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for i in torch.randperm(1300, generator=g).split(100):
            adam.zero_grad()
            F.cross_entropy(model(X[TRAIN][i]), Y[TRAIN][i]).backward()
            adam.step()
        slower.step()
    return model

def right(model):
    with torch.no_grad(): return (model.eval()(X[TEST]).argmax(1) == Y[TEST]).float().mean()*100

def ours(model, bits):
    end = 2**(bits-1)-1                                      # Brevitas' narrow range
    quantize_model_(model, (-end, end), 8, calibrate=X[TRAIN].split(100))
    return model

def theirs(model, bits):
    weight = dict(weight_quant=Int8WeightPerChannelFloat, weight_bit_width=bits)
    first = dict(weight, input_quant=Int8ActPerTensorFloat)
    later = dict(weight, input_quant=Uint8ActPerTensorFloat)
    quantized = nn.Sequential(bnn.QuantConv2d(1, 16, 3, padding=1, **first), nn.BatchNorm2d(16), nn.ReLU(),
        nn.MaxPool2d(2), bnn.QuantConv2d(16, 32, 3, **later), nn.ReLU(), nn.Flatten(),
        bnn.QuantLinear(128, 10, True, **later))
    quantized.load_state_dict(model.state_dict(), strict=False)
    return quantized

def test_accuracy():
    torch.set_num_threads(1)
    found = {}
    for seed in range(5):
        torch.manual_seed(seed)
        floats = train(network(), 15, 5e-3, seed)
        found.setdefault('floats', []).append(right(floats))
        for bits in (8, 4, 3, 2):
            for how in (ours, theirs):
                model = train(how(copy.deepcopy(floats), bits), 8, 2e-3, seed)
                found.setdefault((bits, how.__name__), []).append(right(model))
    means = {k: (torch.stack(v).mean().item(), torch.stack(v).std().item()) for k,v in found.items()}
    for k,(mean,deviation) in means.items(): print(k, f'{mean:.2f} ± {deviation:.2f}')
    assert means[8, 'ours'][0] > means['floats'][0]-1
    for bits in (8, 4, 3, 2): assert means[bits, 'ours'][0] >= means[bits, 'theirs'][0] - means[bits, 'theirs'][1]

def test_lines():
    "Of the body of each function above: what a user writes to quantize a float network."
    def lines(f): return len(inspect.getsource(f).splitlines())-1
    print(f'lines: ours {lines(ours)}, Brevitas {lines(theirs)}')
    assert lines(ours) < lines(theirs)
