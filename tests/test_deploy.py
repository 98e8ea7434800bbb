"""From a quantized network to integers: the codes of torch and of ONNX Runtime are equal, for every kind of integer
layer and for values on ties, and a call that fails has changed nothing.

Equality is not statistical: both sum integers and round the same float product. The numbers of inputs are those that
showed differences while one side still summed floats (one or two of 600,000 codes)."""
import copy
import logging
import subprocess
import sys
import warnings
from pathlib import Path
import numpy as np
import pytest
import torch
from estimators import generator, refused, saved, slow_after
from torch import nn
from shok_nb.deployment.deploy import deploy_
from shok_nb.deployment.integer_layers import IntegerLayer, pack_int4, unpack_int4
from shok_nb.deployment.runtime import onnx_session, to_onnx
from shok_nb.engine.compat import has_vnni
from shok_nb.networks.flow import quietly
from shok_nb.networks.models import quantize_model_
from shok_nb.nn import SoftRound, remove_rounding_
from shok_nb.quantization.quantizer import Quantizer


def mlp(): return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 24), nn.ReLU(), nn.Linear(24, 10))

def cnn():
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, groups=4), nn.ReLU(), nn.Conv2d(8, 4, 1, bias=False), nn.Flatten(), nn.Linear(16, 10))

def line():
    first,second = nn.Conv1d(2, 4, 3, stride=2),nn.Conv1d(4, 4, 3, dilation=2)
    return nn.Sequential(first, nn.ReLU(), second, nn.Flatten(), nn.Linear(12, 5))

def feed():
    "The integer segment of a transformer block, three dimensions and a normalization before it."
    return nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))

def bare(): return nn.Sequential(nn.Linear(16, 24, bias=False), nn.ReLU(), nn.Linear(24, 10, bias=False))

NETWORKS = dict(mlp=(mlp, (16,)), cnn=(cnn, (3, 8, 8)), line=(line, (2, 15)), bare=(bare, (16,)))

def inputs(shape, n, seed=0): return torch.randn(n, *shape, generator=generator(seed))

def deployed(make, shape, weights=8, seed=0):
    torch.manual_seed(seed)
    model,x = make(),inputs(shape, 256, seed+100)
    model(x)                                                           # the normalization has seen something
    quantize_model_(model, weights, 8, calibrate=[x])
    return model,deploy_(model, x[:2])

def session(model, example, folder):
    "The runtime's session of a model, and the operators it has chosen."
    onnx = pytest.importorskip('onnx')
    pytest.importorskip('onnxruntime')
    file = to_onnx(model, example, folder/'model.onnx')
    run = onnx_session(file, optimized=folder/'optimized.onnx')
    def names(file): return [n.op_type for n in onnx.load(folder/file).graph.node]
    def call(x): return run.run(None, {run.get_inputs()[0].name: x.numpy()})[0]
    return call,names('model.onnx'),names('optimized.onnx')

OURS = {'Round', 'Div', 'Clip', 'Mul', 'Floor', 'Where'}

QUICK = ('mlp', 8), ('cnn', 4), ('line', (-1, 1))            # each network and each kind of codes once
EVERY = slow_after(dict.fromkeys([*QUICK, *((n, w) for n in NETWORKS for w in (8, 4, (-1, 1)))]), len(QUICK))

@pytest.mark.slow
@pytest.mark.parametrize('name, weights', EVERY, ids=str)
def test_runtime(name, weights, tmp_path):
    make,shape = NETWORKS[name]
    model,report = deployed(make, shape, weights)
    x = inputs(shape, 2000, 1)*1.5                                       # some beyond what was calibrated
    call,graph,fused = session(model, x[:2], tmp_path)
    layers = [m for m in model.modules() if isinstance(m, IntegerLayer)]
    moves = sum(op in ('MaxPool', 'Reshape') for op in graph)             # codes before and behind each
    assert not OURS & {*graph} and graph.count('QuantizeLinear') == len(layers)+moves
    assert sum(op in ('QLinearConv', 'QGemm') for op in fused) == len(layers)
    assert not {'Conv', 'Gemm', 'Relu'} & {*fused}
    assert fused.count('QuantizeLinear') == 1 and 'DequantizeLinear' not in fused
    with torch.no_grad(): want = model(x).numpy()
    assert np.array_equal(call(x), want)
    assert [r.activations for r in report.rows] == ['codes to codes']*(len(layers)-1) + ['codes to floats']

@pytest.mark.slow
@pytest.mark.parametrize('seed', range(2))
@pytest.mark.parametrize('name', ['mlp', 'cnn', 'feed'])
def test_a_million_inputs(name, seed, tmp_path):
    "All outputs equal, in two networks of each kind; a convolution computes a sum for each place of an image."
    make,shape = dict(NETWORKS, feed=(feed, (5, 16)))[name]
    model,_ = deployed(make, shape, seed=seed)
    if name == 'feed': model[0] = nn.Identity()                          # what is behind it: floats of the outside
    n,part = dict(mlp=10**6, cnn=100_000, feed=200_000)[name],50_000
    call,_,fused = session(model, inputs(shape, 2), tmp_path)
    assert not {'Conv', 'Gemm', 'MatMul'} & {*fused}
    for i in range(0, n, part):
        x = inputs(shape, part, 1000*seed+i)
        with torch.no_grad(): assert np.array_equal(call(x), model(x).numpy())

def test_exact_sums():
    "Against integers of Python's kind, for one layer: the sum, the product, the rounding."
    model,_ = deployed(mlp, (16,))
    layer,x = model[0],inputs((16,), 50, 1)
    zero = int(layer.input_zero_point)
    q = (np.rint(x.numpy()/layer.input_scale.numpy())+zero).clip(0, 255).astype(int)-zero
    total = q @ layer.codes.numpy().astype(int).T + layer.bias_codes.numpy().astype(int)
    factor = layer.product.numpy()/layer.out_scale.numpy()
    codes = np.rint(total.astype(np.float32)*factor).clip(-int(layer.out_zero_point), 255-int(layer.out_zero_point))
    assert factor.dtype == np.float32
    assert np.array_equal(layer(x).numpy(), codes.astype(np.float32)*layer.out_scale.numpy())

def test_normalization_beyond_int8():
    "A code of -128 that turns becomes 127: one step of 128, which the report's gap shows and the proof explains."
    model,x = nn.Sequential(nn.Linear(2, 1, bias=False), nn.BatchNorm1d(1)).eval(),inputs((2,), 100)
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[-1., .5]]))
        model[1].weight.fill_(-1.)
    def one(w, *a, **kw): return torch.full((1, 1), 1/128),torch.zeros(1, 1)
    quantize_model_(model, Quantizer(8, axis=0, init=one), 8, calibrate=[x])
    with torch.no_grad(): want = model(x)
    report = deploy_(model, x)
    assert model[0].codes.tolist() == [[127, -64]] and report.rows[0].normalization == '1'
    with torch.no_grad(): apart = (model(x)-want).abs().max()
    assert 0 < apart <= x.abs().max()/128*1.01 and float(report.rows[0].gap) > 1e-3

MIXED = dict(embedding=(lambda: nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 3)), torch.arange(7)),
    transposed=(lambda: nn.Sequential(nn.ConvTranspose2d(2, 4, 3, groups=2), nn.ReLU()), inputs((2, 5, 5), 3)),
    lstm=(lambda: nn.LSTM(4, 6, num_layers=2, bidirectional=True), inputs((5, 4), 3)),
    gru_cell=(lambda: nn.GRUCell(4, 6), inputs((4,), 3)),
    attention=(lambda: nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), inputs((5, 16), 3)))

def first(out): return out[0] if isinstance(out, tuple) else out

@pytest.mark.parametrize('weights', [8, 4], ids=str)
@pytest.mark.parametrize('name', slow_after(MIXED, 3))
def test_floats_on_codes(name, weights):
    "Codes in place of weights: the same values, smaller, saved and copied."
    make,x = MIXED[name]
    torch.manual_seed(0)
    model = make().eval()
    quantize_model_(model, weights, 8, calibrate=[x])
    with torch.no_grad(): want = first(model(x))
    report = deploy_(model, x)
    assert {r.weights for r in report.rows} == {'int8' if weights == 8 else 'int4'}
    with torch.no_grad(): got = first(model(x))
    whole = all('codes' not in r.activations for r in report.rows)
    assert torch.equal(got, want) if whole else torch.allclose(got, want, atol=.05)
    floats = [k for k,t in model.state_dict().items() if t.is_floating_point() and k.endswith('original')]
    assert not floats
    twin = copy.deepcopy(model)
    twin.load_state_dict(saved(model.state_dict()))
    with torch.no_grad(): assert torch.equal(first(twin(x)), got)

def with_zero_points(bits): return Quantizer(bits, axis=0, zero_point=True)

ONE_LAYER = dict(blocks=(Quantizer(4, block=8), None, 'int4', 'float activations'),
    zero_points=(with_zero_points(8), 8, 'int8', 'weights with zero points or blocks'),
    bytes=(with_zero_points((0, 255)), None, 'uint8', 'float activations'),
    many=(with_zero_points(12), None, 'int32', 'float activations'),
    plain=(8, 8, 'int8', 'the layer is the model, nothing holds it'))

@pytest.mark.parametrize('name', ONE_LAYER)
def test_a_model_that_is_one_layer(name):
    "Nothing holds it, so it cannot be put in its own place: codes for its weight, and the report says so."
    weights,activations,kind,why = ONE_LAYER[name]
    model,x = nn.Linear(32, 4).eval(),inputs((32,), 5)
    quantize_model_(model, weights, activations, calibrate=activations and [x])
    want = model(x)
    row, = deploy_(model, x).rows
    assert torch.equal(model(x), want)
    assert (row.name, row.weights, row.activations) == ('(model)', kind, f'floats: {why}')
    codes = model.parametrizations.weight.original
    size,dtype = (64, torch.uint8) if kind == 'int4' else (128, getattr(torch, kind))
    assert codes.numel() == size and codes.dtype == dtype

@pytest.mark.parametrize('n', [0, 1, 2, 7])
def test_int4(n):
    codes = torch.randint(-8, 8, (n, 3), generator=generator())
    packed = pack_int4(codes)
    assert packed.dtype == torch.uint8 and len(packed) == -(-3*n//2)
    assert torch.equal(unpack_int4(packed, codes.shape).long(), codes)
    if n: assert torch.equal(packed[0] & 15, (codes.flatten()[0] & 15).to(torch.uint8))

@pytest.mark.slow
def test_without_the_package(tmp_path):
    "A saved program runs in a Python that has torch alone."
    model,_ = deployed(cnn, (3, 8, 8))
    x = inputs((3, 8, 8), 4)
    program = torch.export.export(model, (x,))
    assert torch.equal(program.module()(x), model(x))
    torch.export.save(program, tmp_path/'m.pt2')
    torch.save(x, tmp_path/'x.pt')
    code = "import sys, torch; m = torch.export.load(sys.argv[1]).module(); assert 'shok_nb' not in sys.modules; " \
        "torch.save(m(torch.load(sys.argv[2])), sys.argv[2])"
    subprocess.run([sys.executable, '-c', code, tmp_path/'m.pt2', tmp_path/'x.pt'], check=True, cwd=tmp_path)
    assert torch.equal(torch.load(tmp_path/'x.pt'), model(x))

def test_sums_beyond_int32():
    "A bias that its grid cannot hold takes a larger scale; sums that no scale makes smaller stay floats."
    model,x = nn.Sequential(nn.Linear(4, 2)).eval(),inputs((4,), 9)
    with torch.no_grad(): model[0].bias.copy_(torch.tensor([1e9, .5]))
    quantize_model_(model, 8, 8, calibrate=[x])
    with torch.no_grad(): want = model(x)
    deploy_(model, x)
    assert model[0].bias_codes.abs().max() <= 2**30
    with torch.no_grad(): found = model(x)
    assert torch.allclose(found[:, 0], want[:, 0], rtol=1e-6) and torch.allclose(found[:, 1], want[:, 1], atol=1e-4)
    wide = nn.Sequential(nn.Linear(70_000, 1))
    with torch.no_grad(): wide[0].weight.fill_(1.)
    quantize_model_(wide.eval(), 8, 8, calibrate=[torch.ones(2, 70_000)])
    with torch.no_grad(): want = wide(torch.ones(2, 70_000))
    row, = deploy_(wide, torch.ones(2, 70_000)).rows
    assert row.activations == 'floats: sums beyond int32' and torch.equal(wide(torch.ones(2, 70_000)), want)

@pytest.mark.slow
def test_the_quantized_model_exports(tmp_path):
    "Before deployment too: the runtime's operators in ONNX, and a program that equals eager."
    model,x = cnn(),inputs((3, 8, 8), 64)
    quantize_model_(model, 8, 8, calibrate=[x])
    model.eval()
    call,graph,_ = session(model, x[:2], tmp_path)
    assert not OURS & {*graph} and 'QuantizeLinear' in graph
    onnx_session(tmp_path/'model.onnx', vnni=False)                      # zero points that layers share, without VNNI
    with torch.no_grad():
        want = model(x)
        assert np.abs(call(x)-want.numpy()).max() < .05*want.abs().max()
        program = torch.export.export(model, (x,)).module()(x)
    assert torch.equal(program, want) and want.abs().max() > 0

# --- models
@pytest.mark.parametrize('activations', [8, None])
def test_codes_are_no_rounding(activations):
    "A deployed model has no floats to go back to: refused by name, and left as it is."
    model,x = mlp(),inputs((16,), 64)
    quantize_model_(model, 4, activations, calibrate=[x])
    deploy_(model, x)
    want = model(x)
    for leave in (True, False):
        with pytest.raises(ValueError, match='^remove_rounding_: 0 holds codes, as deploy_ made it'):
            remove_rounding_(model, leave_rounded=leave)
    assert torch.equal(model(x), want)

@pytest.mark.parametrize('ends, want', [(8, '-128 to 127'), (0, 'skipped')])
def test_ends(ends, want):
    model,x = mlp(),inputs((16,), 64)
    report = quantize_model_(model, 2, 8, calibrate=[x], ends=ends)
    assert [r.weights for r in report.rows] == [want, '-2 to 1', want]
    assert ends or type(model[0]) is nn.Linear

def test_blocks_in_the_runtime(tmp_path):
    "Of 8 bits; opset 21 has blocks: one DequantizeLinear on the codes, and values to the last digits of a float sum."
    model,x = nn.Sequential(nn.Linear(32, 4)).eval(),inputs((32,), 50)
    quantize_model_(model, Quantizer(8, block=16), None)
    deploy_(model, x)
    call,graph,_ = session(model, x, tmp_path)
    assert not OURS & {*graph} and np.allclose(call(x), model(x).detach(), atol=1e-5)
    nodes = pytest.importorskip('onnx').load(tmp_path/'model.onnx').graph.node
    node, = (n for n in nodes if n.op_type == 'DequantizeLinear')
    assert [a.i for a in node.attribute if a.name == 'block_size'] == [16]

@pytest.mark.parametrize('any_batch', [True, False])
def test_to_onnx(any_batch, tmp_path):
    "In evaluation, in which it was not, and is not left; a batch of any size, or of that of the example."
    pytest.importorskip('onnxruntime')
    model,x = nn.Sequential(nn.Linear(4, 4), SoftRound(3., step=.5), nn.Dropout(.9)),inputs((4,), 6)
    model[1].eval()
    modes = [m.training for m in model.modules()]
    file = to_onnx(model, x[:3], str(tmp_path/'m.onnx'), any_batch=any_batch)
    assert file == str(tmp_path/'m.onnx') and [m.training for m in model.modules()] == modes
    run = onnx_session(file)
    with torch.no_grad(): want = model.eval()(x)
    size = 6 if any_batch else 3
    assert np.allclose(run.run(None, {'input': x[:size].numpy()})[0], want[:size], atol=1e-6)
    assert run.get_inputs()[0].shape[0] == ('batch' if any_batch else 3)

def test_the_exporter_is_quiet():
    "Its warnings and its log, while it works and no longer; errors are heard."
    log = logging.getLogger('torch.onnx.any')
    before = log.getEffectiveLevel()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        with pytest.raises(OSError), quietly('torch.onnx', 'ERROR'):
            warnings.warn('about itself')
            assert not log.isEnabledFor(logging.WARNING) and log.isEnabledFor(logging.ERROR)
            raise OSError
    assert not caught and log.getEffectiveLevel() == before

def test_session_is_exact(tmp_path):
    "Floats stay floats, and processors that saturate are told not to."
    pytest.importorskip('onnxruntime')
    file = to_onnx(mlp(), inputs((16,), 2), tmp_path/'m.onnx')
    def said(key, **kw):
        return onnx_session(file, **kw).get_session_options().get_session_config_entry(f'session.{key}')
    assert said('qdq_matmulnbits_accuracy_level') == said('x64quantprecision', vnni=False) == '1'
    with pytest.raises(RuntimeError): said('x64quantprecision', vnni=True)
    if not has_vnni(): assert said('x64quantprecision') == '1'
    assert onnx_session(file).get_session_options().intra_op_num_threads == torch.get_num_threads()
    assert onnx_session(file).get_providers() == ['CPUExecutionProvider']

def test_processor_is_known():
    "As the system says of it, where it has a file that does."
    told = Path('/proc/cpuinfo')
    if not told.exists(): pytest.skip('no /proc/cpuinfo here')
    words = set(told.read_text('utf-8').split())
    assert has_vnni() == ('avx' not in words or bool(words & {'avx512_vnni', 'avx_vnni'}))

def test_processor_of_an_older_torch(monkeypatch):
    "One word is asked there; without it an x86 is taken to have no VNNI."
    monkeypatch.delattr(torch.cpu, 'get_capabilities', raising=False)
    monkeypatch.setattr(torch.cpu, '_is_vnni_supported', lambda: True, raising=False)
    assert has_vnni()
    monkeypatch.setattr('platform.machine', lambda: 'x86_64')
    monkeypatch.delattr(torch.cpu, '_is_vnni_supported')
    assert not has_vnni()
    monkeypatch.setattr('platform.machine', lambda: 'arm64')
    assert has_vnni()

def test_to_onnx_messages(tmp_path, monkeypatch):
    pytest.importorskip('onnxscript')
    model,file = mlp(),tmp_path/'m.onnx'
    for bad,words in ((inputs((16,), 1), r'\(1, 16\); or any_batch=False'), (torch.tensor(1.), r'\(\)')):
        with pytest.raises(ValueError, match='to_onnx: example must hold two of a batch or more, got shape '+words):
            to_onnx(model, bad, file)
    with pytest.raises(TypeError, match=r"to_onnx: example\['input2'\] must be a torch.Tensor, got list"):
        to_onnx(nn.Bilinear(4, 3, 2), dict(input1=inputs((4,), 5), input2=[1]), file)
    with pytest.raises(FileNotFoundError, match='^to_onnx: file is in .*no, which is no folder'):
        to_onnx(model, inputs((16,), 2), tmp_path/'no'/'m.onnx')
    with pytest.raises(FileNotFoundError, match='^onnx_session: there is no file'): onnx_session(tmp_path)
    to_onnx(model, inputs((16,), 1), file, any_batch=False)
    for option in ('', tmp_path):
        with pytest.raises((ValueError, IsADirectoryError), match='^onnx_session: optimized'):
            onnx_session(file, optimized=option)
    for package,call in dict(onnxscript=lambda: to_onnx(model, inputs((16,), 2), file),
            onnxruntime=lambda: onnx_session(file)).items():
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(ImportError, match=fr"needs the package {package}: pip install 'shok_nb\[onnx\]'$"): call()

class Asks(nn.Linear):
    "Reads a value to decide."
    def forward(self, x):
        y = super().forward(x)
        return 2*y if y.sum() > 0 else y

class Exotic(nn.Linear):
    def forward(self, x): return torch.special.airy_ai(super().forward(x))

@pytest.mark.parametrize('model, why', [
    (Asks(4, 4), f'line {Asks.forward.__code__.co_firstlineno+2} of forward in test_deploy.py; change that line'),
    (Exotic(4, 4), 'No ONNX function found for .*airy_ai')])
def test_no_file_says_why(model, why, tmp_path):
    "What torch's exporter raises has its own pages of advice: the reason and the line are what helps."
    pytest.importorskip('onnxscript')
    with refused(model, f'^to_onnx: no file can be made of the model: .*{why}', ValueError):
        to_onnx(model, torch.ones(3, 4), tmp_path/'a.onnx')
    assert not [*tmp_path.iterdir()]

@pytest.mark.slow
def test_a_quantized_model_compiles():
    model,x = cnn(),inputs((3, 8, 8), 8)
    quantize_model_(model, 4, 8, calibrate=[x])
    leaf = x.clone().requires_grad_()
    def run(f): return torch.autograd.grad(f(leaf).square().sum(), [leaf, *model.parameters()])
    model.eval()
    for a,b in zip(run(torch.compile(model, backend='aot_eager', fullgraph=True)), run(model), strict=True):
        assert torch.allclose(a, b, rtol=1e-3, atol=1e-3*b.abs().max())
