"""Training in few bits: the language model of nbs/low_precision/05_four_bits.ipynb with each recipe, from five seeds.

    .venv/bin/python bench/low_precision.py

bench/low_precision.json holds a row for each recipe and seed: the loss on new text, and the seconds of one processor.
The model and its training are the page's own cells; a seed decides weights, batches and draws. The text is that of the
Python that runs. What is done already is not done again, and two processes work. `make study` runs it too. It takes
about half an hour."""
import os
import platform
import time
from pathlib import Path

os.environ.setdefault('OMP_NUM_THREADS', '1')               # before torch is imported
import torch  # noqa: E402
from jobs import names_of, run  # noqa: E402

TABLE = Path(__file__).with_name('low_precision.json')
PAGE = Path(__file__).parents[1]/'nbs'/'low_precision'/'05_four_bits.ipynb'
CELLS = 'imports','model','kinds'                           # their ids
SEEDS = range(1, 6)                                         # what was chosen by hand was chosen with seed 0

def row_of(seed, kind):
    "One training."
    torch.set_num_threads(1)
    p = names_of(PAGE, CELLS)
    begin = time.process_time()
    loss = p['trained'](kind, seed)
    return dict(kind=kind, seed=seed, loss=loss, seconds=round(time.process_time()-begin, 1))

def main():
    "All rows that are not there yet. Kinds take turns, so that their seconds compare."
    jobs = [(seed, kind) for seed in SEEDS for kind in names_of(PAGE, CELLS)['KINDS']]
    versions = dict(torch=torch.__version__.partition('+')[0], python=platform.python_version())
    run(__doc__, TABLE, row_of, jobs, ('seed', 'kind'), **versions)

if __name__ == '__main__': main()
