"""Twelve functions beside a copy of the same tensor on the device, eager and compiled, and the line that people copy
instead; then one step of a layer whose products are rounded. Every row is written as it comes, eager ones first."""
import argparse
import os
import sys
import time
from pathlib import Path
from statistics import median
import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
from rivals import rivals  # noqa: E402 (found by the line above)
import shok_nb as R  # noqa: E402 (found by the line above)
from bench import Cpu, Cuda, both, exact, inputs, race, short  # noqa: E402 (found by the line above)

DEVICE = os.environ.get('SHOK_DEVICE', 'cuda')
ROWS = ('round_ste', 'soft_round', 'cubic_round', 'sine_round', 'sigmoid_sum_round', 'fourier_round', 'clipped_round',
    'decimal_ste', 'diff_round', 'logistic_round', 'ratio_round', 'stochastic_round')
RECIPES = 'fp8', 'mxfp8', 'mxfp4', 'nvfp4'

def write(line):
    print(line, flush=True)
    if 'SHOK_FOUND' in os.environ:
        with open(os.environ['SHOK_FOUND'], 'a', encoding='utf-8') as f: f.write(line + '\n')

def beside_copy(f, clock, n, seconds):
    "Forward and backward over a clone and a multiplication, the median."
    turn = inputs(clock, n, torch.float32)
    def least():
        x,_,g = next(turn)
        return x.clone(),x*g
    t = race({'f': lambda: both(f, *next(turn)[1:]), 'copy': least}, clock, seconds, 5)
    return median(a/b for a,b in zip(t['f'], t['copy']))

def times(clock, sizes, seconds, rows):
    "The table of functions: ours, eager and compiled, and the first formula of others for the same maths."
    write('\nForward and backward in float32 over a clone and a multiplication; a ratio of 1 is the least that any '
        'pair of passes over memory takes.\n')
    write('| function | by | ' + ' | '.join(f'eager, {n}' for n in sizes) + f' | compiled, {sizes[0]} |')
    write('| --- | --- |' + ' --- |'*(len(sizes)+1))
    others = {}
    for c in rivals(): others.setdefault(c.group, c) if c.by == 'formula' else None
    for name in rows:
        pair = [(f'`{name}`', 'ours', getattr(R, name))]
        if name in others: pair.append((f'`{others[name].name}`', others[name].by, others[name].f))
        for title,by,f in pair:
            cells = [short(exact(beside_copy(f, clock, n, seconds))) for n in sizes]
            try:
                torch._dynamo.reset()
                g = torch.compile(f, fullgraph=by == 'ours', dynamic=False)
                cells.append(short(exact(beside_copy(g, clock, sizes[0], seconds))))
            except Exception as e: cells.append(type(e).__name__)
            write(f'| {title} | {by} | ' + ' | '.join(cells) + ' |')

def products(clock, n, seconds):
    "Forward and backward of a rounded layer over those of the same layer in bfloat16."
    write(f'\nA Linear of {n} × {n} with a batch of {n}, forward and backward, over the same layer in bfloat16. The '
        'rounding is simulated: no tensor core of fewer bits is used.\n')
    write('| recipe | eager |\n| --- | --- |')
    x = torch.randn(n, n, device=clock.device, dtype=torch.bfloat16, requires_grad=True)
    for recipe in RECIPES:
        plain = torch.nn.Linear(n, n, device=clock.device, dtype=torch.bfloat16)
        model = torch.nn.Sequential(torch.nn.Linear(n, n, device=clock.device, dtype=torch.bfloat16))
        R.low_precision_(model, recipe)
        steps = {k: lambda m=m: m(x).sum().backward() for k,m in (('f', model), ('plain', plain))}
        t = race(steps, clock, seconds, 3)
        write(f"| {recipe} | {short(exact(median(a/b for a,b in zip(t['f'], t['plain']))))} |")

def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--sizes', default='16777216,268435456' if DEVICE == 'cuda' else '16384,65536')
    p.add_argument('--seconds', type=float, default=.5 if DEVICE == 'cuda' else .02, help='of a comparison')
    p.add_argument('--only', nargs='+', default=ROWS, metavar='FUNCTION')
    a = p.parse_args()
    clock,start = Cuda() if DEVICE == 'cuda' else Cpu(),time.monotonic()
    times(clock, [int(n) for n in a.sizes.split(',')], a.seconds, a.only)
    products(clock, 4096 if DEVICE == 'cuda' else 64, a.seconds)
    write(f'\nIt took {time.monotonic()-start:.0f} s.')

if __name__ == '__main__': main()
