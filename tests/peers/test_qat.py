"""Small networks trained at few bits beside Brevitas and torchao: the same data, network, loop, bits and range of
codes, five seeds.

Accuracy of five runs on 497 images. Brevitas quantizes the convolutional network; a mean may lie below its by its
standard deviation. torchao quantizes Linear layers alone, with a grid for each row of activations where ours is one
for all: there by what both means are uncertain together. The lines that a user writes are counted from the functions
below."""
import copy
import inspect
import math
import brevitas.nn as bnn
import pytest
import torch
from brevitas.quant import Int8ActPerTensorFloat, Int8WeightPerChannelFloat, Uint8ActPerTensorFloat
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torchao.quantization import PerAxis, quantize_
from torchao.quantization.qat import IntxFakeQuantizeConfig, QATConfig
from shok_nb import quantize_model_

DATA = load_digits()
ORDER = torch.randperm(len(DATA.images), generator=torch.Generator().manual_seed(0))
X = (torch.tensor(DATA.images, dtype=torch.float32)[:, None]/16)[ORDER]
Y = torch.tensor(DATA.target)[ORDER]
TRAIN,TEST = slice(0, 1300),slice(1300, None)

def convolutions():
    return nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 10))

def matrices(): return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

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
    return quantize_model_(model, bits, 8, calibrate=X[TRAIN].split(100))

def brevitas(model, bits):
    weight = dict(weight_quant=Int8WeightPerChannelFloat, weight_bit_width=bits)
    first = dict(weight, input_quant=Int8ActPerTensorFloat)
    later = dict(weight, input_quant=Uint8ActPerTensorFloat)
    quantized = nn.Sequential(bnn.QuantConv2d(1, 16, 3, padding=1, **first), nn.BatchNorm2d(16), nn.ReLU(),
        nn.MaxPool2d(2), bnn.QuantConv2d(16, 32, 3, **later), nn.ReLU(), nn.Flatten(),
        bnn.QuantLinear(128, 10, True, **later))
    quantized.load_state_dict(model.state_dict(), strict=False)
    return quantized

def torchao(model, bits):
    activations = IntxFakeQuantizeConfig(torch.int8, 'per_token', is_symmetric=False)
    weights = IntxFakeQuantizeConfig(getattr(torch, f'int{bits}'), granularity=PerAxis(0))
    quantize_(model, QATConfig(activation_config=activations, weight_config=weights, step='prepare'))

def narrow(bits): return 1-2**(bits-1),2**(bits-1)-1               # the range of Brevitas
def whole(bits): return bits

@pytest.mark.parametrize('network,theirs,range_of', [(convolutions, brevitas, narrow), (matrices, torchao, whole)],
    ids=['brevitas', 'torchao'])
def test_accuracy(network, theirs, range_of):
    torch.set_num_threads(1)
    found = {}
    def note(k, model): found.setdefault(k, []).append(right(model))
    for seed in range(5):
        torch.manual_seed(seed)
        floats = train(network(), 15, 5e-3, seed)
        note('floats', floats)
        for bits in (8, 4, 3, 2):
            mine,other = copy.deepcopy(floats),copy.deepcopy(floats)
            ours(mine, range_of(bits))
            other = theirs(other, bits) or other
            note((bits, 'ours'), train(mine, 8, 2e-3, seed))
            note((bits, 'theirs'), train(other, 8, 2e-3, seed))
    means = {k: (torch.stack(v).mean().item(), torch.stack(v).std().item()) for k,v in found.items()}
    for k,(mean,deviation) in means.items(): print(theirs.__name__, k, f'{mean:.2f} ± {deviation:.2f}')
    assert means[8, 'ours'][0] > means['floats'][0]-1
    for bits in (8, 4, 3, 2):
        (mean,deviation),(other,spread) = (means[bits, who] for who in ('ours', 'theirs'))
        slack = spread if theirs is brevitas else math.hypot(spread, deviation)
        assert mean >= other-slack

def test_lines():
    "Of the body of each function above: what a user writes to quantize a float network."
    lines = {f.__name__: len(inspect.getsource(f).splitlines())-1 for f in (ours, torchao, brevitas)}
    print(lines)
    assert lines['ours'] < lines['torchao'] < lines['brevitas']
