"""What a GPU would be asked to do, on a machine without one: fake CUDA tensors know dtype, shape and device, and no
values. So nothing can mix devices, read a value back or come out on the CPU unnoticed. Wants a torch built for
CUDA: `make test-all TORCH=2.15.0`; tried from 2.11 on. Autograd's engine asks for a driver before it runs;
`derivatives` calls its nodes itself."""
from functools import partial
from importlib import import_module
import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from estimators import variants
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.function import BackwardCFunction
import shok_nb as R
from shok_nb.catalog import catalog
from shok_nb.engine.pieces import fused_kernel
from shok_nb.engine.random import fold_in, noise_like, uniform_like
from shok_nb.studies.jpeg import jpeg, psnr

NEW = tuple(map(int, torch.__version__.split('.')[:2])) >= (2, 11)
BUILT_FOR_CUDA = torch.backends.cuda.is_built() and torch.version.hip is None
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not BUILT_FOR_CUDA, reason='wants a torch built for CUDA; no driver is needed'),
    pytest.mark.skipif(not NEW,
        reason='torch before 2.11 wants a driver to transform CUDA tensors, and to make a graph of them'),
]

class NoReading(FakeTensorMode):
    "Fake tensors; a copy from the GPU to the CPU is an error, as `item` and the truth of a tensor are already."
    def dispatch(self, func, types, args=(), kwargs=None):
        out = super().dispatch(func, types, args, kwargs)
        given = [a for a in args if isinstance(a, FakeTensor)]
        if isinstance(out, FakeTensor) and out.is_cpu and any(a.is_cuda for a in given):
            raise AssertionError(f'{func} reads back')
        return out

@pytest.fixture(autouse=True)
def fake():
    with NoReading(): yield

def fitted(d, node, i):
    """A gradient as the engine hands it to a node: summed to its shape, in its dtype,
    and moved to its device if it is 0-d."""
    to = node._input_metadata[i]
    d = d.sum_to_size(to.shape).to(to.dtype)
    if d.device == to.device: return d
    assert d.ndim == 0, f'the engine would refuse a gradient on {d.device} for {to.device}'
    return tensor(device=to.device, dtype=to.dtype)

def derivatives(y, leaves, g=None, **_):
    """`torch.autograd.grad` without its engine, which wants a driver: every node of
    the graph is called once, from `y` down."""
    order,seen = [],set()
    def visit(node):
        if node is None or node in seen: return
        seen.add(node)
        for n,_ in node.next_functions: visit(n)
        order.append(node)
    visit(y.grad_fn)
    found = {y.grad_fn: {0: torch.ones_like(y) if g is None else g}}
    for node in reversed(order):
        if hasattr(node, 'variable') or node not in found: continue
        given = [found[node].get(i) for i in range(len(node._input_metadata))]
        if isinstance(node, BackwardCFunction):                     # answers for numbers too, which have no edge
            out = node.apply(*given)
            out = [d for d,need in zip(out if isinstance(out, tuple) else (out,), node.needs_input_grad) if need]
            edges = [e for e in node.next_functions if e[0] is not None]
        else:
            out,edges = node(*given),node.next_functions
            out = out if isinstance(out, tuple) else (out,)
        assert len(out) == len(edges)
        for (n,i),d in zip(edges, out):
            if n is None or d is None: continue
            at,d = found.setdefault(n, {}),fitted(d, n, i)
            at[i] = at[i]+d if i in at else d
    sums = {id(n.variable): d[0] for n,d in found.items() if hasattr(n, 'variable')}
    return [sums.get(id(t)) for t in leaves]

def tensor(*shape, device='cuda', dtype=torch.float32, **kw):
    return torch.empty(shape, device=device, dtype=dtype, **kw)

def check(t, like, shape=None):
    assert type(t) is FakeTensor and (t.device, t.dtype) == (like.device, like.dtype) and t.is_cuda
    assert t.shape == (like.shape if shape is None else shape)

KINDS = {'on the CPU': partial(tensor, device='cpu'), 'on the GPU': tensor, 'per channel': partial(tensor, 3, 1)}

def calls(r, f, ends=False):
    "Keywords for every kind of knob and of grid; with the ends of the knobs, where a formula may be another."
    hard = getattr(f, 'keywords', {})
    out = [dict(hard)]
    for k in r.knobs:
        out += [{**hard, k.name: v} for v in (k.lo, k.hi, k.soft, k.hard) if v is not None][:None if ends else 1]
        if not isinstance(k.default, int): out += [{**hard, k.name: make()} for make in KINDS.values()]
    if r.grid:
        a,b,c = KINDS.values()
        pairs = (.5, b()),(a(), c()),(b(), .1),(c(), a())
        out += [{**hard, 'step': step, 'offset': offset} for step,offset in pairs]
    for c in r.choices: out += [{**hard, c.name: o} for o in c.options]
    return out

def everything(keep=lambda r: True):
    "All rows, the random ones with each kind of noise."
    noise = {'': {}, '-seed': dict(device='cuda'), '-seed on the CPU': dict(device='cpu')}
    chance = [pytest.param(r, r.f, at, id=r.name+n) for r in catalog if r.random and keep(r) for n,at in noise.items()]
    return [pytest.param(*p.values, {}, id=p.id) for p in variants(keep)] + chance

def ways(r, f, at, **which):
    "The function with each of them, and the keywords."
    for kw in calls(r, f, **which):
        if at: kw = {**kw, 'seed': tensor(dtype=torch.int64, **at)}
        yield partial(r.f, **{**getattr(f, 'keywords', {}), **kw}),kw

each = pytest.mark.parametrize('r, f, at', everything())
linear = pytest.mark.parametrize('r, f, at', everything(lambda r: r.linear))

@each
def test_forward(r, f, at):
    for g,_ in ways(r, f, at, ends=True):
        x = tensor(2, 3, 4, dtype=torch.bfloat16)
        check(g(x), x)

@each
def test_vmap(r, f, at):
    for g,_ in ways(r, f, at):
        x = tensor(2, 3, 4)
        check(torch.vmap(g, randomness='different')(x), x)

@linear
def test_forward_mode(r, f, at):
    "A tangent of the input, in both spellings, and of each knob that has one."
    learns = {k.name for k in r.knobs if k.learns} | {'step', 'offset'}
    for g,kw in ways(r, f, at):
        x = tensor(3, 4)
        for t in torch.func.jvp(g, (x,), (tensor(3, 4),)): check(t, x)
        with forward_ad.dual_level():
            for t in forward_ad.unpack_dual(g(forward_ad.make_dual(x, tensor(3, 4)))): check(t, x)
        tensors = {k: v for k,v in kw.items() if k in learns and torch.is_tensor(v)}
        if not tensors or r.random and at: continue
        def of(*knobs): return g(x, **dict(zip(tensors, knobs)))
        for t in torch.func.jvp(of, (*tensors.values(),), tuple(torch.empty_like(v) for v in tensors.values())):
            check(t, x)

@each
def test_backward(r, f, at, monkeypatch):
    "Gradients of the input and of whatever learns, each where its tensor lies."
    monkeypatch.setattr(torch.autograd, 'grad', derivatives)
    learns = {k.name for k in r.knobs if k.learns} | {'step', 'offset'}
    for g,kw in ways(r, f, at):
        x = tensor(2, 3, 4, dtype=torch.bfloat16, requires_grad=True)
        leaves = [x, *(v.requires_grad_() for k,v in kw.items() if k in learns and torch.is_tensor(v))]
        y = g(x)
        with torch.no_grad(): grads = derivatives(y, leaves, torch.empty_like(y))
        for t,d in zip(leaves, grads):
            assert d is not None and (d.shape, d.dtype, d.device) == (t.shape, t.dtype, t.device)

# --- beside the catalog
def channels(): return tensor(3, 1, requires_grad=True)
CODES = [8, 5, 5, 4]
BUILT = {
    'fake_quantize': lambda x: R.fake_quantize(x, .1),
    'fake_quantize on the CPU': lambda x: R.fake_quantize(x, tensor(device='cpu'), tensor(device='cpu')),
    'fake_quantize learned': lambda x: R.fake_quantize(x, channels(), channels(), 4, gradient='clipped'),
    'fake_quantize ste': lambda x: R.fake_quantize(x, channels(), 3, 4, gradient='ste'),
    'fake_quantize soft': lambda x: R.fake_quantize(x, channels(), bits=4, rounding=R.soft_round),
    'fake_quantize codes': lambda x: R.fake_quantize(x, .1, tensor(3, 1, dtype=torch.int64)),
    'lsq': lambda x: R.lsq(x, channels(), 4, offset=channels()),
    'lsq_init': lambda x: R.lsq(x, R.lsq_init(x), 4),
    'pact': lambda x: R.pact(x, channels(), 4),
    'dorefa': lambda x: R.dorefa(x, 4),
    'dorefa_weight': lambda x: R.dorefa_weight(x, 4),
    'dorefa_weight of a bit': lambda x: R.dorefa_weight(x, 1),
    'ternary_weight': lambda x: R.ternary_weight(x),
    'ternary_weight absmean': lambda x: R.ternary_weight(x, 'absmean', axis=0),
    'xnor_weight': lambda x: R.xnor_weight(x),
    'xnor_weight chain': lambda x: R.xnor_weight(x, backward='chain', axis=0),
    'seq': lambda x: R.seq(x, channels()),
    'levels_softmax': lambda x: R.levels_softmax(x, R.NF4, channels()),
    'levels_softmax noise': lambda x: R.levels_softmax(x, R.NF4, noise=True, seed=tensor(dtype=torch.int64)),
    'quantize_between': lambda x: R.quantize_between(x, -1., channels()),
    'quantize_between learned': lambda x: R.quantize_between(x, channels(), channels()),
    'quantized_bits': lambda x: R.quantized_bits(x, 4, 1),
    'quantized_bits of a bit': lambda x: R.quantized_bits(x, 1, gradient='saturated'),
    'alpha_blend': lambda x: R.alpha_blend(x, R.round_ste(x), tensor(device='cpu')),
    'adaround': lambda x: R.adaround(x, R.adaround_init(x), step=tensor(3, 1)),
    'adaround hard': lambda x: R.adaround(x, R.adaround_init(x), hard=True),
    'flexround': lambda x: R.flexround(x, channels(), step=.1),
    'signround': lambda x: R.signround(x, channels(), step=.1),
    'signround_range': lambda x: R.fake_quantize(x, *R.signround_range(x, axis=0), (0, 15)),
    'fsq': lambda x: R.fsq(x, [8, 5, 5, 2], gain=tensor(device='cpu')),
    'fsq noise': lambda x: R.fsq(x, [8, 5, 5, 2], noise=.5, seed=tensor(device='cpu', dtype=torch.int64)),
    'fsq codes': lambda x: x + R.fsq_codes(R.fsq_index(R.fsq(x, CODES), CODES), CODES, dtype=x.dtype),
    'vq': lambda x: R.vq(x, tensor(5, 4)),
    'vq rotation': lambda x: R.vq(x, tensor(5, 4), method='rotation'),
    'vq diveq': lambda x: R.vq(x, tensor(5, 4), method='diveq', noise=.1, seed=tensor(dtype=torch.int64)),
    'vq_loss': lambda x: x + R.vq_loss(x, tensor(5, 4)).to(x.dtype),
    'lfq': lambda x: R.lfq(x),
    'lfq spherical': lambda x: R.lfq(x, spherical=True),
    'lfq_entropy': lambda x: x + sum(R.lfq_entropy(x)).to(x.dtype),
    'fsq stages': lambda x: R.fsq(x, [3, 3, 3, 2], stages=2, squash='clamp'),
    'straight_through': lambda x: R.straight_through(torch.round(x).detach(), x),
    'scale_grad': lambda x: R.scale_grad(x, .5),
    'scale_grad by a tensor': lambda x: R.scale_grad(x, tensor(3, 1)),
    'normalize_grad': lambda x: R.normalize_grad(x),
    'normalize_grad by row': lambda x: R.normalize_grad(x, dim=1, eps=1e-6),
    'quantize_grad': lambda x: R.quantize_grad(x, 4, seed=tensor(dtype=torch.int64)),
    'local_expectation': lambda x: R.local_expectation(torch.square, x),
    'module': lambda x: R.nn.SoftRound(5.).to('cuda')(x)}

def test_all_that_is_built_is_here():
    "What the quantizers and the gradient pages export runs below."
    pages = [import_module(f'shok_nb.{m}')
        for m in ('quantization.fake_quantize', 'quantization.learned', 'quantization.fsq', 'quantization.tokenizers',
            'estimators.gradient')]
    inside = {'rectified_sigmoid', 'adaround_init', 'adaround_penalty', 'adaround_beta', 'fsq_index', 'fsq_codes',
        'vq_index', 'code_usage', 'CodeUsage', 'FSQ', 'LFQ', 'VQ'}
    assert {n for p in pages for n in p.__all__} - {w for k in BUILT for w in k.split()} <= inside

@pytest.mark.parametrize('dtype', (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize('name', BUILT)
def test_built(name, dtype, monkeypatch):
    "Forward, mapped and backward."
    monkeypatch.setattr(torch.autograd, 'grad', derivatives)
    x = tensor(3, 4, dtype=dtype, requires_grad=True)
    y = BUILT[name](x)
    assert y.is_cuda and y.shape == x.shape and y.dtype in (x.dtype, torch.float32)
    with torch.no_grad(): d, = derivatives(y, [x], torch.empty_like(y))
    check(d, x)
    if 'signround_range' not in name:
        z = torch.vmap(BUILT[name], randomness='different')(tensor(2, 3, 4, dtype=dtype))
        assert z.is_cuda and z.shape == (2, 3, 4)

@pytest.mark.parametrize('device', ('cuda', 'cpu'))
def test_noise(device):
    "Numbers by position lie where the tensor lies, wherever the seed does."
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        x,seed = tensor(3, 5, dtype=dtype),tensor(device=device, dtype=torch.int64)
        for kind in ('uniform', 'triangular', 'gaussian', 'kumaraswamy'):
            u = noise_like(x, kind, seed=seed, shape=tensor())
            assert u.is_cuda and u.shape == x.shape
            assert u.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert uniform_like(x, seed=fold_in(seed, 3), draw=1).is_cuda
        assert fold_in(seed, 3).device.type == device

def test_jpeg():
    "A picture through a soft JPEG, with tables that learn."
    images,tables = tensor(2, 3, 17, 23, requires_grad=True),tensor(2, 2, 8, 8, requires_grad=True)
    for kw in (dict(), dict(subsampling='4:4:4'), dict(quality=tables), dict(integers=R.round_ste)):
        y = jpeg(images, rounding=R.soft_round, **kw)
        check(y, images)
        with torch.no_grad(): check(derivatives(y, [images], torch.empty_like(y))[0], images)
    assert psnr(images, y).is_cuda

def test_the_fakes_notice():
    "What this file is for: a knob on another device, a value read back, a result on the CPU."
    x = tensor(3)
    with pytest.raises(Exception): x + tensor(3, device='cpu')
    with pytest.raises(Exception): x.sum().item()
    with pytest.raises(Exception): bool((x > 0).all())
    with pytest.raises(AssertionError, match='reads back'): x.cpu()
    with pytest.raises(ValueError, match=r'step is on cpu and x on cuda:0; use step.to\(x.device\)'):
        R.round_ste(x, step=tensor(3, device='cpu'))
    with pytest.raises(ValueError, match='seed is on cuda:0 and x on cpu'):
        R.stochastic_round(tensor(3, device='cpu'), seed=tensor(dtype=torch.int64))

# --- the kernels that would run
@pytest.fixture
def kernels(monkeypatch):
    "Source of the graphs that Inductor writes for a GPU."
    from triton_on_cpu import backend
    written = []
    def write(source, gm):
        written.append(source)
        return gm
    monkeypatch.setattr('shok_nb.engine.core.can_fuse', lambda x: x.is_cuda)
    monkeypatch.setattr('shok_nb.engine.pieces.is_ordinary', lambda *ts: True)
    compiler = partial(fused_kernel, backend=backend(write, monkeypatch))
    monkeypatch.setattr('shok_nb.engine.core.fused_kernel', compiler)
    yield written
    torch._dynamo.reset()

ONE = {'round_ste': R.round_ste, 'trust_round': R.trust_round, 'cubic_round': R.cubic_round,
    'soft_round': R.soft_round, 'soft_round-hard': partial(R.soft_round, hard=True),
    'soft_round_inverse': R.soft_round_inverse, 'fourier_round': R.fourier_round}

@pytest.mark.filterwarnings('error:.*runs unfused')
@pytest.mark.parametrize('grid', (False, True), ids=('', 'grid'))
@pytest.mark.parametrize('name', ONE)
def test_one_kernel_each_way(name, grid, kernels, monkeypatch):
    """Inductor writes one Triton kernel for forward and one for backward: half precision, a
    number for a step, a tensor for an offset."""
    monkeypatch.setattr(torch.autograd, 'grad', derivatives)
    x = tensor(1000, dtype=torch.bfloat16, requires_grad=True)
    y = ONE[name](x, step=.5, offset=tensor(device='cpu')) if grid else ONE[name](x)
    check(y.detach(), x)
    forward = len(kernels)
    alone = not grid and name in ('round_ste', 'soft_round-hard')      # one operation of torch's own is left to it
    assert forward == (0 if alone else 1)
    with torch.no_grad(): d, = derivatives(y, [x], torch.empty_like(y))
    check(d, x)
    assert len(kernels)-forward == (name != 'round_ste')                       # a slope of 1 has nothing to do
    for k in kernels: assert k.count('async_compile.triton(') == 1 == k.count('.run(')
