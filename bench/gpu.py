"""What only a GPU can check, in one command: `make gpu`. Writes GPU.md beside this
file, the table to commit, and prints it.

Without a GPU `make test-all` on a torch built for CUDA runs fake tensors through everything (tests/test_fake_cuda.py):
devices, dtypes, shapes, waiting, and the kernels that Inductor writes. Left for here: that they compile, that numbers
and gradients are those of the CPU, memory, graphs, and time."""
import datetime
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from xml.etree.ElementTree import ParseError
import torch
from versions import row

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
PARTS = {                                     # what it shows, and the tests that show it
    'the laws of every estimator, tensors made on the GPU': ['-p', 'on_cuda', 'tests/test_contract.py'],
    'every transform, and generated code': ['-p', 'on_cuda', 'tests/test_probes.py', '-W', 'error:.*runs unfused'],
    'the floor': ['-p', 'on_cuda', 'tests/test_floor.py', '-k', 'not check_knob'],
    'noise as on the CPU, CUDA graphs': ['tests', '-k', 'cuda and not fake']}

def counted(xml):
    "Passed, failed and skipped in a report of pytest's; errors count as failed. None if there is no report."
    try: found = row(xml)
    except (OSError, ParseError): return None
    return found['passed'],found['failed'],found['skipped']

def run(args, device):
    "One part in a Python of its own: its counts, and minutes."
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as tmp:
        xml = Path(tmp)/'report.xml'
        env = os.environ | dict(PYTHONPATH=str(HERE), SHOK_DEVICE=device)
        command = [sys.executable, '-m', 'pytest', '-q', '-p', 'no:cacheprovider', f'--junitxml={xml}']
        r = subprocess.run([*command, *args], cwd=ROOT, env=env)
        got = counted(xml)
    return (*(got or (0, 'no report', 0)), (time.monotonic()-start)/60), r.returncode in (0, 5) and got is not None

def table(rows, device):
    "The counts as Markdown, with the machine they are of."
    name = torch.cuda.get_device_name() if device == 'cuda' else f'the CPU of {platform.node()}, a trial'
    made = f'Written by `make gpu` on {datetime.date.today()}'
    versions = f'torch {torch.__version__}, CUDA {torch.version.cuda}, Python {platform.python_version()}'
    out = ['# On a GPU', '', f'{made}: {name}, {versions}.', '',
        '| what | passed | failed | skipped | minutes |', '| --- | --- | --- | --- | --- |']
    out += [f'| {what} | {p} | {f} | {s} | {m:.1f} |' for what,(p,f,s,m) in rows.items()]
    return '\n'.join(out) + '\n'

def main():
    device = os.environ.get('SHOK_DEVICE', 'cuda')
    if device == 'cuda' and not torch.cuda.is_available():
        sys.exit('gpu: torch finds no CUDA device here; SHOK_DEVICE=cpu tries the command')
    rows,well = {},True
    for what,args in PARTS.items():
        rows[what],good = run([*args, *sys.argv[1:]], device)
        well = well and good
    text = table(rows, device)
    if device == 'cuda': (HERE/'GPU.md').write_text(text, 'utf-8')
    print('\n' + text)
    return not well

if __name__ == '__main__': sys.exit(main())
