"The pages as the site runs them, each once in a run of the tests: by the worker that asks first."
import functools
import os
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock
import nbformat
from filelock import FileLock

DOCS = Path(__file__).resolve().parents[1]/'docs'
SOURCE, HTML = DOCS/'nbs', DOCS/'_build'/'html'                     # those of `make docs`

def cache_of(basetemp):
    "The folder of the pages that ran, for all workers of this run of the tests and for no other."
    folder = (basetemp.parent if 'PYTEST_XDIST_WORKER' in os.environ else basetemp)/'pages'
    folder.mkdir(exist_ok=True)
    return folder

def lock(folder, name): return FileLock(folder/f'{name}.lock')

@functools.cache
def written(folder):
    "Write the pages of the site. Returns its configuration."
    conf = runpy.run_path(str(DOCS/'conf.py'))
    from literate import write_pages
    options = {k: v for k,v in conf.items() if k.startswith('literate_')}
    config = SimpleNamespace(literate_nbs='../nbs', **options)
    with lock(folder, 'all'):
        SOURCE.mkdir(exist_ok=True)
        write_pages(SimpleNamespace(config=config, confdir=DOCS, srcdir=SOURCE))
    return conf

def execute(nb, folder):
    """Run the page of the notebook `nb` as the site does and keep it in `folder`, unless
    it is there. Raises what a cell raises."""
    with mock.patch.dict(os.environ), mock.patch.object(sys, 'path', [str(DOCS/'_ext'), *sys.path]):
        conf = written(folder)
        os.environ.update(IN_TEST='1', OMP_NUM_THREADS='1', PYTHONPATH=os.pathsep.join(conf['paths']))
        from jupyter_cache import get_cache
        from jupyter_cache.base import CacheBundleIn
        from jupyter_cache.executors.utils import single_nb_execution
        from literate import slug
        path = SOURCE/f'{slug(nb)}.ipynb'
        with lock(folder, path.stem):
            page = nbformat.read(path, 4)
            with lock(folder, 'all'):
                cache = get_cache(folder)
                try: return cache.match_cache_notebook(page)
                except KeyError: pass
            made = single_nb_execution(page, str(SOURCE), timeout=conf['nb_execution_timeout'], allow_errors=False)
            if made.err: raise made.err
            bundle = CacheBundleIn(page, str(path), data=dict(execution_seconds=made.time))
            with lock(folder, 'all'): return cache.cache_notebook_bundle(bundle, check_validity=False, overwrite=True)
