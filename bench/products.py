"""What low precision costs here: forward and backward of a rounded Linear beside those of float32, and a step of
`RoundedOptimizer` beside that of torch's foreach AdamW, and of torchao's where it is installed.

    .venv/bin/python bench/products.py
    .venv-peers/bin/python bench/products.py        # adds the rows of torchao

bench/products.json holds a row for each processor, recipe and way: the processor time of one thread over that of
float32, the median of calls that take turns, and the milliseconds of both. Of the way 'medium' the products of the
recipe, and they alone, are made with torch.set_float32_matmul_precision('medium'); for a step the bytes for each number
that are kept and that the step adds. What is done already is not done again, and rows of other processors stay; remove
those of this one to measure anew."""
import importlib.util
import json
import os
import time
from functools import partial
from pathlib import Path

os.environ.setdefault('OMP_NUM_THREADS', '1')               # before torch is imported
import torch  # noqa: E402
import torch.distributed.tensor  # noqa: E402, F401 (torch imports it at the first trace)
from jobs import run  # noqa: E402
import shok_nb as R  # noqa: E402
from bench import Cpu, processor  # noqa: E402
from shok_nb.engine.pieces import give_all_back  # noqa: E402

TABLE = Path(__file__).with_name('products.json')
SIZE,WARM,CALLS = 1024,15,15
COMPILED = 'mxfp8', 'nvfp4_nearest', 'mxfp4_stochastic', 'nvfp4', 'tetrajet_v2', 'quartet_ii'
ADAMW = partial(torch.optim.AdamW, lr=1e-3, weight_decay=.1)

def raced(f, other):
    """Median of the ratios of two calls that take turns, and the least milliseconds of each: after some, as formulas
    are replayed from the hundredth piece on, and a process keeps what memory it needs."""
    times = []
    for i in range(WARM+CALLS):
        pair = []
        for call in (f, other):
            begin = time.process_time()
            call()
            pair.append(1000*(time.process_time()-begin))
        if i >= WARM: times.append(pair)
    ratios = sorted(a/b for a,b in times)
    return ratios[len(ratios)//2],*map(min, zip(*times))

def step_of(layer, compiled):
    "Forward and backward of a batch."
    g = torch.Generator().manual_seed(0)
    x,slopes = (torch.randn(SIZE, SIZE, generator=g) for _ in range(2))
    x.requires_grad_()
    f = torch.compile(layer) if compiled else layer
    return lambda: torch.autograd.grad(f(x), (x, layer.weight), slopes)

def in_medium(f):
    "`f`, with products of float32 as a CPU makes them fast."
    def call():
        torch.set_float32_matmul_precision('medium')
        try: return f()
        finally: torch.set_float32_matmul_precision('highest')
    return call

def layers(recipe, way):
    torch.manual_seed(0)
    plain,low = (torch.nn.Linear(SIZE, SIZE, bias=False) for _ in range(2))
    R.low_precision_(low, recipe)
    one,other = (step_of(layer, way == 'compiled') for layer in (low, plain))
    return in_medium(one) if way == 'medium' else one,other

def stepped(dtype, make):
    "A step of 16 matrices: parameters and gradients of `dtype`."
    g = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(512, 512, generator=g).to(dtype)) for _ in range(16)]
    for p in params: p.grad = torch.randn(p.shape, generator=g).to(dtype)
    return make(params)

def memory(optimizer):
    "Bytes for each number: of parameter and states, and the most that a step adds (what NumPy holds is not seen)."
    params = [p for g in optimizer.param_groups for p in g['params']]
    held = params + [v for p in params for v in optimizer.state[p].values() if isinstance(v, torch.Tensor)]
    give_all_back()                                         # or what the step before has left is not counted
    held,added = sum(t.nbytes for t in held),Cpu().peak(optimizer.step)
    return [round(n/sum(p.numel() for p in params), 1) for n in (held, added)]

def torchao(params):
    from torchao.optim import _AdamW
    return _AdamW(params, lr=1e-3, weight_decay=.1, bf16_stochastic_round=True)

def ours(states=None, **kw): return partial(R.RoundedOptimizer, make=partial(ADAMW, **kw), states=states)

STEPS = {
    'bfloat16 parameters': (torch.bfloat16, ours(foreach=True)),
    'bfloat16 parameters, fused': (torch.bfloat16, ours(fused=True)),
    'bfloat16 parameters and states': (torch.bfloat16, ours(torch.bfloat16, foreach=True)),
    'bfloat16 parameters and states, fused': (torch.bfloat16, ours(torch.bfloat16, fused=True)),
    'float32 parameters': (torch.float32, ours(foreach=True)),
    'torchao, bfloat16 parameters and states': (torch.bfloat16, torchao)}

def row_of(here, what, way):
    "One race, on this processor."
    torch.set_num_threads(1)
    torch.empty(2**25-2**14, dtype=torch.uint8)             # from then on glibc keeps blocks up to that size
    if way == 'step':
        one,plain = stepped(*STEPS[what]),stepped(torch.float32, partial(ADAMW, foreach=True))
        ratio,own,other = raced(one.step, plain.step)
    else: ratio,own,other = raced(*layers(what, way))
    row = dict(processor=here, what=what, way=way)
    row |= dict(ratio=round(ratio, 2), ms=round(own, 1), float32=round(other, 1))
    if way != 'step': return row
    kept,added = memory(one)
    return row | dict(kept=kept, added=added)

def main():
    "All rows that are not there yet, one at a time."
    here,fields = processor(),('processor', 'what', 'way')
    rows = json.loads(TABLE.read_text('utf-8'))['rows'] if TABLE.exists() else []
    jobs = [tuple(row[k] for k in fields) for row in rows if row['processor'] != here]
    mine = [row['what'] for row in rows if row['processor'] == here]
    there = importlib.util.find_spec('torchao') or any('torchao' in what for what in mine)
    ways = [(what, 'step') for what in STEPS if there or 'torchao' not in what]
    ways += [(recipe, way) for way in ('eager', 'medium') for recipe in R.RECIPES]
    ways += [(recipe, 'compiled') for recipe in COMPILED]
    jobs += [(here, *way) for way in ways]
    run(__doc__, TABLE, row_of, jobs, fields, workers=1, torch=torch.__version__.partition('+')[0])

if __name__ == '__main__': main()
