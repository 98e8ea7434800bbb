"""Every method of `reconstruct_` on one network and four numbers of bits: the error of the logits, in dB.

    .venv/bin/python bench/methods.py

The network is that of nbs/post_training/05_without_training.ipynb, trained by the page's own cells. bench/methods.json
holds, for each method, the error of the logits of images that were not used, relative to their power, and the seconds
of the processor. It takes about three minutes; what is done already is not done again, and two processes work."""
import copy
import time
from pathlib import Path
import torch
from jobs import names_of, run
import shok_nb as R

TABLE = Path(__file__).with_name('methods.json')
PAGE = Path(__file__).parents[1]/'nbs'/'post_training'/'05_without_training.ipynb'
CELLS = 'imports','network'                                 # their ids
METHODS = 'nearest','gptq','descent','gptq+descent','adaround','flexround','signround','ste'
BITS = 2,3,4,6

def row_of(bits):
    "Errors and seconds of all methods for so many bits."
    torch.set_num_threads(1)
    p = names_of(PAGE, CELLS)
    floats,batch,test = p['network'],p['train_x'][:256],p['test_x']
    with torch.no_grad(): wanted = floats(test)
    def off(model):
        with torch.no_grad(): apart = (model(test)-wanted).square().sum()/wanted.square().sum()
        return round(10*apart.log10().item(), 2)
    start = copy.deepcopy(floats)
    R.quantize_model_(start, weights=bits, activations=8, calibrate=[batch])
    errors,seconds = {'as calibrated': off(start)},{}
    for method in METHODS:
        model = copy.deepcopy(start)
        begun = time.process_time()
        R.reconstruct_(model, [batch], method)
        seconds[method] = round(time.process_time()-begun, 2)
        errors[method] = off(model)
    return dict(bits=bits, errors=errors, seconds=seconds)

def main():
    "All rows that are not there yet."
    run(__doc__, TABLE, row_of, [(bits,) for bits in BITS], ('bits',), torch=torch.__version__.partition('+')[0])

if __name__ == '__main__': main()
