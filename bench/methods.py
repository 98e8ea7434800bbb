"""Every method of `reconstruct_` on one network and four numbers of bits: the error of the logits, in dB.

    .venv/bin/python bench/methods.py

A network for scikit-learn's digits is trained, that of the page about quantizing without training. bench/methods.json
holds, for each method, the error of the logits of images that were not used, relative to their power, and the seconds
of the processor. It takes about three minutes; what is done already is not done again."""
import copy
import json
import time
from pathlib import Path
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
import shok_nb as R

TABLE = Path(__file__).with_name('methods.json')
METHODS = 'nearest','gptq','descent','gptq+descent','adaround','flexround','signround','ste'
SEED,BITS,BATCH = 0,(2, 3, 4, 6),64

def digits():
    "Half of the images to train with, half to test."
    images,labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8)/16
    return x[::2],torch.tensor(labels)[::2],x[1::2]

def trained(seed, x, y, steps=500):
    "Two convolutions and two linear layers, as on the page about quantizing without training."
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(144, 32), nn.ReLU(), nn.Linear(32, 10))
    opt = torch.optim.Adam(model.parameters(), 4e-3)
    for i in range(steps):
        pick = torch.arange(i*BATCH, (i+1)*BATCH) % len(y)
        loss = F.cross_entropy(model(x[pick]), y[pick])
        opt.zero_grad()
        loss.backward()
        opt.step()
    return model.eval()

def row_of(bits):
    "Errors and seconds of all methods for so many bits."
    x,y,test = digits()
    floats = trained(SEED, x, y)
    with torch.no_grad(): wanted = floats(test)
    def off(model):
        with torch.no_grad(): apart = (model(test)-wanted).square().sum()/wanted.square().sum()
        return round(10*apart.log10().item(), 2)
    start = copy.deepcopy(floats)
    R.quantize_model_(start, weights=bits, activations=8, calibrate=[x[:256]])
    errors,seconds = {'as calibrated': off(start)},{}
    for method in METHODS:
        model = copy.deepcopy(start)
        begun = time.process_time()
        R.reconstruct_(model, [x[:256]], method)
        seconds[method] = round(time.process_time()-begun, 2)
        errors[method] = off(model)
    return dict(bits=bits, errors=errors, seconds=seconds)

def main():
    "All rows that are not there yet."
    torch.set_num_threads(1)
    rows = json.loads(TABLE.read_text('utf-8'))['rows'] if TABLE.exists() else []
    done = {r['bits'] for r in rows}
    for bits in BITS:
        if bits in done: continue
        rows.append(row_of(bits))
        print(rows[-1], flush=True)
        versions = dict(torch=torch.__version__.partition('+')[0])
        TABLE.write_text(json.dumps(dict(versions=versions, rows=rows), indent=1)+'\n', 'utf-8')

if __name__ == '__main__': main()
