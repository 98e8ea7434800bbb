"""Networks with what people's forwards do beside arithmetic: contexts, flags, counters, second heads, shared weights.

A network is a list of names of `STAGES`, each a module of `WIDTH` to `WIDTH` with `ways`: other conditions under which
it is called, as a flag, a mode, a batch of another size or a method. A function that changes a model is right if under
every way the model computes what it did, or raises an error that says so (`judge`); a model that computes something
else without a word is a fault."""
import copy
import random
import tempfile
import warnings
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint
import shok_nb as R

WIDTH = 16

class Stage(nn.Module):
    "Two layers and a plain way to use both."
    def __init__(self):
        super().__init__()
        self.a,self.b = nn.Linear(WIDTH, WIDTH),nn.Linear(WIDTH, WIDTH)
    def forward(self, x): return x + self.b(F.relu(self.a(x)))

    def ways(self):
        "Names of conditions, each with what sets it in this stage and gives what ends that."
        return {}

def setting(owner, name, value):
    "An attribute is set, and what sets it back."
    was = getattr(owner, name)
    setattr(owner, name, value)
    return lambda: setattr(owner, name, was)

# --- contexts
class Frozen(Stage):
    def forward(self, x):
        with torch.no_grad(): y = F.gelu(self.a(x))
        return x + self.b(y)

class FrozenByHand(Stage):
    @torch.no_grad()
    def encoded(self, x): return torch.sigmoid(self.a(x))
    def forward(self, x): return x + self.b(self.encoded(x))

class Whole(Stage):
    "One part in float32, whatever autocast says."
    def forward(self, x):
        with torch.autocast('cpu', enabled=False): y = self.a(x.float())*torch.sigmoid(x.float())
        return x + self.b(y)

class Recomputed(Stage):
    def part(self, x): return F.silu(self.a(x))*x
    def forward(self, x): return x + self.b(checkpoint(self.part, x, use_reentrant=False))

# --- what it writes
class Counted(Stage):
    def __init__(self):
        super().__init__()
        self.register_buffer('steps', torch.zeros((), dtype=torch.long))
    def forward(self, x):
        self.steps += 1
        return x + self.b(F.silu(self.a(x)))

class Noted(Stage):
    def __init__(self):
        super().__init__()
        self.notes = {}
    def forward(self, x):
        y = self.a(x)
        self.notes['largest'] = float(y.detach().abs().max()) if torch.is_tensor(y) else None
        return x + self.b(y*torch.sigmoid(x))

class Averaged(Stage):
    "A running mean of its own, in a buffer."
    def __init__(self):
        super().__init__()
        self.register_buffer('mean', torch.zeros(WIDTH))
    def forward(self, x):
        if self.training: self.mean.lerp_(x.detach().mean(0), .1)
        return x + self.b(F.silu(self.a(x-self.mean)))

# --- what it asks
class Flagged(Stage):
    def __init__(self):
        super().__init__()
        self.flag = False
    def forward(self, x):
        y = self.a(x)
        y = y*x if self.flag else y*torch.sigmoid(x)
        return x + self.b(y)
    def ways(self): return dict(flag=lambda: setting(self, 'flag', True))

class Configured(Stage):
    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(double=False)
    def forward(self, x):
        y = x + self.b(F.relu(self.a(x)))
        return y+y if self.config.double else y+x
    def ways(self): return dict(config=lambda: setting(self.config, 'double', True))

SETTINGS = dict(gated=False)

class Worldly(Stage):
    "Asks a global."
    def forward(self, x):
        y = self.a(x)
        return x + self.b(y*y if SETTINGS['gated'] else y*torch.sigmoid(y))
    def ways(self):
        def set_gate():
            SETTINGS['gated'] = True
            return lambda: SETTINGS.update(gated=False)
        return {'global': set_gate}

class AsksAPart(Stage):
    "What it does depends on the mode of a part."
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.)
    def forward(self, x):
        y = self.b(F.relu(self.a(x)))
        return x + y + y if self.drop.training else x + y
    def ways(self): return dict(part=lambda: setting(self.drop, 'training', not self.drop.training))

class Dropped(Stage):
    "Half of the iterations of training go without it."
    def forward(self, x):
        if self.training and random.random() < .5: return x*1.
        return x + self.b(F.relu(self.a(x)))

class Listed(Stage):
    "Its layers stand in a plain list too, which may be exchanged."
    def __init__(self):
        super().__init__()
        self.order = [self.a, self.b]
    def forward(self, x):
        y = x
        for part in self.order: y = F.silu(part(y))
        return x + y
    def ways(self): return dict(order=lambda: setting(self, 'order', [self.a]))

class ByLength(Stage):
    def forward(self, x):
        y = self.b(F.relu(self.a(x)))
        return x + y if len(x) > 8 else x*torch.sigmoid(y)

# --- readers that one look does not reach
class Seconded(Stage):
    "A second head reads the same values, in training alone."
    def __init__(self):
        super().__init__()
        self.norm,self.second = nn.LayerNorm(WIDTH),nn.Linear(WIDTH, 4)
    def forward(self, x):
        h = self.norm(x)
        if self.training: self.told = self.second(h)
        return x + self.b(F.relu(self.a(h)))
    def extra(self, x): return self.second(self.norm(x))

class Early(Stage):
    "Another method reads what forward computes."
    def __init__(self):
        super().__init__()
        self.probe = nn.Linear(WIDTH, 4)
    def extra(self, x): return self.probe(F.relu(self.a(x)))

class Borrowed(Stage):
    "A weight is read without its layer."
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
    def forward(self, x):
        h = self.norm(x)
        return x + self.b(F.relu(self.a(h))) + F.linear(h, self.a.weight)

# --- layers of others, and shared ones
class NormIn(nn.Linear):
    def forward(self, x): return F.linear(F.layer_norm(x, x.shape[-1:]), self.weight, self.bias)

class Cosine(nn.Linear):
    def forward(self, x): return F.linear(F.normalize(x, dim=-1), F.normalize(self.weight, dim=-1))*4

class Equalized(nn.Linear):
    def forward(self, x): return F.linear(x, self.weight*.5, self.bias)

class Of(Stage):
    "One layer is of a class of the user's own."
    def __init__(self, kind):
        super().__init__()
        self.b = kind(WIDTH, WIDTH)

class Normed(Stage):
    def __init__(self):
        super().__init__()
        self.b = weight_norm(nn.Linear(WIDTH, WIDTH))

class Tied(Stage):
    def __init__(self):
        super().__init__()
        self.b.weight = self.a.weight

class TiedElsewhere(Stage):
    "Both layers read values of other sizes."
    def __init__(self):
        super().__init__()
        self.b.weight = self.a.weight
    def forward(self, x): return x + .2*self.a(x) + self.b(F.relu(4*x-2))

class Twice(Stage):
    def __init__(self):
        super().__init__()
        self.b = self.a

class Masked(Stage):
    "An argument with a default."
    def forward(self, x, mask=None):
        y = self.b(F.relu(self.a(x)))
        return x + y if mask is None else x + y*mask

class Kept(Stage):
    "The last output is kept and added to the next."
    def __init__(self):
        super().__init__()
        self.last = None
    def forward(self, x):
        y = self.b(F.relu(self.a(x)))
        if self.last is not None and self.last.shape == y.shape: y = y + .5*self.last
        self.last = y.detach()
        return x + y

class Flat(Stage):
    "What enters its second layer hardly varies."
    def forward(self, x): return x + self.b(1000. + .1*torch.sigmoid(self.a(x)))*1e-3

STAGES = dict(plain=Stage, frozen=Frozen, frozen_by_hand=FrozenByHand, whole=Whole, recomputed=Recomputed,
    counted=Counted, noted=Noted, averaged=Averaged, flagged=Flagged, configured=Configured, worldly=Worldly,
    asks_a_part=AsksAPart, dropped=Dropped, listed=Listed, by_length=ByLength, seconded=Seconded, early=Early,
    borrowed=Borrowed, norm_in=partial(Of, NormIn), cosine=partial(Of, Cosine), equalized=partial(Of, Equalized),
    normed=Normed, tied=Tied, tied_elsewhere=TiedElsewhere, twice=Twice, masked=Masked, kept=Kept, flat=Flat)

class Network(nn.Module):
    def __init__(self, names):
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.stages = nn.ModuleList(STAGES[n]() for n in names)
        self.head = nn.Linear(WIDTH, 4)
    def forward(self, x):
        x = self.stem(x)
        for s in self.stages: x = s(x)
        return self.head(x)

def drawn(seed, few=1, many=4):
    "Names of stages, one to four of them."
    r = random.Random(seed)
    return [r.choice([*STAGES]) for _ in range(r.randint(few, many))]

def built(names, seed=0):
    torch.manual_seed(seed)
    model = Network(names)
    for m in model.stages.modules():        # so that no stage is a small part of what goes round it
        if isinstance(m, nn.Linear): m.weight.data.mul_(2.)
    return model.eval()

def rows(n=32, seed=1): return torch.randn(n, WIDTH, generator=torch.Generator().manual_seed(seed))

# --- every way to call it
@contextmanager
def under(model, mode, stage=None, way=None):
    "The model in a mode, with one condition of one stage set."
    was = [(m, m.training) for m in model.modules()]
    model.train(mode == 'train')
    back = model.stages[stage].ways()[way]() if way else lambda: None
    try: yield
    finally:
        back()
        for m,t in was: m.training = t

def ways(model):
    "The conditions: modes, numbers of rows, the ways of each stage."
    found = [dict(mode=m, n=n) for m in ('eval', 'train') for n in (32, 4)]
    for i,s in enumerate(model.stages): found += [dict(mode='eval', n=32, stage=i, way=w) for w in s.ways()]
    return found

def states(model):
    "What it keeps between calls, so that two models can be asked the same."
    for s in model.modules():
        if isinstance(s, Kept): s.last = None
        if isinstance(s, Averaged): s.mean.zero_()

class Answer(NamedTuple):
    values:list     # what it gives, and what its other methods do
    learns:set      # the parameters that get a gradient
    counts:list     # what it has counted

def asked(model, mode, n, stage=None, way=None):
    "What the model answers under a condition."
    states(model)
    counted = [s for s in model.stages if isinstance(s, Counted)]
    before = [s.steps.item() for s in counted]
    model.zero_grad()
    random.seed(3)
    x = rows(n)
    with under(model, mode, stage, way):
        y = model(x)
        more = [s.extra(x) for s in model.stages if hasattr(s, 'extra')]
        more += [s.told for s in model.stages if mode == 'train' and hasattr(s, 'told')]
    y.square().sum().backward()
    learns = {of(name) for name,p in model.named_parameters() if p.grad is not None and p.grad.any()}
    return Answer([y.detach(), *(t.detach() for t in more)], learns - {None},
        [s.steps.item()-b for s,b in zip(counted, before)])

def of(name):
    "The layer that a Parameter is of; None for those of quantizers."
    parts = name.split('.')
    if 'log_scale' in parts or 'zero_point' in parts: return None
    inside = 'parametrizations','weight','bias','original','original0','original1'
    return '.'.join(p for p in parts if p not in inside)

def far(a, b):
    "The largest difference over the largest value."
    return max(((p-q).abs().max()/q.abs().max().clamp(min=1e-6)).item() for p,q in zip(a.values, b.values))

class Verdict(NamedTuple):
    kind:str        # right, refused, at the call, silent
    told:str

NAMED = TypeError,ValueError,RuntimeError

def compared(changed, plain, bound, fn):
    "The verdict over every way: each answer as that of the plain model, or an error by name."
    said = ''
    for way in ways(plain):
        want = asked(plain, **way)
        try: got = asked(changed, **way)
        except NAMED as e:
            said = f'{way}: {e}'
            continue
        gap = far(got, want)
        if not gap <= bound: return Verdict('silent', f'{fn}, {way}: off by {gap:.3g}')
        if got.counts != want.counts: return Verdict('silent', f'{fn}, {way}: counted {got.counts}, not {want.counts}')
        if got.learns-want.learns: return Verdict('silent', f'{fn}, {way}: {got.learns-want.learns} learns')
    return Verdict('at the call', said) if said else Verdict('right', '')

def judge(names, change, bound, fn, seed=0):
    "What becomes of a network: `change(model)` changes it in place."
    plain = built(names, seed)
    changed = copy.deepcopy(plain)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        try: change(changed)
        except NAMED as e:
            if not str(e).startswith(fn): return Verdict('foreign', f'{type(e).__name__}: {e}')
            refused = Verdict('refused', str(e))
            after = compared(changed, plain, 1e-6, f'{fn} refused')
            return after if after.kind == 'silent' else refused
        except Exception as e: return Verdict('foreign', f'{type(e).__name__}: {e}')
        return compared(changed, plain, bound, fn)

def batches(): return [rows(64, 5), rows(64, 6)]

def relative(a, b):
    "Their distance; nan in both, as where training diverged, is none."
    both = a.isnan() & b.isnan()
    return ((a-b).masked_fill(both, 0).norm()/b.masked_fill(both, 0).norm().clamp(min=1e-30)).item()

def said_of(change, fn):
    "What calls it: `change()`, with an error by name as a verdict."
    try: change()
    except NAMED as e: return Verdict('refused' if str(e).startswith(fn) else 'foreign', f'{type(e).__name__}: {e}')
    except Exception as e: return Verdict('foreign', f'{type(e).__name__}: {e}')

def fitted(names, seed=0):
    "Does `reconstruct_` make what the network gives better, on the batches that it has?"
    plain = built(names, seed)
    model = copy.deepcopy(plain)
    R.quantize_model_(model, 3, None)
    x = torch.cat(batches())
    def error():
        states(model), states(plain)
        with torch.no_grad(): return relative(model(x), plain(x))
    before = error()
    if v := said_of(lambda: R.reconstruct_(model, batches(), teacher=plain), 'reconstruct_'): return v
    after = error()
    if after > 1.05*before: return Verdict('silent', f'reconstruct_: the error was {before:.3g} and is {after:.3g}')
    return Verdict('right', f'{before:.3g} to {after:.3g}')

def left(names, seed=0):
    "Is a network whose quantizers are taken off, weights as rounded, what it was in evaluation?"
    model,x = built(names, seed),rows()
    R.quantize_model_(model, 3, None)
    learned(model, .05)
    def given():
        states(model)
        with torch.no_grad(): return model(x)
    was = given()
    if v := said_of(lambda: R.nn.remove_rounding_(model, leave_rounded=True), 'remove_rounding_'): return v
    gap = relative(given(), was)
    return Verdict('right' if gap < 1e-5 else 'silent', f'remove_rounding_: off by {gap:.3g}')

def deployed(names, seed=0):
    "Does the deployed network give what the quantized one does, in evaluation?"
    model = built(names, seed)
    try: R.quantize_model_(model, calibrate=batches())
    except NAMED as e: return Verdict('refused', str(e))
    before = copy.deepcopy(model)
    states(model)
    if v := said_of(lambda: R.deploy_(model, rows()), 'deploy_'): return v
    return as_before(model, before, 'deploy_') or Verdict('right', '')

def as_before(run, plain, fn):
    "A verdict if what runs gives something else than the model does."
    most = 0.                                       # another number of rows may give small values, with the same codes
    for n in (32, 4):
        states(plain)
        if isinstance(run, nn.Module): states(run)
        with torch.no_grad(): got,want = run(rows(n)),plain(rows(n))
        most = max(most, want.square().mean().sqrt().item())
        gap = (got-want).square().mean().sqrt().item()/most
        if not gap <= .05: return Verdict('silent', f'{fn}: off by {gap:.3g}')

def in_runtime(names, seed=0):
    "Does the runtime give what the deployed network does, and the quantized one that was trained?"
    model = built(names, seed)
    try: R.quantize_model_(model, calibrate=batches())
    except NAMED as e: return Verdict('refused', str(e))
    learned(model, .01)
    states(model)
    if v := said_of(lambda: R.deploy_(model, rows()), 'deploy_'): return v
    states(model)
    with tempfile.TemporaryDirectory() as folder:
        file = f'{folder}/model.onnx'
        if v := said_of(lambda: R.to_onnx(model, rows(), file), 'to_onnx'): return v
        s = R.onnx_session(file)
        inputs = [i.name for i in s.get_inputs()]
        def run(x): return torch.from_numpy(s.run(None, {inputs[0]: x.numpy()})[0])
        try: return as_before(run, model, 'to_onnx') or Verdict('right', '')
        except Exception as e: return Verdict('foreign', f'{type(e).__name__}: {e}')

def learned(model, lr):
    "A few iterations; scales that learn go ways of their own."
    opt = torch.optim.SGD(model.parameters(), lr)
    for _ in range(3):
        opt.zero_grad()
        states(model)
        model.train()(rows()).square().mean().backward()
        opt.step()
    model.eval()

def with_grids_that_pass(model):
    "Inputs are quantized, and every grid lets all through: what is left is how the model computes."
    R.quantize_model_(model, None, calibrate=batches())
    for q in model.modules():
        if isinstance(q, R.Quantizer): q.forward = torch.clone

def changing(fn):
    "The judge of a function that changes a model in place."
    change,bound = CHANGES[fn]
    return lambda names, seed=0: judge(names, change, bound, fn, seed)

CHANGES = dict(
    quantize_model_=(with_grids_that_pass, 1e-4),
    equalize_=(partial(R.equalize_, example=rows()), 1e-4),
    smooth_=(partial(R.smooth_, calibrate=batches()), 1e-4),
    rotate_=(partial(R.rotate_, example=rows()), 1e-4),
)
JUDGES = {fn: changing(fn) for fn in CHANGES} | dict(reconstruct_=fitted, remove_rounding_=left, deploy_=deployed,
    to_onnx=in_runtime)
