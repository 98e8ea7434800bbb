"Bad input: the type of the error and a message that names the function, the argument, what came and what to do."
import math
import numpy as np
import pytest, torch
from estimators import variants
from shok_nb import round_ste, soft_round, straight_through
from shok_nb.catalog import catalog, row
from shok_nb.functions import PassRound

X = torch.zeros(2, 3)
BAD = [([1.5], r'must be a torch\.Tensor, got list; use torch\.as_tensor'), (1.5, 'got float'), (None, 'got NoneType'), (np.ones(2), 'got ndarray'),
    (torch.arange(3), r'got torch\.int64; it is on the grid already; use (x|y|z)?.*float\(\)'), (torch.ones(2, dtype=torch.bool), r'got torch\.bool'),
    (torch.ones(2, dtype=torch.int8), r'got torch\.int8'), (torch.ones(2)*1j, r'got torch\.complex64; round .*\.real and .*\.imag'),
    (torch.ones(2).to(torch.float8_e4m3fn), r'got torch\.float8_e4m3fn; use .*\.float\(\)'),
    (torch.quantize_per_tensor(torch.ones(2), .1, 0, torch.qint8), r'got torch\.qint8; use .*\.dequantize\(\)'),
    (torch.eye(2).to_sparse(), r'must be dense, got layout torch\.sparse_coo; use .*\.to_dense\(\)'), (torch.eye(2).to_sparse_csr(), r'torch\.sparse_csr')]

@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('bad, message', BAD, ids=lambda b: '' if isinstance(b, str) else type(b).__name__ + str(getattr(b, 'dtype', '')))
@pytest.mark.parametrize('r, f', variants())
def test_input(r, f, bad, message):
    with pytest.raises(TypeError, match=f'^{r.name}: .*{message}'): f(bad)

KNOBS = [(True, TypeError, 'must be a number or a torch.Tensor, got bool'), ('5', TypeError, 'got str'), (None, TypeError, 'got NoneType'),
    (1j, TypeError, 'got complex'), (math.nan, ValueError, 'got nan'), (torch.ones(2, dtype=torch.int64), TypeError, r'got torch\.int64'),
    (torch.ones(2), ValueError, r'of shape \(2,\) does not broadcast with x of shape \(2, 3\)'), (torch.ones(3, device='meta'), ValueError, 'is on meta and x on cpu; use')]

def numbers(r): return [k.name for k in r.knobs if not isinstance(k.default, int)] + ['step', 'offset']*r.grid

@pytest.mark.parametrize('bad, error, message', KNOBS, ids=lambda b: '' if isinstance(b, str) and len(b) > 5 else str(b)[:12])
@pytest.mark.parametrize('r', [r for r in catalog if numbers(r)], ids=lambda r: r.name)
def test_knobs_and_grid(r, bad, error, message):
    for arg in numbers(r):
        with pytest.raises(error, match=f'^{r.name}: {arg} .*{message}'): r.f(X, **{arg: bad})

@pytest.mark.parametrize('bad', (True, '5', None, 2.5, math.nan, torch.tensor(3)), ids=str)
@pytest.mark.parametrize('r', [r for r in catalog if any(isinstance(k.default, int) for k in r.knobs)], ids=lambda r: r.name)
def test_whole_knobs(r, bad):
    k = next(k for k in r.knobs if isinstance(k.default, int))
    with pytest.raises(TypeError, match=f'^{r.name}: {k.name} must be an int, got {type(bad).__name__}'): r.f(X, **{k.name: bad})
    with pytest.raises(ValueError, match=f'^{r.name}: {k.name} must be .*got -1000'): r.f(X, **{k.name: -1000})

@pytest.mark.parametrize('r', [r for r in catalog if r.grid], ids=lambda r: r.name)
def test_grid_range(r):
    for step in (0, -1., math.inf):
        with pytest.raises(ValueError, match=rf'^{r.name}: step must be in \(0, inf\), got'): r.f(X, step=step)
    with pytest.raises(ValueError, match=rf'^{r.name}: offset must be in \(-inf, inf\), got inf'): r.f(X, offset=math.inf)

def test_own_messages():
    with pytest.raises(ValueError, match=r'^soft_round: alpha must be in \[0, inf\], got -0.5'): soft_round(X, -.5)
    with pytest.raises(ValueError, match="^round_ste: ties must be one of even, away, zero, up, down, got 'half'"): round_ste(X, ties='half')
    with pytest.raises(ValueError, match=r'^straight_through: hard is torch.float32 of shape \(2, 3\), soft is torch.float64'): straight_through(X, X.double())
    with pytest.raises(ValueError, match="^row: 'round' is not in the catalog"): row(torch.round)
    with pytest.raises(TypeError, match='^round_ste: x must be'): PassRound.apply([1.])

def test_errors_inside_compile():
    "The same message, wherever it is raised."
    with pytest.raises(Exception, match='alpha must be in'): torch.compile(lambda x: soft_round(x, -1.), backend='eager')(X)

def test_numbers_of_any_kind():
    "Whatever Python or numpy calls a number is one."
    from fractions import Fraction
    for a in (5, np.float32(5), np.float64(5), np.int64(5), Fraction(5)): assert torch.equal(soft_round(X+.3, a), soft_round(X+.3, 5.))
