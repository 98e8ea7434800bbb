"""QONNX files, read by numpy after the paper (arXiv:2206.07527) and not by our code.

On grids of powers of two every sum of a small network is exact in float32, so whatever reads the file has to give the
bits of the model. With other scales a convolution may add in another order: the bound is 1e-5 of the largest output."""
import copy
import numpy as np
import pytest
import torch
from estimators import generator
from torch import nn
import shok_nb as R

onnx = pytest.importorskip('onnx')
from onnx.reference import ReferenceEvaluator  # noqa: E402 (found by the line above)
from onnx.reference.op_run import OpRun  # noqa: E402 (found by the line above)


class Quant(OpRun):
    "The operator as the paper writes it."
    op_domain = 'qonnx.custom_op.general'
    def _run(self, x, scale, zero, bits, signed=1, narrow=0, rounding_mode='ROUND'):
        assert rounding_mode == 'ROUND'
        low = -2**(bits-1) + narrow if signed else 0
        high = 2**(bits-1)-1 if signed else 2**bits-1-narrow
        return ((np.clip(np.round(x/scale + zero), low, high) - zero)*scale).astype(x.dtype),

def read(file, *xs):
    r = ReferenceEvaluator(onnx.load(file), new_ops=[Quant])
    return torch.tensor(r.run(None, dict(zip(r.input_names, (x.numpy() for x in xs), strict=True)))[0])

class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.one,self.two,self.norm = nn.Conv2d(2, 2, 3, padding=1),nn.Conv2d(2, 2, 1),nn.BatchNorm2d(2)
        self.end = nn.Linear(2, 3)
    def forward(self, x): return self.end((x + self.norm(self.two(self.one(x).relu()))).relu().mean((2, 3)))

MODELS = dict(
    mlp=(lambda: nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 3)), (6,)),
    convolutions=(lambda: nn.Sequential(nn.Conv2d(2, 3, 3, stride=2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(12, 3)), (2, 9, 9)),
    residual=(Residual, (2, 5, 5)))

def quantized(name, bits, powers, rows=64):
    torch.manual_seed(bits)
    make,shape = MODELS[name]
    x = torch.randn(rows, *shape)
    x[::2] = (x[::2]*64).round()/64                             # ties of the grids of powers of two among them
    how = dict(scale='po2') if powers else {}
    model = make().eval()
    if powers:                                                  # biases whose sums are exact, too
        for p in model.parameters(): p.data = (p.data*64).round()/64
    R.quantize_model_(model, R.Quantizer(bits, axis=0, learn=True, **how), R.Quantizer(bits, signed=None, **how),
        calibrate=[x])
    return model,x

@pytest.mark.parametrize('bits', (2, 3, 4, 8))
def test_the_same_bits(tmp_path, bits):
    "10,000 rows of a network whose sums are exact, some of them ties."
    model,x = quantized('mlp', bits, True, 10_000)
    assert R.to_qonnx(model, x, tmp_path/'m.onnx') == tmp_path/'m.onnx'
    found = read(tmp_path/'m.onnx', x)
    assert torch.equal(found, model(x).detach())
    scale = model[0].input_quantizer.grid()[0]
    assert ((x/scale) % 1 == .5).sum() > 100 and len(found.unique()) > 5

@pytest.mark.parametrize('bits', (2, 5, 8))
@pytest.mark.parametrize('name', MODELS)
def test_other_readers_agree(tmp_path, name, bits):
    """With scales that are no powers of two, a sum in another order may move one code of a layer behind; with this seed
    none does. The model is as it was."""
    model,x = quantized(name, bits, False, 8)
    before = copy.deepcopy(model.state_dict())
    R.to_qonnx(model, x, tmp_path/'m.onnx')
    want = model(x).detach()
    assert (read(tmp_path/'m.onnx', x)-want).abs().max() <= 1e-5*want.abs().max()
    assert all(torch.equal(v, before[k]) for k,v in model.state_dict().items())
    graph = onnx.load(tmp_path/'m.onnx').graph
    quantizers = [m for m in model.modules() if isinstance(m, R.Quantizer)]
    assert [n.op_type for n in graph.node].count('Quant') == len(quantizers)
    assert str(tmp_path) not in str(graph) and 'site-packages' not in str(graph)

def test_several_inputs(tmp_path):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a,self.b = nn.Linear(2, 3),nn.Linear(4, 3)
        def forward(self, x, y): return self.a(x) + self.b(y)
    xs = torch.randn(5, 2, generator=generator()),torch.randn(5, 4, generator=generator(1))
    model = Two()
    R.quantize_model_(model, 4, 8, calibrate=[xs])
    R.to_qonnx(model.eval(), xs, tmp_path/'m.onnx')
    assert torch.allclose(read(tmp_path/'m.onnx', *xs), model(*xs).detach(), rtol=1e-5, atol=1e-6)

def test_a_weight_that_others_make_first(tmp_path):
    "Weight normalization stores two tensors of which the quantizer's weight is made."
    x = torch.randn(8, 4, generator=generator())
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)))
    R.quantize_model_(model, R.Quantizer(4, axis=0), R.Quantizer(8, signed=None), calibrate=[x])
    R.to_qonnx(model.eval(), x, tmp_path/'m.onnx')
    assert torch.allclose(read(tmp_path/'m.onnx', x), model(x).detach(), rtol=1e-5, atol=1e-6)

def layer(*how, **kw):
    model = nn.Sequential(nn.Linear(4, 4))
    R.quantize_model_(model, *how, **kw)
    return model

def deployed(model):
    R.deploy_(model, X)
    return model

X = torch.linspace(-1, 2, 32).view(8, 4)
REFUSED = {
    'nothing in the model is quantized': lambda: nn.Linear(4, 4),
    'the quantizer 0.input_quantizer has a zero point':
        lambda: layer(8, R.Quantizer(8, signed=False, zero_point=True), calibrate=[X]),
    'the quantizer 0.parametrizations.weight.0 has format=e4m3': lambda: layer('e4m3', None),
    'the quantizer 0.parametrizations.weight.0 has blocks': lambda: layer(R.Quantizer(4, block=2), None),
    'the quantizer 0.input_quantizer has axis=1': lambda: layer(8, R.Quantizer(8, axis=1), calibrate=[X]),
    'the model does not take example: RuntimeError': lambda: nn.Sequential(nn.Linear(3, 4), *layer(8, None)),
    'the model holds codes': lambda: deployed(layer(8, 8, calibrate=[X]).eval())}

@pytest.mark.parametrize('told', REFUSED)
def test_what_it_cannot_write(tmp_path, told):
    "By name, and no file is there."
    model = REFUSED[told]()
    with pytest.raises(ValueError, match=f'^to_qonnx: {told}'): R.to_qonnx(model, X, tmp_path/'m.onnx')
    assert [*tmp_path.iterdir()] == []

def test_bad_arguments(tmp_path):
    model = layer(8, R.Quantizer(8, signed=None), calibrate=[X])
    with pytest.raises(TypeError, match='^to_qonnx: file must be a path, got int'): R.to_qonnx(model, X, 3)
    with pytest.raises(FileNotFoundError, match='^to_qonnx: file is in'): R.to_qonnx(model, X, tmp_path/'no'/'m.onnx')
    with pytest.raises(TypeError, match='^to_qonnx: model must be'): R.to_qonnx(3, X, tmp_path/'m.onnx')
    with pytest.raises(TypeError, match='^to_qonnx: example must be'): R.to_qonnx(model, [1], tmp_path/'m.onnx')

    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.m = model
        def forward(self, x): return self.m(x),x
    with pytest.raises(ValueError, match='must return a Tensor, got tuple'): R.to_qonnx(Pair(), X, tmp_path/'m.onnx')
