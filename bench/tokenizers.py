"""Tokenizers at equal bits: the autoencoder of nbs/quantization/60_tokenizers.ipynb with each of them, from five seeds.

    .venv/bin/python bench/tokenizers.py

bench/tokenizers.json holds a row for each tokenizer and seed: the squared error on digits that were not trained on, and
how the 256 codes are used. The network and its training are the page's own cells. What is done already is not done
again, and two processes work. `make study` runs it too. It takes about five minutes."""
import argparse
import json
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

os.environ.setdefault('OMP_NUM_THREADS', '1')               # before torch is imported
sys.path[:] = [p for p in sys.path if Path(p).resolve() != Path(__file__).resolve().parent]    # or this is `tokenizers`
import torch  # noqa: E402

TABLE = Path(__file__).with_name('tokenizers.json')
PAGE = Path(__file__).parents[1]/'nbs'/'quantization'/'60_tokenizers.ipynb'
CELLS = 'imports','digits','autoencoder'                        # their ids
SEEDS = range(1, 6)                                         # what was chosen by hand was chosen with seed 0

def page():
    "What the cells of the page define, its pictures unseen."
    os.environ['MPLBACKEND'] = 'agg'
    found = {}
    cells = {c['id']: ''.join(c['source']) for c in json.loads(PAGE.read_text('utf-8'))['cells']}
    for name in CELLS: exec(cells[name], found)
    return found

def row_of(kind, seed):
    "One training."
    torch.set_num_threads(1)
    p = page()
    begin = time.process_time()
    error,usage = p['measured'](p['train'](*p['KINDS'][kind], seed=seed))
    return dict(kind=kind, seed=seed, error=error, used=usage.used, perplexity=usage.perplexity,
        seconds=round(time.process_time()-begin, 1))

def main():
    "All rows that are not there yet."
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.parse_args()
    kinds = [*page()['KINDS']]
    rows = json.loads(TABLE.read_text('utf-8'))['rows'] if TABLE.exists() else []
    done = {(r['kind'], r['seed']) for r in rows}
    todo = [(kind, seed) for kind in kinds for seed in SEEDS if (kind, seed) not in done]
    with ProcessPoolExecutor(2, get_context('spawn')) as pool:
        for n,row in enumerate(as_completed([pool.submit(row_of, *job) for job in todo]), 1):
            rows.append(row.result())
            print(f'{n}/{len(todo)}', rows[-1], flush=True)
            rows.sort(key=lambda r: (kinds.index(r['kind']), r['seed']))
            versions = dict(torch=torch.__version__.partition('+')[0])
            lines = ',\n'.join(json.dumps(r) for r in rows)
            TABLE.write_text(f'{{"versions": {json.dumps(versions)}, "rows": [\n{lines}\n]}}\n', 'utf-8')

if __name__ == '__main__': main()
