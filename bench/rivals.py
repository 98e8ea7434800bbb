"""What people run today for the same maths as a function of ours: formulas from forums and papers, published code
written anew in torch, torch's own operations, and installed packages. Knobs as our defaults."""
import importlib
import importlib.util
import math
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
import torch
from torch.autograd import Function


@dataclass(frozen=True)
class Candidate:
    "A function of a tensor to be measured."
    name:str       # As the tables show it
    f:Callable     # Called as `f(x)`
    group:str      # The function of ours with the same maths
    by:str         # 'ours', 'formula', 'port', 'torch' or the name of a package
    same:str='both' # What agrees with the group off ties: 'both' value and slope, only 'value', only 'slope', or 'mean'

# --- formulas, as they are passed around
def tanh_staircase(x, a=5.):
    m,half = x.floor()+.5,torch.tanh(a/2) if isinstance(a, torch.Tensor) else math.tanh(a/2)
    return m + torch.tanh(a*(x-m))/(2*half)

class Learns:
    "A function with a knob that learns as well."
    def __init__(self, f, k): self.f,self.learns = f,torch.tensor(k, requires_grad=True)
    def __call__(self, x): return self.f(x, self.learns)

def scaled_sigmoid(x, b=10.):
    d = 1/(1+math.exp(b/2))
    n = x.floor()
    return n + (torch.sigmoid(b*(x-n-.5))-d)/(1-2*d)

def half_cosine(x):
    n = x.floor()
    return n + (1-torch.cos(math.pi*(x-n)))/2

def fourier_loop(x, terms):
    y = x
    for k in range(1, terms+1): y = y + (-1)**k*torch.sin(2*math.pi*k*x)/(math.pi*k)
    return y

def exp_sigmoid(x):
    e = torch.exp(1000*(x-.5))
    return e/(e+1)

def decimal(x): return x + (torch.round(x, decimals=1)-x).detach()
def on_tenths(x): return x + (.1*(x/.1).round()-x).detach()
def coin(x): return x + (torch.floor(x+torch.rand_like(x))-x).detach()
def bytes_of_torch(x): return torch.fake_quantize_per_tensor_affine(x, .1, 0, -128, 127)

def clipped(x):
    soft = x.clamp(-1, 1)
    return soft + (x.sign()-soft).detach()

def puzzle(x, s=10):
    n = torch.floor(s*x)
    d = 1.01*s*x - n
    return (s*x - d + n + torch.where(d >= .5, 1, 0))/s

class ratio(Function):
    "shok's SoftRound: the gradient times x/round(x)."
    @staticmethod
    def forward(ctx, x):
        n = torch.round(x)
        ctx.save_for_backward(torch.where(n != 0, x/n, torch.where(x == 0, 1., 0.)).to(x.dtype))
        return n
    @staticmethod
    def backward(ctx, g): return g*ctx.saved_tensors[0]

class scaled(Function):
    "shok's ScaleGrad: the gradient over its largest magnitude."
    @staticmethod
    def forward(ctx, x): return x.clone()
    @staticmethod
    def backward(ctx, g):
        m = g.abs().max()
        return torch.where(m > 0, g/m, g)

# --- the soft rounding of TensorFlow Compression, operation by operation
def tfc_soft_round(x, alpha=5., eps=1e-3):
    alpha = torch.as_tensor(alpha, dtype=x.dtype, device=x.device)
    a,m = alpha.clamp(min=eps),torch.floor(x)+.5
    return torch.where(alpha < eps, x, m + torch.tanh(a*(x-m))/(torch.tanh(a/2)*2))

def tfc_inverse(y, alpha=5., eps=1e-3):
    alpha = torch.as_tensor(alpha, dtype=y.dtype, device=y.device)
    a,m = alpha.clamp(min=eps),torch.floor(y)+.5
    r = torch.atanh((y-m)*(torch.tanh(a/2)*2))/a
    return torch.where(alpha < eps, y, m + r.clamp(-.5, .5))

def tfc_conditional_mean(z): return tfc_inverse(z-.5)+.5

def rivals():
    "Those that need torch alone."
    rows = (
        ('x + (round(x)-x).detach()', lambda x: x + (x.round()-x).detach(), 'round_ste', 'formula'),
        ('x + (s*round(x/s)-x).detach()', on_tenths, 'round_ste(step=.1)', 'formula'),
        ('torch.round', torch.round, 'round_ste', 'torch', 'value'),
        ('shok SoftRound', ratio.apply, 'ratio_round', 'port'),
        ('clamp(x, -1, 1), sign in detach', clipped, 'clipped_sign', 'formula'),
        ('TFC soft_round', tfc_soft_round, 'soft_round', 'port'),
        ('m + tanh(α(x-m))/(2tanh(α/2))', tanh_staircase, 'soft_round', 'formula'),
        ('tanh staircase, alpha learns', Learns(tanh_staircase, 5.), 'soft_round(alpha learns)', 'formula'),
        ('TFC soft_round_inverse', tfc_inverse, 'soft_round_inverse', 'port'),
        ('TFC soft_round_conditional_mean', tfc_conditional_mean, 'soft_round_conditional_mean', 'port'),
        ('A(σ(B(x-m))-D)', scaled_sigmoid, 'logistic_round', 'formula'),
        ('exp(z)/(exp(z)+1)', exp_sigmoid, 'sigmoid_round', 'formula'),
        ('x - sin(2πx)/2π', lambda x: x - torch.sin(2*math.pi*x)/(2*math.pi), 'sine_round', 'formula'),
        ('(1-cos(πx))/2 per cell', half_cosine, 'cosine_round', 'formula'),
        ('sum of 5 sin(2πkx)', lambda x: fourier_loop(x, 5), 'fourier_round', 'formula'),
        ('sum of 10 sin(2πkx)', lambda x: fourier_loop(x, 10), 'fourier_round(terms=10)', 'formula'),
        ('round(x) + (x-round(x))**3', lambda x: x.round() + (x-x.round())**3, 'cubic_round', 'formula'),
        ('clamp(1e4*(x-.499), 0, 1)', lambda x: (1e4*(x-.499)).clamp(0, 1), 'ramp_round', 'formula'),
        ('round(x, decimals=1) in detach', decimal, 'decimal_ste', 'formula'),
        ('the puzzle', puzzle, 'diff_round', 'formula'),
        ('floor(x+rand) in detach', coin, 'stochastic_round', 'formula', 'mean'),
        ('x + rand - ½', lambda x: x + torch.rand_like(x) - .5, 'uniform_noise', 'formula', 'mean'),
        ('½x + ½x.detach()', lambda x: .5*x + .5*x.detach(), 'scale_grad', 'formula'),
        ('shok ScaleGrad', scaled.apply, 'normalize_grad', 'port'),
        ('torch.fake_quantize', bytes_of_torch, 'fake_quantize', 'torch'))
    return [Candidate(*r) for r in rows]

# --- packages: name on the index, name in the tables, group, module, and how to get the function out of it
def _torchao_fake(m):
    zero = torch.zeros((), dtype=torch.int32)
    def fake(x):
        scale = torch.full((), .1, device=x.device)
        return m._fake_quantize_affine(x, x.shape, scale, zero.to(x.device), torch.int8, -128, 127)
    return fake

def _snntorch_ste(m): return m.straight_through_estimator()

STE,FSQ = 'brevitas.function.ops_ste','vector_quantize_pytorch.finite_scalar_quantization'
TORCHAO,JPEG = 'torchao.quantization.quant_primitives','kornia.enhance.jpeg'
PACKAGES = (
    ('compressai', 'quantize_ste', 'round_ste', 'compressai.ops', lambda m: m.quantize_ste),
    ('brevitas', 'round_ste', 'round_ste', STE, lambda m: m.round_ste),
    ('vector-quantize-pytorch', 'round_ste', 'round_ste', FSQ, lambda m: m.round_ste),
    ('torchao', '_Round', 'round_ste', TORCHAO, lambda m: m._Round.apply),
    ('brevitas', 'floor_ste', 'floor_ste', STE, lambda m: m.floor_ste),
    ('brevitas', 'ceil_ste', 'ceil_ste', STE, lambda m: m.ceil_ste),
    ('brevitas', 'round_to_zero_ste', 'trunc_ste', STE, lambda m: m.round_to_zero_ste),
    ('brevitas', 'binary_sign_ste', 'sign_ste', STE, lambda m: m.binary_sign_ste),
    ('snntorch', 'straight_through_estimator', 'sign_ste', 'snntorch.surrogate', _snntorch_ste, 'slope'),
    ('kornia', 'polynomial_rounding', 'cubic_round', JPEG, lambda m: m._differentiable_polynomial_rounding),
    ('torchao', '_fake_quantize_affine', 'fake_quantize', TORCHAO, _torchao_fake),
)

# --- the same for grids that are not even: the group is a row of `bench.grids`
def _torchao_mx(m):
    kind = torch.float4_e2m1fn_x2
    def quantized(x):
        scale,codes = m.to_mx(x.detach(), kind, 32)
        return m.to_dtype(codes, scale, kind, 32, x.dtype)
    return quantized

def _torchao_nvfp4(m):
    scale = torch.tensor(.01)
    def quantized(x):
        return m.NVFP4Tensor.to_nvfp4(x.detach()[None], per_tensor_scale=scale).dequantize(x.dtype)[0]
    return quantized

def _brevitas_e4m3(m):
    layer = importlib.import_module('brevitas.nn').QuantIdentity(m.Fp8e4m3OCPAct)
    return layer.eval()

def _brevitas_mx(m):
    bits = dict(bit_width=4, exponent_bit_width=2, mantissa_bit_width=1)
    layer = importlib.import_module('brevitas.nn').QuantIdentity(m.MXFloat8e4m3Act, group_dim=-1, **bits)
    return lambda x: layer(x[None])[0]

def _qtorch_e4m3(m):
    return m.quantizer(importlib.import_module('qtorch').FloatingPoint(4, 3), None)

MX,E4M3 = 'mx_quantize, e2m1','float_round, e4m3'
ON_GRIDS = (
    ('brevitas', 'Fp8e4m3OCPAct', E4M3, 'brevitas.quant.float_quant_ocp', _brevitas_e4m3),
    ('qtorch', 'quantizer', E4M3, 'qtorch.quant', _qtorch_e4m3, 'value'),
    ('torchao', 'to_mx, to_dtype', MX, 'torchao.prototype.mx_formats.mx_tensor', _torchao_mx, 'value'),
    ('brevitas', 'MXFloat8e4m3Act, of 4 bits', MX, 'brevitas.quant.mx_quant_ocp', _brevitas_mx),
    ('torchao', 'NVFP4Tensor', 'nvfp4_quantize', 'torchao.prototype.mx_formats.nvfp4_tensor', _torchao_nvfp4, 'value'),
)

def why(e):
    "An exception in a line, without the paths of this machine."
    first = str(e).partition('\n')[0]
    return type(e).__name__ + ('' if '/' in first else f': {first}')

def _load(module):
    "The module; if its package wants more than is installed, without the package's `__init__`."
    try: return importlib.import_module(module)
    except ImportError:
        name = module.partition('.')[0]
        if not (spec := importlib.util.find_spec(name)): raise
        sys.modules[name] = package = types.ModuleType(name)
        package.__path__ = list(spec.submodule_search_locations)
        return importlib.import_module(module)

def peers(packages=PACKAGES):
    "`(candidates, versions, missing)`: those of the packages that this Python can import; why it cannot the others."
    found,versions,missing = [],{},{}
    for package,name,group,module,get,*same in packages:
        try: f = get(_load(module))
        except Exception as e:                             # a package may fail in any way
            missing[package] = why(e)
            continue
        versions[package] = version(package)
        found.append(Candidate(f'{package} {name}', f, group, package, *same))
    return found,versions,missing
