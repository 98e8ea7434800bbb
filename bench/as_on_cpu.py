"""Every estimator on another device beside the CPU: pytest bench/as_on_cpu.py, with SHOK_DEVICE.

What is on the grid is equal bit for bit. A curve is a few functions of torch, which differ in their last digits from
device to device: 32 ulp of the larger of 1 and the value, and slopes to 1e-4 of the largest; of half precision 2 and
4 ulp. Seeded noise is integers, and equal bit for bit."""
import os
import sys
from functools import partial
from pathlib import Path
import pytest
import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent/'tests')]
from estimators import on_grid, seeded, variants  # noqa: E402 (found by the line above)
import shok_nb as R  # noqa: E402 (found by the line above)

DEVICE = os.environ.get('SHOK_DEVICE', 'cuda')
DTYPES = torch.float32,torch.float64,torch.bfloat16,torch.float16

def values(dtype):
    "Ties, both sides of them, numbers near 0, large ones, infinities and nan, and so many that pieces are cut."
    few = torch.tensor([0., -0., .5, 1.5, -2.5, .25, -1.7, 1e-6, 300., -300., *map(float, ('inf', '-inf', 'nan'))])
    many = torch.linspace(-4, 4, 70_001, dtype=torch.float64)
    return torch.cat([few.double(), many]).to(dtype)

def found(f, x, device):
    "Values and slopes, on the CPU."
    leaf = x.to(device).requires_grad_()
    y = f(leaf)
    g, = torch.autograd.grad(y, leaf, torch.ones_like(y))
    return y.detach().cpu(),g.cpu()

def check(r, f, dtype):
    "Raises unless both are those of the CPU."
    x = values(dtype)
    (y,g),(z,h) = found(f, x, DEVICE),found(f, x, 'cpu')
    eps,half = torch.finfo(dtype).eps,dtype in (torch.float16, torch.bfloat16)
    if on_grid(r, f) or r.random: assert torch.equal(y.nan_to_num(7e4), z.nan_to_num(7e4)), r.name
    else:
        finite = z.isfinite()
        assert torch.equal(y[~finite].nan_to_num(7e4), z[~finite].nan_to_num(7e4)), r.name
        y,z = y[finite].double(),z[finite].double()
        assert ((y-z).abs() <= (2 if half else 32)*eps*z.abs().clamp(min=1)).all(), r.name
    g,h = g.double().nan_to_num(7e4),h.double().nan_to_num(7e4)
    most = h[13:].abs().max().clamp(min=1)
    assert ((g-h).abs() <= (4*eps if half else 1e-4)*most).all(), r.name

@pytest.mark.parametrize('dtype', DTYPES, ids=lambda d: str(d).partition('.')[2])
@pytest.mark.parametrize('r, f', variants())
def test_as_on_cpu(r, f, dtype): check(r, f, dtype)

@pytest.mark.parametrize('r, f', seeded())
def test_noise_as_on_cpu(r, f):
    "The seed lies where the values are."
    def there(x): return f(x, seed=f.keywords['seed'].to(x.device))
    x = values(torch.float32)
    (y,_),(z,_) = found(there, x, DEVICE),found(there, x, 'cpu')
    if r.name in ('noisy_soft_round', 'sga_round'):                     # a curve after the noise
        assert torch.allclose(y, z, rtol=1e-5, atol=1e-5, equal_nan=True)
    else: assert torch.equal(y.nan_to_num(7e4), z.nan_to_num(7e4))

@pytest.mark.parametrize('name', ('round_ste', 'soft_round', 'sigmoid_sum_round', 'stochastic_round'))
def test_in_a_graph(name):
    "A training step in a CUDA graph, replayed on new values: gradients are those without a graph."
    if DEVICE != 'cuda': pytest.skip('there are no graphs of the CPU')
    f = getattr(R, name)
    if name == 'stochastic_round': f = partial(f, seed=torch.tensor(3, device=DEVICE))
    x = torch.randn(4096, device=DEVICE, requires_grad=True)
    def step(): return torch.autograd.grad(f(x).square().sum(), x)[0]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3): step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph): g = step()
    with torch.no_grad(): x.normal_()
    graph.replay()
    assert torch.allclose(g, step(), rtol=1e-5, atol=1e-6)
