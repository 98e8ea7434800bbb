"""What a person should look at before a release: sizes, words and calls, beside those of the last release.

    make measure                    prints them, with the change since bench/measure.json
    make measure ARGS="--save"      writes bench/measure.json, at a release

None of these numbers is wrong by itself, so none of them fails a test. Read the changes, and ask of each whether it
made the library better."""
import argparse
import ast
import io
import json
import re
import sys
import time
import zipfile
from configparser import ConfigParser
from contextlib import nullcontext
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SAVED = ROOT/'bench'/'measure.json'
ASKS = (ast.If, ast.IfExp, ast.For, ast.While, ast.ExceptHandler, ast.Assert)
MANY = 12                                       # decisions of a function that gets a line of its own
LONG = 400                                      # lines of a module that gets one
INLINE = '<listcomp>', '<genexpr>', '<dictcomp>', '<setcomp>'       # no functions from Python 3.12 on

def modules():
    "The files of the package by full name, without its name in front."
    package = ROOT/'shok_nb'
    files = sorted(package.rglob('[!_]*.py'))
    return {'.'.join(f.relative_to(package).with_suffix('').parts): f for f in files}

def folder(module): return module.rpartition('.')[0]

# --- pages
def longest(cells, exported):
    "Lines of the longest code cell, of those that are exported or of the others."
    found = [0]
    for c in cells:
        lines = ''.join(c['source']).splitlines()
        made = bool(lines) and bool(re.match(r'#\|\s*(export|exporti)\b', lines[0]))
        if c['cell_type'] == 'code' and made == exported: found.append(sum(bool(l.strip()) for l in lines))
    return max(found)

def page(path):
    "Of a notebook: its cells, its words, and the lines of its longest cells."
    cells = json.loads(path.read_text('utf-8'))['cells']
    prose = [re.sub('(?s)<!--.*?-->', '', ''.join(c['source'])) for c in cells if c['cell_type'] == 'markdown']
    words = sum(len(text.split()) for text in prose)
    return {'cells': len(cells), 'words': words, 'longest export': longest(cells, True),
        'longest other': longest(cells, False)}

def notebooks():
    nbs = ROOT/'nbs'
    found = (p for p in sorted(nbs.rglob('*.ipynb')) if '.ipynb_checkpoints' not in p.parts)
    return {p.relative_to(nbs).with_suffix('').as_posix(): p for p in found}

# --- code
def own(node):
    "The nodes of a function without those of the functions and classes inside it."
    left = list(ast.iter_child_nodes(node))
    while left:
        n = left.pop()
        yield n
        if not isinstance(n, (ast.FunctionDef, ast.ClassDef)): left.extend(ast.iter_child_nodes(n))

def decisions(node):
    "How often a function asks: each if, loop, exception, assert, filter of a comprehension, further `and` or `or`."
    count = 0
    for n in own(node):
        count += isinstance(n, ASKS)
        if isinstance(n, ast.comprehension): count += 1 + len(n.ifs)
        if isinstance(n, ast.BoolOp): count += len(n.values) - 1
    return count

def functions(tree, path=''):
    "Each function of a module by name, those inside others too."
    for n in ast.iter_child_nodes(tree):
        named = isinstance(n, (ast.FunctionDef, ast.ClassDef))
        if isinstance(n, ast.FunctionDef): yield f'{path}{n.name}', n
        yield from functions(n, f'{path}{n.name}.' if named else path)

def asking():
    "The functions of the package that decide more than `MANY` times, with how often they do."
    found = {}
    for module,f in modules().items():
        for name,node in functions(ast.parse(f.read_text('utf-8'))):
            if decisions(node) > MANY: found[f'{module}.{name}'] = decisions(node)
    return dict(sorted(found.items(), key=lambda item: -item[1]))

def imports():
    "Each `from … import` inside the package: the module it stands in, the module it names, the names."
    known = modules()
    for module,f in known.items():
        package = ('shok_nb.' + module).split('.')[:-1]
        for n in ast.walk(ast.parse(f.read_text('utf-8'))):
            if not isinstance(n, ast.ImportFrom): continue
            above = package[:len(package)+1-n.level] if n.level else []
            base = '.'.join([*above, *filter(None, [n.module])])
            if base.partition('.')[0] == 'shok_nb': yield module, base.partition('.')[2], [a.name for a in n.names]

def imported():
    "The modules of the package that each of its modules imports."
    known = modules()
    found = {m: set() for m in known}
    for module,base,names in imports():
        named = (base, *(f'{base}.{name}'.strip('.') for name in names))
        found[module].update(m for m in named if m in known)
    return found

def arrows():
    "The pairs of folders of which one imports from the other, with how many modules do."
    found = {}
    for module,uses in imported().items():
        for there in {folder(u) for u in uses} - {folder(module)}:
            arrow = f'{folder(module) or "top"} -> {there or "top"}'
            found[arrow] = found.get(arrow, 0) + 1
    return dict(sorted(found.items()))

def private():
    "The private names that one folder imports from another, each with how many times."
    found = {}
    for module,base,names in imports():
        if folder(base) == folder(module): continue
        for name in names:
            if name.startswith('_'): found[name] = found.get(name, 0) + 1
    return found

def named(tree):
    "The names that a module or class defines at its top, each time it does."
    for n in tree.body:
        if isinstance(n, (ast.FunctionDef, ast.ClassDef)): yield n.name
        for target in n.targets if isinstance(n, ast.Assign) else []:
            names = [e for e in ast.walk(target) if isinstance(e, ast.Name)]
            yield from (e.id for e in names if isinstance(e.ctx, ast.Store))

def shared():
    "The private names of one word that several modules define, each with how many do."
    found = {}
    for f in modules().values():
        for name in {*named(ast.parse(f.read_text('utf-8')))}:
            if re.fullmatch('_[a-z]+', name): found[name] = found.get(name, 0) + 1
    return {name: n for name,n in sorted(found.items()) if n > 1}

# --- lines and bytes
def docstring_lines(tree):
    "The numbers of the lines that docstrings stand on."
    lines = set()
    for n in ast.walk(tree):
        if isinstance(n, (ast.FunctionDef, ast.ClassDef, ast.Module)) and ast.get_docstring(n) is not None:
            lines.update(range(n.body[0].lineno, n.body[0].end_lineno+1))
    return lines

def split(text):
    "The lines of a source that are code or comment, and those of its docstrings; empty lines are neither."
    said = docstring_lines(ast.parse(text))
    filled = [i for i,l in enumerate(text.splitlines(), 1) if l.strip()]
    return len([i for i in filled if i not in said]), len([i for i in filled if i in said])

def filled(files): return sum(bool(l.strip()) for f in files for l in f.read_text('utf-8').splitlines())

def notebook_code(path):
    cells = json.loads(path.read_text('utf-8'))['cells']
    sources = (''.join(c['source']) for c in cells if c['cell_type'] == 'code')
    return sum(bool(l.strip()) for source in sources for l in source.splitlines())

def lines():
    package = [split(f.read_text('utf-8')) for f in modules().values()]
    scripts = (*ROOT.glob('*.py'), *(ROOT/'.ci').glob('*.py'), *(ROOT/'bench').glob('*.py'))
    docs = [f for f in (ROOT/'docs').rglob('*.py') if not {'nbs', '_build'} & {*f.relative_to(ROOT/'docs').parts}]
    return {'package, code': sum(code for code,_ in package), 'package, docstrings': sum(said for _,said in package),
        'package, scripts and style': filled((ROOT/'shok_nb').rglob('*.[jc]s*')),
        'notebooks, code': sum(map(notebook_code, notebooks().values())),
        'tests': filled((ROOT/'tests').rglob('*.py')), 'scripts': filled((*scripts, *docs))}

def long():
    "The modules of more than `LONG` lines, with how many they have."
    found = {m: filled([f]) for m,f in modules().items()}
    return {m: n for m,n in sorted(found.items(), key=lambda item: -item[1]) if n > LONG}

def kilobytes(files): return round(sum(f.stat().st_size for f in files)/1000)

def outputs(path):
    "The characters of what is stored below the cells of a notebook."
    return sum(len(json.dumps(c.get('outputs', []))) for c in json.loads(path.read_text('utf-8'))['cells'])

def picture(path):
    "The characters of the largest picture that a notebook stores."
    cells = json.loads(path.read_text('utf-8'))['cells']
    shown = [o.get('data', {}) for c in cells for o in c.get('outputs', [])]
    return max((len(''.join(d[k])) for d in shown for k in d if k.startswith('image/')), default=0)

def packed(files):
    "About what they take in a wheel."
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, 'w', zipfile.ZIP_DEFLATED) as z:
        for f in files: z.write(f, f.relative_to(ROOT))
    return round(len(archive.getvalue())/1000)

def sizes():
    "In kB."
    package = [f for f in (ROOT/'shok_nb').rglob('*') if f.is_file() and '__pycache__' not in f.parts]
    pages = notebooks().values()
    return {'package': kilobytes(package), 'wheel, about': packed(package), 'notebooks': kilobytes(pages),
        'stored outputs': round(sum(map(outputs, pages))/1000),
        'largest stored picture': round(max(map(picture, pages))/1000)}

def counts():
    per_folder = {}
    for m in modules(): per_folder[folder(m)] = per_folder.get(folder(m), 0) + 1
    names = private()
    return {'pages': len(notebooks()), 'modules': len(modules()),
        'modules in the longest folder': max(per_folder.values()), 'pairs of folders with an arrow': len(arrows()),
        'arrows between folders': sum(arrows().values()), 'private names imported across folders': len(names),
        'times they are': sum(names.values()), 'private words that several modules define': len(shared()),
        f'functions above {MANY} decisions': len(asking())}

# --- calls
def road(f):
    "The functions of the package that `f()` enters: each as its module and its name."
    seen = []
    def watch(frame, event, arg):
        module,name = frame.f_globals.get('__name__', ''),frame.f_code.co_name
        if event == 'call' and module.startswith('shok_nb') and name not in INLINE: seen.append((module, name))
    sys.setprofile(watch)
    try: f()
    finally: sys.setprofile(None)
    return seen

def there_and_back(torch, f, x, times):
    "The roads of the last of some calls, forward and backward."
    for _ in range(times):
        y = None
        def forward():
            nonlocal y
            y = f(x)
        there = road(forward)
        back = road(lambda: y.backward(torch.ones_like(y)))
    return there,back

def roads():
    "The frames of `soft_round` on four roads, as written and once they are replayed."
    sys.path.insert(0, str(ROOT))
    import torch
    import shok_nb as R
    from shok_nb.engine import replay
    x = torch.randn(1000, requires_grad=True)
    alpha,step = (torch.tensor(v, requires_grad=True) for v in (5., .5))
    ways = dict(plain=lambda x: R.soft_round(x, 5., step=.5), learned=lambda x: R.soft_round(x, alpha, step=step))
    found = {}
    for way,f in ways.items():
        for word,switch,times in (('', replay.no_replay, 2), (', replayed', nullcontext, replay._PAYS+3)):
            with switch(): pair = there_and_back(torch, f, x, times)
            for direction,frames in zip(('forward', 'backward'), pair):
                found[f'{way} {direction}{word}'] = {'frames': len(frames), 'files': len({m for m,_ in frames})}
    return found

# --- all of it
def headings():
    "In the order of README."
    text = (ROOT/'README.md').read_text('utf-8')
    return re.findall(r'(?m)^#+ (.*)$', re.sub('(?ms)^```.*?^```$', '', text))

def measure():
    "Everything, as it is written to measure.json."
    ini = ConfigParser(delimiters=['='], interpolation=None)
    ini.read(ROOT/'settings.ini', encoding='utf-8')
    return {'version': ini['DEFAULT']['version'], 'date': time.strftime('%Y-%m-%d'),
        'pages': {name: page(p) for name,p in notebooks().items()}, 'calls of soft_round': roads(), 'counts': counts(),
        'lines': lines(), f'lines of a module, above {LONG}': long(), 'kB': sizes(),
        f'decisions, above {MANY}': asking(), 'folder -> folder, modules': arrows(), 'headings of README': headings()}

def beside(now, was, key):
    "A number with its change since the same `key` of a report, if there is one."
    if not was or was.get(key) == now: return str(now)
    return f'{now} ({now-was[key]:+})' if key in was else f'{now} (new)'

def table(title, now, was):
    "Rows of several numbers under their names."
    names = list(next(iter(now.values())))
    yield f'{title:32}' + ''.join(f'{n:>16}' for n in names)
    for key,row in now.items():
        before = was.get(key, {}) if was else row
        yield f'{"  " if before else "+ "}{key:30}' + ''.join(f'{beside(row[n], before, n):>16}' for n in names)
    yield from (f'  {key:30}{"gone":>16}' for key in was if key not in now)

def rows(title, now, was):
    "One number a row."
    yield title
    for key,n in now.items(): yield f'  {key:60}{beside(n, was, key):>16}'
    yield from (f'  {key:60}{"gone":>16}' for key in was if key not in now)

def report(now, was):
    "The lines to print."
    since = f", beside those of {was['version']}, {was['date']}" if was else ''
    yield f"shok_nb {now['version']}, {now['date']}{since}"
    for title,value in now.items():
        if title in ('version', 'date'): continue
        yield ''
        before = was.get(title, {})
        if isinstance(value, list):
            yield title + (', in another order or with other words' if was and value != before else '')
            yield from (f'  {line}' for line in value)
        elif value and isinstance(next(iter(value.values())), dict): yield from table(title, value, before)
        else: yield from rows(title, value, before)

def main():
    p = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    p.add_argument('--save', action='store_true', help='write bench/measure.json, at a release')
    args = p.parse_args()
    now = measure()
    print('\n'.join(report(now, json.loads(SAVED.read_text('utf-8')) if SAVED.exists() else {})))
    if args.save: SAVED.write_text(json.dumps(now, indent=1, ensure_ascii=False) + '\n', 'utf-8')

if __name__ == '__main__': main()
