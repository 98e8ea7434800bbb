"""Weights of at most four bits in ONNX files: each is INT4 with the scales it had, and what the runtime computes with
them is counted in the graph that it makes.

Equality is not statistical where inputs and scales are powers of two or small multiples of them: every product and sum
is exact then. Other sums may be taken in any order, so they differ by at most what rounding each term can change."""
import sys
import types
from collections import Counter
import numpy as np
import pytest
import torch
from estimators import generator, slow_after
from networks import Made
from torch import nn
from shok_nb.deployment.deploy import deploy_
from shok_nb.deployment.integer_layers import Dequantize, pack_int4, unpack_int4
from shok_nb.deployment.runtime import onnx_session, to_onnx
from shok_nb.networks.models import quantize_model_
from shok_nb.quantization.quantizer import Quantizer

onnx = pytest.importorskip('onnx')
ort = pytest.importorskip('onnxruntime')
FIRST = tuple(map(int, ort.__version__.split('.')[:2])) >= (1, 31)   # older ones have the kernel for fewer layers

def zero(**kw): return Quantizer(4, zero_point=True, init='minmax', **kw)

WEIGHTS = dict(channels=4, three=3, two=2, ternary=(-1, 1), one=Quantizer(4), block16=Quantizer(4, block=16),
    block32=Quantizer(4, block=32), zeros=zero(axis=0), block_zeros=zero(block=16), one_zero=zero())
QUICK = 'channels', 'block_zeros'
EVERY = slow_after(dict.fromkeys([*QUICK, *WEIGHTS]), len(QUICK))

def mlp():
    return nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 64, bias=False), nn.ReLU6(), nn.Linear(64, 7))

def values(*shape, seed=0): return torch.randn(*shape, generator=generator(seed))

def written(model, x, folder, **kw):
    "The file, the operators of the runtime's own version of it, and a call of it."
    file = to_onnx(model, x, folder/'model.onnx', **kw)
    run = onnx_session(file, optimized=folder/'fused.onnx')
    def call(x): return torch.tensor(run.run(None, {run.get_inputs()[0].name: x.numpy()})[0])
    return onnx.load(file), Counter(n.op_type for n in onnx.load(folder/'fused.onnx').graph.node), call

def counted(fused, wanted):
    "Are there as many products of four bits as the report says? Older runtimes may have fewer."
    return fused['MatMulNBits'] == wanted or not FIRST and fused['MatMulNBits'] < wanted

def quantized(model, weights, x, activations=None):
    torch.manual_seed(0)
    quantize_model_(model.eval(), weights, activations, calibrate=None if activations is None else [x])
    return model

def deployed(model, weights, x, folder, activations=None, pack=True):
    "The report of a quantized model, its file, the operators of the runtime, and a call, which gives what torch gives."
    quantized(model, weights, x, activations)
    report = deploy_(model, x[:4], pack=pack)
    file,fused,call = written(model, x[:4], folder)
    assert torch.allclose(call(x), model(x).detach(), atol=1e-5)
    return report,file,fused,call

def weights_of(file):
    "Codes, scales and zero points of each DequantizeLinear, as they lie in the file, and its attributes."
    held = {t.name: t for t in file.graph.initializer}
    for node in file.graph.node:
        if node.op_type != 'DequantizeLinear': continue
        assert held[node.input[0]].data_type == onnx.TensorProto.INT4
        tensors = [onnx.numpy_helper.to_array(held[n]) for n in node.input]
        yield [t.astype(np.float32) for t in tensors], {a.name: a.i for a in node.attribute}

def of_torch(layer):
    "The same of a layer in torch, turned as in the file."
    made = layer.parametrizations.weight
    kept = [unpack_int4(made.original, made[0].packed), made[0].scale]
    if made[0].zero_point is not None: kept.append(made[0].zero_point)
    if made[0].axis is None and made[0].block is None: kept[1:] = [t.view(()) for t in kept[1:]]
    return [t.detach().float().numpy().T for t in kept]

@pytest.mark.slow
@pytest.mark.parametrize('name', EVERY)
def test_codes_and_outputs(name, tmp_path):
    "Each code, scale and zero point is ours; every product is one of four bits; 10,000 outputs agree."
    model,x = mlp(),values(10_000, 64)
    report,file,fused,_ = deployed(model, WEIGHTS[name], x, tmp_path)
    layers = [m for m in model if isinstance(m, nn.Linear)]
    for layer,(found,how) in zip(layers, weights_of(file), strict=True):
        wanted = of_torch(layer)
        assert len(found) == len(wanted) and all(np.array_equal(a, b) for a,b in zip(found, wanted))
        made = layer.parametrizations.weight[0]
        if made.block: assert how == dict(axis=0, block_size=made.block)
        else: assert how == ({} if made.axis is None else dict(axis=1))
    rows = [r.kernel for r in report.rows]
    assert rows == ['MatMulNBits']*3 and counted(fused, 3)
    others = {'Gemm', 'FusedGemm', 'MatMul', 'FusedMatMul', 'DequantizeLinear', 'Relu', 'Clip'}
    assert not FIRST or not others & {*fused}
    assert {s.domain for s in file.opset_import} == {''} and file.opset_import[0].version == 21
    first = nn.Sequential(model[0])
    _,_,call_first = written(first, x[:4], tmp_path)
    w,b = model[0].weight.detach(),model[0].bias.detach()
    rounding = 66*2.**-24*(x.abs() @ w.abs().T + b.abs())           # 64 terms, the bias and the weight
    assert ((call_first(x)-first(x).detach()).abs() <= 2*rounding).all()

@pytest.mark.parametrize('block', slow_after([32, None]))
def test_exact_sums_are_equal(block, tmp_path):
    "Scales are powers of two and inputs are halves, so that no sum is rounded: 10,000 × 7 outputs are equal."
    model = mlp()
    for m in model[::2]:
        if m.bias is not None: m.bias.data = m.bias.data.mul(64).round().div(64)
    x = torch.randint(-8, 9, (10_000, 64), generator=generator(0))/2
    quantized(model, Quantizer(4, block=block, axis=None if block else 0), x)
    for m in model.modules():
        if isinstance(m, Quantizer): m.set_grid_(torch.full_like(m.grid()[0], 2**-6))
    deploy_(model, x[:4])
    _,fused,call = written(model, x[:4], tmp_path)
    want = model(x).detach()
    assert counted(fused, 3) and want.unique().numel() > 1000 and torch.equal(call(x), want)

class Twice(nn.Sequential):
    def forward(self, x): return super().forward(super().forward(x))

def attention(other):
    "Between two tensors that are not the same it cuts its weight in three."
    return Made(lambda m, x: m.layer(x, *[other(x)]*2, need_weights=False)[0],
        layer=nn.MultiheadAttention(32, 2, batch_first=True))

class Own(nn.Linear):
    "A Linear that multiplies by its weight elsewhere."
    def forward(self, input): return nn.functional.linear(input, self.weight*2, self.bias)

def convs(): return nn.Sequential(nn.Conv2d(4, 8, 3), nn.Flatten(), nn.Linear(288, 8))

CASES = dict(
    blocks_of_8=(mlp, Quantizer(4, block=8), None, (64,), ['floats: blocks of 8']*3),
    twice=(lambda: Twice(nn.Linear(64, 64), nn.Tanh()), 4, None, (64,), ['floats: called 2 times']),
    rows=(lambda: nn.Sequential(nn.Linear(32, 8)), Quantizer(4, axis=1), None, (32,),
        ['floats: scales across the sums']),
    own=(lambda: nn.Sequential(Own(32, 8)), 4, None, (32,), ['floats: a forward of its own']),
    activations=(mlp, Quantizer(4, block=16), 8, (64,), ['floats: activations on a grid']*3),
    convolution=(convs, 4, None, (4, 8, 8), ['floats', 'MatMulNBits']),
    self_attention=(lambda: attention(lambda x: x), 4, None, (5, 32), ['MatMulNBits']*2),
    attention=(lambda: attention(lambda x: x.flip(1)), 4, None, (5, 32), ['floats: the weight is cut', 'MatMulNBits']),
    byte=(mlp, 8, None, (64,), ['floats']*3))
LENGTHS = dict.fromkeys((16, 32, 64, 128, 256), 'MatMulNBits') | {512: 'floats: blocks of 512'}
def long(): return nn.Sequential(nn.Linear(512, 8))
CASES |= {f'blocks_of_{n}': (long, Quantizer(4, block=n), None, (3, 512), [told]) for n,told in LENGTHS.items()}

@pytest.mark.parametrize('name', slow_after(CASES, 3))
def test_the_report_says_which_kernel(name, tmp_path):
    "And the runtime's graph has as many of them."
    make,weights,activations,shape,kernels = CASES[name]
    model,x = make(),values(200, *shape)
    report,_,fused,_ = deployed(model, weights, x, tmp_path, activations)
    assert [r.kernel for r in report.rows] == kernels and counted(fused, kernels.count('MatMulNBits'))

@pytest.mark.parametrize('block, kernel', [(None, 'MatMulNBits'), (16, 'floats: blocks across the sums')])
def test_a_weight_that_lies_turned(block, kernel, tmp_path, monkeypatch):
    "GPT-2's layer: its rows are inputs, so that its blocks lie across the sums."
    class Conv1D(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight,self.bias = nn.Parameter(values(32, 48)),nn.Parameter(values(48))
        def forward(self, x): return torch.addmm(self.bias, x.view(-1, 32), self.weight).view(*x.shape[:-1], 48)
    monkeypatch.setitem(sys.modules, 'transformers.pytorch_utils', types.SimpleNamespace(Conv1D=Conv1D))
    model,x = nn.Sequential(Conv1D()),values(50, 4, 32)
    report,_,fused,_ = deployed(model, Quantizer(4, block=block, axis=None if block else 1), x, tmp_path)
    assert report.rows[0].kernel == kernel and counted(fused, int(block is None))

@pytest.mark.parametrize('code, cast', slow_after([(-8, False), (8, True), (3, False), (-9, True)], 2))
def test_zero_points_beyond_four_bits(code, cast, tmp_path):
    "They are int8, and the codes become int8 for them."
    codes = torch.randint(-8, 8, (6, 32), generator=generator(0), dtype=torch.int8)
    grid = torch.linspace(.1, .6, 6),torch.full((6,), code, dtype=torch.int8)
    model = Made(lambda m, x: x @ m.make(m.codes).T, codes=nn.Parameter(pack_int4(codes), False),
        make=Dequantize(*grid, axis=0, packed=(6, 32)))
    x = values(50, 32)
    file,_,call = written(model, x, tmp_path)
    kinds = {t.data_type for t in file.graph.initializer}
    assert onnx.TensorProto.INT4 in kinds and (onnx.TensorProto.INT8 in kinds) is cast
    assert ('Cast' in {n.op_type for n in file.graph.node}) is cast
    assert torch.allclose(call(x), model(x), atol=1e-4)

@pytest.mark.slow
def test_integer_kernels_read_int4(tmp_path):
    "Two codes in a byte of the file become int8 as it is opened, and the kernels are those of int8."
    model,x = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10)),values(500, 3, 8, 8)
    _,file,fused,call = deployed(model, 4, x, tmp_path, 8)
    codes = [t for t in file.graph.initializer if t.data_type == onnx.TensorProto.INT4]
    assert [tuple(t.dims) for t in codes] == [(8, 3, 3, 3), (10, 288)] and fused['QLinearConv'] == fused['QGemm'] == 1
    assert not {'Cast', 'BitwiseAnd'} & {*fused} and torch.equal(call(x), model(x).detach())

def normed(m, x):
    "Convolutions with a normalization each: four that join their scales, and three that must stay."
    plain,depth,blocks,turns,twice,*shared = m.norms
    x = depth(m.depth(plain(m.plain(x)).relu())).relu()
    x = turns(m.turns(blocks(m.blocks(x)).relu()))
    y = m.twice(x)
    x = y.relu() + twice(y)
    for norm in shared: x = norm(m.shared(x)).relu()
    return x

@pytest.mark.parametrize('bits', slow_after([4, 8]))
@pytest.mark.slow
def test_normalizations_join_the_scales(bits, tmp_path):
    """A file has no normalization behind codes that it alone takes, but for a negative factor: readers want positive
    scales. What a convolution gives elsewhere stays as it was, and so do two normalizations behind one weight."""
    norms = nn.ModuleList([nn.BatchNorm2d(n, eps=.01) for n in (8, 8, 6, 6, 6, 6, 6)])
    model = Made(normed, plain=nn.Conv2d(3, 8, 3, bias=False), depth=nn.Conv2d(8, 8, 3, groups=8),
        blocks=nn.Conv2d(8, 6, (1, 16), padding=(0, 8)), turns=nn.Conv2d(6, 6, 1), twice=nn.Conv2d(6, 6, 1),
        shared=nn.Conv2d(6, 6, 1), norms=norms)
    x = values(4, 3, 12, 12)
    with torch.no_grad():
        for n in norms:
            for t in (n.weight, n.running_var): t.uniform_(.5, 2.)
            for t in (n.bias, n.running_mean): t.normal_()
        norms[3].weight[2] = -1.
    quantized(model, Quantizer(bits, block=16), x)
    with torch.no_grad(): wanted = model(x)
    deploy_(model, x)
    file,_,call = written(model, x, tmp_path)
    names = {t.name: onnx.numpy_helper.to_array(t) for t in file.graph.initializer}
    found = [n for n in file.graph.node if n.op_type == 'BatchNormalization']
    assert len(found) == 4 and torch.allclose(call(x), wanted, atol=1e-4)
    other = values(4, 3, 12, 12, seed=1)
    assert torch.allclose(call(other), model(other).detach(), atol=1e-4)
    for name,norm in zip(('plain', 'depth', 'blocks'), norms):
        factor = norm.weight/(norm.running_var+norm.eps).sqrt()
        made = getattr(model, name).parametrizations.weight[0]
        scale = names[f'{name}.weight.0.scale_scaled']
        assert np.allclose(scale, (made.scale*factor.view(-1, *[1]*(made.scale.ndim-1))).detach(), rtol=1e-6)
        bias = getattr(model, name).bias
        shift = norm.bias-norm.running_mean*factor + (0 if bias is None else bias*factor)
        assert np.allclose(names[f'{name}.weight.0.scale_bias'], shift.detach(), atol=1e-6)

def test_names_in_a_file(tmp_path):
    "Constants have the names that they have in the model, unless an input has it; nothing is said of other shapes."
    model = Made(lambda m, x: m.first(x*m.x), x=nn.Parameter(values(8)), first=nn.Linear(8, 8))
    _,file,_,_ = deployed(model, 4, values(5, 8), tmp_path)
    assert {t.name for t in file.graph.initializer} == {
        'model.x', 'first.bias', 'first.weight_int4_turned', 'first.weight.0.scale'}
    assert all(n.name == n.output[0] and not n.name.startswith('_symbolic') for n in file.graph.node)
    assert not file.graph.value_info

@pytest.mark.slow
def test_names_of_your_own(tmp_path):
    "A constant of the model keeps its name where a value of the graph would have it."
    model = Made(lambda m, x: m.first(x*m.v)*m.v1, v=nn.Parameter(values(8)), v1=nn.Parameter(values(8)+1),
        first=nn.Linear(8, 8))
    _,file,_,_ = deployed(model, 8, values(5, 8), tmp_path, 8)
    assert {'v', 'v1'} <= {t.name for t in file.graph.initializer}

@pytest.mark.slow
def test_not_packed(tmp_path):
    "pack=False keeps a byte for each code, in the file too."
    report,file,_,_ = deployed(mlp(), 4, values(50, 64), tmp_path, pack=False)
    assert onnx.TensorProto.INT4 not in {t.data_type for t in file.graph.initializer}
    assert [r.kernel for r in report.rows] == ['floats']*3

@pytest.mark.slow
def test_torchs_own_exporter_still_works(tmp_path):
    "Without `to_onnx`, the file unpacks its codes with operators that every reader has."
    model,x = mlp(),values(50, 64)
    quantized(model, 4, x)
    deploy_(model, x[:4])
    torch.onnx.export(model, (x,), tmp_path/'own.onnx', dynamo=True, verbose=False)
    run = onnx_session(tmp_path/'own.onnx')
    found, = run.run(None, {run.get_inputs()[0].name: x.numpy()})
    assert np.allclose(found, model(x).detach(), atol=1e-4)
    assert not any(vars(m).get('in_file') for m in model.modules())
