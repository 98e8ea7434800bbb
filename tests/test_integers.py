"""Whole networks on integers, in ONNX Runtime's own graph: additions and poolings too, with the codes of torch, all of
them. Operators one by one, on random grids, against the runtime's kernels."""
import copy
import functools
import re
from collections import Counter
from itertools import chain
import numpy as np
import pytest
import torch
from estimators import generator, saved, slow_after
from networks import Made
from test_deploy import session
from torch import nn
from shok_nb.deployment.deploy import deploy_
from shok_nb.deployment.integer_layers import IntegerLayer
from shok_nb.deployment.integer_operations import (
    IntegerAdd,
    IntegerAveragePool,
    IntegerConcatenate,
    IntegerCurve,
    IntegerMean,
    IntegerMultiply,
)
from shok_nb.deployment.runtime import onnx_session, to_onnx
from shok_nb.networks.models import quantize_model_
from shok_nb.networks.operations import Add
from shok_nb.nn import remove_rounding_
from shok_nb.quantization.quantizer import Quantizer

F = nn.functional
onnx = pytest.importorskip('onnx')
ort = pytest.importorskip('onnxruntime')

class Basic(nn.Module):
    "The block of a residual network, as everybody writes it."
    def __init__(self, ins, outs, stride=1):
        super().__init__()
        self.conv1,self.bn1 = nn.Conv2d(ins, outs, 3, stride, 1, bias=False),nn.BatchNorm2d(outs)
        self.conv2,self.bn2 = nn.Conv2d(outs, outs, 3, 1, 1, bias=False),nn.BatchNorm2d(outs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1: self.downsample = nn.Sequential(nn.Conv2d(ins, outs, 1, stride), nn.BatchNorm2d(outs))
    def forward(self, x):
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None: identity = self.downsample(x)
        out += identity
        return self.relu(out)

class Functional(Basic):
    "The same by functions, and the sum the other way round."
    def forward(self, x):
        out = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        return nn.functional.relu((x if self.downsample is None else self.downsample(x)) + out)

class Residual(nn.Module):
    def __init__(self, block=Basic, strides=(1, 1, 2)):
        super().__init__()
        self.conv1,self.bn1,self.relu = nn.Conv2d(3, 8, 5, 2, 2, bias=False),nn.BatchNorm2d(8),nn.ReLU()
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layers = nn.Sequential(*(block(8, 8*s, s) for s in strides))
        self.avgpool,self.fc = nn.AdaptiveAvgPool2d((1, 1)),nn.Linear(8*strides[-1], 10)
    def forward(self, x):
        x = self.layers(self.maxpool(self.relu(self.bn1(self.conv1(x)))))
        return self.fc(torch.flatten(self.avgpool(x), 1))

def inputs(n, seed=0): return torch.randn(n, 3, 16, 16, generator=generator(seed))

def residual(block=Basic, seed=0, strides=(1, 1, 2)):
    torch.manual_seed(seed)
    model = Residual(block, strides)
    for i in range(3): model(inputs(64, 50+i))
    return model

@functools.cache
def calibrated_once(block, strides):
    model = residual(block, strides=strides).eval()
    quantize_model_(model, calibrate=[inputs(64)])
    return model

def calibrated(block=Basic, strides=(1, 1, 2)): return copy.deepcopy(calibrated_once(block, strides))

def operators(file): return Counter(n.op_type for n in onnx.load(file).graph.node)

def in_runtime(model, example, folder):
    "A function that runs the model in the runtime, and the operators there."
    call,_,optimized = session(model, example, folder)
    return call,Counter(optimized)

def out(model, x):
    with torch.no_grad(): return model(x)

def equal_there(model, folder):
    "The runtime gives the codes of torch, all of them, beyond what was calibrated too. Returns its operators."
    x = inputs(2000, 1)*1.3
    call,found = in_runtime(model, inputs(16), folder)
    assert np.array_equal(call(x), out(model, x).numpy())
    return found

def loaded_again(fresh, state, model):
    "Another network with this state is the deployed one once it is deployed, and a copy is it too. Returns the report."
    quantize_model_(fresh)
    fresh.load_state_dict(state)
    report,x = deploy_(fresh, inputs(16)),inputs(99, 1)
    for m in (fresh, copy.deepcopy(model)): assert torch.equal(out(m, x), out(model, x))
    return report

def kernels(report): return Counter(r.kernel for r in report.rows)

def same_there(found, report, **want):
    "These kernels, in the report and in the runtime."
    assert kernels(report) == want == {k: found[k] for k in want}

def seen(model, n=64):
    "Its normalizations have seen something."
    out(model, inputs(n))
    return model.eval()

def quantized(model, n=64, most=.05):
    "Quantized, and close to what it was. Returns the report."
    x = inputs(n)
    floats = out(model.eval(), x)
    report = quantize_model_(model, calibrate=[x])
    assert (out(model, x)-floats).norm() < most*floats.norm()
    return report

FLOATS = {'Conv', 'FusedConv', 'Gemm', 'FusedGemm', 'MatMul', 'Add', 'Relu', 'GlobalAveragePool', 'ReduceMean',
    'DequantizeLinear'}

@pytest.fixture(scope='module', params=slow_after([Basic, Functional]), ids=lambda b: b.__name__.lower())
def whole(request, tmp_path_factory):
    "A residual network on integers: before, the report, after, the runtime and its operators."
    model = residual(request.param).eval()
    quantize_model_(model, calibrate=[inputs(256)])
    before = copy.deepcopy(model)
    report = deploy_(model, inputs(16))
    return before,report,model,*in_runtime(model, inputs(16), tmp_path_factory.mktemp('whole'))

@pytest.mark.slow
def test_nothing_computes_with_floats(whole):
    _,report,_,_,found = whole
    assert not FLOATS & {*found}, found
    assert found['QLinearConv'] == 8 and found['QLinearAdd'] == 3 and found['QGemm'] == 1
    assert found['QLinearGlobalAveragePool'] == found['QuantizeLinear'] == 1
    said = Counter(r.kernel for r in report.rows)
    assert said == {k: found[k] for k in said}, 'the report names the kernels that are there'

@pytest.mark.slow
def test_ten_thousand_inputs(whole):
    "Equal, code for code; beyond what was calibrated too."
    _,_,model,call,_ = whole
    for part in (inputs(10_000, 1)*1.3).split(2500): assert np.array_equal(call(part), out(model, part).numpy())

@pytest.mark.slow
def test_close_to_before(whole):
    before,report,model,*_ = whole
    x = inputs(500, 2)
    with torch.no_grad(): a,b = model(x),before(x)
    assert (a-b).abs().max() < .03*b.abs().max()
    step = 1/255                               # of the largest output: that of a sum may lie on a tie
    assert all(float(r.gap) < (1e-4 if r.weights == 'int8' else 1.1*step) for r in report.rows)

@pytest.mark.slow
def test_copies_pickles_and_compiles(whole):
    _,_,model,*_ = whole
    x = inputs(8, 3)
    want = out(model, x)
    again = saved(model, weights_only=False)
    compiled = torch.compile(copy.deepcopy(model), backend='aot_eager', fullgraph=True)
    for m in (copy.deepcopy(model), again, compiled): assert torch.equal(out(m, x), want)
    assert again.layers[0].forward.owner is again.layers[0]

@pytest.mark.slow
def test_ties(tmp_path):
    "Scales that are powers of two: many sums lie on ties."
    model = residual(strides=(1,)).eval()
    for m in model.modules():
        if isinstance(m, nn.BatchNorm2d):
            m.reset_parameters()
            m.eps = 0.
    quantize_model_(model, calibrate=[inputs(64)])
    for n,q in model.named_modules():
        if isinstance(q, Quantizer):
            scale = q.grid()[0].detach()
            q.set_grid_(2**scale.log2().round() if 'param' not in n else torch.full_like(scale, 2.**-8))
    deploy_(model, inputs(16))
    call,found = in_runtime(model, inputs(16), tmp_path)
    x = (inputs(2000, 1)*16).round()/16
    assert np.array_equal(call(x), out(model, x).numpy())
    assert found['QLinearAdd'] == 1
    first = model.conv1
    was,first.out_scale = first.out_scale,None
    sums = out(first, x)/was
    first.out_scale = was
    assert ((sums-sums.floor()) == .5).float().mean() > .001
    add = model.layers[0].operations['add']
    a,b = torch.meshgrid(torch.arange(256.), torch.arange(256.), indexing='ij')
    exact = (a-int(add.zero_point_0))*add.scale_0/add.out_scale + (b-int(add.zero_point_1))*add.scale_1/add.out_scale
    assert ((exact-exact.floor()) == .5).any() or add.out_scale <= min(add.scale_0, add.scale_1)

@pytest.mark.slow
def test_training_goes_on():
    "A gradient reaches every weight and scale, and a trained network deploys."
    model = residual(strides=(1, 2))
    quantize_model_(model, calibrate=[inputs(64)])
    adam = torch.optim.Adam(model.train().parameters(), lr=1e-3)
    for i in range(3):
        adam.zero_grad()
        model(inputs(16, i)).square().mean().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        assert all(p.grad.abs().sum() > 0 for n,p in model.named_parameters() if 'log_scale' in n)
        adam.step()
    report = deploy_(model.eval(), inputs(16))
    assert {r.kernel for r in report.rows} == {'QLinearConv', 'QLinearAdd', 'QLinearGlobalAveragePool', 'QGemm'}

class Masked(Basic):
    "An argument that the calibration leaves out, and a place of your own."
    def __init__(self, ins, outs, stride=1):
        super().__init__(ins, outs, stride)
        self.sum = Add()
    def forward(self, x, mask=None):
        if mask is not None: x = x*mask
        y = x if self.downsample is None else self.downsample(x)
        return self.sum(self.bn2(self.conv2(self.bn1(self.conv1(x)).relu())), y).relu() + y

def waiting(block=Basic, strides=(1, 1, 2)):
    model = residual(block, 1, strides).eval()
    quantize_model_(model)
    return model

@pytest.mark.slow
@pytest.mark.parametrize('block', [Basic, Functional, Masked])
def test_a_state_places_what_it_names(block):
    "A network that was quantized without batches is the calibrated one, bit for bit, once it has its state."
    model,fresh = calibrated(block),waiting(block)
    state,x = model.state_dict(),inputs(50, 2)
    assert any('operations' in k for k in state)
    def same(other):
        assert repr(other) == repr(model) and {*other.state_dict()} == {*state}
        assert [n for n,_ in other.named_parameters()] == [n for n,_ in model.named_parameters()]
        with torch.no_grad(): assert torch.equal(other(x), model(x))
    within,twin = nn.ModuleDict(dict(net=copy.deepcopy(fresh))),copy.deepcopy(fresh)
    fresh.load_state_dict(saved(state))
    within.load_state_dict(saved({f'net.{k}': v for k,v in state.items()}), assign=True)
    twin.load_state_dict(copy.deepcopy(state))
    for other in (fresh, within['net'], twin, copy.deepcopy(fresh)): same(other)
    fresh.load_state_dict(saved(state))
    same(fresh)
    assert fresh.layers[2].downsample[0].input_quantizer is fresh.layers[2].conv1.input_quantizer
    assert [r.kernel for r in deploy_(twin, inputs(8)).rows] == [r.kernel for r in deploy_(model, inputs(8)).rows]

@pytest.mark.slow
def test_a_state_that_does_not_fit():
    one = 1,
    model = calibrated(strides=one)
    state = model.state_dict()
    def loads(model, **changed):
        new = state | changed
        return model.load_state_dict({k: v for k,v in new.items() if v is not None})
    add = 'layers.0.operations.add.inputs'
    second = {k: None for k in state if k.startswith(f'{add}.1')}
    with pytest.raises(RuntimeError, match=rf'Missing key.*{add}\.1\.input_quantizer'):
        loads(waiting(strides=one), **second)
    with pytest.raises(RuntimeError, match='Unexpected key.*add_7'):
        loads(waiting(strides=one), **{f'layers.0.operations.add_7.{k}': state[f'{add}.0.{k}'] for k in
            ('input_quantizer.layout', 'input_quantizer.log_scale')})
    with pytest.raises(RuntimeError, match='a forward of 3 inputs, this one has 1'):
        loads(copy.deepcopy(model), **{'layers.0.operations._extra_state': torch.tensor(3)})
    with pytest.raises(RuntimeError, match='Unexpected key.*operations'): residual(strides=one).load_state_dict(state)
    four = residual(strides=one)
    quantize_model_(four, 8, 4)
    told = 'has codes 0 to 255.*this one has codes -8 to 7'
    with pytest.raises(RuntimeError, match=told): four.load_state_dict(state)
    bare = waiting(strides=one)
    assert 'input_quantizer' in repr(bare.conv1)
    remove_rounding_(bare, leave_rounded=False)
    said = repr(bare)
    with pytest.raises(RuntimeError, match='Unexpected key.*operations'): bare.load_state_dict(state)
    assert repr(bare) == said

@pytest.mark.slow
def test_a_network_as_it_was():
    "What is taken away leaves no trace; a call that fails has changed nothing."
    model = residual(strides=(1, 2)).eval()
    x = inputs(8)
    want = out(model, x)
    said,keys = repr(model),{*model.state_dict()}
    def unchanged():
        assert repr(model) == said and {*model.state_dict()} == keys
        for m in model.modules(): assert not ('forward' in vars(m) or hasattr(m, 'operations') or m._forward_pre_hooks)
        assert torch.equal(out(model, x), want)
    quantize_model_(model, calibrate=[x])
    remove_rounding_(model, leave_rounded=False)
    unchanged()
    def batches():
        yield x
        raise RuntimeError('no more')
    with pytest.raises(RuntimeError, match='no more'): quantize_model_(model, calibrate=batches())
    unchanged()
    with pytest.raises(ValueError, match='must be finite'): quantize_model_(model, calibrate=[x*float('nan')])
    unchanged()

@pytest.mark.slow
def test_what_is_spoiled_is_refused(monkeypatch):
    "The proof sees an operation that gives other codes, and undoes."
    model = calibrated(strides=(1,))
    said,kept = repr(model),copy.deepcopy(model)
    right = IntegerAdd._codes
    monkeypatch.setattr(IntegerAdd, '_codes', lambda self, x, y: right(self, x, y)+1)
    with pytest.raises(ValueError, match=r'operations\.add gives other codes than its operation; nothing was changed'):
        deploy_(model, inputs(16))
    assert repr(model) == said
    with torch.no_grad(): assert torch.equal(model(inputs(8)), kept(inputs(8)))

def test_a_sum_that_leaves_is_floats(tmp_path):
    "The last operation of a network has no quantizer behind it, and the report says so."
    a,b = (nn.Conv2d(3, 3, 3, padding=1) for _ in range(2))
    model,x = Made(lambda m, x: m.b(m.a(x).relu()) + m.a(x), a=a, b=b).eval(),inputs(8)
    assert not any(r.kind == 'Add' for r in quantize_model_(model, calibrate=[x]).rows)
    assert {r.kernel for r in deploy_(model, x).rows} == {'Conv: no codes leave'}

def random_grid(rng):
    scale = torch.tensor(2**rng.uniform(-8, -3), dtype=torch.float32)
    return scale,torch.tensor(rng.integers(0, 256), dtype=torch.uint8)

def kernel(op, feeds, order, outs, **attributes):
    "One operator of the runtime on uint8 codes."
    from onnx import TensorProto, helper
    init = [onnx.numpy_helper.from_array(v, k) for k,v in order.items() if k not in feeds]
    given = [helper.make_tensor_value_info(k, TensorProto.UINT8, v.shape) for k,v in feeds.items()]
    node = helper.make_node(op, [*order], ['out'], domain='com.microsoft', **attributes)
    graph = helper.make_graph([node], 'g', given, [helper.make_tensor_value_info('out', TensorProto.UINT8, outs)], init)
    sets = [helper.make_opsetid('', 20), helper.make_opsetid('com.microsoft', 1)]
    model = helper.make_model(graph, opset_imports=sets, ir_version=9)
    run = ort.InferenceSession(model.SerializeToString(), providers=['CPUExecutionProvider'])
    return torch.as_tensor(run.run(None, {k: v.numpy() for k,v in feeds.items()})[0])

def values(codes, grid): return (codes.float()-grid[1].float())*grid[0]
def to_codes(y, grid): return (y/grid[0]).round() + grid[1]

def constants(**grids):
    "Initializers of scales and zero points, in the order in which they are given."
    return {k: v.numpy() for name,g in grids.items() for k,v in ((f's{name}', g[0]), (f'z{name}', g[1]))}

@pytest.mark.parametrize('op, layer', [('QLinearAdd', IntegerAdd), ('QLinearMul', IntegerMultiply)])
def test_two_tensors_of_codes(op, layer):
    """On 40 random grids; products also with one factor of each channel. An error of one code in 10,000 would be seen
    80 times."""
    rng,product = np.random.default_rng(0),layer is IntegerMultiply
    for i in range(40):
        a,b,c = (random_grid(rng) for _ in range(3))
        if product: c = (a[0]*b[0]*64, c[1])
        shapes = ((2, 10, 25, 40), (2, 10, 1, 1)) if product and i % 2 == 0 else ((20_000,), (20_000,))
        x,y = (torch.tensor(rng.integers(0, 256, s, dtype=np.uint8)) for s in shapes)
        grids = constants(a=a, b=b, c=c)
        order = dict(x=x, sa=grids['sa'], za=grids['za'], y=y) | {k: grids[k] for k in ('sb', 'zb', 'sc', 'zc')}
        want = kernel(op, dict(x=x, y=y), order, [*x.shape])
        made = layer(a, b)
        made.feeds(*c)
        assert torch.equal(to_codes(made(values(x, a), values(y, b)), c), want.float())

def same_codes(op, layer, x, a, c, last=False, **attributes):
    "The layer gives the codes of the runtime's operator, from grid `a` to grid `c`; with the channels `last`, too."
    layer.feeds(*c)
    found = to_codes(layer(values(x, a)), c)
    x,like = (t.movedim(1, -1).contiguous() if last else t for t in (x, found))
    want = kernel(op, dict(x=x), dict(x=x) | constants(a=a, c=c), [*like.shape], **attributes)
    assert torch.equal(like, want.float())

@pytest.mark.parametrize('op, function, attributes', [('QLinearSigmoid', nn.Sigmoid(), {}),
    ('QLinearLeakyRelu', nn.LeakyReLU(.1), dict(alpha=.1))], ids=['sigmoid', 'leaky'])
def test_curve_of_codes(op, function, attributes):
    "All 256 codes, on 40 random grids."
    rng,x = np.random.default_rng(0),torch.arange(256, dtype=torch.uint8)
    for _ in range(40):
        a,c = random_grid(rng),random_grid(rng)
        curve = IntegerCurve(a, function)
        same_codes(op, curve, x, a, c, **attributes)
        assert curve.kernel == op

@pytest.mark.parametrize('last', [0, 1])
def test_mean_of_codes(last):
    rng = np.random.default_rng(0)
    for size in (1, 3, 7, 12):
        for _ in range(10):
            a,c = random_grid(rng),random_grid(rng)
            c = (a[0]*torch.tensor(2**rng.uniform(-1, 1), dtype=torch.float32), c[1])
            x = torch.tensor(rng.integers(0, 256, (8, 16, size, size), dtype=np.uint8))
            same_codes('QLinearGlobalAveragePool', IntegerMean(a), x, a, c, last, channels_last=last)

def test_your_own_addition():
    "A network that is written with `Add` keeps its forward."
    own = Made(lambda m, x: m.sum(m.conv(x), x).relu(), conv=nn.Conv2d(8, 8, 3, padding=1), sum=Add())
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), own, nn.Conv2d(8, 4, 1)).eval()
    report = quantize_model_(model, calibrate=[inputs(32)])
    assert [r.name for r in report.rows if r.kind == 'Add'] == ['2.sum'] and 'forward' not in vars(model[2])
    report = deploy_(model, inputs(8))
    assert re.search(r'2\.sum +Add +- +codes to codes +- +QLinearAdd', repr(report))

class Inverted(nn.Module):
    "A block of a MobileNet: ReLU6, and a sum without a ReLU."
    def __init__(self, n):
        super().__init__()
        def layer(ins, outs, **kw): return nn.Conv2d(ins, outs, bias=False, **kw),nn.BatchNorm2d(outs)
        self.conv = nn.Sequential(*layer(n, 4*n, kernel_size=1), nn.ReLU6(inplace=True),
            *layer(4*n, 4*n, kernel_size=3, padding=1, groups=4*n), nn.ReLU6(inplace=True),
            *layer(4*n, n, kernel_size=1))
    def forward(self, x): return x + self.conv(x)

class Mobile(nn.Module):
    "The forward of the network itself pools, so it is rewritten too."
    def __init__(self):
        super().__init__()
        stem = nn.Conv2d(3, 8, 3, 2, 1),nn.BatchNorm2d(8),nn.ReLU6()
        self.features = nn.Sequential(*stem, Inverted(8), nn.Conv2d(8, 32, 1), nn.ReLU6())
        self.classifier = nn.Sequential(nn.Dropout(.2), nn.Linear(32, 10))
    def forward(self, x):
        x = nn.functional.adaptive_avg_pool2d(self.features(x), (1, 1))
        return self.classifier(torch.flatten(x, 1))

class Branches(nn.Module):
    "Parts on three grids become one."
    def __init__(self):
        super().__init__()
        self.a,self.b,self.c = nn.Conv2d(3, 4, 3, padding=1),nn.Conv2d(4, 6, 3, padding=1),nn.Conv2d(4, 2, 1)
        self.d,self.pool,self.fc = nn.Conv2d(12, 5, 3),nn.AdaptiveAvgPool2d(1),nn.Linear(5, 3)
    def forward(self, x):
        x = self.a(x).relu()
        x = torch.cat([x, self.b(x).relu(), self.c(x)], 1)
        return self.fc(self.pool(self.d(x).relu()).flatten(1))

class Shuffles(nn.Module):
    "Half of the channels go through a convolution; then the halves are mixed, as ShuffleNet does it."
    def __init__(self):
        super().__init__()
        self.a,self.b,self.c = nn.Conv2d(3, 8, 3),nn.Conv2d(4, 4, 3, padding=1),nn.Conv2d(8, 5, 3)
        self.fc = nn.Linear(5, 3)
    def forward(self, x):
        left,right = self.a(x).relu().chunk(2, dim=1)
        x = torch.cat((left, self.b(right).relu()), dim=1)
        n,c,height,width = x.size()
        x = x.view(n, 2, c//2, height, width).transpose(1, 2).contiguous().view(n, c, height, width)
        return self.fc(self.c(x).relu().mean([2, 3]))

class Enlarges(nn.Module):
    "A decoder: what was made small grows again, is cut to size and lies beside what entered."
    def __init__(self):
        super().__init__()
        self.a,self.b,self.c = nn.Conv2d(3, 4, 3, padding=1),nn.Conv2d(4, 8, 3, 2),nn.Conv2d(12, 5, 3)
        self.up,self.fc = nn.Upsample(scale_factor=2),nn.Linear(5, 3)
    def forward(self, x):
        x = self.a(x).relu()[:, :, 1:, 1:-1]
        small = F.interpolate(self.up(self.b(x).relu()), size=(15, 14), mode='nearest')
        return self.fc(self.c(torch.cat([small, x], 1)).relu().mean([2, 3]))

OTHERS = [(Mobile, dict(QLinearConv=5, QLinearAdd=1)), (Branches, dict(QLinearConv=4, QLinearConcat=1)),
    (Shuffles, dict(QLinearConv=3, QLinearConcat=1)), (Enlarges, dict(QLinearConv=3, QLinearConcat=1))]

def check_other(make, want, model, report, folder, never):
    "These kernels and those of the end, none of what is never there, and equal codes."
    found = equal_there(model, folder)
    same_there(found, report, **want, QGemm=1, QLinearGlobalAveragePool=1)
    moves = {'DequantizeLinear'} if make in (Shuffles, Enlarges) else set()    # codes that are only moved
    assert never & {*found} <= moves

@pytest.mark.slow
@pytest.mark.parametrize('make, want', OTHERS, ids=['mobile', 'branches', 'shuffles', 'enlarges'])
def test_other_networks(make, want, tmp_path):
    model = seen(make())
    quantize_model_(model, calibrate=[inputs(128)])
    check_other(make, want, model, deploy_(model, inputs(16)), tmp_path, FLOATS | {'Clip'})
    assert torch.equal(out(copy.deepcopy(model), inputs(9)), out(model, inputs(9)))

def by_modules(m, x): return m.curve(m.fc2(m.activation(m.fc1(m.avgpool(x))))) * x
def by_functions(m, x): return torch.mul(x, torch.sigmoid(m.fc2(F.silu(m.fc1(m.avgpool(x)), inplace=True))))

def weighs(how, curve=None):
    "Squeeze and excitation: each channel is multiplied by what the network makes of its mean."
    return Made(how, avgpool=nn.AdaptiveAvgPool2d(1), fc1=nn.Conv2d(8, 2, 1), fc2=nn.Conv2d(2, 8, 1),
        activation=nn.ReLU(), curve=curve)

def weighing(curve, block):
    torch.manual_seed(0)
    def layer(ins, outs, **kw): return nn.Conv2d(ins, outs, bias=False, **kw),nn.BatchNorm2d(outs),curve()
    model = nn.Sequential(*layer(3, 8, kernel_size=3, stride=2), *layer(8, 8, kernel_size=3, padding=1, groups=8),
        block, nn.Conv2d(8, 16, 1), nn.BatchNorm2d(16), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5))
    return seen(model)

WEIGHING = dict(efficient=(lambda: nn.SiLU(inplace=True), lambda: weighs(by_modules, nn.Sigmoid())),
    mobile=(lambda: nn.Hardswish(inplace=True), lambda: weighs(by_modules, nn.Hardsigmoid())),
    functions=(nn.GELU, lambda: weighs(by_functions)),
    leaky=(lambda: nn.LeakyReLU(.1), lambda: weighs(by_modules, nn.Tanh())))

@pytest.mark.slow
@pytest.mark.parametrize('kind', WEIGHING)
def test_networks_that_weigh_channels(kind, tmp_path):
    "Every convolution computes with integers, whatever curve lies behind it, and gives the runtime's codes."
    curve,block = WEIGHING[kind]
    model = weighing(curve, block())
    quantized(model, 128)
    state,report = saved(model.state_dict()),deploy_(model, inputs(16))
    found,said = equal_there(model, tmp_path),kernels(report)
    assert said['QLinearConv'] == found['QLinearConv'] == 5 and said['QLinearMul'] == found['QLinearMul'] == 1
    assert not {'Conv', 'ConvInteger', 'GlobalAveragePool'} & {*found}
    assert found['QLinearSigmoid'] == said['QLinearSigmoid'] == (kind in ('efficient', 'functions'))
    assert found['QLinearLeakyRelu'] == said['QLinearLeakyRelu'] == 2*(kind == 'leaky')
    again = loaded_again(weighing(curve, block()), state, model)
    assert repr(again) == repr(report)

@pytest.mark.slow
@pytest.mark.parametrize('many', [1, 8])
def test_convolutions_before_a_prelu(many, tmp_path):
    "They compute with integers, whether it has one slope or one for each channel, some below 0; code for code."
    def curve():
        made = nn.PReLU(many)
        nn.init.uniform_(made.weight, -.2, .5, generator=generator())
        return made
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), curve(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3), curve(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    fresh = copy.deepcopy(model)
    quantized(model)
    state,report = saved(model.state_dict()),deploy_(model, inputs(16))
    found = equal_there(model, tmp_path)
    assert found['QLinearConv'] == kernels(report)['QLinearConv'] == 2
    assert kernels(report)['PReLU in floats, from codes to codes'] == 2 and not {'Conv', 'FusedConv'} & {*found}
    again = loaded_again(fresh.eval(), state, model)
    assert repr(again) == repr(report)

# --- grids of fewer than 256 codes
def few(): return Quantizer((0, 14), zero_point=True, init='minmax')
FEW = {'15 codes for all': few(), '4': 4, '2': 2, '7': 7}

def in_codes(model, activations, x):
    "Quantized with four bits for weights, and deployed; what was said."
    quantize_model_(model.eval(), 4, activations, calibrate=[x])
    return deploy_(model, x[:16])

@pytest.mark.slow
@pytest.mark.parametrize('of', FEW)
def test_few_codes(of, tmp_path):
    "Nothing computes with floats, each grid of few codes has one Clip, and inputs beyond the range are equal too."
    model = residual(strides=(1, 2))
    report = in_codes(model, FEW[of], inputs(128))
    found = equal_there(model, tmp_path)
    assert not FLOATS & {*found}, found
    same_there(found, report, QLinearConv=6, QLinearAdd=2, QLinearGlobalAveragePool=1, QGemm=1)
    held = [m for m in model.modules() if hasattr(m, 'out_top')]
    tops = [m.out_top for m in held] + [model.conv1.input_top]
    assert found['Clip'] == sum(t is not None for t in tops) == (10 if of == '15 codes for all' else 6)

@pytest.mark.parametrize('make, want', slow_after(OTHERS[::-1], 0), ids=['enlarges', 'shuffles', 'branches', 'mobile'])
@pytest.mark.parametrize('of', slow_after([*FEW][:2]))
def test_few_codes_in_other_networks(make, want, of, tmp_path):
    model = seen(make())
    check_other(make, want, model, in_codes(model, FEW[of], inputs(128)), tmp_path, FLOATS)

@pytest.mark.parametrize('kind', slow_after(WEIGHING, 0))
def test_few_codes_that_weigh_channels(kind, tmp_path):
    curve,block = WEIGHING[kind]
    model = weighing(curve, block())
    said = kernels(in_codes(model, few(), inputs(128)))
    found = equal_there(model, tmp_path)
    assert said['QLinearConv'] == found['QLinearConv'] == 5 and said['QLinearMul'] == found['QLinearMul'] == 1

class Parallel(nn.ModuleList):
    "Each module has inputs of its own."
    def forward(self, xs): return [m(*x) for m,x in zip(self, xs, strict=True)]

def a_convolution(grid):
    codes = torch.randint(-8, 8, (6, 4, 3, 3), generator=generator(), dtype=torch.int8)
    bias = torch.randint(-99, 99, (6,), generator=generator(), dtype=torch.int32)
    return IntegerLayer(nn.Conv2d(4, 6, 3), codes, torch.full((6,), .125), bias, *grid)

def a_linear(grid):
    codes = torch.randint(-8, 8, (6, 4), generator=generator(), dtype=torch.int8)
    return IntegerLayer(nn.Linear(4, 6), codes, torch.full((6,), .125), torch.arange(6, dtype=torch.int32), *grid)

MANY,PICTURE = (2500, 8),(2500, 4, 2, 2)
OPERATORS = dict(add=(IntegerAdd, MANY, MANY), multiply=(IntegerMultiply, PICTURE, (2500, 4, 1, 1)),
    concatenate=(lambda a, b: IntegerConcatenate([a, b], 1), MANY, MANY),
    sigmoid=(lambda a: IntegerCurve(a, nn.Sigmoid()), MANY), silu=(lambda a: IntegerCurve(a, nn.SiLU()), PICTURE),
    hardswish=(lambda a: IntegerCurve(a, nn.Hardswish()), PICTURE), mean=(IntegerMean, (2500, 4, 8, 8)),
    windows=(lambda a: IntegerAveragePool(a, nn.AvgPool2d(2)), (2500, 4, 4, 4)),
    convolution=(a_convolution, (2500, 4, 4, 4)), linear=(a_linear, (2500, 4)))

@pytest.mark.slow
def test_operators_on_few_codes(tmp_path):
    """At least 10,000 values enter each: all codes, ties between them and what lies beyond. Scales of 2**n leave ties
    too. All of them stand in one file."""
    ops,xs,leave = [],[],[]
    for seed,(top,zero,last,leaves) in enumerate([(15, 0, 15, 4), (200, 77, 3, 1), (1, 1, 254, 250), (255, 128, 6, 0)]):
        for name,(make,*shapes) in OPERATORS.items():
            grids = [(torch.tensor(.25), torch.tensor(zero, dtype=torch.uint8), top)]
            grids += [(torch.tensor(.5), torch.tensor(3, dtype=torch.uint8), 7)]*(len(shapes)-1)
            ops.append(make(*grids))
            ops[-1].feeds(torch.tensor(.5 if seed % 2 else .0625), torch.tensor(leaves, dtype=torch.uint8), last)
            g = generator(seed)
            xs.append([torch.randint(-2*zero-4, 2*(top-zero)+5, s, generator=g)/2*scale
                for s,(scale,*_) in zip(shapes, grids)])
            leave.append((f'{name}, {seed}', leaves, last))
    model = Parallel(ops).eval()
    run = onnx_session(to_onnx(model, [xs], tmp_path/'model.onnx', any_batch=False))
    given = dict(zip((i.name for i in run.get_inputs()), chain(*xs), strict=True))
    found = run.run(None, {k: x.numpy() for k,x in given.items()})
    wanted = out(model, xs)
    many = Counter()
    for (name,leaves,last),op,got,want in zip(leave, ops, found, wanted, strict=True):
        assert np.array_equal(got, want.numpy()), f'{name}: {(got != want.numpy()).sum()} of {got.size}'
        codes = (want/op.out_scale + leaves).unique()
        assert codes.min() >= 0 and codes.max() <= last
        many[name.partition(',')[0]] += len(codes)
    assert min(many.values()) > 9 and len(many) == len(OPERATORS)

BEHIND = [((.5, 0, 15), (.5, 0, 15), 2), ((.5, 0, 15), (.5, 0, 9), 3), ((.5, 0, 15), (.25, 0, 15), 3),
    ((.5, 3, 15), (.5, 3, 15), 3)]
@pytest.mark.parametrize('leaves, enters, clips', slow_after(BEHIND, 2), ids=['same', 'top', 'scale', 'relu'])
def test_codes_are_clipped_once(leaves, enters, clips, tmp_path):
    "Where a layer hands on codes of the grid that the next one reads, through a ReLU that changes none; and not else."
    def grid(scale, zero, top): return torch.tensor(scale), torch.tensor(zero, dtype=torch.uint8), top
    first,second = a_convolution(grid(.25, 5, 31)),nn.Conv2d(6, 2, 1)
    first.feeds(*grid(*leaves))
    second = IntegerLayer(second, torch.randint(-8, 8, (2, 6, 1, 1), generator=generator(), dtype=torch.int8),
        torch.full((2,), .125), None, *grid(*enters))
    second.feeds(*grid(.125, 0, 255))
    model = nn.Sequential(first, nn.ReLU(), second).eval()
    x = torch.randint(-20, 80, (400, 4, 8, 8), generator=generator())*.125
    call,_ = in_runtime(model, x, tmp_path)
    assert np.array_equal(call(x), out(model, x).numpy())
    assert operators(tmp_path/'model.onnx')['Clip'] == clips

def test_more_codes_than_a_byte_has():
    model,x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3)).eval(),inputs(16)
    quantize_model_(model, 8, 10, calibrate=[x])
    assert {r.activations for r in deploy_(model, x).rows} == {'floats: activations of 1024 codes'}

def test_readers_with_other_largest_codes():
    "A tensor that two layers read with 16 and 200 codes of one scale has no codes of its own."
    def two(m, x):
        x = m.a(x).relu()
        return m.b(x) - m.c(x)
    for other,way in (15, 'codes to codes'), (200, 'codes to floats'):
        model = Made(two, a=nn.Conv2d(3, 4, 3), b=nn.Conv2d(4, 2, 1), c=nn.Conv2d(4, 2, 1)).eval()
        quantize_model_(model, 8, Quantizer((0, 15), init='minmax'), calibrate=[inputs(16)])
        scale = model.b.input_quantizer.grid()[0].detach()
        model.c.input_quantizer = Quantizer((0, other)).set_grid_(scale)
        assert deploy_(model, inputs(16)).rows[0].activations == way

@pytest.mark.slow
def test_a_state_of_few_codes():
    "A network that waits takes 8 bits for sums and 4 for layers from a state; integers of other grids are refused."
    model,fresh = residual(strides=(1, 2)).eval(),residual(seed=1, strides=(1, 2)).eval()
    quantize_model_(model, 4, 4, calibrate=[inputs(64)], ends=6)
    quantize_model_(fresh, 4, 4, ends=6)
    ranges = {n: m.range() for n,m in model.named_modules() if isinstance(m, Quantizer) and 'input' in n}
    assert ranges['conv1.input_quantizer'] == (-32, 31) and ranges['layers.0.conv2.input_quantizer'] == (0, 15)
    add = 'layers.1.operations.add.inputs.{}.input_quantizer'
    assert ranges[add.format(0)] == ranges[add.format(1)] == (-128, 127)
    fresh.load_state_dict(saved(model.state_dict()))
    x = inputs(50, 2)
    with torch.no_grad(): assert torch.equal(fresh(x), model(x)) and repr(fresh) == repr(model)
    deploy_(model, x)
    deploy_(fresh, x)
    fresh.load_state_dict(saved(model.state_dict()))
    assert torch.equal(out(fresh, x), out(model, x))
    eight = residual(strides=(1, 2)).eval()
    quantize_model_(eight, calibrate=[inputs(64)])
    deploy_(eight, x)
    with pytest.raises(RuntimeError, match='Unexpected key.*_top'): eight.load_state_dict(model.state_dict())

@pytest.mark.parametrize('inplace', [False, True])
def test_a_curve_that_writes(inplace):
    "What the convolution gave is read after a curve has written over it."
    def writes(m, x):
        x = m.a(x)
        m.curve(x)
        return m.b(x)
    model = Made(writes, a=nn.Conv2d(3, 4, 3), b=nn.Conv2d(4, 2, 3), curve=nn.SiLU(inplace))
    assert [r.name for r in quantized(model, 32).rows] == ['a', 'b'] and model.curve.inplace is inplace

def asks_at_once(m, x):
    "Read with a stand-in, it takes the other branch."
    parts = [x] if isinstance(x, torch.Tensor) else x
    return m.b(F.silu(m.a(torch.cat(parts, 1))))

def asks_later(m, x):
    "The same, and what is read gives other numbers and no error."
    y = F.silu(m.a(x))
    return m.b(F.silu(y) if isinstance(y, torch.Tensor) else y)

@pytest.mark.slow
@pytest.mark.parametrize('asks', [asks_at_once, asks_later])
def test_a_forward_that_asks_for_a_tensor(asks):
    "What is read wrongly stays as it is, and what others do is found."
    first = Made(asks, a=nn.Conv2d(3, 4, 3), b=nn.Conv2d(4, 3, 3))
    model = nn.Sequential(first, nn.ReLU(), Basic(3, 3), nn.Conv2d(3, 2, 1))
    report = quantized(model, 32)
    assert [r.name for r in report.rows if r.weights == '-'] == ['2.operations.add'] and 'forward' not in vars(first)
    assert {r.name: r.kernel for r in deploy_(model, inputs(16)).rows}['2.operations.add'] == 'QLinearAdd'

class DenseLayer(nn.Module):
    "Its input is a list that grows; the normalization stands before the convolution."
    def __init__(self, ins, outs):
        super().__init__()
        self.norm1,self.conv1 = nn.BatchNorm2d(ins),nn.Conv2d(ins, 8, 1, bias=False)
        self.norm2,self.conv2 = nn.BatchNorm2d(8),nn.Conv2d(8, outs, 3, padding=1, bias=False)
        self.relu1,self.relu2 = nn.ReLU(inplace=True),nn.ReLU(inplace=True)
    def together(self, parts): return self.conv1(self.relu1(self.norm1(torch.cat(parts, 1))))
    def forward(self, input):
        parts = [input] if isinstance(input, torch.Tensor) else input
        return self.conv2(self.relu2(self.norm2(self.together(parts))))

class DenseBlock(nn.ModuleDict):
    def __init__(self, count, ins, outs):
        super().__init__({f'layer{i}': DenseLayer(ins+i*outs, outs) for i in range(count)})
    def forward(self, x):
        parts = [x]
        for layer in self.values(): parts.append(layer(parts))
        return torch.cat(parts, 1)

class Dense(nn.Module):
    def __init__(self):
        super().__init__()
        between = nn.BatchNorm2d(14),nn.ReLU(inplace=True),nn.Conv2d(14, 6, 1),nn.AvgPool2d(2, 2)
        self.features = nn.Sequential(nn.Conv2d(3, 6, 3, 2), nn.BatchNorm2d(6), nn.ReLU(inplace=True),
            DenseBlock(2, 6, 4), *between, nn.BatchNorm2d(6))
        self.fc = nn.Linear(6, 5)
        torch.manual_seed(1)
        norms = [m for m in self.modules() if isinstance(m, nn.BatchNorm2d)]
        for m in norms:
            m.weight.data.normal_()
            m.bias.data.normal_()
        norms[-1].weight.data[:2] = torch.tensor([0., 1e-12])        # a channel that is all bias
    def forward(self, x):
        x = F.adaptive_avg_pool2d(F.relu(self.features(x), inplace=True), (1, 1))
        return self.fc(torch.flatten(x, 1))

def dense():
    torch.manual_seed(0)
    return seen(Dense())

@pytest.mark.slow
def test_dense(tmp_path):
    "Lists as inputs; a normalization that stands alone is a convolution of each channel."
    model = dense()
    quantized(model, 128)
    state,report = saved(model.state_dict()),deploy_(model, inputs(16))
    found = equal_there(model, tmp_path)
    same_there(found, report, QLinearConv=10, QLinearConcat=2, QLinearAveragePool=1, QLinearGlobalAveragePool=1,
        QGemm=1)
    assert not {'BatchNormalization', *FLOATS} & {*found}
    loaded_again(dense(), state, model)

@pytest.mark.slow
def test_lists_as_inputs():
    "A layer was read with a list of two; other lists are refused, and a state of other lists."
    model = dense()
    quantize_model_(model, calibrate=[inputs(32)])
    layer = model.features[3]['layer1']
    parts = [torch.randn(2, n, 8, 8, generator=generator(n)) for n in (6, 4)]
    with torch.no_grad(): assert torch.equal(layer(parts), layer(input=tuple(parts)))
    with pytest.raises(TypeError, match='DenseLayer was quantized for a list of 2 as input, got a list of 3'):
        layer([*parts, parts[0]])
    with pytest.raises(TypeError, match='a list of 2 as input, got Tensor'): layer(parts[0])
    state = model.state_dict() | {'features.3.layer1.operations._extra_state': torch.tensor([3])}
    with pytest.raises(RuntimeError, match='of a forward that was given other lists'):
        copy.deepcopy(model).load_state_dict(state)
    remove_rounding_(model, leave_rounded=False)
    x = inputs(8)
    assert {*model.state_dict()} == {*dense().state_dict()} and repr(model) == repr(dense())
    with torch.no_grad(): assert torch.equal(model(x), dense()(x))

def test_a_list_that_is_written_to():
    "What a module writes into its list is read elsewhere."
    inner = Made(lambda m, parts: parts.append(F.silu(parts[0])))
    def grows(m, x):
        parts = [m.a(x)]
        m.inner(parts)
        return m.b(torch.cat(parts, 1))
    model = nn.Sequential(Made(grows, a=nn.Conv2d(3, 3, 1), b=nn.Conv2d(6, 2, 1), inner=inner), nn.Conv2d(2, 2, 1))
    quantized(model, 32)
    assert 'forward' not in vars(inner)

@pytest.mark.slow
def test_normalizations_before_convolutions(tmp_path):
    "In a residual block, and behind a ReLU. One behind a convolution becomes part of it, as ever."
    def before(m, x): return x + m.conv2(F.relu(m.norm2(m.conv1(F.relu(m.norm1(x))))))
    block = Made(before, norm1=nn.BatchNorm2d(6), norm2=nn.BatchNorm2d(6), conv1=nn.Conv2d(6, 6, 3, padding=1),
        conv2=nn.Conv2d(6, 6, 3, padding=1))
    head = nn.AdaptiveAvgPool2d(1),nn.Flatten(),nn.Linear(6, 4)
    first = nn.Conv2d(3, 6, 3),nn.ReLU(),nn.BatchNorm2d(6)
    model = seen(nn.Sequential(*first, block, nn.BatchNorm2d(6), nn.ReLU(), *head))
    report = quantized(model)
    assert [r.name for r in report.rows if r.kind == 'BatchNorm2d'] == ['2', '3.norm1', '4']
    report,found = deploy_(model, inputs(16)),equal_there(model, tmp_path)
    same_there(found, report, QLinearConv=6, QLinearAdd=1, QLinearGlobalAveragePool=1, QGemm=1)
    assert not {'BatchNormalization', *FLOATS} & {*found}

def test_a_curve_alone_stays_a_curve():
    "If no layer can be one of integers, nothing between them is."
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding_mode='reflect', padding=1), nn.SiLU(),
        nn.Conv2d(4, 2, 3, padding_mode='circular', padding=1)).eval()
    quantize_model_(model, calibrate=[inputs(32)])
    wanted = out(model, inputs(4))
    report = deploy_(model, inputs(16))
    assert type(model[1]) is nn.SiLU and all(r.activations.startswith('floats') for r in report.rows)
    with torch.no_grad(): assert torch.equal(model(inputs(4)), wanted)

def tanh_gelu(x): return F.gelu(x, approximate='tanh')

@pytest.mark.slow
@pytest.mark.parametrize('curves', [[F.gelu, tanh_gelu], [F.silu, F.hardswish], [F.mish, F.gelu]],
    ids=lambda fs: '-'.join(f.__name__ for f in fs))
def test_zero_points_in_the_runtime(curves, tmp_path):
    """What a smooth function gives has a zero point of its own, neither 0 nor 128 in uint8. Padding is that code too.
    All convolutions are integers, and all outputs are equal."""
    first,second = curves
    model = Made(lambda m, x: m.fc(m.c(second(m.b(first(m.a(x))))).relu().mean((2, 3))), fc=nn.Linear(4, 3),
        a=nn.Conv2d(3, 8, 3, padding=1), b=nn.Conv2d(8, 6, 3, padding=1), c=nn.Conv2d(6, 4, 3)).eval()
    report = quantize_model_(model, calibrate=[inputs(64)])
    moved = {r.name: r.activations for r in report.rows if 'zero point' in r.activations}
    assert {'b', 'c'} <= {*moved}
    report = deploy_(model, inputs(8))
    assert [r.kernel for r in report.rows if r.kind == 'Conv2d'] == ['QLinearConv']*3
    found = equal_there(model, tmp_path)
    assert found['QLinearConv'] == 3 and not {'Conv', 'FusedConv'} & {*found}
    assert all(int(m.input_zero_point) not in (0, 128) for m in (model.b, model.c))

@pytest.mark.slow
def test_layers_of_floats_take_codes(tmp_path):
    """The runtime has no integer kernel for a transposed convolution, and the report says so. What comes before it
    gives codes all the same: those of the quantizer that stays. A layer that is called twice is two integer kernels."""
    def decoder(m, x): return m.last(m.twice(m.twice(m.up(m.a(x).relu()).relu()).relu()).relu()).mean((2, 3))
    model = Made(decoder, a=nn.Conv2d(3, 6, 3), up=nn.ConvTranspose2d(6, 8, 2, 2), twice=nn.Conv2d(8, 8, 3, padding=1),
        last=nn.Conv2d(8, 2, 1)).eval()
    quantize_model_(model, calibrate=[inputs(64)])
    report = deploy_(model, inputs(8))
    rows = {r.name: (r.activations, r.kernel) for r in report.rows}
    assert rows['up'] == ('floats: no integer kernel', 'floats')
    assert rows['a'] == rows['twice'] == ('codes to codes', 'QLinearConv')
    call,found = in_runtime(model, inputs(8), tmp_path)
    assert found['QLinearConv'] == 4 and found['ConvTranspose'] == 1 and not found['Conv'] + found['FusedConv']
    codes = []
    with torch.no_grad():
        model.up.register_forward_pre_hook(lambda m, args: codes.append(args[0]))
        model(inputs(100, 1))
        assert torch.equal(codes[0], model.a(inputs(100, 1)).relu())       # it gives what it gets

class Added(nn.Module):
    "A product of matrices and a bias in one call of torch, the bias twice."
    def forward(self, x): return torch.addmm(torch.arange(5.)/7, x, torch.arange(30.).view(6, 5).sin(), beta=2)

class Affine(nn.Module):
    def forward(self, x): return x*torch.arange(1., 6).view(5, 1, 1)+.5

def with_norm(conv): return nn.Sequential(conv, nn.BatchNorm2d(5), nn.ReLU())

FLOAT_LAYERS = {
    'Linear': (nn.Linear(6, 5), (6,)), 'Linear, no bias': (nn.Linear(6, 5, bias=False), (6,)),
    'tokens': (nn.Linear(6, 5), (4, 6)), 'addmm': (Added(), (6,)),
    'Conv1d': (nn.Conv1d(6, 5, 3), (6, 9)), 'Conv2d, no bias': (nn.Conv2d(3, 5, 3, bias=False), (3, 9, 9)),
    'norm': (with_norm(nn.Conv2d(3, 5, 3)), (3, 9, 9)), 'flat': (nn.Sequential(nn.Conv2d(3, 5, 3), nn.Flatten()),
    (3, 9, 9)), 'unflat': (nn.Sequential(nn.Unflatten(1, (3, 4)), nn.Conv2d(3, 5, 3), nn.ReLU6()), (12, 8)),
    'pool': (nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(3, 5, 3), nn.MaxPool2d(2)), (3, 12, 12)),
    'ConvTranspose2d': (nn.ConvTranspose2d(3, 5, 3), (3, 5, 5)),
    'affine': (nn.Sequential(nn.Conv2d(3, 5, 3), Affine()), (3, 9, 9))}

@pytest.mark.slow
def test_layers_of_floats_between_codes(tmp_path):
    """The runtime rounds the weights and the bias of such a layer to 8 and 32 bits with ranges of its own; then 4 to
    15 % of the outputs of ten of these layers were one code away. Sums in another order change a code in some millions.
    One input, as an order of sums may be that of a machine: a fixed seed, and not one code may differ in 1,000 but for
    one."""
    given,between = [[torch.randn(256, *shape)] for _,shape in FLOAT_LAYERS.values()],[]
    for (x,),(layer,_) in zip(given, FLOAT_LAYERS.values()):
        between.append(nn.Sequential(Quantizer(8), layer, Quantizer(8)).eval())
        between[-1][0].calibrate_(x)
        with torch.no_grad(): between[-1][2].calibrate_(between[-1][:2](x))
    model = Parallel(between)
    run = onnx_session(to_onnx(model, [[[x[:2]] for x, in given]], tmp_path/'between.onnx'))
    outputs = run.run(None, {i.name: x.numpy() for i,(x,) in zip(run.get_inputs(), given, strict=True)})
    wanted = out(model, given)
    for name,layers,found,want in zip(FLOAT_LAYERS, between, outputs, wanted, strict=True):
        away = (torch.from_numpy(found)-want).abs() > layers[2].grid()[0]/2
        assert away.sum() <= 1 + want.numel()/1000, (name, int(away.sum()), want.numel())

def test_nothing_between_layers_if_it_fails():
    "A curve that writes in place still does when the model is given back."
    curve,block = WEIGHING['efficient']
    model = weighing(curve, block())
    with pytest.raises(ValueError, match='nan'):
        quantize_model_(model, calibrate=[inputs(8), inputs(8)*torch.nan])
    assert all(m.inplace for m in model.modules() if isinstance(m, nn.SiLU)) and 'forward' not in vars(model[6])

ONE_SIDE = 'more padding on one side'
BY_NAME = [(3, (2, 1), 'same', ''), (3, 1, 'same', ''), ((1, 5), 2, 'same', ''), (2, 1, 'valid', ''),
    (4, 1, 'same', ONE_SIDE), ((3, 2), 1, 'same', ONE_SIDE)]
@pytest.mark.parametrize('size, dilation, padding, why', slow_after(BY_NAME))
@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.slow
def test_padding_by_name(size, dilation, padding, why, tmp_path):
    "What stands for it is the same on both sides, or the layer stays in floats and says so."
    layer = nn.Conv2d(3, 4, size, padding=padding, dilation=dilation)
    head = nn.AdaptiveAvgPool2d(1),nn.Flatten(),nn.Linear(4, 2)
    model = nn.Sequential(layer, nn.ReLU(), *head).eval()
    quantize_model_(model, calibrate=[inputs(64)])
    x = inputs(100, 1)
    wanted = out(model, x)
    report = deploy_(model, inputs(16))
    if why:
        assert report.rows[0].activations == f'floats: {why}'
        return
    call,found = in_runtime(model, inputs(16), tmp_path)
    assert report.rows[0].kernel == 'QLinearConv' and found['QLinearConv'] == 1 and not found['Pad']
    with torch.no_grad():
        assert (model(x)-wanted).norm() < .01*wanted.norm() and np.array_equal(call(x), model(x).numpy())

POOLS = dict(mean=lambda x: x.mean((2, 3)), keeps=lambda x: torch.mean(x, [-1, -2], keepdim=True),
    by_name=lambda x: x.mean(dim=[2, 3]), in_place=lambda x: x.mean((3, 2), True),
    adaptive=lambda x: F.adaptive_avg_pool2d(x, 1), named=lambda x: F.adaptive_avg_pool2d(x, output_size=(1, 1)),
    listed=lambda x: F.adaptive_avg_pool2d(x, [1, 1]))
CLIPS = dict(hardtanh=F.hardtanh, narrow=lambda x: x.clamp(-.3, .4), six=lambda x: torch.clamp(x, 0, 6), relu6=F.relu6,
    low=lambda x: x.clamp(min=-.1), high=lambda x: x.clamp_max(.2), module=nn.Hardtanh(-.2, .2))

FUNCTIONS = zip(POOLS, CLIPS, (*[*CLIPS][3:], *CLIPS))                # each first, and each second

@pytest.mark.parametrize('pool, first, second', slow_after(FUNCTIONS))
@pytest.mark.slow
def test_functions(pool, first, second, tmp_path):
    "Clipping and pooling by functions."
    model = Made(lambda m, x: m.fc(m.pool(m.second(m.b(m.first(m.a(x))))).flatten(1)), a=nn.Conv2d(3, 8, 3),
        b=nn.Conv2d(8, 6, 3, stride=2), fc=nn.Linear(6, 4), pool=POOLS[pool], first=CLIPS[first], second=CLIPS[second])
    quantized(model)
    report,found = deploy_(model, inputs(8)),equal_there(model, tmp_path)
    same_there(found, report, QLinearConv=2, QLinearGlobalAveragePool=1, QGemm=1)
    assert not FLOATS-{'DequantizeLinear'} & {*found}

@pytest.mark.parametrize('mean', [lambda x: x.mean((1, 2)), lambda x: x.mean(-1).mean(-1),
    lambda x: x[0].mean((-2, -1)), lambda x: x[:, :, None].mean((2, 3)), lambda x: torch.mean(input=x, dim=(2, 3))])
def test_other_means(mean):
    "A mean over something else, or of other than a batch of pictures, stays as it is."
    model = Made(lambda m, x: m.b(mean(m.a(x).relu())), a=nn.Conv2d(3, 8, 3), b=nn.LazyLinear(4)).eval()
    model(inputs(8))
    report = quantize_model_(model, calibrate=[inputs(8)])
    assert [r.name for r in report.rows] == ['a', 'b'] and 'forward' not in vars(model)

class Fire(nn.Module):
    "A block of a SqueezeNet."
    def __init__(self, ins, few, outs):
        super().__init__()
        self.squeeze,self.one = nn.Conv2d(ins, few, 1),nn.Conv2d(few, outs, 1)
        self.three = nn.Conv2d(few, outs, 3, padding=1)
        self.relu = nn.ReLU(inplace=True)
    def forward(self, x):
        x = self.relu(self.squeeze(x))
        return torch.cat([self.relu(self.one(x)), self.relu(self.three(x))], 1)

@pytest.mark.slow
def test_what_is_joined_is_rounded_once():
    """The parts have the grid of what reads the whole; not one that something else reads, nor one without values below
    0 where the whole has some: a ReLU before it would be an operator."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), Fire(8, 4, 8), nn.MaxPool2d(2), nn.Conv2d(16, 4, 1))
    quantized(model)
    assert all(p.input_quantizer is model[4].input_quantizer for p in model[2].operations['cat'].inputs)
    model = Branches()
    quantized(model)
    whole,parts = model.d.input_quantizer,[p.input_quantizer for p in model.operations['cat'].inputs]
    assert parts[0] is model.b.input_quantizer and whole not in parts[:2] and parts[2] is whole

@pytest.mark.slow
def test_squeezed(tmp_path):
    "The last convolution is pooled and leaves: it gives codes to the pooling, which computes with floats."
    pool = nn.MaxPool2d(3, 2, ceil_mode=True)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), pool, Fire(8, 4, 8), pool, Fire(16, 6, 12), nn.Dropout(),
        nn.Conv2d(24, 10, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    quantized(model)
    report = deploy_(model, inputs(8))
    want = dict(QLinearConv=8, QLinearConcat=2)
    assert kernels(report) == want | dict(floats=1)
    assert report.rows[-1].activations == 'floats: what comes next takes no codes'
    call,found = in_runtime(model, inputs(8), tmp_path)
    assert not {'Conv', 'FusedConv'} & {*found} and want == {k: found[k] for k in want}
    x = inputs(2000, 1)*1.3
    y = out(model, x)
    assert np.abs(call(x)-y.numpy()).max() < 1e-6*y.abs().max()      # the same codes, summed in another order

@pytest.mark.parametrize('size', slow_after([((3, 6),), [4, 4], 4, 3, 9, 2], 2), ids=str)
@pytest.mark.slow
def test_a_pooling_to_a_size(size, tmp_path):
    """As AlexNet and VGG pool: it changes nothing or repeats values, so codes pass. Windows of two lengths take codes
    and give floats; sums in another order may change a code of the Linear, seen in none of 10,000 outputs."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3, 4), nn.ReLU(), nn.MaxPool2d(2, 1, ceil_mode=True),
        nn.AdaptiveAvgPool2d(size), nn.Flatten(), nn.LazyLinear(5)).eval()
    model(inputs(2))
    report,passes = quantized(model, most=.03),size not in ([4, 4], 4, 2)
    assert [r.name for r in report.rows] == ['0', '5', '3'][:2 if passes else 3]
    rows = {r.name: r for r in deploy_(model, inputs(8)).rows}
    assert rows['0'].kernel == 'QLinearConv' and rows['0'].activations == 'codes to codes'
    assert passes or rows['3'].activations == 'floats: its windows differ in length'
    call,found = in_runtime(model, inputs(8), tmp_path)
    assert found['QLinearConv'] == 1 and not {'Conv', 'FusedConv'} & {*found}
    x = inputs(2000, 1)*1.3
    y = out(model, x).numpy()
    assert np.array_equal(call(x), y) if passes else (call(x) != y).mean() < 1e-3

def normalized(m, x):
    "As ConvNeXt: convolutions into normalizations of each place, and one that an addition reads too."
    x = m.norm1(m.stem(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
    y = m.norm2(m.depth(x).permute(0, 2, 3, 1))
    x = x.permute(0, 2, 3, 1)+m.mlp(y)
    x = m.down(m.norm3(x).permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
    return m.head((m.norm4(x)+x).mean((1, 2)))

@pytest.mark.slow
def test_a_convolution_before_a_normalization_gives_codes(tmp_path):
    """Where the normalization alone reads it. That computes with floats, whose last bits differ between torch and the
    runtime, so a code beside a tie may be the next one: in one of 2,000 outputs here."""
    norms = {f'norm{i}': nn.LayerNorm(n) for i,n in enumerate((8, 8, 8, 12), 1)}
    model = Made(normalized, **norms, stem=nn.Conv2d(3, 8, 2, 2), depth=nn.Conv2d(8, 8, 3, padding=1, groups=8),
        mlp=nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)), down=nn.Conv2d(8, 12, 2, 2),
        head=nn.Linear(12, 5)).eval()
    floats = copy.deepcopy(model)
    report = quantize_model_(model, calibrate=[inputs(64)])
    assert [r.name for r in report.rows if r.kind == 'LayerNorm'] == ['norm1', 'norm2']
    before = copy.deepcopy(model)
    rows = {r.name: r for r in deploy_(model, inputs(8)).rows}
    assert rows['norm1'].activations == 'floats: no runtime normalizes codes'
    assert [rows[n].activations for n in ('stem', 'depth', 'down')] == ['codes to codes']*2+['codes to floats']
    call,found = in_runtime(model, inputs(8), tmp_path)
    assert found['QLinearConv'] == 2 and found['Conv'] + found['FusedConv'] == 1
    x = inputs(2000, 1)
    y,was,exact = (out(m, x).numpy() for m in (model, before, floats))
    def off(a, b): return np.linalg.norm(a-b)/np.linalg.norm(b)
    assert (np.abs(call(x)-y) > 1e-5*np.abs(y).max()).mean() < .01 and off(call(x), y) < .003
    assert 2*off(y, was) < off(y, exact) < .03

def test_your_own_quantizer_is_calibrated():
    model = nn.Sequential(nn.Linear(4, 4), Quantizer(8, signed=None), nn.ReLU(), nn.Linear(4, 2))
    x = torch.randn(64, 4, generator=generator(0))
    with torch.no_grad(): first = model[0](x)
    quantize_model_(model, calibrate=[x])
    assert model[1].ready and 'forward' not in vars(model[1])
    want = Quantizer(8, signed=None).calibrate_(first)
    assert torch.equal(model[1].grid()[0], want.grid()[0]) and model[1].range() == want.range()
    with pytest.raises(ValueError, match='must be finite'):
        odd = nn.Sequential(nn.Linear(4, 4), Quantizer(8), nn.Linear(4, 2))
        quantize_model_(odd, calibrate=[x*float('inf')])
    assert not odd[1].ready and 'forward' not in vars(odd[1])

WINDOWS = [dict(kernel_size=2), dict(kernel_size=3, stride=1, padding=1, count_include_pad=False),
    dict(kernel_size=3, stride=2, padding=1), dict(kernel_size=(2, 3), stride=(3, 2), ceil_mode=True),
    dict(kernel_size=4, stride=3, padding=2, ceil_mode=True, count_include_pad=False),
    dict(kernel_size=(5, 1), padding=(2, 0)), dict(kernel_size=[2, 3], stride=[3, 2], padding=[1, 0])]
@pytest.mark.parametrize('options', WINDOWS, ids=str)
def test_windows_of_codes(options):
    "On 24 random grids, a third of them with many ties, in both layouts of the runtime."
    rng,pool = np.random.default_rng(0),nn.AvgPool2d(**options)
    def pair(v): return [v, v] if isinstance(v, int) else [*v]
    zeros = pool.count_include_pad and pool.padding != 0
    attributes = dict(kernel_shape=pair(pool.kernel_size), strides=pair(pool.stride), pads=pair(pool.padding)*2,
        ceil_mode=int(pool.ceil_mode), count_include_pad=int(zeros))
    ties = 0
    for i in range(24):
        a,c = random_grid(rng),random_grid(rng)
        if i % 3 == 0: a = (torch.tensor(2.**-5), a[1])
        c = (a[0]*torch.tensor(2**rng.uniform(-1, 1) if i % 3 else 2., dtype=torch.float32), c[1])
        x,last = torch.tensor(rng.integers(0, 256, (2, 16, 13, 14), dtype=np.uint8)),i % 2
        same_codes('QLinearAveragePool', IntegerAveragePool(a, pool), x, a, c, last, channels_last=last, **attributes)
        exact = pool((x.double()-int(a[1]))*a[0].double())/c[0].double()
        ties += ((exact-exact.floor()) == .5).sum().item()
    assert ties > 100

def averages(m, x):
    "Average pooling as a layer, as a function and over all that is left, behind and before convolutions."
    x = m.pool(m.a(x).relu())
    x = torch.cat([F.avg_pool2d(x, kernel_size=3, stride=1, padding=1), m.b(x)], 1)
    return m.fc(m.last(m.c(x)).flatten(1))

@pytest.mark.slow
def test_windows(tmp_path):
    "As torchvision's Inception and DenseNet pool."
    model = Made(averages, a=nn.Conv2d(3, 8, 3, 2), b=nn.Conv2d(8, 8, 3, padding=1), c=nn.Conv2d(16, 6, 1),
        pool=nn.AvgPool2d(2, ceil_mode=True), last=nn.AvgPool2d(4), fc=nn.Linear(6, 4))
    fresh = copy.deepcopy(model).eval()
    quantized(model)
    state,report = saved(model.state_dict()),deploy_(model, inputs(8))
    found = equal_there(model, tmp_path)
    same_there(found, report, QLinearConv=3, QLinearAveragePool=3, QLinearConcat=1, QGemm=1)
    assert not FLOATS & {*found} and not found['AveragePool']
    loaded_again(fresh, state, model)

@pytest.mark.parametrize('pool', [dict(kernel_size=2, divisor_override=3),
    dict(kernel_size=3, padding=1, ceil_mode=True)], ids=str)
def test_windows_that_stay(pool):
    "What the runtime has no such operator for, or divides by another number."
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AvgPool2d(**pool), nn.Conv2d(4, 2, 1)).eval()
    report = quantize_model_(model, calibrate=[inputs(8)])
    assert [r.kind for r in report.rows] == ['Conv2d', 'Conv2d']
