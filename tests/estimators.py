"Every estimator the tests know, made from the catalog: a new row brings its own tests."
from functools import partial
import pytest, torch
from shok_nb import round_ste
from shok_nb.catalog import catalog, row

FLOATS = torch.float16,torch.bfloat16,torch.float32,torch.float64
HALVES = torch.float16,torch.bfloat16

def variants(keep=lambda r: True):
    "Each row as it is, each smooth one with `hard=True` too, and the tie rules: `(row, f)`."
    out = []
    for r in catalog:
        if r.random or not keep(r): continue
        out.append(pytest.param(r, r.f, id=r.name))
        if r.smooth: out.append(pytest.param(r, partial(r.f, hard=True), id=f'{r.name}-hard'))
    if keep(r := row(round_ste)): out += [pytest.param(r, partial(round_ste, ties=t), id=f'round_ste-{t}') for t in r.choices[0].options[1:]]
    return out

def on_grid(r, f): return r.on_grid or getattr(f, 'keywords', {}).get('hard', False)

def slope(f, x, **kw):
    "What backward multiplies by, in eager mode."
    leaf = x.detach().clone().requires_grad_()
    return torch.autograd.grad(f(leaf, **kw).sum(), leaf)[0]

def same(a, b):
    "Equal bit for bit: nan is nan, and -0 is not 0."
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.isnan(), b.isnan()) \
        and torch.equal(a.nan_to_num(7.), b.nan_to_num(7.)) and torch.equal(a.signbit() | a.isnan(), b.signbit() | b.isnan())

def near(a, b, ulps=8):
    """Equal to a few units in the last place of 1 or of the value: torch's vector and scalar code differ by that much,
    and which of them computes an element depends on the layout."""
    if (a.dtype, a.shape) != (b.dtype, b.shape) or not torch.equal(a.isnan(), b.isnan()): return False
    eps = torch.finfo(a.dtype).eps
    a,b = a.double().nan_to_num(7.),b.double().nan_to_num(7.)
    return bool(((a == b) | ((a-b).abs() <= ulps*eps*b.abs().clamp(min=1))).all())

def generator(seed=0): return torch.Generator().manual_seed(seed)
