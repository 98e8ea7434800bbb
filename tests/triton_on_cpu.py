"""The Triton code that Inductor writes for a GPU, and its numbers, on a machine without one. `backend` makes the code;
`calculated` runs it, where each operation of Triton is the one that torch has for it. So the arithmetic of the code is
what is seen, and not what a GPU makes of it: its `exp` is another, its `/` may be 2 ulp off, a*b+c may be one step."""
import ast
import math
from contextlib import ExitStack, nullcontext
from types import SimpleNamespace
from unittest.mock import patch
import torch
from torch._inductor import config, scheduler
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.compile_fx import compile_fx
from torch._inductor.debug import DebugContext
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.virtualized import V

H100 = dict(type='cuda', index=0, multi_processor_count=132, cc=90, major=9, regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048, warp_size=32)

def backend(made, monkeypatch):
    """A backend of `torch.compile`: `made` gets the source that Inductor writes for a GPU, and the graph, and returns
    what runs. Nothing is compiled. What Inductor asks a GPU for is given: an H100, and that Triton works. Folding
    constants runs them, so it is off."""
    monkeypatch.setattr(DeviceProperties, 'create', lambda device: DeviceProperties(**H100))
    monkeypatch.setattr(torch.cuda, 'current_device', lambda: 0)
    monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda device=None: (9, 0))
    monkeypatch.setattr(scheduler, 'has_triton', lambda **kw: True)
    monkeypatch.setattr('torch.utils._triton.triton_hash_with_backend', lambda: 'none')
    def write(gm, inputs, **kw):
        mode = torch._guards.detect_fake_mode(inputs)
        graph = GraphLowering(gm, example_inputs=inputs, shape_env=mode.shape_env, is_inference=True)
        with V.set_graph_handler(graph), V.set_fake_mode(mode), DebugContext():
            graph.run(*inputs)
            return made(graph.codegen()[0].value, gm)
    def compiled(gm, inputs):
        with config.patch(joint_graph_constant_folding=False): return compile_fx(gm, inputs, inner_compile=write)
    return compiled

# --- numbers
class Pointer:
    "A place in memory, or many."
    def __init__(self, memory, at=0): self.memory,self.at = memory,torch.as_tensor(at)
    def __add__(self, more): return Pointer(self.memory, self.at+more)
    def within(self, mask, *others):
        "The places, the mask and others in one shape; a place outside the memory is an error, also a negative one."
        at,mask,*others = torch.broadcast_tensors(self.at, torch.as_tensor(mask), *others)
        assert not (mask & ((at < 0) | (at >= len(self.memory)))).any(), 'outside'
        return at,mask,*others

def load(p, mask=True, other=math.nan, **hints):
    "What the mask keeps out is nan or 0, which should reach no result."
    at,mask = p.within(mask)
    read = p.memory[torch.where(mask, at, 0)]
    return torch.where(mask, read, other if read.is_floating_point() else 0)

def store(p, value, mask=True, **hints):
    at,mask,value = p.within(mask, torch.as_tensor(value))
    p.memory[at[mask]] = value[mask].to(p.memory.dtype)

def full(shape, value, dtype): return torch.full(shape, value, dtype=dtype)

def larger(a, b, nan=None): return torch.where((a > b) | (a != a), a, b)             # as in torch's triton_helpers
def smaller(a, b, nan=None): return torch.where((a < b) | (a != a), a, b)

def fma(a, b, c):
    "a*b+c, rounded once but for the rarest ties; of doubles twice."
    return (a.double()*b.double() + c.double()).to(torch.promote_types(a.dtype, torch.promote_types(b.dtype, c.dtype)))

class Torch:
    "Names that are not here are torch's, dtypes among them."
    def __getattr__(self, name): return getattr(torch, name)

class Language(Torch):
    "`tl` in one program."
    constexpr,int1 = None,torch.bool
    load,store,full,fma,sqrt_rn,div_rn = map(staticmethod, (load, store, full, fma, torch.sqrt, torch.div))
    maximum,minimum,PropagateNan = staticmethod(larger),staticmethod(smaller),SimpleNamespace(ALL=True)
    def __init__(self, place): self.program_id = place.__getitem__
    def arange(self, start, end): return torch.arange(start, end, dtype=torch.int32)
    def broadcast_to(self, t, shape): return t.expand(shape)

class Functions(Torch):
    "`libdevice` and `tl_math`."
    nearbyint,mul_rn,fma = map(staticmethod, (torch.round, torch.mul, fma))

helpers = SimpleNamespace(maximum=larger, minimum=smaller)
DTYPES = dict(fp32=torch.float32, fp64=torch.float64, i32=torch.int32, i64=torch.int64)
BLOCK = 64

def run(kernel, args):
    "All programs of a kernel, one after the other."
    f, = [n for n in ast.parse(kernel).body if isinstance(n, ast.FunctionDef)]
    kinds, = [ast.literal_eval(v) for d in f.decorator_list for n in ast.walk(d) if isinstance(n, ast.Dict)
        for k,v in zip(n.keys, n.values) if getattr(k, 'value', None) == 'signature']
    f.decorator_list = []
    place = [0]
    tl = Language(place)
    scope = dict(triton=SimpleNamespace(language=tl), tl=tl, libdevice=Functions(), tl_math=Functions(),
        triton_helpers=helpers)
    exec(compile(ast.Module([f], []), f.name, 'exec'), scope)
    given = {k: argument(kind, v) for (k,kind),v in zip(kinds.items(), args)}
    for place[0] in range(math.ceil(given['xnumel']/BLOCK)): scope[f.name](**given, XBLOCK=BLOCK)

def argument(kind, v):
    "Memory for `*fp32`, a number in single precision for `fp32`."
    return Pointer(flat(v)) if kind[0] == '*' else torch.tensor(v, dtype=DTYPES[kind])

def flat(t):
    "The memory from where a tensor begins."
    start = t.storage_offset()
    return t.as_strided((t.untyped_storage().nbytes()//t.element_size() - start,), (1,), start)

def calculated(source, args):
    "What `call` of a source returns, with tensors on the CPU in the place of those on a GPU."
    def triton(self, name, kernel, **kw): return SimpleNamespace(run=lambda *args, stream: run(kernel, args))
    scope = {}
    with ExitStack() as stack:
        def put(*place): stack.enter_context(patch.object(*place))
        put(AsyncCompile, 'triton', triton)
        put(torch.cuda, '_DeviceGuard', nullcontext)
        put(torch.cuda, 'set_device', int)
        exec(source, scope)
        scope.update(get_raw_stream=int, empty_strided_cuda=scope['empty_strided_cpu'])
        return scope['call']([*args])
