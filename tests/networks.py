"""Networks made at random, to compare a quantized network with the deployed one and with ONNX Runtime.

A network is data: a dict of settings with a list of blocks, each a dict with its `kind` and the options that are not
the default. `build` makes a model of it, `judge` says how far the deployed model is from the quantized one and how
far it may be, and `reduced` takes away from the data whatever the failure does not need.

How far may it be? `deploy_` may round the bias of a layer of integers to a multiple of its step times that of its
input, may turn the code -128 into 127 where a normalization is negative, and sums in another order. `shaken` does the
same to the quantized model, with random signs and at full size: what deployment does is one more draw of it, and
usually a smaller one. A value near a tie falls to the other side in some of the draws, so codes that flip are part
of the bound, as often as they are likely and as large as they are."""
import copy
import dataclasses
import random
import re
import warnings
from contextlib import ExitStack, contextmanager
from typing import NamedTuple
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize
from shok_nb import Quantizer, deploy_, onnx_session, quantize_model_, to_onnx
from shok_nb.catalog import catalog
from shok_nb.networks.operations import is_scaling

LINEAR = nn.Linear,nn.Conv1d,nn.Conv2d,nn.Conv3d
BATCH_NORMS = nn.BatchNorm1d,nn.BatchNorm2d,nn.BatchNorm3d

class Unfit(Exception):
    "Not a network: a block does not take the shape that arrives, or the grid does not divide a weight."

def seed_all(seed):
    "As `torch.manual_seed`, for the CPU alone, in a fiftieth of the time."
    torch.default_generator.manual_seed(seed)

class Holding(nn.Module):
    "A module that keeps what it is made of, by name."
    def __init__(self, **made):
        super().__init__()
        for k,v in made.items(): setattr(self, k, v)

class Made(Holding):
    "A network of named layers, and a function of them and the input."
    def __init__(self, how, **layers): super().__init__(how=how, **layers)
    def forward(self, x): return self.how(self, x)

# --- the blocks: each is made for the values `x` that arrive
class Tripled(nn.Linear):
    "A class of the user's own around the layer's forward."
    def forward(self, x): return 3*super().forward(x)

class Lora(nn.Linear):
    def __init__(self, *args, **kw):
        super().__init__(*args, **kw)
        self.down = nn.Parameter(torch.randn(2, self.in_features)*.5)
        self.up = nn.Parameter(torch.randn(self.out_features, 2)*.5)
    def forward(self, x): return super().forward(x) + x@self.down.T@self.up.T

def standardized(weight):
    dims = tuple(range(1, weight.ndim))
    return (weight-weight.mean(dims, keepdim=True))/(weight.std(dims, keepdim=True)+1e-3)

def own_convolution(base, way):
    "A convolution that standardizes its weight, or that pads its input by itself."
    class Standardized(base):
        def forward(self, x): return self._conv_forward(x, standardized(self.weight), self.bias)
    class Padding(base):
        def forward(self, x): return super().forward(F.pad(x, [1, 0]*(x.ndim-2)))
    return dict(standardized=Standardized, padding=Padding)[way]

def own_norm(base, way):
    "A normalization with an activation inside."
    class Activated(base):
        def forward(self, x): return getattr(F, way)(super().forward(x))
    return Activated

def made_linear(x, out=6, bias=True, own=None):
    cls = dict(tripled=Tripled, lora=Lora).get(own, nn.Linear)
    return cls(x.shape[-1], out, bias=bias)

def made_conv(x, out=6, groups=1, own=None, kernel=3, **options):
    base = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[x.ndim-3]
    cls = own_convolution(base, own) if own else base
    if groups == 'all': groups,out = x.shape[1],x.shape[1]*max(out//x.shape[1], 1)
    return cls(x.shape[1], out, kernel, groups=groups, **options)

def made_deconv(x, out=4, kernel=2, **options):
    base = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[x.ndim-3]
    return base(x.shape[1], out, kernel, **options)

class First(Holding):
    "The first of what a layer gives."
    def forward(self, x): return self.layer(x)[0]

class Attention(Holding):
    def forward(self, x): return self.layer(x, x, x, need_weights=False)[0]

def made_recurrent(x, of='LSTM', hidden=4, **options):
    return First(layer=getattr(nn, of)(x.shape[2], hidden, batch_first=True, **options))

def made_attention(x, **options):
    return Attention(layer=nn.MultiheadAttention(x.shape[2], 2, batch_first=True, **options))

def made_encoder(x, **options):
    return nn.TransformerEncoderLayer(x.shape[2], 2, 12, batch_first=True, **options)

def turn_gammas(norm, gamma):
    "Gammas of every kind: what is folded into a layer depends on their sign and size."
    weight,bias = norm.weight,norm.bias
    with torch.no_grad():
        weight.copy_(1+torch.rand_like(weight))
        if bias is not None: bias.copy_(torch.randn_like(bias))
        if gamma == 'negative': weight[::2] *= -1
        if gamma == 'zero': weight[::2] = 0
        if gamma == 'tiny': weight[::2] = 1e-6
        if gamma == 'large': weight.mul_(8)

def made_norm(x, of='batch', gamma=None, variance=None, own=None, **options):
    dims,channels = x.ndim-2,x.shape[1]
    if of == 'layer': norm = nn.LayerNorm(x.shape[-1], **options)
    elif of == 'group': norm = nn.GroupNorm(2, channels, **options)
    elif of == 'instance': norm = getattr(nn, f'InstanceNorm{dims}d')(channels, **options)
    else:
        cls = getattr(nn, f'BatchNorm{max(dims, 1)}d')
        norm = (own_norm(cls, own) if own else cls)(channels, **options)
    if gamma and norm.weight is not None: turn_gammas(norm, gamma)
    norm.rarely_varies = variance == 'tiny'
    return norm

ACTIVATIONS = dict(relu=nn.ReLU, relu_=lambda: nn.ReLU(inplace=True), relu6=nn.ReLU6, gelu=nn.GELU, silu=nn.SiLU,
    hardswish=nn.Hardswish, tanh=nn.Tanh, leaky=lambda: nn.LeakyReLU(.1), sigmoid=nn.Sigmoid)

def made_act(x, of='relu'): return ACTIVATIONS[of]()

def made_pool(x, of='max', size=2):
    name = dict(max='MaxPool', avg='AvgPool', adaptive_max='AdaptiveMaxPool', adaptive_avg='AdaptiveAvgPool')[of]
    return getattr(nn, f'{name}{x.ndim-2}d')(size)

def swapped_halves(x):
    a,b = x.chunk(2, 1)
    return torch.cat([b, a], 1)

# What a forward does between its layers. Shapes of one example, so that the batch may have any size
STEPS = dict(flatten=lambda x: x.flatten(1), flatten_last=lambda x: x.flatten(2), transpose=lambda x: x.transpose(1, 2),
    permute=lambda x: x.permute(0, *range(2, x.ndim), 1), reshape=lambda x: x.reshape(-1, x.shape[1]*x.shape[2],
    *x.shape[3:]), heads=lambda x: x.unflatten(1, (2, -1)), last=lambda x: x[..., -1], some=lambda x: x[:, 1:],
    double=lambda x: 2*x, shift=lambda x: x+.5, negative=lambda x: -x, softmax=lambda x: x.softmax(-1),
    mean=lambda x: x.mean(-1), clamp=lambda x: x.clamp(-1, 1), halves=swapped_halves, relu=F.relu, gelu=F.gelu,
    relu_=lambda x: x.relu_(), max_pool=lambda x: F.max_pool1d(x.flatten(2), 2), contiguous=lambda x: x.contiguous())

class Step(Holding):
    def forward(self, x): return STEPS[self.of](x)

def made_step(x, of='flatten'): return Step(of=of)

def affine(h): return 2*h+1
with warnings.catch_warnings():
    warnings.simplefilter('ignore')                                     # torch.jit is deprecated, and still used
    TRACED = torch.jit.trace(affine, torch.ones(2, 3))

SKIPS = dict(same=lambda x: x, relu=F.relu, traced=TRACED, half=lambda x: x/2)

class Residual(Holding):
    "Two ways that meet again."
    def forward(self, x):
        a,b = self.body(x),SKIPS[self.skip](x)
        if self.join == 'cat': return torch.cat([a, b], 1)
        if self.join == 'inplace':
            a += b
            return a
        return a*b if self.join == 'product' else a+b

def made_residual(x, body, skip='same', join='add'): return Residual(body=chain(body, x)[0], skip=skip, join=join)

class Twice(Holding):
    "A part that is used twice."
    def forward(self, x):
        if self.way == 'chain': return self.body(F.relu(self.body(x)))
        return self.body(x) + self.body(x/2).tanh()

def made_twice(x, body, way='sum'): return Twice(body=chain(body, x)[0], way=way)

class Shared(Holding):
    "A normalization that has more than one place."
    def forward(self, x):
        if self.way == 'input': return self.norm(self.first(x)) + self.norm(x)
        if self.way == 'row': return self.norm(self.norm(self.first(x)))
        return self.norm(self.first(x)) + F.relu(self.norm(self.second(x)))

def made_shared(x, body, norm, way='layers'):
    first,y = chain(body, x)
    second = chain([b | dict(seed=b.get('seed', 0)+1) for b in body], x)[0]
    return Shared(first=first, second=second, norm=chain([norm], y)[0], way=way)

class Held(Holding):
    "The first part is called from a list, beside being a child; the others as children."
    def forward(self, x):
        x = self.order[0](x)
        for part in list(self.parts)[1:]: x = part(x)
        return x

def made_held(x, body):
    parts = chain(body, x)[0]
    return Held(parts=parts, order=[parts[0]])

class Functional(Holding):
    "Parts of which the forward takes the tensors."
    def forward(self, x):
        n,y = self.norm,self.layer(x)
        if self.way == 'tied': return F.linear(n(y) if n else y, self.layer.weight.t())
        if self.way == 'weight': return F.linear(x.relu(), self.layer.weight, self.layer.bias) + y
        return F.batch_norm(y, n.running_mean, n.running_var, n.weight, n.bias)

def made_functional(x, way='norm', norm=True, out=6):
    if x.ndim != 2: raise Unfit('a matrix is wanted')
    layer = nn.Linear(x.shape[1], out)
    return Functional(layer=layer, norm=nn.BatchNorm1d(out) if norm or way == 'norm' else None, way=way)

MADE = dict(linear=made_linear, conv=made_conv, deconv=made_deconv, recurrent=made_recurrent, attention=made_attention,
    encoder=made_encoder, norm=made_norm, act=made_act, pool=made_pool, step=made_step, residual=made_residual,
    twice=made_twice, shared=made_shared, held=made_held, functional=made_functional)
LAYERS = 'linear','conv','deconv','recurrent','attention','encoder'

def prune(m, way):
    "The first outputs have no weights, or almost none; their bias stays."
    with torch.no_grad():
        m.weight[:2] = 0 if way == 'zero' else m.weight[:2]*1e-6
        if m.bias is not None: m.bias[:2] = .4

WATCHED = []                                             # one entry for each call that a hook has seen
def tripled(m, args, out): return 3*out
def halved(m, args): return (args[0]/2, *args[1:])
def watched(m, *_): WATCHED.append(1)

def put_hook(m, way):
    if way == 'pre': m.register_forward_pre_hook(halved)
    else: m.register_forward_hook(tripled if way == 'triple' else watched)

def part(block, x):
    "The module of one block."
    options = {k: v for k,v in block.items() if k not in ('kind', 'seed', 'hook', 'pruned')}
    seed_all(block.get('seed', 0))
    try: m = MADE[block['kind']](x, **options)
    except Unfit: raise
    except Exception as e: raise Unfit(f'{block}: {e}') from e
    if 'pruned' in block: prune(m, block['pruned'])
    if 'hook' in block: put_hook(m, block['hook'])
    return m

def chain(blocks, x):
    "The modules of blocks that follow each other, and what leaves the last."
    parts = nn.Sequential()
    for b in blocks:
        m = part(b, x)
        try:
            with torch.no_grad(): x = m(x.clone())
        except Exception as e: raise Unfit(f'{b}: {e}') from e         # what torch itself does not run is no network
        if not isinstance(x, Tensor) or not 2 <= x.ndim <= 5 or not 0 < x[0].numel() <= 4096: raise Unfit(f'{b}')
        parts.append(m)
    return parts,x

@dataclasses.dataclass
class Outputs:
    features:object
    result:object

class Net(Holding):
    "The blocks in a row; beside the result one value from the middle may leave."
    def forward(self, x):
        if self.embedding is not None: x = self.embedding(x)
        kept = x
        for i,m in enumerate(self.parts):
            x = m(x)
            if i == self.tap: kept = x
        if self.leaving == 'dict': return dict(features=kept, result=x)
        if self.leaving == 'tuple': return kept,x
        if self.leaving == 'dataclass': return Outputs(kept, x)
        return x

def outputs(tree):
    "The tensors of an output."
    if isinstance(tree, Tensor): return [tree]
    if dataclasses.is_dataclass(tree): tree = vars(tree)
    if isinstance(tree, dict): tree = tuple(tree.values())
    return [t for v in tree for t in outputs(v)]

COUNT = 12                                                                  # examples in a batch
def inputs(spec, seed, size=1.):
    "Values that enter, in float32, or tokens."
    draw = torch.Generator().manual_seed(1000*spec['seed']+seed)
    if spec['input'][0] == 'tokens': return torch.randint(9, (COUNT, spec['input'][1]), generator=draw)
    x = torch.randn(COUNT, *spec['input'], generator=draw)*size
    return x.abs() if spec.get('positive') else x

def typed(spec, t): return t.to(getattr(torch, spec.get('dtype', 'float32'))) if t.is_floating_point() else t

def values(spec):
    "What the models are compared on: some of it beyond what was calibrated."
    return typed(spec, torch.cat([inputs(spec, 10), inputs(spec, 12, 1.5)]))

def build(spec):
    "The float model of a spec, its normalizations with statistics of some passes of training."
    if not spec['blocks']: raise Unfit('no blocks')
    with torch.random.fork_rng(devices=[]):
        seed_all(spec['seed'])
        x,embedding = inputs(spec, 0),None
        if not x.is_floating_point():
            embedding = nn.Embedding(9, 6)
            x = embedding(x).detach()
        parts,_ = chain(spec['blocks'], x)
        leaving,tap = spec.get('output', 'tensor'),spec.get('tap', 0) % len(parts)
        model = Net(embedding=embedding, parts=parts, leaving=leaving, tap=tap)
        for i in range(spec.get('passes', 4)): model.train()(inputs(spec, i))
        for m in model.modules():
            if getattr(m, 'rarely_varies', False) and getattr(m, 'running_var', None) is not None:
                m.running_var[0] = 1e-12
        return model.eval().to(getattr(torch, spec.get('dtype', 'float32')))

ROUNDINGS = {r.name: r.f for r in catalog}
def quantizer(options):
    "Of a spec: None, or the arguments of a `Quantizer`."
    if options is None: return None
    options = dict(options)
    if 'rounding' in options: options['rounding'] = ROUNDINGS[options['rounding']]
    return Quantizer(options.pop('bits', 8), **options)

def fitting(spec):
    "The float model, if there is something to quantize and the blocks of the grid divide every weight."
    model = build(spec)
    weights = quantizer(dict(axis=0) | spec['weights'])
    for m in model.modules() if weights.block else ():
        if any(p.ndim > 1 and p.shape[-1] % weights.block for p in m.parameters(recurse=False)): raise Unfit('blocks')
    if not any(isinstance(m, (*LINEAR, nn.Embedding, nn.RNNBase, nn.MultiheadAttention)) or hasattr(m, 'output_padding')
        for m in model.modules()): raise Unfit('no layer')
    return model

def quantized(spec):
    model = fitting(spec)
    weights = quantizer(dict(axis=0) | spec['weights'])
    activations = quantizer(spec.get('activations', dict(signed=None)))
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        quantize_model_(model, weights, activations, calibrate=[typed(spec, inputs(spec, i)) for i in (10, 11)])
    return model

# --- how far may they be?
def computes_plainly(m):
    "Is the forward of a layer its own class's?"
    base = next(k for k in type(m).__mro__ if k in LINEAR)
    return type(m).forward is base.forward

def of_channels(t, values, m):
    "`values` of the channels of a layer, to broadcast with its output."
    return values.to(t.dtype) if isinstance(m, nn.Linear) else values.to(t.dtype).view(-1, *[1]*(t.ndim-2))

def units(model):
    """Half the unit of the bias of every layer that can become one of integers: half its step times that of its
    input. A channel of codes that are all 0 may have any step, and so rounds nothing away."""
    found = {}
    for m in model.modules():
        if not isinstance(m, LINEAR) or not hasattr(m, 'input_quantizer') or not computes_plainly(m): continue
        if not parametrize.is_parametrized(m, 'weight'): continue
        q = m.parametrizations.weight[0]
        if q.has_zero_point or q.block is not None or q.axis not in (None, 0): continue
        codes = q.to_codes(m.parametrizations.weight.original).flatten(1)
        found[m] = q.grid()[0].detach()*m.input_quantizer.grid()[0].detach()*(codes != 0).any(1)/2
    return found

def scaling_units(model):
    "The same of every normalization that becomes a convolution of each channel, whose one code is 127."
    found = {}
    for m in model.modules():
        if not is_scaling(m) or not hasattr(m, 'input_quantizer'): continue
        factor = (m.running_var+m.eps).rsqrt()*(1. if m.weight is None else m.weight.detach())
        found[m] = factor.abs()*m.input_quantizer.grid()[0].detach()/254
    return found

def directly_behind(model, x):
    "The layer whose very output a normalization takes, for those where it is one."
    made,found = {},{}
    def ends(m, args, out): made[id(out)] = m,out
    def starts(m, args):
        layer,t = made.get(id(args[0]), (None, None))
        if layer is not None and (t.ndim == 2 or not isinstance(layer, nn.Linear)): found[m] = layer
    with ExitStack() as hooks:
        for m in model.modules():
            if isinstance(m, LINEAR): hooks.enter_context(m.register_forward_hook(ends))
            if isinstance(m, BATCH_NORMS): hooks.enter_context(m.register_forward_pre_hook(starts))
        model(x)
    return found

def size_of(t): return t.detach().abs().amax() if t.numel() else 0.

class Shake:
    "The hooks of one draw: what deployment rounds, and `eps` of the largest value where a tensor enters or leaves."
    def __init__(self, model, x, eps, rounded=True):
        self.eps,self.units = eps,units(model) if rounded else {}
        self.scaled = scaling_units(model) if rounded else {}
        behind = directly_behind(model, x) if rounded else {}
        negative = {n: l for n,l in behind.items() if n.weight is not None and (n.weight < 0).any()}
        self.turned = {l.parametrizations.weight[0] for l in negative.values() if l in self.units}
        self.behind = {n: l for n,l in behind.items() if l in self.units}

    def draw(self, seed): self.random = torch.Generator().manual_seed(seed)

    def uniform(self, t): return torch.rand(t.shape, generator=self.random, dtype=t.dtype)

    def rounding(self, half): return half*(1 - 2*(self.uniform(half) < .5).to(half.dtype))

    def noisy(self, t):
        if not isinstance(t, Tensor) or not t.is_floating_point(): return t
        return t + self.eps*size_of(t)*(2*self.uniform(t)-1)

    def enters(self, m, args): return tuple(map(self.noisy, args))

    def leaves(self, m, args, out):
        if not isinstance(out, Tensor): return None
        if m in self.units and (m.bias is not None or m in self.behind.values()):
            out = out + of_channels(out, self.rounding(self.units[m]), m)
        if m in self.scaled: out = out + of_channels(out, self.rounding(self.scaled[m]), m)
        if m in self.behind and m.weight is not None:                  # a gamma of 0 leaves the bias alone to round
            layer = self.behind[m]
            out = out + of_channels(out, self.rounding(self.units[layer]*(m.weight == 0)), layer)
        return self.noisy(out)

    def turns(self, q, args, out):
        low = q.to_codes(args[0]) == q.range()[0]
        step = q.kind.beside(q.grid()[0], out)
        return out + step*(low & (self.uniform(out) < .5))

@contextmanager
def shaken(model, shake, seed):
    "The model for one draw."
    shake.draw(seed)
    closed = Quantizer,parametrize.ParametrizationList,nn.MultiheadAttention
    inside = {q for m in model.modules() if isinstance(m, closed) for q in m.modules()}
    inside -= {m for m in inside if isinstance(m, nn.MultiheadAttention)}
    with ExitStack() as hooks:
        for m in model.modules():
            if m in shake.turned: hooks.enter_context(m.register_forward_hook(shake.turns))
            holders = *LINEAR,*BATCH_NORMS,nn.MultiheadAttention,nn.RNNBase
            leaf = not any(True for _ in m.children()) or isinstance(m, holders)
            known = type(m).__module__.startswith(('torch.nn', 'shok_nb', __name__))
            if not leaf or not known or m in inside or isinstance(m, nn.Embedding): continue
            hooks.enter_context(m.register_forward_pre_hook(shake.enters, prepend=True))
            hooks.enter_context(m.register_forward_hook(shake.leaves, prepend=True))
        yield

def gaps(a, b):
    "The largest and the mean difference of each output, as shares of its largest value in `b`."
    out = []
    for s,t in zip(a, b):
        away,size = (s.double()-t.double()).abs(),max(size_of(t.double()), 1e-12)
        out += [float(away.max()/size), float(away.mean()/size)]
    return out

TIMES,FIRST,MOST = 2,6,150
def beyond(model, x, want, got, shake, floor):
    """By how much `got` is farther from `want` than twice the farthest draw: None, or gap and bound.

    Deployment is one draw more, of roundings that are half as large in the mean as those of a draw. That it is beyond
    twice the largest of six happens to some networks in a thousand, where one code in the whole batch is near a tie;
    it is asked again, of up to 150 draws, or of thirty where it is still far beyond. A fault changes all outputs, which
    no number of draws does."""
    found,bound = gaps(got, want),[floor]*2*len(want)
    for i in range(MOST):
        with shaken(model, shake, i): other = outputs(model(x))
        bound = [max(b, TIMES*g) for b,g in zip(bound, gaps(other, want))]
        worst = max(f/b for f,b in zip(found, bound))
        if i+1 >= FIRST and worst <= 1: return None
        if i+1 >= 5*FIRST and worst > 10: break
    at = max(range(len(found)), key=lambda i: found[i]/bound[i])
    return found[at],bound[at]

def unexplained(model, x, want, got):
    "Beyond what deployment rounds: sums differ by some eps, and layers of integers keep their steps in float32."
    eps = max(torch.finfo(torch.float32).eps, torch.finfo(want[0].dtype).eps)
    return beyond(model, x, want, got, Shake(model, x, 4*eps), 16*eps)

class Verdict(NamedTuple):
    "What came out: 'equal', 'refused', 'unfit', or the kind of a failure, in words."
    kind:str
    told:str=''
    @property
    def failed(self): return self.kind not in ('equal', 'refused', 'unfit')

EXPLAINED = '{:.3g} of the largest output, where {:.3g} is explained'

def raised(where, e): return Verdict(f'{where} raises {type(e).__name__}', str(e).split('\n')[0][:200])

def names_a_layer(model, message):
    return any(re.search(rf'(?<![\w.]){re.escape(n)}(?![\w])', message) for n,_ in model.named_modules() if n)

def same_kind(want, got):
    "Are there as many outputs, of the same shapes and dtypes?"
    def kinds(ts): return [(tuple(t.shape), t.dtype) for t in ts]
    if kinds(want) == kinds(got): return None
    return f'{kinds(want)} became {kinds(got)}'

def run(model, x):
    "The outputs, and how often a hook that watches was called."
    WATCHED.clear()
    return outputs(model(x)),len(WATCHED)

def judge(spec, folder=None):
    "Quantized against deployed; where a folder is given and the spec says so, against ONNX Runtime too."
    try:
        before = build(spec)
        model = quantized(spec)
    except Unfit as e: return Verdict('unfit', str(e))
    except Exception as e: return raised('quantize_model_', e)
    with torch.no_grad(): return judged(spec, before, model, folder)

def judged(spec, before, model, folder):
    x = values(spec)
    deployed = copy.deepcopy(model.eval())
    want,watched = run(model, x)
    if not all(t.isfinite().all() for t in want):
        if all(t.isfinite().all() for t in outputs(before(x))): return Verdict('quantized is not finite')
        return Verdict('unfit', 'not finite')
    try: deploy_(deployed, x[:4])
    except ValueError as e:
        if not names_a_layer(model, str(e)): return raised('deploy_', e)
        again = outputs(deployed(x))
        if any(not torch.equal(a, b) for a,b in zip(want, again)): return Verdict('a refusal changed the model', str(e))
        return Verdict('refused', str(e))
    except Exception as e: return raised('deploy_', e)
    try: got,still = run(deployed, x)
    except Exception as e: return raised('the deployed model', e)
    if still != watched: return Verdict('a hook is called otherwise', f'{watched} calls became {still}')
    if other := same_kind(want, got): return Verdict('other shapes or dtypes', other)
    if not all(t.isfinite().all() for t in got): return Verdict('deployed is not finite')
    far = unexplained(model, x, want, got)
    if far: return Verdict('deployed differs', EXPLAINED.format(*far))
    if folder is None or not spec.get('onnx'): return Verdict('equal')
    return in_runtime(before, deployed, x, got, folder)

def in_runtime(before, model, x, want, folder):
    "The deployed model against ONNX Runtime, which must take it if it takes the float model."
    def session(m): return onnx_session(to_onnx(m, x[:4], folder/'model.onnx'))
    def takes(m):
        try: return bool(session(m))
        except Exception: return False
    where = 'to_onnx'
    try:
        file = to_onnx(model, x[:4], folder/'model.onnx')
        where = 'onnx_session'
        s = onnx_session(file)
        where = 'the runtime'
        got = [torch.from_numpy(t) for t in s.run(None, {s.get_inputs()[0].name: x.numpy()})]
    except Exception as e: return raised(where, e) if takes(before) else Verdict('equal', 'no ONNX of the float model')
    if other := same_kind(want, got): return Verdict('other shapes or dtypes in the runtime', other)
    # its tanh, sigmoid and erf are good to about 1e-6
    far = beyond(model, x, want, got, Shake(model, x, 2e-6, rounded=False), 1e-5)
    if far: return Verdict('the runtime differs', EXPLAINED.format(*far))
    return Verdict('equal', 'in the runtime too')

# --- the smallest network that fails
def simpler_block(b):
    "A block with one option less, or with something less inside."
    for k,v in b.items():
        if k in ('kind', 'body', 'norm') and not (k == 'norm' and isinstance(v, bool)): continue
        if not (k == 'of' and b['kind'] == 'step'): yield {j: w for j,w in b.items() if j != k}
    if 'body' in b: yield from (b | dict(body=body) for body in fewer(b['body']))
    if isinstance(b.get('norm'), dict): yield from (b | dict(norm=n) for n in simpler_block(b['norm']))

def fewer(blocks):
    "A block less, what is inside one in place of it, or a block that is simpler."
    for i,b in enumerate(blocks): yield blocks[:i] + blocks[i+1:]
    for i,b in enumerate(blocks):
        inside = [*b.get('body', ()), *([b['norm']] if isinstance(b.get('norm'), dict) else ())]
        if inside: yield blocks[:i] + inside + blocks[i+1:]
    for i,b in enumerate(blocks): yield from (blocks[:i] + [s] + blocks[i+1:] for s in simpler_block(b))

def simpler(spec):
    "Every spec that is one change simpler."
    yield from (spec | dict(blocks=blocks) for blocks in fewer(spec['blocks']))
    for k in spec:
        if k not in ('seed', 'input', 'blocks', 'weights'): yield {j: v for j,v in spec.items() if j != k}
    for k in ('weights', 'activations'):
        for o in spec.get(k) or (): yield spec | {k: {j: v for j,v in spec[k].items() if j != o}}

def reduced(spec, fails, most=400):
    "The smallest spec on the way from `spec` that still `fails`: no single change makes it simpler and keeps that."
    found = True
    while found:
        found = False
        for s in simpler(spec):
            most -= 1
            if most < 0: return spec
            if fails(s):
                spec,found = s,True
                break
    return spec

# --- drawing a network
SHAPES = dict(vector=(6,), sequence=(5, 6), square=(6, 6), line=(4, 10), image=(3, 8, 8), volume=(2, 5, 5, 5),
    tokens=('tokens', 5))

def sometimes(r, share, **options):
    "Some of these options."
    return {k: r.choice(v) if isinstance(v, list) else v for k,v in options.items() if r.random() < share}

def draw_layer(r, x):
    rank = x.ndim-1
    kinds = ['linear']*3 + ['conv']*6*(rank > 1) + ['deconv']*(rank > 1)
    kinds += ['recurrent', 'recurrent', 'attention', 'encoder']*(rank == 2)
    b = dict(kind=r.choice(kinds), seed=r.randrange(1000))
    if b['kind'] == 'linear':
        b |= sometimes(r, .3, out=[4, 8, x.shape[-1]], bias=False) | sometimes(r, .05, own=['tripled', 'lora'])
    elif b['kind'] == 'conv':
        b |= sometimes(r, .3, out=[4, 8, x.shape[1]], kernel=[1, 2], padding=[1, 'same', 'valid'], bias=False)
        b |= sometimes(r, .15, stride=2, dilation=2, groups=[2, 'all'], padding_mode=['reflect', 'replicate',
            'circular'])
        if 'padding_mode' in b: b.setdefault('padding', 1)
        b |= sometimes(r, .05, own=['standardized', 'padding'])
    elif b['kind'] == 'deconv': b |= sometimes(r, .3, stride=2, padding=1, bias=False, groups=2, kernel=3)
    elif b['kind'] == 'recurrent': b |= sometimes(r, .3, of='GRU', bidirectional=True, num_layers=2, bias=False)
    elif b['kind'] == 'attention': b |= sometimes(r, .3, bias=False)
    else: b |= sometimes(r, .3, norm_first=True, activation='gelu')
    if b['kind'] in ('linear', 'conv', 'deconv'): b |= sometimes(r, .05, pruned=['zero', 'tiny'])
    if b['kind'] in ('linear', 'conv'): b |= sometimes(r, .06, hook=['triple', 'pre', 'watch', 'watch'])
    return b

def draw_norm(r, x):
    b = dict(kind='norm', seed=r.randrange(1000))
    b |= sometimes(r, .25, of=['layer', 'group', 'instance']) | sometimes(r, .5, gamma=['negative', 'zero', 'tiny',
        'large', 'negative']) | sometimes(r, .05, variance='tiny', hook='watch')
    if b.get('of') in (None, 'instance'): b |= sometimes(r, .1, affine=b.get('of') is not None)
    if b.get('of') is None:
        b |= sometimes(r, .06, own=['silu', 'relu'], track_running_stats=False, momentum=None)
    return b

def draw_act(r, x):
    return dict(kind='act') | sometimes(r, .6, of=[k for k in ACTIVATIONS if k != 'relu'])

def draw_pool(r, x): return dict(kind='pool') | sometimes(r, .6, of=['avg', 'adaptive_max', 'adaptive_avg'])

def draw_step(r, x): return dict(kind='step', of=r.choice(list(STEPS)))

def draw_move(r, x): return dict(kind='step', of=r.choice(['transpose', 'permute', 'flatten', 'reshape', 'heads']))

def draw_residual(r, x):
    body = drawn_chain(r, x, r.choice([('layer',), ('relu', 'layer'), ('layer', 'norm'), ('layer', 'act', 'layer')]))
    return dict(kind='residual', body=body) | sometimes(r, .5, skip=['relu', 'traced', 'half'], join=['cat', 'inplace',
        'product'])

def draw_twice(r, x):
    body = drawn_chain(r, x, r.choice([('layer',), ('layer', 'norm')]))
    return dict(kind='twice', body=body) | sometimes(r, .3, way='chain')

def draw_shared(r, x):
    body = drawn_chain(r, x, ('layer',))
    return dict(kind='shared', body=body, norm=draw_norm(r, x) | sometimes(r, .5, of='batch')) | sometimes(r, .5,
        way=['input', 'row'])

def draw_held(r, x):
    return dict(kind='held', body=drawn_chain(r, x, r.choice([('layer',), ('layer', 'norm'), ('layer', 'relu',
        'layer')])))

def draw_functional(r, x):
    return dict(kind='functional', seed=r.randrange(1000)) | sometimes(r, .6, way=['tied', 'weight'], norm=False)

DRAWS = dict(layer=draw_layer, norm=draw_norm, act=draw_act, pool=draw_pool, step=draw_step, move=draw_move,
    residual=draw_residual, twice=draw_twice, shared=draw_shared, held=draw_held, functional=draw_functional,
    relu=lambda r, x: dict(kind='act'))

# What stands in a row, and how often: a normalization in every place there is
ROWS = {('layer',): 4, ('layer', 'act'): 6, ('layer', 'norm'): 3, ('layer', 'norm', 'act'): 6, ('norm', 'layer'): 1,
    ('layer', 'act', 'norm'): 2, ('layer', 'pool', 'norm'): 1, ('layer', 'move', 'norm'): 1,
    ('layer', 'norm', 'norm'): 1, ('layer', 'norm', 'act', 'norm'): 1, ('act',): 1, ('pool',): 2, ('norm',): 1,
    ('move',): 3, ('step',): 2, ('residual',): 4, ('twice',): 1, ('shared',): 1, ('held',): 1, ('functional',): 2}

def drawn_chain(r, x, row):
    "Blocks of these sorts that fit."
    blocks = []
    for sort in row:
        b = DRAWS[sort](r, x)
        x = chain([b], x)[1]
        blocks.append(b)
    return blocks

def draw_grids(r):
    "Of weights and of activations: mostly eight bits, and of everything else some."
    w = sometimes(r, .4, bits=[2, 3, 4, 4, 5, 6, 7, (-127, 127), (-1, 1)]) | sometimes(r, .15, axis=None)
    w |= sometimes(r, .1, signed=[False, None], learn=True, zero_point=True)
    w |= sometimes(r, .08, block=[2, 3])
    w |= dict(init=r.choice(['minmax', 'minmax', 'percentile', 'mse', 'lsq']))
    if r.random() < .12: w['rounding'] = r.choice([k for k in ROUNDINGS if takes_rounding(k)])
    if 'block' in w: w['axis'] = None
    a = dict(signed=None) | sometimes(r, .2, bits=[2, 3, 4, 5, 6, 7, (-127, 127)], signed=[True, False])
    a |= sometimes(r, .2, zero_point=True, learn=True) | dict(init=r.choice(['minmax', 'minmax', 'percentile', 'mse']))
    if r.random() < .04: a['rounding'] = r.choice([k for k in ROUNDINGS if takes_rounding(k)])
    for q in (w, a):
        if q.get('zero_point') and q['init'] == 'lsq': q['init'] = 'minmax'
        if isinstance(q.get('bits'), tuple): q.pop('signed', None)
    if isinstance(a.get('bits'), tuple): a['signed'] = None
    return dict(weights=w) if r.random() < .05 else dict(weights=w, activations=a)

def takes_rounding(name):
    try: return bool(Quantizer(rounding=ROUNDINGS[name]))
    except ValueError: return False

def attempt(seed, i):
    "A spec, or an `Unfit` where it is no network."
    r = random.Random(f'{seed} {i}')
    spec = dict(seed=seed, input=SHAPES[r.choice(list(SHAPES))], blocks=[]) | draw_grids(r)
    spec |= sometimes(r, .25, positive=True) | sometimes(r, .12, output=['dict', 'tuple', 'dataclass'])
    if 'output' in spec: spec['tap'] = r.randrange(4)
    spec |= sometimes(r, .04, dtype=['float64', 'bfloat16'])
    spec['onnx'] = r.random() < .6 and 'output' not in spec and 'dtype' not in spec
    seed_all(seed)
    x = inputs(spec, 0)
    if not x.is_floating_point(): x = torch.randn(COUNT, spec['input'][1], 6)
    for _ in range(r.randint(2, 4)):
        for _ in range(8):
            row = r.choices(list(ROWS), ROWS.values())[0]
            try:
                more = drawn_chain(r, x, row)
                y = chain(more, x)[1]
            except Unfit: continue
            spec['blocks'] += more
            x = y
            break
    spec['blocks'].append(dict(kind='linear', seed=1, out=3))
    if spec['onnx'] and r.random() < .2 and x.ndim == 2:                # codes that the exporter does not fold away
        spec['blocks'][-1:] = [dict(kind='linear', out=96), dict(kind='linear', out=96), dict(kind='linear', out=3)]
    fitting(spec)
    return spec

def drawn(seed):
    "The network of a seed."
    with torch.random.fork_rng(devices=[]):
        for i in range(100):
            try: return attempt(seed, i)
            except Unfit: continue
    raise RuntimeError(f'no network for seed {seed}')

# --- what a network has
def every_block(blocks):
    for b in blocks:
        yield b
        yield from every_block(b.get('body', ()))
        if isinstance(b.get('norm'), dict): yield b['norm']

def sort_of(b): return 'layer' if b['kind'] in LAYERS else b['kind']

def features(spec):
    "Its parts, options and places, as words: those that a thousand networks must have often enough."
    out = {type(m).__name__ for m in build(spec).modules()}
    for b in every_block(spec['blocks']):
        out |= {f'{b["kind"]}.{k}={v}' for k,v in b.items() if k not in ('body', 'norm', 'seed', 'kind')} | {b['kind']}
        body = b.get('body', ())
        out |= {f'{sort_of(a)} > {sort_of(c)}' for a,c in zip(body, body[1:])}
    rows = spec['blocks']
    out |= {f'{sort_of(a)} > {sort_of(c)}' for a,c in zip(rows, rows[1:])}
    out |= {f'{k}={v}' for k,v in spec.items() if k not in ('blocks', 'weights', 'activations', 'seed')}
    for w in ('weights', 'activations'): out |= {f'{w}.{k}={v}' for k,v in (spec.get(w) or {}).items()}
    return out
