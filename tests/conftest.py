import compileall
import gc
import importlib
import sys
from pathlib import Path
import pytest
import torch

HERE = Path(__file__).parent
ROOT = HERE.parent
sys.path[:0] = map(str, (HERE, ROOT, ROOT/'bench', ROOT/'docs', ROOT/'docs'/'_ext'))
from once import once  # noqa: E402 (found by the line above)

torch.set_num_threads(1)                  # the tests run side by side; those about threads set their own
once()
gc.set_threshold(100_000, 10, 10)         # Python looks for garbage less often: tests make much and lose little

def pytest_configure(config):
    "The bytecode of our modules, for all that tests start: where PYTHONDONTWRITEBYTECODE is set each would make it."
    if hasattr(config, 'workerinput'): return
    for folder in ('shok_nb', 'docs/_ext'): compileall.compile_dir(ROOT/folder, quiet=2)

@pytest.fixture(autouse=True)
def same_draws():
    "What a test draws without a seed of its own does not depend on the tests before it."
    torch.manual_seed(0)

@pytest.fixture(autouse=True)
def fresh_compiler():
    "A test that compiles starts from nothing."
    yield
    if 'torch._dynamo' in sys.modules: torch._dynamo.reset()              # importing it takes longer than most files

@pytest.fixture(autouse=True, scope='module')
def old_objects_stay():
    """What a file of tests leaves, torch's modules above all, nobody walks over again: not the garbage collector, and
    not `quantize_model_`, which looks for optimizers."""
    gc.collect()
    gc.freeze()

def forget_modules():
    "Dynamo keeps modules by name, and would take one package for the other."
    cached = getattr(importlib.import_module('torch._dynamo.symbolic_convert'), '_import_module', None)
    if cached: cached.cache_clear()
    for m in [*sys.modules.values()]:
        for k in [k for k in vars(m) if k.startswith('__import_shok_nb')] if hasattr(m, '__dict__') else ():
            del vars(m)[k]

@pytest.fixture
def again():
    "`again()`: the package, imported once more beside the usual one."
    forget_modules()
    ours = {k: m for k,m in sys.modules.items() if k.partition('.')[0] == 'shok_nb'}
    def load():
        for k in ours: sys.modules.pop(k, None)
        return importlib.import_module('shok_nb')
    yield load
    for k in [k for k in sys.modules if k.partition('.')[0] == 'shok_nb']: del sys.modules[k]
    sys.modules.update(ours)
    forget_modules()

@pytest.fixture(scope='session')
def ran(tmp_path_factory):
    "The folder of the pages that ran."
    from pages import cache_of
    return cache_of(tmp_path_factory.getbasetemp())

@pytest.fixture(scope='session')
def site(ran):
    "The whole site: the worker that asks first builds it, the others wait."
    from pages import HTML, build_site, lock
    built = ran/'site'
    with lock(ran, 'site'):
        if not built.exists():
            build_site(ran)
            built.touch()
    return HTML

@pytest.fixture(scope='module')
def started(tmp_path_factory):
    "The chromiums of a file of tests."
    drivers = []
    yield drivers
    for driver in drivers: driver.quit()

@pytest.fixture
def browser(started, tmp_path_factory):
    "A headless chromium that logs every request: that of the test before, unless it is dead."
    from browser import alive, chrome
    if not (started and alive(started[-1])): started.append(chrome(tmp_path_factory.mktemp('chromium')))
    return started[-1]

def pytest_collection_finish():
    "What there is before the first test stays: to look through it for garbage took a third of the time of some files."
    gc.collect()
    gc.freeze()

def pytest_collection_modifyitems(items):
    "`-k soft` finds the groups in which there is a soft one."
    for i in items:
        group = getattr(i, 'callspec', None) and i.callspec.params.get('group')
        i.extra_keyword_matches.update(getattr(group, 'ids', ()))        # a group of rows, found by the name of each
