"""Tokenizers at equal bits: the autoencoder of nbs/quantization/60_tokenizers.ipynb with each of them, from five seeds.

    .venv/bin/python bench/tokens.py

bench/tokens.json holds a row for each tokenizer and seed: the squared error on digits that were not trained on, and
how the 256 codes are used. The network and its training are the page's own cells. What is done already is not done
again, and two processes work. `make study` runs it too. It takes about five minutes."""
import os
import time
from pathlib import Path

os.environ.setdefault('OMP_NUM_THREADS', '1')               # before torch is imported
import torch  # noqa: E402
from jobs import names_of, run  # noqa: E402

TABLE = Path(__file__).with_name('tokens.json')
PAGE = Path(__file__).parents[1]/'nbs'/'quantization'/'60_tokenizers.ipynb'
CELLS = 'imports','digits','autoencoder'                        # their ids
SEEDS = range(1, 6)                                         # what was chosen by hand was chosen with seed 0

def row_of(kind, seed):
    "One training."
    torch.set_num_threads(1)
    p = names_of(PAGE, CELLS)
    begin = time.process_time()
    error,usage = p['measured'](p['train'](*p['KINDS'][kind], seed=seed))
    return dict(kind=kind, seed=seed, error=error, used=usage.used, perplexity=usage.perplexity,
        seconds=round(time.process_time()-begin, 1))

def main():
    "All rows that are not there yet."
    jobs = [(kind, seed) for kind in names_of(PAGE, CELLS)['KINDS'] for seed in SEEDS]
    run(__doc__, TABLE, row_of, jobs, ('kind', 'seed'), torch=torch.__version__.partition('+')[0])

if __name__ == '__main__': main()
