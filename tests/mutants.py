"""Do the tests notice? Changes the package by one small thing at a time and runs the tests aimed at the changed module.

    make mutants                               300 changes, both cores
    make mutants ARGS="core --count 40"        some of one module
    make mutants ARGS="core --show slope_one"      the changes in a function, without running them
    make mutants ARGS="--stale"                     the lines of mutants.txt that no change has any more

Changes are made in the syntax tree: an operator, a comparison, a constant, a condition, an argument, a statement, what
is returned. Types, docstrings and the text of messages stay. A change that makes the same bytecode is none. Which are
tried is decided by a hash of the change itself, so an edit elsewhere leaves the choice alone.

Each change gets a process of its own, forked from this one when torch and pytest are loaded, and in it pytest, which
meets the tests that found the most first and stops at the first that fails. What all tests let pass has survived; why
it may is a line of mutants.txt. A survivor without one, or fewer killed than 9 in 10, is a failure.

Others' tools, tried on core with the quick tests of test_floor.py: mutmut 3.8 forks and aims too, but wraps every
function in one that torch.compile cannot trace, so the fourth test fails before anything is changed. cosmic-ray 8.7
starts Python for each change, which took 40 s where a fork took 18."""
import argparse
import ast
import copy
import hashlib
import importlib.abc
import importlib.util
import json
import os
import resource
import signal
import sys
import tempfile
import time
from pathlib import Path

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
EXPLAINED = TESTS/'mutants.txt'
AIMED = json.loads((TESTS/'mutants.json').read_text('utf-8'))  # for each module the tests that know it, for pytest
AIMED = {m: AIMED[args] if isinstance(args, str) else args for m,args in AIMED.items()}     # "core": those of core
FILES = {f.stem: f for f in (ROOT/'shok_nb'/'engine').rglob('[!_]*.py')}      # a module is called by its own name
SHARE = .9                                                          # of the changes that the tests must find

# --- changes
OPERATORS = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.BitXor: ast.BitAnd,
    ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}
COMPARISONS = {
    ast.Lt: (ast.LtE, ast.GtE), ast.LtE: (ast.Lt, ast.Gt), ast.Gt: (ast.GtE, ast.LtE), ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,), ast.NotEq: (ast.Eq,), ast.Is: (ast.IsNot,), ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,), ast.NotIn: (ast.In,),
}

def but(node, **fields):
    "The node with other fields."
    new = copy.copy(node)
    for k,v in fields.items(): setattr(new, k, v)
    return new

def without(items, i): return [*items[:i], *items[i+1:]]
def swapped(items, i): return [*items[:i], items[i+1], items[i], *items[i+2:]]

def of_constant(node):
    v = node.value
    if isinstance(v, bool): yield ast.Constant(not v)
    elif isinstance(v, (int, float)): yield ast.Constant(v+1)

# Methods whose caller may do in their place.
IDLE = {'to', 'sum_to_size', 'expand', 'clamp', 'clone', 'detach', 'requires_grad_', 'item'}

def of_call(node):
    bare = not node.args and not node.keywords
    if isinstance(node.func, ast.Attribute) and (bare or node.func.attr in IDLE):
        yield node.func.value           # x.detach() → x
    for i in range(len(node.args)-1):
        if not any(isinstance(a, ast.Starred) for a in node.args[i:i+2]): yield but(node, args=swapped(node.args, i))
    if len(node.args) > 1: yield but(node, args=node.args[:-1])
    for i in range(len(node.keywords)): yield but(node, keywords=without(node.keywords, i))

def of_return(node):
    if isinstance(node.value, ast.Tuple):
        elts = node.value.elts
        for i,e in enumerate(elts):
            if not isinstance(e, (ast.Starred, ast.Constant)):
                yield but(node, value=but(node.value, elts=[*elts[:i], ast.Constant(None), *elts[i+1:]]))
    elif node.value is not None: yield ast.Return(ast.Constant(None))

def changed(node):
    "What may stand in place of a node."
    if isinstance(node, (ast.BinOp, ast.AugAssign)): yield but(node, op=OPERATORS[type(node.op)]())
    elif isinstance(node, ast.UnaryOp): yield node.operand
    elif isinstance(node, ast.Compare):
        for i,op in enumerate(node.ops):
            for new in COMPARISONS[type(op)]: yield but(node, ops=[*node.ops[:i], new(), *node.ops[i+1:]])
    elif isinstance(node, ast.BoolOp):
        yield but(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
        for i in range(len(node.values)):
            yield but(node, values=without(node.values, i)) if len(node.values) > 2 else node.values[1-i]
    elif isinstance(node, ast.IfExp):
        yield from (but(node, test=ast.UnaryOp(ast.Not(), node.test)), node.body, node.orelse)
    elif isinstance(node, (ast.If, ast.While)): yield but(node, test=ast.UnaryOp(ast.Not(), node.test))
    elif isinstance(node, ast.comprehension):
        for i in range(len(node.ifs)): yield but(node, ifs=without(node.ifs, i))
    elif isinstance(node, ast.With): yield ast.If(ast.Constant(1), node.body, [])
    elif isinstance(node, ast.Constant): yield from of_constant(node)
    elif isinstance(node, ast.Call): yield from of_call(node)
    elif isinstance(node, ast.Return): yield from of_return(node)
    if isinstance(node, (ast.Expr, ast.AugAssign, ast.Raise, ast.Continue, ast.Break)): yield ast.Pass()
    if isinstance(node, ast.Assign) and not isinstance(node.targets[0], (ast.Name, ast.Tuple)): yield ast.Pass()

def parts(node):
    "The children that are code: no types, no docstrings, no text."
    for field,value in ast.iter_fields(node):
        if field in ('annotation', 'returns', 'type_comment'): continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST): continue
            if isinstance(child, (ast.JoinedStr, ast.Import, ast.ImportFrom)): continue
            if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant): continue
            if isinstance(child, ast.Assign) and getattr(child.targets[0], 'id', '') == '__all__': continue
            yield child

def places(node, inside=()):
    "Every node of code and the functions and classes around it; of a `raise` the statement alone."
    for child in parts(node):
        yield child,inside
        name = (child.name,) if isinstance(child, (ast.FunctionDef, ast.ClassDef)) else ()
        if not isinstance(child, ast.Raise): yield from places(child, inside+name)

def shown(node):
    text = ast.unparse(ast.fix_missing_locations(copy.deepcopy(node))).replace('\n', ' ')
    if len(text) < 110: return ' '.join(text.split())
    return text[:100] + '…' + hashlib.sha256(text.encode()).hexdigest()[:6]

def bytecode(code):
    def constant(c): return bytecode(c) if hasattr(c, 'co_code') else (type(c), repr(c))
    return code.co_code, code.co_names, code.co_varnames, code.co_freevars, [constant(c) for c in code.co_consts]

class Change:
    "One node put in place of another."
    def __init__(self, module, path, tree, old, new, inside, nth):
        self.module,self.path,self.line = module,path,old.lineno if hasattr(old, 'lineno') else 0
        self.tree,self.old,self.new = tree,old,new
        where = '.'.join((module, *inside))
        there = 'nothing' if isinstance(new, ast.Pass) else shown(new)
        self.name = f'{where}: {shown(old)} → {there}' + f' #{nth}'*(nth > 1)

    def code(self):
        new = ast.copy_location(self.new, self.old) if hasattr(self.old, 'lineno') else self.new
        tree = copy.deepcopy(self.tree, {id(self.old): new})
        return compile(ast.fix_missing_locations(tree), str(self.path), 'exec')

def candidates(module):
    "All of a module, those that make the same bytecode too."
    path,seen = FILES[module],{}
    tree = ast.parse(path.read_text('utf-8'))
    for old,inside in places(tree):
        for new in changed(old):
            plain = Change(module, path, tree, old, new, inside, 1).name
            seen[plain] = seen.get(plain, 0) + 1
            yield Change(module, path, tree, old, new, inside, seen[plain])

def changes(module):
    "All of a module that make other bytecode."
    path = FILES[module]
    same = bytecode(compile(path.read_text('utf-8'), str(path), 'exec'))
    for c in candidates(module):
        try: code = c.code()
        except SyntaxError: continue
        if bytecode(code) != same: yield c

def drawn(found, count, seed):
    "The `count` of smallest hash: the choice of one change does not depend on the others."
    return sorted(found, key=lambda c: hashlib.sha256(f'{seed} {c.name}'.encode()).digest())[:count]

# --- one change, in a process of its own
class Changed(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    "Imports one module of the package from other code."
    def __init__(self, change): self.change = change
    def find_spec(self, name, path=None, target=None):
        if name == '.'.join(self.change.path.relative_to(ROOT).with_suffix('').parts):
            return importlib.util.spec_from_file_location(name, self.change.path, loader=self)
    def exec_module(self, module): exec(self.change.code(), module.__dict__)

class Watch:
    "Runs the tests in an order, and writes to a file which are started and which fails."
    def __init__(self, order, out): self.order,self.out = order,out
    def say(self, kind, what):
        self.out.write(json.dumps([kind, what, time.process_time()]) + '\n')
        self.out.flush()
    def pytest_collection_modifyitems(self, items): items.sort(key=lambda i: self.order.get(i.nodeid, 0.), reverse=True)
    def pytest_runtest_logstart(self, nodeid): self.say('start', nodeid)
    def pytest_runtest_logreport(self, report):
        if report.failed: self.say('failed', report.nodeid)
    pytest_collectreport = pytest_runtest_logreport

def child(change, module, order, out, seconds):
    "Never returns."
    os.setsid()
    for signum in (signal.SIGINT, signal.SIGTERM): signal.signal(signum, signal.SIG_DFL)
    limit = int(time.process_time()+seconds)+1
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    quiet = os.open(os.devnull, os.O_RDWR)
    if change:
        for fd in (0, 1, 2): os.dup2(quiet, fd)
        sys.meta_path.insert(0, Changed(change))
    import pytest
    watch = Watch(order, out)
    plain = '-q', '-x', '-p', 'no:cacheprovider', '-p', 'no:xdist', '-p', 'no:randomly', '--no-header', '-W', 'ignore'
    try: code = pytest.main([*AIMED[module], *plain], [watch])
    except BaseException as e: code = type(e).__name__
    watch.say('end', int(code) if isinstance(code, int) else str(code))
    os._exit(0)

class Run:
    "A forked child and what it said."
    def __init__(self, change, module, order, seconds):
        self.change,self.module,self.started,self.patience = change,module,time.monotonic(),8*seconds+60
        self.out = tempfile.TemporaryFile('w+')
        self.pid = os.fork()
        if not self.pid: child(change, module, order, self.out, seconds)

    def done(self):
        "Has it ended? One that hangs is ended here."
        ended,_ = os.waitpid(self.pid, os.WNOHANG)
        if not ended and time.monotonic()-self.started < self.patience: return False
        try: os.killpg(self.pid, signal.SIGKILL)                     # and what it has started
        except ProcessLookupError: pass
        if not ended: os.waitpid(self.pid, 0)
        with self.out as out:
            out.seek(0)
            self.lines = [json.loads(line) for line in out if line.endswith(']\n')]
        return True

    def verdict(self):
        "How it was found, or None."
        failed = [what for kind,what,_ in self.lines if kind == 'failed']
        if failed: return failed[0]
        end = [what for kind,what,_ in self.lines if kind == 'end']
        if end == [0]: return None
        if end: return f'pytest ended with {end[0]}'
        started = [what for kind,what,_ in self.lines if kind == 'start']
        return f'no end: {started[-1] if started else "import"}'

    def seconds(self):
        "Of each test."
        marks = [(what, t) for kind,what,t in self.lines if kind in ('start', 'end')]
        return {a: u-t for (a,t),(_,u) in zip(marks, marks[1:])}

# --- all of them
def preload():
    "What every test needs, so that no child loads it."
    sys.path[:0] = [str(TESTS), str(ROOT)]
    os.environ['PYTHONPATH'] = str(ROOT)
    import hypothesis  # noqa: F401
    import mpmath  # noqa: F401
    import numpy  # noqa: F401
    import pytest  # noqa: F401
    import torch
    import torch._dynamo.testing
    import torch._functorch.aot_autograd
    import torch._inductor.compile_fx
    import torch._subclasses.fake_tensor
    import torch.export  # noqa: F401
    import torch.func
    import torch.testing  # noqa: F401
    import torch.utils.checkpoint
    torch.set_num_threads(1)                                         # a pool of threads does not survive a fork
    assert not any(m.startswith('shok_nb') for m in sys.modules)

def explained():
    "Why a change may survive, by its name."
    lines = EXPLAINED.read_text('utf-8').splitlines()
    return dict(l.split('  # ', 1) for l in lines if not l.startswith('#'))

def stale():
    "The explained changes that are none any more, because the code is another."
    there = {c.name for m in AIMED for c in candidates(m)}
    return [name for name in explained() if name not in there]

def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    p.add_argument('modules', nargs='*', metavar='MODULE', help=f'of {" ".join(AIMED)} (default: all)')
    p.add_argument('--count', type=int, default=300, help='changes to try (default: 300)')
    p.add_argument('--seed', type=int, default=0, help='another seed tries others')
    p.add_argument('--jobs', type=int, default=2)
    p.add_argument('--show', metavar='TEXT', help='only list the changes whose name has this text')
    p.add_argument('--stale', action='store_true', help='only list the lines of mutants.txt without a change')
    p.add_argument('--only', metavar='TEXT', help='try those alone')
    a = p.parse_args(argv)
    for m in a.modules:
        if m not in AIMED: p.error(f'{m} has no tests in {TESTS.name}/mutants.json')
    if a.stale: return print('\n'.join(stale()))
    modules = a.modules or list(AIMED)
    found = [c for m in modules for c in changes(m)]
    if a.show is not None: return print('\n'.join(f'{c.line:4} {c.name}' for c in found if a.show in c.name))
    todo = [c for c in found if a.only in c.name] if a.only else drawn(found, a.count, a.seed)
    print(f'{len(todo)} of {len(found)} changes in {", ".join(modules)}', flush=True)
    preload()
    start,order,spent = time.monotonic(),{},{}
    for m in modules:                                                # first the code as it is
        r = Run(None, m, {}, 3600)
        while not r.done(): time.sleep(.1)
        if r.verdict(): return print(f'the tests of {m} fail without a change: {r.verdict()}') or 1
        spent[m] = r.seconds()
        order[m] = {t: -s for t,s in spent[m].items()}          # quick ones first, until some have found something
        print(f'{m}: {len(spent[m])} tests, {sum(spent[m].values()):.0f} s', flush=True)
    alive,killed,late,running,queue = [],0,0,[],list(todo)
    why = explained()
    while queue or running:
        while queue and len(running) < a.jobs:
            c = queue.pop(0)
            running.append(Run(c, c.module, order[c.module], 2*sum(spent[c.module].values())+30))
        time.sleep(.02)
        for r in [r for r in running if r.done()]:
            running.remove(r)
            how = r.verdict()
            if how is None:
                alive.append(r.change)
                word = 'explained' if r.change.name in why else 'SURVIVED'
                print(f'  {word} {r.change.path.relative_to(ROOT)}:{r.change.line} {r.change.name}', flush=True)
                continue
            killed += 1
            late += how.startswith('no end')
            if how in spent[r.module]: order[r.module][how] = max(order[r.module][how], 0) + 1/(spent[r.module][how]+.1)
    new = [c for c in alive if c.name not in why]
    share = killed/len(todo)
    minutes = (time.monotonic()-start)/60
    print(f'{killed} of {len(todo)} found ({share:.1%}; {late} by never ending), {len(alive)} not, '
        f'{len(new)} of these unexplained; {minutes:.0f} minutes')
    old = stale()
    for name in old: print(f'  no such change any more: {name}')
    return bool(new or old) or share < SHARE and not a.only

if __name__ == '__main__': sys.exit(main())
