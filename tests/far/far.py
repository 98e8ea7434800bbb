"""A device that has no float64, as Apple's MPS, made of Python: its tensors have values, which lie on the CPU. What
mixes it with the CPU or asks it for float64 is an error, as it would be there."""
import contextlib
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = 'far'

class _Module:
    "What torch asks of the module of a device."
    def is_available(self): return True
    def is_initialized(self): return True
    def current_device(self): return 0
    def device_count(self): return 1
    def _is_in_bad_fork(self): return False
    def manual_seed_all(self, seed): pass
    def get_rng_state(self, device=0): return torch.zeros(1, dtype=torch.uint8)
    def set_rng_state(self, state, device=0): pass
    def get_amp_supported_dtype(self): return [torch.bfloat16]

_setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
aten = torch.ops.aten
BRINGS = aten.copy_.default, aten._to_copy.default                    # what may meet tensors of both places
READS = aten._local_scalar_dense.default,

class Far(torch.Tensor):
    "A tensor of the device; `near` are its values."
    @staticmethod
    def __new__(cls, near):
        if near.dtype == torch.float64: raise TypeError(f'{NAME} has no float64')
        layout = dict(strides=near.stride(), storage_offset=near.storage_offset())
        far = torch.Tensor._make_wrapper_subclass(cls, near.shape, dtype=near.dtype, device=f'{NAME}:0', **layout)
        far.near = near
        return far
    def __init__(self, near): pass
    def __repr__(self): return f'Far({self.near})'
    @classmethod
    def __torch_function__(cls, f, types, args=(), kwargs=None):
        if f == torch.Tensor.data.__set__ and isinstance(args[1], Far): args[0].near = args[1].near
        with torch._C.DisableTorchFunctionSubclass(): return f(*args, **(kwargs or {}))
    @classmethod
    def __torch_dispatch__(cls, f, types, args=(), kwargs=None): return on_device(f, args, kwargs or {})

def near(t): return t.near if isinstance(t, Far) else t

def on_device(f, args, kwargs):
    "An operation on the values, and where its results lie."
    given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    far = any(isinstance(t, Far) for t in given)
    if f not in BRINGS and far and (lost := [t for t in given if t.ndim and not isinstance(t, Far)]):
        raise RuntimeError(f'{f}: a tensor on {NAME} and one on the CPU, {tuple(lost[0].shape)}')
    device = kwargs.get('device')
    if device is not None:
        far = torch.device(device).type == NAME
        if far and kwargs.get('dtype') == torch.float64: raise TypeError(f'{NAME} has no float64')
        kwargs = kwargs | dict(device='cpu')
    made = f(*tree_map(near, args), **tree_map(near, kwargs))
    if f in READS: return made
    known = {id(near(t)): t for t in given}
    def placed(t):
        if not isinstance(t, torch.Tensor): return t
        return known[id(t)] if id(t) in known else Far(t) if far else t
    return tree_map(placed, made)

class _Made(TorchFunctionMode):
    "Lists and numbers become a tensor on the CPU and are brought: C++ would ask a driver."
    def __torch_function__(self, f, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if f not in (torch.tensor, torch.as_tensor) or kwargs.get('device') is None: return f(*args, **kwargs)
        device = kwargs.pop('device')
        return f(*args, **kwargs).to(device)

class _Kept(TorchDispatchMode):
    def __torch_dispatch__(self, f, types, args=(), kwargs=None): return on_device(f, args, kwargs or {})

@contextlib.contextmanager
def device():
    "Inside, tensors can be made on the device and brought there."
    with _Made(), _Kept(): yield torch.device(NAME)
