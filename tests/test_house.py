"""The house is in order: notebooks, package, README, metadata and site say the
same thing, and nothing of this machine."""
import ast
import base64
import filecmp
import functools
import inspect
import io
import json
import os
import random
import re
import runpy
import shutil
import subprocess
import sys
import zipfile
from configparser import ConfigParser
from email.parser import Parser
from html.parser import HTMLParser
from importlib.metadata import distribution, version
from pathlib import Path
from unittest import mock
import pytest
from estimators import batches, grouped, variants
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from pages import NBS, execute, slug, sphinx

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT/'bench'), str(ROOT/'docs')]
import pictures  # noqa: E402

SETTINGS = ('settings.ini', 'setup.py', 'pyproject.toml', 'README.md', 'LICENSE', 'MANIFEST.in')
EXPORT = ('docs/docstrings.py', 'docs/examples.txt')            # what the export needs beside the notebooks
site_group = pytest.mark.xdist_group('site')

def settings(folder=ROOT):
    ini = ConfigParser(delimiters=['='], interpolation=None)
    ini.read(folder/'settings.ini', encoding='utf-8')
    return ini['DEFAULT']

def run(*args, cwd=ROOT, **env):
    command = [sys.executable, *map(str, args)]
    r = subprocess.run(command, cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True)
    assert r.returncode == 0, r.stdout + r.stderr
    return r.stdout

def copy(to, *folders):
    for f in folders: shutil.copytree(ROOT/f, to/f, ignore=shutil.ignore_patterns('__pycache__', '.ipynb_checkpoints'))
    for f in (*SETTINGS, *EXPORT):
        (to/f).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT/f, to/f)
    return to

def tracked():
    "The files git knows or would add; where git knows nothing, as in an unpacked archive, all but what is made here."
    git = shutil.which('git')
    listing = [git, 'ls-files', '-co', '--exclude-standard']
    out = git and subprocess.run(listing, cwd=ROOT, capture_output=True, text=True).stdout
    if out: return [f for f in map(ROOT.joinpath, out.splitlines()) if f.exists()]
    made = {'build', 'dist', '_build', '__pycache__', '_proc', '_docs'}
    def ours(f):
        "Is this file none that make leaves behind?"
        parts = f.relative_to(ROOT).parts
        dotted = '.venv', '.git', '.pytest', '.hypothesis', '.ipynb'
        hidden = any(p.startswith(dotted) or p.endswith('.egg-info') for p in parts)
        return f.is_file() and not hidden and not made & {*parts} and parts[:2] != ('docs', 'nbs')
    return sorted(filter(ours, ROOT.rglob('*')))

def names(reqs): return {canonicalize_name(Requirement(r).name): Requirement(r).specifier for r in reqs}

# --- notebooks
@pytest.mark.parametrize('nb', NBS, ids=lambda p: p.stem)
def test_notebook_runs(nb, ran):
    "Each in a kernel of its own, hidden cells too: the run that the site shows."
    execute(nb, ran)

@pytest.mark.slow
@pytest.mark.parametrize('nb', NBS, ids=lambda p: p.stem)
def test_notebook_runs_in_nbdev(nb):
    "By nbdev-test, in a Python of its own, where `__main__` is the page."
    code = 'import sys; from nbdev.test import nbdev_test; nbdev_test(sys.argv[1], n_workers=1)'
    run('-c', code, nb, OMP_NUM_THREADS='1')

def test_notebooks_are_clean(tmp_path):
    copy(tmp_path, 'nbs', 'shok_nb')
    run('-c', 'from nbdev.clean import nbdev_clean; nbdev_clean()', cwd=tmp_path)
    _,diff,err = filecmp.cmpfiles(ROOT/'nbs', tmp_path/'nbs', [p.name for p in NBS], shallow=False)
    assert not diff + err, f'run nbdev-clean: {diff + err}'

@pytest.mark.parametrize('nb', NBS, ids=lambda p: p.stem)
def test_stored_outputs(nb):
    "Outputs are stored where they teach: no widget state, no errors, no warnings."
    for c in json.loads(nb.read_text('utf-8'))['cells']:
        for o in c.get('outputs', []):
            assert o['output_type'] != 'error' and o.get('name') != 'stderr', ''.join(c['source'])
            assert not any('widget' in k for k in o.get('data', {})), 'widget state changes on every run: remove it'

def picture_sizes(nb):
    "Characters of each stored picture, by cell."
    stored = pictures.pictures(json.loads(nb.read_text('utf-8')))
    return [(c['id'], len(''.join(data[kind]))) for c,data,kind in stored]

@pytest.mark.parametrize('nb', NBS, ids=lambda p: p.stem)
def test_stored_pictures_are_small(nb):
    "A picture is a line of the notebook's diff, and of everybody's clone."
    large = [(i, n) for i,n in picture_sizes(nb) if n >= pictures.LIMIT]
    assert not large, f'{nb.stem}: {large} characters, run docs/pictures.py'

def test_all_that_is_stored_is_small():
    sizes = {nb.stem: pictures.stored(json.loads(nb.read_text('utf-8'))) for nb in NBS}
    most = sorted(sizes, key=sizes.get)[:-6:-1]
    assert sum(sizes.values()) < pictures.ALL, f'run docs/pictures.py; most have {most}'

def test_players_are_not_stored():
    def output(html): return dict(output_type='display_data', data={'text/html': [html], 'text/plain': ['tune(f)']})
    nb = dict(cells=[dict(cell_type='code', outputs=[output('<div data-shok=1>'), output('<table>')])])
    assert pictures.without_players(nb) and not pictures.without_players(nb)
    assert nb['cells'][0]['outputs'] == [output('<table>')]

def test_a_small_picture_stays():
    "Stored pictures become small once; a second run of docs/pictures.py changes nothing."
    Image = pytest.importorskip('PIL.Image')
    file,g = io.BytesIO(),random.Random(0)
    Image.frombytes('RGB', (300, 200), g.randbytes(180_000)).save(file, 'PNG')      # noise: the largest there is
    png = base64.b64encode(file.getvalue()).decode()
    once = pictures.small(png)
    assert len(once) < pictures.LIMIT < len(png) and pictures.small(once) == once

CELLS, WORDS = 45, 700
LONGER = {}     # words of pages that are not short yet: to shrink, never to grow

@pytest.mark.parametrize('nb', NBS, ids=lambda p: p.stem)
def test_page_is_short(nb):
    "What CONTRIBUTING says of a page; a page that got short leaves the list of those that are not."
    cells = json.loads(nb.read_text('utf-8'))['cells']
    words = sum(len(''.join(c['source']).split()) for c in cells if c['cell_type'] == 'markdown')
    assert len(cells) <= CELLS and words <= LONGER.get(nb.stem, WORDS), f'{nb.stem}: {len(cells)} cells, {words} words'
    assert nb.stem not in LONGER or words > WORDS, f'{nb.stem} has {words} words: take it off the list'

@pytest.mark.slow
def test_the_first_ten_minutes(tmp_path):
    "What CONTRIBUTING says a stranger sees who changes a formula."
    copy(tmp_path, 'nbs', 'shok_nb')
    page,text = tmp_path/'nbs'/'24_cubic.ipynb',(ROOT/'CONTRIBUTING.md').read_text('utf-8')
    right = page.read_text('utf-8')
    def run_here(*args):
        env = {**os.environ, 'PYTHONPATH': str(tmp_path), 'IN_TEST': ''}
        return subprocess.run([sys.executable, *args], cwd=tmp_path, env=env, capture_output=True, text=True)
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
    changed(rise='.9*q*q*q', slope='2.7*q*q')
    test = "from nbdev.test import nbdev_test; nbdev_test('nbs/24_cubic.ipynb', n_workers=1)"
    out = run_here('-c', f'import sys; {test}')
    assert out.returncode and 'AssertionError' in out.stdout + out.stderr

def test_page_limits_are_those_of_contributing():
    text = ' '.join((ROOT/'CONTRIBUTING.md').read_text('utf-8').split())
    assert f'At most {CELLS} cells, {WORDS} words' in text and LONGER.keys() <= {p.stem for p in NBS}

def test_exported(tmp_path):
    "shok_nb/ is what the notebooks say."
    copy(tmp_path, 'nbs', 'shok_nb')
    for f in (tmp_path/'shok_nb').glob('[!_]*.py'): f.unlink()
    run('-c', 'import nbdev; nbdev.nbdev_export()', cwd=tmp_path, IN_TEST='')
    made,here = (sorted(p.name for p in (d/'shok_nb').glob('*.py')) for d in (tmp_path, ROOT))
    assert made == here
    _,diff,err = filecmp.cmpfiles(ROOT/'shok_nb', tmp_path/'shok_nb', here, shallow=False)
    assert not diff + err, f'run nbdev-export: {diff + err}'

def test_readme(): run('docs/readme.py', '--check')

def test_readme_is_in_the_order_of_readers():
    "What it does and one line of code, install, a picture, six lines, which one, what is special; and then the rest."
    text = (ROOT/'README.md').read_text('utf-8')
    marks = ['\n> ', 'R.round_ste(x)', 'pip install .', '![', 'backward()', '## Which one?', '## What is special',
        'make demo', 'make test ', '## Limitations', '## Citing', '](CITATION.cff)']
    places = [text.find(m) for m in marks]
    assert -1 not in places and places == sorted(places)
    six = re.findall(r'```python\n(.*?)\n```', text, re.S)[1]
    assert len(six.splitlines()) == 6
    which = re.search(r'## Which one\?\n(.*?)\n\n', text, re.S)[1].splitlines()[2:]
    assert len(which) == 4 and all(re.search(r'\| \[[^|]+\]\(nbs/\w+\.ipynb\) \|$', row) for row in which)
    special = re.search(r'## What is special\n(.*?)\n\n', text, re.S)[1].split('\n- ')
    assert all('](nbs/' in claim for claim in special)

def test_readme_numbers():
    "What it counts is what there is."
    from shok_nb.catalog import catalog
    from shok_nb.schedules import linear_schedule
    text = (ROOT/'README.md').read_text('utf-8')
    assert f'{len(catalog)} estimators' in text and f'each of the {len(catalog)} claims' in text
    assert [r.name for r in catalog if not r.linear] == ['ewgs_round'] and 'The one estimator' in text
    ends = [inspect.signature(linear_schedule).parameters[k].default for k in ('init_value', 'end_value')]
    assert 'from {:g} to {:g}'.format(*ends) in text

def elsewhere(git_url):
    "README as setup.py gives it to a package index."
    made,ini = {},(ROOT/'settings.ini').read_text('utf-8')
    ini = re.sub(r'(?m)^git_url =.*$', f'git_url = {git_url}', ini)
    def read(self, f, **kw): self.read_string(ini)
    with mock.patch('setuptools.setup', made.update), mock.patch.object(ConfigParser, 'read', read):
        runpy.run_path(str(ROOT/'setup.py'))
    return made['long_description']

def test_readme_elsewhere():
    "Without a repository no link of it is broken, with one each leads there; code and links to other sites stay."
    text = (ROOT/'README.md').read_text('utf-8')
    code = re.findall(r'(?ms)^```.*?^```$', text)
    ours = r'(!?)\[[^\]]*\]\((?!https:)([^)]*)\)'
    assert len(re.findall(ours, text)) > 20
    plain,linked = elsewhere(''),elsewhere('https://example.org/me/it')
    for t in (plain, linked):
        assert re.findall(r'(?ms)^```.*?^```$', t) == code
        assert not re.findall(ours, t) and '](https://arxiv.org/abs/' in t
    assert '![' not in plain and 'example.org' not in plain and '[' not in plain.partition('## Citing')[2]
    for picture,path in re.findall(ours, text):
        assert f"](https://example.org/me/it/{'raw' if picture else 'blob'}/main/{path})" in linked

def test_links_of_readme_lead_somewhere():
    for path in re.findall(r'\]\((?!https:)([^)#]*)\)', (ROOT/'README.md').read_text('utf-8')):
        assert (ROOT/path).exists(), path

# --- the tests
def test_make_test_and_make_test_all():
    "Both are named where somebody looks first; the second is the first and then the slow rest, which CI runs."
    for name in ('README.md', 'CONTRIBUTING.md'): assert 'make test-all' in (ROOT/name).read_text('utf-8')
    make = (ROOT/'Makefile').read_text('utf-8')
    assert re.search(r'(?m)^test-all: test\b', make) and '-m "not slow"' in make and '-m slow' in make
    assert 'make test-all' in (ROOT/'.ci'/'run').read_text('utf-8')

def test_a_group_that_fails_names_its_row():
    "Where eight are compiled together."
    @grouped()
    def check(group): assert 'ewgs_round' not in group.ids
    with pytest.raises(AssertionError, match='^ewgs_round, by itself: '): check(group=batches()[0].values[0])
    check(group=batches()[1].values[0])

def test_each_variant_is_in_one_group():
    ids = [i for b in batches(n=5, quick=1) for i in b.values[0].ids]
    assert sorted(ids) == sorted(p.id for p in variants())
    assert [bool(b.marks) for b in batches(n=20, quick=1)] == [False, True, True]

# --- package
def test_metadata():
    "settings.ini, pyproject.toml, the package, what is installed, and the citation agree."
    import shok_nb
    toml = pytest.importorskip('tomllib', reason='Python 3.10 has no tomllib')
    cfg,py = settings(),toml.loads((ROOT/'pyproject.toml').read_text('utf-8'))
    assert cfg['version'] == shok_nb.__version__ == version('shok_nb'), 'run nbdev-export, then make'
    assert cfg['lib_name'] == py['project']['name'] and set(py['project']) == {'name', 'dynamic'}
    for k in ('lib_path', 'nbs_path'): assert cfg[k] == py['tool']['nbdev'][k]
    cff = (ROOT/'CITATION.cff').read_text('utf-8')
    for k,v in dict(version='version', license='license', name='author', title='lib_name').items():
        line = f'{k}: {cfg[v]}'
        assert line in cff, line
    assert f"\n## {cfg['version']}" in (ROOT/'CHANGELOG.md').read_text('utf-8')

def test_pythons():
    "The versions that the package names are those that the suite ran on, from the oldest."
    rows = json.loads((ROOT/'bench'/'versions.json').read_text('utf-8'))
    ran = {tuple(map(int, r['python'].split('.')[:2])) for r in rows}
    said = settings()['pythons'].split()
    assert said == ['.'.join(map(str, v)) for v in sorted(ran)] and said[0] == settings()['min_python']

def test_citation():
    "What the Citation File Format 1.2.0 asks for, and nothing it does not know."
    yaml = pytest.importorskip('yaml')
    cff = yaml.safe_load((ROOT/'CITATION.cff').read_text('utf-8'))
    known = {'cff-version', 'message', 'type', 'title', 'version', 'license', 'abstract', 'authors', 'keywords',
        'date-released', 'repository-code', 'url', 'doi', 'identifiers', 'references', 'preferred-citation'}
    assert {'cff-version', 'message', 'title', 'authors'} <= set(cff) <= known
    assert cff['cff-version'] == '1.2.0' and cff['type'] == 'software' and cff['abstract'] == settings()['description']
    assert all({'name'} <= set(a) or {'family-names', 'given-names'} <= set(a) for a in cff['authors'])
    assert set(cff['keywords']) <= set(settings()['keywords'].split())
    assert ('repository-code' in cff) == bool(settings()['git_url'])

def test_constraints():
    "Every requirement has one pinned version here, and it is the one that runs; another torch chooses some for itself."
    lines = [Requirement(l) for l in (ROOT/'constraints.txt').read_text('utf-8').splitlines() if l and l[0] != '#']
    assert all(str(r.specifier).startswith('==') for r in lines)
    lines = [r for r in lines if not r.marker or r.marker.evaluate()]
    pins = {canonicalize_name(r.name): r for r in lines}
    assert len(pins) == len(lines)
    other = version('torch').partition('+')[0] not in pins['torch'].specifier
    extras = distribution('shok_nb').metadata.get_all('Provides-Extra')
    for r in map(Requirement, distribution('shok_nb').requires):
        if r.marker and not any(r.marker.evaluate(dict(extra=e)) for e in extras): continue     # for another Python
        pin = pins[canonicalize_name(r.name)]
        assert version(r.name) in r.specifier, f'{r}, but {version(r.name)} runs'
        if other and r.name in ('torch', 'setuptools'): continue
        assert version(r.name) in pin.specifier, f'{pin}, but {version(r.name)} runs'

@pytest.fixture(scope='module')
def wheel(tmp_path_factory):
    "`wheel(git_url)`: name, METADATA and file names of a wheel built from settings with that URL, each built once."
    @functools.cache
    def build(git_url):
        tmp = copy(tmp_path_factory.mktemp('wheel'), 'shok_nb')
        ini = (tmp/'settings.ini').read_text('utf-8')
        (tmp/'settings.ini').write_text(re.sub(r'(?m)^git_url =.*$', f'git_url = {git_url}', ini), 'utf-8')
        run('-m', 'pip', 'wheel', '-q', '--no-deps', '--no-build-isolation', '--no-index', '-w', 'out', '.', cwd=tmp)
        path, = (tmp/'out').iterdir()
        with zipfile.ZipFile(path) as z:
            meta, = (z.read(n).decode() for n in z.namelist() if n.endswith('.dist-info/METADATA'))
            return path,Parser().parsestr(meta),z.namelist()
    return build

@pytest.mark.slow
def test_readme_runs_from_the_wheel(wheel, tmp_path):
    "In a new environment, from an empty folder: its six lines print what is under them."
    text = (ROOT/'README.md').read_text('utf-8')
    six,said = re.search(r'```python\n([^`]*?print[^`]*)```\n\n```\n(.*?)```', text, re.S).groups()
    run('-m', 'venv', tmp_path/'new')
    (tmp_path/'empty').mkdir()
    python = tmp_path/'new'/'bin'/'python'
    install = [python, '-m', 'pip', 'install', '-q', '-c', ROOT/'constraints.txt', wheel('')[0]]
    r = subprocess.run(install, capture_output=True, text=True)
    assert r.returncode == 0, r.stderr
    env = {k: v for k,v in os.environ.items() if k != 'PYTHONPATH'}
    r = subprocess.run([python, '-c', six], cwd=tmp_path/'empty', env=env, capture_output=True, text=True)
    assert r.stdout == said, r.stdout + r.stderr

def test_wheel(wheel):
    "One small wheel for every platform: the modules, py.typed, the licence, nothing else; it needs torch alone."
    cfg,(path,meta,files) = settings(),wheel('')
    assert path.name == f"shok_nb-{cfg['version']}-py3-none-any.whl" and path.stat().st_size < 200_000
    modules = {f'shok_nb/{p.name}' for p in (ROOT/'shok_nb').glob('*.py')} | {'shok_nb/py.typed'}
    assert {f for f in files if '.dist-info/' not in f} == modules
    assert any(f.endswith('licenses/LICENSE') for f in files)
    assert (meta['Name'], meta['Version'], meta['Summary']) == (cfg['lib_name'], cfg['version'], cfg['description'])
    classifiers = meta.get_all('Classifier')
    for v in cfg['pythons'].split(): assert f'Programming Language :: Python :: {v}' in classifiers
    for t in cfg['topics'].splitlines(): assert f'Topic :: {t.strip()}' in classifiers
    assert meta['Keywords'].split(',') == cfg['keywords'].split()
    assert (meta['Author'], meta['License-Expression']) == (cfg['author'], cfg['license'])
    assert meta['Requires-Python'] == f">={cfg['min_python']}"
    reqs = [Requirement(r) for r in meta.get_all('Requires-Dist')]
    extra = lambda e: names(str(r).split(';')[0] for r in reqs if r.marker and r.marker.evaluate({'extra': e}))
    assert names(str(r) for r in reqs if not r.marker) == names(cfg['requirements'].split())
    assert 'torch>=' in cfg['requirements']
    assert set(names(cfg['requirements'].split())) == {'torch'}
    assert set(meta.get_all('Provides-Extra')) == {'widgets', 'docs', 'test', 'dev'}
    assert extra('widgets') == names(cfg['widgets_requirements'].split())
    assert extra('docs').items() | extra('test').items() == extra('dev').items()

def test_no_links_into_nowhere(wheel):
    "nbdev would link other people's pages to a site that is not there."
    assert not [f for f in wheel('')[2] if f.endswith('entry_points.txt')]

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

def test_urls_only_where_configured(wheel):
    "No repository is made up: links appear once settings.ini names one."
    url = 'https://example.org/somebody/shok_nb'
    more = [f'Changelog, {url}/blob/main/CHANGELOG.md', f'Issues, {url}/issues']
    assert wheel(url)[1].get_all('Project-URL') == [f'Repository, {url}', *more]
    assert not wheel('')[1].get_all('Project-URL')

BLOCK = '''
import re, sys, torch
from importlib import import_module
class Nothing:
    def find_spec(self, name, path=None, target=None):
        top = name.partition('.')[0]
        if top not in sys.stdlib_module_names and top not in ('torch', 'shok_nb'):
            raise ModuleNotFoundError(f'No module named {top!r}', name=top)
sys.meta_path.insert(0, Nothing())
for m in set(sys.modules) - sys.stdlib_module_names:
    if m.partition('.')[0] in ('matplotlib', 'ipywidgets', 'fastcore', 'PIL', 'IPython', 'numpy'): del sys.modules[m]
'''
def test_imports_with_torch_only():
    "`import shok_nb` and every page below the sixth floor; the others name the extra they want."
    low,high = [],[]
    for nb in NBS:
        if m := re.search(r'#\| default_exp (\w+)', nb.read_text('utf-8')):
            (low if nb.stem < '6' else high).append(m[1])
    loop = f'''
import shok_nb
for m in {low}: import_module(f'shok_nb.{{m}}')
for m in {high}:
    try: import_module(f'shok_nb.{{m}}')
    except ImportError as e: assert re.search(r'pip install (matplotlib|ipywidgets|pillow)', str(e)), (m, e)
'''
    run('-c', BLOCK + loop)

def test_messages_name_packages_of_an_index():
    "What an error says to install is there for whoever has a checkout and whoever has a wheel: no extra of ours."
    said = [m for f in (ROOT/'shok_nb').glob('*.py') for m in re.findall(r'pip install ([\w ]+)', f.read_text('utf-8'))]
    extra = names(settings()['widgets_requirements'].split())
    assert said and {canonicalize_name(w) for m in said for w in m.split()} <= extra.keys()

def test_files_without_git(tmp_path, monkeypatch):
    "An unpacked archive has no .git, and a folder of somebody else's git does not look into."
    def known(): return {f for f in tracked() if f.suffix in ('.py', '.ipynb')}
    want = known()
    monkeypatch.setenv('GIT_DIR', str(tmp_path))
    assert known() == want

def test_python_is_too_old(tmp_path):
    "One line, before anything is installed."
    shutil.copytree(ROOT/'tests', tmp_path/'tests', ignore=shutil.ignore_patterns('__pycache__'))
    (tmp_path/'settings.ini').write_text('min_python = 9.1\n')
    r = subprocess.run([sys.executable, tmp_path/'tests'/'old_python.py'], capture_output=True, text=True)
    here = '.'.join(map(str, sys.version_info[:2]))
    assert r.returncode == 1
    assert r.stderr == f'shok_nb needs Python 9.1 or newer, and this is {here}: make PYTHON=python9.1\n'
    assert run('tests/old_python.py') == ''

def test_no_venv_no_python(tmp_path):
    "One line says what to install."
    (tmp_path/'ensurepip.py').write_text("raise ModuleNotFoundError('no ensurepip', name='ensurepip')")
    env = {**os.environ, 'PYTHONPATH': str(tmp_path)}
    old = [sys.executable, ROOT/'tests'/'old_python.py']
    r = subprocess.run(old, env=env, capture_output=True, text=True)
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
    rows = json.loads((ROOT/'bench'/'versions.json').read_text('utf-8'))
    if not rows: pytest.skip('make test-all TORCH=... has written no row yet')
    assert not [r['failures'] for r in rows if r['failed']]
    spec = names(settings()['requirements'].split())['torch']
    versions = sorted((tuple(map(int, r['torch'].split('.'))) for r in rows))
    (major,minor,_),(_,newest,_) = versions[0],versions[-1]
    assert set(str(spec).split(',')) == {f'>={major}.{minor}', f'<{major}.{newest+1}'}
    assert version('torch') in spec

def conf():
    "The configuration of the site."
    with mock.patch.dict(os.environ), mock.patch.object(sys, 'path', [*sys.path]):
        return runpy.run_path(str(ROOT/'docs'/'conf.py'))

def test_each_page_has_one_place():
    "In the reader's order, which begins with the overview and ends with what is under the floor."
    order = conf()['literate_order']
    places = [n for names in order.values() for n in names]
    for nb in NBS: assert places.count(slug(nb)) == 1, f'{nb.stem}: one place in literate_order of docs/conf.py, please'
    assert len({*places}) == len(places) and places[0] == 'index'
    assert list(order) == ['Start', 'Estimators', 'Training', 'Studies', 'Reference', 'How it is made']

def test_table_of_contents(caplog):
    "In the order given; a page without a place is named, and a place without its page is skipped."
    from literate import toctree
    order = dict(Start=['index', 'first'], Floor=['core'], None_yet=['later'])
    out = toctree({'core', 'index', 'first'}, order)
    assert re.findall(r'caption: (.*)', out) == ['Start', 'Floor'] and not caplog.records
    assert out.index('Overview <self>') < out.index('first') < out.index('core')
    out = toctree({'core', 'index', 'stray'}, order)
    assert 'stray: no place in literate_order' in caplog.text and out.index('core') < out.index('stray')

def as_page(*cells):
    "The code cells of the page that these sources become: (source, tags)."
    from literate import convert
    nb = dict(cells=[dict(cell_type='code', id=f'c{i}', source=c, metadata={}) for i,c in enumerate(cells)])
    made = convert(nb, {}, 'shok_nb')['cells']
    return [(c['source'], set(c['metadata']['tags'])) for c in made if c['cell_type'] == 'code']

def test_what_folds():
    "Exports, private or not, and what is longer than 20 lines, unless the cell says no; imports are not seen at all."
    long = '\n'.join(f'x{i} = {i}' for i in range(21))
    cells = as_page('#| exporti\ndef _f(): pass', '#| export\nA = 1', long, long[:-9], '#| code-fold: false\n'+long,
        '#| code-fold: true\n1', '1', '#| export\nimport torch')
    assert ['hide-input' in tags for _,tags in cells[:7]] == [True, True, True, False, False, True, False]
    assert 'remove-cell' in cells[7][1] and 'remove-cell' not in cells[0][1]

def test_a_page_runs_again(tmp_path):
    "When what it reads has changed: the library, or a file of figures that it names."
    from literate import known
    (tmp_path/'bench').mkdir()
    (tmp_path/'bench'/'results.json').write_text('1')
    (tmp_path/'bench'/'other.json').write_text('1')
    def code(text="read('results.json')", lib=b'', nbs=()): return known(lib, text, tmp_path, list(nbs))
    first = code()
    (tmp_path/'bench'/'other.json').write_text('2')
    assert code() == first != code(lib=b'2')
    assert code("glob('[0-9]*.ipynb')") != code("glob('[0-9]*.ipynb')", nbs=NBS[:1])
    (tmp_path/'bench'/'results.json').write_text('2')
    assert code() != first

def test_ticks_for_docutils():
    "What is marked as code in a comment arrives as code, whatever follows it, and nothing is lost."
    from docutils.core import publish_doctree
    from literate import _rst
    for line in ('`steps`+1 entries', '`x`, (`y`) and `a_b`s', 'a*b|c_ `*`'):
        tree = publish_doctree(_rst(line), settings_overrides=dict(report_level=1, halt_level=1))
        assert tree.astext() == line.replace('`', '')

def test_figure_alt():
    "What `#| fig-alt` says is heard by the cell that draws and by no other, and is not seen."
    (said,tags),(drawn,seen) = as_page('#| fig-alt: A "steep" line\nplot()')
    assert said == """figures.alt('A "steep" line')""" and 'remove-cell' in tags and (drawn, seen) == ('plot()', set())

def test_figures_say_what_is_seen():
    "By fig-alt, or by all that is written in them; and no rule of theirs reaches the rest of the page."
    import figures
    import matplotlib
    from shok_nb.plots import curves
    from shok_nb.soft import soft_round
    with matplotlib.rc_context(dict(backend='agg')):
        fig = curves(soft_round, alpha=(0., 2., 5.))[0].figure
        own,label = figures.svg(fig),figures.label(fig)
        figures.alt('a "b" < c')
        given = figures.svg(fig)
        figures._said.clear()
    assert 'alpha = 0, 2, 5' in label and 'what backward sees: slope over x [steps]' in label
    assert f'aria-label="{label}"' in own and 'aria-label="a &quot;b&quot; &lt; c"' in given
    rules = re.findall(r'<style[^>]*>(.*?)</style>', own, re.S)
    assert rules and all(r.startswith('.figure *{') for r in rules)

def test_links_of_tables():
    "Each name of the catalog leads to the notebook that makes it: there, in README, and on the site."
    from literate import relink
    from shok_nb.catalog import catalog, table
    for claims in (True, False):
        links = re.findall(r'\| \[`(\w+)`\]\((\w+)\.ipynb\)', table(claims=claims))
        assert [n for n,_ in links] == [r.name for r in catalog]
        assert [slug(p) for _,p in links] == [r.page for r in catalog]
        assert {p for _,p in links} <= {nb.stem for nb in NBS}
    assert '[`soft_round`](soft.ipynb)' in relink(table(), lambda stem: slug(stem) + '.ipynb')

def test_workflows():
    "They run the commands of README, on the torch and Python versions of the table."
    flows = {f.stem: f.read_text('utf-8') for f in (ROOT/'.github'/'workflows').glob('*.yml')}
    assert all('.ci/run' in flows[k] for k in ('test', 'release')) and 'make docs' in flows['site']
    pairs = set(re.findall(r'torch: "([\d.]+)", python: "([\d.]+)"', flows['versions']))
    rows = json.loads((ROOT/'bench'/'versions.json').read_text('utf-8'))
    assert pairs == {(r['torch'], '.'.join(r['python'].split('.')[:2])) for r in rows}
    assert 'make test-all TORCH=' in flows['versions'] and 'settings.ini' in flows['release']
    dev = json.loads((ROOT/'.devcontainer'/'devcontainer.json').read_text('utf-8'))
    make = (ROOT/'Makefile').read_text('utf-8')
    assert '.venv/ready' in dev['postCreateCommand'] and re.search(r'(?m)^\$\(VENV\)/ready:', make)

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

def test_python_floor():
    "The package and its tools parse as the oldest Python that settings.ini promises."
    floor = tuple(map(int, settings()['min_python'].split('.')))
    for f in tracked():
        if f.suffix == '.py': ast.parse(f.read_text('utf-8'), f.name, feature_version=floor)

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
    pages = sorted(site.glob('*.html'))
    assert len(pages) >= len(NBS) + 2                                  # and the index of names, and the search
    for p in pages:
        for u in Loads(p).urls:
            if u.startswith(('data:', '#')): continue
            assert not re.match(r'\w+:|//', u), f'{p.name} loads {u}'
            assert (p.parent/re.split('[?#]', u)[0]).exists(), f'{p.name} wants {u}'
    for css in site.rglob('*.css'):
        for u in re.findall(r'url\(\s*["\']?([^"\')]+)|@import\s+["\']([^"\']+)', css.read_text('utf-8')):
            u = ''.join(u)
            assert u.startswith(('data:', '#')) or (css.parent/re.split('[?#]', u)[0]).exists(), f'{css.name} wants {u}'
    ours = [*(site/'_static').glob('*.js'), *(site/'_static'/'scripts').glob('*.js')]
    foreign = re.compile(r'googletagmanager|google-analytics|cdn\.|unpkg|jsdelivr')
    assert not [f.name for f in ours if foreign.search(f.read_text('utf-8'))]

@site_group
def test_site_shows_no_directives(site):
    "Readers see code, not instructions to nbdev; every page is in the table of contents."
    index = (site/'index.html').read_text('utf-8')
    for nb in NBS:
        name = slug(nb) + '.html'
        assert name == 'index.html' or f'href="{name}"' in index, nb.name
        text = re.sub('<[^>]+>', '', (site/name).read_text('utf-8'))
        assert not re.search(r'#\|\s*\w', text), nb.name

@site_group
def test_next_page_is_the_readers(site):
    "From each page one goes on to the next of the order, over the ends of the groups too."
    pages = [n for names in conf()['literate_order'].values() for n in names if (site/f'{n}.html').exists()]
    for page,after in zip(pages, pages[1:]):
        link = re.search(r'<a class="next-page" href="([^"#]+)', (site/f'{page}.html').read_text('utf-8'))
        assert link[1] == f'{after}.html', f'{page} leads to {link[1]}'

@site_group
def test_api_entries(site):
    "Every public function of a page has its entry, and each parameter its line."
    pages = {p.stem: p.read_text('utf-8') for p in site.glob('*.html')}
    for nb in NBS:
        for c in json.loads(nb.read_text('utf-8'))['cells']:
            src = ''.join(c['source'])
            if not re.match(r'#\| exports?\n', src) or c['cell_type'] != 'code': continue
            for n in ast.parse(src).body:
                if isinstance(n, (ast.FunctionDef, ast.ClassDef)) and not n.name.startswith('_'):
                    page = pages[slug(nb)]
                    assert re.search(rf'<dt class="sig[^>]*id="shok_nb\.\w+\.{n.name}"', page), f'{nb.stem}: {n.name}'

@site_group
def test_api_page(site):
    "All that is public, with its methods and examples, and the index of names, both a click away from any page."
    from test_help import PUBLIC
    page,names = ((site/f'{p}.html').read_text('utf-8') for p in ('api', 'genindex'))
    for name in PUBLIC:
        module,_,name = name.partition('.')
        last = name.rpartition('.')[2]
        assert re.search(rf'<span class="sig-name descname"><span class="pre">{last}</span>', page), name
        if '.' in name: assert f'id="shok_nb.{module}.{name}"' in page and f'#shok_nb.{module}.{name}"' in names, name
    assert page.count('highlight-pycon') == len(PUBLIC)
    tree = re.search('(?s)<div class="sidebar-tree">.*?</div>', (site/'soft.html').read_text('utf-8'))[0]
    assert 'href="api.html"' in tree and 'href="genindex.html"' in tree

@site_group
def test_parameters_are_shown_once(site):
    "The docstring and the signature name the same; a reader sees one list."
    page = (site/'soft.html').read_text('utf-8')
    entry = page.partition('id="shok_nb.soft.soft_round"')[2].partition('<dt class="sig')[0]
    for p in ('x', 'alpha', 'hard', 'step', 'offset'): assert entry.count(f'<strong>{p}</strong>') == 1, p
    assert 'Parameters:\n' not in entry and entry.count('highlight-pycon') == 1

def found(site, query):
    "Pages of the site that hold every word of `query`, as the search of the site looks for them."
    from sphinx.search.en import SearchEnglish
    english = SearchEnglish({})
    index = json.loads((site/'searchindex.js').read_text('utf-8').removeprefix('Search.setIndex(').rstrip(';\n)'))
    def pages(word):
        hits = [index[kind].get(english.stem(word), []) for kind in ('terms', 'titleterms')]
        return {index['docnames'][i] for h in hits for i in (h if isinstance(h, list) else [h])}
    return set.intersection(*(pages(w) for w in re.findall(r'\w+', query.lower()) if w not in english.stopwords))

WANTED = {'onnx': 'deploy digits', 'anneal': 'schedules', 'straight-through': 'ste', 'fake quantization': 'quantize',
    'learning rate': 'schedules', 'per channel': 'quantize grid calibrate', 'codec': 'jpeg', 'vmap': 'core'}

@site_group
@pytest.mark.parametrize('query', WANTED)
def test_search_finds(site, query):
    "What people type leads to the page that answers."
    assert set(WANTED[query].split()) <= found(site, query)

URLS = dict(none='', other='https://example.org/somebody/shok_nb', github='https://github.com/somebody/shok_nb')

@pytest.mark.slow
@site_group
@pytest.mark.parametrize('url', URLS.values(), ids=URLS)
def test_links_only_where_configured(url, tmp_path):
    "A page links to its notebook once there is a repository, and to Colab where Colab can open it."
    (tmp_path/'nbs').mkdir()
    for n in ('index', '10_ste'): shutil.copy(ROOT/'nbs'/f'{n}.ipynb', tmp_path/'nbs')
    sphinx(tmp_path/'src', tmp_path/'out', '-D', f'literate_nbs={tmp_path}/nbs', '-D', f'literate_git_url={url}',
        '-D', 'nb_execution_mode=off', '-D', 'suppress_warnings=myst.xref_missing,mystnb.unknown_mime_type')
    page = (tmp_path/'out'/'ste.html').read_text('utf-8')
    assert (f'href="{url}/blob/main/nbs/10_ste.ipynb"' in page) == bool(url)
    assert ('colab' in page) == ('github' in url)
    assert url or 'Notebook source' not in page
    citing = (tmp_path/'out'/'index.html').read_text('utf-8').partition('id="citing"')[2]
    assert (f'href="{url}/blob/main/CITATION.cff"' in citing) == bool(url) and 'CITATION.cff' in citing
    assert '../CITATION' not in citing
    assert page.count('<summary>Parameters</summary>') >= 5 and page.count('<details') == page.count('</details>')
