"Files of `to_onnx`: the fewest operators on codes, and one for a SiLU, with the results that the many had."
import copy
import numpy as np
import pytest
import torch
from estimators import generator
from networks import Made
from test_deploy import session
from torch import nn
from torch.nn import functional as F
from shok_nb import Quantizer, deploy_, quantize_model_, trunc_ste
from shok_nb.deployment import runtime
from shok_nb.deployment.integer_operations import IntegerCurve

onnx = pytest.importorskip('onnx')
pytest.importorskip('onnxruntime')
pytestmark = pytest.mark.slow

class Branches(nn.Module):
    "Pools in a row and a pool beside convolutions, all of one sum, as in GoogLeNet."
    def __init__(self):
        super().__init__()
        self.first,self.a,self.b = nn.Conv2d(3, 8, 3, padding=1),nn.Conv2d(8, 4, 1),nn.Conv2d(8, 4, 3, padding=1)
        self.wide,self.pool,self.last = nn.MaxPool2d(3, 2, ceil_mode=True),nn.MaxPool2d(3, 1, 1),nn.Conv2d(8, 4, 1)
        self.out = nn.Linear(12, 5)
    def forward(self, x):
        x = self.wide(F.relu(self.first(x)))
        x = torch.cat([F.relu(self.a(x)), F.relu(self.b(x)), F.relu(self.last(self.pool(x)))], 1)
        return self.out(F.adaptive_avg_pool2d(x, 1).flatten(1))

def pictures(n): return torch.randn(n, 3, 12, 12, generator=generator())

def deployed(model, x):
    quantize_model_(model.eval(), calibrate=[x])
    deploy_(model, x)
    return model

def in_file(model, x, folder):
    "The file, its operators, those of the runtime, and what it computes."
    folder.mkdir(exist_ok=True)
    call,some,fused = session(model, x, folder)
    return onnx.load(folder/'model.onnx'),some,fused,call(x)

def as_before(monkeypatch):
    "Files as they are without these steps."
    monkeypatch.setattr(runtime, '_fewest_operators', lambda graph: None)
    monkeypatch.setattr(runtime, '_write_silu', lambda model: None)

def test_pools_and_relus_on_codes(tmp_path, monkeypatch):
    "Without these steps the runtime computes a pool in floats, and its codes are made twice; the outputs are the same."
    x = pictures(512)
    model = deployed(Branches(), x)
    _,some,fused,found = in_file(model, x, tmp_path/'few')
    as_before(monkeypatch)
    _,more,unfused,same = in_file(model, x, tmp_path/'many')
    assert np.array_equal(found, same) and np.array_equal(found, model(x).numpy(force=True))
    assert 'Relu' in more and 'Relu' not in some and len(some) < len(more)
    assert fused.count('NhwcMaxPool') == 2 > unfused.count('NhwcMaxPool')
    assert fused.count('QuantizeLinear') == 1 < unfused.count('QuantizeLinear')      # of the picture

def test_other_grids_stay(tmp_path):
    """A second grid rounds again, where the runtime alone would make one grid of two that stand in a row; and a ReLU
    between signed codes takes the negative ones away."""
    x = pictures(64)
    for between in (nn.Identity(), nn.ReLU(), nn.MaxPool2d(2)):
        first,second = Quantizer(8),Quantizer(8)
        first.set_grid_(torch.tensor(.02))
        second.set_grid_(torch.tensor(.03))
        model = nn.Sequential(first, between, second).eval()
        _,some,_,found = in_file(model, x, tmp_path/'model')
        assert some.count('QuantizeLinear') >= 2 and ('Relu' in some) is isinstance(between, nn.ReLU)
        assert np.array_equal(found, model(x).numpy(force=True))
        assert (found < 0).any() != isinstance(between, nn.ReLU)

def test_same_grid_twice(tmp_path):
    "Codes that are made again on their grid are the same codes, for the largest and the smallest scales too."
    codes = torch.arange(-128, 128.)
    for scale in (1e-44, 1e-38, 3e-5, .1, 1/3, 7., 1e36):
        v = (codes*scale).numpy()
        assert np.array_equal(np.rint(v/np.float32(scale)), codes.numpy())           # in floats, as the runtime
        if scale not in (3e-5, 1/3): continue
        twice = Quantizer(8).set_grid_(torch.tensor(scale))
        model = nn.Sequential(twice, copy.deepcopy(twice)).eval()
        _,some,_,found = in_file(model, torch.as_tensor(v).view(2, 128), tmp_path/'model')
        assert some.count('QuantizeLinear') == 1 and np.array_equal(found.ravel(), v)

class Curves(nn.Module):
    "SiLUs from all codes on some grids to codes on others."
    def __init__(self, grids):
        super().__init__()
        def byte(v): return torch.tensor(v, dtype=torch.uint8)
        self.grids = [(scale, code) for scale,code,*_ in grids]
        self.curves = nn.ModuleList(IntegerCurve((torch.tensor(s), byte(c)), nn.SiLU()) for s,c in self.grids)
        for curve,(_,_,scale,code) in zip(self.curves, grids): curve.feeds(torch.tensor(scale), byte(code))
    def forward(self, x): return torch.cat([c((x-code)*scale) for c,(scale,code) in zip(self.curves, self.grids)])

@pytest.mark.parametrize('some', [slice(8), slice(8, 16)], ids=str)
def test_silu_is_one_operator(some, tmp_path, monkeypatch):
    """All 256 codes on 8 grids: one operator gives the codes of a sigmoid and a product. What stands beside it in the
    file is the same function: ONNX's own evaluator makes the same codes. Grids are drawn: the scale from .002 to .5, so
    that codes reach the flat end and the straight one."""
    grids = torch.rand(16, 4, generator=generator(3))[some].tolist()
    grids = [(.002*250**a, int(256*b), .002*100**c, int(64*d)) for a,b,c,d in grids]
    model,codes = Curves(grids).eval(),torch.arange(256.).view(2, 128)
    file,few,fused,found = in_file(model, codes, tmp_path/'one')
    alone, = onnx.reference.ReferenceEvaluator(file).run(None, dict(x=codes.numpy()))
    as_before(monkeypatch)
    _,more,unfused,same = in_file(model, codes, tmp_path/'two')
    assert few.count('QuickGelu') == fused.count('QuickGelu') == more.count('Sigmoid') == 8
    assert unfused.count('DequantizeLinear') - fused.count('DequantizeLinear') == 8
    assert np.array_equal(found, same) and np.array_equal(found, alone)

def test_what_stands_for_a_silu(tmp_path):
    "The steps beside the operator multiply by a sigmoid of `alpha` times the value, whatever alpha is."
    x = pictures(4)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.SiLU(), nn.Conv2d(4, 2, 1))
    file,*_ = in_file(deployed(model, x), x, tmp_path/'model')
    function, = file.functions
    assert (function.domain, function.name, [*function.attribute]) == ('com.microsoft', 'QuickGelu', ['alpha'])
    v,alone = torch.linspace(-9, 9, 100),onnx.reference.ReferenceEvaluator(function)
    for alpha in (1., 1.702):
        found, = alone.run(None, {function.input[0]: v.numpy()}, dict(alpha=alpha))
        assert np.allclose(found, v*torch.sigmoid(alpha*v), atol=1e-6)

def test_sigmoids_that_are_no_silu(tmp_path):
    "A sigmoid that multiplies something else, or is read twice, stays one."
    def twice(m, x):
        x = m.q(x)
        s = torch.sigmoid(x)
        return s*x+s
    def another(m, x): return torch.sigmoid(m.q(x))*m.p(x)
    q,p = (Quantizer(8).set_grid_(torch.tensor(s)) for s in (.05, .03))
    x = pictures(4)
    for how in (twice, another):
        model = Made(how, q=q, p=p).eval()
        _,some,_,found = in_file(model, x, tmp_path/'model')
        assert 'Sigmoid' in some and 'QuickGelu' not in some
        assert np.allclose(found, model(x).numpy(force=True), atol=1e-6)

def test_a_table_is_not_written_for_each_place(tmp_path):
    """As Swin: a table of 13 * 13 offsets, read for each pair of 49 places. The file holds the table and not what is
    read of it, fourteen times as much; the result is that of torch."""
    places = torch.cartesian_prod(torch.arange(7), torch.arange(7))
    pairs = ((places[:, None]-places[None]+6)@torch.tensor([13, 1])).flatten()
    model = Made(lambda m, x: m.scores(x)[..., None] + m.table[m.pairs].view(49, 49, -1).permute(2, 0, 1),
        scores=nn.Linear(4, 1), table=nn.Parameter(torch.randn(169, 6)), pairs=nn.Buffer(pairs)).eval()
    x = torch.randn(5, 1, 4)
    file,_,_,found = in_file(model, x, tmp_path)
    held = [t.dims[0]*t.dims[1] for t in file.graph.initializer if len(t.dims) == 2 and t.data_type == 1]
    assert max(held) == 169*6 and np.allclose(found, model(x).detach(), atol=1e-6)

def test_constants_of_one_name_both_stay(tmp_path):
    """Clips of one tensor to ranges of its readers: the exporter's optimizer names their ends after the tensor, so that
    one takes the place of another, as https://github.com/microsoft/onnxscript/issues/2945 says. The first was lost."""
    def readers(m, x):
        x = torch.tanh(x)
        return torch.cat([m.first(x), m.second(x)], 1)
    x = torch.randn(64, 8, generator=generator())
    grids = [Quantizer(8, signed=True, rounding=trunc_ste).set_grid_(torch.tensor(s)) for s in (2**-9, 2**-7)]
    first,second = (nn.Sequential(q, nn.Linear(8, 4)) for q in grids)
    model = Made(readers, first=first, second=second).eval()
    *_,found = in_file(model, x, tmp_path)
    np.testing.assert_allclose(found, model(x).numpy(force=True), atol=1e-6)

def conv_relu_norm_pool():
    "Six blocks of padding, convolution, ReLU, normalization and pooling, and a Linear, as CREPE has."
    def block(i, o): return [nn.ZeroPad2d((0, 0, 1, 2)), nn.Conv2d(i, o, (4, 1)), nn.ReLU(), nn.BatchNorm2d(o),
        nn.MaxPool2d((2, 1))]
    layers = [layer for i in range(6) for layer in block(4 if i else 1, 4)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(4, 3))

def trained_norms(model):
    "Normalizations with statistics, factors of both signs among them."
    g = generator(5)
    for m in model.modules():
        if not isinstance(m, nn.BatchNorm2d): continue
        for t in (m.weight, m.bias, m.running_mean): t.data = torch.randn(len(t), generator=g)*.3
        m.weight.data[1:] += 1
        m.running_var = torch.rand(len(m.running_var), generator=g) + .5
    return model.eval()

def test_padding_and_normalization_behind_a_relu(tmp_path):
    """Zeros around codes are codes: they are padding of the convolution in the file, with other numbers on each side,
    and each convolution and each normalization is one of integers. Before, ten of these twelve were floats."""
    model,x = trained_norms(conv_relu_norm_pool()),torch.randn(16, 1, 64, 1, generator=generator())
    file,some,fused,found = in_file(deployed(model, x), x, tmp_path)
    assert fused.count('QLinearConv') == 12 and not {'Conv', 'Pad', 'DequantizeLinear'} & {*fused}
    assert 'Pad' not in some and np.array_equal(found, model(x).numpy(force=True))

@pytest.mark.parametrize('how, many', [(lambda x: F.pad(x, (1, 2, 0, 1)), 0), (lambda x: F.pad(x, (1, -1, 0, 1)), 1),
    (lambda x: F.pad(x, (1, 2), value=.5), 1), (lambda x: F.pad(x, (2, 1, 1, 1), mode='reflect'), 1),
    (lambda x: F.pad(x, (0, 0, 1, 1, 0, 0)), 0)], ids=['zeros', 'cut', 'half', 'reflect', 'long'])
def test_paddings(how, many, tmp_path):
    "What stands around is padding of the convolution only if it is zeros; in each case the runtime computes the same."
    def steps(m, x): return m.b(how(m.relu(m.a(x)))).flatten(1)
    model = Made(steps, a=nn.Conv2d(3, 4, 3), relu=nn.ReLU(), b=nn.Conv2d(4, 2, 3, padding=1))
    x = pictures(8)
    _,some,fused,found = in_file(deployed(model, x), x, tmp_path)
    assert some.count('Pad') == many
    assert np.allclose(found, model(x).numpy(force=True), atol=1e-5)

def unlike(found, want): return np.abs(found-want.numpy(force=True)).max()/want.abs().max().item()

@pytest.mark.parametrize('mode', ['sum', 'mean', 'max'])
def test_nodes_without_inputs(mode, tmp_path):
    "The exporter begins an empty sequence for each EmbeddingBag: a node without inputs, which was an IndexError."
    model,ids = nn.EmbeddingBag(9, 4, mode=mode).eval(),torch.randint(0, 9, (3, 5), generator=generator())
    *_,found = in_file(model, ids, tmp_path)
    assert unlike(found, model(ids)) < 1e-6

def again(m, x): return m.a(F.relu(m.a(x)))
def thrice(m, x): return m.b(m.a(F.relu(m.a(F.relu(m.a(x))))))
def narrow(m, x): return torch.cat([m.a(x), m.a(x[:, :1]), m.b(x)], 1)

@pytest.mark.parametrize('how, shape', [(again, (6, 8)), (thrice, (6, 8)), (narrow, (6, 3, 8))])
def test_a_layer_called_twice_without_vnni(how, shape, tmp_path):
    "Codes that two products read: the runtime wanted to write them twice by one name and did not load the file."
    x = torch.randn(shape, generator=generator())
    model = deployed(Made(how, a=nn.Linear(8, 8), b=nn.Linear(8, 8)), x)
    run = runtime.onnx_session(runtime.to_onnx(model, x, tmp_path/'model.onnx'), vnni=False)
    found, = run.run(None, {run.get_inputs()[0].name: x.numpy()})
    assert unlike(found, model(x)) < 1e-5

def test_what_has_no_operator_is_named(tmp_path):
    "The layer and the remedy stand in the message, before anything is exported."
    x = torch.randn(2, 5, 4)
    model = nn.Sequential(nn.LSTM(4, 6, batch_first=True, proj_size=3))
    with pytest.raises(ValueError, match=r'^to_onnx: 0 is an LSTM with proj_size=3.*; use proj_size=0'):
        runtime.to_onnx(model, x, tmp_path/'model.onnx')
    rows = torch.randint(0, 4, (2, 5), generator=generator())
    for layer,given in (nn.Linear(4, 3), x), (nn.Conv1d(5, 3, 1), x), (nn.Embedding(4, 3), rows):
        model = deployed(nn.Sequential(layer), given).bfloat16()
        given = given.bfloat16() if given.is_floating_point() else given
        with pytest.raises(ValueError, match=r'^to_onnx: .*torch.bfloat16.*\.float\(\)'):
            runtime.to_onnx(model, given, tmp_path/'model.onnx')
    assert not [*tmp_path.iterdir()]

@pytest.mark.parametrize('weights', [4, 8])
@pytest.mark.parametrize('pools', [(nn.AvgPool2d(2), nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(2)),
    (nn.AvgPool2d(3, 2, 1), nn.MaxPool2d(3, 1), nn.AdaptiveAvgPool2d((1, 3))),
    (nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(4), nn.AvgPool2d(2))], ids=['halves', 'overlaps', 'last'])
def test_a_grid_by_signed_and_unsigned_codes(pools, weights, tmp_path):
    """A pooling whose windows differ in length stays in floats, and its quantizer has signed codes where the layer
    before it gave unsigned ones, of the same grid: the runtime refused what it had made of both, with 4 bits."""
    x = torch.randn(8, 4, 14, 14, generator=generator())
    model = nn.Sequential(nn.Conv2d(4, 4, 3), *pools, nn.Flatten(), nn.LazyLinear(3))
    model(x)
    quantize_model_(model.eval(), weights, calibrate=[x])
    deploy_(model, x)
    file = runtime.to_onnx(model, x, tmp_path/'model.onnx')
    for vnni in (True, False): run = runtime.onnx_session(file, vnni=vnni)
    found, = run.run(None, {run.get_inputs()[0].name: x.numpy()})
    assert unlike(found, model(x)) < 1e-5

def lines(*layers): return nn.Sequential(nn.Conv1d(4, 4, 5), nn.ReLU(), nn.BatchNorm1d(4), *layers, nn.Flatten())

@pytest.mark.parametrize('make, shape, kernel, many', [
    (lambda: lines(nn.MaxPool1d(2), nn.ConstantPad1d((1, 2), 0.), nn.Conv1d(4, 4, 4), nn.ReLU(), nn.BatchNorm1d(4),
        nn.Conv1d(4, 2, 3)), (8, 4, 40), 'QLinearConv', 4),
    (lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.ReLU6(),
        nn.BatchNorm1d(8), nn.Linear(8, 3)), (32, 8), 'QGemm', 3)], ids=['conv', 'linear'])
def test_normalizations_of_lines(make, shape, kernel, many, tmp_path):
    """Behind a ReLU a BatchNorm1d of lines is one of integers; of matrices it takes floats, and the runtime, which
    made floats of the product before it, too, computes that with codes, as the report says."""
    model,x = make().eval(),torch.randn(shape, generator=generator())
    quantize_model_(model, calibrate=[x])
    report = deploy_(model, x)
    *_,fused,found = in_file(model, x, tmp_path)
    assert fused.count(kernel) == many == sum(row.kernel == kernel for row in report.rows)
    assert not {'Gemm', 'FusedGemm'} & {*fused} and fused.count('Conv') == (kernel == 'QLinearConv')     # the last
    assert unlike(found, model(x)) < 1e-5
