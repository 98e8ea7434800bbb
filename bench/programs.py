"""Integer programs: `integer_search` beside branch and bound and scipy's `milp`, on the same instances.

    .venv/bin/python bench/programs.py

bench/programs.json holds a row for each instance: what each method found, and in how many seconds of one processor.
What is done already is not done again, and two processes work. `make study` runs it too. It takes about an hour."""
import math
import os
import time
from pathlib import Path

os.environ.setdefault('OMP_NUM_THREADS', '1')               # before numpy and torch are imported
import numpy as np  # noqa: E402
import scipy  # noqa: E402
import torch  # noqa: E402
from jobs import run  # noqa: E402
from scipy.optimize import Bounds, LinearConstraint, milp, nnls  # noqa: E402
from shok_nb import integer_search  # noqa: E402

TABLE = Path(__file__).with_name('programs.json')
KINDS = dict(integers=(16, 0), mixed=(8, 8))                # how many integers, and how many other numbers
WAYS = {'annealed': {}, 'straight-through': dict(way='straight'), 'local search alone': dict(steps=0)}
STEPS = 100                                                 # of a search that descends: half of the usual
TOP,COUNT = 10,100                                          # the upper bound; instances of each kind

class Program:
    """Minimize half of (x-c)'Q(x-c), or -c'x: each number from 0 to 10, the integers with a given sum, three other sums
    at most so much. An integer point that keeps all of it is drawn first, so there is one."""
    def __init__(self, seed, kind, linear):
        g = np.random.default_rng([seed, *kind, linear])
        self.whole,n = kind[0],sum(kind)
        inside = np.r_[g.integers(1, TOP, kind[0]), g.uniform(1, TOP-1, kind[1])].astype(float)
        q,_ = np.linalg.qr(g.standard_normal((n, n)))
        self.root = np.diag(10**g.uniform(-1, 0, n))@q.T  # Q is root'root; its condition number is 100 at most
        self.c = g.uniform(1, 10, n) if linear else np.clip(inside + 3*g.standard_normal(n), -2, TOP+2)
        self.sums = g.uniform(0, 1, (3, n))
        self.most = self.sums@inside + .5
        self.total,self.linear = inside[:kind[0]].sum(),linear
        self.counts = np.r_[np.ones(kind[0]), np.zeros(kind[1])][None]      # what is summed to the total

    def cost(self, x):
        return -self.c@x if self.linear else .5*np.square(self.root@(x-self.c)).sum()

    def keeps(self, x):
        near = np.abs(x[:self.whole]-x[:self.whole].round()).max() < 1e-6
        return bool(near and (x > -1e-6).all() and (x < TOP+1e-6).all() and (self.sums@x < self.most+1e-5).all()
            and abs(x[:self.whole].sum()-self.total) < 1e-5)

    def relaxed(self, low, high):
        "The best real point between bounds: a least-distance problem, solved by non-negative least squares."
        if self.linear: return self._linear(low, high)
        eye = np.eye(len(self.c))
        G = np.concatenate([eye, -eye, -self.sums, self.counts, -self.counts])
        h = np.concatenate([low, -high, -self.most, [self.total], [-self.total]])
        inverse = np.linalg.inv(self.root)
        E = np.concatenate([(G@inverse).T, (h-G@self.c)[None]])
        f = np.r_[np.zeros(len(self.c)), 1.]
        try: u,_ = nnls(E, f, maxiter=2000)
        except RuntimeError: return None
        r = E@u-f
        if np.abs(r).max() < 1e-9: return None              # no point keeps all constraints
        return np.clip(self.c - inverse@(r[:-1]/r[-1]), low, high)

    def constraints(self):
        return [LinearConstraint(self.sums, -np.inf, self.most),
            LinearConstraint(self.counts, self.total, self.total)]

    def _linear(self, low, high, whole=0, **options):
        return milp(-self.c, integrality=whole*self.counts[0], bounds=Bounds(low, high), constraints=self.constraints(),
            options=options).x

    def box(self): return np.zeros(len(self.c)),np.full(len(self.c), float(TOP))

    def fitted(self, x):
        "The integers of a point, the other numbers as good as they can be."
        if x is None: return None
        low,high = self.box()
        low[:self.whole] = high[:self.whole] = x[:self.whole].round()
        if len(self.c) == self.whole: return low if self.keeps(low) else None
        return self.relaxed(low, high)

def branch_and_bound(program, seconds=math.inf):
    "Depth first, the nearer side first. The best point, whether it is proved, and the seconds to find it."
    begin,best,least,found = time.process_time(),None,math.inf,0.
    stack = [program.box()]
    while stack:
        if time.process_time()-begin > seconds: return best,False,found
        low,high = stack.pop()
        if (low > high).any(): continue
        x = program.relaxed(low, high)
        if x is None or program.cost(x) >= least-1e-9*abs(least): continue
        off = np.abs(x[:program.whole]-x[:program.whole].round())
        if off.max() < 1e-7:
            x[:program.whole] = x[:program.whole].round()
            best,least,found = x,program.cost(x),time.process_time()-begin
            continue
        i = int(off.argmax())
        down,up = high.copy(),low.copy()
        down[i],up[i] = math.floor(x[i]),math.floor(x[i])+1
        sides = [(low, down), (up, high)]
        stack += sides if x[i]-math.floor(x[i]) > .5 else sides[::-1]
    return best,True,found

def nearest_feasible(program, x):
    "The integers nearest to a real point, by the sum of the distances, that keep all constraints; then the rest."
    n = len(x)
    wide = np.concatenate([np.eye(n), -np.eye(n)]),np.concatenate([-np.eye(n)]*2)
    distance = LinearConstraint(np.concatenate(wide, 1), -np.inf, np.r_[x, -x])
    rest = [LinearConstraint(np.pad(c.A, ((0, 0), (0, n))), c.lb, c.ub) for c in program.constraints()]
    kinds = np.r_[np.ones(program.whole), np.zeros(2*n-program.whole)]
    low,high = program.box()
    z = milp(np.r_[np.zeros(n), np.ones(n)], integrality=kinds, constraints=[distance, *rest],
        bounds=Bounds(np.r_[low, np.zeros(n)], np.r_[high, np.full(n, np.inf)])).x
    return None if z is None else program.fitted(z[:n])

def searched(program, start, **options):
    root,c,sums,most = (torch.tensor(v) for v in (program.root, program.c, program.sums, program.most))
    def cost(x): return -c@x if program.linear else .5*(root@(x-c)).square().sum()
    whole = torch.arange(len(c)) < program.whole
    low,high = program.box()
    try:
        found = integer_search(cost, torch.tensor(start), torch.tensor(low), torch.tensor(high), integers=whole,
            inequalities=dict(sums=lambda x: sums@x-most),
            equalities=dict(total=lambda x: x[:program.whole].sum()-program.total), **options)
    except ValueError: return None
    return found.x.numpy()

def timed(f, *args, **options):
    begin = time.process_time()
    x = f(*args, **options)
    return x,round(time.process_time()-begin, 4)

def row_of(name, linear, seed):
    "What each method finds in one instance: cost, cost with its other numbers fitted, seconds."
    torch.set_num_threads(1)
    program,row = Program(seed, KINDS[name], linear),dict(kind=name, linear=linear, seed=seed, found={})
    def note(method, x, seconds):
        fit = program.fitted(x)
        kept = x is not None and program.keeps(x)
        row['found'][method] = dict(cost=float(program.cost(x)) if kept else None,
            fitted=float(program.cost(fit)) if fit is not None and program.keeps(fit) else None, seconds=seconds)
    relaxed,seconds = timed(program.relaxed, *program.box())
    note('rounded', np.r_[relaxed[:program.whole].round(), relaxed[program.whole:]], seconds)
    x,more = timed(nearest_feasible, program, relaxed)
    note('nearest feasible', x, seconds+more)
    for method,options in WAYS.items():
        note(method, *timed(searched, program, relaxed, **dict(steps=STEPS) | options))
    if linear: note('milp', *timed(program._linear, *program.box(), whole=1, mip_rel_gap=0))
    else:
        (x,proved,when),seconds = timed(branch_and_bound, program, 600.)
        note('branch and bound', x, seconds)
        row['found']['branch and bound'] |= dict(proved=proved, when=round(when, 4))
    return row

def main():
    "All rows that are not there yet."
    jobs = [(kind, linear, seed) for kind in KINDS for linear in (False, True) for seed in range(COUNT)]
    versions = dict(torch=torch.__version__.partition('+')[0], scipy=scipy.__version__)
    run(__doc__, TABLE, row_of, jobs, ('kind', 'linear', 'seed'), **versions)

if __name__ == '__main__': main()
