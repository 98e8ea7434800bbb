"""Codes of one layer without training: our `gptq` beside the same arithmetic without rounding, and, with descent behind
it, beside what other packages find for the same weights, inputs and grid. Errors are those of the outputs over their
power."""
import math
import statistics
from importlib.metadata import version
import torch
from torch import nn
import shok_nb as R

ROWS,COLUMNS,INPUTS = 256,256,1024

class Layer:
    "Weights, inputs and their Gram matrix; a grid has a scale for each row, or for each block of 32."
    def __init__(self, bits, block, rows=ROWS, columns=COLUMNS, inputs=INPUTS, seed=0):
        g = torch.Generator().manual_seed(seed)
        mix = torch.randn(columns, columns, generator=g)
        self.x = torch.randn(inputs, columns, generator=g)@mix*torch.rand(columns, generator=g)
        self.w,self.gram = torch.randn(rows, columns, generator=g),self.x.mT@self.x
        self.bits,self.block = bits,block
        axis = None if block else 0
        self.scale = R.minmax_init(self.w, bits=bits, axis=axis, block=block)[0].reshape(rows, -1)

    def each(self, t): return t.repeat_interleave(self.w.shape[1]//t.shape[1], 1)

    def error(self, points):
        return ((self.x@(points-self.w).mT).square().sum()/(self.x@self.w.mT).square().sum()).item()

def ours(layer, grid):
    "GPTQ, then descent."
    first = R.gptq(layer.w, layer.gram, **grid)
    return R.coordinate_descent(layer.w, layer.gram, **grid, start=first)

# --- each package: a function of a layer that gives its points and the grid they are on; what it cannot do is None
def llmcompressor(layer, actorder=None):
    from compressed_tensors.quantization import QuantizationArgs
    from llmcompressor.modifiers.gptq.gptq_quantize import quantize_weight
    how = dict(strategy='group', group_size=layer.block) if layer.block else dict(strategy='channel')
    a = QuantizationArgs(num_bits=layer.bits, symmetric=True, actorder=actorder, **how)
    zero = torch.zeros_like(layer.scale, dtype=torch.int8)
    points,_,failed = quantize_weight(layer.w[None].clone(), 2*layer.gram[None], layer.scale[None], zero[None], None, a)
    assert not failed.any()
    return points[0],dict(scale=layer.each(layer.scale), bits=layer.bits)

def brevitas(layer, actorder=None):
    if layer.block: return None
    import brevitas.nn as qnn
    from brevitas.graph.gptq import gptq_mode
    from brevitas.inject.enum import ScalingImplType
    from brevitas.quant import Int8WeightPerChannelFloat
    m = qnn.QuantLinear(layer.w.shape[1], len(layer.w), bias=False, weight_quant=Int8WeightPerChannelFloat,
        weight_bit_width=layer.bits, weight_scaling_impl_type=ScalingImplType.PARAMETER_FROM_STATS).eval()
    m.weight.data = layer.w.clone()
    scale = m.quant_weight().scale.detach().clone()
    with torch.no_grad(), gptq_mode(nn.Sequential(m), act_order=bool(actorder)) as mode:
        mode.model(layer.x)
        mode.update()
    top = 2**(layer.bits-1)-1
    return m.quant_weight().value.detach(),dict(scale=layer.each(scale), bits=(-top, top))

def onnxruntime(layer):
    if layer.block: return None                             # it chooses other scales while it goes on
    from onnxruntime.quantization.neural_compressor.weight_only import gptq
    w,h = layer.w.mT.double().numpy().copy(),(2*layer.gram).double().numpy()
    points = gptq(w, h, num_bits=layer.bits, group_size=-1, scheme='sym')
    scale = 2*layer.w.abs().amax(1, keepdim=True)/(2**layer.bits-1)
    return torch.tensor(points).mT.float(),dict(scale=layer.each(scale), bits=layer.bits)

def auto_round(layer, steps=200):
    "Their layer, optimizer and schedule; every step sees all inputs, and the best step is kept."
    from auto_round.algorithms.quantization.sign_round.sign_sgd import SignSGD
    from auto_round.wrapper import WrapperLinear
    linear = nn.Linear(layer.w.shape[1], len(layer.w), bias=False)
    linear.weight.data = layer.w.clone()
    about = dict(bits=layer.bits, group_size=layer.block or -1, sym=True, data_type='int', scale_dtype=torch.float32,
        act_bits=16, act_group_size=-1, act_sym=True, act_data_type='int', act_dynamic=True)
    for k,v in about.items(): setattr(linear, k, v)
    m = WrapperLinear(linear, enable_minmax_tuning=False, enable_torch_compile=False, iters=steps)
    with torch.no_grad(): wanted = layer.x@layer.w.mT
    optimizer = SignSGD([m.value], lr=1/steps, weight_decay=0)
    slower = torch.optim.lr_scheduler.LinearLR(optimizer, 1., 0., steps)
    best,points,scale = math.inf,None,None
    for _ in range(steps):
        now,scale,_ = m._qdq_weight(m.value, m.min_scale, m.max_scale)
        loss = (layer.x@now.mT-wanted).square().mean()
        if loss < best: best,points = loss.item(),now.detach().clone()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        slower.step()
    scale = layer.each(scale.detach().reshape(len(layer.w), -1))
    return points,dict(scale=scale.abs(), zero_point=-1.*(scale < 0), bits=layer.bits)   # steps < 0 turn codes

PEERS = {'llm-compressor': (llmcompressor, 'llmcompressor'),
    'llm-compressor, static order': (lambda layer: llmcompressor(layer, 'static'), 'llmcompressor'),
    'Brevitas GPTQ': (brevitas, 'brevitas'),
    'Brevitas GPTQ, act_order': (lambda layer: brevitas(layer, True), 'brevitas'),
    'ONNX Runtime GPTQ': (onnxruntime, 'onnxruntime'),
    'auto-round, 200 steps': (auto_round, 'auto-round')}

def found():
    "`(functions, versions, missing)`: those that can be imported here."
    fs,versions,missing = {},{},{}
    for name,(f,package) in PEERS.items():
        try: f(Layer(4, None, 8, 32, 64))
        except Exception as e: missing[package] = f'{type(e).__name__}: {str(e).splitlines()[0][:80]}'
        else: fs[name],versions[package] = f,version(package)
    return fs,versions,missing

def beside(clock, race, settings=((4, None), (4, 32), (3, None), (3, 32)), seeds=3, **size):
    """For each package and grid: its error over ours, its time over ours, and its time over that of our GPTQ without
    descent; medians over the seeds."""
    fs,versions,missing = found()
    rows = {}
    for name,f in fs.items():
        for bits,block in settings:
            pairs = []
            for seed in range(seeds):
                layer = Layer(bits, block, seed=seed, **size)
                got = f(layer)
                if got is None: break
                points,grid = got
                thunks = {'theirs': lambda: f(layer), 'ours': lambda: ours(layer, grid),
                    'gptq': lambda: R.gptq(layer.w, layer.gram, **grid)}
                t = race(thunks, clock, 0., 3, dict.fromkeys(thunks, 1))
                times = [statistics.median(a/b for a,b in zip(t['theirs'], t[k])) for k in ('ours', 'gptq')]
                pairs.append((layer.error(points)/layer.error(ours(layer, grid)), *times))
            blocks = f'blocks of {block}' if block else 'rows'
            if pairs: rows[f'{name}, {bits} bits, {blocks}'] = [statistics.median(v) for v in zip(*pairs)]
    return rows,versions,missing

def limit(clock, race, n=4096, inputs=2048, rounds=5):
    """Time of the Gram matrix and `gptq` over that of the Gram matrix, a Cholesky factorization and a triangular solve
    in float64, and the same without the Gram matrix."""
    g = torch.Generator().manual_seed(0)
    w,x = torch.randn(n, n, generator=g),torch.randn(inputs, n, generator=g)*torch.rand(n, generator=g)
    gram,scale = x.mT@x,R.minmax_init(w, bits=4, axis=0)[0]
    def without_rounding():
        h = gram.double()
        h.diagonal().add_(.01*h.diagonal().mean())
        return torch.linalg.solve_triangular(torch.linalg.cholesky(h), w.mT.double(), upper=False)
    thunks = {'gram': lambda: x.mT@x, 'plain': without_rounding, 'gptq': lambda: R.gptq(w, gram, scale, bits=4)}
    t = race(thunks, clock, 0., rounds, dict.fromkeys(thunks, 1))
    def ratio(extra):
        each = zip(t['gram'], t['plain'], t['gptq'])
        return statistics.median([(extra*a+c)/(extra*a+b) for a,b,c in each])
    return dict(size=n, inputs=inputs, seconds=statistics.median(t['gptq']), ratio=ratio(1), alone=ratio(0))
