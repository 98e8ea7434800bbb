"""What only a GPU can check, in one command and at most eight minutes: `python bench/gpu.py`. It needs torch, pytest,
hypothesis and mpmath, installs nothing, and uses xdist where it is. GPU.md beside this file is the table to commit: it
is written anew after each part, the most important first, so that a run that is cut off leaves what it has found.

Without a GPU `make test-all` on a torch built for CUDA runs fake tensors through everything (tests/test_fake_cuda.py):
devices, dtypes, shapes, waiting, and the kernels that Inductor writes. Left for here: that they compile, that numbers
and gradients are those of the CPU, graphs, and time. SHOK_DEVICE=cpu is a rehearsal."""
import argparse
import datetime
import importlib.util
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple
import torch

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent

class Part(NamedTuple):
    "Something to run in a Python of its own: pytest with these arguments, or, if `script`, one of our scripts."
    what:str
    args:tuple
    most:float = 120.       # seconds
    script:bool = False

PARTS = [
    Part('values, gradients and seeded noise of every estimator: those of the CPU', ('bench/as_on_cpu.py',), 60),
    Part('noise, and CUDA graphs', ('tests/test_random.py', 'tests/test_scale_grad.py', '-k', 'cuda and not fake'), 40),
    Part('the laws of every estimator, tensors made on the GPU', ('-p', 'on_cuda', 'tests/test_contract.py'), 90),
    Part('times', ('bench/on_cuda_times.py',), 150, True),
    Part('every transform, and generated code', ('-p', 'on_cuda', 'tests/test_probes.py', '-W', 'error:.*runs unfused'),
        240),
    Part('the floor', ('-p', 'on_cuda', 'tests/test_floor.py', '-k', 'not check_knob'), 60)]

def counted(file):
    "How many tests have passed, failed and been skipped so far; an error counts as a failure."
    words = Counter(line.partition(' ')[0] for line in file.read_text('utf-8').splitlines()) if file.exists() else {}
    return tuple(words.get(w, 0) for w in ('passed', 'failed', 'skipped'))

def command(part, device, more):
    "What a shell would be given."
    if part.script: return [sys.executable, *part.args]
    cores = min(16, os.cpu_count() or 1)
    side_by_side = device == 'cuda' and importlib.util.find_spec('xdist') and cores > 2
    each = ['-n', str(cores)] if side_by_side else ['-p', 'no:xdist'] if importlib.util.find_spec('xdist') else []
    return [sys.executable, '-m', 'pytest', '-q', '-p', 'no:cacheprovider', '-p', 'outcomes', *each, *part.args, *more]

def run(part, device, seconds, more=()):
    "One part: its counts or its table, the minutes, and how it ended: '' is well."
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as tmp:
        out = Path(tmp)/'found'
        path = os.pathsep.join([str(HERE), str(ROOT), *filter(None, [os.environ.get('PYTHONPATH')])])
        env = os.environ | dict(PYTHONPATH=path, SHOK_DEVICE=device, SHOK_FOUND=str(out))
        p = subprocess.Popen(command(part, device, more), cwd=ROOT, env=env, start_new_session=True)
        try: ended = p.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(p.pid, signal.SIGKILL)
            p.wait()
            ended = 'cut'
        found = (out.read_text('utf-8') if out.exists() else '') if part.script else counted(out)
    said = 'cut off' if ended == 'cut' else '' if ended in ((0,) if part.script else (0, 5)) else f'ended with {ended}'
    return found,(time.monotonic()-start)/60,said

def table(rows, device):
    "What has been found so far as Markdown, with the machine."
    name = torch.cuda.get_device_name() if device == 'cuda' else f'the CPU of {platform.node()}, a rehearsal'
    made = f'Written by `python bench/gpu.py` on {datetime.date.today()}'
    versions = f'torch {torch.__version__}, CUDA {torch.version.cuda}, Python {platform.python_version()}'
    out = ['# On a GPU', '', f'{made}: {name}, {versions}.', '',
        '| what | passed | failed | skipped | minutes | |', '| --- | --- | --- | --- | --- | --- |']
    for part,found,minutes,said in rows:
        counts = found if isinstance(found, tuple) else ('', '', '')
        out.append(f'| {part.what} | ' + ' | '.join(map(str, counts)) + f' | {minutes:.1f} | {said} |')
    for part,found,*_ in rows:
        if isinstance(found, str) and found: out += ['', f'## {part.what.capitalize()}', found.rstrip('\n')]
    return '\n'.join(out) + '\n'

def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--minutes', type=float, default=8., help='of all parts; each has a limit of its own too')
    p.add_argument('--out', type=Path, default=HERE/'GPU.md', help='the table; a rehearsal writes none unless asked')
    a,more = p.parse_known_args()
    device = os.environ.get('SHOK_DEVICE', 'cuda')
    if device == 'cuda' and not torch.cuda.is_available():
        sys.exit('gpu: torch finds no CUDA device here; SHOK_DEVICE=cpu is a rehearsal')
    writes = device == 'cuda' or a.out != HERE/'GPU.md'
    end,rows = time.monotonic()+60*a.minutes,[]
    for part in PARTS:
        left = end-time.monotonic()
        if left < 5: rows.append((part, (0, 0, 0) if not part.script else '', 0., 'no time left'))
        else: rows.append((part, *run(part, device, min(left, part.most), more)))
        if writes: a.out.write_text(table(rows, device), 'utf-8')
    print('\n' + table(rows, device))
    return any(said or isinstance(found, tuple) and found[1] for _,found,_,said in rows)

if __name__ == '__main__': sys.exit(main())
