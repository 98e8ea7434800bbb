"""What a GPU would be asked to compute, computed on a CPU: each formula runs as the Triton kernel that Inductor writes
for it, and gives what eager code gives. Wants a torch built for CUDA, as test_fake_cuda.py does. A test takes seconds,
as it writes two kernels."""
from functools import partial
import pytest
import torch
from estimators import back, near, on_grid, same, seeded, variants
from test_fake_cuda import NoReading, pytestmark  # noqa: F401 (when these tests run)
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
import shok_nb as R
from shok_nb.engine.grid import is_default_grid
from shok_nb.engine.pieces import fused_kernel, wide_dtype

# Zeros, ties, integers, what is not finite, what is large and what is not normal; then the seed is fixed, so that a
# failure comes again, and any seed would do.
SPECIAL = 0., -0., .5, -.5, 1.5, 2.5, -2.5, 1., -3., torch.inf, -torch.inf, torch.nan, 1e10, -1e10, 1e-40, -1e-40
SHAPE = 3,100

def drawn(seed): return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))

def inputs(dtype):
    "Numbers, and a gradient for each."
    x = 5*drawn(0)
    x.view(-1)[:len(SPECIAL)] = torch.tensor(SPECIAL)
    return x.to(dtype),drawn(1).to(dtype)

def memory(t): return t.untyped_storage()._cdata

def on_gpu(t):
    "A fake of a tensor on a GPU; a number stays on the CPU."
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device='cuda' if t.ndim else 'cpu')

@pytest.fixture
def as_kernels(monkeypatch):
    """`as_kernels(f, *args, **kw)`: what a function returns if each formula is the kernel that a GPU would run, and the
    sources of these kernels; `edit` may change a source. Dynamo and Inductor see fake CUDA tensors, whose numbers
    are put in their place when the source runs."""
    from triton_on_cpu import backend, calculated
    def kernel(m, written, edit, op, job, needs, f, x, rest):
        real = {}
        def made(source, gm):
            written.append(source := edit(source))
            def call(args):
                args = [real.get(memory(a), a.constant) if isinstance(a, FakeTensor) else a for a in args]
                with unset_fake_temporarily(): return calculated(source, args)
            call._boxed_call = True
            return call
        compiled = fused_kernel(f, op.name+job, not is_default_grid(*rest[:2]), backend(made, m))
        def fused(to, ts, knobs):
            number = partial(torch.tensor, dtype=wide_dtype(to.dtype))
            given = to,*ts,*[number(k) if isinstance(k, (int, float)) else k for k in knobs]
            with NoReading():
                fakes = [*map(on_gpu, given)]
                real.clear()
                real.update(zip(map(memory, fakes), given))
                return compiled(fakes[0], fakes[1:1+len(ts)], fakes[1+len(ts):])
        return fused
    def run(f, *args, edit=lambda source: source, **kw):
        written = []
        with monkeypatch.context() as m:
            m.setattr('shok_nb.engine.core._kernel', partial(kernel, m, written, edit))
            m.setattr('shok_nb.engine.core.is_small', lambda x: False)
            m.setattr('shok_nb.engine.pieces._FUSED', ('cpu',))
            return f(*args, **kw),written
    return run

GRID = dict(step=torch.tensor([[.5], [.1], [3.]]), offset=.3)
CASES = {'float32': (torch.float32, {}), 'bfloat16': (torch.bfloat16, {}), 'grid': (torch.float32, GRID)}

def rows():
    "Each with what it is called with; a grid for those that take one."
    return [pytest.param(*p.values, *c, id=f'{p.id}-{name}') for p in variants()+seeded() for name,c in CASES.items()
        if p.values[0].grid or not c[1]]

@pytest.mark.filterwarnings('error:.*runs unfused')
@pytest.mark.parametrize('r, f, dtype, grid', rows())
def test_numbers(r, f, dtype, grid, as_kernels):
    """Values on the grid are the same bits. Others and slopes may differ by a few roundings: a kernel has knobs in
    float32 where eager code has Python's floats, and rounds a product and its sum at once. Those are less than a last
    bit of bfloat16, which they move by one at most."""
    x,g = inputs(dtype)
    f = partial(f, **grid)
    (y,slope),sources = as_kernels(back, f, x, g=g)
    want,want_slope = back(f, x, g=g)
    ulps = 512 if r.f is R.noisy_soft_round else 8  # its second curve, steep, starts where the first one rounded
    few = partial(near, ulps=ulps if dtype == torch.float32 else 1)
    assert (same if on_grid(r, f) else few)(y, want)
    assert few(slope, want_slope)
    assert sources or not grid                      # elsewhere it may be one operation of torch's own
    for s in sources: assert s.count('async_compile.triton(') == 1 == s.count('.run(')

@pytest.mark.parametrize('f, old, new, kept', [(R.sign_ste, 2., 2.0001, 1), (R.cubic_round, 3., 3.0001, 0)])
def test_a_changed_constant_is_noticed(f, old, new, kept, as_kernels):
    "In the value or in the slope; the other one, which is `kept`, does not change."
    x,g = inputs(torch.float32)
    old,new = (f'[1], {c}, tl' for c in (old, new))
    got,sources = as_kernels(back, f, x, g=g, edit=lambda s: s.replace(old, new))
    assert [s.count(new) for s in sources if new in s] == [1]
    alike = [near(a, b) for a,b in zip(got, back(f, x, g=g))]
    assert alike[kept] and not alike[1-kept]
