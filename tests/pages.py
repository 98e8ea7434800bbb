"The pages as the site runs them, each once in a run of the tests: by the worker that asks first."
import asyncio
import compileall
import contextlib
import functools
import json
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from queue import Empty
from types import SimpleNamespace
from unittest import mock
import nbformat
import zmq.asyncio
from filelock import FileLock

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT/'docs'
sys.path[:0] = map(str, (DOCS/'_ext', ROOT))                        # for what makes the site
from literate import by_reader, grouped, slug, write_pages  # noqa: E402 (found by the line above)

SOURCE, HTML = DOCS/'nbs', DOCS/'_build'/'html'                     # those of `make docs`
CACHE = DOCS/'_build'/'pages'                                       # the pages that ran for it, as conf.py has it
FOLDERS = {f: pages for f,pages in grouped(ROOT/'nbs').items() if f}
NBS = [p for pages in grouped(ROOT/'nbs').values() for p in pages]
# ten seconds and more
TRAINS = set('''accumulators without_training four_bits digits residual quantization_recipes foreign reconstruct
    equalize rotate everywhere runtime source_coding weights aware binary updates lattice demo speed sizes'''.split())
# and three seconds: each runs once, in the slow rest
LATE = TRAINS | set('''core proof try_it models tokenizers recipes signs closest straight_through_fails
    first_network checks operations deploy spikes design relaxed schedules ewgs harness surrogates neighbours
    widgets nn sigmoid jpeg fsq pieces lab dither floats products files blocks stochastic plots index
    quantizer fourier gallery gradient codebooks hardware weight_codes stored soft ste random calibrate learned
    ramp fake_quantize ratio bounds fixed_point watermark flow scores attention'''.split())

def cells(nb, *kinds):
    "The cells of a notebook, or those of some kinds; the source of each is one text."
    found = (c | dict(source=''.join(c['source'])) for c in json.loads(nb.read_text('utf-8'))['cells'])
    return [c for c in found if not kinds or c['cell_type'] in kinds]

def cache_of(basetemp):
    "The folder of the pages that ran, for all workers of this run of the tests and for no other."
    folder = (basetemp.parent if 'PYTEST_XDIST_WORKER' in os.environ else basetemp)/'pages'
    folder.mkdir(exist_ok=True)
    return folder

def lock(folder, name): return FileLock(folder/f'{name}.lock')

@functools.cache
def conf():
    "The configuration of the site; it leaves the path and the environment as they were."
    with mock.patch.dict(os.environ), mock.patch.object(sys, 'path', [*sys.path]):
        return runpy.run_path(str(DOCS/'conf.py'))

def by_group():
    "The groups of the site's menu, each with its notebooks."
    titles,places = (conf()[f'literate_{k}'] for k in ('folders', 'places'))
    return by_reader({f: FOLDERS[f] for f in titles if f in FOLDERS}, places)

@functools.cache
def written(folder, nbs=Path('../nbs'), src=SOURCE):
    "Write the pages of the notebooks of `nbs`, as seen from docs, to `src`."
    options = {k: v for k,v in conf().items() if k.startswith('literate_')}
    config = SimpleNamespace(literate_nbs=nbs, **options)
    with lock(folder, 'all'):
        src.mkdir(exist_ok=True)
        write_pages(SimpleNamespace(config=config, confdir=DOCS, srcdir=src))

def for_kernels():
    "What the kernels of pages find in their environment."
    return dict(IN_TEST='1', OMP_NUM_THREADS='1', PYTHONPATH=os.pathsep.join(conf()['paths']))

class Kernel:
    "A process that is not our child, with what jupyter_client asks of one."
    stdin = stdout = stderr = None
    def __init__(self, pid): self.pid = pid
    def send_signal(self, s): os.kill(self.pid, s)
    def terminate(self): self.send_signal(signal.SIGTERM)
    def kill(self): self.send_signal(signal.SIGKILL)

    def poll(self):
        try: self.send_signal(0)
        except ProcessLookupError: return 0

    def wait(self, timeout=None):
        while self.poll() is None: time.sleep(.01)
        return 0

@functools.cache
def warm():
    "The process whose forks are kernels."
    backend = 'module://matplotlib_inline.backend_inline'               # as a kernel has it
    env = os.environ | dict(MPLBACKEND=backend, OMP_NUM_THREADS='1', PYDEVD_DISABLE_FILE_VALIDATION='1')
    program = [sys.executable, Path(__file__).with_name('warm_kernel.py')]
    return subprocess.Popen(program, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

_asking = multiprocessing.Lock()                                    # forks of this process ask the same one

def fork_kernel(cmd, cwd=None, env=None, **_):
    "`jupyter_client.launcher.launch_kernel` without the imports."
    job = dict(cmd=[*map(str, cmd)], cwd=str(cwd or os.getcwd()), env=dict(os.environ if env is None else env))
    with _asking:
        for _ in range(2):                                              # one that has died is started again
            with contextlib.suppress(BrokenPipeError):
                print(json.dumps(job), file=warm().stdin, flush=True)
                if pid := warm().stdout.readline(): return Kernel(int(pid))
            warm.cache_clear()
    raise RuntimeError('no kernel started: tests/warm_kernel.py ends before it says which process it is')

async def ready(client, timeout=60):
    """`wait_for_ready` without a wait for silence: once IOPub has answered a request of ours, the client hears all that
    is said there, so it loses nothing of the first cell."""
    asked,end,wait = set(),time.monotonic()+timeout,.05
    while True:
        asked.add(client.kernel_info())
        try:
            while (await client.get_iopub_msg(timeout=wait))['parent_header'].get('msg_id') not in asked: pass
            return
        except Empty: wait *= 1.2            # 30 requests in a minute; a socket with a thousand waits for ever
        if not await client.is_alive(): raise RuntimeError('the kernel ended before it was ready')
        if time.monotonic() > end: raise RuntimeError(f'the kernel was not ready in {timeout} seconds')

async def ended(manager, **_):
    "`KernelManager._async_wait` that looks every 5 ms, not every 100."
    while await manager.is_alive(): await asyncio.sleep(.005)

def eager_context(made=zmq.asyncio.Context):
    "Its sockets try again every 3 ms, not every 100: a client asks before its kernel listens."
    context = made()
    context.setsockopt(zmq.RECONNECT_IVL, 3)
    return context

@contextlib.contextmanager
def forks():
    "Kernels are forks inside this, where a fork is as good as a new process, and start and end without waiting."
    if sys.platform != 'linux': return (yield)
    provisioner = 'jupyter_client.provisioning.local_provisioner'
    with (mock.patch(f'{provisioner}.launch_kernel', fork_kernel), mock.patch('zmq.asyncio.Context', eager_context),
          mock.patch('jupyter_client.asynchronous.client.AsyncKernelClient.wait_for_ready', ready),
          mock.patch('jupyter_client.manager.KernelManager._async_wait', ended)): yield

def notebook(*cells):
    "A notebook of these; a cell that is a text is one of code."
    v4 = nbformat.v4
    made = [v4.new_code_cell(c, id=f'c{i}') if isinstance(c, str) else c for i,c in enumerate(cells)]
    return v4.new_notebook(cells=made)

def played(*sources, cwd):
    "These cells of code after a kernel has run them, errors and all."
    from nbclient import NotebookClient
    nb,resources = notebook(*sources),dict(metadata=dict(path=cwd))
    with forks(): NotebookClient(nb, allow_errors=True, timeout=600, resources=resources).execute()
    return nb.cells

def has_run(page, folder):
    "Is it in that cache, as it is now?"
    from jupyter_cache import get_cache
    with lock(folder, 'all'):
        try: get_cache(folder).match_cache_notebook(page)
        except KeyError: return False
    return True

def execute(nb, folder, *where):
    """Run the page of the notebook `nb` as the site does and keep it in `folder`, unless
    it is there. Raises what a cell raises. For another site, `where` is what `written` takes."""
    written(folder, *where)
    with mock.patch.dict(os.environ, for_kernels()):
        from jupyter_cache import get_cache
        from jupyter_cache.base import CacheBundleIn
        from jupyter_cache.executors.utils import single_nb_execution
        path = (where[1] if where else SOURCE)/f'{slug(nb)}.ipynb'
        with lock(folder, path.stem):
            page = nbformat.read(path, 4)
            if has_run(page, folder): return
            timeout = conf()['nb_execution_timeout']
            with forks(): made = single_nb_execution(page, str(path.parent), timeout=timeout, allow_errors=False)
            if made.err: raise made.err
            bundle = CacheBundleIn(page, str(path), data=dict(execution_seconds=made.time))
            for f in {folder} if where else {folder, CACHE}:         # `make docs` need not run it again
                f.mkdir(parents=True, exist_ok=True)
                with lock(f, 'all'): get_cache(f).cache_notebook_bundle(bundle, check_validity=False, overwrite=True)

def sphinx(src, out, *args):
    "Build a site with the configuration of ours; a warning is an error."
    src.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, '-m', 'sphinx', '-W', '--keep-going', '-q', '-c', 'docs', *map(str, args), src, out]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout+run.stderr
    return out

def build_site(ran):
    """The whole site, as `make docs` builds it: from the pages that `make test` ran, if they are as they were. Others
    run now, and are in `ran` for the tests."""
    written(ran)
    with mock.patch.dict(os.environ, for_kernels()):
        for nb in NBS:
            if not has_run(nbformat.read(SOURCE/f'{slug(nb)}.ipynb', 4), CACHE): execute(nb, ran)
    return sphinx(SOURCE, HTML, '-D', f'nb_execution_cache_path={CACHE}')

def keep(nb):
    "Run a page for `make docs`. What its kernel says to the terminal is dropped; an error of a cell is not."
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    try: execute(nb, CACHE)
    except Exception as e: raise RuntimeError(f'{nb}: {e}') from None

def main(jobs):
    "Run the pages for `make docs`, so many at a time; those that ran stay."
    CACHE.mkdir(parents=True, exist_ok=True)
    for folder in (ROOT/'shok_nb', DOCS/'_ext'): compileall.compile_dir(folder, quiet=2)     # as conftest.py does
    start = 'spawn'
    if sys.platform == 'linux':                                      # all jobs share what is made here
        start = 'fork'
        written(CACHE)
        os.environ.update(for_kernels())
        warm()
    with ProcessPoolExecutor(jobs, multiprocessing.get_context(start)) as pool: list(pool.map(keep, NBS))

if __name__ == '__main__': main(int(sys.argv[1]))
